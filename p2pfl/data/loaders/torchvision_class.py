"""Any dataset class of torchvision that yields images and integer labels, by its name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field, PositiveInt

from p2pfl.data.loaders.arrays import number_of_classes
from p2pfl.data.loaders.base import DatasetArrays, Images, Labels, Loader, split_off_test
from p2pfl.errors import DataError
from p2pfl.run_file.options import DataPath, did_you_mean

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
                self._open(root, split, download=True)
        except (OSError, RuntimeError):
            raise
        except Exception as error:
            raise self._failed(error, "") from error

    def read(self, root: Path) -> DatasetArrays:
        try:
            train = self._open(root, self._arguments("train"))
            if isinstance(self.test, float):
                images, labels = self._arrays(train)
                mask = split_off_test(labels, self.test)
                splits = (images[~mask], labels[~mask]), (images[mask], labels[mask])
            else:
                splits = self._arrays(train), self._arrays(self._open(root, self._arguments("test")))
        except DataError:
            raise
        except Exception as error:  # a class raises what it likes
            raise self._failed(error, f"; if files are missing, delete {self._folder(root)}") from error
        both, names = [labels for _, labels in splits], _class_names(train)
        if max(int(labels.max(initial=0)) for labels in both) >= len(names):
            names = ()  # of something else than the labels
        classes = len(names) or number_of_classes(f"torchvision's {self.class_}", both)
        return DatasetArrays(*splits[0], *splits[1], classes, self.mirror, class_names=names)

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

    def _open(self, root: Path, split: Mapping[str, Any], *, download: bool = False) -> Any:
        arguments: dict[str, Any] = {**self.args, **split}
        if "root" in self._parameters():
            arguments["root"] = self._folder(root)
        if download:
            arguments["download"] = True
        return self._class()(**arguments)

    def _arrays(self, samples: Any) -> tuple[Images, Labels]:
        images, labels = [], []
        for number in range(len(samples)):
            image, label = samples[number]
            if not (hasattr(image, "convert") and np.ndim(label) == 0 and np.issubdtype(type(label), np.integer)):
                kinds = f"{type(image).__name__} and {type(label).__name__}"
                raise DataError(f"torchvision's {self.class_} yields {kinds}; images and integer labels are expected")
            images.append(pixels(image, self.size))
            labels.append(int(label))
        return stacked(f"torchvision's {self.class_}", images), np.array(labels, np.int64)


def _class_names(samples: Any) -> Sequence[str]:
    """The names of the classes, if torchvision's class has them; the synonyms of ImageNet's are joined."""
    names = getattr(samples, "classes", None)
    if not isinstance(names, list | tuple):
        return ()
    return [", ".join(map(str, name)) if isinstance(name, list | tuple) else str(name) for name in names]


def pixels(image: Any, size: int | None) -> Images:
    """Convert a PIL image to uint8 [C, H, W]: resized to squares of RGB, or as it is, gray or RGB."""
    from PIL.Image import Resampling

    if size is not None:
        image = image.convert("RGB").resize((size, size), Resampling.BILINEAR)
    elif image.mode not in ("L", "RGB"):
        image = image.convert("L" if image.mode in ("1", "I", "I;16", "F", "LA") else "RGB")
    array = np.asarray(image, np.uint8)
    return array[np.newaxis] if array.ndim == 2 else np.ascontiguousarray(array.transpose(2, 0, 1))


def stacked(where: str, images: list[Images]) -> Images:
    """Stack images to [N, C, H, W]. Raises DataError if their shapes differ."""
    shapes = {image.shape for image in images}
    if len(shapes) > 1:
        one, other = sorted(shapes)[:2]
        raise DataError(f"{where}: images differ in shape, e.g. {one} and {other}; set size to resize them")
    if not images:
        raise DataError(f"{where}: no samples")
    return np.stack(images)
