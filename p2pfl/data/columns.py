"""Properties of samples besides their label, such as the writer of a letter, and labels that are text."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,99}")
"""As Python writes integers: one text for each number."""
MISSING = frozenset(
    ("", "#N/A", "#N/A N/A", "#NA", "<NA>", "N/A", "NA", "NULL", "NaN", "NaT", "None", "n/a", "nan", "null")
)
"""What pandas reads as a missing value."""


@dataclass(frozen=True, eq=False)
class Column:
    """One property of each sample.

    Attributes:
        values: the distinct values as text, in numerical order if all are plain integers, else as text.
        train, test: int64 [N], the position in ``values`` of each sample's value.
    """

    values: tuple[str, ...]
    train: npt.NDArray[np.int64]
    test: npt.NDArray[np.int64]

    @staticmethod
    def of(train: npt.NDArray[Any], test: npt.NDArray[Any]) -> Column:
        """Encode the values, [N] each: numbers or text.

        Values are equal if their texts are, without blanks around them, whatever else the arrays hold: ``01`` is not
        ``1``, and ``1e3`` is not ``1000``. Of arrays of numbers, a whole one is written without decimals.
        """
        distinct, codes = zip(*(np.unique(values, return_inverse=True) for values in (train, test)), strict=True)
        texts = [[_text(value) for value in values.tolist()] for values in distinct]
        values = _in_order({*texts[0], *texts[1]})
        at = {value: position for position, value in enumerate(values)}
        coded = [np.array([at[text] for text in of], np.int64)[code] for of, code in zip(texts, codes, strict=True)]
        return Column(values, coded[0], coded[1])


Columns = Mapping[str, Column]


def _text(value: Any) -> str:
    return str(int(value) if isinstance(value, float) and value.is_integer() else value).strip()


def _in_order(values: set[str]) -> tuple[str, ...]:
    plain = all(_INTEGER.fullmatch(value) for value in values)
    return tuple(sorted(values, key=int) if plain else sorted(values))


def number_of(text: str) -> float | None:
    """Return the number that a text is, if it is in ASCII and has no underscores, which Python takes; else None."""
    try:
        return float(text) if text.isascii() and "_" not in text else None
    except ValueError:
        return None


def first_missing(values: npt.NDArray[Any]) -> int | None:
    """Return the position of the first of the values, [N], that is missing, NaN or infinite; None if none is."""
    distinct, first = np.unique(values, return_index=True)
    texts = map(_text, distinct.tolist())
    return min((int(k) for k, text in zip(first, texts, strict=True) if _is_missing(text)), default=None)


def _is_missing(text: str) -> bool:
    number = number_of(text)
    not_finite = number is not None and not math.isfinite(number)
    return text in MISSING or (not_finite and text[-1].isalpha())  # not an integer of 400 digits


def measurement(values: Iterable[str]) -> str | None:
    """Return the first of the values that has a fraction, if all are numbers: then they are not classes."""
    numbers = {text: number_of(text) for text in values}
    if any(number is None for number in numbers.values()):
        return None
    return next((text for text, number in numbers.items() if number and math.isfinite(number) and number % 1), None)


def lookalikes(values: Sequence[str]) -> tuple[str, str] | None:
    """Return two of these different values that are equal as numbers, or but for case or the form of letters."""
    found: dict[object, str] = {}
    for value in values:
        key: object = unicodedata.normalize("NFKC", value).casefold()
        with suppress(ValueError):
            key = float(value)  # also of 1_0, which Python takes for 10
        if key in found:
            return found[key], value
        found[key] = value
    return None
