"""Datasets: their content, the cache of the host, and errors."""

from __future__ import annotations

import gzip
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from p2pfl.data import DATASETS, Dataset, DatasetArrays, Loader, open_dataset
from p2pfl.data.loaders.mnist import Mnist
from p2pfl.errors import DataError

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("P2PFL_CACHE", str(folder))
    return folder


def real_data(folder: str) -> Path:
    """The root that holds ``folder``; skips the test if there is none."""
    root = Path(os.environ.get("P2PFL_DATA") or REPOSITORY.parent / "shared" / "data")
    if not (root / folder / "raw").is_dir():
        pytest.skip(f"no {folder}/raw in {root}; set P2PFL_DATA")
    return root


def digits() -> Dataset:
    return open_dataset("digits", DATASETS["digits"]())


# --- a loader that counts how often it is read ---


@dataclass(frozen=True)
class Counted(Loader):
    """Six gray 2x3 images and two test images; every read appends a line to ``log``."""

    log: str
    shade: int = 7

    def read(self, root: Path) -> DatasetArrays:
        with open(self.log, "a") as log:
            print(os.getpid(), file=log)
        images = np.full((6, 1, 2, 3), self.shade, np.uint8)
        labels = np.array([0, 1, 2, 0, 1, 2], np.int64)
        return DatasetArrays(images, labels, images[:2], labels[:2], classes=3, mirror=True)

    def times_read(self) -> int:
        return len(Path(self.log).read_text().splitlines())


@pytest.fixture
def counted(tmp_path: Path) -> Counted:
    return Counted(str(tmp_path / "log"))


# --- a small MNIST on disk ---


def idx(array: np.ndarray) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes((0, 0, 8, array.ndim)) + sizes + array.astype(np.uint8).tobytes()


def write_mnist(root: Path, folder: str = "MNIST", compressed: bool = False) -> Path:
    """Write 20 training images whose pixels all equal the index, and 10 test images. Returns the raw folder."""
    raw = root / folder / "raw"
    raw.mkdir(parents=True)
    for split, count in (("train", 20), ("t10k", 10)):
        images = np.repeat(np.arange(count), 28 * 28).reshape(count, 28, 28)
        for what, array in (("images-idx3", images), ("labels-idx1", np.arange(count) % 10)):
            data = idx(array)
            name = f"{split}-{what}-ubyte"
            (raw / (name + ".gz" if compressed else name)).write_bytes(gzip.compress(data) if compressed else data)
    return raw


def open_mnist(root: Path, download: bool = False) -> Dataset:
    return open_dataset("mnist", DATASETS["mnist"](), root, download)


# --- contents ---


def test_digits_have_all_samples_in_a_stratified_split() -> None:
    dataset = digits()
    assert (dataset.channels, dataset.size, dataset.classes, dataset.mirror) == (1, (8, 8), 10, False)
    assert dataset.train.images.dtype == np.uint8
    assert dataset.train.labels.dtype == np.int64
    assert len(dataset.train) + len(dataset.test) == 1797
    per_class = np.bincount(dataset.train.labels), np.bincount(dataset.test.labels)
    np.testing.assert_allclose(per_class[0] / sum(per_class), 0.8, atol=0.01)
    assert (dataset.train.images.min(), dataset.train.images.max()) == (0, 255)


def test_mean_and_std_are_those_of_the_training_images() -> None:
    dataset = digits()
    pixels = dataset.train.images.astype(np.float64) / 255
    assert dataset.mean == pytest.approx(pixels.mean(axis=(0, 2, 3)))
    assert dataset.std == pytest.approx(pixels.std(axis=(0, 2, 3)))


def test_std_of_constant_channel_is_one(counted: Counted) -> None:
    dataset = open_dataset("counted", counted)
    assert dataset.mean == pytest.approx((7 / 255,))
    assert dataset.std == (1.0,)


def test_take_copies_samples_in_the_given_order() -> None:
    train = digits().train
    indices = np.array([5, 0, 5])
    images, labels = train.take(indices)
    assert (images.dtype, images.shape) == (torch.uint8, (3, 1, 8, 8))
    assert (labels.dtype, labels.tolist()) == (torch.int64, train.labels[indices].tolist())
    np.testing.assert_array_equal(images.numpy(), train.images[indices])
    images.zero_()  # writable memory of its own
    assert train.images[5].any()


