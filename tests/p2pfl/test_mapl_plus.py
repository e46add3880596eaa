"""MAPL+ against its paper: a round of MAPL, then backbones and projectors mixed with the same weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from p2pfl.algorithms import mapl
from p2pfl.algorithms.mapl import MAPL
from p2pfl.algorithms.mapl_plus import Backbone, Hyper, MAPLPlus, mix
from p2pfl.errors import RunFileError
from p2pfl.models import Model
from p2pfl.tensors import digest
from p2pfl.topology import Topology
from tests.p2pfl.support import messages, payload, peer_data, play, random_dataset, setting

FEATURES, CLASSES, HIDDEN = 5, 3, 4
LINE = Topology.from_edges(3, [(0, 1), (1, 2)])
COMPLETE = Topology.from_edges(3, [(0, 1), (0, 2), (1, 2)])

Named = dict[str, NDArray[np.float64]]


def hyper(**given: Any) -> Hyper:
    return Hyper.parse({"projector_hidden": HIDDEN, "lr": 0.01, **given})


def make(h: Hyper, of: type[MAPL] = MAPLPlus, *, seed: int = 0) -> list[Any]:
    """Three peers with one small network, batch normalisation in it; peer i has 4 + 2 i samples of its own noise."""
    made = []
    for me in range(3):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)  # one initial model, as the session makes for homogeneous methods
            backbone = nn.Sequential(nn.Flatten(), nn.Linear(4, FEATURES), nn.BatchNorm1d(FEATURES))
            model = Model("normed", backbone, FEATURES, CLASSES)
        data = peer_data(random_dataset(60, classes=CLASSES, seed=me), range(4 + 2 * me))
        made.append(of(h, setting(me, 3, model, data)))
    return made


def theta(peer: MAPLPlus) -> Named:
    """Parameters of backbone and projector, by a list of our own."""
    modules = {"backbone": peer.model.backbone, "projector": peer.projector}
    return {
        f"{part}.{name}": value.detach().double().numpy().copy()
        for part, module in modules.items()
        for name, value in module.named_parameters()
    }


class Watched(MAPLPlus):
    """Remembers what it had after the local training of each round."""

    def setup(self) -> None:
        super().setup()
        self.trained: list[Named] = []

    def personalized_model_learning(self) -> None:
        super().personalized_model_learning()
        self.trained.append(theta(self))


# ---- mixing ------------------------------------------------------------------------------------------------


def one(value: float) -> dict[str, Tensor]:
    return {"x": torch.tensor([value])}


def mixed(own: float, theirs: Mapping[int, float], w: Sequence[float], me: int) -> float:
    bodies = {j: one(value) for j, value in theirs.items()}
    return float(mix(one(own), bodies, torch.tensor(w, dtype=torch.float64), me)["x"])


def test_the_mix_is_weighted() -> None:
    assert mixed(1, {0: 10, 2: 100}, [0.25, 0.25, 0.5], 1) == 0.25 * 10 + 0.25 * 1 + 0.5 * 100


def test_weights_of_those_who_are_missing_are_shared_out() -> None:
    assert mixed(1, {0: 10}, [0.25, 0.25, 0.5], 1) == pytest.approx(5.5)


def test_who_has_no_weight_takes_no_part_whatever_it_sent() -> None:
    assert mixed(1, {0: math.nan, 2: 3}, [0.0, 0.5, 0.5], 1) == 2.0


def test_without_any_weight_among_those_who_are_here_nothing_changes() -> None:
    assert mixed(1, {2: 7}, [1.0, 0.0, 0.0], 1) == 1.0


# ---- whole rounds by hand ----------------------------------------------------------------------------------


@pytest.mark.parametrize("topology", [LINE, COMPLETE], ids=["line", "complete"])
def test_backbones_and_projectors_are_mixed_with_the_rounds_weights(topology: Topology) -> None:
    rounds = 4
    peers = make(hyper(warmup=2, graph_lr=1.0), Watched)
    after: dict[tuple[int, int], tuple[NDArray[np.float64], Named]] = {}

    def note(peer: Any, t: int) -> None:
        after[peer.me, t] = peer.w.numpy().copy(), theta(peer)

    play(peers, topology, rounds, after=note)
    uneven = False
    for me in range(3):
        for t in range(rounds):
            w, found = after[me, t]
            assert w.sum() == pytest.approx(1.0)
            if t < 2:  # before CGL: uniform over the neighbourhood
                assert {w[j] for j in (me, *topology.neighbors[me])} == {1 / (1 + len(topology.neighbors[me]))}
            uneven = uneven or len({round(x, 9) for x in w if x > 0}) > 1
            for name, value in found.items():
                expected = sum(w[j] * peers[j].trained[t][name] for j in range(3) if w[j] > 0)
                np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-7, err_msg=name)
    assert uneven


def test_everything_else_is_mapls() -> None:
    """In one round, before any mixed backbone is trained: same losses, graph, heads, prototypes, statistics."""
    h = hyper(warmup=0)
    plus, plain = make(h), make(h, MAPL)
    play(plus, COMPLETE, 1)
    play(plain, COMPLETE, 1)
    for left, right in zip(plus, plain, strict=True):
        assert left.weights() == right.weights()
        assert torch.equal(left.prototypes, right.prototypes)
        assert torch.equal(left.model.head.weight, right.model.head.weight)
        assert torch.equal(left.model.head.bias, right.model.head.bias)
        for module in ("model", "projector"):
            ours, theirs = (dict(getattr(peer, module).named_buffers()) for peer in (left, right))
            assert ours
            assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_with_equal_weights_all_have_one_backbone_but_heads_and_statistics_of_their_own() -> None:
    peers = make(hyper(cgl=False))
    play(peers, COMPLETE, 2)
    for peer in peers[1:]:
        for name, value in theta(peer).items():
            np.testing.assert_array_equal(value, theta(peers[0])[name])
        assert not torch.equal(peer.model.head.weight, peers[0].model.head.weight)
        assert not torch.equal(peer.model.backbone[2].running_mean, peers[0].model.backbone[2].running_mean)


def test_the_mixed_backbone_is_what_the_next_round_trains() -> None:
    peers = make(hyper(cgl=False, lr=1e-9), Watched)
    play(peers, COMPLETE, 2)
    for peer in peers:
        for name, value in peer.trained[1].items():
            expected = sum(other.trained[0][name] for other in peers) / 3
            np.testing.assert_allclose(value, expected, atol=1e-6, err_msg=name)


# ---- who is missing, who diverges --------------------------------------------------------------------------


def test_a_missing_neighbour_is_left_out_of_the_mix() -> None:
    peers = make(hyper(cgl=False), Watched)
    spoken = play(peers, COMPLETE, 1, silent=[2])
    assert spoken[0][0].missing == {"Prototypes": [2], "Backbone": [2]}
    for me in (0, 1):
        assert peers[me].weights() == dict.fromkeys(range(3), 1 / 3)
        for name, value in theta(peers[me]).items():
            expected = (peers[0].trained[0][name] + peers[1].trained[0][name]) / 2
            np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-7)


class HalfDiverged(MAPLPlus):
    """The last peer's backbone is infinite; head and prototypes are not."""

    def travelling(self) -> dict[str, Tensor]:
        values = super().travelling()
        if self.me == 2 and hasattr(self, "endpoint_is_up"):
            values = {name: torch.full_like(value, math.inf) for name, value in values.items()}
        return values

    def personalized_model_learning(self) -> None:
        super().personalized_model_learning()
        self.endpoint_is_up = True


