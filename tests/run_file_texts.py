"""A good run file as text, loaded with changes, and the names that error messages list."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2pfl.algorithms import ALGORITHMS
from p2pfl.errors import RunFileError
from p2pfl.graphs import GRAPHS
from p2pfl.run_file.load import load
from p2pfl.run_file.run import Run

GOOD = """\
name: good
seed: 1
rounds: 3
peers: 4
graph: ring
data:
  dataset: digits
  partition: {name: clusters, clusters: 2}
models: tiny4
algorithm: {name: mapl, warmup: 2}
device: cpu
"""

SMALLEST = """\
name: smallest
rounds: 1
peers: 2
graph: complete
data: {dataset: digits, partition: {name: iid, per_peer: 20}}
models: tiny-cnn
algorithm: fedavg
"""
"""A run of a second, for tests of what surrounds it."""

TOP = (
    "name, seed, rounds, peers, graph, data, models, algorithm, aggregation, gradient, synchrony, plugins, joins_at, "
    "codec, adversaries, transport, chaos, time, "
    "device, gpu, threads, slots, eval_every, global_test, metrics, masked_test, checkpoint_every, "
    "checkpoint_copies, track, report, out"
)
GRAPH_NAMES = ", ".join(GRAPHS)
MODEL_NAMES = (
    "dfml-h0, dfml-h1-cnn, dfml-h1-resnet, dfml-h1-vit, dfml-h2-cnn, dfml-h2-efficientnet, htc4, htcnn8, htfe2, "
    "htfe3, htfe4, htfe8, htfe8-htc4, htfe9, mapl4, tiny4, the members of each "
    "(`p2pfl models` lists them), mlp-WIDTH-…, conv1d-WIDTH-… and embedding-WIDTH-…, "
    "or an import path such as my_nets.Net"
)


def read(text: str, *sets: str) -> Run:
    """Load run.yaml with this text and these --set flags."""
    Path("run.yaml").write_text(text, encoding="utf-8")
    return load(Path("run.yaml"), sets)


def problems(text: str, *sets: str) -> list[str]:
    """The lines of the error message."""
    with pytest.raises(RunFileError) as info:
        read(text, *sets)
    return str(info.value).splitlines()


def changed(old: str, new: str) -> str:
    assert GOOD.count(old) == 1
    return GOOD.replace(old, new)


def hyper_names(name: str) -> str:
    return ", ".join(ALGORITHMS[name].Hyper.known())
