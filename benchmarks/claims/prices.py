"""What runs at the papers' own size would cost: counted operations and steps, at a measured speed of training.

Training on an image costs three forward passes of its network, which are counted. On a GPU a step cannot take less
than the launches of its kernels, however small its batch, and most of the papers' batches are. Prices tell an hour
from a month, no more: on an H200, a step of MAPL's networks took one process five times as long as one of ResNet18,
and under MPS, twenty processes half as long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from p2pfl.models.cost import cost
from p2pfl.run_file.schema import Models

HOLD_OUT = ("shards", "groups", "dirichlet-train", "iid-train")
"""Partitions that hold out a fifth for validation by default."""

VIEWS: Mapping[str, int] = {
    **dict.fromkeys(("mapl", "mapl+", "fedclassavg"), 2),
    **dict.fromkeys([f"{name}-ssl" for name in ("fedavg", "fedper", "fedprox", "fedrep", "apfl", "ditto")], 2),
    "fedstyle": 4,
}
"""Augmented views of an image in a step; 1 for other methods."""

MODELS: Mapping[str, int] = dict.fromkeys(
    ("fml", "fml-dec", "fedkd", "ditto", "fedrep-ssl", "apfl-ssl", "ditto-ssl"), 2
)
"""Models that a peer trains, in turn or at once; 1 for other methods. FedRep trains parts of one in turn."""


@dataclass(frozen=True)
class Speed:
    """How fast a device trains.

    Attributes:
        flops: operations per second in batches of 64; on a GPU of 1,024, which keep it busy.
        step: least seconds of a step; 0 on a CPU, where nothing is launched.
    """

    flops: float
    step: float


CORE, GPU = Speed(46_720_334_552.0, 0.0), Speed(21_547_055_183_875.0, 0.008229415848684208)
"""Those of ResNet18 on 32x32 images, measured in November 2026 on a core of the study's host, and on an H200."""

SHAPES: Mapping[str, tuple[int, int, int, int]] = {
    "digits": (1, 8, 1442, 10),
    "mnist": (1, 28, 60_000, 10),
    "fashion-mnist": (1, 28, 60_000, 10),
    "usps": (1, 16, 7_291, 10),
    "svhn": (3, 32, 73_257, 10),
    "cifar10": (3, 32, 50_000, 10),
    "cifar10-part": (3, 32, 30_000, 10),
    "cifar100": (3, 32, 50_000, 100),
    "flowers102": (3, 64, 8_189, 102),
    "caltech101": (3, 64, 6_941, 101),
    "oxford-pets": (3, 64, 3_680, 37),
    "stanford-cars": (3, 64, 8_144, 196),
    "CINIC-10": (3, 32, 90_000, 10),
    "mini-imagenet": (3, 84, 50_000, 100),
    "tiny-imagenet-200": (3, 64, 100_000, 200),
    "OfficeHome": (3, 224, 2_728, 65),
    "Adaptiope": (3, 224, 8_610, 123),
}
"""Channels, side length, training images and classes of a dataset, or of the folder that it is in; of OfficeHome and
Adaptiope the mean of their styles, of which 30 % of the images are for testing."""

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


def _shape(dataset: Any) -> tuple[int, int, int, int]:
    named: Mapping[str, Any] = {"name": dataset} if isinstance(dataset, str) else dataset
    inner = named.get("of")
    if isinstance(inner, list):
        parts = [_shape(part) for part in inner]
        return 3, named.get("size", 32), sum(part[2] for part in parts), parts[0][3]
    if inner is not None:
        return _shape(inner)
    channels, side, images, classes = SHAPES[_folder(named)]
    return channels, named.get("size", side), images, classes


def _folder(named: Mapping[str, Any]) -> str:
    return Path(named.get("path", named["name"])).parts[0]


def _merged(dataset: Any) -> int:
    named: Mapping[str, Any] = {"name": dataset} if isinstance(dataset, str) else dataset
    return _merged(named["of"]) if "of" in named else MERGED[_folder(named)]


def samples(tree: Mapping[str, Any]) -> float:
    """Return the mean number of training samples of a peer."""
    _, _, images, classes = _shape(tree["data"]["dataset"])
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


def views(tree: Mapping[str, Any]) -> int:
    """Return how often a model is trained on an image in an epoch."""
    algorithm = tree["algorithm"]
    return 1 if algorithm.get("single_view") else VIEWS.get(algorithm["name"], 1)


def models(tree: Mapping[str, Any]) -> int:
    """Return how many models a peer trains, or of how many it computes the gradients."""
    name = tree["algorithm"]["name"]
    return 1 + int(tree["graph"]["degree"]) if name == "cga" else MODELS.get(name, 1)


def epochs(tree: Mapping[str, Any]) -> tuple[float, float]:
    """Return the epochs of all peers and models: of local training, and of DFML's mutual learning."""
    algorithm = tree["algorithm"]
    mutual = algorithm.get("mutual_epochs", 10) if algorithm["name"] == "dfml" else 0
    return tree["peers"] * local_epochs(tree) * models(tree), tree["rounds"] * active(tree) * mutual


def passes(tree: Mapping[str, Any]) -> float:
    """Return how many images all peers of a run train on, an image counting once for each view and for each model."""
    local, mutual = epochs(tree)
    return float(samples(tree) * (local * views(tree) + mutual))


@cache
def _forward(member: str, features: int | None, channels: int, side: int) -> int:
    return cost(member, channels, (side, side), 10, features).flops


def flops(members: Sequence[str], features: int | None, channels: int, side: int, peers: int) -> float:
    """Return the mean cost of one image's forward pass over the peers' networks, for ten classes."""
    return fmean(_forward(members[peer % len(members)], features, channels, side) for peer in range(peers))


def floating_point_operations(tree: Mapping[str, Any]) -> float:
    """Return the operations of a run's training."""
    networks = Models.model_validate(Models.from_value(tree["models"]))
    channels, side, *_ = _shape(tree["data"]["dataset"])
    forward = flops(networks.group.members, networks.features, channels, side, tree["peers"])
    return 3.0 * forward * passes(tree)


def steps(tree: Mapping[str, Any]) -> float:
    """Return the optimizer steps of all peers and models of a run; all views of an image are in one step."""
    return float(samples(tree) * sum(epochs(tree)) / tree["algorithm"].get("batch", 64))


def hours(tree: Mapping[str, Any], speed: Speed = GPU) -> float:
    """Return the hours that a run's training takes, one peer at a time."""
    return max(floating_point_operations(tree) / speed.flops, steps(tree) * speed.step) / 3600.0
