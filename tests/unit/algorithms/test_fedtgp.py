"""FedTGP against its paper: rounds against its server's, equal copies, every option, messages and state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from p2pfl import rng
from p2pfl.algorithms.class_means import PrototypeTable, class_means
from p2pfl.algorithms.fedproto import FedProto
from p2pfl.algorithms.fedproto import Hyper as FedProtoHyper
from p2pfl.algorithms.fedtgp import FedTGP, Hyper, TrainablePrototypes
from p2pfl.algorithms.prototypes import margins
from p2pfl.messaging.net import Net
from p2pfl.messaging.topology import Topology
from p2pfl.models import Model
from p2pfl.tensors import digest
from tests.fedtgp_reference import CLASSES, FEATURES, SEED, acl_loss, apart, hyper
from tests.support import linear_model, messages, payload, peer_data, random_dataset, run_rounds, setting

LINE = Topology.from_edges(3, [(0, 1), (1, 2)])
COMPLETE = Topology.from_edges(3, [(0, 1), (1, 2), (0, 2)])
LOCAL_CLASSES: tuple[tuple[int, ...], ...] = ((0, 1), (1, 2), (0, 1, 2))
"""Classes of each peer; no peer has class 3."""


class RecordingFedTGP(FedTGP):
    """Records the received prototypes and the trained ones."""

    def setup(self) -> None:
        super().setup()
        self.received: list[PrototypeTable] = []
        self.trained: list[Tensor] = []

    def train_prototypes(self, table: PrototypeTable, margin: float, net: Net) -> None:
        super().train_prototypes(table, margin, net)
        self.received.append(table)
        self.trained.append(self.prototypes.clone())


def data_of(me: int, classes: Sequence[int]) -> Any:
    dataset = random_dataset(60, classes=CLASSES, seed=me)
    return peer_data(dataset, [n for n in range(60) if dataset.train.labels[n] in classes][: 6 + 3 * me])


def make(h: Hyper, classes_of: Sequence[Sequence[int]] = LOCAL_CLASSES) -> list[RecordingFedTGP]:
    """Peers with linear backbones on gray noise, with different initial values."""
    peers = len(classes_of)
    return [
        RecordingFedTGP(
            h, setting(me, peers, linear_model(4, FEATURES, CLASSES, seed=me), data_of(me, classes), seed=SEED)
        )
        for me, classes in enumerate(classes_of)
    ]


# ---- rounds ------------------------------------------------------------------------------------------


def server(h: Hyper, rounds: Sequence[PrototypeTable]) -> list[Tensor]:
    """Return P̂ after each round, trained by autograd and torch's SGD from the shared start in the shared order."""
    with rng.torch_seeded(SEED, "fedtgp.init"):
        trainable = TrainablePrototypes(CLASSES, FEATURES, h.transform)
    trained = []
    for t, table in enumerate(rounds):
        shuffles = rng.shared(SEED, "net.shared", t)
        present = sorted(set(table.labels.tolist()))
        centers = np.array([table.values[table.labels == k].double().mean(0).numpy() for k in present])
        nearest = [min(d for (i, _), d in apart(centers).items() if i == c) for c in range(len(centers))]
        margin = {"adaptive": min(max(nearest), h.threshold), "none": 0.0, "fixed": h.threshold}[h.margin]
        optimizer = torch.optim.SGD(trainable.parameters(), lr=h.prototype_lr)
        for _ in range(h.prototype_epochs):
            order = shuffles.permutation(len(table.labels))
            for first in range(0, len(order), h.prototype_batch):
                chosen = order[first : first + h.prototype_batch]
                optimizer.zero_grad()
                acl_loss(table.values[chosen], table.labels[chosen], trainable(), margin).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        trained.append(trainable().detach().clone())
    return trained


@pytest.mark.exhaustive
@pytest.mark.parametrize("topology", [COMPLETE, LINE], ids=["complete", "line"])
@pytest.mark.parametrize(
    "given", [{}, {"margin": "none", "transform": False}, {"margin": "fixed", "threshold": 2.0}], ids=str
)
def test_every_peer_computes_what_the_papers_server_computes(given: dict[str, Any], topology: Topology) -> None:
    h = hyper(prototype_lr=0.1, **given)
    peers = make(h)
    sent: dict[tuple[int, int], Any] = {}

    def record(peer: Any, t: int) -> None:
        sent[peer.me, t] = peer.local_prototypes()

    run_rounds(peers, topology, 3, after=record)
    for peer in peers:
        for t in range(3):
            senders = sorted((peer.me, *topology.neighbors[peer.me]))
            assert peer.received[t].senders.tolist() == [j for j in senders for _ in LOCAL_CLASSES[j]]
            assert peer.received[t].labels.tolist() == [k for j in senders for k in LOCAL_CLASSES[j]]
            torch.testing.assert_close(peer.received[t].values, torch.cat([sent[j, t].values for j in senders]))
        for found, expected in zip(peer.trained, server(h, peer.received), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("topology", "trainings"), [(COMPLETE, 3), (LINE, 9)], ids=["complete", "line"])
