"""Run files with the papers' settings load; their partitions and models can be built."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from p2pfl.data import DatasetLabels
from p2pfl.errors import RunFileError
from p2pfl.models import architecture, build
from p2pfl.run_file.load import load
from p2pfl.session.build import load_data

pytestmark = pytest.mark.exhaustive

FILES = sorted((Path(__file__).resolve().parents[3] / "topologies" / "paper").glob("*.yaml"))

each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)

SIZES = {
    "fashion-mnist": (10, 6000, 1000),
    "cifar10": (10, 5000, 1000),
    "cifar100": (100, 500, 100),
    "flowers102": (102, 20, 60),
    "tiny-imagenet-200": (200, 375, 125),
    "mini-imagenet": (100, 500, 100),
    "mnist": (10, 6000, 1000),
    "svhn": (10, 7300, 2600),
    "usps": (10, 729, 201),
    "OfficeHome": (65, 40, 17),
    "Adaptiope": (123, 70, 30),
    "caltech101": (101, 69, 17),
}
"""Number of classes of a dataset, and approximately its training and test images per class."""

SHAPES = {
    "fashion-mnist": (1, 28),
    "mnist": (1, 28),
    "tiny-imagenet-200": (3, 64),
    "mini-imagenet": (3, 84),
    "caltech101": (3, 224),
}
"""Channels and side length, where they differ from CIFAR's 3 and 32."""


def test_every_papers_settings_have_a_run_file() -> None:
    names = {path.stem for path in FILES}
    assert names >= {f"mapl-sc{number}-{models}" for number in range(1, 5) for models in ("hetero", "homo")}
    assert names >= {"l2c-cifar10", "l2c-cifar100", "l2c-miniimagenet", "l2c-groups"}
    for dataset in ("fmnist", "cifar10", "cifar100", "flowers102", "tiny-imagenet"):
        assert names >= {f"fedtgp-pathological-{dataset}", f"fedtgp-practical-{dataset}"}
    assert names >= {f"dfml-n{peers}-{kind}" for peers in (10, 50, 100) for kind in ("iid", "niid")} | {"dfml-bridge"}
    assert names >= {
        f"fedtgp-practical-cifar100-{group}" for group in ("htfe2", "htfe3", "htfe4", "htfe9", "htc4", "htfe8-htc4")
    }
    assert names >= {f"dfml-n50-niid-{mode}" for mode in ("h0", "h1-cnn", "h1-resnet", "h1-vit")}
    assert names >= {"dfml-n10-niid-h2-efficientnet"}
    assert names >= {"fedstyle-digits-1", "fedstyle-digits-10", "fedstyle-styled"}
    assert names >= {f"fedstyle-{data}-{peers}" for data in ("office-home", "adaptiope") for peers in (1, 5)}


@each_file
def test_run_file_is_valid_and_named_after_its_file(path: Path) -> None:
    assert load(path).name == path.stem


def synthetic_labels(dataset: dict[str, Any]) -> DatasetLabels:
    """Return labels with about the dataset's class counts, without images."""
    name = dataset["name"]
    if name in ("styled", "styles"):
        inner = dataset["of"] if isinstance(dataset["of"], list) else [dataset["of"]] * int(str(dataset["styles"]))
        parts = [synthetic_labels(part) for part in inner]
        n = len(parts) if name == "styled" else 1
        halves = [(part.train[: len(part.train) // n], part.test[: len(part.test) // n]) for part in parts]
        train, test = (np.concatenate(labels) for labels in zip(*halves, strict=True))
        styles = [np.repeat(np.arange(len(parts)), [len(half[i]) for half in halves]) for i in range(2)]
        return DatasetLabels(train, test, parts[0].classes, styles[0], styles[1])
    key = Path(str(dataset["path"])).parts[0] if name == "folder" else str(name)
    classes, train_each, test_each = SIZES[key]
    return DatasetLabels(np.arange(classes * train_each) % classes, np.arange(classes * test_each) % classes, classes)


@each_file
def test_partition_fits_a_dataset_of_that_size(path: Path) -> None:
    run = load(path)
    subsets = run.partition.split(synthetic_labels(run.resolved()["data"]["dataset"]), run.peers, run.seed)
    assert len(subsets) == run.peers
    assert all(len(subset.train) for subset in subsets)
    assert all(len(subset.test) for subset in subsets)


@cache
def check_model(name: str, channels: int, pixels: int, features: int | None) -> None:
    """Build one architecture; many files use the same ones."""
    with torch.device("meta"):  # shapes only: nothing is allocated or drawn
        model = build(name, 0, channels, (pixels, pixels), 10, features)
        assert model.eval()(torch.zeros(2, channels, pixels, pixels)).shape == (2, 10)


@each_file
def test_models_can_be_built_for_images_of_that_size(path: Path) -> None:
    run = load(path)
    dataset = run.resolved()["data"]["dataset"]
    key = Path(str(dataset["path"])).parts[0] if dataset["name"] == "folder" else dataset["name"]
    channels, pixels = SHAPES.get(key, (3, 32))
    group = run.file.models.group
    for peer in range(run.peers):
        features = run.file.models.features or group.features
        check_model(architecture(group, peer), channels, pixels, features)


@each_file
def test_partition_can_be_made_of_the_real_dataset(
    path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One cache for all cases: several files use the same dataset.
    monkeypatch.setenv("P2PFL_CACHE", str(tmp_path_factory.getbasetemp() / "decoded-for-papers"))
    run = load(path, ["data.download=false"])
    try:
        _, subsets = load_data(run)
    except RunFileError as error:
        if ": missing " not in str(error):
            raise
        pytest.skip(str(error))
    assert len(subsets) == run.peers


def rows() -> Iterator[tuple[str, str]]:
    """Yield the start of the names of run files, and a command of their table in the README beside them."""
    prefix = ""
    for line in (FILES[0].parent / "README.md").read_text(encoding="utf-8").splitlines():
        if found := re.search(r"`(mapl|l2c|fedtgp|dfml|fedstyle)-", line):
            prefix = found[1]
        if line.startswith("    p2pfl launch FILE"):
            yield prefix, line.strip()


@pytest.mark.parametrize(("prefix", "command"), list(rows()), ids=str)
def test_every_row_of_a_papers_table_loads(prefix: str, command: str) -> None:
    words = shlex.split(command)
    sets = [value for option, value in pairwise(words) if option == "--set"]
    sets += [f"rounds={value}" for option, value in pairwise(words) if option == "--rounds"]
    homogeneous = any(name in command for name in ("mapl+", "dfedavgm", "pfedsim", "flt", "{name: fedavg, optimizer"))
    files = [path for path in FILES if path.stem.startswith(f"{prefix}-") and path.stem != "l2c-groups"]
    chosen = [path for path in files if not homogeneous or path.stem.endswith("-homo")]
    if "lg-fedavg" in command or "fedgen" in command:
        chosen = [path for path in chosen if not path.stem.endswith("htc4")]
    if "def-kt" in command:
        chosen = [path for path in chosen if path.stem.endswith("-h0")]
    if "heterofl" in command or "fedrolex" in command:
        chosen = [path for path in chosen if "-h1-" in path.stem]
    assert chosen
    for path in chosen:
        assert load(path, sets).name == path.stem
