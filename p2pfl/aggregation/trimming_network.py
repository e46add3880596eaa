"""Trim by a network of comparators: minima and maxima of whole rows, which treat all coordinates alike.

Merge exchange, K. E. Batcher: "Sorting Networks and Their Applications", AFIPS 1968; Knuth, The Art of Computer
Programming, volume 3, Algorithm 5.2.2M.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Row = NDArray[Any]


class Comparator(NamedTuple):
    """Moves the lower number of two rows into the first, and the higher into the second, where these are read."""

    first: int
    second: int
    reads_first: bool
    reads_second: bool


def trimmed(rows: Sequence[Row], dropped: int) -> list[Row]:
    """Return each coordinate's numbers without the ``dropped`` lowest and highest; NaN is the highest.

    Args:
        rows: [d] each; they are not modified.

    Returns:
        The lowest number kept of each coordinate, others in any order, and the highest.
    """
    rows = list(rows)
    for first, second, reads_first, reads_second in network(len(rows), dropped):
        low, high = rows[first], rows[second]
        if reads_first:
            rows[first] = np.fmin(low, high)  # of a number and NaN, the number
        if reads_second:
            rows[second] = np.maximum(low, high)  # of a number and NaN, NaN
    return rows[dropped : len(rows) - dropped]


@lru_cache
def network(n: int, dropped: int) -> Sequence[Comparator]:
    """Return the comparators that trim n rows: those of a sorting network on which what is kept depends.

    Back from the outputs, a comparator is left out if nothing reads what it returns, or if its two numbers are only
    read without regard to their order.
    """
    kept = range(dropped, n - dropped)
    fates = ["inner" if i in kept else "dropped" for i in range(n)]
    fates[kept[0]] = fates[kept[-1]] = "ranked"
    comparators = []
    for i, j in reversed(list(merge_exchange(n))):
        if fates[i] != fates[j] or fates[i] == "ranked":
            comparators.append(Comparator(i, j, fates[i] != "dropped", fates[j] != "dropped"))
            fates[i] = fates[j] = "ranked"
    return comparators[::-1]


def merge_exchange(n: int) -> Iterator[tuple[int, int]]:
    """Yield the pairs of rows that are compared one after the other to sort n rows."""
    size = 1
    while size < n:
        apart = size
        while apart:
            for start in range(apart % size, n - apart, 2 * apart):
                for i in range(start, min(start + apart, n - apart)):
                    if i // (2 * size) == (i + apart) // (2 * size):
                        yield i, i + apart
            apart //= 2
        size *= 2
