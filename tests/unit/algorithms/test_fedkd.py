"""FedKD against its paper: compression, rounds by hand in NumPy, what a receiver refuses, failures."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from p2pfl.algorithms.fedkd import CompressedMemeHyper, Factors, FedKD, compressed, largest_rank, low_rank, recovered
from p2pfl.errors import RunFileError, Unexpected
from p2pfl.messaging.conversation import Conversation
from p2pfl.messaging.endpoint import Endpoint
from p2pfl.messaging.neighborhood import Neighborhood
from p2pfl.messaging.net import Net
from p2pfl.messaging.topology import Topology
from p2pfl.models import Model
from p2pfl.options import OptionErrors
from p2pfl.run_file.load import from_dict
from p2pfl.tensors import digest, parameters_of
from tests.bodies import RUN_ID, arrive
from tests.conftest import tree
from tests.regression import softmax
from tests.support import linear_model, payload, peer_data, random_dataset, run_rounds, setting

Array = NDArray[np.float64]
INPUTS, FEATURES, CLASSES, ROUNDS = 4, 7, 3, 3
WIDTH = 6
"""Features of the meme."""
LINE = Topology.from_edges(3, [(0, 1), (1, 2)])
COMPLETE = Topology.from_edges(3, [(0, 1), (1, 2), (0, 2)])
SAMPLES = (6, 8, 10)
MEME = 9
"""Seed of the meme's initial weights."""
LOW = {"energy_start": 0.3, "energy_end": 0.7}
"""With these, matrices as small as here become smaller."""


def make(**given: Any) -> list[FedKD]:
    """Private models with different initial values, memes with equal ones; peer i has 6 + 2i samples."""
    peers = []
    for me, samples in enumerate(SAMPLES):
        model = linear_model(INPUTS, FEATURES, CLASSES, seed=me)
        data = peer_data(random_dataset(samples, classes=CLASSES, seed=me))
        context = setting(me, 3, model, data, rounds=ROUNDS)
        hyper = CompressedMemeHyper.parse({"lr": 0.5, "batch": 1000, **given})
        peers.append(FedKD(hyper, replace(context, build_named=lambda _: linear_model(INPUTS, WIDTH, CLASSES, MEME))))
    return peers


# ---- compression -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("energy", "rank"), [(0.6, 1), (0.64, 1), (0.65, 2), (0.99, 2), (1.0, 2)])
def test_keeps_the_fewest_singular_values_that_have_the_energy(energy: float, rank: int) -> None:
    # Singular values 8 and 6, so the first has 64 % of the energy.
    left, right = torch.linalg.qr(torch.randn(5, 2)).Q, torch.linalg.qr(torch.randn(7, 2)).Q
    matrix = left @ torch.diag(torch.tensor([8.0, 6.0])) @ right.T
    one, other = low_rank(matrix, energy - 1e-6)
    assert (one.shape, other.shape) == ((5, rank), (rank, 7))
    lost = (matrix - one @ other).square().sum()
    assert float(lost) == pytest.approx([36.0, 0.0][rank - 1], abs=1e-3)


def test_zero_matrix_has_rank_zero() -> None:
    one, other = low_rank(torch.zeros(3, 4), 0.95)
    assert (one.shape, other.shape) == ((3, 0), (0, 4))


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 6), (6, 4), (64, 288), (10, 500)])
def test_largest_rank_is_the_last_that_saves_anything(rows: int, columns: int) -> None:
    k = largest_rank(rows, columns)
    assert k * (rows + columns) < rows * columns <= (k + 1) * (rows + columns)


def test_convolutions_are_recovered_and_full_matrices_are_exact() -> None:
    conv = nn.Conv2d(4, 8, 3)
    with torch.no_grad():
        conv.weight.copy_((torch.randn(8, 2) @ torch.randn(2, 36)).view(8, 4, 3, 3))
    parameters = {**parameters_of(conv), "full": torch.randn(4, 4), "zero": torch.zeros(3, 3)}
    body = compressed(parameters, 1.0 - 1e-6, samples=5)
    assert (body.left["weight"].shape, body.right["weight"].shape) == ((8, 2), (2, 36))
    assert body.values["weight"].shape == (0, 4, 3, 3)
    assert body.values["full"].shape == (4, 4)
    found = recovered(body, parameters)
    assert found is not None
    torch.testing.assert_close(found["weight"], conv.weight.detach(), rtol=1e-4, atol=1e-5)
    assert torch.equal(found["bias"], parameters["bias"])
    assert torch.equal(found["full"], parameters["full"])
    assert torch.equal(found["zero"], parameters["zero"])


# ---- rounds by hand ----------------------------------------------------------------------------------------