def test_take_accepts_no_indices_and_rejects_those_out_of_range() -> None:
    train = digits().train
    images, labels = train.take(np.array([], np.int64))
    assert (images.shape, labels.shape) == ((0, 1, 8, 8), (0,))
    with pytest.raises(IndexError):
        train.take(np.array([len(train)]))


def test_images_are_mapped_read_only() -> None:
    train = digits().train
    assert isinstance(train.images, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        train.images[0] = 0


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "folder", "mean", "std", "mirror"),
    [("mnist", "MNIST", 0.1307, 0.3081, False), ("fashion-mnist", "FashionMNIST", 0.2860, 0.3530, True)],
)
def test_real_mnist_has_published_mean_and_std(name: str, folder: str, mean: float, std: float, mirror: bool) -> None:
    dataset = open_dataset(name, DATASETS[name](), real_data(folder), download=False)
    assert (len(dataset.train), len(dataset.test)) == (60_000, 10_000)
    assert (dataset.channels, dataset.size, dataset.classes, dataset.mirror) == (1, (28, 28), 10, mirror)
    assert dataset.mean == pytest.approx((mean,), abs=5e-5)  # the commonly quoted values
    assert dataset.std == pytest.approx((std,), abs=5e-5)
    assert set(dataset.train.labels) == set(range(10))
    if name == "fashion-mnist":
        assert np.bincount(dataset.train.labels).tolist() == [6000] * 10


# --- the cache ---


def test_dataset_is_read_once_for_each_set_of_options(counted: Counted) -> None:
    for _ in range(3):
        open_dataset("counted", counted)
    assert counted.times_read() == 1
    other = open_dataset("counted", Counted(counted.log, shade=8))
    assert counted.times_read() == 2
    assert (other.train.images == 8).all()


def test_threads_that_start_together_read_once(counted: Counted) -> None:
    barrier = threading.Barrier(8)

    def open_together(_: int) -> int:
        barrier.wait()
        return len(open_dataset("counted", counted).train)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(open_together, range(8))) == [6] * 8
    assert counted.times_read() == 1


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def garble(path: Path) -> None:
    path.write_bytes(b"garbage" * 10)


def other_shape(path: Path) -> None:
    np.save(path, np.zeros((3, 1, 2, 3), np.uint8))


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("train_images.npy", truncate),
        ("train_images.npy", empty),
        ("train_images.npy", garble),
        ("train_images.npy", other_shape),
        ("test_labels.npy", Path.unlink),
        ("metadata.json", truncate),
        ("metadata.json", empty),
        ("metadata.json", Path.unlink),
    ],
)
def test_damaged_cache_is_rebuilt(cache: Path, counted: Counted, file: str, damage: Callable[[Path], None]) -> None:
    open_dataset("counted", counted)
    [path] = cache.glob(f"counted-*/{file}")
    damage(path)
    dataset = open_dataset("counted", counted)
    assert counted.times_read() == 2
    assert dataset.train.images.shape == (6, 1, 2, 3)
    assert (dataset.train.images == 7).all()
    open_dataset("counted", counted)
    assert counted.times_read() == 2


def test_mapped_images_survive_rebuilding_the_cache(cache: Path, counted: Counted) -> None:
    dataset = open_dataset("counted", counted)
    [path] = cache.glob("counted-*/metadata.json")
    path.unlink()
    open_dataset("counted", counted)
    assert (dataset.train.images == 7).all()


def test_leftovers_of_a_killed_process_are_removed(cache: Path, counted: Counted) -> None:
    open_dataset("counted", counted)
    [entry] = cache.glob("counted-*/")
    entry.rename(cache / f".{entry.name}.building")
    open_dataset("counted", counted)
    assert sorted(path.name for path in cache.iterdir()) == [entry.name, "counted.lock"]


def test_changed_file_is_read_again(tmp_path: Path) -> None:
    raw = write_mnist(tmp_path)
    assert open_mnist(tmp_path).train.images[3, 0, 0, 0] == 3
    images = raw / "train-images-idx3-ubyte"
    images.write_bytes(idx(np.full((20, 28, 28), 9)))
    os.utime(images, ns=(0, 0))  # its size is the same, and the clock of a file system may be coarse
    assert open_mnist(tmp_path).train.images[3, 0, 0, 0] == 9


