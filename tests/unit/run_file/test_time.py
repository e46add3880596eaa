"""The section ``time`` of a run file: its forms, its files, and errors that name file, line and key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from p2pfl.errors import RunFileError
from p2pfl.run_file.load import from_dict, load
from p2pfl.run_file.run import Run
from p2pfl.run_folder.new_run import create
from tests.conftest import tree

MATRIX = "0.02,40,-0.5\n50,0.01,-0.5\n-0.5,30,0.03\n"

Problem = Callable[[dict[str, Any]], str]


@pytest.fixture
def problem(tmp_path: Path) -> Problem:
    """Return the error of a run file with this section, whose relative paths start from ``tmp_path``."""

    def problem(time: dict[str, Any]) -> str:
        file = tmp_path / "run.yaml"
        file.write_text(yaml.safe_dump({**tree(), "time": time}, sort_keys=False))
        with pytest.raises(RunFileError) as raised:
            load(file)
        return str(raised.value).removeprefix(f"{tmp_path}/")

    return problem


def latencies(run: Run, of: int) -> list[float]:
    assert run.file.time is not None
    latency = run.file.time.network.latencies(run.peers, run.seed)
    return [latency(of, peer) for peer in range(run.peers)]


@pytest.mark.parametrize(
    ("time", "text"),
    [
        ({"devices": {"speed": 0}}, "time.devices.speed: should be greater than 0 (found 0)"),
        ({"devices": {"speeds": 1e9}}, "time.devices.speeds: unknown key 'speeds'; known: speed, lognormal, file"),
        ({"devices": {"speed": 1e9, "lognormal": {}}}, "time.devices: set only one of speed, lognormal, file; found"),
        ({"devices": {"lognormal": {"ratio": 0.5}}}, "time.devices.lognormal.ratio: should be greater than or equal"),
        ({"network": {"bandwidth": "fast"}}, "time.network.bandwidth: should be a number of bytes per second (found"),
        ({"network": {"places": "drawn"}}, "time.network: places are those of a matrix; add one, or remove places"),
        ({"network": {"latency": 1, "matrix": "m.csv"}}, "time.network: set only one of latency, matrix; found"),
        ({"availability": {}}, "time.availability: set trace or churn"),
        ({"availability": {"churn": {"up": 600}}}, "time.availability.churn.down: missing; it has no default"),
        ({"availability": "no.csv"}, "time.availability.trace: {}/no.csv: cannot be read: No such file"),
    ],
)
def test_a_mistake_is_reported_at_its_line(problem: Problem, tmp_path: Path, time: dict[str, Any], text: str) -> None:
    where, _, message = problem(time).partition(": ")
    name, line = where.split(":")
    written = (tmp_path / name).read_text().splitlines()[int(line) - 1].strip()
    key = text.split(":")[0].split(".")[-1]
    assert written.startswith((f"{key}:", "availability:", "churn:"))
    assert message.startswith(text.replace("{}", str(tmp_path)))


@pytest.mark.parametrize(
    ("time", "content", "text"),
    [
        ("devices.file", "0,1e9\n", "x.csv:1: the first line should be peer,speed"),
        ("devices.file", "peer,speed\n0,1e9\n1,1e9\n3,1e9\n", "x.csv: no speed of peer 2 of 4 peers"),
        ("devices.file", "peer,speed\n0,1e9\n9,1e9\n", "x.csv:3: no peer 9; the 4 peers are 0 to 3"),
        ("devices.file", "peer,speed\n0,fast\n", "x.csv:2: expected numbers, got '0,fast'"),
        ("devices.file", "peer,speed\n0,-1\n", "x.csv:2: a speed should be positive, got -1"),
        ("devices.file", "peer,speed\n0,1,2\n", "x.csv:2: expected 2 columns, peer,speed; got 3"),
        ("network.matrix", "", "x.csv: no latency"),
        ("network.matrix", "1,2\n3\n", "x.csv: line 2 has 1 columns, but there are 2 lines"),
        ("network.matrix", "-1\n", "x.csv: no latency"),
        ("availability.trace", "peer,down,up\n0,5,4\n", "x.csv:2: down should be before up, and both after the last"),
        ("availability.trace", "peer,down,up\n0,5,9\n0,8,10\n", "time of peer 0, 9"),
        ("availability.trace", "peer,down,up\n0,5,\n", "x.csv:2: expected numbers, got '0,5,'"),
    ],
)
def test_a_mistake_in_a_file_is_reported_with_its_line(
    problem: Problem, tmp_path: Path, time: str, content: str, text: str
) -> None:
    (tmp_path / "x.csv").write_text(content)
    section, key = time.split(".")
    found = problem({section: {key: "x.csv"}})
    assert f"time.{time}: " in found
    assert text in found


def test_latencies_of_a_matrix_are_those_of_the_places_of_peers(tmp_path: Path) -> None:
    (tmp_path / "m.csv").write_text(MATRIX)
    run = from_dict(tree(time={"network": {"matrix": str(tmp_path / "m.csv")}}))
    # Peer 3 is in the first place again. From 0 to 2, nothing was measured, nor back: the median of the others.
    assert latencies(run, 0) == pytest.approx([2e-5, 0.04, 0.03, 2e-5])
    assert latencies(run, 1) == pytest.approx([0.05, 1e-5, 0.03, 0.05])  # from 1 to 2, only the way back was measured


def test_places_are_drawn_without_repetition_from_the_seed(tmp_path: Path) -> None:
    (tmp_path / "m.csv").write_text("\n".join(",".join(["1"] * row + ["0"] + ["1"] * (9 - row)) for row in range(10)))
    network = {"matrix": str(tmp_path / "m.csv"), "places": "drawn"}
    run = from_dict(tree(time={"network": network}))
    assert latencies(run, 2) == pytest.approx([0.001, 0.001, 0.0, 0.001])


def test_a_run_folder_keeps_copies_of_the_files(tmp_path: Path) -> None:
    (tmp_path / "s.csv").write_text("peer,speed\n" + "".join(f"{peer},{peer + 1}\n" for peer in range(4)))
    (tmp_path / "t.csv").write_text("peer,down,up\n2,5,7\n2,7,9\n")
    time = {"devices": {"file": str(tmp_path / "s.csv")}, "availability": str(tmp_path / "t.csv")}
    folder = create(from_dict(tree(time=time)), tmp_path / "run")
    for name in ("s.csv", "t.csv"):
        (tmp_path / name).unlink()
    again = load(folder.run_file).file.time
    assert again is not None
    assert again.devices.speeds(4, 0) == [1, 2, 3, 4]
    assert again.availability is not None
    assert again.availability.intervals(4) == [[], [], [(5, 7), (7, 9)], []]


def test_other_seconds_are_no_other_run() -> None:
    """Peers over sockets ignore the section, so they need not agree on it."""
    assert from_dict(tree(time={"devices": {"speed": 5}})).config_hash() == from_dict(tree()).config_hash()