class Reference:
    """One peer, with line 2 differentiated by hand."""

    def __init__(self, peer: FedKD) -> None:
        self.h = peer.hyper
        self.private, self.meme = of(peer.model), of(peer.meme)
        self.w = peer.projection.weight.detach().double().numpy()
        raw, labels = peer.data.train.take(np.arange(len(peer.data.train)))
        self.x, self.y = raw.double().flatten(1).numpy() / 255.0, np.eye(CLASSES)[labels.numpy()]

    def train(self) -> None:
        for _ in range(self.h.local_epochs):
            (a, a0, b, b0), (c, c0, d, d0) = self.private, self.meme
            n, z, m = len(self.x), self.x @ a.T + a0, self.x @ c.T + c0
            p, q = softmax(z @ b.T + b0), softmax(m @ d.T + d0)
            weight = 1.0 / -(self.y * (np.log(p) + np.log(q))).sum(1).mean()
            at_p, at_q = (p - self.y + weight * (p - q)) / n, (q - self.y + weight * (q - p)) / n
            gap = 2.0 * weight * (z - m @ self.w.T) / z.size
            at_z, at_m = at_p @ b + gap, at_q @ d - gap @ self.w
            private = [at_z.T @ self.x, at_z.sum(0), at_p.T @ z, at_p.sum(0)]
            meme = [at_m.T @ self.x, at_m.sum(0), at_q.T @ m, at_q.sum(0)]
            self.private, self.meme = self.step(self.private, private), self.step(self.meme, meme)
            (self.w,) = self.step([self.w], [-gap.T @ m])

    def step(self, values: list[Array], gradients: list[Array]) -> list[Array]:
        norm = math.sqrt(sum((g**2).sum() for g in gradients))
        rate = self.h.lr * min(1.0, self.h.clip / norm)
        return [value - rate * g for value, g in zip(values, gradients, strict=True)]

    def sent(self, t: int) -> list[Array]:
        energy = self.h.energy_start + (self.h.energy_end - self.h.energy_start) * (t + 1) / ROUNDS
        return [truncated(value, energy) for value in self.meme]


def of(model: Model) -> list[Array]:
    return [value.detach().double().numpy() for value in model.parameters()]


def truncated(value: Array, energy: float) -> Array:
    if value.ndim < 2:
        return value
    u, sigma, v = np.linalg.svd(value, full_matrices=False)
    for k in range(1, len(sigma) + 1):
        if (sigma[:k] ** 2).sum() >= energy * (sigma**2).sum():
            break
    return u[:, :k] @ np.diag(sigma[:k]) @ v[:k] if k * sum(value.shape) < value.size else value


@pytest.mark.parametrize("topology", [COMPLETE, LINE], ids=["complete", "line"])
@pytest.mark.parametrize("given", [{}, LOW, {**LOW, "local_epochs": 2, "clip": 0.05}], ids=str)
def test_rounds_match_the_paper(given: dict[str, Any], topology: Topology) -> None:
    peers = make(**given)
    expected = [Reference(peer) for peer in peers]
    run_rounds(peers, topology, ROUNDS)
    for t in range(ROUNDS):
        for reference in expected:
            reference.train()
        sent = [reference.sent(t) for reference in expected]
        for me, reference in enumerate(expected):
            group = sorted((me, *topology.neighbors[me]))
            n = [SAMPLES[j] for j in group]
            parts = zip(*(sent[j] for j in group), strict=True)
            reference.meme = [np.average(np.stack(values), axis=0, weights=n) for values in parts]
    for peer, reference in zip(peers, expected, strict=True):
        np.testing.assert_allclose(peer.projection.weight.detach().numpy(), reference.w, atol=1e-5)
        for model, values in ((peer.model, reference.private), (peer.meme, reference.meme)):
            for found, value in zip(of(model), values, strict=True):
                np.testing.assert_allclose(found, value, atol=2e-5)


def test_memes_are_equal_on_a_complete_graph_and_fewer_bytes_are_sent_than_they_have() -> None:
    peers = make(**LOW)
    traffic = run_rounds(peers, COMPLETE, ROUNDS)
    assert len({digest(parameters_of(peer.meme)) for peer in peers}) == 1
    assert len({digest(peer.model.state_dict()) for peer in peers}) == 3
    whole = 2 * 4 * sum(value.numel() for value in peers[0].meme.parameters())
    assert 0 < payload(traffic[0][0].sent) < whole


def test_only_participants_compress_their_memes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(matrix: torch.Tensor, energy: float) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(energy)
        return low_rank(matrix, energy)

    monkeypatch.setattr("p2pfl.algorithms.fedkd.low_rank", counted)
    peers = make(participation=0.4, **LOW)
    run_rounds(peers, COMPLETE, ROUNDS)
    assert len(calls) == ROUNDS * 2  # matrices of one participant
    assert len({digest(parameters_of(peer.meme)) for peer in peers}) == 1


