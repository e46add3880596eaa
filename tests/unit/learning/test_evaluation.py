"""Accuracy and loss of predictors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from p2pfl.learning.evaluation import Evaluation, evaluate, mean_of
from p2pfl.learning.peer_data import EVALUATION_BATCH
from tests.support import numbered_dataset, peer_data, sample_numbers


@pytest.mark.parametrize("samples", [1, 5, EVALUATION_BATCH, EVALUATION_BATCH + 1, 2 * EVALUATION_BATCH + 3])
def test_every_sample_counts_once(samples: int) -> None:
    def fail(images: Tensor) -> Tensor:
        raise AssertionError("evaluation must not augment")

    data = peer_data(numbered_dataset(samples), [], range(samples), augment=fail)
    seen: list[int] = []

    def predict(x: Tensor) -> Tensor:
        """Predict class 1 with a margin of 2."""
        assert not torch.is_grad_enabled()
        seen.extend(sample_numbers((x * 255).round()))
        return torch.tensor([[0.0, 2.0, 0.0]]).repeat(len(x), 1)

    result = evaluate(predict, data, data.test)
    correct = len(range(1, samples, 3))
    right, wrong = np.log(1 + 2 * np.exp(-2)), np.log(1 + 2 * np.exp(-2)) + 2
    assert result is not None
    assert seen == list(range(samples))
    assert (result.correct, result.samples, result.accuracy) == (correct, samples, correct / samples)
    assert result.loss == pytest.approx((correct * right + (samples - correct) * wrong) / samples, rel=1e-5)


def test_masked_evaluation_considers_local_classes_only() -> None:
    """Sample n has class n mod 3; the peer trains on classes 0 and 1 and is tested on them."""
    data = peer_data(numbered_dataset(6), [0, 3, 4], [0, 1, 3])
    scores = torch.tensor([[1.0, 0.0, 5.0]])

    def predict(x: Tensor) -> Tensor:
        return scores.repeat(len(x), 1)

    plain, masked = (evaluate(predict, data, data.test, masked=masked) for masked in (False, True))
    assert plain is not None
    assert masked is not None
    assert (plain.correct, masked.correct) == (0, 2)
    assert (plain.accuracy, masked.accuracy) == (0.0, 2 / 3)
    for result in (plain, masked):
        assert (result.unmasked_accuracy, result.masked_accuracy) == (0.0, 2 / 3)
    assert plain.loss > 4.0
    right = float(np.log(1 + np.exp(-1.0)))
    assert masked.loss == pytest.approx((2 * right + right + 1) / 3, rel=1e-5)
    assert torch.equal(scores, torch.tensor([[1.0, 0.0, 5.0]]))  # predict's tensor is not modified


def test_both_accuracies_take_one_pass() -> None:
    data = peer_data(numbered_dataset(6), [0, 3], [0, 1])
    passes = []

    def predict(x: Tensor) -> Tensor:
        passes.append(len(x))
        return torch.tensor([[1.0, 2.0, 3.0]]).repeat(len(x), 1)

    result = evaluate(predict, data, data.test)
    assert result is not None
    assert passes == [2]
    assert (result.unmasked_accuracy, result.masked_accuracy) == (0.0, 0.5)


def test_mask_keeps_tested_classes_without_training_samples() -> None:
    data = peer_data(numbered_dataset(6), [0, 3], [2])
    result = evaluate(lambda x: torch.tensor([[0.0, 9.0, 1.0]]), data, data.test, masked=True)
    assert result is not None
    assert result.correct == 1
    assert np.isfinite(result.loss)


def test_mean_gives_evaluations_equal_weight() -> None:
    result = mean_of([Evaluation(1.0, 0.5, 10, 10, 1.0, 0.5), Evaluation(0.0, 1.5, 0, 90, 0.5, 0.0)])
    assert result == Evaluation(0.5, 1.0, 10, 100, 0.75, 0.25)


def test_no_samples_give_no_evaluation() -> None:
    data = peer_data(numbered_dataset(3), test=[])
    assert evaluate(lambda x: x, data, data.test) is None
