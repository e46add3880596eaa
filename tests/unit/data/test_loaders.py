"""Loaders of all datasets, on small files in the layouts of the real ones, and on damaged files."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from p2pfl.data import DATASETS, Dataset, open_dataset
from p2pfl.data.loaders.cifar import Cifar10, Cifar100, read_batch
from p2pfl.data.loaders.digits import Svhn
from p2pfl.data.loaders.image_files import Flowers102
from p2pfl.errors import DataError
from p2pfl.run_file.options import OptionErrors

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("P2PFL_CACHE", str(folder))
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


def opened(name: str, root: Path, **options: object) -> Dataset:
    return open_dataset(name, DATASETS[name].parse(options), root, download=False)


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def garble(path: Path) -> None:
    path.write_bytes(b"<html>404 Not Found</html>" * 9)


# --- files in the layouts of the real datasets; in most, n is the color of image n ---


def write_usps(root: Path) -> None:
    for name, count in (("usps.bz2", 20), ("usps.t.bz2", 10)):
        lines = []
        for n in range(count):
            pixels = np.linspace(-1, 1, 256) if n == 0 else np.full(256, n / count)
            lines.append(f"{n % 10 + 1} " + " ".join(f"{i}:{x:.6f}" for i, x in enumerate(pixels, start=1)))
        (root / name).write_bytes(bz2.compress(("\n".join(lines) + "\n").encode()))


def write_emnist(root: Path, split: str, first: int) -> None:
    raw = root / "EMNIST" / "raw"
    raw.mkdir(parents=True)
    for split_name, count in (("train", 8), ("test", 4)):
        images = np.zeros((count, 28, 28), np.uint8)
        images[:, 3, 20] = 255  # at row 20, column 3 of the upright image
        labels = np.arange(count) % 4 + first
        for what, array in (("images-idx3", images), ("labels-idx1", labels)):
            sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
            data = bytes((0, 0, 8, array.ndim)) + sizes + array.astype(np.uint8).tobytes()
            (raw / f"emnist-{split}-{split_name}-{what}-ubyte.gz").write_bytes(gzip.compress(data))


def write_svhn(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, count in (("train_32x32.mat", 20), ("test_32x32.mat", 10)):
        images = np.zeros((32, 32, 3, count), np.uint8)
        images[4, 5, 1] = np.arange(count)
        labels = np.arange(count)[:, np.newaxis] % 10
        savemat(root / name, {"X": images, "y": np.where(labels == 0, 10, labels).astype(np.uint8)})
    monkeypatch.setattr(Svhn, "checksums", {name: md5(root / name) for name in Svhn.checksums})


def write_cifar(root: Path, loader: type[Cifar10], monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    folder = root / loader.folder
    folder.mkdir()
    for batch, name in enumerate(loader.checksums):
        images = np.zeros((4, 3, 32, 32), np.uint8)
        images[:, 2, 7, 9] = np.arange(4) + 10 * batch
        content = {"data": images.reshape(4, -1), key: [batch, 1, 2, 3], "batch_label": "a batch"}
        (folder / name).write_bytes(pickle.dumps(content, protocol=3))
    monkeypatch.setattr(loader, "checksums", {name: md5(folder / name) for name in loader.checksums})


def photo(path: Path, shade: int, size: tuple[int, int] = (40, 24), mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, (shade,) * 3 if mode == "RGB" else shade).save(path)


def write_flowers(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = root / "flowers-102"
    for number in range(1, 11):
        photo(folder / "jpg" / f"image_{number:05d}.jpg", 10 * number)
    savemat(folder / "setid.mat", {"trnid": [1, 3], "valid": [5], "tstid": [2, 4, 6, 7]})
    savemat(folder / "imagelabels.mat", {"labels": np.arange(1, 11)})
    monkeypatch.setattr(Flowers102, "checksums", {name: md5(folder / name) for name in Flowers102.checksums})


def write_caltech(root: Path) -> None:
    for name, count in (("accordion", 10), ("BACKGROUND_Google", 3), ("wrench", 5)):
        for number in range(1, count + 1):
            path = root / "caltech101" / "101_ObjectCategories" / name / f"image_{number:04d}.jpg"
            photo(path, 10 * number, mode="L" if number == 2 else "RGB")


def write_pets(root: Path) -> None:
    folder = root / "oxford-iiit-pet"
    (folder / "annotations").mkdir(parents=True)
    for half, names in (("trainval", ("Abyssinian_1", "pug_2")), ("test", ("pug_3",))):
        for name in names:
            photo(folder / "images" / f"{name}.jpg", 100)
        lines = [f"{name} {1 if name[0] == 'A' else 37} 1 1" for name in names]
        (folder / "annotations" / f"{half}.txt").write_text("\n".join(lines) + "\n")


def write_cars(root: Path) -> None:
    folder = root / "stanford_cars"
    (folder / "devkit").mkdir(parents=True)
    record = np.dtype([("class", object), ("fname", object)])
    for part, count, path in (
        ("train", 3, folder / "devkit" / "cars_train_annos.mat"),
        ("test", 2, folder / "cars_test_annos_withlabels.mat"),
    ):
        for number in range(1, count + 1):
            photo(folder / f"cars_{part}" / f"{number:05d}.jpg", 50)
        annotations = np.array([(196 - n, f"{n + 1:05d}.jpg") for n in range(count)], record)
        savemat(path, {"annotations": annotations})


def write_tree(root: Path, halves: tuple[str, ...] = ("train", "val")) -> None:
    for half in halves:
        photo(root / half / "b" / "images" / "1.PNG", 30)
        photo(root / half / "b" / "images" / "2.jpg", 60)
        photo(root / half / "a" / "1.png", 90)
        (root / half / "b" / "notes.txt").write_text("not an image")


def write_npz(path: Path, **changes: np.ndarray) -> None:
    arrays: dict[str, Any] = {
        "x_train": np.arange(6 * 2 * 3, dtype=np.uint8).reshape(6, 2, 3),
        "y_train": np.arange(6) % 3,
        "x_test": np.zeros((2, 2, 3), np.uint8),
        "y_test": np.array([1, 2], np.int32),
    }
    arrays.update(changes)
    np.savez(path, **arrays)


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
    os.utime(root / "train" / "a", (1, 1))  # in case the clock is coarse
    assert len(opened("folder", root, size=4).train) == 4


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
    with pytest.raises(OptionErrors, match="of: should be the name of a dataset"):
        DATASETS["styled"].parse({"of": 3})


def test_styled_rejects_a_dataset_with_styles(root: Path) -> None:
    with pytest.raises(DataError, match="styled already has styles"):
        opened("styled", root, of={"name": "styled", "of": SMALL})


# --- missing and damaged ---


@pytest.mark.parametrize(
    ("name", "options", "missing", "advice"),
    [
        ("usps", {}, "usps.bz2, usps.t.bz2", "the folder that contains usps.bz2, or set data.download: true"),
        ("emnist", {}, "emnist-balanced-train-images-idx3-ubyte", "contains EMNIST/raw/, or set data.download: true"),
        ("svhn", {}, "train_32x32.mat, test_32x32.mat", "contains train_32x32.mat, or set data.download"),
        ("cifar10", {}, "data_batch_1, .*test_batch", "contains cifar-10-batches-py/, or set data.download"),
        ("cifar100", {}, "train, test", "contains cifar-100-python/, or set data.download"),
        ("flowers102", {}, "setid.mat, imagelabels.mat, jpg", "contains flowers-102/, or set data.download"),
        ("caltech101", {}, "101_ObjectCategories", "contains caltech101/, or set data.download"),
        ("oxford-pets", {}, "trainval.txt, test.txt, images", "contains oxford-iiit-pet/annotations/, or set"),
        (
            "stanford-cars",
            {},
            "cars_train_annos.mat",
            "contains stanford_cars/devkit/; it is no longer published",
        ),
        ("folder", {"path": "mine"}, "train, test", r"contains mine/; it must contain folders train/CLASS/"),
        ("folder", {"path": "/no/where"}, "train, test", r"The path is absolute.*; it must contain folders"),
        ("npz", {"path": "mine.npz"}, "mine.npz", r"contains mine.npz; create it with numpy.savez"),
        ("styled", {"of": "usps"}, "usps.bz2", "contains usps.bz2, or set data.download"),
        ("styles", {"of": ["usps", "svhn"]}, "usps.bz2.*, train_32x32.mat", "or set data.download"),
    ],
)
def test_missing_files_error_names_the_files_and_a_remedy(
    root: Path, name: str, options: dict[str, object], missing: str, advice: str
) -> None:
    with pytest.raises(DataError, match=f"^{name}: missing {missing}.*; looked in .*{advice}"):
        opened(name, root, **options)


@pytest.mark.parametrize("name", ["usps", "svhn", "cifar10", "flowers102", "caltech101", "oxford-pets"])
def test_failed_download_reports_the_reason(root: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    with pytest.raises(DataError, match=r"; the download failed: .*no network"):
        open_dataset(name, DATASETS[name](), root, download=True)


def test_download_of_an_unavailable_dataset_gives_instructions(root: Path) -> None:
    with pytest.raises(DataError, match=r"styles: missing .*the download failed: create it with numpy.savez"):
        open_dataset("styles", DATASETS["styles"].parse({"of": [{"name": "npz", "path": "a.npz"}]}), root)


Write = Callable[[Path, pytest.MonkeyPatch], object]

LAYOUTS: dict[str, Write] = {
    "usps": lambda root, patch: write_usps(root),
    "svhn": write_svhn,
    "cifar10": lambda root, patch: write_cifar(root, Cifar10, patch, "labels"),
    "cifar100": lambda root, patch: write_cifar(root, Cifar100, patch, "fine_labels"),
    "flowers102": write_flowers,
    "caltech101": lambda root, patch: write_caltech(root),
    "oxford-pets": lambda root, patch: write_pets(root),
    "stanford-cars": lambda root, patch: write_cars(root),
    "folder": lambda root, patch: write_tree(root),
}


@pytest.mark.parametrize(
    ("name", "file", "expected"),
    [
        ("usps", "usps.t.bz2", "unreadable or truncated"),
        ("svhn", "test_32x32.mat", "wrong checksum: md5 .*; delete the file and fetch it again"),
        ("cifar10", "cifar-10-batches-py/data_batch_3", "wrong checksum"),
        ("cifar100", "cifar-100-python/test", "wrong checksum"),
        ("flowers102", "flowers-102/imagelabels.mat", "wrong checksum"),
        ("flowers102", "flowers-102/jpg/image_00004.jpg", "not an image, or damaged"),
        ("caltech101", "caltech101/101_ObjectCategories/wrench/image_0002.jpg", "not an image, or damaged"),
        ("oxford-pets", "oxford-iiit-pet/images/pug_3.jpg", "not an image, or damaged"),
        (
            "stanford-cars",
            "stanford_cars/cars_test_annos_withlabels.mat",
            "unreadable or truncated MATLAB file|not a list",
        ),
        ("folder", "train/b/images/2.jpg", "not an image, or damaged"),
    ],
)
@pytest.mark.parametrize("damage", [truncate, garble])
def test_damaged_file_is_named_in_the_error(
    root: Path, name: str, file: str, expected: str, damage: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    LAYOUTS[name](root, monkeypatch)
    damage(root / file)
    with pytest.raises(DataError, match=f"^{root / file}: ({expected})"):
        opened(name, root)


def test_truncated_matlab_file_is_an_error_or_complete(root: Path) -> None:
    write_cars(root)
    path = root / "stanford_cars" / "devkit" / "cars_train_annos.mat"
    content = path.read_bytes()
    loader = DATASETS["stanford-cars"].parse({"size": 2})
    errors, results = [], []
    for length in range(0, len(content), 29):
        path.write_bytes(content[:length])
        try:
            results.append(loader.read(root).train_labels.tolist())
        except DataError as error:
            errors.append(str(error))
    assert errors
    assert all(error.startswith(str(path)) for error in errors)
    assert all(labels == [195, 194, 193] for labels in results)  # only padding is missing


def test_listed_but_missing_image_is_named_in_the_error(root: Path) -> None:
    write_pets(root)
    path = root / "oxford-iiit-pet" / "images" / "pug_2.jpg"
    path.unlink()
    with pytest.raises(DataError, match=f"^{path}: missing, but listed by the dataset"):
        opened("oxford-pets", root)


def test_malformed_list_of_pets_is_an_error(root: Path) -> None:
    write_pets(root)
    (root / "oxford-iiit-pet" / "annotations" / "test.txt").write_text("pug_3\n")
    with pytest.raises(DataError, match=r"test.txt: not a list of image names and classes"):
        opened("oxford-pets", root)


def test_class_without_training_images_is_an_error(root: Path) -> None:
    write_tree(root)
    photo(root / "val" / "c" / "1.png", 1)
    with pytest.raises(DataError, match=f"{root}/val/c: unknown class: {root}/train has no folder of that name"):
        opened("folder", root)


def test_file_in_place_of_a_folder_is_an_error(root: Path) -> None:
    write_tree(root, ("train",))
    (root / "test").write_text("")
    with pytest.raises(DataError, match=f"{root}/test: expected a folder of classes: Not a directory"):
        opened("folder", root)


def test_usps_in_another_format_is_an_error(root: Path) -> None:
    write_usps(root)
    for text in (b"1 1:0.5 2:0.5\n", b"1 " + b" ".join(b"%d:7" % i for i in range(1, 257)), b"hello", b""):
        (root / "usps.bz2").write_bytes(bz2.compress(text))
        with pytest.raises(DataError, match=r"usps.bz2: not in the text format of USPS"):
            opened("usps", root)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_train": np.zeros((6, 2, 3, 1))}, r"x_train is float64 \[6, 2, 3, 1\]; expected images uint8"),
        ({"x_train": np.zeros((6, 2, 3))}, "training inputs are float32, but test inputs uint8"),
        ({"x_test": np.zeros((2, 2, 3, 4), np.uint8)}, r"x_test is uint8 \[2, 2, 3, 4\]"),
        ({"y_test": np.zeros((2, 1), np.int64)}, r"y_test is int64 \[2, 1\]; expected integers \[N\]"),
        ({"y_test": np.zeros(2)}, "y_test is float64"),
        ({"y_train": np.array([0, 1, 2, 0, 1, -1])}, "npz: training labels range from -1 to 2"),
        ({"y_train": np.arange(5)}, "npz: 6 training inputs but 5 labels"),
        ({"x_test": np.zeros((2, 4, 4), np.uint8)}, "inputs have different shapes"),
        ({"y_train": np.array([object()] * 6)}, "not a valid .npz file of plain arrays"),
    ],
)
def test_npz_with_wrong_arrays_is_an_error(root: Path, changes: dict[str, np.ndarray], message: str) -> None:
    write_npz(root / "mine.npz", **changes)
    with pytest.raises(DataError, match=message):
        opened("npz", root, path="mine.npz")


def test_damaged_or_incomplete_npz_is_an_error(root: Path) -> None:
    path = root / "mine.npz"
    np.savez(path, x_train=np.zeros(3))
    with pytest.raises(DataError, match=r"y_train is missing; it must contain x_train, y_train, x_test, y_test"):
        opened("npz", root, path="mine.npz")
    write_npz(path)
    for damage in (truncate, garble):
        damage(path)
        with pytest.raises(DataError, match=r"not a valid .npz file"):
            opened("npz", root, path="mine.npz")
    np.save(root / "array.npy", np.zeros(3))
    with pytest.raises(DataError, match=r"not a valid .npz file"):
        opened("npz", root, path="array.npy")


# --- CIFAR's pickles ---


def test_batch_written_by_python_2_is_readable(tmp_path: Path) -> None:
    """Protocol 2, bytes as text, and numpy's former names."""
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntU\x01btR(I1\n(I1\nI2\ntcnumpy\ndtype\n"
        b"(U\x02u1I0\nI1\ntR(I3\nU\x01|NNNI-1\nI-1\nI0\ntbI00\nU\x02\x07\xfftb"
    )
    path = tmp_path / "batch"
    path.write_bytes(b"\x80\x02}(U\x04data" + array + b"U\x06labels](K\x03eu.")
    batch = read_batch(path)
    assert batch["labels"] == [3]
    np.testing.assert_array_equal(batch["data"], np.array([[7, 255]], np.uint8))


class Malicious:
    def __init__(self, callee: Callable[..., object], *arguments: object) -> None:
        self.call = callee, arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_cannot_run_code(tmp_path: Path, protocol: int) -> None:
    victim = tmp_path / "victim"
    victim.touch()
    path = tmp_path / "batch"
    for payload in (Malicious(os.unlink, str(victim)), Malicious(eval, "1"), Malicious(np.load, "x"), Path("a")):
        path.write_bytes(pickle.dumps({"data": payload}, protocol=protocol))
        with pytest.raises(DataError, match=r"batch: unreadable, .* it uses .*, which is not allowed"):
            read_batch(path)
    assert victim.exists()


def test_truncated_pickle_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "batch"
    content = pickle.dumps({"data": np.zeros((2, 5), np.uint8), "labels": [1, 2]}, protocol=3)
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(DataError, match="batch: unreadable, truncated or not a batch"):
            read_batch(path)


@pytest.mark.parametrize("dtype", ["O", "u2", "f4", "V8"])
def test_arrays_of_other_types_or_shapes_are_rejected(tmp_path: Path, dtype: str) -> None:
    """Neither a dtype with references nor a shape that does not match the bytes is ever built."""
    path = tmp_path / "batch"
    path.write_bytes(pickle.dumps({"data": np.zeros((2, 8), dtype)}, protocol=3))
    with pytest.raises(DataError, match="batch: unreadable"):
        read_batch(path)
    whole = pickle.dumps({"data": np.zeros((2, 8), np.uint8)}, protocol=3)
    path.write_bytes(whole.replace(b"K\x02K\x08", b"K\x02K\x09"))
    with pytest.raises(DataError, match="cannot reshape"):
        read_batch(path)


def test_download_of_cifar_does_not_unpickle(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = []
    monkeypatch.setattr("torchvision.datasets.CIFAR10.__init__", lambda *_, **__: pytest.fail("this class unpickles"))
    monkeypatch.setattr(
        "torchvision.datasets.utils.download_and_extract_archive",
        lambda *arguments, **options: fetched.append((arguments, options)),
    )
    Cifar10().download(root)
    ((url, folder), options) = fetched[0]
    assert url.endswith("/cifar-10-python.tar.gz")
    assert folder == str(root)
    assert options == {"filename": "cifar-10-python.tar.gz", "md5": "c58f30108f718f92721af3b95e74349a"}


@pytest.mark.parametrize("content", [{"labels": [1]}, {"data": np.zeros((2, 5), np.uint8)}, {"data": "x"}, [1]])
def test_pickle_of_other_content_is_an_error(root: Path, content: object, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar(root, Cifar10, monkeypatch, "labels")
    path = root / Cifar10.folder / "data_batch_2"
    path.write_bytes(pickle.dumps(content, protocol=3))
    monkeypatch.setattr(Cifar10, "checksums", {**Cifar10.checksums, "data_batch_2": md5(path)})
    with pytest.raises(DataError, match=f"{path}: not a batch of CIFAR images"):
        opened("cifar10", root)


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
