"""Datasets: what they hold, how they are decoded once per host, and what is said when something is wrong."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from p2pfl.data import DATASETS, Dataset, Decoded, Source, open_dataset
from p2pfl.data.sources import Mnist
from p2pfl.errors import DataError

REPOSITORY = Path(__file__).resolve().parents[2]


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


# --- a source that counts how often it is read ---


@dataclass(frozen=True)
class Counted(Source):
    """Six grey 2x3 images and two test images; every decoding leaves a line in ``log``."""

    log: str
    shade: int = 7

    def read(self, root: Path) -> Decoded:
        with open(self.log, "a") as log:
            print(os.getpid(), file=log)
        images = np.full((6, 1, 2, 3), self.shade, np.uint8)
        labels = np.array([0, 1, 2, 0, 1, 2], np.int64)
        return Decoded(images, labels, images[:2], labels[:2], classes=3, mirror=True)

    def times_read(self) -> int:
        return len(Path(self.log).read_text().splitlines())


@pytest.fixture
def counted(tmp_path: Path) -> Counted:
    return Counted(str(tmp_path / "log"))


# --- a small MNIST on disk ---


def idx(array: np.ndarray) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes((0, 0, 8, array.ndim)) + sizes + array.astype(np.uint8).tobytes()


def write_mnist(root: Path, folder: str = "MNIST", packed: bool = False) -> Path:
    """Twenty training images whose pixels all are the index, and ten test images. Returns the raw folder."""
    raw = root / folder / "raw"
    raw.mkdir(parents=True)
    for split, count in (("train", 20), ("t10k", 10)):
        images = np.repeat(np.arange(count), 28 * 28).reshape(count, 28, 28)
        for what, array in (("images-idx3", images), ("labels-idx1", np.arange(count) % 10)):
            data = idx(array)
            name = f"{split}-{what}-ubyte"
            (raw / (name + ".gz" if packed else name)).write_bytes(gzip.compress(data) if packed else data)
    return raw


def open_mnist(root: Path, download: bool = False) -> Dataset:
    return open_dataset("mnist", DATASETS["mnist"](), root, download)


# --- contents ---


def test_digits_hold_all_samples_in_a_stratified_split() -> None:
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


def test_std_of_a_constant_channel_is_one(counted: Counted) -> None:
    dataset = open_dataset("counted", counted)
    assert (dataset.mean, dataset.std) == (pytest.approx((7 / 255,)), (1.0,))


def test_take_copies_samples_in_the_order_asked() -> None:
    train = digits().train
    indices = np.array([5, 0, 5])
    images, labels = train.take(indices)
    assert (images.dtype, images.shape) == (torch.uint8, (3, 1, 8, 8))
    assert (labels.dtype, labels.tolist()) == (torch.int64, train.labels[indices].tolist())
    np.testing.assert_array_equal(images.numpy(), train.images[indices])
    images.zero_()  # writable, and its own memory
    assert train.images[5].any()


def test_take_nothing_and_take_too_much() -> None:
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


@pytest.mark.parametrize(
    ("name", "folder", "mean", "std", "mirror"),
    [("mnist", "MNIST", 0.1307, 0.3081, False), ("fashion-mnist", "FashionMNIST", 0.2860, 0.3530, True)],
)
def test_real_mnist(name: str, folder: str, mean: float, std: float, mirror: bool) -> None:
    dataset = open_dataset(name, DATASETS[name](), real_data(folder), download=False)
    assert (len(dataset.train), len(dataset.test)) == (60_000, 10_000)
    assert (dataset.channels, dataset.size, dataset.classes, dataset.mirror) == (1, (28, 28), 10, mirror)
    assert dataset.mean == pytest.approx((mean,), abs=5e-5)  # as everyone quotes them
    assert dataset.std == pytest.approx((std,), abs=5e-5)
    assert set(dataset.train.labels) == set(range(10))
    if name == "fashion-mnist":
        assert np.bincount(dataset.train.labels).tolist() == [6000] * 10


# --- the cache ---


def test_a_dataset_is_decoded_once_for_each_set_of_options(counted: Counted) -> None:
    for _ in range(3):
        open_dataset("counted", counted)
    assert counted.times_read() == 1
    other = open_dataset("counted", Counted(counted.log, shade=8))
    assert counted.times_read() == 2
    assert (other.train.images == 8).all()


PEER = """
import sys, time
from pathlib import Path
import numpy as np
from dataclasses import dataclass
from p2pfl.data import Decoded, Source, open_dataset

