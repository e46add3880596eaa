"""Methods with models narrower than float32: what is averaged is summed in float32, and rounded once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from p2pfl.algorithms import (
    cga,
    dfedavgm,
    ditto,
    divshare,
    dpsgd,
    fedavg,
    fedavg_dec,
    feddistill,
    fedfomo,
    fedproto,
    heterofl,
    l2c,
    lg_fedavg,
    pfedsim,
    sgp,
    swift,
)
from p2pfl.algorithms.l2c import validation_gradient
from p2pfl.algorithms.width_scaling import Slice, Whole, Width
from p2pfl.learning.evaluation import Evaluation, evaluate
from p2pfl.learning.peer_data import EVALUATION_BATCH
from p2pfl.models import Model
from p2pfl.tensors import digest, distance, equal, parameters_of
from tests.bodies import complete
from tests.l2c_peers import aggregated
from tests.support import numbered_dataset, peer_data, random_dataset, run_rounds, setting

PEERS, INPUTS, CLASSES = 7, 4, 3
NARROW = [torch.bfloat16, torch.float16]


class Narrowed(nn.Module):
    """Flattens inputs and converts them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1).to(self.dtype)


def narrow_model(dtype: torch.dtype, features: int = 5) -> Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        backbone = nn.Sequential(Narrowed(dtype), nn.Linear(INPUTS, features))
        return Model("narrow", backbone, features, CLASSES).to(dtype)


def make(method: Any, dtype: torch.dtype, **hyper: Any) -> list[Any]:
    """Peers with equal models, which a learning rate this small does not change."""
    dataset = random_dataset(12, classes=CLASSES)
    data = [peer_data(dataset, range(6 + me % 3), validation=range(8, 12)) for me in range(PEERS)]
    h = method.Hyper.parse({"lr": 1e-30, "momentum": 0.0, **hyper})
    return [method(h, setting(me, PEERS, narrow_model(dtype), data[me], rounds=4)) for me in range(PEERS)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize(
    ("method", "hyper"),
    [
        (fedavg.FedAvg, {}),
        (lg_fedavg.LGFedAvg, {}),
        (pfedsim.PFedSim, {}),
        (ditto.Ditto, {}),
        (dpsgd.DPSGD, {}),
        (dpsgd.DPSGD, {"local_epochs": 1}),
        (dfedavgm.DFedAvgM, {}),
        (sgp.SGP, {}),
        (swift.Swift, {}),
        (divshare.DivShare, {}),
        (cga.CGA, {}),
        (fedfomo.FedFomo, {}),
        (fedavg_dec.FedAvgDec, {"weight_decay": 0.0}),
        (heterofl.HeteroFL, {"weight_decay": 0.0}),
        (l2c.L2C, {"weight_decay": 0.0}),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_equal_narrow_models_stay_as_they_are(method: Any, hyper: dict[str, Any], dtype: torch.dtype) -> None:
    peers = make(method, dtype, **hyper)
    before = [digest(parameters_of(peer.model)) for peer in peers]
    traffic = run_rounds(peers, complete(PEERS), 3)
    assert [digest(parameters_of(peer.model)) for peer in peers] == before
    assert any(each.sent for rounds in traffic for each in rounds)
    assert not any(each.missing for rounds in traffic for each in rounds)


@pytest.mark.parametrize("dtype", NARROW)
def test_prototypes_are_means_of_narrow_features_in_float32(dtype: torch.dtype) -> None:
    data = peer_data(random_dataset(900, classes=CLASSES))
    model = narrow_model(dtype)
    peer = fedproto.FedProto(fedproto.Hyper.parse({}), setting(0, 2, model, data))
    x = torch.cat([x for x, _ in data.sweep(data.train)])
    with torch.no_grad():
        features = model.backbone(x).double()
    expected = torch.stack([features[np.flatnonzero(data.train.labels == k)].mean(0) for k in range(CLASSES)])
    found = peer.local_prototypes().values
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def test_means_of_narrow_logits_are_those_of_float32() -> None:
    data = peer_data(random_dataset(900, classes=CLASSES))
    model = narrow_model(torch.bfloat16)
    h = feddistill.Hyper.parse({"batch": 450, "lr": 1e-30})
    peer = feddistill.FedDistill(h, setting(0, 2, model, data))
    peer.train_or_roll_back(epochs=1, batch=450)
    x = torch.cat([x for x, _ in data.sweep(data.train)])
    with torch.no_grad():
        logits = model(x).double()
    expected = torch.stack([logits[np.flatnonzero(data.train.labels == k)].mean(0) for k in range(CLASSES)])
    torch.testing.assert_close(peer.local_prototypes().values.double(), expected, rtol=1e-5, atol=1e-6)


def test_loss_of_narrow_scores_is_summed_in_float32() -> None:
    data = peer_data(numbered_dataset(500), [], range(500))
    scores = torch.tensor([[0.0, 2.0, 0.0]])

    def result(scores: Tensor) -> Evaluation | None:
        return evaluate(lambda x: scores.repeat(len(x), 1), data, data.test)

    assert result(scores.bfloat16()) == result(scores)


def test_validation_gradient_of_a_narrow_model_is_summed_in_float32() -> None:
    samples = 8 * EVALUATION_BATCH
    data, model = peer_data(random_dataset(samples), validation=range(samples)), narrow_model(torch.bfloat16)
    _, gradient = validation_gradient(model, data)
    expected = {name: torch.zeros(tensor.shape) for name, tensor in parameters_of(model).items()}
    for x, labels in data.sweep(data.validation):
        loss = cross_entropy(model(x).float(), labels, reduction="sum") / samples
        parts = torch.autograd.grad(loss, list(model.parameters()))
        for (name, total), part in zip(expected.items(), parts, strict=True):
            expected[name] = total + part
    assert gradient.keys() == expected.keys()
    assert all(torch.equal(gradient[name], total) for name, total in expected.items())


def test_updates_of_narrow_models_are_added_up_in_float32() -> None:
    before = {"x": torch.tensor([1.0], dtype=torch.bfloat16)}
    updates = {j: {"x": torch.tensor([2.0**-6], dtype=torch.bfloat16)} for j in range(4)}
    found = aggregated(before, updates, equal(updates))["x"]
    assert found.dtype is torch.bfloat16
    assert found.item() == 1.0 - 2.0**-6


def test_distance_of_narrow_models_is_exact() -> None:
    left, right = ({"x": torch.tensor([x], dtype=torch.bfloat16)} for x in (100.0, 0.1))
    assert distance(left, right) == pytest.approx(100.0 - right["x"].item(), rel=1e-7)


@pytest.mark.parametrize("dtype", [*NARROW, torch.float64])
def test_slices_of_networks_have_their_dtype_and_are_rounded_once(dtype: torch.dtype) -> None:
    models = [narrow_model(dtype) for _ in range(9)]
    stream = torch.Generator().manual_seed(0)
    for model in models:
        for tensor in parameters_of(model).values():
            tensor.copy_(torch.randn(tensor.shape, generator=stream))
    width = Width.of(models[0], parameters_of(models[0]))
    found = Whole.mean(width, 1, [(Slice(width), parameters_of(model)) for model in models]).take(Slice(width))
    for name, tensor in found.items():
        exact = torch.stack([parameters_of(model)[name].double() for model in models]).mean(0)
        assert tensor.dtype is dtype
        torch.testing.assert_close(tensor, exact.to(dtype), rtol=0 if dtype.itemsize < 4 else 1e-12, atol=0)
