"""L2C against its paper: whole rounds in numpy, missing and diverged neighbors, every option."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from p2pfl.algorithms.l2c import L2C, Hyper, validation_gradient
from p2pfl.data import Dataset, Split
from p2pfl.errors import RunFileError
from p2pfl.learning.peer_data import PeerData
from p2pfl.messaging.topology import Topology
from p2pfl.simulation.simulate import simulate
from p2pfl.tensors import LIMIT, digest
from tests.bodies import complete
from tests.l2c_peers import CLASSES, INPUTS, LINE, data_of, hyper, make
from tests.regression import Matrix, gradient, regression_data, theta
from tests.support import peer_data, run_rounds, setting, softmax_regression

Vector = NDArray[np.float64]


# ---- whole rounds in numpy -----------------------------------------------------------------------------------


@dataclass
class Reference:
    """Algorithm 1 for one peer in numpy, float64, with Adam and AdamW written out."""

    me: int
    h: Hyper
    x: Matrix
    alpha: Vector
    first: Vector
    second: Vector
    steps: int = 0

    def local(self) -> tuple[Matrix, Matrix]:
        """θ^t and Δ."""
        x, velocity = self.x, np.zeros_like(self.x)
        inputs, labels = regression_data(data_of(self.me).train)
        for _ in range(self.h.local_epochs):
            velocity = self.h.momentum * velocity + gradient(x, inputs, labels) + self.h.weight_decay * x
            x = x - self.h.lr * velocity
        return self.x, self.x - x

    def aggregate(self, updates: Mapping[int, Matrix]) -> Vector:
        ids = sorted(updates)
        w = np.exp(self.alpha[ids])
        w = w / w.sum()
        self.x = self.x - sum(weight * updates[j] for weight, j in zip(w, ids, strict=True))
        g = gradient(self.x, *regression_data(data_of(self.me).validation))
        d = np.array([(g * updates[j]).sum() for j in ids])
        alpha_gradient = np.zeros_like(self.alpha)
        alpha_gradient[ids] = (np.diag(w) - np.outer(w, w)) @ -d
        self.learn(ids, alpha_gradient)
        row = np.zeros(len(self.alpha))
        row[ids] = w
        return row

    def learn(self, ids: Sequence[int], g: Vector) -> None:
        h, alpha = self.h, self.alpha.copy()
        if h.mixing_optimizer == "adam":
            g = g + h.mixing_weight_decay * alpha
        else:
            alpha = alpha * (1 - h.mixing_lr * h.mixing_weight_decay)
        self.steps += 1
        self.first = 0.9 * self.first + 0.1 * g
        self.second = 0.999 * self.second + 0.001 * g**2
        unbiased = self.first / (1 - 0.9**self.steps), self.second / (1 - 0.999**self.steps)
        alpha = alpha - h.mixing_lr * unbiased[0] / (np.sqrt(unbiased[1]) + 1e-8)
        self.alpha[ids] = alpha[ids]


def reference_run(
    peers: Sequence[L2C], topology: Topology, rounds: int, silent: Sequence[int] = ()
) -> list[Reference]:
    number = len(peers)
    expected = [
        Reference(p.me, p.hyper, theta(p.model), np.zeros(number), np.zeros(number), np.zeros(number))
        for p in peers
        if p.me not in silent
    ]
    for _ in range(rounds):
        updates = {reference.me: reference.local()[1] for reference in expected}
        for reference in expected:
            present = [reference.me, *(j for j in topology.neighbors[reference.me] if j not in silent)]
            reference.aggregate({j: updates[j] for j in present})
    return expected


@pytest.mark.exhaustive
@pytest.mark.parametrize("optimizer", ["adamw", "adam"])
@pytest.mark.parametrize("topology", [LINE, complete(4)], ids=["line", "complete"])
def test_rounds_follow_algorithm_1(topology: Topology, optimizer: str) -> None:
    peers = make(hyper(mixing_optimizer=optimizer, mixing_weight_decay=0.05), topology.peers)
    expected = reference_run(peers, topology, 6)
    run_rounds(peers, topology, 6)
    for peer, reference in zip(peers, expected, strict=True):
        np.testing.assert_allclose(theta(peer.model), reference.x, atol=2e-5)
        np.testing.assert_allclose(peer.logits.detach().numpy(), reference.alpha, atol=2e-3)
        assert np.abs(reference.alpha).max() > 0.05  # the weights moved


def test_momentum_and_weight_decay_match_sgd() -> None:
    peers = make(hyper(momentum=0.5, weight_decay=0.1, local_epochs=3))
    expected = reference_run(peers, LINE, 1)
    run_rounds(peers, LINE, 1)
    for peer, reference in zip(peers, expected, strict=True):
        np.testing.assert_allclose(theta(peer.model), reference.x, atol=1e-5)


def test_first_round_on_complete_graph_is_federated_averaging() -> None:
    peers = make(hyper(), 4)
    expected = [Reference(p.me, p.hyper, theta(p.model), np.zeros(4), np.zeros(4), np.zeros(4)) for p in peers]
    mean = np.mean([x - delta for x, delta in (reference.local() for reference in expected)], axis=0)
    run_rounds(peers, complete(4), 1)
    for peer in peers:
        np.testing.assert_allclose(theta(peer.model), mean, atol=1e-6)
        assert peer.weights() == dict.fromkeys(range(4), 0.25)
    assert len({digest(peer.model.state_dict()) for peer in peers}) == 1


def test_single_peer_trains_locally() -> None:
    (peer,) = make(hyper(), peers=1)
    x, delta = Reference(0, peer.hyper, theta(peer.model), np.zeros(1), np.zeros(1), np.zeros(1)).local()
    run_rounds([peer], Topology.from_edges(1, []), 1)
    np.testing.assert_allclose(theta(peer.model), x - delta, atol=1e-6)
    assert peer.weights() == {0: 1.0}
    assert peer.logits.item() == 0.0


def test_records_hold_weights_and_validation_loss() -> None:
    peers = make(hyper())
    run_rounds(peers, LINE, 3)
    assert list(peers[1].weights()) == [0, 1, 2]
    assert list(peers[0].weights()) == [0, 1]
    for peer in peers:
        assert sum(peer.weights().values()) == pytest.approx(1.0)
        loss, _ = validation_gradient(peer.model, peer.data)
        assert peer.diagnostics() == {"validation_loss": loss}


@pytest.mark.exhaustive
def test_peers_with_the_same_task_find_each_other() -> None:
    """Four peers, two tasks with swapped labels."""
    stream = np.random.default_rng(0)

    def task(me: int) -> PeerData:
        labels = np.arange(60) % 2
        images = stream.integers(0, 120, size=(60, 1, 2, 2), dtype=np.uint8)
        images[labels == 1, 0, 0] += 120
        split = Split(images, labels if me % 2 else 1 - labels)
        return peer_data(Dataset("task", split, split, 2, (0.0,), (1.0,), False), range(40), validation=range(40, 60))

    peers = [L2C(hyper(), setting(me, 4, softmax_regression(4, 2), task(me))) for me in range(4)]
    run_rounds(peers, complete(4), 10)
    for peer in peers:
        w = peer.weights()
        assert min(w[j] for j in (peer.me, (peer.me + 2) % 4)) > 2 * max(
            w[j] for j in ((peer.me + 1) % 4, (peer.me + 3) % 4)
        )


# ---- missing neighbors and divergence ------------------------------------------------------------------------


def test_weight_of_missing_neighbor_is_redistributed_and_its_logit_stays() -> None:
    peers = make(hyper(), 4)
    expected = reference_run(peers, complete(4), 4, silent=[2])
    with torch.no_grad():
        peers[0].logits[2] = 0.75
    traffic = run_rounds(peers, complete(4), 4, silent=[2])
    assert traffic[1][0].missing == {"Update": [2]}
    for peer, reference in zip([peers[0], peers[1], peers[3]], expected, strict=True):
        np.testing.assert_allclose(theta(peer.model), reference.x, atol=1e-5)
        assert list(peer.weights()) == [0, 1, 3]
        assert float(peer.logits[2].detach()) == (0.75 if peer.me == 0 else 0.0)


class Diverging(L2C):
    """An L2C peer whose training diverges."""

    value = math.nan

    def train(self, **options: Any) -> None:
        self.model.linear_head.weight.data[0, 0] = self.value


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_diverged_training_is_rolled_back(value: float) -> None:
    peers: list[Any] = make(hyper(), 3)
    peers[2] = Diverging(hyper(), setting(2, 3, softmax_regression(INPUTS, CLASSES, seed=7), data_of(2)))
    peers[2].value = value
    expected = [
        Reference(peer.me, peer.hyper, theta(peer.model), np.zeros(3), np.zeros(3), np.zeros(3)) for peer in peers
    ]
    updates = {reference.me: reference.local()[1] for reference in expected[:2]}
    run_rounds(peers, complete(3), 1)
    for peer, reference in zip(peers, expected, strict=True):
        np.testing.assert_allclose(theta(peer.model), reference.x - (updates[0] + updates[1]) / 3, atol=1e-6)


@pytest.mark.parametrize("lr", [1e9, 1e38])
def test_peer_trains_again_after_divergence(lr: float) -> None:
    """The optimizer is rolled back too."""
    (peer,) = make(hyper(momentum=0.9, local_epochs=2), 1)
    start = theta(peer.model)
    peer.optimizer.param_groups[0]["lr"] = lr
    run_rounds([peer], complete(1), 1)
    np.testing.assert_array_equal(theta(peer.model), start)
    peer.optimizer.param_groups[0]["lr"] = 0.1
    run_rounds([peer], complete(1), 1)
    assert np.isfinite(theta(peer.model)).all()
    assert not np.allclose(theta(peer.model), start)


def test_diverged_aggregate_is_discarded() -> None:
    class Huge(L2C):
        def train(self, **options: Any) -> None:
            self.model.linear_head.weight.data.fill_(0.9 * LIMIT)

    peers: list[Any] = make(hyper(), 3)
    for me in (1, 2):
        peers[me] = Huge(hyper(), setting(me, 3, softmax_regression(INPUTS, CLASSES, seed=7), data_of(me)))
    with torch.no_grad():
        peers[0].model.head.weight.fill_(0.9 * LIMIT)
    traffic = run_rounds(peers, complete(3), 2)
    assert all(record.missing == {} for record in traffic[0])
    assert all(np.abs(theta(peer.model)).max() < LIMIT for peer in peers)


def test_nonfinite_gradient_skips_the_step() -> None:
    (peer,) = make(hyper(), 1)
    peer.w = {0: 1.0}
    peer.learn({0: math.nan})
    assert peer.logits.tolist() == [0.0]
    assert peer.mixing_optimizer.state_dict()["state"] == {}


# ---- switches ------------------------------------------------------------------------------------------------


CHANGES: dict[str, dict[str, Any]] = {
    "local_epochs": {"local_epochs": 1},
    "batch": {"batch": 3},
    "lr": {"lr": 0.1},
    "momentum": {"momentum": 0.5},
    "weight_decay": {"weight_decay": 0.1},
    "mixing_lr": {"mixing_lr": 0.3},
    "mixing_weight_decay": {"mixing_weight_decay": 0.5},
    "mixing_optimizer": {"mixing_optimizer": "adam"},
    "prune_round": {"prune_round": 1, "prune_to": 1},
    "precision": {"precision": "bfloat16"},
    "optimizer": {"optimizer": "adam"},
    "loss": {"loss": "focal"},
    "drop_last": {"drop_last": True},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("key", CHANGES)
def test_every_option_changes_the_outcome(key: str) -> None:
    outcomes = []
    before = hyper(batch=4) if key == "drop_last" else hyper()
    for h in (before, replace(before, **CHANGES[key])):
        peers = make(h)
        run_rounds(peers, complete(3), 3)
        outcomes.append([theta(peer.model) for peer in peers])
    changed, default = outcomes
    assert not np.allclose(changed, default, atol=1e-7, rtol=0)


def test_all_options_are_covered() -> None:
    assert set(Hyper.known()) == {*CHANGES, "prune_to", "spool", "betas", "clip_norm", "preset"}


def test_weights_stay_equal_with_zero_mixing_lr() -> None:
    peers = make(hyper(mixing_lr=0.0), 4)
    run_rounds(peers, complete(4), 3)
    assert all(peer.weights() == dict.fromkeys(range(4), 0.25) for peer in peers)


def test_defaults_match_the_paper() -> None:
    h = Hyper()
    assert (h.local_epochs, h.batch, h.lr, h.momentum, h.weight_decay) == (5, 10, 0.01, 0.0, 5e-4)
    assert (h.mixing_lr, h.mixing_weight_decay, h.prune_round, h.prune_to) == (0.1, 0.01, 10, 10)
    assert L2C.homogeneous
    assert L2C.needs_validation


def test_run_file_without_validation_samples_is_rejected(make_run: Any) -> None:
    with pytest.raises(RunFileError, match=r"data\.partition\.validation: l2c learns from validation samples"):
        simulate(make_run(algorithm="l2c"))
    partition = {"name": "iid", "per_peer": 1, "validation": 0.5}
    with pytest.raises(RunFileError, match=r"peer 0 has a single training sample: use fewer peers, or more samples"):
        simulate(make_run(algorithm="l2c", data={"dataset": "digits", "partition": partition}))


def test_checkpoint_holds_adam_state() -> None:
    peers = make(hyper())
    run_rounds(peers, LINE, 3)
    saved = peers[1].state_dict()
    moments = saved["mixing_optimizer"]["state"][0]
    assert float(moments["step"]) == 3.0
    assert moments["exp_avg"].abs().min() > 0
    assert moments["exp_avg"].dtype == saved["logits"].dtype == torch.float64