def test_an_infinite_backbone_is_left_out_and_its_prototypes_are_not() -> None:
    peers, without = make(hyper(cgl=False), HalfDiverged), make(hyper(cgl=False))
    spoken = play(peers, COMPLETE, 1)
    play(without, COMPLETE, 1, silent=[2])
    assert spoken[0][0].missing == {"Backbone": [2]}
    for name, value in theta(peers[0]).items():
        np.testing.assert_array_equal(value, theta(without[0])[name])
    assert not torch.equal(peers[0].prototypes, without[0].prototypes)


# ---- what it costs, and what it takes ----------------------------------------------------------------------


@pytest.mark.parametrize("topology", [LINE, COMPLETE], ids=["line", "complete"])
def test_payload_bytes_are_mapls_and_the_backbones(topology: Topology) -> None:
    spoken = play(make(hyper(warmup=1, prune=False)), topology, 3)
    edges = sum(map(topology.degree, range(3))) // 2
    prototypes = head = FEATURES * CLASSES
    backbone = 4 * FEATURES + FEATURES + 2 * FEATURES  # linear; gains and biases of the normalisation
    projector = FEATURES * HIDDEN + HIDDEN + 2 * HIDDEN + HIDDEN * FEATURES + FEATURES
    for t, heads in enumerate((0, head, head)):
        for side in ("out", "inn"):
            sent = sum(payload(getattr(peer[t], side)) for peer in spoken)
            assert sent == 4 * 2 * edges * (prototypes + heads + backbone + projector)
        assert sum(messages(peer[t].out, "Backbone") for peer in spoken) == 2 * edges


def test_backbones_are_refused_unless_every_name_and_shape_is_right() -> None:
    (peer, *_) = make(hyper())
    layout = peer.layouts()[-1]
    assert layout.body is Backbone
    assert {key: spec.shape for (_, key), spec in layout.tensors.items()} == {
        name: value.shape for name, value in theta(peer).items()
    }


def test_different_architectures_are_refused(make_run: Any) -> None:
    with pytest.raises(RunFileError, match=r"mapl\+"):
        make_run(models="tiny4", algorithm={"name": "mapl+"})


def test_its_hyper_parameters_and_state_are_mapls() -> None:
    assert Hyper.known() == (*mapl.Hyper.known(), "spool")
    assert Hyper.PRESETS == mapl.Hyper.PRESETS
    assert MAPLPlus.state == MAPL.state


def test_backbones_that_wait_on_disk_do_not_change_a_bit() -> None:
    ends = []
    for spool in (False, True):
        peers = make(hyper(warmup=1, spool=spool))
        play(peers, COMPLETE, 3)
        ends.append([digest(peer.state_dict()) for peer in peers])
        assert all(peer.spool.size > 0 if spool else peer.spool is None for peer in peers)
    assert ends[0] == ends[1]
