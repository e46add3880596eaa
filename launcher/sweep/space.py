"""The file of ``--optuna``: which values to try.

trials: 30
objective: accuracy        # or worst-tenth; of the peers, at the end
prune: true                # stop trials that do worse than the median of the others after as many rounds
startup: 5                 # trials before the first is pruned
warmup: 2                  # rounds of a trial before it is pruned
space:
  algorithm.lr: {low: 0.0001, high: 0.1, log: true}
  algorithm.warmup: {low: 0, high: 10}
  algorithm.optimizer: [sgd, adam]
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, ValidationError, model_validator

from launcher.sweep.folder import SweepFolder
from p2pfl.errors import RunFileError
from p2pfl.run_file.options import OptionProblem, Section, explain
from p2pfl.run_file.yaml_source import Source


class Range(Section):
    """The numbers from ``low`` to ``high``, both included: integers if these are."""

    low: int | float
    high: int | float
    log: bool = False
    step: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _consistent(self) -> Range:
        if self.low >= self.high:
            raise ValueError(f"low should be below high, got {self.low} and {self.high}")
        if self.log and self.low <= 0:
            raise ValueError(f"low should be above 0 if log is true, got {self.low}")
        if self.log and self.step is not None:
            raise ValueError("step and log exclude each other")
        if self.integer and self.step is not None and self.step != int(self.step):
            raise ValueError(f"step should be an integer if low and high are, got {self.step}")
        return self

    @property
    def integer(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)


class Space(Section):
    """A search space."""

    space: dict[str, Range | Annotated[list[Any], Field(min_length=1)]] = Field(min_length=1)
    trials: PositiveInt = 30
    objective: Literal["accuracy", "worst-tenth"] = "accuracy"
    prune: bool = True
    startup: PositiveInt = 5
    warmup: int = Field(default=2, ge=0)


def read_space(file: Path, trials: int | None) -> dict[str, Any]:
    """Read a search space, with another number of trials if one is given. Raises RunFileError."""
    source = Source(str(file))
    try:
        tree = source.read(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise source.error([OptionProblem((), f"cannot be read: {reason}")]) from None
    if not isinstance(tree, dict):
        raise source.error([OptionProblem((), "not a mapping; expected at least space: {key: values}")])
    if trials is not None:
        tree["trials"] = trials
    try:
        found = Space.model_validate(tree)
    except ValidationError as error:
        problems = explain(error, lambda path: Space.model_fields if len(path) < 2 else Range.model_fields)
        raise source.error(_merged(problems)) from None
    return found.model_dump(mode="json", exclude_none=True)


def _merged(problems: list[OptionProblem]) -> list[OptionProblem]:
    """Values that are neither a range nor a list have a problem for each: keep that of what was probably meant."""
    kept: dict[tuple[str | int, ...], OptionProblem] = {}
    for problem in problems:
        path = tuple(part for part in problem.path if part not in ("Range", "list[any]") and "list[" not in str(part))
        key = path[:2]
        message = problem.message
        if key in kept and "Range" not in problem.path:
            continue
        if "should be a mapping" in message:
            message = "expected a list of values, or {low: …, high: …}"
        kept[key] = problem._replace(path=path, message=message)
    return list(kept.values())


def parse(plain: Mapping[str, Any]) -> Space:
    """Read what ``read_space`` has returned, and a ``seed``, which is not part of it."""
    return Space.model_validate({key: value for key, value in plain.items() if key != "seed"})


def corners(space: Space) -> list[dict[str, Any]]:
    """Return points of the space that together have the lowest, the highest and every listed value."""
    values = {
        key: [found.low, found.high] if isinstance(found, Range) else list(found)
        for key, found in space.space.items()
    }
    most = max(map(len, values.values()))
    return [{key: found[min(at, len(found) - 1)] for key, found in values.items()} for at in range(most)]


def more_trials(folder: SweepFolder, trials: int) -> None:
    """Change the number of trials of an existing search. Raises RunFileError if it is none."""
    sweep = folder.sweep
    if sweep.search is None:
        raise RunFileError(
            [Source(str(folder.file)).locate((), "--trials is for a search (--optuna); this is a grid")]
        )
    folder.write(replace(sweep, search={**sweep.search, "trials": trials}))


def label(value: Any) -> str:
    """Return a value of the space as tables call it."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)
