"""meta-L2C against its paper: whole rounds by autograd, one encoder on all peers, divergence, every option."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from p2pfl.algorithms.l2c import L2C
from p2pfl.algorithms.meta_l2c import Hyper, MetaL2C
from p2pfl.algorithms.meta_l2c_encoder import Encoder
from p2pfl.messaging.topology import Topology
from p2pfl.models import Model
from p2pfl.tensors import clone, digest, parameters_of, subtract
from tests.bodies import complete
from tests.meta_l2c_peers import CLASSES, FEATURES, HIDDEN, INPUTS, LINE, WIDTH, data_of, hyper, make, random_change
from tests.support import linear_model, run_rounds, setting

# ---- whole rounds --------------------------------------------------------------------------------------------


class Reference:
    """Algorithm 1 for one peer, differentiated by autograd."""

    def __init__(self, peer: MetaL2C) -> None:
        self.me, self.h, self.data = peer.me, peer.hyper, peer.data
        self.model = linear_model(INPUTS, FEATURES, CLASSES, seed=7)
        self.x = clone(parameters_of(self.model))
        self.start = clone(self.x)
        self.encoder = Encoder(self.x, HIDDEN, WIDTH)
        self.encoder.load_state_dict(peer.encoder.state_dict())
        kind = torch.optim.AdamW if self.h.mixing_optimizer == "adamw" else torch.optim.Adam
        self.optimizer = kind(self.encoder.parameters(), lr=self.h.mixing_lr, weight_decay=self.h.mixing_weight_decay)
        self.row: dict[int, float] = {}

    def loss(self, x: Mapping[str, Tensor], which: str) -> Tensor:
        some = getattr(self.data, which)
        images, labels = some.take(np.arange(len(some)))
        return cross_entropy(functional_call(self.model, dict(x), images.float() / 255.0), labels)

    def local(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Δ and Δ̂."""
        x = {name: tensor.clone().requires_grad_() for name, tensor in self.x.items()}
        optimizer = torch.optim.SGD(list(x.values()), lr=self.h.lr, weight_decay=self.h.weight_decay)
        for _ in range(self.h.local_epochs):
            optimizer.zero_grad()
            self.loss(x, "train").backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        x = clone(x)
        change = subtract(x, self.start)
        norm = torch.cat([tensor.flatten() for tensor in change.values()]).norm()
        return subtract(self.x, x), {name: tensor / norm for name, tensor in change.items()}

    def aggregate(
        self, updates: Mapping[int, Mapping[str, Tensor]], changes: Mapping[int, Mapping[str, Tensor]]
    ) -> None:
        ids = sorted(updates)
        codes = {j: self.encoder(changes[j]) for j in ids}
        w = torch.stack([(codes[self.me] * codes[j]).sum() for j in ids]).softmax(0)
        aggregated = {
            name: x - sum(weight * updates[j][name] for weight, j in zip(w, ids, strict=True))
            for name, x in self.x.items()
        }
        self.optimizer.zero_grad()
        self.loss(aggregated, "validation").backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.x = clone(aggregated)
        self.row = dict(zip(ids, w.tolist(), strict=True))


def reference_run(
    peers: Sequence[MetaL2C], topology: Topology, rounds: int, silent: Sequence[int] = ()
) -> list[Reference]:
    expected = [Reference(peer) for peer in peers if peer.me not in silent]
    for _ in range(rounds):
        sent = {reference.me: reference.local() for reference in expected}
        for reference in expected:
            present = [reference.me, *(j for j in topology.neighbors[reference.me] if j not in silent)]
            reference.aggregate({j: sent[j][0] for j in present}, {j: sent[j][1] for j in present})
        mean = {
            name: torch.stack([reference.encoder.state_dict()[name] for reference in expected]).mean(0)
            for name in expected[0].encoder.state_dict()
        }
        for reference in expected:
            reference.encoder.load_state_dict(mean)
    return expected


@pytest.mark.exhaustive
@pytest.mark.parametrize("optimizer", ["adamw", "adam"])
@pytest.mark.parametrize("topology", [LINE, complete(4)], ids=["line", "complete"])
def test_rounds_follow_algorithm_1(topology: Topology, optimizer: str) -> None:
    peers = make(hyper(mixing_optimizer=optimizer), topology.peers)
    expected = reference_run(peers, topology, 4)
    run_rounds(peers, topology, 4)
    for peer, reference in zip(peers, expected, strict=True):
        for name, tensor in parameters_of(peer.model).items():
            torch.testing.assert_close(tensor, reference.x[name], atol=2e-4, rtol=0)
        assert dict(peer.weights() or {}) == pytest.approx(reference.row, abs=5e-4)


def test_first_weights_come_from_initial_encoder() -> None:
    peers = make(hyper(), 4)
    start = clone(peers[0].encoder.state_dict())
    expected = reference_run(peers, complete(4), 1)
    run_rounds(peers, complete(4), 1)
    for peer, reference in zip(peers, expected, strict=True):
        assert dict(peer.weights() or {}) == pytest.approx(reference.row, abs=1e-5)
        assert any(not torch.equal(tensor, start[name]) for name, tensor in peer.encoder.state_dict().items())


