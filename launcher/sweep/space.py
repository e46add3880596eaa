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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveInt, ValidationError, model_validator

from launcher.facts.sweep_folder import SweepFolder
from p2pfl.errors import RunFileError
from p2pfl.options import OptionErrors, OptionProblem, Section, explain
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


class SpaceFile(Section):
    """The file, key by key."""

    space: dict[str, Any] = Field(min_length=1)
    trials: PositiveInt = 30
    objective: Literal["accuracy", "worst-tenth"] = "accuracy"
    prune: bool = True
    startup: PositiveInt = 5
    warmup: int = Field(default=2, ge=0)


@dataclass(frozen=True)
class Space:
    """A search space.

    Attributes:
        axes: a range or a list of values by key.
    """

    axes: Mapping[str, Range | list[Any]]
    settings: SpaceFile


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
        return parse(tree).settings.model_dump(mode="json")
    except OptionErrors as errors:
        raise source.error(errors.problems) from None


def parse(plain: Mapping[str, Any]) -> Space:
    """Check a search space. A ``seed`` is not part of it, but of the sweep. Raises OptionErrors."""
    try:
        settings = SpaceFile.model_validate({key: value for key, value in plain.items() if key != "seed"})
    except ValidationError as error:
        raise OptionErrors(explain(error, lambda path: SpaceFile.model_fields)) from None
    problems: list[OptionProblem] = []
    axes: dict[str, Range | list[Any]] = {}
    for key, values in settings.space.items():
        if isinstance(values, list) and values:
            axes[key] = values
        elif isinstance(values, dict):
            try:
                axes[key] = Range.model_validate(values)
            except ValidationError as error:
                found = explain(error, lambda path: Range.model_fields)
                problems += [problem._replace(path=("space", key, *problem.path)) for problem in found]
        else:
            text = f"should be a list of values, or {{low: …, high: …}} (found {values!r})"
            problems.append(OptionProblem(("space", key), text))
    if problems:
        raise OptionErrors(problems)
    return Space(axes, settings)


def corners(space: Space) -> list[dict[str, Any]]:
    """Return points of the space that together have the lowest, the highest and every listed value."""
    values = {
        key: [found.low, found.high] if isinstance(found, Range) else list(found) for key, found in space.axes.items()
    }
    most = max(map(len, values.values()))
    return [{key: found[min(at, len(found) - 1)] for key, found in values.items()} for at in range(most)]


def more_trials(folder: SweepFolder, trials: int) -> None:
    """Change the number of trials of an existing search.

    Raises RunFileError if it is none, SweepError if it is at work: that adds its trials to the same file.
    """
    with folder.locked():
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
