"""What a sweep varies: ``--grid KEY=VALUE,VALUE,…`` and seeds, and the runs that follow from them.

A value is YAML, as after ``--set``. One that ends in ``.yaml`` or ``.yml`` is read from that file: its section with
the name of the key, or else all of it, so that ``--grid algorithm=a.yaml,b.yaml`` compares two methods with their
parameters. Longer keys are applied on top of shorter ones, in any order of the options.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, product
from pathlib import Path
from typing import Any

import yaml

from launcher.facts.sweep_folder import SweepRun
from launcher.formatting.labels import short
from p2pfl.errors import Problem, RunFileError
from p2pfl.run_file.yaml_source import RunFileLoader

LONGEST_NAME = 120
"""Characters of the name of a run and of its folder."""


@dataclass(frozen=True)
class Value:
    """A value of an axis, and how tables call it."""

    label: str
    value: Any


@dataclass(frozen=True)
class Axis:
    """A key of the run file and the values that it takes.

    Attributes:
        option: what was given on the command line, for errors.
    """

    option: str
    key: str
    values: tuple[Value, ...]


def parse_axis(text: str) -> Axis:
    """Read the text of one ``--grid``. Raises RunFileError."""
    option = f"--grid {text}"
    key, equals, values = text.partition("=")
    if not equals or not all(key.split(".")):
        raise _error(option, "", "expected key=value,value,… or section.key=value,value,…")
    texts = [part.strip() for part in split_values(values)]
    if not all(texts):
        raise _error(option, key, "a value is empty; expected values that are separated by single commas")
    doubles = sorted({part for part in texts if texts.count(part) > 1})
    if doubles:
        raise _error(option, key, f"{doubles[0]!r} is given twice")
    stems = [Path(part).stem if _is_file(part) else part for part in texts]
    labels = stems if len(set(stems)) == len(stems) else texts
    return Axis(option, key, tuple(Value(label, _value(option, key, part)) for label, part in zip(labels, texts)))  # noqa: B905


def parse_axes(texts: Sequence[str]) -> list[Axis]:
    """Read all ``--grid`` options. Raises RunFileError."""
    axes = [parse_axis(text) for text in texts]
    seen: dict[str, str] = {}
    for axis in axes:
        if axis.key in seen:
            raise _error(axis.option, axis.key, f"also varied by {seen[axis.key]}; give all values in one option")
        seen[axis.key] = axis.option
    return axes


def split_values(text: str) -> Iterator[str]:
    """Split at commas that are not inside brackets, braces or quotes."""
    depth, quote, begin = 0, "", 0
    for at, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in "[{":
            depth += 1
        elif letter in "]}":
            depth -= 1
        elif letter == "," and depth == 0:
            yield text[begin:at]
            begin = at + 1
    yield text[begin:]


def _is_file(text: str) -> bool:
    return text.endswith((".yaml", ".yml"))


def _value(option: str, key: str, text: str) -> Any:
    try:
        content = Path(os.path.expanduser(text)).read_text(encoding="utf-8") if _is_file(text) else text
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise _error(option, key, f"{text}: cannot be read: {reason}") from None
    try:
        value = yaml.load(content, Loader=RunFileLoader)  # noqa: S506, TID251  # derived from SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{text}:{mark.line + 1}" if mark is not None and _is_file(text) else repr(text)
        raise _error(option, key, f"{where} is invalid YAML") from None
    if _is_file(text):
        section = key.rpartition(".")[2]
        if isinstance(value, dict) and section in value:
            return value[section]
        if value is None:
            raise _error(option, key, f"{text}: empty; expected the value of {key}, or a section {section!r}")
    return value


def seeds_of(axes: list[Axis], first: int, number: int | None) -> tuple[list[Axis], list[int]]:
    """Return the axes besides the seed, and the seeds: of ``--grid seed=…``, else ``number`` from ``first`` on.

    Raises:
        RunFileError: both were given, or a seed is not an integer of at least 0.
    """
    given = next((axis for axis in axes if axis.key == "seed"), None)
    if given is None:
        return axes, list(range(first, first + (number or 1)))
    if number is not None:
        raise _error(given.option, "seed", "give either --seeds or --grid seed=…, not both")
    for value in given.values:
        if type(value.value) is not int or value.value < 0:
            raise _error(given.option, "seed", f"should be an integer of at least 0 (found {value.label})")
    return [axis for axis in axes if axis is not given], [value.value for value in given.values]


def points(axes: Sequence[Axis], seeds: Sequence[int]) -> list[SweepRun]:
    """Return every combination of the axes' values with every seed, in the order of the command line."""
    found, names = [], set[str]()
    for chosen in product(*(axis.values for axis in axes)):
        labels = {axis.key: value.label for axis, value in zip(axes, chosen, strict=True)}
        values = {axis.key: value.value for axis, value in zip(axes, chosen, strict=True)}
        ordered = {axis.key: values[axis.key] for axis in by_depth(axes)}
        for seed in seeds:
            name = run_name(labels, seed, names)
            names.add(name)
            found.append(SweepRun(name, labels, seed, ordered))
    return found


def by_depth(axes: Sequence[Axis]) -> list[Axis]:
    """Sort axes so that ``algorithm`` is applied before ``algorithm.lr``."""
    return sorted(axes, key=lambda axis: axis.key.count("."))


def run_name(labels: Mapping[str, str], seed: int, taken: Iterable[str]) -> str:
    """``mapl-lr=0.01-seed=2``: the name of a folder that no other run has."""
    parts = [short(key, label) for key, label in labels.items()]
    text = re.sub(r"[^A-Za-z0-9._+=-]+", "_", "-".join([*parts, f"seed={seed}"]))[-LONGEST_NAME:].lstrip(".-")
    taken = set(taken)
    return next(name for number in count(1) if (name := text if number == 1 else f"{text}-{number}") not in taken)


def _error(where: str, key: str, message: str) -> RunFileError:
    return RunFileError([Problem(where, key, message)])
