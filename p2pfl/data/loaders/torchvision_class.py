"""Any dataset class of torchvision that yields images and integer labels, by its name."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field, PositiveInt

from p2pfl.data.loaders.arrays import number_of_classes
from p2pfl.data.loaders.base import DatasetArrays, Images, Labels, Loader, split_off_test
from p2pfl.data.loaders.file_tree import subfolders
from p2pfl.data.loaders.image_decoding import Pixels, pixels, read_image, to_8_bits
from p2pfl.data.loaders.image_lists import list_images, not_read
from p2pfl.errors import DataError
from p2pfl.options import did_you_mean
from p2pfl.paths import DataPath

GENERATED = "FakeData"
"""The class that has no files."""


@dataclass(frozen=True)
class Torchvision(Loader):
    """A class of ``torchvision.datasets``, for example ``class: EuroSAT``.

    Its files are in ``torchvision/CLASS`` below the root, as the class expects them; it downloads them there.
    """

    instructions: ClassVar[str] = ""

    class_: str
    """Name of the class."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the class, for both splits."""
    train: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments that select the training split; by default ``train: true`` or ``split: train``, if the class
    has such a parameter."""
    test: Mapping[str, Any] | Annotated[float, Field(gt=0, lt=1)] = field(default_factory=dict)
    """Arguments that select the test split; by default ``train: false`` or ``split: test``. Or the fraction of each
    class to use for testing, for a class without official split."""
    path: DataPath | None = None
    """Folder with the files, relative to the run file or to the root; by default ``torchvision/CLASS``."""
    size: PositiveInt | None = None
    """Resize the images to squares of this height and width, and convert them to RGB; null keeps them, if all have
    the same size."""
    mirror: bool = False
    """Whether mirroring an image keeps its label."""

    def files(self, root: Path) -> tuple[Path, ...]:
        return () if self.class_ == GENERATED else (self._folder(root),)  # without an import, which takes a second

    def download(self, root: Path) -> None:
        if "download" not in self._parameters():
            raise OSError(
                f"torchvision's {self.class_} cannot download its files; its documentation says what it needs"
            )
        arguments = [
            self._arguments(split) for split in ("train", "test")[: 1 if isinstance(self.test, float) else 2]
        ]
        self._folder(root).mkdir(parents=True, exist_ok=True)
        try:
            for split in arguments:
                self._open(root, split, [], download=True)
        except (OSError, RuntimeError):
            raise
        except Exception as error:
            raise self._failed(error, "") from error

    def read(self, root: Path) -> DatasetArrays:
        notes: list[str] = []
        try:
            train = self._open(root, self._arguments("train"), notes)
            images, labels = self._samples(train)
            if isinstance(self.test, float):
                mask = split_off_test(labels, self.test)
                splits = [([images[n] for n in np.flatnonzero(half)], labels[half]) for half in (~mask, mask)]
            else:
                test = self._open(root, self._arguments("test"), notes)
                splits = [(images, labels), self._samples(test)]
        except DataError:
            raise
        except Exception as error:  # a class raises what it likes
            raise self._failed(error, f"; if files are missing, delete {self._folder(root)}") from error
        both, names = [labels for _, labels in splits], _class_names(train)
        if max(int(labels.max(initial=0)) for labels in both) >= len(names):
            names = ()  # of something else than the labels
        classes = len(names) or number_of_classes(f"torchvision's {self.class_}", both)
        inputs = stacked(f"torchvision's {self.class_}", [images for images, _ in splits])
        return DatasetArrays(
            inputs[0],
            splits[0][1],
            inputs[1],
            splits[1][1],
            classes,
            self.mirror,
            class_names=names,
            notes=list(dict.fromkeys(notes)),
        )

    def _failed(self, error: Exception, hint: str) -> DataError:
        text = " ".join(str(error).split())
        return DataError(f"torchvision's {self.class_}: {type(error).__name__}: {text}{hint}")

    def _folder(self, root: Path) -> Path:
        return root / (self.path if self.path is not None else Path("torchvision") / self.class_)

    def _class(self) -> Any:
        """Raises DataError if there is none of that name."""
        from torchvision import datasets

        found = getattr(datasets, self.class_, None)
        if not inspect.isclass(found) or self.class_ not in datasets.__all__:
            hint = did_you_mean(self.class_, datasets.__all__)
            raise DataError(f"torchvision.datasets has no class {self.class_!r}{hint}")
        return found

    def _parameters(self) -> set[str]:
        return set(inspect.signature(self._class()).parameters)

    def _arguments(self, split: str) -> Mapping[str, Any]:
        """The arguments that select a split."""
        given = self.train if split == "train" else self.test
        assert not isinstance(given, float)
        if given or isinstance(self.test, float):
            return given
        parameters = self._parameters()
        if "train" in parameters:
            return {"train": split == "train"}
        if "split" in parameters:
            return {"split": split}
        raise DataError(f"torchvision's {self.class_} has no official split; set test to a fraction, e.g. 0.2")

    def _open(self, root: Path, split: Mapping[str, Any], notes: list[str], *, download: bool = False) -> Any:
        from torchvision.datasets import DatasetFolder
        from torchvision.datasets.folder import default_loader

        cls, parameters = self._class(), inspect.signature(self._class()).parameters
        arguments: dict[str, Any] = {**self.args, **split}
        if "root" in parameters:
            arguments["root"] = self._folder(root)
        if download:
            arguments["download"] = True
        folders = issubclass(cls, DatasetFolder)
        if folders or ("loader" in parameters and parameters["loader"].default is default_loader):
            arguments["loader"] = lambda path: read_image(path, self.size, rgb=True)
        return (_without_hidden_files(cls, notes) if folders else cls)(**arguments)

    def _samples(self, samples: Any) -> tuple[list[Pixels], Labels]:
        from PIL.Image import DecompressionBombWarning

        images, labels = [], []
        for number in range(len(samples)):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DecompressionBombWarning)
                image, label = samples[number]
            is_image = isinstance(image, np.ndarray) or hasattr(image, "convert")
            if not (is_image and np.ndim(label) == 0 and np.issubdtype(type(label), np.integer)):
                kinds = f"{type(image).__name__} and {type(label).__name__}"
                raise DataError(f"torchvision's {self.class_} yields {kinds}; images and integer labels are expected")
            try:
                images.append(image if isinstance(image, np.ndarray) else pixels(image, self.size))
            except DataError as error:
                raise DataError(f"torchvision's {self.class_}: sample {number}: {error}") from error
            labels.append(int(label))
        return images, np.array(labels, np.int64)


def _class_names(samples: Any) -> Sequence[str]:
    """The names of the classes, if torchvision's class has them; the synonyms of ImageNet's are joined."""
    names = getattr(samples, "classes", None)
    if not isinstance(names, list | tuple):
        return ()
    return [", ".join(map(str, name)) if isinstance(name, list | tuple) else str(name) for name in names]


def _without_hidden_files(cls: Any, notes: list[str]) -> Any:
    """A class of folders of classes that lists folders and files as the dataset ``folder`` does."""

    class Listing(cls):  # type: ignore[misc]
        def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
            names = subfolders(Path(directory))
            return names, {name: label for label, name in enumerate(names)}

        @staticmethod
        def make_dataset(
            directory: str | Path,
            class_to_idx: Mapping[str, int],
            extensions: Sequence[str] | None = None,
            is_valid_file: Any = None,
            allow_empty: bool = False,
        ) -> list[tuple[str, int]]:
            notes.extend(not_read(Path(directory)))
            index = list_images(Path(directory), list(class_to_idx), may_lack=allow_empty)
            labels = list(class_to_idx.values())
            return [(str(path), labels[position]) for path, position in index]

    Listing.__name__ = cls.__name__
    return Listing


def stacked(where: str, splits: Sequence[Sequence[Pixels]]) -> list[Images]:
    """Stack the images of each split to uint8 [N, C, H, W]. Raises DataError if there are none, or shapes differ."""
    shapes = {image.shape for images in splits for image in images}
    if len(shapes) > 1:
        one, other = sorted(shapes)[:2]
        raise DataError(f"{where}: images differ in shape, e.g. {one} and {other}; set size to resize them")
    if not all(splits):
        raise DataError(f"{where}: no samples")
    scaled = iter(to_8_bits(image for images in splits for image in images))
    return [np.stack(list(islice(scaled, len(images)))) for images in splits]
