"""Whether JSON values, which another host may have written, have the types that annotations name."""

from __future__ import annotations

from reprlib import repr as shortened
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

LARGEST = 2.0**63
"""Largest absolute value of numbers whose annotation names no other; NaN is allowed."""


def mismatch(key: str, value: Any, wanted: Any) -> str | None:
    """Return where a JSON value does not have the type ``wanted``, if anywhere. Not pydantic: it imports slowly.

    Args:
        wanted: an annotation. Annotated gives the length of a list, or the largest absolute value of a number.
    """
    kind, parts = get_origin(wanted) or wanted, get_args(wanted)
    if kind in (Union, UnionType):  # X | None
        return None if value is None else mismatch(key, value, parts[0])
    length, largest = None, LARGEST
    if kind is Annotated:
        wanted, limit = parts
        kind, parts = get_origin(wanted) or wanted, get_args(wanted)
        length, largest = (limit, LARGEST) if kind is list else (None, limit)
    if kind is Literal:
        fits, expected = value in parts, f"one of {', '.join(parts)}"
    elif kind is list:
        fits = isinstance(value, list) and length in (None, len(value))
        expected = "a list" if length is None else f"a list of {length}"
    elif kind is dict:
        fits, expected = isinstance(value, dict), "an object"
    elif kind is float:
        fits = type(value) in (int, float) and (abs(value) <= largest or value != value)
        expected = f"a number of at most {largest:.3g}"
    elif kind is int:
        fits, expected = type(value) is int and abs(value) <= LARGEST, "an integer of at most 64 bits"
    else:
        fits, expected = isinstance(value, kind), "a string"
    if not fits:
        return f"{key} must be {expected}, got {shortened(value)}"
    items = enumerate(value) if kind is list else value.items() if kind is dict else ()
    return next(filter(None, (mismatch(f"{key}[{shortened(at)}]", item, parts[-1]) for at, item in items)), None)
