"""Codecs and attacks in whole runs in one process: stopped and resumed, in several processes, refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from p2pfl.errors import PluginError, RunFileError
from p2pfl.run_file.load import from_dict
from p2pfl.run_file.run import Run
from p2pfl.run_folder import records
from p2pfl.simulation.simulate import simulate
from tests.conftest import tree
from tests.golden.runs import RUNS
from tests.guide_pages import files
from tests.simulation.test_stop_and_resume import stop_all_after

ATTACKS = [{"peers": [1, 2], "name": "two-faced", "from": 1}]
REMEMBERING = """
@plugins.adversary("first-again")
class FirstAgain(Adversary):
    def attack(self, body, to, t, attacker):
        kept = attacker.memory.setdefault(body.kind(), {})
        for path, x in tensors_of(body).items():
            kept.setdefault("/".join(map(str, path)), x.clone())
        return with_tensors(body, {path: kept["/".join(map(str, path))] for path in tensors_of(body)})
"""

Make = Callable[..., Run]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """``make("dpsgd, el-local", codec="levels")``: a run of tests/golden/runs.py with the plug-in of the guide."""
    file = tmp_path / "my_parts.py"
    file.write_text(files("own-codec.md")["my_parts.py"] + REMEMBERING)

    def run(name: str, **changes: Any) -> Run:
        settings = tree(**RUNS[name])
        return from_dict({**settings, "rounds": min(settings["rounds"], 5), "plugins": [str(file)], **changes})

    return run


def outcome(results: Any) -> list[tuple[Any, ...]]:
    return [(r.digest, r.sent, r.received, r.missing) for r in results]


PIPELINES: dict[str, dict[str, Any]] = {
    "codec": {"codec": "levels"},
    "attack": {"adversaries": ATTACKS},
    "both": {"codec": "levels", "adversaries": ATTACKS},
}
CASES = {  # what a pipeline may have trouble with
    "dpsgd, el-local": "both",  # another graph in each round
    "mapl, with a budget": "codec",  # allreduce
    "mapl, two join late": "both",
    "l2c, pruned": "attack",  # received models lie in a file
    "fedproto, some take part": "both",  # tensors of any length
    "dfml": "both",  # bodies to one peer, which this one would not accept itself
    "heterofl": "codec",  # some peers get parts of the model
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_that_is_stopped_and_resumed_ends_with_the_same_bits(
    name: str, make: Make, prepare: Any, tmp_path: Path
) -> None:
    run = make(name, **PIPELINES[CASES[name]])
    folder = prepare(tmp_path / "run", run)
    stop_all_after(run, folder, 1 + max(1, *run.file.joins_at.values(), 0))
    assert outcome(simulate(run, folder)) == outcome(simulate(run))


def test_what_an_attack_remembers_is_part_of_the_checkpoint(make: Make, prepare: Any, tmp_path: Path) -> None:
    attacks = [{"peers": {"fraction": 0.5}, "name": "first-again"}]
    run = make("dpsgd, epochs", codec="levels", adversaries=attacks, rounds=4)
    folder = prepare(tmp_path / "run", run)
    stop_all_after(run, folder, 2)
    expected = outcome(simulate(run))
    assert outcome(simulate(run, folder)) == expected
    assert expected != outcome(simulate(make("dpsgd, epochs", codec="levels", rounds=4)))


def test_an_attacker_sees_what_others_have_packed(make: Make) -> None:
    def sent_copy(**changes: Any) -> list[str]:
        attacks = [{"peers": [3], "name": "mimic"}]
        return [result.digest for result in simulate(make("dpsgd, epochs", rounds=2, adversaries=attacks, **changes))]

    assert sent_copy(codec={"name": "none"}) == sent_copy()
    assert sent_copy(codec="levels") != sent_copy()


def test_records_hold_the_distances_of_neighbors_also_after_a_stop(make: Make, prepare: Any, tmp_path: Path) -> None:
    def found(run: Run, name: str, stop: int = 0) -> list[tuple[int, int, str, int, float | None, float]]:
        folder = prepare(tmp_path / name, run)
        if stop:
            stop_all_after(run, folder, stop)
        simulate(run, folder)
        return [(one.peer, one.t, *each) for one in records.read(folder) for each in one.combined()]

    adversaries = [{"peers": [1], "name": "two-faced", "noise": 5.0}]
    run = make("dpsgd, epochs", adversaries=adversaries, rounds=3, aggregation=["norm-clip"])
    distances = found(run, "whole")
    assert distances == found(run, "stopped", stop=2)
    attacks = {(peer, t): (apart, taken) for peer, t, _, j, apart, taken in distances if j == 1}
    assert attacks.keys() == {(peer, t) for peer in run.topology.neighbors[1] for t in range(3)}
    for (peer, _), (apart, taken) in attacks.items():  # of two faces, the odd peers see the false one
        assert apart is not None
        assert (apart > 10, taken < 0.1) == ((True, True) if peer % 2 else (False, False))
    assert not found(make("dpsgd, epochs", rounds=2), "without")


def test_several_processes_end_with_the_same_bits(make: Make, prepare: Any, tmp_path: Path) -> None:
    run = make("dpsgd, el-local", **PIPELINES["both"])
    assert outcome(simulate(run, prepare(tmp_path / "run", run), jobs=2)) == outcome(simulate(run))


def test_packed_messages_are_smaller_and_without_training_too(make: Make) -> None:
    name = "fedproto, some take part"
    plain, packed = (simulate(make(name, **changes)) for changes in ({}, PIPELINES["both"]))
    payloads = [sum(kinds["Prototypes"][1] for kinds in result.sent.values()) for result in (plain[0], packed[0])]
    assert 2 * payloads[1] < payloads[0]
    untrained = simulate(make(name, **PIPELINES["both"], time={"train": False}), clock=True)
    assert [result.sent for result in untrained] == [result.sent for result in packed]


def test_without_the_keys_nothing_is_written_or_hashed_about_them(make: Make) -> None:
    plain, none = make("local"), make("local", codec="none")
    assert not {"codec", "adversaries"} & plain.resolved().keys()
    assert plain.settings() != make("local", adversaries=ATTACKS).settings()
    assert outcome(simulate(none)) == outcome(simulate(plain))


@pytest.mark.parametrize(
    "changes",
    [
        {"codec": "levels"},
        {"codec": {"name": "levels"}},
        {"codec": {"Parameters": "levels", "all": {"name": "none"}}},
        {
            "adversaries": [
                {"peers": {"fraction": 0.4}, "name": "two-faced", "noise": 0.5, "messages": ["Parameters"]}
            ]
        },
        {"adversaries": [*ATTACKS, {"peers": [0], "name": "first-again"}]},
    ],
)
def test_a_resolved_run_file_gives_an_equal_run(changes: Any, make: Make, tmp_path: Path) -> None:
    run = make("dpsgd, epochs", **changes)
    again = from_dict({**run.resolved(), "plugins": [str(tmp_path / "my_parts.py")]})
    assert (again.codecs, again.attacks, again.config_hash()) == (run.codecs, run.attacks, run.config_hash())
    assert again.to_yaml() == run.to_yaml()


def test_a_fraction_of_the_peers_is_drawn_from_the_seed(make: Make) -> None:
    entries = [{"peers": {"fraction": 0.3}, "name": "two-faced"}] * 2
    runs = [make("dpsgd, epochs", peers=40, graph="ring", seed=seed, adversaries=entries) for seed in (1, 1, 2)]
    drawn = [[run.attackers(number) for number in range(2)] for run in runs]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0][0] != drawn[0][1]
    assert {len(peers) for found in drawn for peers in found} == {12}
    assert len(make("dpsgd, epochs", peers=2, graph="complete", adversaries=entries).attackers(0)) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"codec": "level"}, "codec.name: unknown 'level'; known: none, levels; did you mean 'levels'?"),
        ({"codec": {"name": "levels", "bits": 4}}, "codec.bits: unknown key 'bits'"),
        ({"codec": {"Parameters": "level"}}, "codec.Parameters.name: unknown 'level'"),
        ({"codec": 8}, "codec: should be a name, or a mapping"),
        ({"adversaries": [{"peers": [9], "name": "two-faced"}]}, "adversaries.0.peers: no peer 9"),
        ({"adversaries": [{"name": "two-faced"}]}, "adversaries.0.peers: missing"),
        ({"adversaries": [{"peers": [0], "name": "two-face"}]}, "adversaries.0.name: unknown 'two-face'"),
        ({"adversaries": [{"peers": [0], "name": "two-faced", "std": 1}]}, "adversaries.0.std: unknown key 'std'"),
        ({"adversaries": [{"peers": [0], "name": "two-faced", "from": 99}]}, "adversaries.0.from: no round 99"),
        (
            {"adversaries": [{"peers": {"fraction": 2}, "name": "two-faced"}]},
            "adversaries.0.peers.fraction: should be",
        ),
    ],
)
def test_mistakes_in_a_run_file_are_named(changes: Any, message: str, make: Make) -> None:
    with pytest.raises(RunFileError) as caught:
        make("dpsgd, epochs", **changes)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"codec": {"Heads": "levels"}}, "codec: unknown message of dpsgd: 'Heads'; known: Parameters"),
        (
            {"adversaries": [{"peers": [0], "name": "two-faced", "messages": ["Head"]}]},
            "adversaries.0.messages: unknown message of dpsgd: 'Head'; known: Parameters",
        ),
    ],
)
def test_a_kind_of_message_that_the_method_does_not_have_is_refused(changes: Any, message: str, make: Make) -> None:
    with pytest.raises(RunFileError) as caught:
        simulate(make("dpsgd, epochs", **changes))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("(2,)), ", "(3,)), ", r"my_parts.py:\d+: pack returned ends float32\[2\], .* promises ends float32\[3\]"),
        ("* parts[", "* parts[:, None][", "my_parts.py:.*TypeError"),
        (
            '* parts["steps"]',
            '* parts["steps"].double()',
            r"my_parts.py:\d+: unpack returned float64\[.*\] instead of fl",
        ),
    ],
)
def test_a_codec_that_breaks_its_promise_is_refused_before_the_first_round(
    old: str, new: str, message: str, make: Make, tmp_path: Path
) -> None:
    file = tmp_path / "my_parts.py"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(PluginError, match=message):
        simulate(make("dpsgd, epochs", codec="levels"))


def test_an_attack_that_returns_another_form_of_body_is_refused(make: Make, tmp_path: Path) -> None:
    file = tmp_path / "my_parts.py"
    file.write_text(file.read_text().replace("torch.randn_like(x) - x", "torch.randn_like(x).double() - x"))
    with pytest.raises(PluginError, match=r"my_parts.py:\d+: .*attack should return a Parameters with the same"):
        simulate(make("dpsgd, epochs", adversaries=ATTACKS))
