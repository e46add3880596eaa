"""Photographs of any size, an image file each, decoded to RGB and resized to squares.

Resizing is bilinear with antialiasing and does not keep the aspect ratio. It is done once, when the dataset is
decoded; during that, all images of the given size are held in memory.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field, PositiveInt

from p2pfl.data.sources.base import Decoded, Images, Source, every_nth, read_mat, verify
from p2pfl.errors import DataError

Index = Sequence[tuple[Path, int]]
"""Image files and their labels."""

SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp"))


@dataclass(frozen=True)
class Photos(Source):
    """Base of the datasets of photographs."""

    size: PositiveInt = 64
    """Height and width that images are resized to, in pixels."""

    @abstractmethod
    def index(self, root: Path) -> tuple[Index, Index, int]:
        """Training images, test images, number of classes. Raises DataError if a list of images is damaged."""

    def read(self, root: Path) -> Decoded:
        train, test, classes = self.index(root)
        return Decoded(
            decode(train, self.size),
            np.array([label for _, label in train], np.int64),
            decode(test, self.size),
            np.array([label for _, label in test], np.int64),
            classes,
            mirror=True,
        )


def decode(index: Index, size: int) -> Images:
    """The images as uint8 [N, 3, size, size]. Raises DataError naming the first that cannot be decoded."""
    from PIL import Image

    images = np.empty((len(index), 3, size, size), np.uint8)
    for place, (path, _) in zip(images, index, strict=True):
        try:
            with Image.open(path) as image:
                resized = image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR)
        except FileNotFoundError as error:
            raise DataError(f"{path}: missing, though the dataset lists it; fetch the dataset again") from error
        except (OSError, ValueError, SyntaxError) as error:
            raise DataError(f"{path}: no image, or a damaged one: {error}") from error
        place[:] = np.asarray(resized).transpose(2, 0, 1)
    return images


@dataclass(frozen=True)
class Flowers102(Photos):
    """Oxford 102 Flower, in ``flowers-102``: 2,040 images for training (the official training and validation
    splits), 6,149 for testing."""

    checksums: ClassVar[Mapping[str, str]] = {
        "setid.mat": "a5357ecc9cb78c4bef273ce3793fc85c",
        "imagelabels.mat": "e0620be6f572b9609742df49c70aed4d",
    }

    def files(self, root: Path) -> tuple[Path, ...]:
        folder = root / "flowers-102"
        return folder / "setid.mat", folder / "imagelabels.mat", folder / "jpg"

    def download(self, root: Path) -> None:
        from torchvision.datasets import Flowers102

        Flowers102(root, download=True)

    def index(self, root: Path) -> tuple[Index, Index, int]:
        setid, imagelabels, images = self.files(root)
        for path in (setid, imagelabels):
            verify(path, self.checksums[path.name])
        sets, labels = read_mat(setid), read_mat(imagelabels)["labels"]

        def part(*names: str) -> Index:
            numbers = np.concatenate([np.atleast_1d(sets[name]) for name in names])
            return [(images / f"image_{number:05d}.jpg", int(labels[number - 1]) - 1) for number in numbers]

        return part("trnid", "valid"), part("tstid"), 102


@dataclass(frozen=True)
class Caltech101(Photos):
    """Caltech 101, in ``caltech101/101_ObjectCategories``, without its background class.

    It has no official split: here a fifth of each class, evenly spread, is for testing (80:20 as in DFML).
    """

    def files(self, root: Path) -> tuple[Path, ...]:
        return (root / "caltech101" / "101_ObjectCategories",)

    def download(self, root: Path) -> None:
        from torchvision.datasets import Caltech101

        Caltech101(root, download=True)

    def index(self, root: Path) -> tuple[Index, Index, int]:
        [folder] = self.files(root)
        classes = [name for name in subfolders(folder) if name != "BACKGROUND_Google"]
        train, test = halves(tree(folder, classes), 1 / 5)
        return train, test, len(classes)


@dataclass(frozen=True)
class OxfordPets(Photos):
    """Oxford-IIIT Pet, in ``oxford-iiit-pet``: 3,680 + 3,669 images of 37 breeds."""

    def files(self, root: Path) -> tuple[Path, ...]:
        folder = root / "oxford-iiit-pet"
        return folder / "annotations" / "trainval.txt", folder / "annotations" / "test.txt", folder / "images"

    def download(self, root: Path) -> None:
        from torchvision.datasets import OxfordIIITPet

        OxfordIIITPet(root, download=True)

    def index(self, root: Path) -> tuple[Index, Index, int]:
        trainval, test, images = self.files(root)
        return self._list(trainval, images), self._list(test, images), 37

    def _list(self, path: Path, images: Path) -> Index:
        """A line per image: ``Abyssinian_100 1 1 1``, its name and its class from 1 on, and more."""
        try:
            lines = [line.split() for line in path.read_text().splitlines() if not line.startswith("#")]
            return [(images / f"{line[0]}.jpg", int(line[1]) - 1) for line in lines]
        except (OSError, ValueError, IndexError) as error:
            raise DataError(f"{path}: not a list of image names and classes: {error}") from error


@dataclass(frozen=True)
class StanfordCars(Photos):
    """Stanford Cars, in ``stanford_cars`` as torchvision expects it: 8,144 + 8,041 images of 196 models."""

    obtain: ClassVar[str] = (
        "its publishers no longer offer it, so that it cannot be downloaded; the layout is that of "
        "torchvision.datasets.StanfordCars: devkit/, cars_train/, cars_test/, cars_test_annos_withlabels.mat"
    )

    def files(self, root: Path) -> tuple[Path, ...]:
        folder = root / "stanford_cars"
        annotations = folder / "devkit" / "cars_train_annos.mat", folder / "cars_test_annos_withlabels.mat"
        return *annotations, folder / "cars_train", folder / "cars_test"

    def index(self, root: Path) -> tuple[Index, Index, int]:
        train, test, train_images, test_images = self.files(root)
        return self._list(train, train_images), self._list(test, test_images), 196

    def _list(self, path: Path, images: Path) -> Index:
        annotations: Any = read_mat(path).get("annotations")
        try:
            return [(images / str(one["fname"]), int(one["class"]) - 1) for one in np.atleast_1d(annotations)]
        except (TypeError, ValueError, IndexError) as error:
            raise DataError(f"{path}: not a list of image names and classes: {error}") from error


@dataclass(frozen=True)
class Folder(Photos):
    """A tree of folders, one per class, as torchvision's ImageFolder reads it: ``train/CLASS/…`` and
    ``test/CLASS/…`` (or ``val``, ``valid``); for CINIC-10, Tiny-ImageNet, mini-ImageNet.

    With ``test`` the tree has no such halves, as in Office-Home and Adaptiope: ``CLASS/…``, of which a part is
    for testing.
    """

    obtain: ClassVar[str] = "a tree of folders train/CLASS/… and test/CLASS/… (or val/, valid/) is what it should be"

    path: Path = Path()
    """The tree; relative to the root, or absolute. By default the root itself."""
    test: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Fraction of each class that is for testing, evenly spread over its files by name; null for a tree that has
    the folders train and test."""

    def files(self, root: Path) -> tuple[Path, ...]:
        folder = root / self.path
        tops = (folder,) if self.test is not None else self._halves(folder)
        return *tops, *(top / name for top in tops if top.is_dir() for name in subfolders(top))

    def _halves(self, folder: Path) -> tuple[Path, Path]:
        found = [folder / name for name in ("test", "val", "valid") if (folder / name).is_dir()]
        return folder / "train", found[0] if found else folder / "test"

    def index(self, root: Path) -> tuple[Index, Index, int]:
        folder = root / self.path
        if self.test is not None:
            classes = subfolders(folder)
            train, test = halves(tree(folder, classes), self.test)
            return train, test, len(classes)
        train_folder, test_folder = self._halves(folder)
        classes = subfolders(train_folder)
        if strangers := sorted(set(subfolders(test_folder)) - set(classes)):
            raise DataError(f"{test_folder / strangers[0]}: not a class: there is no such folder in {train_folder}")
        return tree(train_folder, classes), tree(test_folder, classes), len(classes)


def subfolders(folder: Path) -> list[str]:
    """Their names, sorted. Raises DataError if the folder cannot be read."""
    try:
        return sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    except OSError as error:
        raise DataError(f"{folder}: should be a folder of classes: {error.strerror or error}") from error


def tree(folder: Path, classes: Sequence[str]) -> Index:
    """All images below ``folder/CLASS``, class by class, sorted; the label is the class's place in the list."""
    return [
        (path, label)
        for label, name in enumerate(classes)
        for path in sorted((folder / name).rglob("*"))
        if path.suffix.lower() in SUFFIXES
    ]


def halves(index: Index, test: float) -> tuple[Index, Index]:
    """Cut into training and test images; the latter are the given fraction of each class, evenly spread."""
    tested = every_nth(np.array([label for _, label in index], np.int64), test)
    return (
        [entry for entry, held in zip(index, tested, strict=True) if not held],
        [entry for entry, held in zip(index, tested, strict=True) if held],
    )
