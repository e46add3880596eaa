"""Loaders of all datasets, on small files in the layouts of the real ones."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from p2pfl.data import DATASETS
from p2pfl.data.loaders.cifar import Cifar10, Cifar100
from p2pfl.errors import DataError
from p2pfl.options import OptionErrors
from tests.dataset_files import (
    opened,
    photo,
    write_caltech,
    write_cars,
    write_cifar,
    write_emnist,
    write_flowers,
    write_npz,
    write_pets,
    write_svhn,
    write_tree,
    write_usps,
)

pytestmark = pytest.mark.usefixtures("cache")

REPOSITORY = Path(__file__).resolve().parents[3]

# --- content ---


def test_usps_pixels_are_scaled_to_bytes(root: Path) -> None:
    write_usps(root)
    dataset = opened("usps", root)
    assert dataset.train.images.shape == (20, 1, 16, 16)
    assert dataset.train.labels.tolist() == list(range(10)) * 2
    np.testing.assert_array_equal(dataset.train.images[0].ravel(), np.arange(256))
    assert len(dataset.test) == 10


@pytest.mark.exhaustive
def test_real_usps_has_the_published_class_sizes() -> None:
    root = Path(os.environ.get("P2PFL_DATA") or REPOSITORY.parent / "shared" / "data")
    if not (root / "usps.bz2").is_file():
        pytest.skip(f"no usps.bz2 in {root}; set P2PFL_DATA")
    dataset = opened("usps", root)
    assert (len(dataset.train), len(dataset.test), dataset.size) == (7291, 2007, (16, 16))
    assert np.bincount(dataset.train.labels).tolist() == [1194, 1005, 731, 658, 652, 556, 664, 645, 542, 644]


@pytest.mark.parametrize(("split", "first", "classes"), [("balanced", 0, 47), ("letters", 1, 26), ("digits", 0, 10)])
def test_emnist_is_transposed_to_be_upright(root: Path, split: str, first: int, classes: int) -> None:
    write_emnist(root, split, first)
    dataset = opened("emnist", root, split=split)
    assert (dataset.train.images.shape, len(dataset.test), dataset.classes) == ((8, 1, 28, 28), 4, classes)
    assert dataset.train.labels.tolist() == [0, 1, 2, 3] * 2
    assert (dataset.train.images[:, 0, 20, 3] == 255).all()


def test_svhn_label_10_is_digit_0(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_svhn(root, monkeypatch)
    dataset = opened("svhn", root)
    assert (dataset.train.images.shape, len(dataset.test), dataset.mirror) == ((20, 3, 32, 32), 10, False)
    assert dataset.train.images[:, 1, 4, 5].tolist() == list(range(20))
    assert dataset.train.labels.tolist() == list(range(10)) * 2


def test_cifar10_batches_are_concatenated(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar(root, Cifar10, monkeypatch, "labels")
    dataset = opened("cifar10", root)
    assert (dataset.train.images.shape, len(dataset.test), dataset.classes) == ((20, 3, 32, 32), 4, 10)
    assert dataset.train.images[:6, 2, 7, 9].tolist() == [0, 1, 2, 3, 10, 11]
    assert dataset.train.labels[::4].tolist() == [0, 1, 2, 3, 4]
    assert dataset.test.labels[0] == 5


def test_cifar100_has_100_classes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar(root, Cifar100, monkeypatch, "fine_labels")
    dataset = opened("cifar100", root)
    assert (dataset.train.images.shape, len(dataset.test), dataset.classes) == ((4, 3, 32, 32), 4, 100)


def test_flowers_train_on_both_official_training_splits(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_flowers(root, monkeypatch)
    dataset = opened("flowers102", root, size=8)
    assert (dataset.train.images.shape, dataset.classes, dataset.mirror) == ((3, 3, 8, 8), 102, True)
    assert dataset.train.labels.tolist() == [0, 2, 4]
    assert dataset.test.labels.tolist() == [1, 3, 5, 6]
    np.testing.assert_allclose(dataset.train.images[:, 0, 4, 4], [10, 30, 50], atol=2)


def test_caltech_has_no_background_class_and_every_fifth_image_is_for_testing(root: Path) -> None:
    write_caltech(root)
    dataset = opened("caltech101", root, size=8)
    assert dataset.classes == 2
    assert np.bincount(dataset.train.labels).tolist() == [8, 4]
    assert np.bincount(dataset.test.labels).tolist() == [2, 1]


def test_pets_are_listed_by_their_annotations(root: Path) -> None:
    write_pets(root)
    dataset = opened("oxford-pets", root)
    assert (dataset.train.images.shape, dataset.classes) == ((2, 3, 64, 64), 37)
    assert (dataset.train.labels.tolist(), dataset.test.labels.tolist()) == ([0, 36], [36])


def test_cars_are_listed_by_their_annotations(root: Path) -> None:
    write_cars(root)
    dataset = opened("stanford-cars", root, size=16)
    assert (dataset.train.images.shape, len(dataset.test), dataset.classes) == ((3, 3, 16, 16), 2, 196)
    assert dataset.train.labels.tolist() == [195, 194, 193]


@pytest.mark.parametrize("half", ["test", "val", "valid"])
def test_folder_has_one_class_per_subfolder(root: Path, half: str) -> None:
    write_tree(root / "mine", ("train", half))
    dataset = opened("folder", root, path="mine", size=10)
    assert (dataset.train.images.shape, len(dataset.test), dataset.classes) == ((3, 3, 10, 10), 3, 2)
    assert dataset.train.labels.tolist() == [0, 1, 1]
    np.testing.assert_allclose(dataset.train.images[:, 0, 5, 5], [90, 30, 60], atol=2)


def test_folder_without_official_split_is_split_class_by_class(root: Path) -> None:
    for number in range(10):
        for name in ("alarm", "bed"):
            photo(root / "Art" / name / f"{number:02d}.jpg", 20 * number)
    dataset = opened("folder", root, path=str(root / "Art"), test=0.3)
    assert np.bincount(dataset.train.labels).tolist() == [7, 7]
    assert np.bincount(dataset.test.labels).tolist() == [3, 3]


def test_new_image_in_a_folder_is_noticed(root: Path) -> None:
    write_tree(root)
    assert len(opened("folder", root, size=4).train) == 3
    photo(root / "train" / "a" / "2.png", 0)
    assert len(opened("folder", root, size=4).train) == 4


def test_new_image_in_a_folder_of_a_class_is_noticed(root: Path) -> None:
    write_tree(root)
    photo(root / "train" / "a" / "site 1" / "2.png", 0)
    assert len(opened("folder", root, size=4).train) == 4
    photo(root / "train" / "a" / "site 1" / "3.png", 0)
    assert len(opened("folder", root, size=4).train) == 5


def test_npz_images_may_have_channels_last(root: Path) -> None:
    write_npz(root / "mine.npz")
    dataset = opened("npz", root, path="mine.npz", mirror=True)
    assert (dataset.train.images.shape, len(dataset.test), dataset.classes) == ((6, 1, 2, 3), 2, 3)
    assert dataset.mirror
    assert dataset.train.images[1, 0].tolist() == [[6, 7, 8], [9, 10, 11]]
    write_npz(root / "rgb.npz", x_train=np.zeros((6, 2, 3, 3), np.uint8), x_test=np.ones((2, 2, 3, 3), np.uint8))
    assert opened("npz", root, path="rgb.npz", classes=7).classes == 7
    assert opened("npz", root, path="rgb.npz").train.images.shape == (6, 3, 2, 3)


# --- synthetic images and styles ---


def test_synthetic_images_are_reproducible(root: Path, cache: Path) -> None:
    options = {"classes": 7, "size": 12, "channels": 3, "train": 100, "test": 20}
    dataset = opened("synthetic", root, **options)
    assert (dataset.train.images.shape, len(dataset.test), dataset.classes) == ((100, 3, 12, 12), 20, 7)
    assert set(np.bincount(dataset.train.labels)) == {14, 15}
    again = DATASETS["synthetic"].parse(options).read(root)
    np.testing.assert_array_equal(dataset.train.images, again.train_images)
    other = DATASETS["synthetic"].parse({**options, "seed": 1}).read(root)
    assert not np.array_equal(dataset.train.images, other.train_images)


@pytest.mark.exhaustive
def test_synthetic_task_is_learnable_but_not_linearly(root: Path) -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.neighbors import KNeighborsClassifier

    dataset = opened("synthetic", root, train=1000, test=250)
    x, tested = (split.images.reshape(len(split), -1) / 255 for split in (dataset.train, dataset.test))

    def accuracy(model: LogisticRegression | KNeighborsClassifier) -> float:
        return float(model.fit(x, dataset.train.labels).score(tested, dataset.test.labels))

    assert 0.3 < accuracy(LogisticRegression(C=0.01, max_iter=500)) < 0.8
    assert accuracy(KNeighborsClassifier(5)) > 0.8


def test_synthetic_needs_a_test_image_of_each_class(root: Path) -> None:
    with pytest.raises(DataError, match=r"30 classes need as many .* train is 5000 and test is 20"):
        opened("synthetic", root, classes=30, test=20)


SMALL = {"name": "synthetic", "classes": 3, "size": 8, "train": 300, "test": 60}


def test_styled_images_have_distinct_styles_in_equal_numbers(root: Path) -> None:
    dataset = opened("styled", root, of=SMALL, styles=9)
    source = DATASETS["synthetic"].parse({key: value for key, value in SMALL.items() if key != "name"}).read(root)
    assert dataset.train.images.shape == (300, 3, 8, 8)
    np.testing.assert_array_equal(dataset.train.labels, source.train_labels)
    assert dataset.train.styles is not None
    for label in range(3):
        counts = np.bincount(dataset.train.styles[dataset.train.labels == label], minlength=9)
        assert counts.max() - counts.min() <= 1
    first = dataset.train.styles == 0
    np.testing.assert_array_equal(dataset.train.images[first], np.repeat(source.train_images[first], 3, axis=1))
    means = [dataset.train.images[dataset.train.styles == style].mean((0, 2, 3)) for style in range(9)]
    for style in range(9):
        for other in range(style):
            assert np.abs(means[style] - means[other]).max() > 1, (style, other)
    again = DATASETS["styled"].parse({"of": SMALL, "styles": 9}).read(root)
    np.testing.assert_array_equal(again.train_images, dataset.train.images)


@pytest.mark.parametrize("style", range(1, 7))
def test_style_transforms_each_image_independently(root: Path, style: int) -> None:
    loader = DATASETS["styled"].parse({"of": SMALL, "styles": 7})
    x = np.random.default_rng(0).random((3, 3, 8, 8), np.float32)

    # The noise of an image is drawn before that of later images.
    alone, in_batch = (
        loader._apply(style, images, np.random.default_rng(0))  # type: ignore[attr-defined]
        for images in (x[:1], x)
    )
    np.testing.assert_allclose(in_batch[:1], alone, rtol=1e-5, atol=1e-6)


def test_styles_concatenates_datasets(root: Path) -> None:
    write_usps(root)
    dataset = opened("styles", root, of=["usps", {**SMALL, "classes": 10}], size=20)
    assert (dataset.train.images.shape, dataset.classes) == ((320, 3, 20, 20), 10)
    assert dataset.train.styles is not None
    assert dataset.test.styles is not None
    assert np.bincount(dataset.train.styles).tolist() == [20, 300]
    assert np.bincount(dataset.test.styles).tolist() == [10, 60]
    assert dataset.train.labels[:20].tolist() == list(range(10)) * 2
    ramp = dataset.train.images[0].astype(int)
    assert (ramp[0] == ramp[1]).all()
    assert ramp[0, 0].mean() < 40 < 200 < ramp[0, -1].mean()


def test_styles_requires_equal_numbers_of_classes(root: Path) -> None:
    write_usps(root)
    with pytest.raises(DataError, match="the same number of classes, but usps has 10, synthetic has 3"):
        opened("styles", root, of=["usps", SMALL])


def test_options_of_nested_datasets_are_checked(root: Path) -> None:
    loader = DATASETS["styled"].parse({"of": SMALL})
    assert loader.to_dict()["of"]["classes"] == 3
    assert DATASETS["styled"].parse(loader.to_dict()) == loader
    with pytest.raises(OptionErrors, match=r"of: name: unknown 'mnits'; known: .*did you mean 'mnist'"):
        DATASETS["styled"].parse({"of": "mnits"})
    with pytest.raises(OptionErrors, match=r"of: clases: unknown key 'clases'.*did you mean 'classes'"):
        DATASETS["styled"].parse({"of": {"name": "synthetic", "clases": 3}})
    with pytest.raises(OptionErrors, match="of: should be a dataset: a name, or a mapping"):
        DATASETS["styled"].parse({"of": 3})


def test_styled_rejects_a_dataset_with_styles(root: Path) -> None:
    with pytest.raises(DataError, match="styled already has styles"):
        opened("styled", root, of={"name": "styled", "of": SMALL})


# --- all datasets ---


def test_every_loader_lists_its_files(root: Path) -> None:
    required: dict[str, dict[str, Any]] = {
        "npz": {"path": "a.npz"},
        "table": {"path": "a.csv", "label": "y"},
        "torchvision": {"class": "SVHN"},
        "huggingface": {"path": "ylecun/mnist"},
        "styled": {"of": "mnist"},
        "styles": {"of": ["mnist", "usps"]},
    }
    for name, loader in DATASETS.items():
        options = loader.parse(required.get(name, {}))
        assert loader.parse(options.to_dict()) == options
        assert all(path.is_relative_to(root) for path in options.files(root))
        assert bool(options.files(root)) == (name not in ("digits", "synthetic"))