def test_unwritable_cache_is_an_error_with_advice(
    tmp_path: Path, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("P2PFL_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DataError, match=r"cannot write the cache of datasets: Not a directory; set \$P2PFL_CACHE"):
        open_dataset("counted", counted)


def test_folders_default_to_the_environment_and_then_to_the_user_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("P2PFL_CACHE")
    monkeypatch.delenv("P2PFL_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    write_mnist(tmp_path / "p2pfl" / "data")
    assert len(open_dataset("mnist", DATASETS["mnist"](), download=False).train) == 20
    assert list((tmp_path / "p2pfl" / "decoded").glob("mnist-*/metadata.json"))
    monkeypatch.setenv("P2PFL_DATA", str(tmp_path / "elsewhere"))
    with pytest.raises(DataError, match="elsewhere"):
        open_dataset("mnist", DATASETS["mnist"](), download=False)


# --- files ---


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST"), ("fashion-mnist", "FashionMNIST")])
def test_mnist_files_are_read_in_place(tmp_path: Path, name: str, folder: str, compressed: bool) -> None:
    raw = write_mnist(tmp_path, folder, compressed)
    before = sorted(raw.iterdir())
    dataset = open_dataset(name, DATASETS[name](), tmp_path, download=False)
    assert (dataset.train.images.shape, len(dataset.test)) == ((20, 1, 28, 28), 10)
    assert dataset.train.images[:, 0, 5, 7].tolist() == list(range(20))
    assert dataset.train.labels.tolist() == list(range(10)) * 2
    assert sorted(raw.iterdir()) == before


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("keep", [0, 3, 10, 500])
def test_truncated_file_is_named_in_the_error(tmp_path: Path, compressed: bool, keep: int) -> None:
    raw = write_mnist(tmp_path, compressed=compressed)
    [path] = raw.glob("t10k-images*")
    os.truncate(path, min(keep, path.stat().st_size - 1))
    with pytest.raises(DataError, match=f"{path}.*truncated"):
        open_mnist(tmp_path)


def test_file_of_another_format_is_named_in_the_error(tmp_path: Path) -> None:
    raw = write_mnist(tmp_path)
    path = raw / "train-images-idx3-ubyte"
    path.write_bytes(b"<html>404 Not Found</html>" * 3)
    with pytest.raises(DataError, match=f"{path}: not an IDX file"):
        open_mnist(tmp_path)


def test_numbers_of_images_and_labels_must_agree(tmp_path: Path) -> None:
    raw = write_mnist(tmp_path)
    (raw / "train-labels-idx1-ubyte").write_bytes(idx(np.arange(19) % 10))
    with pytest.raises(DataError, match="mnist: 20 training inputs but 19 labels"):
        open_mnist(tmp_path)


def test_label_out_of_range_is_an_error(tmp_path: Path) -> None:
    raw = write_mnist(tmp_path)
    (raw / "t10k-labels-idx1-ubyte").write_bytes(idx(np.arange(10) + 1))
    with pytest.raises(DataError, match="mnist: test labels range from 1 to 10, but classes is 10"):
        open_mnist(tmp_path)


def test_missing_file_error_names_the_file_and_a_remedy(tmp_path: Path) -> None:
    raw = write_mnist(tmp_path)
    (raw / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError) as caught:
        open_mnist(tmp_path)
    message = str(caught.value)
    assert f"missing train-labels-idx1-ubyte; looked in {raw}." in message
    assert "data.root or $P2PFL_DATA to the folder that contains MNIST/raw/, or set data.download: true" in message


def test_missing_file_is_downloaded_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mnist, "download", lambda self, root: write_mnist(root))
    assert len(open_mnist(tmp_path, download=True).train) == 20


def test_failed_download_reports_reason_and_alternatives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Mnist, root: Path) -> None:
        raise RuntimeError("no\nnetwork")

    monkeypatch.setattr(Mnist, "download", fail)
    with pytest.raises(DataError, match=r"missing.*looked in.*data\.root.*the download failed: no network$"):
        open_mnist(tmp_path, download=True)


def test_incomplete_download_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mnist, "download", lambda self, root: None)
    with pytest.raises(DataError, match="did not provide train-images"):
        open_mnist(tmp_path, download=True)


@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST"), ("fashion-mnist", "FashionMNIST")])
def test_download_uses_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, folder: str) -> None:
    def fetch(root: Path, download: bool) -> None:
        assert download
        write_mnist(root, folder)

    monkeypatch.setattr(f"torchvision.datasets.{folder}", fetch)
    assert len(open_dataset(name, DATASETS[name](), tmp_path, download=True).train) == 20