@dataclass(frozen=True)
class Slow(Source):
    def read(self, root):
        with open(sys.argv[1], "a") as log:
            print("read", file=log)
        time.sleep(1)
        images, labels = np.zeros((4, 1, 2, 2), np.uint8), np.zeros(4, np.int64)
        return Decoded(images, labels, images, labels, classes=1, mirror=False)

print("ready", flush=True)
sys.stdin.readline()
print(len(open_dataset("slow", Slow()).train))
"""


def test_processes_that_start_together_decode_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PEER, str(tmp_path / "log")]
    pipe = subprocess.PIPE
    peers = [subprocess.Popen(command, cwd=REPOSITORY, stdin=pipe, stdout=pipe, text=True) for _ in range(3)]
    for peer in peers:
        assert peer.stdout is not None
        assert peer.stdout.readline() == "ready\n"
    for peer in peers:  # all at once, with torch imported
        assert peer.stdin is not None
        peer.stdin.write("go\n")
        peer.stdin.flush()
    assert [peer.communicate(timeout=200)[0] for peer in peers] == ["4\n"] * 3
    assert (tmp_path / "log").read_text() == "read\n"


def test_a_decoded_dataset_is_opened_without_heavy_imports() -> None:
    digits()
    script = """if True:
        import sys
        from p2pfl.data import DATASETS, open_dataset
        from p2pfl.models import build
        open_dataset("digits", DATASETS["digits"]())
        for peer in range(4):
            build("tiny4", peer, 1, (8, 8), 10)
        print([name for name in ("sklearn", "torchvision", "kornia") if name in sys.modules])
    """
    run = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True)
    assert run.stdout == "[]\n", run.stderr


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
        ("about.json", truncate),
        ("about.json", empty),
        ("about.json", Path.unlink),
    ],
)
def test_a_damaged_cache_is_rebuilt(cache: Path, counted: Counted, file: str, damage: Callable[[Path], None]) -> None:
    open_dataset("counted", counted)
    [path] = cache.glob(f"counted-*/{file}")
    damage(path)
    dataset = open_dataset("counted", counted)
    assert counted.times_read() == 2
    assert dataset.train.images.shape == (6, 1, 2, 3)
    assert (dataset.train.images == 7).all()
    open_dataset("counted", counted)
    assert counted.times_read() == 2


def test_a_map_outlives_the_rebuilding_of_its_cache(cache: Path, counted: Counted) -> None:
    dataset = open_dataset("counted", counted)
    [path] = cache.glob("counted-*/about.json")
    path.unlink()
    open_dataset("counted", counted)
    assert (dataset.train.images == 7).all()


def test_what_a_killed_build_left_behind_is_cleared_away(cache: Path, counted: Counted) -> None:
    open_dataset("counted", counted)
    [entry] = cache.glob("counted-*/")
    entry.rename(cache / f".{entry.name}.building")
    open_dataset("counted", counted)
    assert sorted(path.name for path in cache.iterdir()) == [entry.name, "counted.lock"]


def test_a_changed_source_is_decoded_anew(tmp_path: Path) -> None:
    raw = write_mnist(tmp_path)
    assert open_mnist(tmp_path).train.images[3, 0, 0, 0] == 3
    (raw / "train-images-idx3-ubyte").write_bytes(idx(np.full((20, 28, 28), 9)))
    assert open_mnist(tmp_path).train.images[3, 0, 0, 0] == 9


def test_an_unwritable_cache_is_named_with_its_remedy(
    tmp_path: Path, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("P2PFL_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DataError, match=r"cannot be written: Not a directory; set \$P2PFL_CACHE"):
        open_dataset("counted", counted)


def test_roots_default_to_the_environment_and_then_to_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("P2PFL_CACHE")
    monkeypatch.delenv("P2PFL_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    write_mnist(tmp_path / "p2pfl" / "data")
    assert len(open_dataset("mnist", DATASETS["mnist"](), download=False).train) == 20
    assert list((tmp_path / "p2pfl" / "decoded").glob("mnist-*/about.json"))
    monkeypatch.setenv("P2PFL_DATA", str(tmp_path / "elsewhere"))
    with pytest.raises(DataError, match="elsewhere"):
        open_dataset("mnist", DATASETS["mnist"](), download=False)


# --- sources ---


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST"), ("fashion-mnist", "FashionMNIST")])
def test_mnist_files_are_used_where_they_lie(tmp_path: Path, name: str, folder: str, packed: bool) -> None:
    raw = write_mnist(tmp_path, folder, packed)
    before = sorted(raw.iterdir())
    dataset = open_dataset(name, DATASETS[name](), tmp_path, download=False)
    assert (dataset.train.images.shape, len(dataset.test)) == ((20, 1, 28, 28), 10)
    assert dataset.train.images[:, 0, 5, 7].tolist() == list(range(20))
    assert dataset.train.labels.tolist() == list(range(10)) * 2
    assert sorted(raw.iterdir()) == before


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("keep", [0, 3, 10, 500])
def test_a_truncated_source_is_named(tmp_path: Path, packed: bool, keep: int) -> None:
    raw = write_mnist(tmp_path, packed=packed)
    [path] = raw.glob("t10k-images*")
    os.truncate(path, min(keep, path.stat().st_size - 1))
    with pytest.raises(DataError, match=f"{path}.*truncated"):
        open_mnist(tmp_path)


def test_a_source_of_another_kind_is_named(tmp_path: Path) -> None:
    raw = write_mnist(tmp_path)
    path = raw / "train-images-idx3-ubyte"
    path.write_bytes(b"<html>404 Not Found, and quite a few more bytes</html>")
    with pytest.raises(DataError, match=f"{path}: not an IDX file"):
        open_mnist(tmp_path)


def test_images_without_labels_are_an_error(tmp_path: Path) -> None:
    raw = write_mnist(tmp_path)
    (raw / "train-labels-idx1-ubyte").write_bytes(idx(np.arange(19) % 10))
    with pytest.raises(DataError, match="mnist: 20 training images but 19 labels"):
        open_mnist(tmp_path)


def test_a_label_out_of_range_is_an_error(tmp_path: Path) -> None:
    raw = write_mnist(tmp_path)
    (raw / "t10k-labels-idx1-ubyte").write_bytes(idx(np.arange(10) + 1))
    with pytest.raises(DataError, match="mnist: test labels from 1 to 10, but 10 classes"):
        open_mnist(tmp_path)


def test_a_missing_source_says_what_where_and_how(tmp_path: Path) -> None:
    raw = write_mnist(tmp_path)
    (raw / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError) as caught:
        open_mnist(tmp_path)
    message = str(caught.value)
    assert f"missing train-labels-idx1-ubyte; looked in {raw}." in message
    assert "data.root or $P2PFL_DATA to the folder that holds MNIST/raw/, or set data.download: true" in message


def test_a_missing_source_is_downloaded_if_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mnist, "download", lambda self, root: write_mnist(root))
    assert len(open_mnist(tmp_path, download=True).train) == 20


def test_a_failed_download_says_why_and_what_else_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Mnist, root: Path) -> None:
        raise RuntimeError("no\nnetwork")

    monkeypatch.setattr(Mnist, "download", fail)
    with pytest.raises(DataError, match=r"missing.*looked in.*data\.root.*downloading it failed: no network$"):
        open_mnist(tmp_path, download=True)


def test_a_download_that_brings_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mnist, "download", lambda self, root: None)
    with pytest.raises(DataError, match="did not bring train-images"):
        open_mnist(tmp_path, download=True)


@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST"), ("fashion-mnist", "FashionMNIST")])
def test_torchvision_downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, folder: str) -> None:
    def fetch(root: Path, download: bool) -> None:
        assert download
        write_mnist(root, folder)

    monkeypatch.setattr(f"torchvision.datasets.{folder}", fetch)
    assert len(open_dataset(name, DATASETS[name](), tmp_path, download=True).train) == 20
