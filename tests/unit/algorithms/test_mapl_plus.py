"""MAPL+ against its paper: a round of MAPL, then backbones and projectors averaged with the same weights."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from p2pfl.algorithms import mapl
from p2pfl.algorithms.mapl import MAPL
from p2pfl.algorithms.mapl_plus import Backbone, Hyper, MAPLPlus
from p2pfl.errors import RunFileError
from p2pfl.messaging.topology import Topology
from p2pfl.models import Model
from p2pfl.tensors import digest
from tests.support import messages, payload, peer_data, random_dataset, run_rounds, setting

FEATURES, CLASSES, HIDDEN = 5, 3, 4
LINE = Topology.from_edges(3, [(0, 1), (1, 2)])
COMPLETE = Topology.from_edges(3, [(0, 1), (0, 2), (1, 2)])

Named = dict[str, NDArray[np.float64]]


def hyper(**given: Any) -> Hyper:
    return Hyper.parse({"projector_hidden": HIDDEN, "lr": 0.01, **given})


def make(h: Hyper, of: type[MAPL] = MAPLPlus, *, seed: int = 0) -> list[Any]:
    """Three peers with one small network with batch normalization; peer i has 4 + 2 i samples."""
    made = []
    for me in range(3):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)  # one initial model, as for all homogeneous algorithms
            backbone = nn.Sequential(nn.Flatten(), nn.Linear(4, FEATURES), nn.BatchNorm1d(FEATURES))
            model = Model("normed", backbone, FEATURES, CLASSES)
        data = peer_data(random_dataset(60, classes=CLASSES, seed=me), range(4 + 2 * me))
        made.append(of(h, setting(me, 3, model, data)))
    return made


def theta(peer: MAPLPlus) -> Named:
    """Parameters of backbone and projector."""
    modules = {"backbone": peer.model.backbone, "projector": peer.projector}
    return {
        f"{part}.{name}": value.detach().double().numpy().copy()
        for part, module in modules.items()
        for name, value in module.named_parameters()
    }


class RecordingMAPLPlus(MAPLPlus):
    """Records ϑ after the local training of each round."""

    def setup(self) -> None:
        super().setup()
        self.trained: list[Named] = []

    def personalized_model_learning(self) -> None:
        super().personalized_model_learning()
        self.trained.append(theta(self))


# ---- rounds by hand ----------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("topology", [LINE, COMPLETE], ids=["line", "complete"])
def test_backbones_and_projectors_are_averaged_with_the_rounds_weights(topology: Topology) -> None:
    rounds = 4
    peers = make(hyper(warmup=2, graph_lr=1.0), RecordingMAPLPlus)
    after: dict[tuple[int, int], tuple[NDArray[np.float64], Named]] = {}

    def note(peer: Any, t: int) -> None:
        after[peer.me, t] = peer.w.numpy().copy(), theta(peer)

    run_rounds(peers, topology, rounds, after=note)
    uneven = False
    for me in range(3):
        for t in range(rounds):
            w, found = after[me, t]
            assert w.sum() == pytest.approx(1.0)
            if t < 2:  # before CGL: uniform over the neighborhood
                assert {w[j] for j in (me, *topology.neighbors[me])} == {1 / (1 + len(topology.neighbors[me]))}
            uneven = uneven or len({round(x, 9) for x in w if x > 0}) > 1
            for name, value in found.items():
                expected = sum(w[j] * peers[j].trained[t][name] for j in range(3) if w[j] > 0)
                np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-7, err_msg=name)
    assert uneven


@pytest.mark.parametrize("given", [{}, {"contrastive": False, "single_view": True}], ids=["two views", "one view"])
def test_first_round_matches_mapl_except_for_backbones(given: dict[str, bool]) -> None:
    h = hyper(warmup=0, **given)
    plus, plain = make(h), make(h, MAPL)
    run_rounds(plus, COMPLETE, 1)
    run_rounds(plain, COMPLETE, 1)
    for left, right in zip(plus, plain, strict=True):
        assert left.weights() == right.weights()
        assert torch.equal(left.prototypes, right.prototypes)
        assert torch.equal(left.model.head.weight, right.model.head.weight)
        assert torch.equal(left.model.head.bias, right.model.head.bias)
        for module in ("model", "projector"):
            buffers, expected = (dict(getattr(peer, module).named_buffers()) for peer in (left, right))
            assert buffers
            assert all(torch.equal(buffers[name], expected[name]) for name in buffers)


def test_equal_weights_give_equal_backbones_with_local_heads_and_statistics() -> None:
    peers = make(hyper(cgl=False))
    run_rounds(peers, COMPLETE, 2)
    for peer in peers[1:]:
        for name, value in theta(peer).items():
            np.testing.assert_array_equal(value, theta(peers[0])[name])
        assert not torch.equal(peer.model.head.weight, peers[0].model.head.weight)
        assert not torch.equal(peer.model.backbone[2].running_mean, peers[0].model.backbone[2].running_mean)


def test_next_round_trains_the_averaged_backbone() -> None:
    peers = make(hyper(cgl=False, lr=1e-9), RecordingMAPLPlus)
    run_rounds(peers, COMPLETE, 2)
    for peer in peers:
        for name, value in peer.trained[1].items():
            expected = sum(other.trained[0][name] for other in peers) / 3
            np.testing.assert_allclose(value, expected, atol=1e-6, err_msg=name)


# ---- missing and diverged peers --------------------------------------------------------------------------


def test_average_skips_a_missing_neighbor() -> None:
    peers = make(hyper(cgl=False), RecordingMAPLPlus)
    traffic = run_rounds(peers, COMPLETE, 1, silent=[2])
    assert traffic[0][0].missing == {"Prototypes": [2], "Backbone": [2]}
    for me in (0, 1):
        assert peers[me].weights() == dict.fromkeys(range(3), 1 / 3)
        for name, value in theta(peers[me]).items():
            expected = (peers[0].trained[0][name] + peers[1].trained[0][name]) / 2
            np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-7)


class HalfDiverged(MAPLPlus):
    """The last peer's backbone is infinite, its head and prototypes are not."""

    def personalized_model_learning(self) -> None:
        super().personalized_model_learning()
        if self.me == 2:
            for value in self.local_backbone().values():
                value.fill_(math.inf)


