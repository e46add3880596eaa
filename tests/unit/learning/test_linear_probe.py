"""The linear probe."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from p2pfl.learning.linear_probe import fit, new_probe, train_probe
from p2pfl.learning.optimizers import Adam


def clusters(samples: int, seed: int, spread: float = 0.3) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy features [N, 8] around three corners, and their labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(samples) % 3
    return torch.eye(8)[labels] + spread * torch.randn(samples, 8, generator=generator), labels


def accuracy(probe: torch.nn.Module, features: torch.Tensor, labels: torch.Tensor) -> float:
    return float((probe(features).argmax(dim=1) == labels).float().mean())


def test_probe_separates_linear_classes() -> None:
    probe = train_probe(*clusters(300, seed=0), 3, np.random.default_rng(0))
    assert accuracy(probe, *clusters(99, seed=1)) > 0.9


def test_features_stay_frozen() -> None:
    features, labels = clusters(30, seed=0)
    features.requires_grad_()
    before = features.detach().clone()
    train_probe(features, labels, 3, np.random.default_rng(0), epochs=2)
    assert features.grad is None
    assert torch.equal(features, before)


def test_only_the_stream_determines_the_weights() -> None:
    def weights(seed: int, torch_seed: int) -> torch.Tensor:
        torch.manual_seed(torch_seed)
        before = torch.get_rng_state()
        probe = train_probe(*clusters(50, seed=0), 3, np.random.default_rng(seed), epochs=3, batch=16)
        assert torch.equal(torch.get_rng_state(), before)
        return probe.weight.detach()

    assert torch.equal(weights(0, torch_seed=1), weights(0, torch_seed=2))
    assert not torch.equal(weights(0, torch_seed=1), weights(1, torch_seed=1))


@pytest.mark.parametrize(("least", "epochs"), [(1, 3), (12, 3), (13, 4), (99, 25)])
def test_number_of_steps_follows_from_epochs_batch_size_and_least_steps(
    monkeypatch: pytest.MonkeyPatch, least: int, epochs: int
) -> None:
    steps: list[float] = []
    step = Adam.step

    def record(self: Any) -> None:
        steps.append(self.param_groups[0]["lr"])
        step(self)

    monkeypatch.setattr(Adam, "step", record)
    train_probe(*clusters(50, seed=0), 3, np.random.default_rng(0), epochs=3, steps=least, batch=16)
    assert steps == [3e-3] * epochs * 4


def test_fit_trains_any_classifier_as_train_probe_does() -> None:
    features, labels = clusters(90, seed=0)
    probe = train_probe(features, labels, 3, np.random.default_rng(0), epochs=5, batch=32)
    stream = np.random.default_rng(0)
    same = new_probe(8, 3, stream, features.device)
    fit(torch.nn.Sequential(torch.nn.Identity(), same), features, labels, stream, epochs=5, batch=32)
    assert torch.equal(probe.weight, same.weight)
    assert torch.equal(probe.bias, same.bias)


def test_trains_inside_no_grad() -> None:
    with torch.no_grad():
        probe = train_probe(*clusters(60, seed=0), 3, np.random.default_rng(0))
    assert accuracy(probe, *clusters(60, seed=0)) > 0.9
