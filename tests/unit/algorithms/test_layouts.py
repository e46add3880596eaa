"""What peers of all algorithms accept: sizes and sample counts that the run file bounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from p2pfl.algorithms.base import Algorithm
from p2pfl.messaging.schema import MAX_HEADER, MessageSchema
from p2pfl.rng import Streams
from p2pfl.run_file.load import from_dict
from p2pfl.session.build import load_data, make_algorithm
from tests.conftest import tree
from tests.golden.runs import RUNS


def built(name: str) -> tuple[Algorithm[Any], int]:
    """Return a peer of the golden run, and the number of training samples of the peer that has the most."""
    run = from_dict(tree(**RUNS[name]))
    data = load_data(run)
    algorithm = make_algorithm(run, 1, data, torch.device("cpu"), Streams(run.seed, 1))
    return algorithm, max(len(subset.train) for subset in data[1])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", RUNS)
def test_sample_counts_and_sizes_are_bounded(name: str) -> None:
    algorithm, most = built(name)
    if not getattr(algorithm, "weighted", True):
        most = 1  # every peer sends this in place of its count
    layouts = algorithm.layouts()
    for layout in layouts:
        if "samples" in layout.plain:
            allowed = layout.plain["samples"].range
            assert allowed is not None
            assert (allowed[-1], allowed.start in (0, 1)) == (most, True)
        assert all(spec.type is not tuple or spec.length is not None for spec in layout.plain.values())
    one = 4 * sum(tensor.numel() for tensor in algorithm.model.state_dict().values())
    assert MessageSchema(layouts).largest(1 << 60) <= MAX_HEADER + 16 * one
