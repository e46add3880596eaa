"""Decentralized HeteroFL and FedRolex: slices and means by hand, rounds against a server, divergence."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from p2pfl.algorithms.aggregator_roles import Assignment
from p2pfl.algorithms.fedavg_dec import Averaged, FedAvgDec, Hyper, Trained
from p2pfl.algorithms.fedrolex import AveragedSlice, FedRolex, TrainedSlice
from p2pfl.algorithms.heterofl import HeteroFL
from p2pfl.algorithms.width_scaling import Slice, Whole, Width, by_width, common_steps
from p2pfl.errors import ModelError, Unexpected
from p2pfl.messaging.topology import Topology
from p2pfl.models import Model, build
from p2pfl.models.dfml import LocalSelfAttention
from p2pfl.options import OptionErrors
from p2pfl.tensors import Tensors, parameters_of
from tests.bodies import arrive, net_of
from tests.support import messages, payload, peer_data, random_dataset, run_rounds, setting

INPUTS, CLASSES = 4, 3
NAMES = ("6-3", "4-2", "2-1", "4-2", "6-3")
"""Widths of two layers. The common steps of the widest are gcd(6, 3) = 3."""
COMPLETE = Topology.from_edges(5, [(i, j) for i in range(5) for j in range(i)])
LINE = Topology.from_edges(5, [(0, 1), (1, 2), (2, 3), (3, 4)])

Arrays = dict[str, NDArray[np.float64]]


def network(name: str) -> Model:
    """``6-3`` has layers of 6 and 3; ``6-3bn`` also batch normalization. From torch's global RNG."""
    first, second = (int(width) for width in name.removesuffix("bn").split("-"))
    norm = [nn.BatchNorm1d(first)] if name.endswith("bn") else []
    layers = [nn.Flatten(), nn.Linear(INPUTS, first), *norm, nn.ReLU(), nn.Linear(first, second), nn.ReLU()]
    return Model(name, nn.Sequential(*layers), second, CLASSES)


def make(of: type[FedAvgDec], h: Hyper, names: Sequence[str] = NAMES) -> list[Any]:
    peers = []
    for me, name in enumerate(names):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(me)
            data = peer_data(random_dataset(8 + me, classes=CLASSES, seed=me))
            given = setting(me, len(names), network(name), data)
        peers.append(of(h, replace(given, architectures=tuple(names), build=lambda peer: network(names[peer]))))
    return peers


def without_training(peers: Sequence[Any]) -> None:
    """Let local training multiply the weights and add to them, by amounts of each peer."""
    for peer in peers:
        peer.local_training = lambda peer=peer: change(parameters_of(peer.model), peer.me)


def change(values: Mapping[str, Tensor] | Arrays, me: int) -> None:
    for tensor in values.values():
        tensor *= 1.0 + me / 8
        tensor += me + 1.0


def arrays(peer: FedAvgDec) -> Arrays:
    return {name: value.double().numpy().copy() for name, value in parameters_of(peer.model).items()}


def assignments(peers: Sequence[FedAvgDec], topology: Topology, rounds: int) -> list[Assignment]:
    net = net_of(0, topology, 0, 0)
    return [peers[0].schedule.assignment(t, net) for t in range(rounds)]


# ---- slices and means ----------------------------------------------------------------------------------------


def width(name: str, **shapes: tuple[int, ...]) -> Width:
    return Width(name, shapes, shapes)


WIDE, NARROW = width("wide", w=(3, 2), b=(3,)), width("narrow", w=(2, 2), b=(2,))


def test_entry_is_averaged_over_the_models_that_hold_it() -> None:
    wide = {"w": torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), "b": torch.tensor([0.0, 3.0, 9.0])}
    narrow = {"w": torch.tensor([[3.0, 0.0], [5.0, 8.0]]), "b": torch.tensor([2.0, 4.0])}
    whole = Whole.mean(WIDE, 1, [(Slice(WIDE), wide), (Slice(NARROW), narrow)])
    assert whole.means["w"].tolist() == [[2.0, 1.0], [4.0, 6.0], [5.0, 6.0]]
    assert whole.means["b"].tolist() == [1.0, 3.5, 9.0]
    taken = whole.take(Slice(NARROW))
    assert (taken["w"].tolist(), taken["b"].tolist()) == ([[2.0, 1.0], [4.0, 6.0]], [1.0, 3.5])


