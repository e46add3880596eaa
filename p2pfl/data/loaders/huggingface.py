"""Datasets of the Hugging Face hub, or local files in its formats; needs the optional extra ``huggingface``."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, PositiveInt

from p2pfl.data.columns import Column
from p2pfl.data.loaders.arrays import Array, as_column, as_inputs, dataset
from p2pfl.data.loaders.base import DatasetArrays, Inputs, Loader, split_off_test
from p2pfl.data.loaders.fingerprint import unedited
from p2pfl.data.loaders.image_decoding import Pixels, pixels, read_image
from p2pfl.data.loaders.image_lists import check_folders, not_read
from p2pfl.data.loaders.torchvision_class import stacked
from p2pfl.errors import DataError, MissingExtra, P2pflError
from p2pfl.options import did_you_mean
from p2pfl.paths import DataPath
from p2pfl.terminal import printable

_READING = 2
"""Increment it when images are read otherwise, so that datasets of the hub are read again."""


@dataclass(frozen=True)
class HuggingFace(Loader):
    """What ``datasets.load_dataset`` loads: a dataset of the hub, or local files by the name of their format, such as
    ``path: parquet, data_files: {train: a.parquet, test: b.parquet}`` or ``path: imagefolder, data_dir: photos``.

    A dataset of the hub is downloaded as a whole to ``huggingface`` below the root. No code from the hub is executed.
    """

    path: str
    """Name on the hub, e.g. ylecun/mnist, or a format of local files, e.g. parquet, csv, json, imagefolder."""
    config: str | None = None
    """Configuration of a dataset of the hub."""
    data_dir: DataPath | None = None
    """Folder with local files, relative to the run file or to the root."""
    data_files: Mapping[str, DataPath] = field(default_factory=dict)
    """Local file of each split, relative to the run file or to the root."""
    train: str = "train"
    """Split with the training samples; also a part of one, e.g. ``train[:50%]``."""
    test: Annotated[float, Field(gt=0, lt=1)] | str = "test"
    """Split with the test samples, or the fraction of each class of the training split to use for testing."""
    inputs: str | tuple[str, ...] = "image"
    """The column with images, lists of numbers (vectors), lists of such lists (series), or lists of integers
    (tokens); or several columns with numbers, which make vectors."""
    label: str = "label"
    """The column with the label, numbers or text."""
    groups: tuple[str, ...] = ()
    """Columns for the partition ``natural``."""
    size: PositiveInt | None = None
    """Resize images to squares of this height and width, and convert them to RGB."""
    vocabulary: PositiveInt | None = None
    """Number of different tokens; by default the largest token plus one."""
    mirror: bool = False
    """Whether mirroring an image keeps its label."""

    def files(self, root: Path) -> tuple[Path, ...]:
        if not self._local:
            return (self._cached(root),)
        folder = [] if self.data_dir is None else [root / self.data_dir]
        return (*folder, *(root / path for path in self.data_files.values()))

    def fingerprint(self, root: Path) -> list[Any]:
        return super().fingerprint(root) if self._local else [unedited(self._cached(root)), _READING]

    def download(self, root: Path) -> None:
        if self._local:
            raise OSError("these files are local; put them there")
        self._cached(root).mkdir(parents=True, exist_ok=True)
        with self._naming_errors():
            for split in self._splits:
                self._load(root, split, self._cached(root))

    def read(self, root: Path) -> DatasetArrays:
        with tempfile.TemporaryDirectory(prefix="p2pfl-huggingface-") as scratch, self._naming_errors():
            cache = Path(scratch) if self._local else self._cached(root)
            notes = []
            if self.path == "imagefolder" and self.data_dir is not None:
                check_folders(root / self.data_dir)
                notes = not_read(root / self.data_dir)
            arrays = self._arrays([self._load(root, split, cache) for split in self._splits])
            return replace(arrays, notes=notes)

    @property
    def _local(self) -> bool:
        return self.data_dir is not None or bool(self.data_files)

    @property
    def _splits(self) -> list[str]:
        return [self.train, *([self.test] if isinstance(self.test, str) else [])]

    def _cached(self, root: Path) -> Path:
        return root / "huggingface" / "--".join([*self.path.split("/"), *([self.config] if self.config else [])])

    @contextmanager
    def _naming_errors(self) -> Iterator[None]:
        """Raise errors of the library, which has many kinds, as DataError."""
        try:
            yield
        except P2pflError:
            raise
        except Exception as error:
            cause = error.__cause__ or error  # of "an error occurred while generating the dataset"
            text = " ".join(str(cause).split())
            raise DataError(f"huggingface {self.path}: {type(cause).__name__}: {text}") from error

    def _load(self, root: Path, split: str, cache: Path) -> Any:
        try:
            from datasets import load_dataset
        except ImportError:
            raise MissingExtra("datasets", "huggingface", f"the dataset huggingface ({self.path})") from None
        data_dir = None if self.data_dir is None else str(root / self.data_dir)
        data_files = {name: str(root / path) for name, path in self.data_files.items()} or None
        return load_dataset(
            self.path, self.config, data_dir=data_dir, data_files=data_files, split=split, cache_dir=str(cache)
        )

    def _arrays(self, splits: Sequence[Any]) -> DatasetArrays:
        names = (self.inputs,) if isinstance(self.inputs, str) else self.inputs
        for split in splits:
            for name in (*names, self.label, *self.groups):
                self._require(split, name)
        inputs = self._inputs_of(splits, names)
        labels = [self._values(split, self.label) for split in splits]
        groups = {name: [self._values(split, name) for split in splits] for name in self.groups}
        if len(splits) == 1:
            assert isinstance(self.test, float)
            mask = split_off_test(np.unique(labels[0], return_inverse=True)[1], self.test)
            inputs, labels = _halves(inputs[0], mask), _halves(labels[0], mask)
            groups = {name: _halves(values[0], mask) for name, values in groups.items()}
        where = f"huggingface {self.path}"
        coded = self._coded(splits, self.label, labels)
        return dataset(
            where,
            (inputs[0], coded.train),
            (inputs[1], coded.test),
            class_names=coded.values,
            vocabulary=self.vocabulary,
            mirror=self.mirror,
            columns={name: self._coded(splits, name, values) for name, values in groups.items()},
        )

    def _require(self, split: Any, name: str) -> None:
        if name not in split.column_names:
            hint = did_you_mean(name, split.column_names)
            known = ", ".join(split.column_names)
            raise DataError(f"huggingface {self.path}: no column {name!r}; it has {known}{hint}")

    def _inputs_of(self, splits: Sequence[Any], names: Sequence[str]) -> list[Inputs]:
        if len(names) == 1 and all(type(split.features[names[0]]).__name__ == "Image" for split in splits):
            where = f"huggingface {self.path}: {names[0]}"
            return list(stacked(where, [self._images(where, split, names[0]) for split in splits]))
        return [self._inputs(split, names) for split in splits]

    def _images(self, where: str, split: Any, name: str) -> list[Pixels]:
        feature = split.features[name]
        if feature.mode not in (None, "RGB"):  # the library converts them
            try:
                return [pixels(image, self.size) for image in split[name]]
            except DataError as error:
                raise DataError(f"{where}: an image {error}") from error
        files = split.cast_column(name, replace(feature, decode=False))[name]
        images = []
        for row, file in enumerate(files):
            if file is None:
                raise DataError(f"{where}: row {row} has no image; remove it")
            source, label = file["path"], ""
            if file["bytes"] is not None:
                source, label = io.BytesIO(file["bytes"]), f"{where}: row {row}"
                label += f" ({printable(file['path'])})" if file["path"] else ""
            images.append(read_image(source, self.size, rgb=feature.mode == "RGB", where=label))
        return images

    def _inputs(self, split: Any, names: Sequence[str]) -> Inputs:
        where = f"huggingface {self.path}: {names[0]}"
        if len(names) > 1:
            columns = [self._values(split, name) for name in names]
            if texts := [
                name for name, values in zip(names, columns, strict=True) if values.dtype.kind not in "fiub"
            ]:
                raise DataError(f"huggingface {self.path}: column {texts[0]!r} has no numbers")
            return np.stack([values.astype(np.float32) for values in columns], axis=1)
        try:
            return as_inputs(where, np.array(split[names[0]][:]))
        except ValueError as error:
            raise DataError(f"{where}: its lists differ in length; pad or cut them") from error

    def _coded(self, splits: Sequence[Any], name: str, values: Sequence[Array]) -> Column:
        """Encode a column; classes with names keep the order of their numbers."""
        coded = as_column(f"huggingface {self.path}: {name}", *values)
        names = _names(splits[0], name)  # the library gives all splits the same
        return Column(tuple(names[int(value)] for value in coded.values), coded.train, coded.test) if names else coded

    def _values(self, split: Any, name: str) -> Array:
        """Return a column [N] of numbers or text; of classes with names, their numbers."""
        values = np.array(split[name][:])
        if values.dtype.kind in "iu" and values.min(initial=0) < 0 and _names(split, name):
            where = f"huggingface {self.path}: split {str(split.split)!r}: column {name!r}"
            raise DataError(
                f"{where} has {values.min()}, which means that samples have no class; choose another split"
            )
        if values.dtype == object or values.ndim != 1:
            raise DataError(f"huggingface {self.path}: column {name!r} has missing values, or no numbers or text")
        return values


def _names(split: Any, name: str) -> Sequence[str]:
    """The names of the classes in a column; empty if it has none."""
    return getattr(split.features[name], "names", None) or ()


def _halves(values: Array, test: Array) -> list[Array]:
    return [values[~test], values[test]]
