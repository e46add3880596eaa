"""Running means of loss terms."""

from __future__ import annotations

import torch

from p2pfl.learning.meter import Meter


def test_means_are_weighted_by_samples_and_reset_when_drained() -> None:
    meter = Meter()
    meter.add({"ce": torch.tensor(1.0, requires_grad=True), "reg": torch.tensor(4.0)}, samples=3)
    meter.add({"ce": torch.tensor(5.0), "reg": torch.tensor(0.0)}, samples=1)
    assert meter.drain() == {"ce": 2.0, "reg": 3.0}
    assert meter.drain() == {}
    meter.add({"ce": torch.tensor(7.0)}, samples=2)
    assert meter.drain() == {"ce": 7.0}


def test_each_term_is_averaged_over_its_samples_only() -> None:
    meter = Meter()
    meter.add({"first": torch.tensor(1.0)}, samples=3)
    meter.add({"second": torch.tensor(5.0)}, samples=7)
    assert meter.drain() == {"first": 1.0, "second": 5.0}