def test_rolled_slice_starts_over_after_the_last_channel() -> None:
    wide = {"w": torch.arange(6.0).reshape(3, 2), "b": torch.tensor([0.0, 1.0, 2.0])}
    whole = Whole.mean(WIDE, 3, [(Slice(WIDE, first=2), wide)])
    assert whole.means["b"].tolist() == [0.0, 1.0, 2.0]  # the widest is not rolled
    assert [whole.take(Slice(NARROW, first))["b"].tolist() for first in range(3)] == [[0, 1], [1, 2], [2, 0]]
    assert whole.take(Slice(NARROW, 2))["w"].tolist() == [[4.0, 5.0], [0.0, 1.0]]


def test_slice_is_held_only_if_all_of_its_entries_are() -> None:
    narrow = {"w": torch.ones(2, 2), "b": torch.ones(2)}
    whole = Whole.mean(WIDE, 3, [(Slice(NARROW, 1), narrow)])
    assert [whole.holds(Slice(NARROW, first)) for first in range(3)] == [False, True, False]
    assert not whole.holds(Slice(WIDE))


def test_slices_move_by_whole_channels_of_every_layer() -> None:
    assert common_steps(width("wide", w=(6, 4), b=(9,), c=(5,)), width("narrow", w=(3, 4), b=(3,), c=(5,))) == 3
    assert common_steps(WIDE, WIDE) == 1
    for group, steps in (("dfml-h1-cnn", 128), ("dfml-h1-resnet", 64), ("dfml-h1-vit", 8)):
        with torch.device("meta"):
            models = [build(group, peer, 3, (32, 32), 10) for peer in range(5)]
        ordered = by_width([Width.of(model, parameters_of(model)) for model in models])
        assert [each.name for each in ordered] == [model.name for model in reversed(models)]
        assert common_steps(ordered[-1], ordered[0]) == steps


def convolutional(width: int) -> Model:
    layers = (nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3), nn.ReLU(), nn.Flatten())
    return Model(f"conv-{width}", nn.Sequential(*layers), width * 4, CLASSES)


@pytest.mark.parametrize("first", range(4))
def test_rolled_slice_computes_what_its_channels_compute_in_the_widest_network(first: int) -> None:
    wide, narrow = convolutional(4), convolutional(2)
    channels = [(first + k) % 4 for k in range(2)]
    with torch.no_grad():
        for layer in (wide.backbone[0], wide.backbone[2]):  # type: ignore[index]
            for channel in set(range(4)) - set(channels):
                layer.weight[channel] = layer.bias[channel] = 0.0
    widths = [Width.of(model, parameters_of(model)) for model in (wide, narrow)]
    whole = Whole.mean(widths[0], 4, [(Slice(widths[0]), parameters_of(wide))])
    narrow.load_state_dict(whole.take(Slice(widths[1], first)))
    x = torch.rand(5, 1, 4, 4)
    torch.testing.assert_close(narrow(x), wide(x))


@pytest.mark.parametrize("first", [0, 1])
def test_slice_of_attention_has_whole_heads(first: int) -> None:
    def attention(dim: int) -> Model:
        return Model(f"attention-{dim}", LocalSelfAttention(dim, 3, 0.0), dim, CLASSES)

    wide, narrow = attention(128), attention(64)
    channels = slice(64 * first, 64 * first + 64)
    widths = [Width.of(model, parameters_of(model)) for model in (wide, narrow)]
    whole = Whole.mean(widths[0], 2, [(Slice(widths[0]), parameters_of(wide))])
    narrow.load_state_dict(whole.take(Slice(widths[1], first)))
    x = torch.zeros(2, 3, 128)
    x[..., channels] = torch.randn(2, 3, 64)
    with torch.no_grad():
        out: Any = wide.backbone.out[0]  # type: ignore[index]
        out.weight[:, [k for k in range(128) if k not in range(128)[channels]]] = 0.0
        torch.testing.assert_close(narrow.backbone(x[..., channels]), wide.backbone(x)[..., channels])


