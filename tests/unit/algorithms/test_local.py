"""Local training: no messages, and every peer learns."""

from __future__ import annotations

import pytest
import torch

from p2pfl.algorithms.local import Local
from p2pfl.learning.optimizers import LocalTraining as Hyper
from p2pfl.messaging.topology import Topology
from p2pfl.tensors import digest
from tests.support import peer_data, random_dataset, run_rounds, setting, softmax_regression

COMPLETE = Topology.from_edges(3, [(0, 1), (0, 2), (1, 2)])
ALONE = Topology.from_edges(1, [])


def make(h: Hyper, peers: int = 3) -> list[Local]:
    return [
        Local(
            h,
            setting(
                me, peers, softmax_regression(25, 3, seed=me), peer_data(random_dataset(12, size=(5, 5), seed=me))
            ),
        )
        for me in range(peers)
    ]


def test_sends_and_accepts_no_messages() -> None:
    peers = make(Hyper())
    traffic = run_rounds(peers, COMPLETE, 3)
    assert [(record.sent, record.received, record.missing) for peer in traffic for record in peer] == [
        ({}, {}, {})
    ] * 9
    assert all(list(peer.layouts()) == [] for peer in peers)
    assert peers[0].weights() is None


def test_neighbors_have_no_effect() -> None:
    among, alone = make(Hyper()), make(Hyper(), peers=1)
    run_rounds(among, COMPLETE, 3)
    run_rounds(alone, ALONE, 3)
    assert digest(among[0].state_dict()) == digest(alone[0].state_dict())


@pytest.mark.exhaustive
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_loss_decreases(optimizer: str) -> None:
    peers = make(Hyper.parse({"optimizer": optimizer, "lr": 0.1} | ({"momentum": 0.9} if optimizer == "sgd" else {})))
    losses: dict[int, list[float]] = {0: [], 1: [], 2: []}
    run_rounds(peers, COMPLETE, 20, after=lambda peer, t: losses[peer.me].append(peer.meter.drain()["ce"]))
    assert all(len(history) == 20 and history[-1] < 0.5 * history[0] for history in losses.values())


@pytest.mark.parametrize(
    ("epochs", "batch", "drop_last", "steps"),
    [(1, 64, False, 1), (1, 64, True, 1), (1, 5, False, 3), (3, 5, True, 6), (4, 6, False, 8), (4, 6, True, 8)],
)
def test_round_trains_local_epochs_in_batches(epochs: int, batch: int, drop_last: bool, steps: int) -> None:
    (peer,) = make(Hyper(local_epochs=epochs, batch=batch, drop_last=drop_last), peers=1)
    taken: list[int] = []
    peer.after_batch = lambda: taken.append(1)
    run_rounds([peer], ALONE, 1)
    assert len(taken) == steps


def test_optimizer_has_its_settings_and_keeps_its_state() -> None:
    (sgd,) = make(Hyper(lr=0.5, momentum=0.25, weight_decay=0.125), peers=1)
    (adam,) = make(Hyper(optimizer="adam"), peers=1)
    assert isinstance(sgd.optimizer, torch.optim.SGD)
    assert [sgd.optimizer.defaults[name] for name in ("lr", "momentum", "weight_decay")] == [0.5, 0.25, 0.125]
    run_rounds([adam], ALONE, 3)
    assert isinstance(adam.optimizer, torch.optim.Adam)
    assert {float(state["step"]) for state in adam.optimizer.state.values()} == {3.0}


def test_custom_step_receives_batches_in_training_mode() -> None:
    (peer,) = make(Hyper(), peers=1)
    before = digest(peer.state_dict())
    seen: list[tuple[int, bool]] = []
    peer.train(epochs=2, batch=5, step=lambda images, labels: seen.append((len(labels), peer.model.training)))
    assert seen == [(5, True), (5, True), (2, True)] * 2
    assert digest(peer.state_dict()) == before
