"""Running means of loss terms."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from torch import Tensor


class Meter:
    """Means of loss terms, weighted by samples, since the last ``drain``."""

    def __init__(self) -> None:
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._samples: defaultdict[str, int] = defaultdict(int)

    def add(self, terms: Mapping[str, Tensor], samples: int) -> None:
        """Add the mean values of some terms over a batch of ``samples``."""
        for name, value in terms.items():
            self._sums[name] += float(value.detach()) * samples
            self._samples[name] += samples

    def drain(self) -> dict[str, float]:
        """Return the mean of each term over the samples it was added for, and reset."""
        means = {name: total / self._samples[name] for name, total in self._sums.items()}
        self._sums.clear()
        self._samples.clear()
        return means
