"""Vectors, series and tokens: from .npz files and tables to network input, and through whole runs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from p2pfl.data import DATASETS, Dataset, open_dataset
from p2pfl.errors import DataError, P2pflError, RunFileError
from p2pfl.inputs import Tokens, describe, kind_of, shape_of, varied, zeros
from p2pfl.models import build
from p2pfl.options import OptionErrors
from p2pfl.run_file.load import load
from p2pfl.session.build import load_data
from p2pfl.simulation.simulate import simulate
from tests.launcher_fixtures import Invoke
from tests.support import peer_data

RUN = """\
name: other
peers: 2
rounds: 2
data:
  dataset: {name: npz, path: data.npz}
  partition: {name: iid-train, validation: 0.25}
models: MODELS
algorithm: {name: ALGORITHM}
device: cpu
"""

NETS = """\
from torch import nn


class Net(nn.Module):
    def __init__(self, num_classes, in_features):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(in_features, 4), nn.ReLU())
        self.fc = nn.Linear(4, num_classes)

    def forward(self, x):
        return self.fc(self.body(x))


class Bag(nn.Module):
    def __init__(self, num_classes, vocab_size):
        super().__init__()
        self.words = nn.EmbeddingBag(vocab_size, 4)
        self.fc = nn.Linear(4, num_classes)

    def forward(self, x):
        return self.fc(self.words(x))


class Images(Net):
    def __init__(self, num_classes):
        super().__init__(num_classes, 64)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("P2PFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def opened(name: str, **options: object) -> Dataset:
    return open_dataset(name, DATASETS[name].parse(options), Path.cwd(), download=False)


def vectors(count: int) -> np.ndarray:
    stream = np.random.default_rng(count)
    return stream.normal([100.0, 0.0, 7.0], [10.0, 1.0, 0.0], (count, 3))


def series(count: int) -> np.ndarray:
    return np.random.default_rng(count).normal(5, 2, (count, 2, 9))


def tokens(count: int) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 7, (count, 5))


Make = Callable[[int], np.ndarray]


def save(make: Make, **changes: np.ndarray) -> None:
    arrays = {"x_train": make(40), "y_train": np.arange(40) % 2, "x_test": make(20), "y_test": np.arange(20) % 2}
    np.savez("data.npz", allow_pickle=False, **(arrays | changes))


# ---- shapes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("channels", "size", "kind", "text"),
    [
        (3, (32, 16), "images", "images of 3x32x16"),
        (2, (9,), "series", "series of 2x9"),
        (8, (), "vectors", "vectors of 8 numbers"),
        (7, Tokens((5,)), "tokens", "sequences of 5 tokens out of 7"),
    ],
)
def test_size_tells_the_kind_of_inputs(channels: int, size: tuple[int, ...], kind: str, text: str) -> None:
    assert (kind_of(size), describe(channels, size)) == (kind, text)
    batch = zeros(4, channels, size)
    assert batch.shape == (4, *shape_of(channels, size))
    assert batch.dtype == (torch.int64 if kind == "tokens" else torch.float32)
    assert len(set(varied(4, channels, size).flatten().tolist())) == (7 if kind == "tokens" else batch.numel())


# ---- npz -----------------------------------------------------------------------------------------------------


def test_vectors_are_normalized_by_the_training_split() -> None:
    save(vectors)
    dataset = opened("npz", path="data.npz")
    x = vectors(40).astype(np.float32)
    assert dataset.train.images.dtype == np.float32
    assert np.array_equal(dataset.train.images, x)
    assert dataset.mean == pytest.approx(x.mean(0, dtype=np.float64))
    assert dataset.std == pytest.approx([*x.std(0, dtype=np.float64)[:2], 1.0])  # the third number is constant
    data = peer_data(dataset, test=range(20))
    inputs, _ = next(iter(data.sweep(data.test)))
    expected = (vectors(20).astype(np.float32) - x.mean(0)) / np.array([*x.std(0)[:2], 1.0])
    assert np.allclose(inputs, expected, atol=1e-5)
    assert abs(float(inputs[:, 0].mean())) > 1e-3  # the statistics are not those of the test split


def test_series_are_normalized_per_channel() -> None:
    save(series)
    dataset = opened("npz", path="data.npz")
    assert (dataset.channels, dataset.size) == (2, (9,))
    assert dataset.mean == pytest.approx(series(40).mean((0, 2)), rel=1e-5)
    data = peer_data(dataset)
    batch, _ = next(data.batches(40, np.random.default_rng(0)))
    x = data.input(batch, augmented=True)
    assert x.mean((0, 2)).abs().max() < 1e-5
    assert torch.allclose(x.std((0, 2), correction=0), torch.ones(2), atol=1e-4)


