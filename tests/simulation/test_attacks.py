"""Built-in attacks in whole runs in one process: every method accepts what they send; restarts change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from p2pfl.adversaries import ADVERSARIES
from p2pfl.algorithms import ALGORITHMS
from p2pfl.errors import RunFileError
from p2pfl.rng import Streams
from p2pfl.run_file.checks import exchanges
from p2pfl.run_file.load import from_dict
from p2pfl.run_file.run import Run
from p2pfl.session.build import load_data, make_algorithm
from p2pfl.session.method_results import layouts_of
from p2pfl.simulation.simulate import simulate
from tests.conftest import tree
from tests.golden.runs import RUNS
from tests.simulation.test_stop_and_resume import stop_all_after

OPTIONS: dict[str, dict[str, Any]] = {
    "noise": {"std": 0.1},
    "label-flip": {"flips": {0: 1, 1: 0}},
    "equivocate": {"attacks": ["none", "sign-flip", {"name": "noise", "std": 0.5}]},
}
"""Of attacks that need some, and some that a run file writes otherwise than it reads them."""
FIRST = {settings["algorithm"]["name"]: name for name, settings in reversed(RUNS.items())}
"""The first of tests/golden/runs.py of each method."""


def make(name: str, *adversaries: dict[str, Any], **changes: Any) -> Run:
    return from_dict(tree(**{**RUNS[name], "adversaries": list(adversaries), **changes}))


def outcome(run: Run, *args: Any) -> list[tuple[Any, ...]]:
    return [(r.phase, r.digest, r.sent, r.received, r.missing) for r in simulate(run, *args)]


def fitting(name: str) -> list[str]:
    """Return the attacks that can change messages of a run, or the training of a peer."""
    run = make(name)
    layouts = layouts_of(make_algorithm(run, 0, load_data(run), torch.device("cpu"), Streams(0, 0)))
    attacks = {attack: ADVERSARIES[attack].parse(OPTIONS.get(attack, {})) for attack in ADVERSARIES}
    suits = {name: exchanges(run.algorithm) or not attack.rushing for name, attack in attacks.items()}
    return [name for name, attack in attacks.items() if suits[name] and attack.has_effect(layouts)]


@pytest.mark.parametrize("method", sorted(set(ALGORITHMS) - {"local"}))
def test_every_method_accepts_what_every_attack_that_fits_sends(method: str) -> None:
    attacks = fitting(FIRST[method])
    peers = make(FIRST[method]).peers
    entries = [{"peers": [n % peers], "name": attack, **OPTIONS.get(attack, {})} for n, attack in enumerate(attacks)]
    results = simulate(make(FIRST[method], *entries, rounds=2, joins_at={}, eval_every=100))
    assert [(result.phase, result.dropped) for result in results] == [("finished", {})] * peers


CASES: dict[str, list[dict[str, Any]]] = {
    "dpsgd, steps": [{"name": "sign-flip"}],  # sends before it trains: the update is of the last round
    # Another graph in each round.
    "dpsgd, el-local": [{"name": "equivocate", "attacks": ["sign-flip", "alie", "dissensus"]}],
    "fedavg, some take part": [{"name": "free-rider", "from": 1}, {"name": "count-lie"}, {"name": "noise", "std": 1}],
    "mapl, two join late": [{"name": "prototype-swap", "messages": ["Prototypes"]}, {"name": "min-max"}],
    "l2c, pruned": [{"name": "ipm", "of": "updates"}, {"name": "noise", "std": 0.1}],  # received models lie in a file
    "dfedavgm": [{"name": "min-sum"}],
    "lg-fedavg": [{"name": "alie", "tune": True}],
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_that_is_stopped_and_resumed_ends_with_the_same_bits(name: str, prepare: Any, tmp_path: Path) -> None:
    stop = 1 + max(1, *RUNS[name].get("joins_at", {}).values(), 0)
    run = make(name, *({"peers": [1, 2], **attack} for attack in CASES[name]), rounds=stop + 1)
    folder = prepare(tmp_path / "run", run)
    stop_all_after(run, folder, stop)
    expected = outcome(run)
    assert outcome(run, folder) == expected
    assert expected != outcome(make(name, rounds=stop + 1))


@pytest.mark.parametrize("method", ["dfml", "fedfomo", "def-kt", "heterofl", "local"])
def test_rushing_attacks_are_refused_where_peers_do_not_send_at_the_same_time(method: str) -> None:
    with pytest.raises(RunFileError) as caught:
        make(FIRST[method], {"peers": [1], "name": "equivocate", "attacks": ["none", "alie"]})
    assert "adversaries.0.name: 'equivocate' uses what honest neighbors send" in str(caught.value)
    assert f"but peers of {method} send to some, in turn, or nothing" in str(caught.value)


def test_tuning_depends_on_the_rule_and_is_refused_where_that_needs_data() -> None:
    tuned = {"peers": [1], "name": "alie", "tune": True}
    changes: dict[str, Any] = {"graph": "complete", "rounds": 2, "aggregation": ["nnm", "trimmed-mean"]}
    assert outcome(make("dpsgd, epochs", tuned, **changes)) != outcome(
        make("dpsgd, epochs", {**tuned, "tune": False}, **changes)
    )
    with pytest.raises(RunFileError, match="'alie' cannot be tuned against ubar"):
        make("dpsgd, epochs", tuned, **{**changes, "aggregation": "ubar"})


def test_a_resolved_run_file_gives_an_equal_run() -> None:
    run = make("dpsgd, steps", *({"peers": [0], "name": name, **OPTIONS.get(name, {})} for name in ADVERSARIES))
    again = from_dict(yaml.safe_load(run.to_yaml()))
    assert (again.attacks, again.config_hash()) == (run.attacks, run.config_hash())


def test_bytes_without_training_are_those_of_the_classes_of_poisoned_samples() -> None:
    name, flips = "fedproto, some take part", {"peers": [0, 1, 2], "name": "label-flip", "flips": {0: 1, 5: 6, 7: 6}}
    sent = [result.sent for result in simulate(make(name, flips, time={"train": False}), clock=True)]
    assert sent == [result.sent for result in simulate(make(name, flips))]
    assert sent != [result.sent for result in simulate(make(name))]


def test_several_processes_end_with_the_same_bits(prepare: Any, tmp_path: Path) -> None:
    run = make("dpsgd, el-local", {"peers": [1, 2], "name": "min-max"}, {"peers": [4], "name": "backdoor"})
    folder = prepare(tmp_path / "run", run)
    found = [(r.phase, r.digest, r.sent, r.received, r.missing) for r in simulate(run, folder, jobs=2)]
    assert found == outcome(run)


def test_the_same_peers_without_an_attack_send_what_they_would() -> None:
    for name in ("mapl+", "local"):
        assert outcome(make(name, {"peers": [0], "name": "none"})) == outcome(make(name))


def test_a_free_rider_trains_until_its_first_round() -> None:
    def digests(rounds: int, *adversaries: dict[str, Any]) -> list[str]:
        return [result.digest for result in simulate(make("local", *adversaries, rounds=rounds))]

    riding = digests(3, {"peers": [2], "name": "free-rider", "from": 1})
    assert riding[2] == digests(1)[2]
    assert riding[:2] + riding[3:] == digests(3)[:2] + digests(3)[3:]


@pytest.mark.parametrize(
    ("name", "attack", "message"),
    [
        ("dpsgd, steps", {"name": "count-lie"}, "'count-lie' has no effect: dpsgd sends Parameters, in which it"),
        ("mapl+", {"name": "head-swap", "messages": ["Prototypes"]}, "mapl+ sends Prototypes, in which it changes"),
        ("local", {"name": "sign-flip"}, "'sign-flip' has no effect: local sends nothing"),
    ],
)
def test_an_attack_without_an_effect_is_refused(name: str, attack: dict[str, Any], message: str) -> None:
    with pytest.raises(RunFileError) as caught:
        simulate(make(name, {"peers": [1], **attack}))
    assert "adversaries.0: " in str(caught.value)
    assert message in str(caught.value)