def test_average_skips_an_infinite_backbone_but_not_its_prototypes() -> None:
    peers, without = make(hyper(cgl=False), HalfDiverged), make(hyper(cgl=False))
    traffic = run_rounds(peers, COMPLETE, 1)
    run_rounds(without, COMPLETE, 1, silent=[2])
    assert traffic[0][0].missing == {"Backbone": [2]}
    for name, value in theta(peers[0]).items():
        np.testing.assert_array_equal(value, theta(without[0])[name])
        np.testing.assert_allclose(theta(peers[2])[name], value, rtol=1e-5, atol=1e-7)  # takes the others' average
    assert not torch.equal(peers[0].prototypes, without[0].prototypes)


# ---- messages and hyper-parameters ----------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("topology", [LINE, COMPLETE], ids=["line", "complete"])
def test_payload_is_mapls_plus_the_backbones(topology: Topology) -> None:
    traffic = run_rounds(make(hyper(warmup=1, prune=False)), topology, 3)
    edges = sum(map(topology.degree, range(3))) // 2
    prototypes = head = FEATURES * CLASSES
    backbone = 4 * FEATURES + FEATURES + 2 * FEATURES  # linear layer; scales and biases of the normalization
    projector = FEATURES * HIDDEN + HIDDEN + 2 * HIDDEN + HIDDEN * FEATURES + FEATURES
    for t, heads in enumerate((0, head, head)):
        for side in ("sent", "received"):
            sent = sum(payload(getattr(peer[t], side)) for peer in traffic)
            assert sent == 4 * 2 * edges * (prototypes + heads + backbone + projector)
        assert sum(messages(peer[t].sent, "Backbone") for peer in traffic) == 2 * edges


def test_layout_fixes_every_name_and_shape_of_the_backbone() -> None:
    (peer, *_) = make(hyper())
    layout = peer.layouts()[-1]
    assert layout.body is Backbone
    assert {key: spec.shape for (_, key), spec in layout.tensors.items()} == {
        name: value.shape for name, value in theta(peer).items()
    }


def test_rejects_different_architectures(make_run: Any) -> None:
    with pytest.raises(RunFileError, match=r"mapl\+"):
        make_run(models="tiny4", algorithm={"name": "mapl+"})


def test_hyper_parameters_and_state_are_mapls_plus_spool() -> None:
    assert Hyper.known() == (*mapl.Hyper.known(), "spool")
    assert Hyper.PRESETS == mapl.Hyper.PRESETS
    assert MAPLPlus.state == MAPL.state


def test_spooling_is_bit_identical() -> None:
    ends = []
    for spool in (False, True):
        peers = make(hyper(warmup=1, spool=spool))
        run_rounds(peers, COMPLETE, 3)
        ends.append([digest(peer.state_dict()) for peer in peers])
    assert ends[0] == ends[1]
