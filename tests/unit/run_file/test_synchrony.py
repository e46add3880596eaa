"""The key ``synchrony``: what it accepts, and which methods, rules and attacks it does not go with."""

from __future__ import annotations

import math
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

import p2pfl
from launcher.backends.simulation import simulate
from launcher.prepare import LaunchRequest
from p2pfl.algorithms import ALGORITHMS
from p2pfl.errors import RunFileError
from p2pfl.run_file import load as run_files
from tests.conftest import tree


@pytest.mark.parametrize(
    ("given", "staleness"), [("rounds", None), ({"staleness": 0}, 0), ({"staleness": 4}, 4), ("none", math.inf)]
)
def test_bound(given: Any, staleness: float | None) -> None:
    run = run_files.from_dict(tree(algorithm="dpsgd", synchrony=given))
    assert run.file.synchrony.bound == staleness
    assert run.resolved().get("synchrony", "rounds") == given  # not written for rounds: other settings hash alike
    assert run_files.from_dict(run.resolved()).file.synchrony.bound == staleness


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"synchrony": "nonsense"}, "synchrony.name: unknown 'nonsense'; known: rounds, none"),
        ({"synchrony": {"staleness": -1}}, "synchrony.staleness: should be greater than or equal to 0"),
        ({"synchrony": {}}, "synchrony: should be rounds, none, or a mapping with staleness"),
        ({"algorithm": "l2c"}, "synchrony: l2c needs messages of the same round; remove synchrony, or choose"),
        ({"algorithm": "dfml"}, "synchrony: dfml needs messages of the same round"),
        (
            {"algorithm": {"name": "fedavg", "participation": 0.5}},
            "synchrony: conflicts with participation: 0.5 of fedavg, for which all peers must compute the same round",
        ),
        (
            {"algorithm": {"name": "mapl", "message_budget": 100}},
            "synchrony: conflicts with message_budget: 100 of mapl",
        ),
        (
            {"adversaries": [{"peers": [0], "name": "alie"}]},
            "adversaries.0.name: 'alie' uses what honest neighbors send in the same round",
        ),
        (
            {"aggregation": ["norm-clip", "age-weighted"], "synchrony": "rounds"},
            "aggregation: 'age-weighted' has no effect: it goes by the ages of messages, which are 0",
        ),
        ({"aggregation": "age-weighted", "synchrony": {"staleness": 0}}, "'age-weighted' has no effect"),
        ({"aggregation": "sketchguard"}, "aggregation: 'sketchguard' has peers answer each other in a round"),
    ],
)
def test_refusals_name_what_conflicts(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(RunFileError) as caught:
        run_files.from_dict(tree(**({"algorithm": "dpsgd", "synchrony": "none"} | changes)))
    assert expected in str(caught.value)


def test_methods_that_need_the_same_round_are_not_marked_as_asynchronous() -> None:
    """By the verbs in their code: a method that answers or reduces needs the others' same round."""
    named = {name for name, method in ALGORITHMS.items() if method.asynchronous}
    assert {"dpsgd", "dfedavgm", "fedavg", "fedproto", "fedtgp", "mapl", "mapl+", "ditto", "lg-fedavg"} <= named
    assert {"gossip", "ad-psgd"} <= named
    assert not named & {"l2c", "meta-l2c", "dfml", "def-kt", "cga", "fedfomo", "flt", "fedavg-dec", "fedrolex"}
    assert [name for name in named if ALGORITHMS[name].replies] == ["ad-psgd"]  # answers in whatever round


def test_a_simulation_needs_an_order(tmp_path: Path) -> None:
    run = p2pfl.load(tree(algorithm="dpsgd", synchrony="none"))
    with pytest.raises(RunFileError, match=r"synchrony: .*p2pfl launch.*--replay"):
        run.simulate(tmp_path / "run")


def test_the_command_refuses_it_before_there_is_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(tree(algorithm="dpsgd", synchrony="none")))
    with pytest.raises(RunFileError, match=r"run.yaml:\d+: synchrony: nothing orders messages"):
        simulate(LaunchRequest(file, run_dir=tmp_path / "run"), Console(file=StringIO()))
    assert not (tmp_path / "run").exists()
