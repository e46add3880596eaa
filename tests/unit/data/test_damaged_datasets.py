"""Files of datasets that are missing, damaged or malicious: errors that name them, and no code that runs."""

from __future__ import annotations

import bz2
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from p2pfl.data import DATASETS, open_dataset
from p2pfl.data.loaders.cifar import Cifar10, Cifar100, read_batch
from p2pfl.errors import DataError
from tests.dataset_files import (
    md5,
    opened,
    photo,
    write_caltech,
    write_cars,
    write_cifar,
    write_flowers,
    write_npz,
    write_pets,
    write_svhn,
    write_tree,
    write_usps,
)

pytestmark = pytest.mark.usefixtures("cache")


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def garble(path: Path) -> None:
    path.write_bytes(b"<html>404 Not Found</html>" * 9)


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
        (
            {"y_train": np.array([object()] * 6)},
            "not a valid .npz file of plain arrays: it contains Python objects; co",
        ),
        (
            {"x_train": np.arange(-3, 9).reshape(6, 2), "x_test": np.ones((2, 2), np.int64)},
            "tokens range from -3 to 8, but the vocabulary is 9; integers are tokens, .* store other inputs as float",
        ),
        (
            {"x_train": np.full((6, 2), np.nan), "x_test": np.ones((2, 2))},
            r"npz: inputs contain NaN or infinity, e\.g\. training sample 0 at \[0\]",
        ),
        ({"x_test": np.zeros((0, 2, 3), np.uint8), "y_test": np.zeros(0, np.int64)}, "npz: no test samples; train"),
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
    path.write_text("no zip")
    with pytest.raises(DataError, match=r"not a valid .npz file of plain arrays: it is not a complete zip archive$"):
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