# ---- families ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (("6-3", "4-4"), r"backbone\.3\.weight is 4x4 in 4-4, but 3x6 in 6-3"),
        (("6-3", "4-2bn"), r"only 4-2bn has a tensor backbone\.2\.bias"),
    ],
)
@pytest.mark.parametrize("of", [HeteroFL, FedRolex])
def test_networks_of_other_families_are_an_error(of: type[FedAvgDec], names: tuple[str, str], problem: str) -> None:
    with pytest.raises(OptionErrors, match=f"{of.name} needs width-scaled versions of one network, but {problem}"):
        make(of, Hyper(), names)


def test_another_number_of_dimensions_is_an_error() -> None:
    with pytest.raises(ModelError, match="w is 2x2 in flat, but 2x2x2 in deep"):
        by_width([width("flat", w=(2, 2)), width("deep", w=(2, 2, 2))])


def test_tensor_with_several_matrices_is_not_sliced() -> None:
    class Last(nn.LSTM):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x)[0]

    def lstm(name: str, hidden: int) -> Width:
        model = Model(name, Last(INPUTS, hidden), hidden, CLASSES)
        return Width.of(model, parameters_of(model))

    assert len(by_width([lstm("wide", 8), lstm("same", 8)])) == 2
    with pytest.raises(ModelError, match=r"backbone\.weight_ih_l0 of wide is a stack of several matrices"):
        by_width([lstm("wide", 8), lstm("narrow", 4)])


def test_pooled_features_are_not_sliced() -> None:
    def cnn(name: str) -> Width:
        model = build(name, 0, channels=1, size=(8, 8), classes=CLASSES, features=16)
        return Width.of(model, parameters_of(model))

    assert len(by_width([cnn("dfml-cnn-32-64"), cnn("dfml-cnn-32-64")])) == 2
    with pytest.raises(ModelError, match=r"features of dfml-cnn-.* are averages over channels, as models\.features"):
        by_width([cnn("dfml-cnn-32-64"), cnn("dfml-cnn-16-32")])


@pytest.mark.parametrize("of", [HeteroFL, FedRolex])
def test_networks_start_as_first_channels_of_the_widest(of: type[FedAvgDec]) -> None:
    peers = make(of, Hyper())
    widest = arrays(peers[0])
    for peer in peers:
        for name, value in arrays(peer).items():
            np.testing.assert_array_equal(value, widest[name][tuple(map(slice, value.shape))])


# ---- rounds against the papers' server -----------------------------------------------------------------------


