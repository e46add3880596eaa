"""CGA against its paper: the projection by trying every set of constraints, rounds by hand on softmax regression."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from p2pfl.algorithms.cga import CGA, CrossGradient, Hyper, projected
from p2pfl.algorithms.dpsgd import Parameters
from p2pfl.errors import Unexpected
from p2pfl.messaging.topology import Topology
from p2pfl.models import Model
from p2pfl.options import OptionErrors
from p2pfl.tensors import buffers_of, clone, digest, frozen_of, parameters_of
from tests.bodies import arrive
from tests.regression import Matrix, gradient, regression_data, theta
from tests.support import messages, payload, peer_data, random_dataset, run_rounds, setting, softmax_regression

INPUTS, CLASSES, PEERS = 4, 3, 3
LINE = Topology.from_edges(3, [(0, 1), (1, 2)])
COMPLETE = Topology.from_edges(3, [(0, 1), (1, 2), (0, 2)])
W = {
    id(LINE): np.array([[2 / 3, 1 / 3, 0], [1 / 3, 1 / 3, 1 / 3], [0, 1 / 3, 2 / 3]]),
    id(COMPLETE): np.full((3, 3), 1 / 3),
}


def make(model: Any = None, **given: Any) -> list[CGA]:
    """Softmax regressions with different initial values; peer i has 6 + i samples of the classes but i."""
    peers = []
    for me in range(PEERS):
        dataset = random_dataset(3 * (6 + me), classes=CLASSES, seed=me)
        mine = [n for n in range(len(dataset.train)) if n % CLASSES != me][: 6 + me]
        start = softmax_regression(INPUTS, CLASSES, seed=me) if model is None else model(me)
        peers.append(
            CGA(Hyper.parse({"lr": 0.5, "batch": 1000, **given}), setting(me, PEERS, start, peer_data(dataset, mine)))
        )
    return peers


# ---- line 3 ------------------------------------------------------------------------------------------------


def closest(g: NDArray[np.float64], rows: NDArray[np.float64], margin: float = 0.0) -> NDArray[np.float64]:
    """The projection by its definition: of all sets of constraints that hold with equality, the one that fits."""
    g = g + margin * rows.sum(0)
    candidates = []
    for size in range(len(rows) + 1):
        for active in itertools.combinations(range(len(rows)), size):
            a = rows[list(active)]
            z = g - a.T @ np.linalg.lstsq(a @ a.T, a @ g, rcond=None)[0] if active else g
            if (rows @ z >= -1e-9).all():
                candidates.append(z)
    return min(candidates, key=lambda z: float(((z - g) ** 2).sum()))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("others", [1, 3, 5])
def test_projection_is_the_closest_vector_without_a_conflict(others: int, seed: int) -> None:
    stream = np.random.default_rng(seed)
    g, rows = stream.normal(size=6), stream.normal(size=(others, 6))

    def parts(vector: NDArray[np.float64]) -> dict[str, torch.Tensor]:
        return {"a": torch.from_numpy(vector[:4].reshape(2, 2)), "b": torch.from_numpy(vector[4:])}

    found = projected(parts(g), [parts(row) for row in rows])
    z = torch.cat([found["a"].flatten(), found["b"]]).numpy()
    np.testing.assert_allclose(z, closest(g, rows), atol=1e-9)
    assert (rows @ z > -1e-9).all()


def test_projection_leaves_a_gradient_that_conflicts_with_none() -> None:
    own = {"a": torch.tensor([1.0, 0.0])}
    assert torch.equal(projected(own, [{"a": torch.tensor([1.0, 5.0])}])["a"], own["a"])
    assert torch.equal(projected(own, [])["a"], own["a"])


def test_projection_on_equal_and_opposite_gradients() -> None:
    own, other = {"a": torch.tensor([1.0, 1.0])}, {"a": torch.tensor([-1.0, 0.0])}
    torch.testing.assert_close(projected(own, [other, other])["a"], torch.tensor([0.0, 1.0]))
    opposite = {"a": torch.tensor([-1.0, -1.0])}
    torch.testing.assert_close(projected(own, [opposite])["a"], torch.zeros(2), atol=1e-12, rtol=0.0)
    assert torch.equal(projected(own, [{"a": torch.zeros(2)}])["a"], own["a"])


@pytest.mark.parametrize("scale", [1e-12, 1e-8, 1e8])
def test_projection_does_not_depend_on_the_lengths_of_neighbors_gradients(scale: float) -> None:
    stream = np.random.default_rng(3)
    g, rows = stream.normal(size=6), stream.normal(size=(4, 6))
    scaled = [{"a": torch.from_numpy(row)} for row in rows * np.array([[1.0], [scale], [1.0], [scale]])]
    z = projected({"a": torch.from_numpy(g)}, scaled)["a"].numpy()
    np.testing.assert_allclose(z, closest(g, rows), atol=1e-9)


def test_margin_adds_a_fraction_of_every_gradient() -> None:
    own, other = {"a": torch.tensor([1.0, 0.0])}, {"a": torch.tensor([1.0, 4.0])}
    torch.testing.assert_close(projected(own, [other], margin=0.5)["a"], torch.tensor([1.5, 2.0]))


# ---- rounds by hand ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("topology", [LINE, COMPLETE], ids=["line", "complete"])
@pytest.mark.parametrize("given", [{}, {"momentum": 0.8}, {"margin": 0.5}], ids=str)
def test_rounds_follow_the_papers_algorithm(given: dict[str, Any], topology: Topology) -> None:
    peers = make(**given)
    h = peers[0].hyper
    x = [theta(peer.model) for peer in peers]
    data = [regression_data(peer.data.train) for peer in peers]
    run_rounds(peers, topology, 4)
    v: list[Matrix] = [np.zeros_like(one) for one in x]
    projections = 0
    for _ in range(4):
        steps = []
        for i in range(PEERS):
            own = gradient(x[i], *data[i]).ravel()
            rows = np.stack([gradient(x[i], *data[j]).ravel() for j in topology.neighbors[i]])
            projections += bool((rows @ own < 0).any())
            steps.append(closest(own, rows, h.margin).reshape(x[i].shape))
        v = [h.momentum * v[i] - h.lr * steps[i] for i in range(PEERS)]
        x = [sum(W[id(topology)][i, j] * x[j] for j in range(PEERS)) + v[i] for i in range(PEERS)]
    assert projections
    for me, peer in enumerate(peers):
        np.testing.assert_allclose(theta(peer.model), x[me], atol=1e-5)


def test_a_model_and_a_gradient_travel_on_each_edge_in_each_direction() -> None:
    peers = make()
    traffic = run_rounds(peers, LINE, 2)
    size = 4 * CLASSES * (INPUTS + 1)
    for me, degree in enumerate([1, 2, 1]):
        for record in traffic[me]:
            assert (messages(record.sent), payload(record.sent)) == (2 * degree, 2 * degree * size)


def test_cross_gradients_change_no_statistics() -> None:
    def normalized(me: int) -> Model:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(me)
            return Model("normalized", nn.Sequential(nn.Flatten(), nn.BatchNorm1d(INPUTS)), INPUTS, CLASSES)

    peers, alone = make(normalized), make(normalized)
    run_rounds(peers, COMPLETE, 1)
    run_rounds(alone, Topology.from_edges(3, []), 1)
    for peer, other in zip(peers, alone, strict=True):
        found, expected = clone(buffers_of(peer.model)), buffers_of(other.model)
        assert int(found["backbone.1.num_batches_tracked"]) == 1
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value)


def test_frozen_parameters_stay_and_unused_ones_are_accepted() -> None:
    def partly_frozen(me: int) -> Model:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(me)
            backbone = nn.Sequential(nn.Flatten(), nn.Linear(INPUTS, 5).requires_grad_(False))
            model = Model("partly frozen", backbone, 5, CLASSES)
            model.register_module("spare", nn.Linear(2, 2))
            return model

    peers = make(partly_frozen)
    frozen = [clone(frozen_of(peer.model)) for peer in peers]
    heads = [clone(parameters_of(peer.model))["head.weight"] for peer in peers]
    run_rounds(peers, COMPLETE, 1)
    for me, peer in enumerate(peers):
        found = parameters_of(peer.model)
        assert digest(frozen_of(peer.model)) == digest(frozen[me])
        assert not torch.allclose(found["head.weight"], torch.stack(heads).mean(0), atol=1e-4), me


# ---- failures ----------------------------------------------------------------------------------------------


def test_weight_of_a_missing_neighbor_goes_to_the_local_model() -> None:
    peers = make()
    x = [theta(peer.model) for peer in peers]
    data = [regression_data(peer.data.train) for peer in peers]
    run_rounds(peers, LINE, 1, silent=[2])
    step = closest(gradient(x[1], *data[1]).ravel(), gradient(x[1], *data[0]).ravel()[None]).reshape(x[1].shape)
    np.testing.assert_allclose(theta(peers[1].model), x[0] / 3 + 2 / 3 * x[1] - 0.5 * step, atol=1e-6)


@pytest.mark.parametrize("value", [math.nan, 1e30])
def test_diverged_model_is_not_averaged_but_its_peer_still_computes_gradients(value: float) -> None:
    peers = make()
    x = [theta(peer.model) for peer in peers]
    data = [regression_data(peer.data.train) for peer in peers]
    with torch.no_grad():
        peers[2].model.linear_head.weight[0, 0] = value
    traffic = run_rounds(peers, LINE, 1)
    assert traffic[1][0].missing == {"Parameters": [2]}
    rows = np.stack([gradient(x[1], *data[j]).ravel() for j in (0, 2)])
    step = closest(gradient(x[1], *data[1]).ravel(), rows).reshape(x[1].shape)
    np.testing.assert_allclose(theta(peers[1].model), x[0] / 3 + 2 / 3 * x[1] - 0.5 * step, atol=1e-6)


def test_accepts_whole_and_empty_gradients_only() -> None:
    (peer, *_) = make()
    x = parameters_of(peer.model)
    for body in (Parameters(x), CrossGradient(x), CrossGradient({})):
        assert arrive(body, peer.layouts()) is not None
    part = {name: value for name, value in x.items() if "bias" in name}
    for wrong in (Parameters({}), CrossGradient(part)):
        with pytest.raises(Unexpected):
            arrive(wrong, peer.layouts())


@pytest.mark.parametrize(("key", "value"), [("local_epochs", 5), ("drop_last", True), ("margin", -0.1)])
def test_wrong_hyper_parameters_are_errors(key: str, value: Any) -> None:
    with pytest.raises(OptionErrors, match=key):
        Hyper.parse({key: value})
