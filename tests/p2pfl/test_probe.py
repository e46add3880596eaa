"""The linear probe: it learns what is linear, sees nothing else, and follows from its stream."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from p2pfl.probe import fit, new_probe, score_probe, train_probe


def clusters(samples: int, seed: int, spread: float = 0.3) -> tuple[torch.Tensor, torch.Tensor]:
    """Three noisy corners of a space of 8 dimensions."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(samples) % 3
    return torch.eye(8)[labels] + spread * torch.randn(samples, 8, generator=generator), labels


def test_a_probe_finds_linear_classes() -> None:
    probe = train_probe(*clusters(300, seed=0), 3, np.random.default_rng(0))
    found = score_probe(probe, *clusters(99, seed=1))
    assert found.samples == 99
    assert found.accuracy == found.correct / 99 > 0.9
    assert found.loss < math.log(3)


def test_features_stay_frozen() -> None:
    features, labels = clusters(30, seed=0)
    features.requires_grad_()
    before = features.detach().clone()
    train_probe(features, labels, 3, np.random.default_rng(0), epochs=2)
    assert features.grad is None
    assert torch.equal(features, before)


def test_the_stream_decides_every_bit_and_the_global_generator_none() -> None:
    def weights(seed: int, of_torch: int) -> torch.Tensor:
        torch.manual_seed(of_torch)
        before = torch.get_rng_state()
        probe = train_probe(*clusters(50, seed=0), 3, np.random.default_rng(seed), epochs=3, batch=16)
        assert torch.equal(torch.get_rng_state(), before)
        return probe.weight.detach()

    assert torch.equal(weights(0, of_torch=1), weights(0, of_torch=2))
    assert not torch.equal(weights(0, of_torch=1), weights(1, of_torch=1))


def test_epochs_and_batches_make_the_number_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[float] = []
    step = torch.optim.Adam.step

    def counted(self: torch.optim.Adam) -> None:
        steps.append(self.param_groups[0]["lr"])
        step(self)

    monkeypatch.setattr(torch.optim.Adam, "step", counted)
    train_probe(*clusters(50, seed=0), 3, np.random.default_rng(0), epochs=3, batch=16)
    assert steps == [3e-3] * 3 * 4


def test_any_classifier_of_features_is_trained_alike() -> None:
    features, labels = clusters(90, seed=0)
    probe = train_probe(features, labels, 3, np.random.default_rng(0), epochs=5, batch=32)
    stream = np.random.default_rng(0)
    same = new_probe(8, 3, stream, features.device)
    fit(torch.nn.Sequential(torch.nn.Identity(), same), features, labels, stream, epochs=5, batch=32)
    assert torch.equal(probe.weight, same.weight)
    assert torch.equal(probe.bias, same.bias)


def test_gradients_are_made_also_where_they_are_off() -> None:
    with torch.no_grad():
        probe = train_probe(*clusters(60, seed=0), 3, np.random.default_rng(0))
    assert score_probe(probe, *clusters(60, seed=0)).accuracy > 0.9
