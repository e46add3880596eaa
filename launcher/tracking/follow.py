"""Follow the records of a run while its peers write them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from statistics import fmean, pstdev

from p2pfl import PeerId

LAG = 10
"""A mean does not wait for peers that are this many rounds behind the first one: they may be dead."""


class Means:
    """Means over the honest peers of what they recorded in a round. ``peers``: their number."""

    def __init__(self, peers: int) -> None:
        self._peers = peers
        self._rounds: dict[int, dict[PeerId, Mapping[str, float]]] = defaultdict(dict)
        self._last = -1
        """The last round that was yielded: what arrives later is not in its mean."""
        self._first = -1
        """The last round of the peer that is first."""

    def add(self, peer: PeerId, t: int, values: Mapping[str, float]) -> None:
        if t > self._last:
            self._rounds[t][peer] = values
            self._first = max(self._first, t)

    def complete(self, *, end: bool = False) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield, ascending, rounds that all peers have recorded or that are LAG behind the first; at the end, all."""
        for t in sorted(self._rounds):
            if not end and len(self._rounds[t]) < self._peers and t > self._first - LAG:
                return
            self._last = t
            yield t, _mean(list(self._rounds.pop(t).values()))


def _mean(peers: list[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each number, the standard deviation and the minimum of the accuracy, and who took part."""
    values: dict[str, list[float]] = defaultdict(list)
    for numbers in peers:
        for name, value in numbers.items():
            values[name].append(value)
    found = {name: fmean(all_values) for name, all_values in values.items()}
    if accuracies := values.get("accuracy"):
        found["accuracy.std"], found["accuracy.min"] = pstdev(accuracies), min(accuracies)
    found["peers"] = len(peers)
    return found
