"""Partitions that the data brings along: by a column such as the writer, or from a file of indices."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from p2pfl import rng
from p2pfl.data.columns import Column
from p2pfl.data.partitions.base import (
    DatasetLabels,
    Fraction,
    Indices,
    Partition,
    Subset,
    hold_out,
    partition,
    sorted_subset,
)
from p2pfl.errors import DataError
from p2pfl.options import did_you_mean
from p2pfl.paths import LocalPath

SPLITS = ("train", "validation", "test")


@partition("natural")
@dataclass(frozen=True)
class Natural(Partition):
    """The samples of one value of a column for each peer, such as one writer's or one hospital's samples.

    Values are in ascending order: peer m has the m-th value that occurs in the training split.
    """

    column: str
    """A column that the dataset provides."""
    values: Literal["each", "sample", "all"] = "each"
    """``each``: there must be as many values as peers. ``sample``: the peers get random values, and the samples of
    the others are not used. ``all``: all values, in random order, are dealt out to the peers in turn."""
    test: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Fraction of a peer's samples, from both splits together, to use for testing; null: its samples in the test
    split."""
    validation: Fraction = 0.0
    """Fraction of a peer's training samples to hold out, rounded to whole samples."""

    def split(self, data: DatasetLabels, peers: int, seed: int) -> list[Subset]:
        column = self._column(data)
        stream = rng.shared(seed, "partition")
        subsets = []
        for peer, values in enumerate(self._values(column, peers, stream)):
            train, test = (np.flatnonzero(np.isin(codes, values)) for codes in (column.train, column.test))
            merged = self.test is not None
            if self.test is not None:
                pool = stream.permutation(np.concatenate((train, test + len(column.train))))
                train, test = hold_out(pool, self.test)
            elif not len(test):
                names = ", ".join(column.values[value] for value in values)
                raise DataError(
                    f"partition natural: the test split has no samples of {self.column} {names} (peer {peer}); set "
                    "test, e.g. 0.2, to hold out test samples of each peer"
                )
            subsets.append(sorted_subset(stream.permutation(train), self.validation, test, merged=merged))
        return subsets

    def _column(self, data: DatasetLabels) -> Column:
        if self.column in data.columns:
            return data.columns[self.column]
        known = ", ".join(data.columns) or "no columns"
        hint = did_you_mean(self.column, data.columns)
        raise DataError(f"partition natural: the dataset has no column {self.column!r}; it has {known}{hint}")

    def _values(self, column: Column, peers: int, stream: np.random.Generator) -> list[Indices]:
        """The values of each peer, as positions in ``column.values``."""
        present = np.unique(column.train)
        if len(present) < peers:
            raise DataError(
                f"partition natural: column {self.column!r} has {len(present)} values in the training split, too few "
                f"for {peers} peers; use at most {len(present)} peers"
            )
        if self.values == "each" and len(present) > peers:
            raise DataError(
                f"partition natural: column {self.column!r} has {len(present)} values in the training split for "
                f"{peers} peers; use {len(present)} peers, or set values: sample or values: all"
            )
        if self.values == "all":
            order = stream.permutation(present)
            return [np.sort(order[peer::peers]) for peer in range(peers)]
        if self.values == "sample":
            present = np.sort(stream.choice(present, peers, replace=False))
        return [np.array([value]) for value in present]


@partition("indices")
@dataclass(frozen=True)
class FromFile(Partition):
    """The indices of each peer's samples, from a JSON file: a list with an entry for each peer, such as
    ``{"train": [0, 5, 7], "validation": [8], "test": [1, 2]}``.

    Indices count from 0 in the training split, indices of ``test`` in the test split. Without ``validation`` a peer
    has no validation samples; without ``test`` it has the whole test split. The run folder keeps a copy of the file.
    """

    file: LocalPath
    """The file, relative to the run file."""

    def files(self) -> dict[str, Path]:
        return {"file": self.file}

    def split(self, data: DatasetLabels, peers: int, seed: int) -> list[Subset]:
        entries = self._read()
        if len(entries) != peers:
            raise DataError(
                f"{self.file}: {len(entries)} entries for {peers} peers; a list with one for each is expected"
            )
        subsets = [self._subset(data, peer, entry) for peer, entry in enumerate(entries)]
        for peer, subset in enumerate(subsets):
            twice = np.intersect1d(subset.train, subset.validation)
            if len(twice):
                raise DataError(f"{self.file}: peer {peer}: sample {twice[0]} is in train and in validation")
        return subsets

    def _read(self) -> list[Any]:
        try:
            entries = json.loads(self.file.read_bytes())
        except OSError as error:
            raise DataError(f"{self.file}: unreadable: {error.strerror}") from None
        except json.JSONDecodeError as error:
            raise DataError(f"{self.file}:{error.lineno}: invalid JSON: {error.msg}") from None
        except (UnicodeDecodeError, RecursionError):
            raise DataError(f"{self.file}: not a JSON file") from None
        if not isinstance(entries, list):
            raise DataError(f"{self.file}: expected a list with an entry for each peer")
        return entries

    def _subset(self, data: DatasetLabels, peer: int, entry: Any) -> Subset:
        if not isinstance(entry, dict) or "train" not in entry or not set(entry) <= set(SPLITS):
            raise DataError(
                f"{self.file}: peer {peer}: expected a mapping with train, and optionally validation and test"
            )
        train = self._indices(peer, "train", entry["train"], len(data.train))
        if not len(train):
            raise DataError(f"{self.file}: peer {peer}: train is empty")
        return Subset(
            train,
            self._indices(peer, "validation", entry.get("validation", []), len(data.train)),
            self._indices(peer, "test", entry.get("test", range(len(data.test))), len(data.test)),
        )

    def _indices(self, peer: int, split: str, given: Sequence[Any], samples: int) -> Indices:
        where = f"{self.file}: peer {peer}: {split}"
        if not isinstance(given, list | range) or not all(type(index) is int for index in given):
            raise DataError(f"{where}: expected a list of integers")
        if wrong := [index for index in given if not 0 <= index < samples]:
            name = "test" if split == "test" else "training"
            raise DataError(f"{where}: no sample {wrong[0]}; the {samples} {name} samples are 0 to {samples - 1}")
        indices = np.sort(np.array(given, np.int64))
        if len(repeated := indices[1:][np.diff(indices) == 0]):
            raise DataError(f"{where}: sample {repeated[0]} is listed twice")
        return indices
