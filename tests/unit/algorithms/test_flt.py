"""FLT against its paper: autoencoder, centers, distances and the first rounds by hand; what is dropped; options."""

from __future__ import annotations

import importlib.util
import itertools
import math
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv2d, conv_transpose2d, max_pool2d

from p2pfl.algorithms import flt
from p2pfl.algorithms.fedavg import FedAvg
from p2pfl.algorithms.flt import FLT, RelatednessHyper
from p2pfl.algorithms.flt_centers import Autoencoder, embed, k_means, matching_distance
from p2pfl.data import Dataset, Split
from p2pfl.errors import RunFileError
from p2pfl.messaging.topology import Topology
from p2pfl.options import OptionErrors
from p2pfl.session import checkpoint
from p2pfl.simulation.simulate import simulate
from p2pfl.tensors import Tensors, clone, digest, has_diverged, parameters_of
from tests.support import linear_model, messages, payload, peer_data, run_rounds, setting

SIDE, CLASSES, LATENT = 6, 3, 5
PEERS = 4
COMPLETE = Topology.from_edges(PEERS, [(i, j) for i in range(PEERS) for j in range(i)])
LINE = Topology.from_edges(PEERS, [(0, 1), (1, 2), (2, 3)])
BASE: dict[str, Any] = {"batch": 64, "lr": 0.1}
ENCODER: dict[str, Any] = {"encoder_batch": 64, "encoder_epochs": 2, "encoder_lr": 0.01, "latent": LATENT}
PLAIN: dict[str, Any] = {**BASE, **ENCODER, "manifold": "none", "threshold": 0.3}
"""All samples in one batch, so that an epoch is a step."""


def images(me: int, size: int = SIDE) -> Dataset:
    """12 + 3·me samples of classes that differ in brightness; peers 2 and 3 have negatives that fade to a side."""
    stream, count = np.random.default_rng(me), 12 + 3 * me
    labels = np.arange(count) % CLASSES
    pictures = 60.0 * labels[:, None, None, None] + stream.normal(0, 4, size=(count, 1, size, size)) + 30
    if me >= PEERS // 2:
        pictures = 255 - pictures * np.linspace(1, 0, size)
    split = Split(pictures.clip(0, 255).astype(np.uint8), labels)
    return Dataset("ramps", split, split, CLASSES, mean=(0.4,), std=(0.3,), mirror=False)


def make(of: Any = FLT, peers: int = PEERS, size: int = SIDE, **given: Any) -> list[Any]:
    return [
        of(
            of.Hyper.parse({**(PLAIN if of is FLT else BASE), **given}),
            setting(me, peers, linear_model(size * size, 4, CLASSES), peer_data(images(me, size), test=range(4))),
        )
        for me in range(peers)
    ]


def states(peers: list[Any]) -> list[str]:
    return [digest(peer.model.state_dict()) for peer in peers]


# ---- by hand -------------------------------------------------------------------------------------------------


def encoded(w: dict[str, Tensor], x: Tensor) -> Tensor:
    z = max_pool2d(conv2d(x, w["encoder.0.weight"], w["encoder.0.bias"], padding=1).clamp(min=0), 2)
    z = max_pool2d(conv2d(z, w["encoder.3.weight"], w["encoder.3.bias"], padding=1).clamp(min=0), 2)
    return z.flatten(1) @ w["encoder.7.weight"].T + w["encoder.7.bias"]


