"""Splitting networks: which part is the head, what is refused, and what is converted or copied."""

from __future__ import annotations

import random
from copy import deepcopy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from p2pfl import rng
from p2pfl.errors import ModelError
from p2pfl.models import Model, build
from p2pfl.models.cost import cost
from p2pfl.models.import_path import build_parts
from p2pfl.tensors import digest

HERE = __name__


class Body(nn.Module):
    """What the networks below have in common; ``forward`` is theirs."""

    def __init__(self, num_classes: int, in_channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(in_channels, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.fc = nn.Linear(16, num_classes)


class Plain(Body):
    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.body(x))
        return logits


class HeadFirst(Body):
    def __init__(self, num_classes: int, in_channels: int) -> None:
        super().__init__(num_classes, in_channels)
        self.block = nn.Sequential(nn.ReLU(), nn.Linear(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        z = self.body(x)
        logits: Tensor = self.fc(z + self.block(z))
        return logits


class DropsInBoth(Body):
    """Its head draws random numbers after the backbone has drawn some."""

    def __init__(self, num_classes: int, in_channels: int) -> None:
        super().__init__(num_classes, in_channels)
        self.body.append(nn.Dropout(0.5))
        self.fc = nn.Sequential(nn.Dropout(0.5), nn.Linear(16, num_classes))  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.body(x))
        return logits


class TupleInTraining(Plain):
    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        return (logits, logits) if self.training else logits  # type: ignore[return-value]


class DictInTraining(Plain):
    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        return {"out": logits} if self.training else logits  # type: ignore[return-value]


class DropsLogits(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), training=self.training)


class WithoutGradient(Plain):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class ByWeight(Body):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.body(x), self.fc.weight, self.fc.bias)


class Narrow(Plain):
    def __init__(self, num_classes: int, in_channels: int, dtype: str) -> None:
        super().__init__(num_classes, in_channels)
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.dtype))


class Autocast(Plain):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x)


class ChangesInput(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.sub_(0.5))


class Counts(Plain):
    def __init__(self, num_classes: int, in_channels: int) -> None:
        super().__init__(num_classes, in_channels)
        self.calls = 0
        self.norm = nn.BatchNorm2d(in_channels)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(self.norm(x))


class NeedsNumbers(Plain):
    def __init__(self, num_classes: int, in_channels: int) -> None:
        super().__init__(num_classes, in_channels)
        self.scale = float(torch.rand(3).max().item() + random.random() + np.random.rand())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.scale * x)


class FrozenNorm(Plain):
    def __init__(self, num_classes: int, in_channels: int) -> None:
        super().__init__(num_classes, in_channels)
        self.norm = nn.BatchNorm2d(in_channels).eval()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


def scripted(num_classes: int, in_channels: int) -> nn.Module:
    return torch.jit.script(Plain(num_classes, in_channels))


def made(name: str) -> Model:
    return build(f"{HERE}.{name}", 0, 1, (8, 8), 10)


def test_head_is_the_linear_layer_whose_output_is_returned() -> None:
    model = made("HeadFirst")
    assert (model.head_path, model.features, model.linear_head.out_features) == ("fc", 16, 10)
    x = torch.rand(3, 1, 8, 8)
    assert torch.equal(model(x), model.head(model.backbone(x)))


def test_backbone_and_head_may_both_draw_random_numbers() -> None:
    assert isinstance(made("DropsInBoth:fc").head[0], nn.Dropout)  # type: ignore[index]


def test_a_network_can_be_its_own_head() -> None:
    model = build("torch.nn.Linear(out_features=3)", 0, 5, (), 3)
    assert (model.features, model.head_path, sorted(model.state_dict())) == (5, "", ["head.bias", "head.weight"])
    assert sorted(model.plain_state_dict()) == ["bias", "weight"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("TupleInTraining", "returns tuple in training, not a tensor of logits; return the logits alone"),
        ("DictInTraining", "returns dict in training, not a tensor of logits"),
        ("DropsLogits", "the output is not the output of its head 'fc' in training; name the last part as `head`"),
        ("WithoutGradient", "no gradient reaches its parameters from its output in training; compute it without"),
        ("ByWeight", r"not the output of its head 'fc' \(without it: AttributeError: 'Identity' object has no attr"),
        ("scripted", "is compiled by torch.jit, so it cannot be split"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
def test_network_that_cannot_be_split_or_trained_is_refused(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        made(name)


@pytest.mark.parametrize("name", ["Narrow(dtype='bfloat16')", "Narrow(dtype='float64')", "Autocast"])
def test_features_and_logits_are_float32_whatever_the_network_computes_in(name: str) -> None:
    model = made(name)
    x = torch.rand(3, 1, 8, 8)
    features = model.backbone(x)
    logits = model.head(features)
    assert (features.dtype, logits.dtype) == (torch.float32, torch.float32)
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_network_that_changes_its_input_gets_a_copy() -> None:
    model = made("ChangesInput")
    x = torch.rand(2, 1, 8, 8)
    before = x.clone()
    first = model(x)
    assert torch.equal(x, before)
    assert torch.equal(model(x), first)


def test_building_leaves_attributes_statistics_and_random_numbers_alone() -> None:
    states = []
    for _ in range(2):
        random.seed(0)
        np.random.seed(0)
        with rng.torch_seeded(0, "model"):
            parts = build_parts(f"{HERE}.Counts", 1, (8, 8), 10)
            states.append((digest(parts[0].state_dict()), float(torch.rand(1)), random.random(), np.random.rand()))
        assert getattr(parts[0], "calls") == 0  # noqa: B009
        assert int(parts[0].get_buffer("norm.num_batches_tracked")) == 0
    assert states[0] == states[1]


def test_networks_that_the_meta_device_cannot_build_are_built() -> None:
    before = random.getstate()
    found = cost(f"{HERE}.NeedsNumbers", 1, (8, 8), 10)
    assert (found.features, found.parameters) == (16, 40 + 170)
    assert random.getstate() == before


def test_submodule_in_evaluation_mode_stays_in_it_and_others_do_not() -> None:
    for model in (made("FrozenNorm"), deepcopy(made("FrozenNorm"))):
        model.train()
        norm = model.get_submodule("backbone.norm")
        assert not norm.training
        assert model.backbone.training
        assert model.get_submodule("backbone.body.0").training
        model(1 + torch.rand(4, 1, 8, 8))
        assert float(norm.get_buffer("running_mean")) == 0.0
        model.eval()
        assert not model.backbone.training
