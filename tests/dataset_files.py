"""Small files in the layouts of the real datasets; in most, n is the color of image n."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from p2pfl.data import DATASETS, Dataset, open_dataset
from p2pfl.data.loaders.cifar import Cifar10
from p2pfl.data.loaders.digits import Svhn
from p2pfl.data.loaders.image_files import Flowers102


def opened(name: str, root: Path, **options: object) -> Dataset:
    return open_dataset(name, DATASETS[name].parse(options), root, download=False)


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()


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