def decoded(w: dict[str, Tensor], z: Tensor) -> Tensor:
    y = (z @ w["decoder.0.weight"].T + w["decoder.0.bias"]).reshape(len(z), 4, SIDE // 4, SIDE // 4)
    y = conv_transpose2d(y, w["decoder.2.weight"], w["decoder.2.bias"], stride=2).clamp(min=0)
    return conv_transpose2d(y, w["decoder.4.weight"], w["decoder.4.bias"], stride=2)


def inputs(peer: FLT) -> Tensor:
    raw, _ = peer.data.train.take(np.arange(len(peer.data.train)))
    return (raw.double() / 255 - 0.4) / 0.3


@pytest.mark.exhaustive
def test_line_1_trains_one_autoencoder_on_the_images_of_all_peers() -> None:
    peers = make()
    mean = {name: p.detach().double().clone() for name, p in peers[0].encoder.named_parameters()}
    start = clone(mean)
    moments = [[{name: torch.zeros_like(p) for name, p in mean.items()} for _ in range(2)] for _ in peers]
    for epoch in (1, 2):
        trained = []
        for peer, (first, second) in zip(peers, moments, strict=True):
            w, x = {name: p.clone().requires_grad_() for name, p in mean.items()}, inputs(peer)
            loss = (decoded(w, encoded(w, x)) - x[..., :4, :4]).square().mean()  # 6 exceeds a multiple of 4 by 2
            gradients = torch.autograd.grad(loss, list(w.values()))
            for name, gradient in zip(w, gradients, strict=True):
                first[name] = 0.9 * first[name] + 0.1 * gradient
                second[name] = 0.999 * second[name] + 0.001 * gradient**2
                scale = (second[name] / (1 - 0.999**epoch)).sqrt() + 1e-8
                w[name] = (w[name] - 0.01 * first[name] / (1 - 0.9**epoch) / scale).detach()
            trained.append(w)
        mean = {name: torch.stack([w[name] for w in trained]).mean(0) for name in mean}
    run_rounds(peers, LINE, 1)
    assert len({digest(peer.encoder.state_dict()) for peer in peers}) == 1
    for name, p in peers[0].encoder.named_parameters():
        torch.testing.assert_close(p.double(), mean[name], atol=2e-4, rtol=1e-3, msg=name)
    assert max(float((mean[name] - start[name]).abs().max()) for name in mean) > 0.01


def test_line_2_sends_the_means_of_clusters_of_codes() -> None:
    [peer, *_] = make()
    w = {name: p.detach().double() for name, p in peer.encoder.named_parameters()}
    codes, labels = encoded(w, inputs(peer)), torch.from_numpy(peer.data.train.labels)
    means = torch.stack(
        [codes[labels == label].mean(0) for label in range(CLASSES)]
    )  # brightness tells classes apart
    centers = peer.local_centers().double()
    assert centers.shape == (CLASSES, LATENT)
    order = torch.cdist(means, centers).argmin(1)
    assert sorted(order.tolist()) == [0, 1, 2]
    torch.testing.assert_close(centers[order], means, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("k", "n"), [(3, 3), (2, 4), (4, 2), (1, 3)])
def test_line_4_is_the_least_distance_over_all_matchings(k: int, n: int) -> None:
    stream = torch.Generator().manual_seed(k + 10 * n)
    u, v = torch.randn(k, 2, generator=stream), torch.randn(n, 2, generator=stream)
    small, large = sorted((u, v), key=len)
    sums = [
        sum(float((a.double() - large[i].double()).square().sum()) for a, i in zip(small, chosen, strict=True))
        for chosen in itertools.permutations(range(len(large)), len(small))
    ]
    assert matching_distance(u, v) == pytest.approx(math.sqrt(min(sums)) / len(small), rel=1e-9)
    assert matching_distance(v, u) == matching_distance(u, v)
    assert matching_distance(u, u) == 0.0


def test_peer_without_centers_is_infinitely_far() -> None:
    assert matching_distance(torch.zeros(0, 2), torch.zeros(3, 2)) == math.inf


def test_k_means_finds_no_more_centers_than_points() -> None:
    points = np.array([[1.0, 2.0], [1.0, 2.0], [3.0, 4.0]], dtype=np.float32)
    centers = k_means(points, 5, seed=0)
    assert sorted(map(tuple, centers.tolist())) == [(1.0, 2.0), (3.0, 4.0)]


# ---- what is dropped -----------------------------------------------------------------------------------------


def distances(topology: Topology) -> dict[tuple[int, int], float]:
    """d_ij of the peers in one run, from the centers that they would send after its first round."""
    peers = make()
    run_rounds(peers, topology, 1)
    for peer in peers:
        peer.streams = setting(peer.me, PEERS, peer.model, peer.data).streams
    centers = [peer.local_centers() for peer in peers]
    return {(i, j): matching_distance(centers[i], centers[j]) for i in range(PEERS) for j in range(PEERS)}


@pytest.mark.exhaustive
def test_neighbors_from_the_threshold_on_are_dropped_for_good_and_the_others_averaged() -> None:
    d = distances(COMPLETE)
    assert max(d[0, 1], d[2, 3]) < 0.3 < min(d[0, 2], d[0, 3], d[1, 2], d[1, 3])  # the two kinds of images
    peers, first, second = make(), make(FedAvg, 2), make(FedAvg)[2:]
    traffic = run_rounds(peers, COMPLETE, 3)
    assert [peer.dropped for peer in peers] == [[2, 3], [2, 3], [0, 1], [0, 1]]
    for n, group in enumerate((first, second)):
        for me, peer in enumerate(group):
            peer.me = me
        run_rounds(group, Topology.from_edges(2, [(0, 1)]), 3)
        assert states(peers[2 * n : 2 * n + 2]) == states(group)
    assert [one[1].sources for one in traffic] == [(1,), (0,), (3,), (2,)]
    assert peers[0].weights() == {0: 12 / 27, 1: 15 / 27}


@pytest.mark.exhaustive
def test_records_of_round_0_hold_the_least_and_the_largest_distance() -> None:
    d, peers = distances(COMPLETE), make()
    run_rounds(peers, COMPLETE, 1)
    for peer in peers:
        others = [d[peer.me, j] for j in range(PEERS) if j != peer.me]
        assert peer.diagnostics() == pytest.approx({"nearest": min(others), "farthest": max(others)}, rel=1e-5)
    run_rounds(peers := make(), COMPLETE, 2)
    assert all(peer.diagnostics() == {} for peer in peers)


@pytest.mark.exhaustive
@pytest.mark.parametrize("topology", [COMPLETE, LINE], ids=["complete", "line"])
def test_it_is_fedavg_if_no_neighbor_is_dropped(topology: Topology) -> None:
    peers, plain = make(threshold=1e6), make(FedAvg)
    for group in (peers, plain):
        run_rounds(group, topology, 3)
    assert states(peers) == states(plain)


@pytest.mark.exhaustive
def test_dropped_models_travel_in_round_0_only() -> None:
    peers = make()
    traffic = run_rounds(peers, COMPLETE, 3)
    for t, count in enumerate((3, 1, 1)):
        assert all(messages(one[t].sent, "Shared") == count for one in traffic)
        assert all(messages(one[t].sent, "Centers") == (3 if t == 0 else 0) for one in traffic)
    values = sum(p.numel() for p in peers[0].encoder.parameters())
    tree = sum(messages(one[0].sent, "AutoencoderParameters") for one in traffic)
    assert tree == 2 * 2 * (PEERS - 1)  # two epochs, up and down
    shared = sum(p.numel() for p in peers[0].model.parameters())
    expected = 4 * (tree * values + 3 * PEERS * (shared + CLASSES * LATENT))
    assert sum(payload(one[0].sent) for one in traffic) == expected


def test_missing_neighbor_is_not_dropped() -> None:
    peers = make()
    run_rounds(peers, COMPLETE, 2, silent=[3])
    assert [peer.dropped for peer in peers[:3]] == [[2], [2], [0, 1]]


def test_neighbor_without_centers_is_dropped() -> None:
    peers = make()
    peers[1].local_centers = lambda: torch.zeros(0, LATENT)
    run_rounds(peers, COMPLETE, 1)
    assert peers[0].dropped == [1, 2, 3]
    assert peers[1].dropped == [0, 2, 3]


def test_single_center_tells_two_peers_apart() -> None:
    peers = make(centers=1)
    edges = [(0, 2), (0, 1)]
    run_rounds([peers[0], peers[1], peers[2]], Topology.from_edges(3, edges), 1)
    assert peers[0].dropped == [2]


@pytest.mark.parametrize("silent", [0, 3])
def test_neighbors_with_another_autoencoder_are_not_dropped(silent: int) -> None:
    """Without the root of the spanning tree, AllReduce leaves each peer its local autoencoder."""
    peers = make()
    run_rounds(peers, COMPLETE, 2, silent=[silent])
    present = [peer for peer in peers if peer.me != silent]
    encoders = {peer.me: digest(peer.encoder.state_dict()) for peer in present}
    assert len(set(encoders.values())) == (3 if silent == 0 else 1)
    for peer in present:
        assert all(encoders[j] == encoders[peer.me] for j in peer.dropped)
    assert [len(peer.dropped) for peer in present] == ([0, 0, 0] if silent == 0 else [1, 1, 2])


def test_peer_without_samples_is_far_from_all() -> None:
    peers = make()
    nothing = peer_data(images(3), train=[], test=range(4))
    peers[3] = FLT(FLT.Hyper.parse(PLAIN), setting(3, PEERS, linear_model(SIDE * SIDE, 4, CLASSES), nothing))
    run_rounds(peers, COMPLETE, 2)
    assert peers[2].dropped == [0, 1, 3]
    assert peers[3].dropped == [0, 1, 2]


def test_no_exchange_of_autoencoders_without_epochs() -> None:
    peers = make(encoder_epochs=0)
    before = digest(peers[0].encoder.state_dict())
    traffic = run_rounds(peers, COMPLETE, 1)
    assert digest(peers[0].encoder.state_dict()) == before
    assert not any(messages(one[0].sent, "AutoencoderParameters") for one in traffic)
    assert all(messages(one[0].sent, "Centers") == 3 for one in traffic)


@pytest.mark.exhaustive
def test_diverged_autoencoder_is_replaced_by_the_one_from_before() -> None:
    peers = make(encoder_lr=1e30)
    before = digest(peers[0].encoder.state_dict())
    run_rounds(peers, COMPLETE, 1)
    assert {digest(peer.encoder.state_dict()) for peer in peers} == {before}
    assert not any(map(has_diverged, parameters_of(peers[0].model).values()))


@pytest.mark.exhaustive
def test_autoencoder_trains_again_after_an_epoch_in_which_it_diverged(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, calls = Autoencoder.loss, itertools.count()
    monkeypatch.setattr(
        Autoencoder, "loss", lambda self, x: whole(self, x) * (math.nan if next(calls) < PEERS else 1.0)
    )
    peers = make()
    before = digest(peers[0].encoder.state_dict())
    run_rounds(peers, COMPLETE, 1)
    assert digest(peers[0].encoder.state_dict()) != before
    assert not any(map(has_diverged, peers[0].encoder.state_dict().values()))


@pytest.mark.exhaustive
def test_peers_that_do_not_take_part_are_compared_too() -> None:
    peers = make(participation=0.5)
    run_rounds(peers, COMPLETE, 4)
    assert [peer.dropped for peer in peers] == [[2, 3], [2, 3], [0, 1], [0, 1]]


@pytest.mark.exhaustive
def test_autoencoder_starts_from_that_of_an_earlier_run(tmp_path: Path, make_run: Any, prepare: Any) -> None:
    def trained(name: str, seed: int, **given: Any) -> Tensors:
        algorithm = {"name": "flt", "batch": 16, "manifold": "none", **given}
        run = make_run(rounds=1, peers=4, seed=seed, models="tiny-cnn", algorithm=algorithm)
        folder = prepare(tmp_path / name, run)
        simulate(run, folder)
        state: Tensors = checkpoint.read(folder.peer(2).checkpoint)["algorithm"]["encoder"]
        return state

    first = digest(trained("first", 0, encoder_epochs=1))
    start = {"encoder": str(tmp_path / "first"), "encoder_epochs": 0}
    assert digest(trained("second", 1, **start)) == first
    assert digest(trained("third", 1, **{**start, "encoder_epochs": 1})) != first
    with pytest.raises(RunFileError, match="its encoder does not fit this run"):
        trained("fourth", 1, **start, latent=7)


# ---- UMAP ----------------------------------------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Stand for UMAP by the first two numbers of a center; what was embedded."""
    seen: list[Tensor] = []

    def embed(centers: Tensor, seed: int) -> Tensor:
        seen.append(centers)
        return centers[:, :2]

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(flt, "embed", embed)
    return seen


@pytest.mark.exhaustive
def test_line_3_embeds_the_centers_of_the_neighborhood_in_the_order_of_peers(installed: list[Tensor]) -> None:
    peers = make(manifold="umap", threshold=0.2)
    run_rounds(peers, LINE, 1)
    for peer in peers:
        peer.streams = setting(peer.me, PEERS, peer.model, peer.data).streams
    centers = [peer.local_centers() for peer in peers]
    assert sorted(map(len, installed)) == [6, 6, 9, 9]
    assert any(torch.equal(points, torch.cat(centers[:3])) for points in installed)
    flat = [c[:, :2] for c in centers]
    expected = [
        [j for j in sorted(LINE.neighbors[me]) if matching_distance(flat[me], flat[j]) >= 0.2] for me in range(PEERS)
    ]
    assert [peer.dropped for peer in peers] == expected
    assert 0 < sum(map(len, expected)) < 6


def test_embedding_has_umaps_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    class UMAP:
        def __init__(self, **given: Any) -> None:
            self.given = given

        def fit_transform(self, points: np.ndarray) -> np.ndarray:
            warnings.warn("n_jobs", UserWarning, stacklevel=2)
            seen.append((len(points), self.given))
            return points[:, :2].astype(np.float64)

    seen: list[tuple[int, dict[str, Any]]] = []
    numba = SimpleNamespace(config=SimpleNamespace(THREADING_LAYER="default"))
    monkeypatch.setitem(sys.modules, "umap", SimpleNamespace(UMAP=UMAP))
    monkeypatch.setitem(sys.modules, "numba", numba)
    centers = torch.arange(100.0).reshape(20, 5)
    torch.testing.assert_close(embed(centers, 7), centers[:, :2])
    embed(centers[:4], 8)
    common = {"n_components": 2, "n_jobs": 1}
    assert seen == [
        (20, {**common, "n_neighbors": 15, "random_state": 7}),
        (4, {**common, "n_neighbors": 3, "random_state": 8}),
    ]
    assert numba.config.THREADING_LAYER == "workqueue"


def test_fewer_centers_than_umap_needs_drop_nobody(installed: list[Tensor]) -> None:
    peers = make(manifold="umap", threshold=1e-6, peers=2, centers=1)
    run_rounds(peers, Topology.from_edges(2, [(0, 1)]), 2)
    assert [peer.dropped for peer in peers] == [[], []]
    assert installed == []


def test_peers_of_a_complete_graph_embed_once_in_simulation(installed: list[Tensor]) -> None:
    peers = make(manifold="umap")
    run_rounds(peers, COMPLETE, 1)
    assert len(installed) == 1


def test_umap_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OptionErrors, match=r"manifold: flt needs umap-learn.*pip install 'p2pfl-mesh\[flt\]'"):
        make(manifold="umap")


@pytest.mark.exhaustive
def test_umap_keeps_groups_of_centers_apart() -> None:
    pytest.importorskip("umap", reason="pip install '.[flt]'")
    peers, threads = make(manifold="umap", threshold=1.0, centers=6), torch.get_num_threads()
    run_rounds(peers, COMPLETE, 2)
    assert [peer.dropped for peer in peers] == [[2, 3], [2, 3], [0, 1], [0, 1]]
    assert torch.get_num_threads() == threads
    again = make(manifold="umap", threshold=1.0, centers=6)
    run_rounds(again, COMPLETE, 2)
    assert states(again) == states(peers)


# ---- options -------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "given",
    [
        {"encoder_epochs": 3},
        {"encoder_batch": 4},
        {"encoder_lr": 0.02},
        {"latent": 4},
        {"centers": 2},
    ],
    ids=lambda given: next(iter(given)),
)
def test_every_option_changes_the_distances(given: dict[str, Any]) -> None:
    changed, plain = make(**given), make()
    for peers in (changed, plain):
        run_rounds(peers, COMPLETE, 1)
    assert changed[0].diagnostics() != plain[0].diagnostics()


@pytest.mark.parametrize(
    "wrong",
    [
        *({"encoder_epochs": -1}, {"encoder_batch": 0}, {"encoder_lr": 0.0}, {"latent": 0}, {"centers": 0}),
        *({"manifold": "pca"}, {"threshold": 0.0}),
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_out_of_range_option_is_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionErrors, match=next(iter(wrong))):
        RelatednessHyper.parse(wrong)


def test_images_that_cannot_be_pooled_twice_are_refused() -> None:
    with pytest.raises(OptionErrors, match="at least 4×4 pixels, not 3×3"):
        make(size=3)


@pytest.mark.parametrize("size", [(4, 4), (7, 9), (28, 28)])
def test_autoencoder_takes_any_size(size: tuple[int, int]) -> None:
    x = torch.rand(2, 3, *size)
    network = Autoencoder(3, size, 10)
    assert network.encoder(x).shape == (2, 10)
    assert float(network.loss(x).detach()) > 0.0
