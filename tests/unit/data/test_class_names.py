"""Labels as numbers or text, names of classes, and what is said about classes without samples."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from p2pfl.data import Dataset, DatasetArrays, Loader, open_dataset
from p2pfl.data.class_names import LONGEST, shown
from p2pfl.data.loaders.cifar import Cifar10, Cifar100
from p2pfl.errors import DataError
from tests.dataset_files import opened, photo, write_caltech, write_cifar, write_emnist, write_npz, write_tree


@pytest.fixture(autouse=True)
def _cache(cache: Path) -> None:
    pass


def npz(root: Path, train: Any, test: Any, **options: Any) -> Dataset:
    """Open an .npz file with these labels."""
    y_train, y_test = np.array(train), np.array(test)
    shape = (2, 3)
    images = [np.zeros((len(labels), *shape), np.uint8) for labels in (y_train, y_test)]
    write_npz(root / "d.npz", x_train=images[0], y_train=y_train, x_test=images[1], y_test=y_test)
    return opened("npz", root, path="d.npz", **options)


# ---- numbers of classes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("labels", [[0, 999_999], [0, 1, 2, 500], [1000, 1001], [10, 20], [2**62]])
def test_labels_that_would_make_far_more_classes_are_an_error(root: Path, labels: list[int]) -> None:
    message = rf"{len(labels)} distinct labels .* would make {max(labels) + 1} classes, .*; number them from 0 to "
    with pytest.raises(DataError, match=message + rf".*, or set classes: {max(labels) + 1}$"):
        npz(root, labels, labels)


def test_the_number_of_classes_may_be_given(root: Path) -> None:
    dataset = npz(root, [0, 999], [0, 999], classes=1000)
    assert dataset.classes == 1000
    assert dataset.notes == ("no samples of 998 of 1000 classes: 1, 2, 3, 4, 5, 6, 7, 8 and 990 more",)


def test_a_few_classes_may_have_no_samples(root: Path) -> None:
    labels = [label for label in range(100) if label not in (3, 7, 50, 80, 98)]
    dataset = npz(root, labels, labels)
    assert (dataset.classes, dataset.class_names) == (100, ())
    assert dataset.notes == ("no samples of 5 of 100 classes: 3, 7, 50, 80, 98",)


def test_labels_that_count_from_1_are_said(root: Path) -> None:
    dataset = npz(root, [1, 2, 3], [1, 2, 3])
    assert dataset.classes == 4
    assert dataset.notes == ("no samples of class 0; if the labels count from 1, subtract 1",)
    assert npz(root, [1, 2, 4], [1, 2, 4]).notes == (
        "no samples of 2 of 5 classes: 0, 3; if the labels count from 1, subtract 1",
    )
    assert npz(root, [0, 2, 3], [2, 3]).notes == (
        "no samples of class 1",
        "training samples, but no test samples of class 0",
    )


def test_splits_without_a_common_class_are_an_error(root: Path) -> None:
    with pytest.raises(DataError, match=r"training and test samples have no class in common, e\.g\. 0 and 2; write"):
        npz(root, [0, 1], [2, 3])


# ---- types of labels -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("train", "test", "names"),
    [
        (["b", "a", "01"], ["a", "b"], ("01", "a", "b")),
        ([True, False], [True, True], ("False", "True")),
        (["9", "10"], [10, 9], ("9", "10")),
    ],
)
def test_npz_labels_may_be_text_or_booleans(root: Path, train: Any, test: Any, names: tuple[str, ...]) -> None:
    dataset = npz(root, train, test)
    assert dataset.class_names == names
    assert [names[label] for label in dataset.train.labels] == [str(label) for label in train]
    assert [names[label] for label in dataset.test.labels] == [str(label) for label in test]


@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        ([[0], [1]], {}, r"y_train is int64 \[2, 1\]; expected integers \[N\] or text \[N\]: use y\.ravel\(\)"),
        ([[0, 1], [1, 0]], {}, r"\[2, 2\]; .*: one-hot labels become integers by y\.argmax\(axis=1\)"),
        ([[0, 1], [1, 1]], {}, r"\[2, 2\]; .*; a sample has one class, not one per tag, token or pixel"),
        ([[[0, 1]], [[1, 1]]], {}, r"\[2, 1, 2\]; .*; a sample has one class, not one per tag, token or pixel"),
        ([0.0, 1.0], {}, r"y_train is float64 \[2\]; .*: use y\.astype\(int\)"),
        ([0.5, 1.0], {}, "measurements and NaN are not classes"),
        ([b"a", b"b"], {}, r"use y\.astype\(str\)"),
        (["a", "nan"], {}, "y: training sample 1, counted from 0, is 'nan', which marks a missing value"),
        ([-1, 1], {}, "npz: training labels range from -1 to 1, but classes is 2; labels count from 0"),
        (["a", "b"], {"classes": 3}, "classes is 3, but the labels are text of 2 classes; remove it"),
        (np.array([2**64 - 1, 0], np.uint64), {}, "18446744073709551615 is too large for a label"),
    ],
)
def test_wrong_labels_are_errors_with_the_remedy(root: Path, labels: Any, options: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        npz(root, labels, labels, **options)


def test_a_vocabulary_of_more_than_a_million_words_must_be_given(root: Path) -> None:
    tokens = {"x_train": np.array([[0], [2_000_000]] * 3), "x_test": np.array([[0], [1]])}
    write_npz(root / "d.npz", **tokens)
    with pytest.raises(DataError, match=r"the largest token is 2000000; .* or set vocabulary: 2000001"):
        opened("npz", root, path="d.npz")
    assert opened("npz", root, path="d.npz", vocabulary=2_000_001).vocabulary == 2_000_001


# ---- names ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["cat", "T-shirt/top", "a.b c", "[red]"], ("cat", "T-shirt/top", "a.b c", "[red]")),
        (["\x1b[2J", "a\nb\tc", ""], ("\\x1b[2J", "a b c", "''")),
        (["a b", "a  b", "c"], ("0 a b", "1 a b", "c")),
        (["x", "x", "0 x"], ("0 x", "1 x", "2 0 x")),
        (["a" * 99, "b"], ("a" * (LONGEST - 1) + "…", "b")),
        (["0", "1", "2"], ()),
        (["1", "0"], ("1", "0")),
        ([], ()),
    ],
)
def test_shown_names_fit_into_a_line_and_differ(names: list[str], expected: tuple[str, ...]) -> None:
    assert shown(names) == expected


def test_folders_name_their_classes(root: Path) -> None:
    write_tree(root)
    assert opened("folder", root, size=4).class_names == ("a", "b")
    photo(root / "other" / "z" / "1.png", 1)
    photo(root / "other" / "z" / "2.png", 1)
    assert opened("folder", root, size=4, path="other", test=0.5).class_names == ("z",)
    write_caltech(root)
    assert opened("caltech101", root, size=4).class_names == ("accordion", "wrench")


@pytest.mark.parametrize(("split", "first", "names"), [("letters", 1, ("a", "z")), ("balanced", 0, ("0", "t"))])
def test_emnist_has_the_names_of_torchvision(root: Path, split: str, first: int, names: tuple[str, str]) -> None:
    write_emnist(root, split, first)
    dataset = opened("emnist", root, split=split)
    assert (dataset.class_names[0], dataset.class_names[-1]) == names
    assert len(dataset.class_names) == dataset.classes


@pytest.mark.parametrize(
    ("name", "loader", "labels", "names"),
    [
        ("cifar10", Cifar10, "labels", ("batches.meta", "label_names")),
        ("cifar100", Cifar100, "fine_labels", ("meta", "fine_label_names")),
    ],
)
def test_cifar_has_the_names_of_its_archive_if_they_are_there(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    loader: type[Cifar10],
    labels: str,
    names: tuple[str, str],
    cache: Path,
) -> None:
    write_cifar(root, loader, monkeypatch, labels)
    assert opened(name, root).class_names == ()
    expected = [f"animal {k}" for k in range(loader.classes)]
    file = root / loader.folder / names[0]
    file.write_bytes(pickle.dumps({names[1]: expected}, protocol=2))
    monkeypatch.setenv("P2PFL_CACHE", str(cache / "other"))
    assert opened(name, root).class_names == tuple(expected)
    file.write_bytes(pickle.dumps({names[1]: expected[1:]}, protocol=2))
    monkeypatch.setenv("P2PFL_CACHE", str(cache / "third"))
    with pytest.raises(DataError, match=f"{names[0]}: expected {loader.classes} names of classes"):
        opened(name, root)


def test_styles_say_which_classes_have_other_names(root: Path) -> None:
    for folder, names in (("one", ("bike", "car")), ("two", ("bike", "cars"))):
        for name in names:
            for number in range(2):
                photo(root / folder / name / f"{number}.png", 50)
    of = [{"name": "folder", "path": path, "test": 0.5, "size": 4} for path in ("one", "two")]
    dataset = opened("styles", root, of=of)
    assert dataset.class_names == ("bike", "car")
    assert dataset.notes == ("class 1 is 'car' in folder, but 'cars' in folder: are they the same?",)


@dataclass(frozen=True)
class Named(Loader):
    """A data set of two classes."""

    names: tuple[str, ...] = field(default=())

    def read(self, root: Path) -> DatasetArrays:
        images, labels = np.zeros((4, 1, 2, 2), np.uint8), np.array([0, 1, 1, 0])
        return DatasetArrays(images, labels, images, labels, 2, False, class_names=self.names, notes=["a\x07"])


@dataclass(frozen=True)
class Careless(Named):
    """A data set whose loader gives any object as names."""

    given: ClassVar[Any] = None

    def read(self, root: Path) -> DatasetArrays:
        return replace(super().read(root), class_names=self.given)


def test_a_loader_may_name_its_classes_and_write_notes(root: Path, cache: Path) -> None:
    dataset = open_dataset("named", Named(("cat", "dog")), root)
    assert (dataset.class_names, dataset.notes) == (("cat", "dog"), ("a\\x07",))
    again = open_dataset("named", Named(("cat", "dog")), root)
    assert (again.class_names, again.notes) == (dataset.class_names, dataset.notes)


@pytest.mark.parametrize("given", [("cat",), (1, 2), "ab", None])
def test_names_of_a_careless_loader_are_an_error(root: Path, monkeypatch: pytest.MonkeyPatch, given: Any) -> None:
    monkeypatch.setattr(Careless, "given", given)
    with pytest.raises(DataError, match="careless: class_names should be a list of 2 texts, one for each class"):
        open_dataset("careless", Careless(), root)


def test_names_may_be_an_array(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Careless, "given", np.array(["cat", "dog"]))
    assert open_dataset("careless", Careless(), root).class_names == ("cat", "dog")


def test_names_do_not_change_the_hash_of_a_dataset(root: Path) -> None:
    named, unnamed = (open_dataset("named", Named(names), root) for names in (("cat", "dog"), ()))
    assert named.sha256 == unnamed.sha256


def test_a_cache_entry_without_names_is_replaced(root: Path, cache: Path) -> None:
    loader = Named(("cat", "dog"))
    open_dataset("named", loader, root)
    (file,) = cache.glob("named-*/metadata.json")
    metadata = json.loads(file.read_text())
    del metadata["class_names"]
    file.write_text(json.dumps(metadata))
    assert open_dataset("named", loader, root).class_names == ("cat", "dog")
