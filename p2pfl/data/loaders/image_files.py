"""Datasets of image files of any size, converted to RGB and resized to squares.

Resizing is bilinear with antialiasing and does not keep the aspect ratio. All resized images are held in memory while
a dataset is read.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field, PositiveInt

from p2pfl.data.loaders.base import DatasetArrays, Images, Loader, read_mat, split_off_test, verify
from p2pfl.data.loaders.file_tree import subfolders
from p2pfl.data.loaders.image_decoding import read_image, to_8_bits
from p2pfl.data.loaders.image_lists import Index, list_images, not_read
from p2pfl.errors import DataError
from p2pfl.paths import DataPath


@dataclass(frozen=True)
class ImageFiles(Loader):
    """Base class of datasets of image files."""

    size: PositiveInt = 64
    """Height and width of the resized images, in pixels."""

    @abstractmethod
    def index(self, root: Path) -> tuple[Index, Index, int]:
        """List training images, test images, and the number of classes. Raises DataError if a list is damaged."""

    def class_names(self, root: Path) -> Sequence[str]:
        """List the names of the classes, in their order; empty if they have only numbers."""
        return ()

    def notes(self, root: Path) -> Sequence[str]:
        """What the user should know of the files, e.g. which are not read."""
        return ()

    def read(self, root: Path) -> DatasetArrays:
        train, test, classes = self.index(root)
        images = load_images([*train, *test], self.size)
        return DatasetArrays(
            images[: len(train)],
            np.array([label for _, label in train], np.int64),
            images[len(train) :],
            np.array([label for _, label in test], np.int64),
            classes,
            mirror=True,
            class_names=self.class_names(root),
            notes=self.notes(root),
        )


def load_images(index: Index, size: int) -> Images:
    """Load images as uint8 [N, 3, size, size]. Raises DataError naming the first file that fails."""
    try:
        images = np.empty((len(index), 3, size, size), np.uint8)
    except MemoryError as error:
        raise DataError(f"{len(index)} images of size {size} do not fit into memory; lower size") from error
    unscaled = {}
    for position, (path, _) in enumerate(index):
        image = read_image(path, size)
        if image.dtype == np.uint8:
            images[position] = image
        else:
            unscaled[position] = image
    for position, image in zip(unscaled, to_8_bits(unscaled.values()), strict=True):
        images[position] = image
    return images


@dataclass(frozen=True)
class Flowers102(ImageFiles):
    """Oxford 102 Flower, in ``flowers-102``: 2,040 training images (the official training and validation splits) and
    6,149 test images."""

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

    def class_names(self, root: Path) -> Sequence[str]:
        from torchvision.datasets import Flowers102

        return tuple(getattr(Flowers102, "classes", ()))  # newer versions of torchvision have them

    def index(self, root: Path) -> tuple[Index, Index, int]:
        setid, imagelabels, images = self.files(root)
        for path in (setid, imagelabels):
            verify(path, self.checksums[path.name])
        sets, labels = read_mat(setid), read_mat(imagelabels)["labels"]

        def images_of(*names: str) -> Index:
            numbers = np.concatenate([np.atleast_1d(sets[name]) for name in names])
            return [(images / f"image_{number:05d}.jpg", int(labels[number - 1]) - 1) for number in numbers]

        return images_of("trnid", "valid"), images_of("tstid"), 102


@dataclass(frozen=True)
class Caltech101(ImageFiles):
    """Caltech 101, in ``caltech101/101_ObjectCategories``, without its background class.

    There is no official split: every fifth image of each class is a test image (80:20 as in DFML).
    """

    def files(self, root: Path) -> tuple[Path, ...]:
        return (root / "caltech101" / "101_ObjectCategories",)

    def download(self, root: Path) -> None:
        from torchvision.datasets import Caltech101

        Caltech101(root, download=True)

    def class_names(self, root: Path) -> Sequence[str]:
        [folder] = self.files(root)
        return [name for name in subfolders(folder) if name != "BACKGROUND_Google"]

    def index(self, root: Path) -> tuple[Index, Index, int]:
        [folder] = self.files(root)
        classes = self.class_names(root)
        train, test = split_index(list_images(folder, classes), 1 / 5)
        return train, test, len(classes)


@dataclass(frozen=True)
class OxfordPets(ImageFiles):
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
        """Read lines like ``Abyssinian_100 1 1 1``: the image name, its class counted from 1, and unused fields."""
        try:
            lines = [line.split() for line in path.read_text().splitlines() if not line.startswith("#")]
            return [(images / f"{line[0]}.jpg", int(line[1]) - 1) for line in lines]
        except (OSError, ValueError, IndexError) as error:
            raise DataError(f"{path}: not a list of image names and classes: {error}") from error


@dataclass(frozen=True)
class StanfordCars(ImageFiles):
    """Stanford Cars, in ``stanford_cars``: 8,144 + 8,041 images of 196 models."""

    instructions: ClassVar[str] = (
        "it is no longer published and cannot be downloaded; the layout must equal the layout of "
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
            return [(images / str(entry["fname"]), int(entry["class"]) - 1) for entry in np.atleast_1d(annotations)]
        except (TypeError, ValueError, IndexError) as error:
            raise DataError(f"{path}: not a list of image names and classes: {error}") from error


@dataclass(frozen=True)
class Folder(ImageFiles):
    """One folder per class, as for torchvision's ImageFolder: ``train/CLASS/…`` and ``test/CLASS/…`` (or ``val``,
    ``valid``); for CINIC-10, Tiny-ImageNet, mini-ImageNet. Classes are sorted by name as text: 10 before 2.

    With ``test``, the folder has no official split: ``CLASS/…``, as in Office-Home and Adaptiope.
    """

    instructions: ClassVar[str] = "it must contain folders train/CLASS/… and test/CLASS/… (or val/, valid/)"

    path: DataPath | None = None
    """The folder, relative to the run file or to the root; by default the root itself."""
    test: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Fraction of each class to use for testing, evenly spaced among its files by name; null for a folder that
    contains train and test."""

    def files(self, root: Path) -> tuple[Path, ...]:
        folder = self._folder(root)
        return (folder,) if self.test is not None else self._splits(folder)

    def notes(self, root: Path) -> Sequence[str]:
        return [note for folder in self.files(root) for note in not_read(folder)]

    def class_names(self, root: Path) -> Sequence[str]:
        folder = self._folder(root)
        return subfolders(folder if self.test is not None else self._splits(folder)[0])

    def _folder(self, root: Path) -> Path:
        return root if self.path is None else root / self.path

    def _splits(self, folder: Path) -> tuple[Path, Path]:
        tests = [folder / name for name in ("test", "val", "valid") if (folder / name).is_dir()]
        return folder / "train", tests[0] if tests else folder / "test"

    def index(self, root: Path) -> tuple[Index, Index, int]:
        folder = self._folder(root)
        if self.test is not None:
            classes = subfolders(folder)
            train, test = split_index(list_images(folder, classes), self.test)
            return train, test, len(classes)
        train_folder, test_folder = self._splits(folder)
        classes = subfolders(train_folder)
        if unknown := sorted(set(subfolders(test_folder)) - set(classes)):
            raise DataError(f"{test_folder / unknown[0]}: unknown class: {train_folder} has no folder of that name")
        test = list_images(test_folder, classes, may_lack=True)
        return list_images(train_folder, classes), test, len(classes)


def split_index(index: Index, test: float) -> tuple[Index, Index]:
    """Split into training and test images, the latter being an evenly spaced fraction of each class."""
    mask = split_off_test(np.array([label for _, label in index], np.int64), test)
    return (
        [entry for entry, is_test in zip(index, mask, strict=True) if not is_test],
        [entry for entry, is_test in zip(index, mask, strict=True) if is_test],
    )
