"""Printable names of classes, and notes on classes without samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from p2pfl.terminal import printable

LONGEST = 60
"""Letters of a name."""
LISTED = 8
"""Names of classes that a note lists."""


def shown(names: Sequence[str]) -> tuple[str, ...]:
    """Return a different name for each class that fits into a line of a terminal; none if they are its number.

    Control characters are escaped, and long names are cut. Where names are equal then, the number of the class comes
    before them.
    """
    plain = [printable(" ".join(name.split())) or "''" for name in names]
    plain = [name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…" for name in plain]
    times = Counter(plain)
    once = [name if times[name] == 1 else f"{k} {name}" for k, name in enumerate(plain)]
    if len(set(once)) < len(once):
        once = [f"{k} {name}" for k, name in enumerate(plain)]
    return () if once == [str(k) for k in range(len(once))] else tuple(once)


def without_samples(
    names: Sequence[str], classes: int, train: npt.NDArray[np.int64], test: npt.NDArray[np.int64]
) -> list[str]:
    """Return a note for each way in which classes lack samples.

    Args:
        names: of all classes; empty if they have only numbers.
        train, test: labels, int64 [N].
    """
    in_train, in_test = (np.bincount(labels, minlength=classes) > 0 for labels in (train, test))
    ways = {
        "no samples": ~in_train & ~in_test,
        "test samples, but no training samples": ~in_train & in_test,
        "training samples, but no test samples": in_train & ~in_test,
    }
    notes = []
    for what, mask in ways.items():
        if len(found := np.flatnonzero(mask)):
            listed = ", ".join(names[k] if names else str(k) for k in found[:LISTED])
            more = f" and {len(found) - LISTED} more" if len(found) > LISTED else ""
            noun = "class" if len(found) == 1 else f"{len(found)} of {classes} classes:"
            notes.append(f"{what} of {noun} {listed}{more}")
    if not names and not in_train[0] and not in_test[0]:
        notes[0] += "; if the labels count from 1, subtract 1"
    return notes
