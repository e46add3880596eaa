"""The run files of the papers' settings load, and their partitions can be made."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from p2pfl.config import load
from p2pfl.data import Labelled
from p2pfl.errors import RunFileError
from p2pfl.models import architecture, build
from p2pfl.session import load_data

FILES = sorted((Path(__file__).resolve().parents[2] / "topologies" / "paper").glob("*.yaml"))

each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)

SIZES = {
    "fashion-mnist": (10, 6000, 1000),
    "cifar10": (10, 5000, 1000),
    "cifar100": (100, 500, 100),
    "flowers102": (102, 20, 60),
    "tiny-imagenet-200": (200, 500, 50),
    "mini-imagenet": (100, 500, 100),
    "mnist": (10, 6000, 1000),
    "svhn": (10, 7300, 2600),
    "usps": (10, 729, 201),
    "OfficeHome": (65, 40, 17),
}
"""Classes of a dataset, and its training and test images per class, about."""

SHAPES = {"fashion-mnist": (1, 28), "mnist": (1, 28), "tiny-imagenet-200": (3, 64), "mini-imagenet": (3, 84)}
"""Channels and pixels a side, where they are not those of CIFAR."""


def test_every_papers_settings_are_there() -> None:
    names = {path.stem for path in FILES}
    assert names >= {f"mapl-sc{number}-{models}" for number in range(1, 5) for models in ("hetero", "homo")}
    assert names >= {"l2c-cifar10", "l2c-cifar100", "l2c-miniimagenet", "l2c-groups"}
    for dataset in ("fmnist", "cifar10", "cifar100", "flowers102", "tiny-imagenet"):
        assert names >= {f"fedtgp-pathological-{dataset}", f"fedtgp-practical-{dataset}"}
    assert names >= {f"dfml-n{peers}-{kind}" for peers in (10, 50, 100) for kind in ("iid", "niid")} | {"dfml-bridge"}
    assert names >= {f"fedtgp-practical-cifar100-{group}" for group in ("htfe2", "htfe3", "htfe4", "htfe9", "htc4")}
    modes = ("h0", "h1-cnn", "h1-resnet", "h1-vit", "h2-efficientnet")
    assert names >= {f"dfml-n10-niid-{mode}" for mode in modes}
    assert names >= {"fedstyle-digits-1", "fedstyle-digits-10", "fedstyle-styled"}


@each_file
def test_it_is_good_and_named_like_its_file(path: Path) -> None:
    assert load(path).name == path.stem


def made_up(dataset: dict[str, object]) -> Labelled:
    """Labels like those of the dataset, without its images."""
    name = dataset["name"]
    if name in ("styled", "styles"):
        inner = dataset["of"] if isinstance(dataset["of"], list) else [dataset["of"]] * int(str(dataset["styles"]))
        parts = [made_up(one) for one in inner]
        share = len(parts) if name == "styled" else 1
        halves = [(part.train[: len(part.train) // share], part.test[: len(part.test) // share]) for part in parts]
        train, test = (np.concatenate(labels) for labels in zip(*halves, strict=True))
        styles = [np.repeat(np.arange(len(parts)), [len(half[i]) for half in halves]) for i in range(2)]
        return Labelled(train, test, parts[0].classes, *styles)
    key = Path(str(dataset["path"])).parts[0] if name == "folder" else str(name)
    classes, train_each, test_each = SIZES[key]
    return Labelled(np.arange(classes * train_each) % classes, np.arange(classes * test_each) % classes, classes)


@each_file
def test_its_partition_fits_a_dataset_of_that_size(path: Path) -> None:
    run = load(path)
    shares = run.partition.split(made_up(run.resolved()["data"]["dataset"]), run.peers, run.seed)
    assert len(shares) == run.peers
    assert all(len(share.train) for share in shares)
    assert all(len(share.test) for share in shares)


@each_file
def test_its_models_can_be_built_for_images_of_that_size(path: Path) -> None:
    run = load(path)
    dataset = run.resolved()["data"]["dataset"]
    key = Path(str(dataset["path"])).parts[0] if dataset["name"] == "folder" else dataset["name"]
    channels, pixels = SHAPES.get(key, (3, 32))
    first = {architecture(run.file.models.name, peer): peer for peer in reversed(range(run.peers))}
    for peer in first.values():
        with torch.device("meta"):  # shapes only: nothing is allocated or drawn
            model = build(run.file.models.name, peer, channels, (pixels, pixels), 10, run.file.models.features)
            assert model.eval()(torch.zeros(2, channels, pixels, pixels)).shape == (2, 10)


@each_file
def test_its_partition_can_be_made_of_the_real_dataset(
    path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One cache for all of these, as each of the datasets is in several files.
    monkeypatch.setenv("P2PFL_CACHE", str(tmp_path_factory.getbasetemp() / "decoded-for-papers"))
    run = load(path, ["data.download=false"])
    try:
        _, shares = load_data(run)
    except RunFileError as error:
        if ": missing " not in str(error):
            raise
        pytest.skip(str(error))
    assert len(shares) == run.peers
