"""Partitioners of Flower (``flwr-datasets``); needs the optional extra ``flwr``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from p2pfl import rng
from p2pfl.data.partitions.base import DatasetLabels, Fraction, Indices, Partition, Subset, hold_out, sorted_subset
from p2pfl.errors import DataError, MissingExtra, P2pflError
from p2pfl.options import did_you_mean


@dataclass(frozen=True)
class Flwr(Partition):
    """A partitioner of Flower, for example ``class: DirichletPartitioner, args: {alpha: 0.1}``.

    It divides the training split. Its parameters ``num_partitions``, ``partition_by`` and ``seed`` are the number of
    peers, ``label`` and the run's seed, unless given.
    """

    class_: str
    """A class of ``flwr_datasets.partitioner``."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Its keyword arguments. ``partition_by`` may also name a column of the dataset."""
    test: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Divide both splits together, and use this fraction of a peer's samples for testing; null: the whole test split
    for each peer."""
    validation: Fraction = 0.0
    """Fraction of a peer's training samples to hold out, rounded to whole samples."""

    def split(self, data: DatasetLabels, peers: int, seed: int) -> list[Subset]:
        try:
            divided = self._divide(data, peers, seed)
        except P2pflError:
            raise
        except Exception as error:  # of a partitioner, which raises what it likes
            text = " ".join(str(error).split())
            raise DataError(f"partition flwr: {self.class_}: {type(error).__name__}: {text}") from error
        stream = rng.shared(seed, "partition")
        subsets = []
        for peer, samples in enumerate(divided):
            train, test = stream.permutation(samples), np.arange(len(data.test))
            if not len(train):
                raise DataError(f"partition flwr: {self.class_} leaves peer {peer} without samples")
            if self.test is not None:
                train, test = hold_out(train, self.test)
            subsets.append(sorted_subset(train, self.validation, test, merged=self.test is not None))
        return subsets

    def _divide(self, data: DatasetLabels, peers: int, seed: int) -> list[Indices]:
        """The samples of each peer, in the training split or in the pool."""
        try:
            from datasets import Dataset, disable_progress_bars
            from flwr_datasets import partitioner as flower
        except ImportError:
            raise MissingExtra("flwr-datasets", "flwr", "the partition flwr") from None
        known = [name for name in dir(flower) if name.endswith("Partitioner") and name != "Partitioner"]
        if self.class_ not in known:
            hint = did_you_mean(self.class_, known) or f"; it has {', '.join(known)}"
            raise DataError(f"partition flwr: flwr_datasets.partitioner has no class {self.class_!r}{hint}")
        disable_progress_bars()
        make = getattr(flower, self.class_)
        filled = {"num_partitions": peers, "partition_by": "label", "seed": seed}
        accepted = inspect.signature(make).parameters
        partitioner = make(**{**{key: filled[key] for key in filled if key in accepted}, **self.args})
        partitioner.dataset = Dataset.from_dict(self._columns(data))
        if partitioner.num_partitions != peers:
            raise DataError(
                f"partition flwr: {self.class_} makes {partitioner.num_partitions} partitions for {peers} peers"
            )
        parts = [partitioner.load_partition(peer) for peer in range(peers)]
        if any("index" not in part.column_names for part in parts):
            raise DataError(f"partition flwr: {self.class_} divides features; peers need whole samples")
        return [np.array(part["index"][:], np.int64) for part in parts]

    def _columns(self, data: DatasetLabels) -> dict[str, Any]:
        """The table that Flower divides: labels, columns, and the number of each sample."""
        both = self.test is not None
        labels = data.pool if both else data.train
        columns: dict[str, Any] = {"label": labels, "index": np.arange(len(labels))}
        for name, column in data.columns.items():
            codes = np.concatenate((column.train, column.test)) if both else column.train
            columns.setdefault(name, [column.values[code] for code in codes])
        return columns
