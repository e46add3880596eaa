"""When gradients come from a captured pass: with a stand-in for CUDA's graphs, and with these if there is a GPU."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from p2pfl.algorithms.fedproto import FedProto
from p2pfl.algorithms.local import Local
from p2pfl.learning import cuda_graph
from p2pfl.learning.cuda_graph import CapturedGradients, Pass, Replayed
from p2pfl.learning.gradients import Clipped, GradientRule
from p2pfl.learning.peer_data import PeerData
from p2pfl.models import Model, build
from p2pfl.tensors import clone
from tests.support import peer_data, random_dataset, setting, share

LOG = logging.getLogger("test")
SAMPLES, BATCH, CLASSES = 26, 4, 3
"""An epoch has six batches of 4 samples and one of 2."""


class Graphs:
    """Stands for CUDA's graphs: a replay takes the pass again, and fills the tensors of the capture."""

    def __init__(self, error: float = 0.0, fails: bool = False) -> None:
        self.captures = 0
        self.replays = 0
        self._error = error
        self._fails = fails

    def capture(self, run: Pass) -> Replayed:
        self.captures += 1
        if self._fails:
            raise RuntimeError("operation not permitted when stream is capturing\nmore lines")
        terms, gradients = run()

        def replay() -> None:
            self.replays += 1
            fresh, others = run()
            for name, value in fresh.items():
                terms[name].copy_(value + self._error)
            for gradient, other in zip(gradients, others, strict=True):
                if gradient is not None and other is not None:
                    gradient.copy_(other)

        return replay, terms, gradients


def normed(dropout: float = 0.0) -> Model:
    """Return a model whose buffers change in a pass."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        backbone = nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(dropout))
        return Model("normed", backbone, 5, CLASSES)


def make(model: Model, of: type[Any] = Local, rule: GradientRule = GradientRule(), **given: Any) -> Any:
    context = setting(0, 1, model, peer_data(random_dataset(SAMPLES, classes=CLASSES)))
    hyper = of.Hyper.parse({"batch": BATCH, "lr": 0.5, "momentum": 0.9, **given})
    return of(hyper, replace(context, gradient=rule))


def trained(peer: Any, graphs: Graphs | None = None, epochs: int = 2) -> dict[str, Tensor]:
    """Train, with captured gradients if ``graphs`` is given; return the state and the means of the meter."""
    if graphs is not None:
        peer.captured = CapturedGradients(LOG, graphs.capture)
    peer.train(epochs=epochs, batch=BATCH)
    return {**clone(peer.model.state_dict()), **{k: torch.tensor(v) for k, v in peer.meter.drain().items()}}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_a_captured_pass_trains_to_the_same_bits() -> None:
    graphs = Graphs()
    assert_same(trained(make(normed()), graphs), trained(make(normed())))
    # Three batches warm up, the fourth compares; then the last two batches of epoch 1 and the six of epoch 2. The
    # batches of two samples are eager.
    assert (graphs.captures, graphs.replays) == (1, 1 + 2 + 6)


@pytest.mark.parametrize(
    ("graphs", "reason"),
    [
        (Graphs(error=1e-6), "its bits differ from the eager pass"),
        (Graphs(fails=True), "operation not permitted when stream is capturing"),
    ],
)
def test_a_pass_that_cannot_be_captured_stays_eager(
    graphs: Graphs, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert_same(trained(make(normed()), graphs), trained(make(normed())))
    assert graphs.captures == 1
    assert [record.getMessage() for record in caplog.records] == [f"no CUDA graph shape=(4, 1, 2, 2) reason={reason}"]


def test_a_pass_that_draws_random_numbers_is_not_captured(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    graphs = Graphs()
    assert_same(trained(make(normed(dropout=0.5)), graphs), trained(make(normed(dropout=0.5))))
    assert graphs.captures == 0
    assert "reason=it draws random numbers" in caplog.text


def test_what_a_captured_pass_does_not_stand_for_is_eager() -> None:
    peer, graphs = make(normed()), Graphs()
    trained(peer, graphs, epochs=1)
    replays = graphs.replays
    peer.model.backbone[1].weight.requires_grad_(False)
    peer.train(steps=3, batch=BATCH)
    assert graphs.replays == replays
    peer.train(steps=1, batch=BATCH)  # the fourth batch with a frozen weight
    assert graphs.captures == 2


@pytest.mark.parametrize(
    ("of", "rule", "given"),
    [(FedProto, GradientRule(), {}), (Local, Clipped(GradientRule(), 1.0), {})],
    ids=["loss with prototypes", "clipped"],
)
def test_other_losses_and_rules_are_eager(of: type[Any], rule: GradientRule, given: dict[str, Any]) -> None:
    graphs = Graphs()
    trained(make(normed(), of, rule, **given), graphs)
    assert graphs.captures == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; scripts/check-gpu runs it")
def test_a_graph_on_a_gpu_trains_to_the_same_bits() -> None:
    device = torch.device("cuda")
    captures = []

    def capture(run: Pass) -> Replayed:
        captures.append(cuda_graph.capture(run))
        return captures[-1]

    def on_gpu(captured: CapturedGradients | None) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model, dataset = (
            build("tiny-cnn", 0, 1, (8, 8), CLASSES).to(device),
            random_dataset(64, classes=CLASSES, size=(8, 8)),
        )
        data = PeerData(dataset, share(range(64)), lambda images: images, device)
        peer = Local(Local.Hyper.parse({"batch": 8, "lr": 0.1}), replace(setting(0, 1, model, data), device=device))
        peer.captured = captured
        peer.train(epochs=4, batch=8)
        return {**clone(peer.model.state_dict()), **{k: torch.tensor(v) for k, v in peer.meter.drain().items()}}

    assert_same(on_gpu(CapturedGradients(LOG, capture)), on_gpu(None))
    assert len(captures) == 1