def indices(shape: tuple[int, ...], whole: tuple[int, ...], t: int) -> list[tuple[int, ...]]:
    """The entries of the widest network's tensor that a network holds, in the order of its own; t of 3 steps on."""
    each = [
        range(n) if n == size else [(t % 3 * size // 3 + k) % size for k in range(n)]
        for n, size in zip(shape, whole, strict=True)
    ]
    return list(itertools.product(*each))


def taken(server: Arrays, like: Arrays, t: int) -> Arrays:
    return {
        name: np.array([server[name][at] for at in indices(value.shape, server[name].shape, t)]).reshape(value.shape)
        for name, value in like.items()
    }


def averaged(models: Sequence[tuple[Arrays, int]], shapes: Arrays) -> Arrays:
    """The mean of each entry over the (network, step) that hold it; NaN where none does."""
    server = {}
    for name, whole in shapes.items():
        entries: dict[tuple[int, ...], list[float]] = {}
        for model, t in models:
            for at, value in zip(indices(model[name].shape, whole.shape, t), model[name].flat, strict=True):
                entries.setdefault(at, []).append(float(value))
        server[name] = np.full(whole.shape, np.nan)
        for at, held in entries.items():
            server[name][at] = np.mean(held)
    return server


@pytest.mark.parametrize("of", [HeteroFL, FedRolex])
def test_full_participation_on_a_complete_graph_is_the_papers_server(of: type[FedAvgDec]) -> None:
    peers = make(of, Hyper(participation=1.0))
    without_training(peers)
    server, clients = arrays(peers[0]), [arrays(peer) for peer in peers]
    run_rounds(peers, COMPLETE, 5)
    for t in range(5):
        step = t if of is FedRolex else 0
        for me in range(5):
            clients[me] = taken(server, clients[me], step)  # sent by the server
            change(clients[me], me)
        server = averaged([(client, step) for client in clients], server)
    for peer in peers:
        for name, value in taken(server, arrays(peer), 5 if of is FedRolex else 0).items():
            np.testing.assert_allclose(arrays(peer)[name], value, rtol=1e-4)


@pytest.mark.parametrize("of", [HeteroFL, FedRolex])
@pytest.mark.parametrize("topology", [COMPLETE, LINE], ids=["complete", "line"])
def test_rounds_follow_algorithm_3(of: type[FedAvgDec], topology: Topology) -> None:
    peers = make(of, Hyper(participation=0.4), names=("2-1", "4-2", "2-1", "4-2", "6-3"))
    without_training(peers)
    w, first, shapes = [arrays(peer) for peer in peers], [0] * 5, arrays(peers[4])
    run_rounds(peers, topology, 8)
    lacking = 0
    for t, assignment in enumerate(assignments(peers, topology, 8)):
        for n in assignment.participants:
            change(w[n], n)
        server = averaged([(w[n], first[n]) for n in assignment.participants], shapes)
        for n in assignment.participants:
            following = taken(server, w[n], t + 1 if of is FedRolex else 0)
            if any(np.isnan(value).any() for value in following.values()):  # nobody holds some of it
                lacking += 1
                w[n] = taken(server, w[n], first[n])
            else:
                w[n], first[n] = following, t + 1 if of is FedRolex else 0
    assert (lacking > 0) == (of is FedRolex)
    for peer, expected in zip(peers, w, strict=True):
        for name, value in expected.items():
            np.testing.assert_allclose(arrays(peer)[name], value, rtol=1e-4)
    if of is FedRolex:
        assert [peer.first for peer in peers if peer.me < 4] == [each % 3 for each in first[:4]]


def test_networks_of_one_width_are_averaged_without_weights() -> None:
    peers = make(HeteroFL, Hyper(participation=1.0), names=("2-1",) * 3)
    without_training(peers)
    (start,) = {float(value) for value in arrays(peers[0])["head.bias"][:1]}
    run_rounds(peers, Topology.from_edges(3, [(0, 1), (0, 2), (1, 2)]), 1)
    expected = np.mean([start * (1 + me / 8) + me + 1 for me in range(3)])
    assert float(arrays(peers[0])["head.bias"][0]) == pytest.approx(expected, rel=1e-6)


def test_each_sender_sends_and_receives_its_own_width() -> None:
    peers = make(FedRolex, Hyper(participation=0.4))
    traffic = run_rounds(peers, COMPLETE, 3)
    for t, assignment in enumerate(assignments(peers, COMPLETE, 3)):
        for n in assignment.senders:
            size = 4 * sum(value.numel() for value in parameters_of(peers[n].model).values())
            one = traffic[n][t]
            assert messages(one.sent, "TrainedSlice") == messages(one.received, "AveragedSlice") == 1
            assert payload(one.sent) == payload(one.received) == size


def test_statistics_of_batch_normalization_are_estimated_on_local_samples() -> None:
    peers = make(HeteroFL, Hyper(participation=1.0, batch=1000), names=("6-3bn", "4-2bn"))
    run_rounds(peers, Topology.from_edges(2, [(0, 1)]), 1)
    for peer in peers:
        images, _ = peer.data.train.take(np.arange(len(peer.data.train)))
        before = peer.model.backbone[1](images.float().flatten(1) / 255.0)
        norm = peer.model.backbone[2]
        torch.testing.assert_close(norm.running_mean, before.mean(0))
        torch.testing.assert_close(norm.running_var, before.var(0))
        assert (norm.momentum, norm.training) == (0.1, False)


def test_invalid_slice_is_rejected_on_arrival() -> None:
    peers = make(FedRolex, Hyper())
    layouts, narrow, wide = peers[1].layouts(), peers[2], peers[0]
    values = narrow.shared_part(narrow.model)
    assert arrive(TrainedSlice("2-1", values, 3, 2), layouts).first == 2
    assert arrive(AveragedSlice(peers[1].shared_part(peers[1].model), 2), layouts).first == 2
    for wrong in (
        TrainedSlice("2-1", values, 3, 3),
        TrainedSlice("2-1", values, 3, -1),
        TrainedSlice("2-1", wide.shared_part(wide.model), 3, 0),
        TrainedSlice("8-4", values, 3, 0),
        AveragedSlice(values, 0),
        AveragedSlice(peers[1].shared_part(peers[1].model), 3),
        Trained("2-1", values, 3),
        Averaged(values),
    ):
        with pytest.raises(Unexpected):
            arrive(wrong, layouts)


# ---- missing peers and divergence ----------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, 1e30])
def test_diverged_network_is_skipped(value: float) -> None:
    peers = make(HeteroFL, Hyper(participation=1.0, fixed_aggregator=True))
    without_training(peers)
    w, shapes = [arrays(peer) for peer in peers], arrays(peers[0])
    with torch.no_grad():
        peers[3].model.head.bias[1] = value
    traffic = run_rounds(peers, COMPLETE, 1)
    for me in range(5):
        change(w[me], me)
    server = averaged([(w[me], 0) for me in (0, 1, 2, 4)], shapes)
    for me in (0, 1, 2, 4):
        for name, expected in taken(server, w[me], 0).items():
            np.testing.assert_allclose(arrays(peers[me])[name], expected, rtol=1e-5)
    assert [traffic[me][0].missing for me in range(5)] == [{"Trained": [3]}, {}, {}, {}, {}]


@pytest.mark.parametrize(("names", "recovers"), [(NAMES, True), (("6-3", "4-2", "2-1", "4-2", "4-2"), False)])
def test_aggregator_that_diverged_adopts_its_slice_if_others_hold_it(names: tuple[str, ...], recovers: bool) -> None:
    peers = make(HeteroFL, Hyper(participation=1.0), names)
    without_training(peers)
    with torch.no_grad():
        peers[0].model.head.bias[1] = math.nan
    run_rounds(peers, COMPLETE, 1)
    assert bool(np.isfinite(arrays(peers[0])["head.bias"]).all()) == recovers
    assert all(np.isfinite(value).all() for peer in peers[1:] for value in arrays(peer).values())


@pytest.mark.parametrize("dead", [0, 2])
def test_dead_peer_is_skipped(dead: int) -> None:
    peers = make(FedRolex, Hyper(participation=1.0, fixed_aggregator=True))
    without_training(peers)
    w, shapes = [arrays(peer) for peer in peers], arrays(peers[0])
    run_rounds(peers, COMPLETE, 1, silent=[dead])
    present = [me for me in range(5) if me != dead]
    for me in present:
        change(w[me], me)
    if dead != 0:  # the aggregator
        server = averaged([(w[me], 0) for me in present], shapes)
        w = [taken(server, each, 1) for each in w]
    for me in present:
        assert peers[me].first == (0 if dead == 0 else 1)
        for name, expected in w[me].items():
            np.testing.assert_allclose(arrays(peers[me])[name], expected, rtol=1e-5)


def test_state_has_the_channels_that_a_peer_holds() -> None:
    peers = make(FedRolex, Hyper(participation=1.0))
    run_rounds(peers, COMPLETE, 2)
    restored = make(FedRolex, Hyper(participation=1.0))[1]
    restored.load_state_dict(peers[1].state_dict())
    assert restored.first == peers[1].first == 2
    body: Tensors = restored.trained(restored.model).values
    assert all(torch.equal(body[name], value) for name, value in parameters_of(peers[1].model).items())
