"""How many samples the peers of a run have, and for how many epochs they train: computed, without the dataset."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

HOLD_OUT = ("shards", "groups", "dirichlet-train", "iid-train")
"""Partitions that hold out a fifth for validation by default."""

IMAGES: Mapping[str, tuple[int, int]] = {
    "digits": (1442, 10),
    "mnist": (60_000, 10),
    "fashion-mnist": (60_000, 10),
    "usps": (7_291, 10),
    "svhn": (73_257, 10),
    "cifar10": (50_000, 10),
    "cifar10-part": (30_000, 10),
    "cifar100": (50_000, 100),
    "flowers102": (8_189, 102),
    "caltech101": (6_941, 101),
    "oxford-pets": (3_680, 37),
    "stanford-cars": (8_144, 196),
    "CINIC-10": (90_000, 10),
    "mini-imagenet": (50_000, 100),
    "tiny-imagenet-200": (100_000, 200),
    "OfficeHome": (2_728, 65),
    "Adaptiope": (8_610, 123),
}
"""Training images and classes of a dataset, or of the folder that it is in; of OfficeHome and Adaptiope the mean of
their styles, of which 30 % of the images are for testing."""

MERGED: Mapping[str, int] = {
    "mnist": 70_000,
    "fashion-mnist": 70_000,
    "cifar10": 60_000,
    "cifar10-part": 35_000,
    "cifar100": 60_000,
    "flowers102": 8_189,
    "tiny-imagenet-200": 100_000,
}
"""Training and test images together, as FedTGP's partitions distribute them; of Tiny-ImageNet the training images."""


def _images(dataset: Any) -> tuple[int, int]:
    """Return the number of training images, and of classes."""
    named: Mapping[str, Any] = {"name": dataset} if isinstance(dataset, str) else dataset
    inner = named.get("of")
    if isinstance(inner, list):
        parts = [_images(part) for part in inner]
        return sum(images for images, _ in parts), parts[0][1]
    return _images(inner) if inner is not None else IMAGES[_folder(named)]


def _folder(named: Mapping[str, Any]) -> str:
    return Path(named.get("path", named["name"])).parts[0]


def _merged(dataset: Any) -> int:
    named: Mapping[str, Any] = {"name": dataset} if isinstance(dataset, str) else dataset
    return _merged(named["of"]) if "of" in named else MERGED[_folder(named)]


def samples(tree: Mapping[str, Any]) -> float:
    """Return the mean number of training samples of a peer."""
    images, classes = _images(tree["data"]["dataset"])
    partition, peers = tree["data"]["partition"], tree["peers"]
    partition = {"name": partition} if isinstance(partition, str) else partition
    left: float = 1.0 - partition.get("validation", 0.2 if partition["name"] in HOLD_OUT else 0.0)
    if partition["name"] == "clusters":
        per_class = partition.get("per_class", 300)
        per_class = fmean(per_class) if isinstance(per_class, list | tuple) else per_class
        return float(per_class * (classes + partition.get("overlap", 0)) / partition.get("clusters", 2) * left)
    if partition["name"] in ("pathological", "dirichlet"):
        return float(_merged(tree["data"]["dataset"]) * (1.0 - partition.get("test", 0.25)) * left / peers)
    if "shards" in partition:
        return float(images / classes / partition["shards"] * partition.get("classes_per_peer", 2) * left)
    if "per_class" in partition:
        return float(partition["per_class"] * classes / partition.get("groups", 1) * left)
    return float(partition.get("per_peer", images / peers * left))


def active(tree: Mapping[str, Any]) -> float:
    """Return the mean number of peers that train in a round."""
    algorithm = tree["algorithm"]
    aggregated = algorithm["name"] in ("dfml", "fedavg-dec", "fedprox-dec", "fml-dec", "heterofl", "fedrolex")
    return float(algorithm.get("participation", 0.5 if aggregated else 1.0) * tree["peers"] + aggregated)


def local_epochs(tree: Mapping[str, Any]) -> float:
    """Return how many epochs a peer trains on its samples in the whole run, on average."""
    algorithm = tree["algorithm"]
    five = algorithm["name"] in ("l2c", "meta-l2c", "fedstyle") or algorithm["name"].endswith("-ssl")
    per_round = algorithm.get("local_epochs", 5 if five else 1)
    if per_round is None:
        per_round = algorithm.get("local_steps", 1) * algorithm["batch"] / samples(tree)
    return float(tree["rounds"] * active(tree) / tree["peers"] * per_round)
