"""Errors of run files: unreadable files, several problems at once, their places, joins and chaos out of range."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from p2pfl.data import DATASETS
from p2pfl.errors import DataError, RunFileError
from p2pfl.run_file.load import from_dict, load
from tests.run_file_texts import GOOD, GRAPH_NAMES, TOP, changed, hyper_names, problems, read

pytestmark = pytest.mark.usefixtures("in_tmp_path")


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n"])
def test_empty_file_is_an_error_that_lists_required_keys(text: str) -> None:
    assert problems(text) == ["run.yaml: empty; a run file needs at least name, rounds, peers, data, algorithm"]


def test_rejects_a_list() -> None:
    assert problems("- a\n- b\n") == [
        "run.yaml: not a mapping; a run file needs at least name, rounds, peers, data, algorithm"
    ]


@pytest.mark.exhaustive
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
