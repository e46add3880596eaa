"""Datasets given as tables: CSV, or Parquet with the optional extra ``parquet``."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import filterfalse
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field, PositiveInt, model_validator

from p2pfl.data.columns import Column
from p2pfl.data.loaders.arrays import Array, dataset
from p2pfl.data.loaders.base import DatasetArrays, Inputs, Labels, Loader, split_off_test
from p2pfl.errors import DataError, MissingExtra
from p2pfl.run_file.options import DataPath, did_you_mean

Columns = Mapping[str, Array]
"""The columns of a file, [N] each: float64, int64, or text."""


@dataclass(frozen=True)
class TableFile(Loader):
    """A table with a sample in each row: a column with its label, and columns with numbers, its features.

    A file whose name ends in .csv has the names of the columns in its first line; one ending in .parquet is Parquet.
    Labels are numbers or text; classes are their distinct values, in ascending order.
    """

    instructions: ClassVar[str] = "a table has a sample in each row, and ends in .csv or .parquet"

    path: DataPath
    """The file, relative to the run file or to the root."""
    label: str
    """The column with the label."""
    test: Annotated[float, Field(gt=0, lt=1)] | DataPath = 0.2
    """A file with the test samples, or the fraction of each class to use for testing, evenly spaced in the file."""
    features: tuple[str, ...] | None = None
    """The columns with the features; by default all others that are neither the label nor in groups."""
    groups: tuple[str, ...] = ()
    """Columns such as a hospital, which are no features but for the partition ``natural``."""
    channels: PositiveInt | None = None
    """Samples are time series of this many channels: the features are all steps of the first channel, then of the
    next."""
    vocabulary: PositiveInt | None = None
    """Samples are sequences of tokens, each below this number."""

    @model_validator(mode="after")
    def _one_kind(self) -> TableFile:
        if self.channels is not None and self.vocabulary is not None:
            raise ValueError("give channels or vocabulary, not both: samples are time series or sequences of tokens")
        return self

    def files(self, root: Path) -> tuple[Path, ...]:
        return (root / self.path, *([root / self.test] if isinstance(self.test, Path) else []))

    def read(self, root: Path) -> DatasetArrays:
        path = root / self.path
        columns = read_columns(path)
        names = self._names(path, columns)
        if isinstance(self.test, Path):
            test_path = root / self.test
            other = read_columns(test_path)
            for name in (*names, self.label, *self.groups):
                _require(test_path, other, name)
            _require_numbers(test_path, other, names)
        else:
            test_path, (columns, other) = path, self._split(columns)
        labels = Column.of(_classes(path, columns[self.label]), _classes(test_path, other[self.label]))
        train = self._inputs(path, columns, names), labels.train
        test: tuple[Inputs, Labels] = self._inputs(test_path, other, names), labels.test
        groups = {name: Column.of(columns[name], other[name]) for name in self.groups}
        return dataset(str(path), train, test, classes=len(labels.values), vocabulary=self.vocabulary, columns=groups)

    def _names(self, path: Path, columns: Columns) -> Sequence[str]:
        """The columns with features. Raises DataError if a column is missing or has text."""
        for name in (self.label, *self.groups, *(self.features or ())):
            _require(path, columns, name)
        no_features = {self.label, *self.groups}
        names = self.features or [name for name in columns if name not in no_features]
        _require_numbers(path, columns, names)
        if not names:
            raise DataError(f"{path}: no columns with features besides {', '.join(sorted(no_features))}")
        return names

    def _split(self, columns: Columns) -> tuple[Columns, Columns]:
        assert isinstance(self.test, float)
        codes = np.unique(columns[self.label], return_inverse=True)[1]
        mask = split_off_test(codes, self.test)
        return (
            {name: values[~mask] for name, values in columns.items()},
            {name: values[mask] for name, values in columns.items()},
        )

    def _inputs(self, path: Path, columns: Columns, names: Sequence[str]) -> Inputs:
        values = np.stack([columns[name] for name in names], axis=1)
        if self.vocabulary is not None:
            if values.dtype.kind != "i":
                raise DataError(f"{path}: tokens must be integers; remove vocabulary for a table of other numbers")
            return values
        if self.channels is None:
            return values.astype(np.float32)
        if len(names) % self.channels:
            raise DataError(f"{path}: {len(names)} features are no series of {self.channels} channels")
        return values.astype(np.float32).reshape(len(values), self.channels, -1)


def read_columns(path: Path) -> Columns:
    """Read a table. Raises DataError naming file, line and column, and MissingExtra."""
    match path.suffix.lower():
        case ".csv":
            return _read_csv(path)
        case ".parquet":
            return _read_parquet(path)
        case suffix:
            raise DataError(f"{path}: unknown type of table {suffix!r}; known: .csv, .parquet")


def _read_csv(path: Path) -> Columns:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            names = next(reader, [])
            if not names or len(set(names)) < len(names):
                raise DataError(f"{path}:1: expected the names of the columns, each once")
            rows: list[list[str]] = []
            for row in reader:
                if row and len(row) != len(names):
                    raise DataError(f"{path}:{reader.line_num}: {len(row)} values for {len(names)} columns")
                if row and "" in (stripped := [value.strip() for value in row]):
                    empty = names[stripped.index("")]
                    text = f"column {empty!r} is empty; fill it in, or remove the row"
                    raise DataError(f"{path}:{reader.line_num}: {text}")
                rows += [row] if row else []
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: unreadable: {getattr(error, 'strerror', None) or error}") from error
    if not rows:
        raise DataError(f"{path}: no rows")
    return {name: _parsed(values) for name, values in zip(names, zip(*rows, strict=True), strict=True)}


def _parsed(values: Sequence[str]) -> Array:
    """Integers if all values are, else numbers if all are, else text."""
    text = np.array([value.strip() for value in values])
    for kind in (np.int64, np.float64):
        try:
            return text.astype(kind)
        except (ValueError, OverflowError):
            continue
    return text


def _read_parquet(path: Path) -> Columns:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise MissingExtra("pyarrow", "parquet", f"{path}: reading Parquet") from None
    try:
        table = parquet.read_table(path)
    except (OSError, ArrowException) as error:
        raise DataError(f"{path}: unreadable: {error}") from error
    return {name: _plain(path, name, table.column(name)) for name in table.column_names}


def _plain(path: Path, name: str, column: Any) -> Array:
    if column.null_count:
        raise DataError(f"{path}: column {name!r} has {column.null_count} missing values; fill or remove them")
    values = np.asarray(column.to_numpy())
    if values.dtype.kind == "O":
        if not all(isinstance(value, str) for value in values):
            raise DataError(f"{path}: column {name!r} has neither numbers nor text")
        return values.astype(str)
    kinds = {"f": np.float64, "i": np.int64, "u": np.int64, "b": np.int64}
    if values.dtype.kind not in kinds:
        raise DataError(f"{path}: column {name!r} is {values.dtype}; expected numbers or text")
    return values.astype(kinds[values.dtype.kind])


def _require(path: Path, columns: Columns, name: str) -> None:
    if name not in columns:
        hint = did_you_mean(name, columns)
        raise DataError(f"{path}: no column {name!r}; it has {', '.join(columns)}{hint}")


def _require_numbers(path: Path, columns: Columns, names: Sequence[str]) -> None:
    """Raise DataError if a column with features has text, NaN or infinity."""
    for name in names:
        if columns[name].dtype.kind == "U":
            values = [str(value) for value in columns[name]]  # of Parquet, all may look like numbers
            text = f"column {name!r} has text, such as {next(filterfalse(_is_number, values), values[0])!r}"
            raise DataError(f"{path}: {text}; list it in groups, or list only columns with numbers in features")
        wrong = np.flatnonzero(~(np.abs(columns[name]) <= np.finfo(np.float32).max))
        if len(wrong):
            value = float(columns[name][wrong[0]])
            text = f"column {name!r} is {value}, not a finite float32 number; replace it, or remove the row"
            raise DataError(f"{_place(path, int(wrong[0]))}: {text}")


def _place(path: Path, row: int) -> str:
    """The line of a row, counted from 0, in a CSV file; else the number of the row."""
    if path.suffix.lower() != ".csv":
        return f"{path}: row {row + 1}"
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file)
        lines = [reader.line_num for values in reader if values]
    return f"{path}:{lines[row + 1]}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _classes(path: Path, values: Array) -> Array:
    """The label column, whose values must be countable."""
    if values.dtype.kind == "f" and not np.array_equal(values, np.rint(values)):
        raise DataError(f"{path}: labels must be classes: integers or text, not {float(values[0]):g}")
    return values
