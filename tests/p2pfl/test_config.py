"""Run files: what a user sees for each kind of mistake, where values come from, and what a digest covers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from p2pfl.algorithms import ALGORITHMS
from p2pfl.config import Run, Transport, from_dict, load
from p2pfl.data import AUGMENTATIONS, DATASETS, PARTITIONS
from p2pfl.errors import DataError, RunFileError
from p2pfl.topology import GRAPHS

GOOD = """\
name: good
seed: 1
rounds: 3
peers: 4
graph: ring
data:
  dataset: digits
  partition: {name: clusters, clusters: 2}
models: tiny4
algorithm: {name: mapl, warmup: 2}
device: cpu
"""

TOP = (
    "name, seed, rounds, peers, graph, data, models, algorithm, joins_at, transport, chaos, device, gpu, threads, "
    "slots, eval_every, global_test, masked_test, checkpoint_every, out"
)
GRAPH_NAMES = (
    "complete, ring, line, star, torus, regular, erdos-renyi, small-world, barabasi-albert, bridge, edges, file"
)
MODEL_NAMES = (
    "tiny4, mapl4, htfe2, htfe3, htfe4, htfe8, htfe9, htc4, htfe8-htc4, htcnn8, dfml-h0, dfml-h1-cnn, "
    "dfml-h1-resnet, dfml-h1-vit, dfml-h2-cnn, dfml-h2-efficientnet, and the members of each "
    "(`p2pfl models` lists them)"
)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def read(text: str, *sets: str) -> Run:
    """A run file called run.yaml, with these --set flags."""
    Path("run.yaml").write_text(text, encoding="utf-8")
    return load(Path("run.yaml"), sets)


def complaints(text: str, *sets: str) -> list[str]:
    """What the user sees, line by line."""
    with pytest.raises(RunFileError) as info:
        read(text, *sets)
    return str(info.value).splitlines()


def changed(old: str, new: str) -> str:
    assert GOOD.count(old) == 1
    return GOOD.replace(old, new)


def hyper_names(name: str) -> str:
    return ", ".join(ALGORITHMS[name].Hyper.known())


def test_a_good_file_is_read() -> None:
    run = read(GOOD)
    assert (run.name, run.seed, run.rounds, run.peers) == ("good", 1, 3, 4)
    assert run.algorithm is ALGORITHMS["mapl"]
    assert run.hyper == ALGORITHMS["mapl"].Hyper.parse({"warmup": 2})
    assert run.topology.edges == [(0, 1), (0, 3), (1, 2), (2, 3)]
    assert run.partition == PARTITIONS["clusters"].parse({"clusters": 2})
    assert run.source == DATASETS["digits"]()
    assert run.augmentation == AUGMENTATIONS["none"]()


# ---- mistakes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "seen"),
    [
        pytest.param(
            "{name: mapl, warmup: 2}",
            "mapel",
            f"run.yaml:10: algorithm.name: unknown 'mapel'; known: {', '.join(ALGORITHMS)}; did you mean 'mapl'?",
            id="unknown algorithm",
        ),
        pytest.param(
            "graph: ring",
            "graph: {name: rings}",
            f"run.yaml:5: graph.name: unknown 'rings'; known: {GRAPH_NAMES}; did you mean 'ring'?",
            id="unknown graph",
        ),
        pytest.param(
            "dataset: digits",
            "dataset: letters",
            "run.yaml:7: data.dataset.name: unknown 'letters'; known: " + ", ".join(DATASETS),
            id="unknown dataset",
        ),
        pytest.param(
            "models: tiny4",
            "models: tiny5",
            f"run.yaml:9: models.name: unknown 'tiny5'; known: {MODEL_NAMES}; did you mean 'tiny4'?",
            id="unknown models",
        ),
        pytest.param(
            "device: cpu",
            "device: gpu",
            "run.yaml:11: device: unknown 'gpu'; known: auto, cpu, cuda; did you mean 'cpu'?",
            id="unknown device",
        ),
        pytest.param(
            "warmup: 2",
            "preset: offical",
            "run.yaml:10: algorithm.preset: unknown 'offical'; known: paper, official; did you mean 'official'?",
            id="unknown preset",
        ),
        pytest.param(
            "seed: 1",
            "sed: 1",
            f"run.yaml:2: sed: unknown key 'sed'; known: {TOP}; did you mean 'seed'?",
            id="unknown key",
        ),
        pytest.param(
            "  dataset: digits",
            "  dataset: digits\n  rot: x",
            "run.yaml:8: data.rot: unknown key 'rot'; known: dataset, partition, augment, root, download; "
            "did you mean 'root'?",
            id="unknown key in data",
        ),
        pytest.param(
            "models: tiny4",
            "models: {name: tiny4, width: 3}",
            "run.yaml:9: models.width: unknown key 'width'; known: name, features",
            id="unknown key in models",
        ),
        pytest.param(
            "device: cpu",
            "transport:\n  give_upp: 1",
            "run.yaml:12: transport.give_upp: unknown key 'give_upp'; known: "
            f"{', '.join(Transport.model_fields)}; did you mean 'give_up'?",
            id="unknown key in transport",
        ),
        pytest.param(
            "device: cpu",
            "gpu: {peers: 1}",
            "run.yaml:11: gpu.peers: unknown key 'peers'; known: peers_per_gpu, memory_fraction, mps",
            id="unknown key in gpu",
        ),
        pytest.param(
            "warmup: 2",
            "warmpu: 2",
            f"run.yaml:10: algorithm.warmpu: unknown key 'warmpu'; known: {hyper_names('mapl')}; "
            "did you mean 'warmup'?",
            id="unknown key in algorithm",
        ),
        pytest.param(
            "graph: ring",
            "graph: {name: ring, degree: 2}",
            "run.yaml:5: graph.degree: unknown key 'degree'; known: allow_disconnected",
            id="unknown key in graph",
        ),
        pytest.param(
            "clusters: 2",
            "cluters: 2",
            f"run.yaml:8: data.partition.cluters: unknown key 'cluters'; known: "
            f"{', '.join(PARTITIONS['clusters'].known())}; did you mean 'clusters'?",
            id="unknown key in partition",
        ),
        pytest.param("rounds: 3\n", "", "run.yaml: rounds: missing; it has no default", id="missing key"),
        pytest.param(
            "  dataset: digits\n",
            "",
            "run.yaml:6: data.dataset: missing; it has no default",
            id="missing key in a section",
        ),
        pytest.param(
            "name: mapl, ",
            "",
            "run.yaml:10: algorithm.name: missing; it has no default",
            id="missing name of a named thing",
        ),
        pytest.param(
            "graph: ring",
            "graph: {name: regular}",
            "run.yaml:5: graph.degree: missing; it has no default",
            id="missing parameter",
        ),
        pytest.param(
            "rounds: 3",
            "rounds: six",
            "run.yaml:3: rounds: should be a whole number (found 'six')",
            id="word for int",
        ),
        pytest.param(
            "rounds: 3", "rounds: 3.5", "run.yaml:3: rounds: should be a whole number (found 3.5)", id="float for int"
        ),
        pytest.param(
            "rounds: 3", "rounds: [3]", "run.yaml:3: rounds: should be a whole number (found [3])", id="list for int"
        ),
        pytest.param(
            "rounds: 3", "rounds:", "run.yaml:3: rounds: should be a whole number (found None)", id="nothing"
        ),
        pytest.param(
            "name: good",
            "name: 20",
            "run.yaml:1: name: should be text; quotes make text of it (found 20)",
            id="int for text",
        ),
        pytest.param(
            "warmup: 2",
            "lr: fast",
            "run.yaml:10: algorithm.lr: should be a number (found 'fast')",
            id="word for number",
        ),
        pytest.param(
            "warmup: 2",
            "cgl: maybe",
            "run.yaml:10: algorithm.cgl: should be true or false (found 'maybe')",
            id="bool",
        ),
        pytest.param(
            "warmup: 2",
            "betas: 0.5",
            "run.yaml:10: algorithm.betas: should be a list (found 0.5)",
            id="number for list",
        ),
        pytest.param(
            "warmup: 2",
            "betas: [0.5, 0.9, 0.9]",
            "run.yaml:10: algorithm.betas: should have at most 2 items (found [0.5, 0.9, 0.9])",
            id="long list",
        ),
        pytest.param(
            "warmup: 2",
            "betas: [0.5, 1.5]",
            "run.yaml:10: algorithm.betas.1: should be less than 1 (found 1.5)",
            id="item of a list",
        ),
        pytest.param(
            "device: cpu",
            "transport: [1]",
            "run.yaml:11: transport: should be a mapping of keys to values (found [1])",
            id="list for section",
        ),
        pytest.param(
            "graph: ring",
            "graph: 3",
            "run.yaml:5: graph: should be a name, or a mapping with a name and its parameters (found 3)",
            id="number for a named thing",
        ),
        pytest.param(
            "models: tiny4",
            "models: [tiny-cnn]",
            "run.yaml:9: models: should be a name, or a mapping with a name and its parameters (found ['tiny-cnn'])",
            id="list for models",
        ),
        pytest.param(
            "rounds: 3", "rounds: -3", "run.yaml:3: rounds: should be greater than 0 (found -3)", id="negative rounds"
        ),
        pytest.param(
            "seed: 1",
            "seed: -1",
            "run.yaml:2: seed: should be greater than or equal to 0 (found -1)",
            id="negative seed",
        ),
        pytest.param(
            "device: cpu",
            "transport: {deadline: .inf}",
            "run.yaml:11: transport.deadline: should be a finite number (found inf)",
            id="infinite",
        ),
        pytest.param(
            "device: cpu",
            "transport:\n  host: 0.0.0.0",
            "run.yaml:12: transport.host: '0.0.0.0' is heard beyond this host: make keys with `p2pfl keys new 4` and "
            "give transport.keys their folder; or do without, with transport.insecure: true",
            id="beyond this host without keys",
        ),
        pytest.param(
            "device: cpu",
            "transport: {keys: keys, insecure: true}",
            "run.yaml:11: transport.insecure: there are transport.keys too: leave out one of them",
            id="keys and insecure",
        ),
        pytest.param(
            "device: cpu",
            "transport: {public_keys: {0: x}}",
            "run.yaml:11: transport.public_keys: nothing without transport.keys, the folder with the private keys",
            id="public keys only",
        ),
        pytest.param(
            "device: cpu",
            f"transport: {{keys: k, public_keys: {{0: {'a' * 64}, 1: {'b' * 64}, 2: {'b' * 64}, 3: {'c' * 64}}}}}",
            "run.yaml:11: transport.public_keys: peers 1 and 2 have the same key; either could pose as the other",
            id="a key of two",
        ),
        pytest.param(
            "device: cpu",
            "transport: {keys: keys, public_keys: {0: 12}}",
            "run.yaml:11: transport.public_keys.0: should be text; quotes make text of it (found 12)",
            id="no keys",
        ),
        pytest.param(
            "warmup: 2",
            "lr: .nan",
            "run.yaml:10: algorithm.lr: should be a finite number (found nan)",
            id="not a number",
        ),
        pytest.param(
            "name: good",
            "name: a b/c",
            "run.yaml:1: name: should be made of letters, digits, '.', '_' and '-', and not begin with one of these "
            "three (found 'a b/c')",
            id="name that is no file name",
        ),
        pytest.param(
            "graph: ring",
            "graph: {name: edges, edges: [[0, 1], [2, 3]]}",
            "run.yaml:5: graph: not connected; it has the components 0 1 | 2 3; add edges, or accept this with "
            "allow_disconnected: true",
            id="disconnected graph",
        ),
        pytest.param(
            "graph: ring",
            "graph: {name: edges, edges: [[0, 4]]}",
            "run.yaml:5: graph: edge 0-4: no peer 4; the 4 peers are 0 to 3",
            id="edge to nobody",
        ),
        pytest.param(
            "graph: ring",
            "graph: {name: file, path: no.txt}",
            "run.yaml:5: graph: no.txt: cannot be read: No such file or directory",
            id="graph file missing",
        ),
        pytest.param(
            "{name: mapl, warmup: 2}",
            "dpsgd",
            "run.yaml:9: models.name: dpsgd mixes whole models, so all peers need one architecture; 'tiny4' has "
            "tiny-cnn, tiny-mixer, tiny-residual, tiny-wide: name one of these instead",
            id="homogeneous algorithm with a mixed group",
        ),
        pytest.param(
            "models: tiny4",
            "models: {name: htc4, features: 64}",
            "run.yaml:9: models.name: mapl compares or mixes the weights of linear heads; those of "
            "htfe-resnet34+fc128, htfe-resnet34+fc256, htfe-resnet34+fc512 have several layers: "
            "name models without '+'",
            id="linear heads asked of heads with several layers",
        ),
        pytest.param(
            "models: tiny4",
            "models: dfml-h1-cnn",
            "run.yaml:9: models.features: mapl exchanges what depends on the number of features, and those of "
            "'dfml-h1-cnn' each have their own: give all the same, e.g. 512",
            id="equal features asked of backbones with their own",
        ),
        pytest.param(
            "{name: mapl, warmup: 2}",
            "{name: local, lr: 0}",
            "run.yaml:10: algorithm.lr: should be greater than 0 (found 0)",
            id="hyper-parameter out of range",
        ),
        pytest.param(
            "rounds: 3",
            "rounds: 3\nrounds: 4",
            "run.yaml:4: rounds: given twice, first in line 3",
            id="duplicate key",
        ),
        pytest.param(
            "warmup: 2",
            "warmup: 2, warmup: 3",
            "run.yaml:10: algorithm.warmup: given twice, first in line 10",
            id="duplicate key in a section",
        ),
        pytest.param(
            "rounds: 3",
            "rounds: [3",
            "run.yaml:4: not YAML: expected ',' or ']', but got ':'",
            id="not YAML: bracket",
        ),
        pytest.param(
            "rounds: 3", "rounds: a: b", "run.yaml:3: not YAML: mapping values are not allowed here", id="colon"
        ),
        pytest.param(
            "rounds: 3",
            "\trounds: 3",
            r"run.yaml:3: not YAML: found character '\t' that cannot start any token",
            id="tab",
        ),
        pytest.param(
            "rounds: 3", "rounds: *three", "run.yaml:3: not YAML: found undefined alias 'three'", id="alias"
        ),
        pytest.param(
            "rounds: 3",
            "rounds: !!python/name:os.system",
            "run.yaml:3: not YAML: could not determine a constructor for the tag "
            "'tag:yaml.org,2002:python/name:os.system'",
            id="python object",
        ),
        pytest.param(
            "rounds: 3", "---\nrounds: 3", "run.yaml:3: not YAML: but found another document", id="two documents"
        ),
        pytest.param(
            "rounds: 3",
            "rounds: \0",
            "run.yaml: not YAML: unacceptable character #x0000: special characters are not allowed in "
            '"<unicode string>", position 27',
            id="control character",
        ),
        pytest.param("rounds: 3", "3: 3", "run.yaml:3: 3: a key should be text; quotes make text of it", id="key"),
    ],
)
def test_the_message_names_file_line_key_and_what_is_known(old: str, new: str, seen: str) -> None:
    # A run file without rounds is wrong in that respect too.
    expected = [seen] + ["run.yaml: rounds: missing; it has no default"] * (new == "3: 3")
    assert sorted(complaints(changed(old, new))) == sorted(expected)


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n"])
def test_an_empty_file_says_what_a_run_file_needs(text: str) -> None:
    assert complaints(text) == ["run.yaml: empty; a run file gives at least name, rounds, peers, data, algorithm"]


def test_a_list_is_no_run_file() -> None:
    assert complaints("- a\n- b\n") == [
        "run.yaml: no mapping of keys to values; a run file gives at least name, rounds, peers, data, algorithm"
    ]


@pytest.mark.parametrize("text", ["name: &a {b: *a}\n", "[" * 5000], ids=["holds itself", "deep"])
def test_a_bottomless_file_is_refused(text: str) -> None:
    assert complaints(text) == ["run.yaml: nested too deeply"]


def test_a_file_that_cannot_be_read_is_named_with_the_reason() -> None:
    Path("bytes.yaml").write_bytes(b"\xff\xfe\x00")
    for name, reason in (
        ("no.yaml", "No such file or directory"),
        (".", "Is a directory"),
        ("bytes.yaml", "not UTF-8 text"),
    ):
        with pytest.raises(RunFileError) as info:
            load(Path(name))
        assert str(info.value) == f"{name}: cannot be read: {reason}"


def test_all_problems_are_reported_at_once_with_their_lines() -> None:
    text = (
        GOOD.replace("rounds: 3", "rounds: -3")
        .replace("seed: 1", "sed: 1")
        .replace("ring", "rong")
        .replace("digits", "digit")
        .replace("warmup", "warmpu")
    )
    assert complaints(text) == [
        f"run.yaml:2: sed: unknown key 'sed'; known: {TOP}; did you mean 'seed'?",
        "run.yaml:3: rounds: should be greater than 0 (found -3)",
        f"run.yaml:5: graph.name: unknown 'rong'; known: {GRAPH_NAMES}; did you mean 'ring'?",
        f"run.yaml:7: data.dataset.name: unknown 'digit'; known: {', '.join(DATASETS)}; did you mean 'digits'?",
        f"run.yaml:10: algorithm.warmpu: unknown key 'warmpu'; known: {hyper_names('mapl')}; did you mean 'warmup'?",
    ]


@pytest.mark.parametrize(
    ("old", "new", "misspelt"),
    [
        ("rounds: 3", "ronds: 3", "run.yaml:3: ronds"),
        ("dataset: digits", "datset: digits", "run.yaml:7: data.datset"),
        ("graph: ring", "graph: {name: regular, degre: 2}", "run.yaml:5: graph.degre"),
    ],
)
def test_a_key_that_is_misspelt_is_not_missing_too(old: str, new: str, misspelt: str) -> None:
    [complaint] = complaints(changed(old, new))
    assert complaint.startswith(f"{misspelt}: unknown key")
    # Another one that is missing is.
    found = complaints(changed(old, new).replace("peers: 4\n", ""))
    assert found[-1] == "run.yaml: peers: missing; it has no default"


def test_a_broken_named_thing_is_reported_once() -> None:
    assert complaints(changed("graph: ring", "graph: 3") + "out: 3\n") == [
        "run.yaml:5: graph: should be a name, or a mapping with a name and its parameters (found 3)",
        "run.yaml:12: out: should be a path (found 3)",
    ]


def test_problems_of_a_run_that_a_program_made_carry_its_name() -> None:
    with pytest.raises(RunFileError, match=r"^benchmark: rounds: missing; it has no default$"):
        from_dict({**yaml.safe_load(changed("rounds: 3\n", ""))}, where="benchmark")


def test_what_goes_wrong_later_is_blamed_on_its_line() -> None:
    run, mistake = read(GOOD, "data.dataset=mnist"), DataError("there is too little")
    assert str(run.blame("data.partition", mistake)) == "run.yaml:8: data.partition: there is too little"
    assert str(run.blame("data.augment", mistake)) == "run.yaml:6: data.augment: there is too little"
    assert str(run.blame("data.dataset", mistake)) == "--set data.dataset=mnist: data.dataset: there is too little"


# ---- --set -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("assignment", "seen"),
    [
        ("rounds=0", "rounds: should be greater than 0 (found 0)"),
        ("algorithm.lr=abc", "algorithm.lr: should be a number (found 'abc')"),
        ("algorithm.lr=", "algorithm.lr: should be a number (found None)"),
        ("algorithm.lr", "not of the form key=value or section.key=value"),
        ("=3", "not of the form key=value or section.key=value"),
        ("data..root=3", "not of the form key=value or section.key=value"),
        ("rounds.more=1", "rounds.more: rounds is no section"),
        ("algorithm.betas.0=1", "algorithm.betas: should be a list (found {'0': 1})"),
        ("name=[", "name: the value is not YAML: '['"),
        ("rounds=0b_", "rounds: the value is not YAML: '0b_'"),
        ("sed=3", f"sed: unknown key 'sed'; known: {TOP}; did you mean 'seed'?"),
        ("sections.key=3", f"sections: unknown key 'sections'; known: {TOP}; did you mean 'transport'?"),
        ("graph.degree=3", "graph.degree: unknown key 'degree'; known: allow_disconnected"),
        ("graph=rong", f"graph.name: unknown 'rong'; known: {GRAPH_NAMES}; did you mean 'ring'?"),
        ("device.name=cpu", "device: unknown {'name': 'cpu'}; known: auto, cpu, cuda"),
        ("data.partition.clusters=0", "data.partition.clusters: should be greater than 0 (found 0)"),
    ],
)
def test_a_bad_set_is_named_as_the_user_typed_it(assignment: str, seen: str) -> None:
    found = complaints(GOOD, assignment)
    # difflib's taste in nearest names is not ours to test here.
    assert [line.partition("; did you mean")[0] for line in found] == [
        f"--set {assignment}: {seen}".partition("; did you mean")[0]
    ]


def test_a_problem_that_set_does_not_touch_keeps_its_line() -> None:
    text = changed("{name: mapl, warmup: 2}", "mapel")
    assert complaints(text, "algorithm.lr=0.1", "seed=3") == [
        f"run.yaml:10: algorithm.name: unknown 'mapel'; known: {', '.join(ALGORITHMS)}; did you mean 'mapl'?"
    ]


def test_set_reaches_into_sections_named_things_and_what_the_file_leaves_out() -> None:
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


def test_the_last_set_wins() -> None:
    assert read(GOOD, "rounds=5", "rounds=6").rounds == 6


def test_set_replaces_a_whole_section_and_its_mistakes() -> None:
    run = read(changed("{name: mapl, warmup: 2}", "{name: mapel, warmpu: 2}"), "algorithm=local")
    assert run.file.algorithm.name == "local"


# ---- YAML as people write it -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "meant"),
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
def test_a_number_is_read_as_the_number_it_is(written: str, meant: float) -> None:
    for run in (read(changed("warmup: 2", f"lr: {written}")), read(GOOD, f"algorithm.lr={written}")):
        hyper: Any = run.hyper
        assert hyper.lr == meant
        assert type(hyper.lr) is float


def test_off_is_the_switch_that_the_table_of_ablations_calls_off() -> None:
    for run in (read(changed("warmup: 2", "similarity: off")), read(GOOD, "algorithm.similarity=off")):
        hyper: Any = run.hyper
        assert hyper.similarity == "off"


@pytest.mark.parametrize("word", ["true", "yes", "on", "True"])
def test_switches_may_be_written_as_people_write_them(word: str) -> None:
    assert read(GOOD + f"global_test: {word}\n").file.global_test is True
    assert read(GOOD + "global_test: no\n").file.global_test is False


@pytest.mark.parametrize("name", ["2026-01-31", "no", "1e-4x", "v1.2_b"])
def test_a_name_may_look_like_a_date_or_a_switch(name: str) -> None:
    assert read(changed("name: good", f"name: {name}")).name == name


def test_the_folder_of_the_data_may_start_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert read(GOOD, "data.root=~/data").file.data.root == Path("/home/somebody/data")
    assert read(GOOD, "data.root=data").file.data.root == Path.cwd() / "data"
    assert read(GOOD).file.data.root is None


def test_the_path_of_a_graph_file_starts_at_the_run_file() -> None:
    Path("below").mkdir()
    Path("below/edges.txt").write_text("0 1\n1 2\n2 3\n")
    Path("below/run.yaml").write_text(changed("graph: ring", "graph: {name: file, path: edges.txt}"))
    assert load(Path("below/run.yaml")).topology.edges == [(0, 1), (1, 2), (2, 3)]


# ---- presets -----------------------------------------------------------------------------------------------


def test_a_preset_changes_defaults_and_explicit_keys_win_over_it() -> None:
    paper: Any = read(GOOD).hyper
    official: Any = read(changed("warmup: 2", "preset: official, graph_lr: 0.5, prune: true")).hyper
    assert (paper.preset, paper.temperature, paper.losses, paper.graph_optimizer) == ("paper", 0.2, "paper", "sgd")
    assert (official.temperature, official.losses, official.graph_optimizer) == (100.0, "official", "adam")
    assert (official.fresh_optimizer, official.scale_similarity) == (True, True)
    assert (official.graph_lr, official.prune) == (0.5, True)


# ---- resolved files and digests ----------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
@pytest.mark.parametrize("graph", ["torus", "{name: regular, degree: 3}", "{name: file, path: e.txt}", "bridge"])
def test_the_resolved_file_gives_an_equal_run(algorithm: str, graph: str, tmp_path: Path) -> None:
    Path("e.txt").write_text("0 1\n1 2\n2 3\n")
    text = changed("graph: ring", f"graph: {graph}").replace("{name: mapl, warmup: 2}", algorithm)
    run = read(text.replace("tiny4", "tiny-cnn"))
    elsewhere = tmp_path / "elsewhere" / "run.yaml"
    elsewhere.parent.mkdir()
    elsewhere.write_text(run.to_yaml())
    again = load(elsewhere)
    assert again.resolved() == run.resolved()
    assert again.digest() == run.digest()
    assert again.hyper == run.hyper
    assert again.topology == run.topology
    assert again.to_yaml() == run.to_yaml()


def test_the_resolved_file_of_a_preset_gives_an_equal_run() -> None:
    run = read(changed("warmup: 2", "preset: official, similarity: off, graph_lr: 1e-7"))
    again = read(run.to_yaml())
    assert again.hyper == run.hyper
    assert again.digest() == run.digest()


@pytest.mark.parametrize(
    ("joins", "seen"),
    [
        ("{4: 1}", "run.yaml:12: joins_at.4: no peer 4; the 4 peers are 0 to 3"),
        ("{3: 3}", "run.yaml:12: joins_at.3: round 3 never comes: rounds are 0 to 2"),
        ("{0: 1, 1: 1, 2: 2, 3: 1}", "run.yaml:12: joins_at: nobody is there in round 0: leave out those who are"),
        ("{2: 0}", "run.yaml:12: joins_at.2: "),
    ],
)
def test_who_joins_late_must_be_there_and_come_in_time(joins: str, seen: str) -> None:
    (line,) = complaints(f"{GOOD}joins_at: {joins}\n")
    assert line.startswith(seen)


@pytest.mark.parametrize(
    ("chaos", "seen"),
    [
        ("kill: {peer: 4}", "chaos.kill.0.peer: no peer 4; the 4 peers are 0 to 3"),
        ("kill: [{round: 1}, {round: 3}]", "chaos.kill.1.round: round 3 never comes: rounds are 0 to 2"),
        (
            "kill: {round: 1, restrat: true}",
            "chaos.kill.0.restrat: unknown key 'restrat'; known: peer, round, times, ",
        ),
        ("pause: {round: 1}", "chaos.pause.0.seconds: missing; it has no default"),
        ("straggler: {peer: 9, factor: 2}", "chaos.straggler.0.peer: no peer 9"),
        ("straggler: {peer: 1, factor: 0.5}", "chaos.straggler.0.factor: should be greater than 1"),
        ("link: {loss: 1}", "chaos.link.loss: should be less than 1"),
        ("link: {delays: 1}", "chaos.link.delays: unknown key 'delays'; known: delay, jitter, loss, bandwidth"),
        ("partition: {groups: [[0], [1, 4]], round: 0, rounds: 1}", "chaos.partition.0.groups: no peer 4"),
        ("partition: {groups: [[0, 1], [1]], round: 0, rounds: 1}", "chaos.partition.0.groups: a peer can be in one"),
        ("partition: {groups: [[0], [1]], round: 0}", "chaos.partition.0: give rounds or seconds, and not both"),
        ("partition: {groups: [[0], [1]], round: 7, seconds: 1}", "chaos.partition.0.round: round 7 never comes"),
    ],
)
def test_what_is_wrong_with_the_chaos_is_said_by_its_place(chaos: str, seen: str) -> None:
    (line,) = complaints(f"{GOOD}chaos: {{{chaos}}}\n")
    assert line.startswith(f"run.yaml:12: {seen}")


def test_the_resolved_file_names_every_key() -> None:
    resolved = read(GOOD).resolved()
    assert ", ".join(resolved) == TOP
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


@pytest.mark.parametrize("assignment", CHANGES)
def test_the_digest_changes_with_what_a_peer_computes_from(assignment: str) -> None:
    assert read(GOOD, assignment).digest() != read(GOOD).digest()


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
def test_the_digest_does_not_change_with_what_is_local_or_said_by_default(assignment: str) -> None:
    assert read(GOOD, assignment).digest() == read(GOOD).digest()


def test_digests_of_all_these_runs_differ_from_one_another() -> None:
    assert len({read(GOOD, assignment).digest() for assignment in CHANGES}) == len(CHANGES)


# ---- the files that come with the project ------------------------------------------------------------------

TOPOLOGIES = sorted((Path(__file__).resolve().parents[2] / "topologies").glob("*.yaml"))


def test_there_are_run_files_to_launch() -> None:
    assert {path.stem for path in TOPOLOGIES} >= {"mesh20", "local20", "dpsgd-ring16", "mapl-fmnist-sc1", "quick4"}


@pytest.mark.parametrize("path", TOPOLOGIES, ids=lambda path: path.stem)
def test_a_run_file_of_the_project_is_good_and_named_like_its_file(path: Path) -> None:
    assert load(path).name == path.stem
