"""Networks and plug-ins that draw random numbers: equal runs have equal results, and evaluations change nothing."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from p2pfl.algorithms.local import Local
from p2pfl.learning.metrics import METRICS
from p2pfl.rng import Streams
from p2pfl.run_file.load import load
from p2pfl.run_file.run import Run
from p2pfl.session import metrics
from p2pfl.session.build import load_data, make_algorithm
from p2pfl.session.evaluation import evaluate_algorithm
from p2pfl.session.inspection import inspect_models
from p2pfl.session.metrics import plain
from p2pfl.session.scoring import evaluate_run
from p2pfl.simulation.simulate import simulate
from tests.conftest import tree
from tests.golden.runs import RUNS

NETWORK = """\
import numpy as np
import torch
from torch import nn


class Net(nn.Module):
    '''Starts from numbers of NumPy, adds noise to its features when it predicts, and drops some when it trains.'''

    def __init__(self, num_classes, in_features):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(in_features, 16), nn.BatchNorm1d(16), nn.ReLU())
        with torch.no_grad():
            self.body[1].bias.copy_(torch.from_numpy(np.random.rand(16)))
        self.fc = nn.Linear(16, num_classes)

    def forward(self, x):
        z = nn.functional.dropout(self.body(x), 0.5, self.training)
        return self.fc(z if self.training else z + torch.randn(16))
"""
PREDICTING = (
    "local",
    "ditto, some take part",
    "fedproto, some take part",
    "fedtgp",
    "fedfomo",
    "heterofl",
    "l2c, pruned",
    "meta-l2c, pruned",
    "fedstyle, some take part",
    "dfml",
)
"""Runs that differ in when a network predicts: in evaluations, and between training and sending."""


@pytest.fixture
def drawing(tmp_path: Path) -> Callable[..., Run]:
    """``drawing("local", eval_every=2)``: a run of RUNS with the network above."""

    def make(name: str, **changes: Any) -> Run:
        (tmp_path / "drawing_nets.py").write_text(NETWORK)
        run = tree(**{**RUNS[name], "models": "drawing_nets.Net", **changes})
        (tmp_path / "run.yaml").write_text(json.dumps(run))
        return load(tmp_path / "run.yaml")

    return make


def reseed(seed: int) -> None:
    """Put the process's own generators somewhere."""
    for generator in (random.seed, np.random.seed, torch.manual_seed):
        generator(seed)


def outcomes(run: Run, seed: int) -> list[dict[str, Any]]:
    """Return the results, without times, of a simulation in a process whose own generators were seeded thus."""
    reseed(seed)
    found = [dict(vars(result)) for result in simulate(run)]
    for each in found:
        del each["seconds"], each["cost"]
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", PREDICTING)
def test_equal_runs_report_equal_results(name: str, drawing: Any) -> None:
    run = drawing(name)
    assert outcomes(run, 1) == outcomes(run, 2)


@pytest.mark.exhaustive
def test_how_often_and_by_what_is_evaluated_does_not_change_what_is_learned(drawing: Any) -> None:
    digests = [
        [each["digest"] for each in outcomes(drawing("local", **change), 1)]
        for change in ({}, {"eval_every": 3}, {"global_test": True, "metrics": ["macro-f1"], "masked_test": True})
    ]
    assert digests[0] == digests[1] == digests[2]


@pytest.mark.exhaustive
def test_evaluating_a_finished_run_again_gives_its_last_record(drawing: Any, tmp_path: Path, prepare: Any) -> None:
    run = drawing("ditto, some take part", global_test=True)
    folder = prepare(tmp_path / "run", run)
    simulate(run, folder)
    reseed(7)
    for one in evaluate_run(run, folder):
        last = metrics.read(folder.peer(one.peer).metrics)[-1]
        assert plain(one.evaluations.personal) == last["personal"]
        assert plain(one.evaluations.whole) == last["global"]
        assert {name: plain(each) for name, each in one.evaluations.extra.items()} == last["extra_metrics"]


def peer_of(run: Run, me: int = 0) -> Any:
    """Return the algorithm of a peer before round 0."""
    return make_algorithm(run, me, load_data(run), torch.device("cpu"), Streams(run.seed, me))


def test_an_evaluation_does_not_depend_on_the_others(drawing: Any) -> None:
    peer = peer_of(drawing("ditto, some take part", global_test=True))
    alone = evaluate_algorithm(peer, masked=False, whole=False)
    both = evaluate_algorithm(peer, masked=False, whole=True)
    assert alone.personal == both.personal
    assert alone.extra["averaged"] == both.extra["averaged"]


@pytest.fixture
def random_metric() -> Iterator[str]:
    def metric(scores: Tensor, labels: Tensor) -> dict[str, float]:
        return {"torch": float(torch.rand(())), "numpy": float(np.random.rand()), "python": random.random()}

    METRICS.register("random", metric, __name__)
    yield "random"
    METRICS.unregister("random")


def test_metrics_that_draw_random_numbers_can_be_repeated(drawing: Any, random_metric: str) -> None:
    found = []
    for seed in (1, 2):
        peer = peer_of(drawing("local"))
        reseed(seed)
        found.append(evaluate_algorithm(peer, masked=False, whole=False, metrics=[random_metric]).metrics)
    assert found[0] == found[1]
    assert set(found[0]) == {"random.torch", "random.numpy", "random.python"}


def test_what_a_method_draws_in_its_setup_follows_from_seed_and_peer(
    drawing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def setup(self: Any) -> None:
        self.extra = nn.Linear(3, 3)
        self.numbers = random.random(), np.random.rand()

    monkeypatch.setattr(Local, "setup", setup)
    found = []
    for seed, me in ((1, 0), (2, 0), (1, 1)):
        reseed(seed)
        peer = peer_of(drawing("local"), me)
        found.append((peer.extra.weight.tolist(), peer.numbers, peer.model.backbone.body[1].bias.tolist()))
    assert found[0] == found[1]
    assert all(one != other for one, other in zip(found[0], found[2], strict=True))


@pytest.mark.exhaustive
def test_a_report_shows_the_predictions_that_were_evaluated(drawing: Any, tmp_path: Path, prepare: Any) -> None:
    run = drawing("local")
    folder = prepare(tmp_path / "run", run)
    results = simulate(run, folder)
    reseed(7)
    found = list(inspect_models(run, folder, load_data(run), samples=50))
    correct = [int((one.labels == one.predicted).sum()) for one in found]
    assert correct == [result.correct for result in results]
