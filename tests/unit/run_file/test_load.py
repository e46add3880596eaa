"""Run files: overrides, YAML, paths and presets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from p2pfl.algorithms import ALGORITHMS
from p2pfl.data import AUGMENTATIONS, DATASETS, PARTITIONS
from p2pfl.run_file.load import load
from p2pfl.run_file.yaml_source import RunFileLoader, to_text
from tests.run_file_texts import GOOD, GRAPH_NAMES, TOP, changed, problems, read

pytestmark = pytest.mark.usefixtures("in_tmp_path")


def test_loads_a_valid_file() -> None:
    run = read(GOOD)
    assert (run.name, run.seed, run.rounds, run.peers) == ("good", 1, 3, 4)
    assert run.algorithm is ALGORITHMS["mapl"]
    assert run.hyper == ALGORITHMS["mapl"].Hyper.parse({"warmup": 2})
    assert run.topology.edges == [(0, 1), (0, 3), (1, 2), (2, 3)]
    assert run.partition == PARTITIONS["clusters"].parse({"clusters": 2})
    assert run.loader == DATASETS["digits"]()
    assert run.augmentation == AUGMENTATIONS["none"]()


# ---- --set -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("assignment", "seen"),
    [
        ("rounds=0", "rounds: should be greater than 0 (found 0)"),
        ("algorithm.lr=abc", "algorithm.lr: should be a number (found 'abc')"),
        ("algorithm.lr=", "algorithm.lr: should be a number (found None)"),
        ("algorithm.lr", "expected key=value or section.key=value"),
        ("=3", "expected key=value or section.key=value"),
        ("data..root=3", "expected key=value or section.key=value"),
        ("rounds.more=1", "rounds.more: 'rounds' is not a section"),
        ("algorithm.betas.0=1", "algorithm.betas: should be a list (found {'0': 1})"),
        ("name=[", "name: the value is invalid YAML: '['"),
        ("rounds=0b_", "rounds: the value is invalid YAML: '0b_'"),
        ("sed=3", f"sed: unknown key 'sed'; known: {TOP}; did you mean 'seed'?"),
        ("sections.key=3", f"sections: unknown key 'sections'; known: {TOP}; did you mean 'transport'?"),
        ("graph.degree=3", "graph.degree: unknown key 'degree'; known: allow_disconnected"),
        ("graph=rong", f"graph.name: unknown 'rong'; known: {GRAPH_NAMES}; did you mean 'ring'?"),
        ("device.name=cpu", "device: unknown {'name': 'cpu'}; known: auto, cpu, cuda"),
        ("data.partition.clusters=0", "data.partition.clusters: should be greater than 0 (found 0)"),
    ],
)
def test_invalid_set_is_quoted_as_typed(assignment: str, seen: str) -> None:
    found = problems(GOOD, assignment)
    # Which name is the closest is up to difflib.
    assert [line.partition("; did you mean")[0] for line in found] == [
        f"--set {assignment}: {seen}".partition("; did you mean")[0]
    ]


def test_set_does_not_move_unrelated_problems() -> None:
    text = changed("{name: mapl, warmup: 2}", "mapel")
    assert problems(text, "algorithm.lr=0.1", "seed=3") == [
        f"run.yaml:10: algorithm.name: unknown 'mapel'; known: {', '.join(ALGORITHMS)}; did you mean 'mapl'?"
    ]


def test_set_reaches_sections_named_things_and_absent_keys() -> None:
    run = read(
        GOOD,
        "seed=7",
        "graph=star",
        "data.partition.per_class=[3, 5]",
        "chaos.link.jitter=0.5",
        "algorithm.lr=1e-2",
        "algorithm.betas=[0.1, 0.2]",
        "models=tiny-cnn",
        "models.features=8",
    )
    assert (run.seed, run.file.graph.name, run.file.chaos.link.jitter) == (7, "star", 0.5)
    assert run.partition.to_dict()["per_class"] == [3, 5]
    assert (run.file.models.name, run.file.models.features) == ("tiny-cnn", 8)
    hyper: Any = run.hyper
    assert (hyper.warmup, hyper.lr, hyper.betas) == (2, 0.01, (0.1, 0.2))


def test_last_set_takes_precedence() -> None:
    assert read(GOOD, "rounds=5", "rounds=6").rounds == 6


def test_set_replaces_a_whole_section_and_its_problems() -> None:
    run = read(changed("{name: mapl, warmup: 2}", "{name: mapel, warmpu: 2}"), "algorithm=local")
    assert run.file.algorithm.name == "local"


def test_set_of_a_name_says_that_it_keeps_the_other_keys_of_the_section() -> None:
    [found] = problems(GOOD, "algorithm.name=dpsgd")
    assert found.startswith("run.yaml:10: algorithm.warmup: unknown key 'warmup'; known: ")
    assert found.endswith(
        "; --set algorithm.name=dpsgd keeps the other keys of the file's `algorithm`: --set algorithm=dpsgd, or "
        "--set 'algorithm={name: dpsgd, …}', replaces them"
    )
    [found] = problems(GOOD, "algorithm.name=dpsgd", "algorithm.warmup=3")
    assert "keeps" not in found


# ---- YAML -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E-4", 1e-4),
        ("1.5e-3", 1.5e-3),
        ("1e+1", 10.0),
        ("2.", 2.0),
        (".5", 0.5),
        ("+0.25", 0.25),
        ("3", 3.0),
    ],
)
def test_parses_numbers_as_in_yaml_1_2(text: str, value: float) -> None:
    for run in (read(changed("warmup: 2", f"lr: {text}")), read(GOOD, f"algorithm.lr={text}")):
        hyper: Any = run.hyper
        assert hyper.lr == value
        assert type(hyper.lr) is float


@pytest.mark.parametrize(
    ("text", "value"), [("016", 16), ("089", 89), ("0o17", 15), ("0x1F", 31), ("+012", 12), ("1_000", 1000)]
)
def test_integers_with_leading_zeros_are_decimal(text: str, value: int) -> None:
    assert (read(changed("seed: 1", f"seed: {text}")).seed, read(GOOD, f"seed={text}").seed) == (value, value)


@pytest.mark.parametrize("name", ["016", "089", "0o17", "0x1F", "1:30", "12", "1_0"])
def test_strings_that_look_like_integers_survive_the_run_folder(name: str) -> None:
    for loader in (RunFileLoader, yaml.SafeLoader):
        assert yaml.load(to_text({"name": name, "seed": 16}), loader) == {"name": name, "seed": 16}


def test_numbers_with_a_colon_are_strings() -> None:
    expected = "seed: should be an integer (found '1:30')"
    assert problems(changed("seed: 1", "seed: 1:30")) == [f"run.yaml:2: {expected}"]
    assert problems(GOOD, "seed=1:30") == [f"--set seed=1:30: {expected}"]


def test_off_is_a_string() -> None:
    for run in (read(changed("warmup: 2", "similarity: off")), read(GOOD, "algorithm.similarity=off")):
        hyper: Any = run.hyper
        assert hyper.similarity == "off"


@pytest.mark.parametrize("word", ["true", "yes", "on", "True"])
def test_accepts_yes_no_on_off_for_booleans(word: str) -> None:
    assert read(GOOD + f"global_test: {word}\n").file.global_test is True
    assert read(GOOD + "global_test: no\n").file.global_test is False


@pytest.mark.parametrize("name", ["2026-01-31", "no", "1e-4x", "v1.2_b"])
def test_name_may_look_like_a_date_or_a_boolean(name: str) -> None:
    assert read(changed("name: good", f"name: {name}")).name == name


def test_data_root_expands_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert read(GOOD, "data.root=~/data").file.data.root == Path("/home/somebody/data")
    assert read(GOOD, "data.root=data").file.data.root == Path.cwd() / "data"
    assert read(GOOD).file.data.root is None


def test_paths_are_relative_to_the_run_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    below = Path.cwd() / "below"
    (below / "photos").mkdir(parents=True)
    sets = ["data.root=files", "transport.keys=keys", "data.dataset={name: folder, path: photos}"]
    (below / "run.yaml").write_text(GOOD)
    run = load(Path("below/run.yaml"), sets)
    loader: Any = run.loader
    assert (run.file.data.root, run.file.transport.keys) == (below / "files", below / "keys")
    assert loader.path == below / "photos"
    nested = load(below / "run.yaml", ["data.dataset={name: styles, of: [{name: folder, path: photos}]}"])
    assert nested.loader.files(Path("/root"))[0].is_relative_to(below)
    (Path("kept.yaml")).write_text(run.to_yaml())
    kept = load(Path("kept.yaml"))
    assert kept.resolved() == run.resolved()
    assert kept.config_hash() == run.config_hash()


def test_path_of_a_dataset_that_is_not_beside_the_run_file_is_relative_to_the_root() -> None:
    loader: Any = read(GOOD, "data.dataset={name: npz, path: nowhere.npz}").loader
    assert loader.files(Path("/files")) == (Path("/files/nowhere.npz"),)


def test_config_hash_does_not_depend_on_where_a_dataset_lies() -> None:
    Path("mine.npz").write_bytes(b"")
    beside = read(GOOD, "data.dataset={name: npz, path: mine.npz}")
    elsewhere = read(GOOD, "data.dataset={name: npz, path: /elsewhere/mine.npz}")
    assert beside.config_hash() == elsewhere.config_hash()
    assert beside.config_hash() != read(GOOD, "data.dataset={name: npz, path: yours.npz}").config_hash()


def test_path_in_the_environment_starts_from_the_working_directory() -> None:
    Path("below").mkdir()
    Path("below/run.yaml").write_text(GOOD)
    run = load(Path("below/run.yaml"), environment={"P2PFL_KEYS": "keys"})
    assert run.file.transport.keys == Path.cwd() / "keys"


def test_graph_path_is_relative_to_the_run_file() -> None:
    Path("below").mkdir()
    Path("below/edges.txt").write_text("\ufeff0 1\n1 2\n2 3\n")  # as some editors begin a text file
    Path("below/run.yaml").write_text(changed("graph: ring", "graph: {name: file, path: edges.txt}"))
    assert load(Path("below/run.yaml")).topology.edges == [(0, 1), (1, 2), (2, 3)]


# ---- presets -----------------------------------------------------------------------------------------------


def test_explicit_keys_override_a_preset() -> None:
    paper: Any = read(GOOD).hyper
    official: Any = read(changed("warmup: 2", "preset: official, graph_lr: 0.5, prune: true")).hyper
    assert (paper.preset, paper.temperature, paper.losses, paper.graph_optimizer) == ("default", 0.2, "paper", "sgd")
    assert (official.temperature, official.losses, official.graph_optimizer) == (100.0, "official", "adam")
    assert (official.fresh_optimizer, official.scale_similarity) == (True, True)
    assert (official.graph_lr, official.prune) == (0.5, True)
