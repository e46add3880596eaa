"""The network of comparators that trims, against sorting."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch

from p2pfl.aggregation.coordinates import MOST_IN_NETWORK, middle
from p2pfl.aggregation.trimming_network import merge_exchange, network, trimmed


@pytest.mark.parametrize("n", range(1, 12))
def test_it_keeps_the_inner_ones_of_all_zeros_and_ones(n: int) -> None:
    """By the 0-1 principle, what holds for zeros and ones holds for all numbers."""
    columns = np.array(list(product((0.0, 1.0), repeat=n))).T
    for dropped in range((n + 1) // 2):
        kept = np.array(trimmed(list(columns), dropped))
        ordered = np.sort(columns, axis=0)[dropped : n - dropped]
        assert (kept[0] == ordered[0]).all()
        assert (kept[-1] == ordered[-1]).all()
        assert (np.sort(kept, axis=0) == ordered).all()


def test_it_compares_only_what_is_read() -> None:
    assert len(list(merge_exchange(8))) == 19  # Batcher's
    assert list(map(tuple, network(3, 1))) == [(0, 1, True, True), (0, 2, False, True), (1, 2, True, False)]
    assert len(network(16, 7)) < len(list(merge_exchange(16)))


@pytest.mark.parametrize("n", [2, 5, 12, MOST_IN_NETWORK, MOST_IN_NETWORK + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.complex64])
def test_the_middle_is_that_of_sorted_numbers(n: int, dtype: torch.dtype) -> None:
    stream = torch.Generator().manual_seed(n)
    drawn = torch.randn(n, 7, 3, generator=stream, dtype=torch.float64) * 10
    rows = torch.complex(drawn, drawn.flip(1)).to(dtype) if dtype.is_complex else drawn.to(dtype)
    for dropped in {0, (n - 1) // 4, (n - 1) // 2}:
        parts = torch.view_as_real(rows) if dtype.is_complex else rows
        expected = parts.sort(0).values[dropped : n - dropped].double().mean(0)
        found = middle(list(rows), dropped)
        real = (torch.view_as_real(found) if dtype.is_complex else found).double()
        torch.testing.assert_close(real, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n", [5, MOST_IN_NETWORK + 1])
def test_nan_is_the_highest_and_equal_numbers_are_their_mean_to_the_bit(n: int) -> None:
    columns = [[math.nan, 2.0, 0.1, -math.inf], [1.0, math.nan, 0.1, -math.inf]]
    rows = torch.tensor(columns + [[3.0, 2.0, 0.1, -math.inf]] * (n - 2))
    found = middle(list(rows), 1)
    assert found[0].item() == 3.0
    assert found[1:].tolist() == rows[-1, 1:].tolist()
    assert middle(list(rows), 0)[:2].isnan().all()
    assert middle(list(rows), 0)[2:].tolist() == rows[-1, 2:].tolist()
