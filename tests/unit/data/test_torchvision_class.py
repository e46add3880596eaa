"""Dataset classes of torchvision by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torchvision import datasets

from p2pfl.data import DATASETS, Dataset, open_dataset
from p2pfl.data.loaders.image_decoding import pixels
from p2pfl.errors import DataError
from p2pfl.options import OptionErrors


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P2PFL_CACHE", str(tmp_path / "cache"))


def opened(root: Path, download: bool = False, **options: Any) -> Dataset:
    return open_dataset("torchvision", DATASETS["torchvision"].parse(options), root, download)


WRITING: dict[str, Any] = {"class": "Writing"}
FAKE: dict[str, Any] = {"class": "FakeData", "args": {"size": 20, "image_size": [3, 8, 8], "num_classes": 4}}


def test_class_without_split_is_divided(tmp_path: Path) -> None:
    dataset = opened(tmp_path, **FAKE, test=0.25)
    assert (dataset.channels, dataset.size, dataset.classes) == (3, (8, 8), 4)
    assert len(dataset.train) + len(dataset.test) == 20
    assert len(dataset.test) >= 3
    fake = datasets.FakeData(20, (3, 8, 8), 4)
    first = int(np.flatnonzero(dataset.train.labels == fake[0][1])[0])
    assert np.array_equal(dataset.train.images[first], np.asarray(fake[0][0]).transpose(2, 0, 1))


def test_images_may_be_resized(tmp_path: Path) -> None:
    assert opened(tmp_path, **FAKE, test=0.25, size=5).size == (5, 5)


class Writing(datasets.VisionDataset):  # type: ignore[misc]
    """A class as torchvision has them: with ``train`` and ``download``."""

    classes: Any = ("zero", "one", "two")

    def __init__(self, root: Path, train: bool = True, download: bool = False, shade: int = 9) -> None:
        super().__init__(root)
        self.file = Path(root) / f"{train}.txt"
        if download:
            self.file.write_text("ok")
        if not self.file.exists():
            raise RuntimeError("Dataset not found. You can use download=True to download it")
        self.samples = 6 if train else 3
        self.shade = shade

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.new("L", (4, 2), self.shade + index), index % 2


class Captions(Writing):
    def __getitem__(self, index: int) -> Any:
        return Image.new("L", (4, 2)), "a text"


class Sparse(Writing):
    classes = None

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.new("L", (4, 2)), index % 2 * 999


class Synonyms(Writing):
    classes = (("tench", "Tinca tinca"), ("crane",), ("crane",))


class FewNames(Writing):
    classes = ("zero",)


class Sizes(Writing):
    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.new("L", (4, 2 + index)), 0


@pytest.fixture
def writing(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = (Writing, Captions, Sizes, Sparse, Synonyms, FewNames)
    for cls in mine:
        monkeypatch.setattr(datasets, cls.__name__, cls, raising=False)
    monkeypatch.setattr(datasets, "__all__", (*datasets.__all__, *(cls.__name__ for cls in mine)))


@pytest.mark.usefixtures("writing")
def test_class_downloads_its_files_below_the_root(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"torchvision: missing Writing; looked in .*or set data\.download: true"):
        opened(tmp_path, **WRITING)
    dataset = opened(tmp_path, download=True, args={"shade": 30}, **WRITING)
    assert sorted(path.name for path in (tmp_path / "torchvision" / "Writing").iterdir()) == ["False.txt", "True.txt"]
    assert dataset.train.images.shape == (6, 1, 2, 4)
    assert dataset.test.images[:, 0, 0, 0].tolist() == [30, 31, 32]
    assert (dataset.classes, dataset.class_names) == (3, ("zero", "one", "two"))
    (tmp_path / "moved").mkdir()
    (tmp_path / "torchvision" / "Writing").rename(tmp_path / "moved" / "here")
    assert len(opened(tmp_path, path="moved/here", **WRITING).test) == 3


@pytest.mark.usefixtures("writing")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"class": "SVNH"}, "torchvision.datasets has no class 'SVNH'; did you mean 'SVHN'?"),
        ({"class": "VisionDataset2"}, "has no class 'VisionDataset2'"),
        ({"class": "FakeData"}, "FakeData has no official split; set test to a fraction"),
        ({"class": "Writing", "args": {"color": 1}}, "torchvision's Writing: TypeError: "),
        (
            {"class": "Captions"},
            "torchvision's Captions yields Image and str; images and integer labels are expected",
        ),
        (
            {"class": "Sparse"},
            "torchvision's Sparse: 2 distinct labels (0, 999) would make 1000 classes, from 0 to 999; number them",
        ),
        ({"class": "Sizes"}, "torchvision's Sizes: images differ in shape, e.g. (1, 2, 4) and (1, 3, 4); set size"),
    ],
)
def test_unusable_classes_are_errors(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        opened(tmp_path, download=True, **options)


@pytest.mark.usefixtures("writing")
def test_names_that_are_not_those_of_the_labels_are_not_used(tmp_path: Path) -> None:
    dataset = opened(tmp_path, download=True, **{"class": "FewNames"})
    assert (dataset.classes, dataset.class_names) == (2, ())
    synonyms = opened(tmp_path, download=True, **{"class": "Synonyms"})
    assert synonyms.class_names == ("tench, Tinca tinca", "1 crane", "2 crane")


def test_key_of_the_class_is_its_name_in_errors_and_records() -> None:
    with pytest.raises(OptionErrors, match="class: missing") as caught:
        DATASETS["torchvision"].parse({"clas": "SVHN"})
    assert "unknown key 'clas'; known: class, args" in str(caught.value)
    assert DATASETS["torchvision"].parse({"class": "SVHN"}).to_dict()["class"] == "SVHN"


@pytest.mark.parametrize(("mode", "channels"), [("1", 1), ("L", 1), ("LA", 1), ("RGB", 3), ("RGBA", 3), ("P", 3)])
def test_images_of_any_mode_become_gray_or_rgb(mode: str, channels: int) -> None:
    assert pixels(Image.new(mode, (4, 2)), None).shape == (channels, 2, 4)
