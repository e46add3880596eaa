"""Seconds of a round of peers that share a GPU, against one process that does the peers' work in turn."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import yaml

from benchmarks.bench import measuring, runs
from benchmarks.bench.measuring import Measurement, RunTree
from benchmarks.bench.report import Report, Table, known
from benchmarks.bench.settings import Settings
from benchmarks.bench.work import column, in_turns, ratios
from launcher.backends.mps import CONTROL
from p2pfl.session.gpus import find_gpus

TOPOLOGIES = Path(__file__).parents[2] / "topologies"
PLUGIN = Path(__file__).parents[1] / "claims" / "claim_data.py"
AT_ONCE = (1, 4, 20)
"""Peers that compute on the GPU at the same time."""
ROUNDS = 3
"""The first and the last do not count."""
STEPS = runs.WORK["W1"]._replace(rounds=20)
TIMEOUT = 150.0
"""Seconds of the longest run: all of them should take less than ten minutes."""


def gpu(settings: Settings) -> Report:
    """MAPL's Scenario 1 at the paper's size: 20 peers with four architectures on one GPU."""
    if len(found := find_gpus()) > 1:
        raise click.UsageError(f"{len(found)} GPUs: set CUDA_VISIBLE_DEVICES to one of them")
    tree = _quick() if settings.quick else _paper_size()
    ways: dict[str, tuple[int, bool]] = {f"{n} at once": (n, False) for n in AT_ONCE}
    if shutil.which(CONTROL):
        ways |= {f"{n} at once, MPS": (n, True) for n in AT_ONCE[1:]}
    in_turn = "one process, peers in turn"
    systems = {in_turn: partial(measuring.simulate, tree, timeout=TIMEOUT)}
    for way, (at_once, mps) in ways.items():
        shared = {**tree, "gpu": {"peers_per_gpu": at_once, "mps": mps}}
        systems[way] = partial(measuring.launch, shared, timeout=TIMEOUT)
    launched = _table("peers", in_turns(systems, settings))
    step = {**runs.work("W1", runs.QUICK["W1"] if settings.quick else STEPS), "device": "cuda"}
    passes = {
        way: partial(measuring.launch, {**step, "gpu": {"cuda_graphs": on}}, timeout=TIMEOUT)
        for way, on in (("eager", False), ("CUDA graphs", True))
    }
    replayed = _table("W1: passes", in_turns(passes, settings))
    images = "part of CIFAR-10" if "plugins" in tree else "generated"
    text = (
        f"{', '.join(device.name for device in found)}; images: {images}. MAPL's Scenario 1 at the paper's size "
        f"(`topologies/paper/mapl-sc1-hetero.yaml`: {tree['peers']} peers, four architectures, 24 steps of two views "
        "of 64 images a round), all peers on one GPU. A round is the mean without the first and the last. One "
        "process is `p2pfl simulate`, which trains the peers in turn; the others are `p2pfl launch` with one process "
        "per peer, of which so many compute at once (`gpu.peers_per_gpu`), also under NVIDIA's Multi-Process Service "
        "(`gpu.mps`). Below, W1 of [side by side](#side-by-side) on the GPU, with `gpu.cuda_graphs` and without."
    )
    return Report("gpu", "A round on one GPU", text, [launched, replayed])


def _table(what: str, found: Mapping[str, Sequence[Measurement]]) -> Table:
    """Return the seconds of a round of each way, and their ratio to the first way."""
    table = Table({what: "", "s a round": ".2f", "ratio to the first row": ".2f", "failure": ""})
    seconds = {
        way: column(measured, lambda one: measuring.seconds_a_round(one.rounds, skip=1))
        for way, measured in found.items()
    }
    first = next(iter(seconds.values()))
    for way, times in seconds.items():
        failure = next((one.failure for one in found[way] if one.failure), "")
        table.add(way, known(times), ratios(times, first), failure)
    return table


def _paper_size() -> RunTree:
    tree: dict[str, Any] = yaml.safe_load((TOPOLOGIES / "paper" / "mapl-sc1-hetero.yaml").read_text())
    part = (Path(os.environ.get("P2PFL_DATA", "")) / "cifar10-part").is_dir()
    synthetic = {"name": "synthetic", "size": 32, "train": 30_000, "test": 5_000}
    data = {**tree["data"], "dataset": "cifar10-part" if part else synthetic}
    plugins = {"plugins": [str(PLUGIN)]} if part else {}
    return {**tree, **plugins, "data": data, "rounds": ROUNDS, "device": "cuda", "eval_every": 1000}


def _quick() -> RunTree:
    tree: dict[str, Any] = yaml.safe_load((TOPOLOGIES / "quick4.yaml").read_text())
    return {**tree, "device": "cuda", "eval_every": 1000}
