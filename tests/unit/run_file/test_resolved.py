"""Resolved run files and the config hash."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from p2pfl.algorithms import ALGORITHMS
from p2pfl.errors import RunFileError
from p2pfl.graphs import GRAPHS
from p2pfl.run_file.load import load
from p2pfl.run_folder.new_run import create
from tests.run_file_texts import GOOD, TOP, changed, hyper_names, read

pytestmark = pytest.mark.usefixtures("in_tmp_path")


@pytest.mark.exhaustive
@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
@pytest.mark.parametrize("graph", ["torus", "{name: regular, degree: 2}", "{name: file, path: e.txt}", "bridge"])
def test_resolved_file_gives_an_equal_run(algorithm: str, graph: str, tmp_path: Path) -> None:
    Path("e.txt").write_text("0 1\n1 2\n2 3\n")
    text = changed("graph: ring", f"graph: {graph}").replace("{name: mapl, warmup: 2}", algorithm)
    run = read(text.replace("tiny4", "tiny-cnn"))
    elsewhere = tmp_path / "elsewhere" / "run.yaml"
    elsewhere.parent.mkdir()
    elsewhere.write_text(run.to_yaml())
    again = load(elsewhere)
    assert again.resolved() == run.resolved()
    assert again.config_hash() == run.config_hash()
    assert again.hyper == run.hyper
    assert again.topology == run.topology
    assert again.to_yaml() == run.to_yaml()


def test_resolved_file_of_a_preset_gives_an_equal_run() -> None:
    run = read(changed("warmup: 2", "preset: official, similarity: off, graph_lr: 1e-7"))
    again = read(run.to_yaml())
    assert again.hyper == run.hyper
    assert again.config_hash() == run.config_hash()


@pytest.mark.parametrize("path", [None, "mine", "peers"])
def test_a_folder_of_images_is_the_same_in_the_run_folder(tmp_path: Path, path: str | None) -> None:
    """Also if that has an entry of the same name."""
    file = tmp_path / "run.yaml"
    dataset = {"name": "folder", **({} if path is None else {"path": path})}
    data = {"dataset": dataset, "root": str(tmp_path / "images")}
    file.write_text(yaml.safe_dump({"name": "x", "rounds": 1, "peers": 2, "algorithm": "local", "data": data}))
    run = load(file)
    folder = create(run, tmp_path / "run")
    assert (folder.root / "peers").is_dir()
    again = load(folder.run_file)
    assert again.to_yaml() == run.to_yaml()
    assert again.config_hash() == run.config_hash()


def test_resolved_file_lists_every_key() -> None:
    resolved = read(GOOD).resolved()
    assert ", ".join(resolved) == TOP.replace("codec, adversaries, ", "").replace(
        "synchrony, ", ""
    )  # written only if given
    assert ", ".join(resolved["algorithm"]) == f"name, {hyper_names('mapl')}"
    assert resolved["graph"] == {"name": "ring", **GRAPHS["ring"]().to_dict()}


CHANGES: Sequence[str] = (
    "seed=2",
    "rounds=4",
    "peers=5",
    "joins_at={1: 2}",
    "graph=line",
    "data.dataset=mnist",
    "data.partition.per_class=7",
    "data.augment=mapl",
    "models=tiny-cnn",
    "models.features=8",
    "algorithm.lr=0.5",
    "algorithm.prune=false",
    "algorithm.preset=official",
    "threads=2",
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("assignment", CHANGES)
def test_config_hash_changes_with_every_input_of_the_computation(assignment: str) -> None:
    assert read(GOOD, assignment).config_hash() != read(GOOD).config_hash()


@pytest.mark.parametrize(
    "assignment",
    [
        "name=other",
        "out=/elsewhere",
        "transport.deadline=5",
        "chaos.kill={times: 2}",
        "transport.keys=/elsewhere",
        "transport={host: 0.0.0.0, insecure: true}",
        "eval_every=2",
        "slots=3",
        "device=auto",
        "gpu.peers_per_gpu=4",
        "checkpoint_every=1",
        "data.root=/data",
        "data.download=false",
        "algorithm.lr=0.0001",  # the default
        "graph.allow_disconnected=false",
    ],
)
def test_config_hash_ignores_local_keys_and_explicit_defaults(assignment: str) -> None:
    assert read(GOOD, assignment).config_hash() == read(GOOD).config_hash()


def test_config_hashes_of_different_runs_differ() -> None:
    assert len({read(GOOD, assignment).config_hash() for assignment in CHANGES}) == len(CHANGES)


@pytest.mark.parametrize("text", ["2e4", "1.5e3", "off", "no", "null", "2026-01-01"])
def test_a_string_that_looks_like_something_else_stays_a_string(text: str, tmp_path: Path) -> None:
    """Also for those that read run.yaml with another YAML parser."""
    run = read(GOOD, f"name='{text}'")
    assert run.name == text
    (tmp_path / "run.yaml").write_text(run.to_yaml())
    assert load(tmp_path / "run.yaml").name == yaml.safe_load(run.to_yaml())["name"] == text


def test_a_home_folder_that_does_not_exist_is_an_error_at_its_key() -> None:
    with pytest.raises(RunFileError, match=r"out: .*'~nobody-here/runs': ~nobody-here is not the home folder"):
        read(GOOD, "out=~nobody-here/runs")
    with pytest.raises(RunFileError, match=r"data.root: .*~nobody-here is not the home folder"):
        read(GOOD, "data.root=~nobody-here")


def test_the_home_folder_is_found_in_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    run = read(GOOD, "out=~/runs").file
    assert run.out == Path("/home/someone/runs")
    graph = GRAPHS["file"].parse({"path": "~/edges.txt"})
    assert graph.files == (Path("/home/someone/edges.txt"),)
    trace = GRAPHS["trace"].parse({"path": "~/trace.csv"})
    assert trace.files == (Path("/home/someone/trace.csv"),)
