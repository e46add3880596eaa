"""Which runs were tested on the same samples: accuracies of other samples do not rank them.

Peers record hashes of their test samples, so the same data count as the same wherever they come from. A run
without any started peer is compared by the data and the partition of its run file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from string import ascii_uppercase
from typing import Any, Protocol

from p2pfl import PeerId

DATASET = "dataset.sha256"
"""Key of a run's values that the run file does not have: the first digits of the hash of its dataset."""
_DATASET_KEYS = "data.dataset"


@dataclass(frozen=True)
class WasTested:
    """What one run was tested on.

    Attributes:
        samples: hash of the test samples of each peer that has recorded it.
        classes: of each of these peers, hash of the classes whose scores count in a masked test.
        divided: the values of the run file, besides the seed, on which the division of the data depends.
    """

    seed: int
    samples: Mapping[PeerId, str]
    classes: Mapping[PeerId, str]
    divided: Mapping[str, Any]

    @classmethod
    def of(cls, seed: int, values: Mapping[str, Any], tested_on: Mapping[PeerId, Mapping[str, str]]) -> WasTested:
        """``values``: as in ComparedRun."""
        known = {peer: found for peer, found in tested_on.items() if found.get("samples")}
        return cls(
            seed,
            {peer: found["samples"] for peer, found in known.items()},
            {peer: found.get("classes", "") for peer, found in known.items()},
            {key: value for key, value in values.items() if value is not None and _divides(key)},
        )


class HasTested(Protocol):
    @property
    def tested(self) -> WasTested: ...


def _divides(key: str) -> bool:
    return key in ("peers", DATASET) or key.startswith((_DATASET_KEYS, "data.partition"))


def differing(runs: Sequence[HasTested]) -> list[str]:
    """Return in what runs differ on which it depends what they were tested on."""
    divided = [run.tested.divided for run in runs]
    keys = [key for key in dict.fromkeys(chain(*divided)) if _differ(run.get(key) for run in divided)]
    if DATASET in keys:
        keys.remove(DATASET)
        named = any(key.startswith(_DATASET_KEYS) for key in keys)
        if not named and _differ(run[DATASET] for run in divided if DATASET in run):
            keys.append("the content of the dataset")
    owners = {key.removesuffix("name") for key in keys if key.endswith(".name")}
    keys = [key for key in keys if key.endswith(".name") or not key.startswith(tuple(owners))]
    return keys or ["seed" if _differ(run.tested.seed for run in runs) else "the recorded test samples"]


def _differ(values: Iterable[Any]) -> bool:
    first, *others = [*values] or [None]
    return any(value != first for value in others)


def alike(a: WasTested, b: WasTested) -> bool:
    """Whether two runs divide the same data in the same way, but for the seed."""
    known = {DATASET} <= a.divided.keys() & b.divided.keys()
    ignored = _DATASET_KEYS if known else DATASET  # the hash tells more than a path
    one, other = ({key: run.divided[key] for key in run.divided if not key.startswith(ignored)} for run in (a, b))
    return one == other


def names(groups: Sequence[Sequence[HasTested]], masked: bool) -> list[str]:
    """Name the test set of each group of runs: A, B, …

    Args:
        masked: the classes whose scores count matter too.
    """
    sets: list[list[Sequence[HasTested]]] = []
    found: list[int] = []
    for group in groups:
        same = (at for at, others in enumerate(sets) if all(_same(other, group, masked) for other in others))
        found.append(next(same, len(sets)))
        if found[-1] == len(sets):
            sets.append([])
        sets[found[-1]].append(group)
    return [_letters(at) for at in found]


def _letters(number: int) -> str:
    """A to Z, AA, AB, …"""
    more, last = divmod(number, len(ascii_uppercase))
    return (_letters(more - 1) if more else "") + ascii_uppercase[last]


def _same(one: Sequence[HasTested], two: Sequence[HasTested], masked: bool) -> bool:
    """Whether two groups were tested on the same samples, seed by seed."""
    first, second = ({run.tested.seed: run.tested for run in reversed(runs)} for runs in (one, two))
    pairs = [(first[seed], second[seed]) for seed in first.keys() & second.keys()]
    if not pairs:
        a, b = one[0].tested, two[0].tested
        # Other seeds of the same division are other draws of the same: their means may be compared, but not two runs.
        if alike(a, b) and max(len(first), len(second)) > 1:
            return True
        pairs = [(a, b)]
    return all(_same_samples(a, b, masked) for a, b in pairs)


def _same_samples(a: WasTested, b: WasTested, masked: bool) -> bool:
    mine, others = (
        {peer: (found, masked and each.classes[peer]) for peer, found in each.samples.items()} for each in (a, b)
    )
    if not mine or not others:
        return a.seed == b.seed and alike(a, b)
    if mine.keys() != others.keys() and mine.keys() & others.keys() and alike(a, b):
        common = mine.keys() & others.keys()  # some peers have died before they recorded it
        return all(mine[peer] == others[peer] for peer in common)
    return _fractions(mine) == _fractions(others)


def _fractions(samples: Mapping[PeerId, Any]) -> dict[Any, Fraction]:
    """The fraction of the peers that were tested on each, as the mean over the peers weights them."""
    return {found: Fraction(count, len(samples)) for found, count in Counter(samples.values()).items()}