def test_clipping_bounds_the_step_of_each_module() -> None:
    (peer, *_) = make(clip=1e-3)
    before = [
        [value.detach().clone() for value in module.parameters()]
        for module in (peer.model, peer.meme, peer.projection)
    ]
    peer.local_training()
    for module, values in zip((peer.model, peer.meme, peer.projection), before, strict=True):
        moved = math.sqrt(
            sum(float((a.detach() - b).square().sum()) for a, b in zip(module.parameters(), values, strict=True))
        )
        assert moved == pytest.approx(0.5 * 1e-3, rel=1e-3)


def test_models_that_are_always_right_do_not_divide_by_zero() -> None:
    (peer, *_) = make()
    labels = torch.tensor([1, 1])
    with torch.no_grad():
        for model in (peer.model, peer.meme):
            model.linear_head.bias.copy_(torch.tensor([0.0, 1000.0, 0.0]))
    terms = {name: term.detach() for name, term in peer.loss(torch.rand(2, 1, 2, 2), labels).items()}
    assert float(terms["ce"]) == float(terms["meme_ce"]) == 0.0
    assert all(term.isfinite() for term in terms.values())


# ---- failures ------------------------------------------------------------------------------------------------


def test_accepts_memes_of_its_architecture_with_any_rank_that_saves_bytes() -> None:
    (peer, *_) = make(**LOW)
    layouts = peer.layouts()
    body = peer.local_part()
    assert body.right["backbone.1.weight"].shape[0] in (1, 2)
    assert arrive(body, layouts) is not None
    assert arrive(compressed(peer.shared_part(), 1.0, 7), layouts) is not None
    for wrong in (
        replace(body, samples=1001),
        replace(body, right={**body.right, "head.weight": torch.ones(2, WIDTH)}),
        replace(body, left={**body.left, "head.weight": torch.ones(CLASSES + 1, 1)}),
        compressed(parameters_of(linear_model(INPUTS, WIDTH + 1, CLASSES)), 0.5, 7),
    ):
        with pytest.raises(Unexpected):
            arrive(wrong, layouts)


def changed(body: Factors, field: str, name: str, value: torch.Tensor) -> Factors:
    values: Any = {field: {**getattr(body, field), name: value}}
    return replace(body, **values)


@pytest.mark.parametrize(
    ("field", "name", "value"),
    [
        ("right", "backbone.1.weight", torch.ones(0, INPUTS)),
        ("values", "backbone.1.weight", torch.ones(3, INPUTS)),
        ("values", "head.bias", torch.ones(CLASSES - 1)),
        ("left", "backbone.1.weight", torch.full((WIDTH, 1), 9e5)),
    ],
    ids=["unequal ranks", "half of the rows", "a short bias", "a product that has diverged"],
)
def test_meme_that_cannot_be_recovered_counts_as_missing(field: str, name: str, value: torch.Tensor) -> None:
    (peer, *_) = make(**LOW)
    good = compressed(peer.shared_part(), 0.1, 6)
    sent = changed(good, field, name, value)
    if field == "left":
        sent = changed(sent, "right", name, torch.full((1, INPUTS), 9e5))
    wrong = arrive(sent, peer.layouts())  # nothing that a layout could refuse
    endpoint = Endpoint(Neighborhood(0, COMPLETE), RUN_ID, Conversation())
    net = Net(endpoint, 0, 0)
    assert list(peer.recovered({0: good, 1: wrong}, net)) == [0]
    assert endpoint.missing == {"Factors": [1]}


@pytest.mark.parametrize("value", [math.nan, 1e30])
def test_meme_that_diverged_is_skipped_and_replaced_by_the_average_of_the_others(value: float) -> None:
    peers = make(**LOW)
    with torch.no_grad():
        peers[2].meme.linear_head.weight[0, 0] = value
    traffic = run_rounds(peers, COMPLETE, 2)
    assert [record.missing for record in traffic[0]] == [{"Factors": [2]}, {}]
    assert len({digest(parameters_of(peer.meme)) for peer in peers}) == 1
    assert all(np.isfinite(part).all() for peer in peers for part in of(peer.meme))


@pytest.mark.parametrize(
    ("key", "value"),
    [("energy_start", 0.0), ("energy_end", 1.5), ("clip", 0.0), ("meme", "tiny4"), ("alpha", 0.5)],
)
def test_wrong_hyper_parameters_are_errors(key: str, value: Any) -> None:
    with pytest.raises(OptionErrors, match=key):
        CompressedMemeHyper.parse({key: value})
    with pytest.raises(RunFileError, match=f"algorithm.{key}"):
        from_dict(tree(algorithm={"name": "fedkd", key: value}))
