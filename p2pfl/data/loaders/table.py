"""Datasets given as tables: CSV, or Parquet with the optional extra ``parquet``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, PositiveInt, model_validator

from p2pfl.data.columns import Column, first_missing, measurement
from p2pfl.data.loaders.arrays import Array, dataset_arrays
from p2pfl.data.loaders.base import DatasetArrays, Inputs, Loader, dataset, split_off_test
from p2pfl.data.loaders.table_files import Rows, numbers_rows, open_rows
from p2pfl.errors import DataError
from p2pfl.paths import DataPath


@dataset("table")
@dataclass(frozen=True)
class TableFile(Loader):
    """A table with a sample in each row: a column with its label, and columns with numbers, its features.

    A file whose name ends in .csv or .tsv has the names of the columns in its first line; one ending in .parquet is
    Parquet. Labels are compared as text: classes are those that differ in any file, in ascending order: as numbers
    if all are plain integers. Columns without a name, and the index of a pandas table, are not features.
    """

    instructions: ClassVar[str] = "a table has a sample in each row, and ends in .csv, .tsv or .parquet"

    path: DataPath
    """The file, relative to the run file or to the root."""
    label: str
    """The column with the label."""
    test: Annotated[float, Field(gt=0, lt=1)] | DataPath = 0.2
    """A file with the test samples, or the fraction of each class to use for testing, evenly spaced in the file."""
    features: tuple[str, ...] | None = None
    """The columns with the features; by default all others that are neither the label nor in groups."""
    groups: tuple[str, ...] = ()
    """Columns such as a hospital, which are used by the partition ``natural``."""
    channels: PositiveInt | None = None
    """Samples are time series of this many channels: the features are all steps of the first channel, then of the
    next."""
    vocabulary: PositiveInt | None = None
    """Samples are sequences of tokens, each below this number."""
    separator: Literal[",", ";", "|", "tab"] | None = None
    """What separates the columns of CSV files; by default a comma, and a tab in a .tsv."""
    decimal: Literal[".", ","] = "."
    """The decimal point or comma of numbers in CSV files."""

    @model_validator(mode="after")
    def _one_kind(self) -> TableFile:
        if self.channels is not None and self.vocabulary is not None:
            raise ValueError("give channels or vocabulary, not both: samples are time series or sequences of tokens")
        files = [path for path in (self.path, self.test) if isinstance(path, Path)]
        if (self.separator or self.decimal != ".") and all(path.suffix.lower() == ".parquet" for path in files):
            raise ValueError("separator and decimal are for CSV files")
        return self

    def files(self, root: Path) -> tuple[Path, ...]:
        return (root / self.path, *([root / self.test] if isinstance(self.test, Path) else []))

    def read(self, root: Path) -> DatasetArrays:
        files = [self._open(path) for path in self.files(root)]
        names, index = self._features(files[0])
        parts = [self._part(rows, names) for rows in files]
        notes = [] if self.features else self._notes(files[0], names, index, parts[0].inputs)
        self._check_classes(files, [part.labels for part in parts])
        if isinstance(self.test, float):
            mask = split_off_test(np.unique(parts[0].labels, return_inverse=True)[1], self.test)
            parts = [parts[0].where(~mask), parts[0].where(mask)]
        train, test = parts
        labels = Column.of(train.labels, test.labels)
        return dataset_arrays(
            str(files[0].path),
            (train.inputs, labels.train),
            (test.inputs, labels.test),
            class_names=labels.values,
            vocabulary=self.vocabulary,
            columns={name: Column.of(train.groups[name], test.groups[name]) for name in self.groups},
            notes=notes,
        )

    def _open(self, path: Path) -> Rows:
        return open_rows(path, "\t" if self.separator == "tab" else self.separator, self.decimal)

    def _features(self, rows: Rows) -> tuple[Sequence[str], list[str]]:
        """Return the columns with features, and the columns that are an index. Raises DataError."""
        for name in (self.label, *self.groups, *(self.features or ())):
            rows.require(name)
        if self.label in (self.features or ()):
            raise DataError(f"{rows.path}: features lists the label, {self.label!r}; remove it there")
        if self.features:
            return self.features, []
        others = [name for name in rows.names if name not in {self.label, *self.groups}]
        index = [name for name in others if rows.is_index(name)]
        names = [name for name in others if name not in index]
        if not names:
            no_features = ", ".join(sorted(filter(None, {self.label, *self.groups, *index})))
            raise DataError(f"{rows.path}: no columns with features besides {no_features}")
        return names, index

    def _notes(self, rows: Rows, names: Sequence[str], index: Sequence[str], inputs: Inputs) -> list[str]:
        """Say which columns are not features, and which should perhaps not be."""
        notes = [
            f"{rows.path.name}: {f'column {name!r} is' if name else 'a column without a name is'} not used: it looks "
            f"like the index of a pandas table; to use it, {'list it in features' if name else 'give it a name'}"
            for name in dict.fromkeys(index)
        ]
        table = inputs.reshape(len(inputs), len(names))
        return notes + [
            f"{rows.path.name}: the feature {name!r} numbers the rows, which may give classes away; if it is not a "
            "property of the samples, list only the others in features"
            for name, values in zip(names, table.T, strict=True)
            if numbers_rows(values)
        ]

    def _part(self, rows: Rows, names: Sequence[str]) -> _Part:
        """Read the samples of a file. Raises DataError if a value is missing or is not a number."""
        for name in (*names, self.label, *self.groups):
            rows.require(name)
        inputs = self._inputs(rows, names)
        columns = {name: rows.values(name) for name in (self.label, *self.groups)}
        for name, values in columns.items():
            row = first_missing(values)
            if row is not None:
                what = "the label" if name == self.label else f"column {name!r}"
                text = f"{what} is {str(values[row])!r}, which is a missing value or no finite number"
                raise DataError(f"{rows.place(row)}: {text}; remove the row, or rename the value")
        return _Part(inputs, columns[self.label], {name: columns[name] for name in self.groups})

    def _inputs(self, rows: Rows, names: Sequence[str]) -> Inputs:
        values = np.stack([rows.numbers(name) for name in names], axis=1)
        if self.vocabulary is not None:
            if not np.array_equal(values, np.rint(values)):
                raise DataError(
                    f"{rows.path}: tokens must be integers; remove vocabulary for a table of other numbers"
                )
            return values.astype(np.int64)
        if self.channels is None:
            return values.astype(np.float32)
        if len(names) % self.channels:
            raise DataError(f"{rows.path}: {len(names)} features are not a series of {self.channels} channels")
        return values.astype(np.float32).reshape(len(values), self.channels, -1)

    def _check_classes(self, files: Sequence[Rows], labels: Sequence[Array]) -> None:
        """Raise DataError if the labels are measurements."""
        texts = [list(map(str, values.tolist())) for values in labels]
        text = measurement(value for each in texts for value in each)
        if text is not None:
            rows, found = next((rows, each) for rows, each in zip(files, texts, strict=True) if text in each)
            what = f"labels must be classes: integers or text, not {text}"
            raise DataError(f"{rows.place(found.index(text))}: {what}")


@dataclass(frozen=True, eq=False)
class _Part:
    """The samples of a file or split: inputs, and labels and groups as numbers or text, [N] each."""

    inputs: Inputs
    labels: Array
    groups: Mapping[str, Array]

    def where(self, mask: Array) -> _Part:
        """The samples at which ``mask``, bool [N], is true."""
        groups: dict[str, Any] = {name: values[mask] for name, values in self.groups.items()}
        return _Part(self.inputs[mask], self.labels[mask], groups)
