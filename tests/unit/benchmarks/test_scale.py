"""The model of what launches need, what it is fitted to, and the page that is written from it."""

from __future__ import annotations

import json
import math
import os
import random
import socket
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scale import __main__ as command
from benchmarks.scale import page, snapshot
from benchmarks.scale.launches import FIT_PEERS, LAUNCHES
from benchmarks.scale.limits import Limits, first, of_neighbors, of_peers
from benchmarks.scale.model import QUANTITIES, Model, Size, busy_seconds, least_squares, quietest
from p2pfl.run_file.load import from_dict

CPU = {"round": 0.004, "MB": 0.003, "message": 0.0008, "remote MB": 0.002, "second": 0.0015}


def record(peers: int, degree: int, hosts: int, size: float, use: str = "fit", noise: float = 0.0) -> dict[str, Any]:
    """Return a record of a launch whose figures follow known constants."""
    chance = random.Random(f"{peers} {degree} {hosts} {size}")
    launch = Size(peers, degree, hosts, size).record()
    remote, seconds = launch["messages"]["remote"], chance.uniform(0.1, 3.0)
    cpu = CPU["round"] + CPU["MB"] * size + CPU["message"] * degree + CPU["remote MB"] * remote * size
    cpu = (cpu + CPU["second"] * seconds) * (1 + noise * chance.uniform(-1, 1))
    private = 18e6 + 1e5 * degree + 2e6 * (hosts > 1) + 1.5e6 * size + 2e6 * remote * size
    peer = {"connections": 2.0 * degree, "descriptors": 35 + 6.0 * degree, "threads": 5 + 3.0 * (hosts > 1)}
    peer |= {"private": private, "cpu": 12 * cpu + 0.05 + 0.001 * degree + 0.0005 * 4 * seconds}
    on_host = {"pss": 3.8e8 + peers / hosts * private, "peers": peers / hosts, "warm_cpu": 2 + 0.01 * peers / hosts}
    return {
        **launch,
        "name": f"{peers} {degree} {hosts} {size}",
        "use": use,
        "rounds": 12,
        "seconds": {"ready": 4 * seconds, "round": seconds},
        "cpu": {"round": cpu},
        "peer": peer,
        "host": [on_host] * hosts,
        "launcher": {"cpu_ready": 0.1 + 0.002 * peers + 0.2 * (hosts - 1)},
        "machine": {"cores": 2},
    }


def records(noise: float = 0.0) -> list[dict[str, Any]]:
    sizes = [(16, 4, 1), (32, 2, 1), (32, 16, 1), (64, 8, 1), (128, 4, 1), (32, 4, 2), (64, 4, 4), (128, 8, 2)]
    return [record(*each, size, noise=noise) for each in sizes for size in (0.144, 2.4)]


# ---- the fit -----------------------------------------------------------------------------------------------


def test_recovers_the_constants_of_exact_figures() -> None:
    model = Model(records())
    found = model.fits["cpu"].constants
    assert found == pytest.approx(
        {
            **dict.fromkeys(found, 0.0),
            "round": CPU["round"],
            "MB of the body": CPU["MB"],
            "message": CPU["message"],
            "MB to another host": CPU["remote MB"],
            "second": CPU["second"],
        },
        abs=1e-9,
    )
    assert model.fits["descriptors"].constants == pytest.approx({"peer": 35, "neighbor": 6})
    assert model.fits["shared"].constants == pytest.approx({"host": 3.8e8})
    assert model.fits["start"].constants == pytest.approx({"peer": 0.05, "neighbor": 0.001, "second": 0.0005})
    unseen = record(4000, 12, 8, 1.0)
    for name in model.fits:
        assert model(name, unseen)[0] == pytest.approx(QUANTITIES[name].value(unseen)), name


def test_intervals_hold_the_constants_of_noisy_figures() -> None:
    fit = Model(records(noise=0.05)).fits["cpu"]
    for term, true in {"message": CPU["message"], "second": CPU["second"]}.items():
        assert abs(fit.constants[term] - true) <= fit.half(term)
        assert 0 < fit.half(term) < 2 * true
    unseen = record(256, 8, 1, 0.144)
    predicted, half = Model(records(noise=0.05))("cpu", unseen)
    assert abs(predicted - unseen["cpu"]["round"]) <= half


def test_held_out_launches_do_not_influence_the_fit() -> None:
    absurd = {**record(500, 4, 1, 0.144, use="held out"), "cpu": {"round": 1e6}, "launcher": {"cpu_ready": 1e9}}
    with_them, without = Model([*records(), absurd]), Model(records())
    assert {name: fit.constants for name, fit in with_them.fits.items()} == {
        name: fit.constants for name, fit in without.fits.items()
    }


def test_constants_are_not_negative() -> None:
    rows = [{"one": 1.0, "n": float(n)} for n in range(5)]
    assert least_squares(rows, [5.0, 4.9, 5.1, 4.9, 4.8]).constants.keys() == {"one"}
    with pytest.raises(ValueError, match="2 records do not determine the constants one, n"):
        least_squares([rows[0], rows[0]], [1.0, 1.0])