@pytest.mark.exhaustive
@pytest.mark.parametrize("topology", [LINE, complete(4)], ids=["line", "complete"])
def test_encoder_is_bit_identical_on_all_peers_after_every_round(topology: Topology) -> None:
    peers = make(hyper(), topology.peers)
    assert len({digest(peer.encoder.state_dict()) for peer in peers}) == 1
    seen: list[list[str]] = [[] for _ in peers]

    def remember(peer: Any, t: int) -> None:
        seen[peer.me].append(digest(peer.encoder.state_dict()))

    run_rounds(peers, topology, 4, after=remember)
    assert all(digests == seen[0] for digests in seen)
    assert len(set(seen[0])) == 4


def test_encoder_moments_stay_local() -> None:
    peers = make(hyper())
    run_rounds(peers, LINE, 2)
    assert len({digest(peer.encoder_optimizer.state_dict()) for peer in peers}) == 3


@pytest.mark.exhaustive
def test_weights_that_are_not_finite_are_none() -> None:
    peer, *_ = make(hyper())
    assert peer.weights() == peer.w
    peer.w = {0: math.nan, 1: math.nan}
    assert peer.weights() is None


def test_missing_neighbor_has_no_weight() -> None:
    peers = make(hyper(), 4)
    expected = reference_run(peers, complete(4), 2, silent=[3])
    traffic = run_rounds(peers, complete(4), 2, silent=[3])
    assert traffic[0][0].missing == {"Progress": [3], "EncoderParameters": [3]}
    for peer, reference in zip(peers[:3], expected, strict=True):
        assert dict(peer.weights() or {}) == pytest.approx(reference.row, abs=2e-4)
        for name, tensor in parameters_of(peer.model).items():
            torch.testing.assert_close(tensor, reference.x[name], atol=2e-4, rtol=0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("field", ["update", "change"])
def test_nonfinite_message_counts_as_missing(field: str) -> None:
    class Diverged(MetaL2C):
        def progress(self, update: Any, change: Any) -> Any:
            body: Any = super().progress(update, change)
            return replace(
                body, **{field: {name: tensor * math.nan for name, tensor in getattr(body, field).items()}}
            )

    peers = make(hyper(), 3)
    peers[2] = Diverged(hyper(), setting(2, 3, linear_model(INPUTS, FEATURES, CLASSES, seed=7), data_of(2)))
    run_rounds(peers, complete(3), 2)
    for peer in peers[:2]:
        assert list(peer.weights() or {}) == [0, 1]
        assert all(bool(tensor.isfinite().all()) for tensor in peer.model.state_dict().values())


def test_diverged_training_is_rolled_back() -> None:
    class Diverging(MetaL2C):
        def train(self, **options: Any) -> None:
            self.model.linear_head.bias.data[0] = math.nan

    peers = make(hyper(), 3)
    start = clone(parameters_of(peers[0].model))
    peers[2] = Diverging(hyper(), setting(2, 3, linear_model(INPUTS, FEATURES, CLASSES, seed=7), data_of(2)))
    updates = {j: Reference(peers[j]).local()[0] for j in range(2)}
    traffic = run_rounds(peers, complete(3), 1)
    assert all(rounds[0].missing == {} for rounds in traffic)
    for peer in peers:
        w = peer.weights() or {}
        for name, tensor in parameters_of(peer.model).items():
            expected = start[name] - sum(w[j] * updates[j][name] for j in range(2))
            torch.testing.assert_close(tensor, expected, atol=1e-5, rtol=0)


def test_nonfinite_gradient_skips_the_step() -> None:
    (peer,) = make(hyper(), 1)
    before = digest(peer.encoder.state_dict())
    change = random_change(torch.Generator().manual_seed(0))
    peer.learn({0: change}, peer.encode({0: change}), {0: math.nan})
    assert digest(peer.encoder.state_dict()) == before
    assert peer.encoder_optimizer.state_dict()["state"] == {}


# ---- switches ------------------------------------------------------------------------------------------------


CHANGES: dict[str, dict[str, Any]] = {
    "mixing_lr": {"mixing_lr": 0.3},
    "mixing_weight_decay": {"mixing_weight_decay": 2.0},
    "mixing_optimizer": {"mixing_optimizer": "adam"},
    "prune_round": {"prune_round": 1, "prune_to": 1},
    "precision": {"precision": "bfloat16"},
    "encoder_hidden": {"encoder_hidden": 3},
    "encoder_width": {"encoder_width": 2},
    "score": {"score": "mean"},
    "local_epochs": {"local_epochs": 1},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("key", CHANGES)
def test_every_option_changes_the_outcome(key: str) -> None:
    outcomes = []
    for h in (hyper(), replace(hyper(), **CHANGES[key])):
        peers = make(h)
        run_rounds(peers, complete(3), 3)
        outcomes.append(np.concatenate([x.numpy().flatten() for p in peers for x in parameters_of(p.model).values()]))
    changed, default = outcomes
    assert not np.allclose(changed, default, atol=1e-7, rtol=0)


def test_all_options_are_covered_here_or_with_l2c() -> None:
    mine = set(Hyper.known()) - set(L2C.Hyper.known())
    assert mine == {"encoder_hidden", "encoder_width", "score", "encoder", "train_encoder", "send_codes"}
    assert isinstance(make(hyper(), 1)[0].model, Model)
