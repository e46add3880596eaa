"""Run files: error messages, overrides, YAML, presets, resolved files and the config hash."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from p2pfl.algorithms import ALGORITHMS
from p2pfl.data import AUGMENTATIONS, DATASETS, PARTITIONS
from p2pfl.errors import DataError, RunFileError
from p2pfl.run_file.graphs import GRAPHS
from p2pfl.run_file.load import from_dict, load
from p2pfl.run_file.run import Run
from p2pfl.run_file.schema import Transport

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
    "name, seed, rounds, peers, graph, data, models, algorithm, plugins, joins_at, transport, chaos, device, gpu, "
    "threads, slots, eval_every, global_test, metrics, masked_test, checkpoint_every, checkpoint_copies, track, "
    "report, out"
)
GRAPH_NAMES = (
    "complete, ring, line, star, torus, regular, erdos-renyi, small-world, barabasi-albert, bridge, edges, file, "
    "one-peer-exponential, base-k, el-oracle, el-local, matchings, list, trace"
)
MODEL_NAMES = (
    "tiny4, mapl4, htfe2, htfe3, htfe4, htfe8, htfe9, htc4, htfe8-htc4, htcnn8, dfml-h0, dfml-h1-cnn, "
    "dfml-h1-resnet, dfml-h1-vit, dfml-h2-cnn, dfml-h2-efficientnet, the members of each "
    "(`p2pfl models` lists them), mlp-WIDTH-…, conv1d-WIDTH-… and embedding-WIDTH-…, "
    "or an import path such as my_nets.Net"
)


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def read(text: str, *sets: str) -> Run:
    """Load run.yaml with this text and these --set flags."""
    Path("run.yaml").write_text(text, encoding="utf-8")
    return load(Path("run.yaml"), sets)


def problems(text: str, *sets: str) -> list[str]:
    """The lines of the error message."""
    with pytest.raises(RunFileError) as info:
        read(text, *sets)
    return str(info.value).splitlines()


def changed(old: str, new: str) -> str:
    assert GOOD.count(old) == 1
    return GOOD.replace(old, new)


def hyper_names(name: str) -> str:
    return ", ".join(ALGORITHMS[name].Hyper.known())


def test_loads_a_valid_file() -> None:
    run = read(GOOD)
    assert (run.name, run.seed, run.rounds, run.peers) == ("good", 1, 3, 4)
    assert run.algorithm is ALGORITHMS["mapl"]
    assert run.hyper == ALGORITHMS["mapl"].Hyper.parse({"warmup": 2})
    assert run.topology.edges == [(0, 1), (0, 3), (1, 2), (2, 3)]
    assert run.partition == PARTITIONS["clusters"].parse({"clusters": 2})
    assert run.loader == DATASETS["digits"]()
    assert run.augmentation == AUGMENTATIONS["none"]()


# ---- errors ----------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
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
            f"run.yaml:7: data.dataset.name: unknown 'letters'; known: {', '.join(DATASETS)}; "
            "if a plug-in registers it, list it in `plugins`",
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
            "run.yaml:11: device: unknown 'gpu'; known: auto, cpu, cuda; did you mean 'cuda'?",
            id="unknown device",
        ),
        pytest.param(
            "warmup: 2",
            "preset: offical",
            "run.yaml:10: algorithm.preset: unknown 'offical'; known: default, paper, official; "
            "did you mean 'official'?",
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
            "run.yaml:9: models.width: unknown key 'width'; known: name, module, args, head, members, features",
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
            "epochs: 2",
            f"run.yaml:10: algorithm.epochs: unknown key 'epochs'; known: {hyper_names('mapl')}; "
            "did you mean 'local_epochs'?",
            id="another word for a key",
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
            f"run.yaml:10: algorithm.name: missing; known: {', '.join(ALGORITHMS)}",
            id="missing name of a named thing",
        ),
        pytest.param(
            "graph: ring",
            "graph: {type: ring, degree: [2]}",
            f"run.yaml:5: graph.name: missing; known: {', '.join(GRAPHS)}; "
            "did you mean 'name: ring' by 'type: ring'?",
            id="name of a named thing under another key",
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
            "run.yaml:3: rounds: should be an integer (found 'six')",
            id="word for int",
        ),
        pytest.param(
            "rounds: 3", "rounds: 3.5", "run.yaml:3: rounds: should be an integer (found 3.5)", id="float for int"
        ),
        pytest.param(
            "rounds: 3", "rounds: [3]", "run.yaml:3: rounds: should be an integer (found [3])", id="list for int"
        ),
        pytest.param("rounds: 3", "rounds:", "run.yaml:3: rounds: should be an integer (found None)", id="nothing"),
        pytest.param(
            "name: good",
            "name: 20",
            "run.yaml:1: name: should be a string; put it in quotes (found 20)",
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
            "run.yaml:11: transport: should be a mapping (found [1])",
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
            "models: 3",
            "run.yaml:9: models: should be a name, or a mapping with a name and its parameters (found 3)",
            id="number for models",
        ),
        pytest.param(
            "rounds: 3", "rounds: -3", "run.yaml:3: rounds: should be greater than 0 (found -3)", id="negative rounds"
        ),
        pytest.param(
            "peers: 4",
            "peers: 99999999999",
            "run.yaml:4: peers: should be less than or equal to 100000 (found 99999999999)",
            id="too many peers",
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
            "run.yaml:12: transport.host: '0.0.0.0' is reachable from other hosts: create keys with "
            "`p2pfl keys new 4` and set transport.keys to their folder, or allow unencrypted connections with "
            "transport.insecure: true",
            id="beyond this host without keys",
        ),
        pytest.param(
            "device: cpu",
            "transport: {keys: keys, insecure: true}",
            "run.yaml:11: transport.insecure: conflicts with transport.keys; remove one of the two",
            id="keys and insecure",
        ),
        pytest.param(
            "device: cpu",
            "transport: {public_keys: {0: x}}",
            "run.yaml:11: transport.public_keys: needs transport.keys too, the folder with the private keys",
            id="public keys only",
        ),
        pytest.param(
            "device: cpu",
            f"transport: {{keys: k, public_keys: {{0: {'a' * 64}, 1: {'b' * 64}, 2: {'b' * 64}, 3: {'c' * 64}}}}}",
            "run.yaml:11: transport.public_keys: peers 1 and 2 have the same key; each could impersonate the other",
            id="a key of two",
        ),
        pytest.param(
            "device: cpu",
            "transport: {keys: keys, public_keys: {0: 12}}",
            "run.yaml:11: transport.public_keys.0: should be a string; put it in quotes (found 12)",
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
            "run.yaml:1: name: should start with a letter or digit and contain only letters, digits, '.', '_' and "
            "'-' (found 'a b/c')",
            id="name that is no file name",
        ),
        pytest.param(
            "graph: ring",
            "graph: {name: edges, edges: [[0, 1], [2, 3]]}",
            "run.yaml:5: graph: not connected; it has the components 0 1 | 2 3; add edges, or set "
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
            "run.yaml:9: models.name: dpsgd averages or replaces whole models, so all peers need the same "
            "architecture, but 'tiny4' has tiny-cnn, tiny-mixer, tiny-residual, tiny-wide; choose one of these",
            id="homogeneous algorithm with a mixed group",
        ),
        pytest.param(
            "models: tiny4",
            "models: {name: htc4, features: 64}",
            "run.yaml:9: models.name: mapl compares or averages the weights of linear heads, but those of "
            "htfe-resnet34+fc128, htfe-resnet34+fc256, htfe-resnet34+fc512 have several layers; "
            "choose models without '+'",
            id="linear heads asked of heads with several layers",
        ),
        pytest.param(
            "models: tiny4",
            "models: dfml-h1-cnn",
            "run.yaml:9: models.features: mapl needs the same number of features on all peers, but the backbones of "
            "'dfml-h1-cnn' differ in it; set one for all, e.g. 512",
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
            "run.yaml:4: rounds: duplicate key, first given in line 3",
            id="duplicate key",
        ),
        pytest.param(
            "warmup: 2",
            "warmup: 2, warmup: 3",
            "run.yaml:10: algorithm.warmup: duplicate key, first given in line 10",
            id="duplicate key in a section",
        ),
        pytest.param(
            "rounds: 3",
            "rounds: [3",
            "run.yaml:4: invalid YAML: expected ',' or ']', but got ':'",
            id="bracket",
        ),
        pytest.param(
            "rounds: 3", "rounds: a: b", "run.yaml:3: invalid YAML: mapping values are not allowed here", id="colon"
        ),
        pytest.param(
            "rounds: 3",
            "\trounds: 3",
            r"run.yaml:3: invalid YAML: found character '\t' that cannot start any token",
            id="tab",
        ),
        pytest.param(
            "rounds: 3", "rounds: *three", "run.yaml:3: invalid YAML: found undefined alias 'three'", id="alias"
        ),
        pytest.param(
            "rounds: 3",
            "rounds: !!python/name:os.system",
            "run.yaml:3: invalid YAML: could not determine a constructor for the tag "
            "'tag:yaml.org,2002:python/name:os.system'",
            id="python object",
        ),
        pytest.param(
            "rounds: 3", "---\nrounds: 3", "run.yaml:3: invalid YAML: but found another document", id="two documents"
        ),
        pytest.param(
            "rounds: 3",
            "rounds: \0",
            "run.yaml: invalid YAML: unacceptable character #x0000: special characters are not allowed in "
            '"<unicode string>", position 27',
            id="control character",
        ),
        pytest.param("rounds: 3", "3: 3", "run.yaml:3: 3: a key should be a string; put it in quotes", id="key"),
    ],
)
def test_error_gives_file_line_key_and_known_values(old: str, new: str, seen: str) -> None:
    # Without `rounds:`, that key is missing too.
    expected = [seen] + ["run.yaml: rounds: missing; it has no default"] * (new == "3: 3")
    assert sorted(problems(changed(old, new))) == sorted(expected)


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n"])
def test_empty_file_is_an_error_that_lists_required_keys(text: str) -> None:
    assert problems(text) == ["run.yaml: empty; a run file needs at least name, rounds, peers, data, algorithm"]


def test_rejects_a_list() -> None:
    assert problems("- a\n- b\n") == [
        "run.yaml: not a mapping; a run file needs at least name, rounds, peers, data, algorithm"
    ]


@pytest.mark.parametrize("text", ["name: &a {b: *a}\n", "[" * 1000], ids=["holds itself", "deep"])
def test_rejects_unbounded_nesting(text: str) -> None:
    assert problems(text) == ["run.yaml: nested too deeply"]


def test_unreadable_file_is_an_error_with_the_reason() -> None:
    Path("bytes.yaml").write_bytes(b"\xff\xfe\x00")
    for name, reason in (
        ("no.yaml", "No such file or directory"),
        (".", "Is a directory"),
        ("bytes.yaml", "not UTF-8 text"),
    ):
        with pytest.raises(RunFileError) as info:
            load(Path(name))
        assert str(info.value) == f"{name}: cannot be read: {reason}"


def test_reports_all_problems_at_once_by_line() -> None:
    text = (
        GOOD.replace("rounds: 3", "rounds: -3")
        .replace("seed: 1", "sed: 1")
        .replace("ring", "rong")
        .replace("digits", "digit")
        .replace("warmup", "warmpu")
    )
    assert problems(text) == [
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
def test_misspelled_key_is_not_also_reported_missing(old: str, new: str, misspelt: str) -> None:
    [problem] = problems(changed(old, new))
    assert problem.startswith(f"{misspelt}: unknown key")
    # Another missing key is reported.
    found = problems(changed(old, new).replace("peers: 4\n", ""))
    assert found[-1] == "run.yaml: peers: missing; it has no default"


def test_reports_an_invalid_named_thing_once() -> None:
    assert problems(changed("graph: ring", "graph: 3") + "out: 3\n") == [
        "run.yaml:5: graph: should be a name, or a mapping with a name and its parameters (found 3)",
        "run.yaml:12: out: should be a path (found 3)",
    ]


def test_from_dict_errors_carry_the_given_name() -> None:
    with pytest.raises(RunFileError, match=r"^benchmark: rounds: missing; it has no default$"):
        from_dict({**yaml.safe_load(changed("rounds: 3\n", ""))}, where="benchmark")


def test_error_at_locates_later_errors_at_the_key() -> None:
    run, error = read(GOOD, "data.dataset=mnist"), DataError("not enough samples")
    assert str(run.error_at("data.partition", error)) == "run.yaml:8: data.partition: not enough samples"
    assert str(run.error_at("data.augment", error)) == "run.yaml:6: data.augment: not enough samples"
    assert str(run.error_at("data.dataset", error)) == "--set data.dataset=mnist: data.dataset: not enough samples"


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
    Path("below/edges.txt").write_text("0 1\n1 2\n2 3\n")
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


# ---- resolved files and config hashes ----------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
@pytest.mark.parametrize("graph", ["torus", "{name: regular, degree: 3}", "{name: file, path: e.txt}", "bridge"])
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


@pytest.mark.parametrize(
    ("joins", "seen"),
    [
        ("{4: 1}", "run.yaml:12: joins_at.4: no peer 4; the 4 peers are 0 to 3"),
        ("{3: 3}", "run.yaml:12: joins_at.3: no round 3; the 3 rounds are 0 to 2"),
        ("{0: 1, 1: 1, 2: 2, 3: 1}", "run.yaml:12: joins_at: at least one peer must start in round 0"),
        ("{2: 0}", "run.yaml:12: joins_at.2: "),
    ],
)
def test_rejects_late_joiners_out_of_range(joins: str, seen: str) -> None:
    (line,) = problems(f"{GOOD}joins_at: {joins}\n")
    assert line.startswith(seen)


@pytest.mark.parametrize(
    ("chaos", "seen"),
    [
        ("kill: {peer: 4}", "chaos.kill.0.peer: no peer 4; the 4 peers are 0 to 3"),
        ("kill: [{round: 1}, {round: 3}]", "chaos.kill.1.round: no round 3; the 3 rounds are 0 to 2"),
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
        ("partition: {groups: [[0], [1]], round: 0}", "chaos.partition.0: set either rounds or seconds, not both"),
        ("partition: {groups: [[0], [1]], round: 7, seconds: 1}", "chaos.partition.0.round: no round 7"),
    ],
)
def test_reports_problems_in_chaos_with_their_path(chaos: str, seen: str) -> None:
    (line,) = problems(f"{GOOD}chaos: {{{chaos}}}\n")
    assert line.startswith(f"run.yaml:12: {seen}")


def test_resolved_file_lists_every_key() -> None:
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