def test_simulated_peers_with_equal_prototypes_train_them_once(
    topology: Topology, trainings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit-identical to each of them training its copy, as peers in processes of their own do."""
    calls: list[int] = []
    fit = TrainablePrototypes.fit

    def counted(self: TrainablePrototypes, *given: Any) -> None:
        calls.append(0)
        fit(self, *given)

    monkeypatch.setattr(TrainablePrototypes, "fit", counted)
    once, each = make(hyper()), make(hyper())
    run_rounds(once, topology, 3)
    assert len(calls) == trainings
    monkeypatch.setattr(Net, "memoized", lambda self, name, inputs, compute: compute())
    run_rounds(each, topology, 3)
    assert len(calls) == trainings + 3 * len(each)
    assert [digest(peer.state_dict()) for peer in once] == [digest(peer.state_dict()) for peer in each]


def copies(peers: Sequence[Any]) -> set[str]:
    """Digests of the peers' copies of P̂."""
    return {digest([peer.prototypes, peer.known, peer.trainable.state_dict()]) for peer in peers}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "given",
    [{}, {"margin": "pairwise-max"}, {"transform": False}, {"participation": 0.67}, {"participation": 0.34}],
    ids=str,
)
def test_copies_are_bit_identical_on_a_complete_graph(given: dict[str, Any]) -> None:
    """With different backbones, heads and samples."""
    peers = []
    for me, hidden in enumerate((3, 7, 16, 5)):
        backbone = nn.Sequential(nn.Flatten(), nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, FEATURES))
        head = nn.Sequential(nn.Linear(FEATURES, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES)) if me % 2 else None
        model = Model(f"net-{me}", backbone, FEATURES, CLASSES, head)
        data = data_of(me, [(0, 1), (1, 2), (0, 1, 2, 3), (3,)][me])
        peers.append(FedTGP(hyper(**given), setting(me, 4, model, data, seed=SEED)))
    assert len(copies(peers)) == 1
    complete = Topology.from_edges(4, [(i, j) for i in range(4) for j in range(i)])
    digests: dict[int, set[str]] = {}

    def note(peer: Any, t: int) -> None:
        digests.setdefault(t, set()).update(copies([peer]))

    run_rounds(peers, complete, 3, after=note)
    assert [len(digests[t]) for t in range(3)] == [1, 1, 1]
    assert len({*digests[0], *digests[1], *digests[2]}) == 3


def test_copies_differ_on_a_sparse_graph_after_an_equal_start() -> None:
    peers = make(hyper())
    assert len(copies(peers)) == 1
    run_rounds(peers, LINE, 1)
    assert len(copies(peers)) == 3


def test_initial_prototypes_depend_on_the_seed() -> None:
    peers = [
        FedTGP(hyper(), setting(0, 1, linear_model(4, FEATURES, CLASSES), data_of(0, (0,)), seed=seed))
        for seed in (0, 1)
    ]
    assert len(copies(peers)) == 2


def test_unknown_classes_are_never_predicted() -> None:
    peers = make(hyper())
    run_rounds(peers, LINE, 2)
    assert [peer.known.tolist() for peer in peers] == [[True, True, True, False]] * 3
    x = torch.rand(50, 1, 2, 2)
    for peer in peers:
        scores = peer.predict(x)
        assert scores[:, 3].tolist() == [-math.inf] * 50
        z = peer.model.backbone(x)
        for k in range(3):
            expected = torch.linalg.vector_norm(z - peer.prototypes[k], dim=1)
            torch.testing.assert_close(scores[:, k], -expected)


@pytest.mark.exhaustive
def test_features_approach_the_trained_prototypes() -> None:
    peers = make(hyper(alignment=10.0, lr=0.05, local_epochs=8))
    gap: list[float] = []

    def note(peer: Any, t: int) -> None:
        local = peer.local_prototypes()
        gap.append(float((local.values - peer.prototypes[list(local.classes)]).norm(dim=1).mean()))

    run_rounds(peers, COMPLETE, 5, after=note)
    assert np.mean(gap[-3:]) < 0.5 * np.mean(gap[:3])