def test_takes_the_turn_with_the_least_cpu_of_each_launch() -> None:
    turns = [
        {**record(peers, 4, 1, 0.144), "cpu": {"round": cpu}} for peers, cpu in ((16, 3.0), (32, 1.0), (16, 2.0))
    ]
    assert quietest(turns) == [turns[2], turns[1]]


def test_waiting_peers_can_take_all_cores() -> None:
    assert busy_seconds(work=4.0, idle=0.0, cores=2) == 2.0
    assert busy_seconds(work=4.0, idle=1.0, cores=2) == 4.0
    assert math.isinf(busy_seconds(work=4.0, idle=2.0, cores=2))


# ---- what breaks first -------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_limits_are_reached_where_the_model_says() -> None:
    model, limits = Model(records()), Limits(memory=24e9, tasks=32_768, round_seconds=math.inf)
    by_name = {limit.what: limit for limit in of_peers(model, Size(2), limits)}
    most = by_name["memory"].most
    assert model.host(Size(most))["memory"] <= 24e9 < model.host(Size(most + 1))["memory"]
    assert by_name["processes and threads"].most == 32_768 // 5
    assert list(first(model, Size(most), limits)) == []
    assert "memory" in first(model, Size(most + 1), limits)
    (tightest, *_) = of_neighbors(model, Limits(descriptors=1024))
    assert (tightest.what, tightest.most) == ("descriptors of a process", (1024 - 35) // 6)


# ---- what is measured --------------------------------------------------------------------------------------


def test_the_fit_sees_only_small_launches() -> None:
    assert len({launch.name for launch in LAUNCHES}) == len(LAUNCHES)
    assert {launch.peers for launch in LAUNCHES if launch.use == "fit"} == {16, 32, 64, FIT_PEERS}
    assert max(launch.peers for launch in LAUNCHES) == 500
    assert {launch.hosts for launch in LAUNCHES} == {1, 2, 4, 8}


@pytest.mark.parametrize("launch", [launch for launch in LAUNCHES if launch.peers <= 32], ids=lambda each: each.name)
def test_launches_are_valid_runs(launch: Any) -> None:
    topology = from_dict(launch.tree()).topology
    assert {topology.degree(peer) for peer in range(launch.peers)} == {launch.degree}


def test_counts_connections_of_a_process_once() -> None:
    def held() -> dict[str, float]:
        me = os.getpid()
        return snapshot.process(me, snapshot.tcp_states(me), snapshot.unix_sockets(me))

    before = held()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        with other:
            during = held()
    assert during["connections"] - before["connections"] == 2  # both ends are here
    assert during["descriptors"] - before["descriptors"] == 3
    assert during["private"] <= during["pss"] <= during["rss"]
    assert one.fileno() == -1


def test_finds_the_processes_of_a_run_by_their_titles(tmp_path: Path) -> None:
    titles = {
        10: "p2pfl peer 3 /runs/a",
        11: "p2pfl peer 4 /runs/b",
        12: "p2pfl warm /runs/a",
        13: "p2pfl peer 3 /runs/ab",
    }
    for pid, title in titles.items():
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "cmdline").write_bytes(title.encode() + b"\0")
    found = snapshot.find([Path("/runs/a"), Path("/runs/b")], tmp_path)
    assert found.peers == {Path("/runs/a"): {3: 10}, Path("/runs/b"): {4: 11}}
    assert found.warm == {Path("/runs/a"): 12}


def test_counts_files_and_their_kinds(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    for name in ("journal/0", "checkpoint.pt", "peer.log"):
        (tmp_path / name).write_bytes(bytes(8192))
    found = snapshot.files(tmp_path)
    assert found["files"] == 3
    assert found["journal"] == found["checkpoints"] > 0
    assert found["disk"] >= found["journal"] + found["checkpoints"]


# ---- the page ----------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_the_page_has_the_figures() -> None:
    launched, pairs, clock = map(command.read, (command.LAUNCHED, command.PAIRS, command.CLOCK))
    text = command.PAGE.read_text(encoding="utf-8")
    assert page.write(text, page.blocks(launched, pairs, clock)) == text


def test_a_page_without_all_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="each of these blocks once: one, two"):
        page.write("<!-- scale: begin one -->\n<!-- scale: end -->", {"one": "", "two": ""})


def test_records_are_lines_of_json(tmp_path: Path) -> None:
    command.append(tmp_path / "new" / "records.jsonl", {"name": "a"})
    command.append(tmp_path / "new" / "records.jsonl", {"name": "b"})
    assert command.read(tmp_path / "new" / "records.jsonl") == [{"name": "a"}, {"name": "b"}]
    assert json.loads((tmp_path / "new" / "records.jsonl").read_text().splitlines()[1]) == {"name": "b"}
