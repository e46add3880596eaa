"""Gradient rules: clipping, what a rule is given, and what it keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from p2pfl.algorithms.def_kt import DefKT
from p2pfl.algorithms.dfml import DFML
from p2pfl.algorithms.local import Local
from p2pfl.learning.gradients import Batch, Clipped, GradientRule
from p2pfl.learning.peer_data import PeerData
from p2pfl.messaging.topology import Topology
from tests.support import peer_data, random_dataset, run_rounds, setting, softmax_regression

INPUTS, CLASSES = 4, 3


@dataclass(frozen=True)
class Watching(GradientRule):
    """Note what is given."""

    seen: list[Batch] = field(default_factory=list)
    """The batches."""

    def batches(
        self, data: PeerData, size: int, order: np.random.Generator, drop_last: bool
    ) -> Iterator[tuple[Tensor, Tensor]]:
        yield next(super().batches(data, size, order, drop_last))

    def backward(self, batch: Batch) -> Mapping[str, Tensor]:
        self.seen.append(batch)
        batch.state["batches"] = batch.state.get("batches", 0) + 1
        return super().backward(batch)


MEAN = GradientRule()


def make(rule: GradientRule = MEAN, of: type[Any] = Local, me: int = 0, peers: int = 1, **given: Any) -> Any:
    """Return a peer with 12 samples and a softmax regression."""
    data = peer_data(random_dataset(12, classes=CLASSES, seed=me))
    context = replace(setting(me, peers, softmax_regression(INPUTS, CLASSES), data), gradient=rule)
    return of(of.Hyper.parse({"batch": 4, "lr": 1.0, **given}), context)


def theta(peer: Any) -> Tensor:
    return torch.cat([p.detach().flatten().clone() for p in peer.model.parameters()])


def moved(peer: Any, steps: int = 1) -> float:
    before = theta(peer)
    peer.train(steps=steps, batch=4)
    return float((theta(peer) - before).norm())


def test_clip_norm_bounds_each_step() -> None:
    free = moved(make())
    assert moved(make(clip_norm=free / 2)) == pytest.approx(free / 2, rel=1e-5)
    assert moved(make(clip_norm=free * 2)) == free
    assert moved(make(clip_norm=1e-3), steps=3) < 3.001e-3


def test_each_part_is_clipped_on_its_own() -> None:
    peer = make()
    weight, bias = peer.model.parameters()
    peer.gradient = Clipped(GradientRule(), 1e-3, ([weight], [bias]))
    before = weight.detach().clone(), bias.detach().clone()
    peer.train(steps=1, batch=4)
    for after, start in zip((weight, bias), before, strict=True):
        assert float((after.detach() - start).norm()) == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("of", [DFML, DefKT])
def test_mutual_learning_is_clipped_too(of: type[Any]) -> None:
    participation = 1.0 if of is DFML else 0.5
    rules = [Watching(), Watching()]
    peers = [make(rule, of, me, 2, participation=participation, lr=0.1) for me, rule in enumerate(rules)]
    run_rounds(peers, Topology.from_edges(2, [(0, 1)]), 1)
    seen = [batch for rule in rules for batch in rule.seen]
    terms = {name for batch in seen for name in batch.loss(batch.x, batch.labels)}
    assert terms == {"loss", peers[0].hyper.supervision}


def test_rule_draws_the_batches_of_an_epoch() -> None:
    rule = Watching()
    make(rule).train(epochs=3, batch=4)
    assert [len(batch.labels) for batch in rule.seen] == [4, 4, 4]


def test_loss_of_a_batch_is_the_mean_of_those_of_its_samples() -> None:
    rule = Watching()
    peer = make(rule)
    peer.views = 2
    peer.train(steps=1, batch=4)
    (batch,) = rule.seen
    single = [batch.loss(batch.x[n::4], batch.labels[n : n + 1].repeat(batch.views))["ce"] for n in range(4)]
    torch.testing.assert_close(torch.stack(single).mean(), batch.terms()["ce"])
    assert list(batch.parameters) == list(peer.model.parameters())


def test_what_a_rule_keeps_is_part_of_the_state() -> None:
    peer = make(Watching(), clip_norm=1.0)
    assert "gradient" not in peer.state_dict()
    peer.train(epochs=2, batch=4)
    assert peer.state_dict()["gradient"] == {"batches": 2}
    resumed = make(Watching(), clip_norm=1.0)
    resumed.load_state_dict(peer.state_dict())
    resumed.train(epochs=1, batch=4)
    assert resumed.state_dict()["gradient"] == {"batches": 3}