def test_tokens_stay_integers() -> None:
    save(tokens)
    dataset = opened("npz", path="data.npz")
    assert (dataset.channels, dataset.size, dataset.mean) == (7, Tokens((5,)), ())
    assert opened("npz", path="data.npz", vocabulary=100).channels == 100
    data = peer_data(dataset)
    batch, _ = next(data.batches(40, np.random.default_rng(0)))
    assert data.input(batch, augmented=False) is batch
    assert batch.dtype == torch.int64


@pytest.mark.parametrize("make", [vectors, series, tokens])
def test_merged_samples_keep_their_type(make: Make) -> None:
    save(make)
    dataset = opened("npz", path="data.npz")
    taken, labels = dataset.pool.take(np.array([0, 45]))
    assert np.array_equal(taken, np.stack([dataset.train.images[0], dataset.test.images[5]]))
    assert labels.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (vectors, {"x_train": np.full((40, 3), np.nan)}, "inputs contain NaN or infinity"),
        (vectors, {"x_test": np.zeros((20, 4))}, "inputs have different shapes"),
        (vectors, {"x_test": np.zeros((20, 3), int)}, "training inputs are float32, but test inputs int64"),
        (tokens, {"x_test": np.full((20, 5), -1)}, "tokens range from -1 to -1, but the vocabulary is 7"),
        (
            vectors,
            {"x_train": np.zeros((40, 3), np.uint8)},
            r"uint8 \[40, 3\]; expected images .* or tokens as integers",
        ),
        (
            vectors,
            {"w_train": np.arange(39), "w_test": np.arange(20)},
            r"w has \(39, 20\) values .* \(40, 20\) samples",
        ),
        (vectors, {"w_train": np.zeros(40), "w_test": np.zeros(20)}, "w is float64 .* expected integers or text"),
    ],
)
def test_wrong_arrays_are_errors(make: Make, changes: dict[str, np.ndarray], message: str) -> None:
    save(make, **changes)
    with pytest.raises(DataError, match=message):
        opened("npz", path="data.npz")


@pytest.mark.parametrize(
    ("inputs", "remedy"),
    [
        (np.array(["some text"] * 40), "text or lists: turn them into tokens"),
        (np.zeros((40, 3), complex), "complex numbers: pass real and imaginary parts"),
        (np.zeros((40, 3), "datetime64[s]"), "dates or records: turn them into numbers"),
        (np.zeros((40, 3), bool), r"booleans: .* array\.astype\('float32'\)"),
        (np.zeros(40), r"one number per sample: .* array\.reshape\(-1, 1\)"),
        (np.zeros((40, 3), np.uint8), "vectors or tokens as bytes: pass numbers as float32"),
        (np.zeros((40, 5, 8, 8, 3), np.uint8), "volumes or video: choose slices or frames"),
        (np.zeros((40, 8, 8, 8)), "volumes or video: choose slices or frames"),
        (np.zeros((40, 3, 8, 8), np.uint8), r"channels first: .* array\.transpose\(0, 2, 3, 1\)"),
        (np.zeros((40, 8, 8, 4), np.uint8), "transparency or more channels: keep 1 or 3"),
        (np.zeros((40, 8, 8, 3)), "images of floating-point numbers: scale them to 0 … 255"),
        (np.zeros((40, 1, 8, 8)), "images of floating-point numbers: scale them to 0 … 255"),
        (np.zeros((40, 8, 8), np.uint16), "images of more than 8 bits: scale them to 0 … 255"),
    ],
)
def test_arrays_of_other_inputs_are_refused_with_a_remedy(inputs: np.ndarray, remedy: str) -> None:
    save(vectors, x_train=inputs)
    with pytest.raises(DataError, match=rf"data\.npz: x_train is .*; expected .*\. These look like .*{remedy}"):
        opened("npz", path="data.npz")


# ---- models and runs -----------------------------------------------------------------------------------------