def test_training_skips_a_missing_neighbor() -> None:
    peers = make(hyper())
    traffic = run_rounds(peers, COMPLETE, 2, silent=[2])
    assert traffic[0][0].missing == {"Prototypes": [2]}
    assert len(copies(peers[:2])) == 1
    for found, expected in zip(peers[0].trained, server(peers[0].hyper, peers[0].received), strict=True):
        assert set(peers[0].received[0].senders.tolist()) == {0, 1}
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_round_without_received_prototypes_changes_nothing() -> None:
    peers = make(hyper(participation=1 / 3))
    states: dict[tuple[int, int], str] = {}
    run_rounds(peers, LINE, 5, after=lambda peer, t: states.update({(peer.me, t): next(iter(copies([peer])))}))
    senders = [int(rng.shared(SEED, "net.participants", t).permutation(3)[0]) for t in range(5)]
    for peer in peers:
        for t in range(1, 5):
            receives = senders[t] in (peer.me, *LINE.neighbors[peer.me])
            assert (states[peer.me, t] != states[peer.me, t - 1]) == receives
    assert any(abs(sender - me) == 2 for sender in senders[1:] for me in range(3))


# ---- options ----------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "change",
    [
        {"margin": "pairwise-max"},
        {"margin": "fixed"},
        {"margin": "none"},
        {"threshold": 0.01},
        {"transform": False},
        {"prototype_epochs": 2},
        {"prototype_batch": 1},
        {"prototype_lr": 0.1},
        {"alignment": 0.5},
        {"distance": "euclidean"},
        {"participation": 0.67},
    ],
    ids=str,
)
def test_every_option_changes_the_model(change: dict[str, Any]) -> None:
    digests = []
    for h in (hyper(), hyper(**change)):
        peers = make(h)
        run_rounds(peers, COMPLETE, 2)
        digests.append(digest([peer.model.state_dict() for peer in peers]))
    assert digests[0] != digests[1]


def test_local_training_equals_fedprotos_with_the_same_prototypes() -> None:
    class Means(FedTGP):
        def train_prototypes(self, table: PrototypeTable, margin: float, net: Net) -> None:
            means, present = class_means(table, CLASSES, weighted=False)
            self.prototypes = torch.where(present[:, None], means, self.prototypes)

    ends = []
    for method, h in ((FedProto, FedProtoHyper.parse({"lr": 0.1, "batch": 4, "weighted": False})), (Means, hyper())):
        peers: list[Any] = [
            method(h, setting(me, 3, linear_model(4, FEATURES, CLASSES, seed=me), data_of(me, classes), seed=SEED))  # type: ignore[arg-type]
            for me, classes in enumerate(LOCAL_CLASSES)
        ]
        run_rounds(peers, COMPLETE, 3)
        ends.append(digest([[peer.model.state_dict(), peer.prototypes] for peer in peers]))
    assert ends[0] == ends[1]


# ---- messages and state ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("topology", [COMPLETE, LINE], ids=["complete", "line"])
def test_payload_bytes_match_table_5_without_a_server(topology: Topology) -> None:
    peers = make(hyper())
    traffic = run_rounds(peers, topology, 2)
    numbers = sum(FEATURES * len(LOCAL_CLASSES[sender]) for sender in range(3) for _ in topology.neighbors[sender])
    for t in range(2):
        assert sum(payload(peer[t].sent) for peer in traffic) == 4 * numbers
        assert sum(payload(peer[t].received) for peer in traffic) == 4 * numbers
        assert sum(messages(peer[t].sent) for peer in traffic) == sum(map(len, topology.neighbors))


def test_sends_no_sample_counts() -> None:
    assert make(hyper())[2].local_prototypes().samples == ()


def test_state_round_trips() -> None:
    one, other = make(hyper()), make(hyper())
    run_rounds(one, COMPLETE, 2)
    state = one[0].state_dict()
    other[0].load_state_dict(state)
    assert digest(other[0].state_dict()) == digest(state)


def test_diagnostics_include_the_margin() -> None:
    peers = make(hyper(margin="fixed", threshold=2.0))
    observed: list[Mapping[str, float]] = []
    run_rounds(peers, COMPLETE, 2, after=lambda peer, t: observed.append(dict(peer.diagnostics())))
    assert all(set(values) == {"margin", "peer_margin", "wider", "delta"} for values in observed)
    assert {values["delta"] for values in observed} == {2.0}
    assert peers[0].diagnostics()["margin"] == pytest.approx(float(margins(peers[0].prototypes[:3]).min()))


def test_stop_interrupts_the_training_of_prototypes() -> None:
    class Stopped(Exception):
        pass

    (peer,) = make(hyper(prototype_epochs=1000), classes_of=[(0, 1)])
    calls = 0

    def after_batch() -> None:
        nonlocal calls
        calls += 1
        if calls == 20:  # 2 batches of local training, then epochs of P̂
            raise Stopped

    peer.after_batch = after_batch
    with pytest.raises(ExceptionGroup) as group:
        run_rounds([peer], Topology.from_edges(1, []), 1)
    assert group.group_contains(Stopped)
    assert calls == 20