def run_file(make: Make, models: str, algorithm: str = "fedproto", *, more: str = "") -> Path:
    save(make)
    Path("nets.py").write_text(NETS)
    Path("run.yaml").write_text(RUN.replace("MODELS", models).replace("ALGORITHM", algorithm) + more)
    return Path("run.yaml")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("make", "models", "algorithm"),
    [
        (vectors, "mlp-8-4", "dpsgd"),
        (vectors, "[mlp-8-4, nets.Net]", "mapl, warmup: 1"),
        (vectors, "nets.Net", "fedtgp"),
        (vectors, "mlp-8", "meta-l2c"),
        (series, "[conv1d-6-4, nets.Net]", "fedproto"),
        (series, "[conv1d-6-4, mlp-4]", "fedtgp"),
        (series, "conv1d-4-4-4", "dfml"),
        (tokens, "embedding-6", "fedavg"),
        (tokens, "[embedding-6-4, nets.Bag]", "fedproto"),
    ],
)
def test_runs_on_other_inputs(make: Make, models: str, algorithm: str) -> None:
    results = simulate(load(run_file(make, models, algorithm)))
    assert all(result.loss is not None and math.isfinite(result.loss) for result in results)
    again = simulate(load(Path("run.yaml")))
    assert [result.digest for result in again] == [result.digest for result in results]


def test_mean_embedding_ignores_padding() -> None:
    model = build("embedding-5", 0, 7, Tokens((3,)), 2).eval()
    batch = torch.tensor([[4, 0, 0], [4, 4, 0], [0, 0, 0]])
    features = model.backbone(batch)
    assert torch.allclose(features[0], features[1])
    assert features[2].tolist() == [0.0] * 5


@pytest.mark.parametrize(
    ("make", "models", "algorithm", "more", "message"),
    [
        (
            vectors,
            "tiny4",
            "local",
            "",
            "run.yaml:7: models.name: 'tiny-cnn' takes images, but the dataset has vectors of 3",
        ),
        (
            tokens,
            "mlp-8",
            "local",
            "",
            "run.yaml:7: models.name: mlp takes numbers, but the dataset has sequences of 5",
        ),
        (
            vectors,
            "conv1d-8",
            "local",
            "",
            "run.yaml:7: models.name: conv1d takes series, but the dataset has vectors",
        ),
        (
            series,
            "embedding-8",
            "local",
            "",
            "run.yaml:7: models.name: embedding takes tokens, but the dataset has series",
        ),
        (vectors, "nets.Images", "local", "", "for vectors of 3 numbers: RuntimeError: "),
        (series, "mlp-8", "fedstyle", "", "run.yaml:8: algorithm: fedstyle needs images, but npz has series of 2x9"),
    ],
)
def test_unsuitable_models_and_algorithms_are_refused_with_the_line(
    make: Make, models: str, algorithm: str, more: str, message: str
) -> None:
    with pytest.raises(P2pflError) as caught:
        load_data(load(run_file(make, models, algorithm, more=more)))
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["mapl", "simclr"])
def test_augmentations_of_images_are_refused_for_other_inputs(name: str) -> None:
    run_file(vectors, "mlp-8")
    text = Path("run.yaml").read_text().replace("  partition", f"  augment: {name}\n  partition")
    Path("run.yaml").write_text(text)
    with pytest.raises(RunFileError) as caught:
        load_data(load(Path("run.yaml")))
    expected = f"run.yaml:6: data.augment: {name!r} varies images, but npz has vectors of 3 numbers; use none"
    assert str(caught.value) == expected


@pytest.mark.parametrize("name", ["mapl", "simclr"])
def test_changes_of_colors_are_refused_for_images_that_are_neither_gray_nor_rgb(make_run: Any, name: str) -> None:
    data = {"dataset": {"name": "synthetic", "channels": 2, "train": 100, "test": 50}, "augment": name}
    run = make_run(data=data, algorithm="local")
    with pytest.raises(RunFileError, match=f"{name}' varies colors, but images of synthetic have 2 channels"):
        load_data(run)


def test_styles_of_images_that_are_neither_gray_nor_rgb_are_refused() -> None:
    with pytest.raises(DataError, match="synthetic: styles need gray or RGB images, but it has 2 channels"):
        opened("styled", of={"name": "synthetic", "channels": 2})


def test_seeds_of_datasets_are_not_negative() -> None:
    for name, given in (("synthetic", {}), ("styled", {"of": "synthetic"})):
        with pytest.raises(OptionErrors, match="should be greater than or equal to 0"):
            DATASETS[name].parse({**given, "seed": -1})


def test_styles_of_other_inputs_are_refused() -> None:
    save(vectors)
    with pytest.raises(DataError, match=r"npz: styles need images, but it has \[3\] inputs"):
        opened("styled", of={"name": "npz", "path": "data.npz"})


def test_data_show_describes_the_inputs(invoke: Invoke) -> None:
    outcome = invoke("data", "show", run_file(tokens, "embedding-8"), "--json")
    described = json.loads(outcome.stdout)["dataset"]
    assert (described["shape"], described["inputs"]) == ([5], "sequences of 5 tokens out of 7")
