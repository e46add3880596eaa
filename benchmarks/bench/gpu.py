"""Seconds of a round of peers that share a GPU, against one process that does the peers' work in turn."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import click
import yaml

from benchmarks.bench import measuring
from benchmarks.bench.measuring import RunTree
from benchmarks.bench.report import Report, Table, median_of, ratio
from benchmarks.bench.settings import Settings
from launcher.backends.mps import CONTROL
from p2pfl.session.gpus import find_gpus

TOPOLOGIES = Path(__file__).parents[2] / "topologies"
PLUGIN = Path(__file__).parents[1] / "claims" / "claim_data.py"
AT_ONCE = (1, 4, 20)
"""Peers that compute on the GPU at the same time."""


def gpu(settings: Settings) -> Report:
    """MAPL's Scenario 1 at the paper's size: 20 peers with four architectures on one GPU."""
    if len(found := find_gpus()) > 1:
        raise click.UsageError(f"{len(found)} GPUs: set CUDA_VISIBLE_DEVICES to one of them")
    tree = _quick() if settings.quick else _paper_size()
    ways: dict[str, tuple[int, bool]] = {f"{n} at once": (n, False) for n in AT_ONCE}
    if shutil.which(CONTROL):
        ways |= {f"{n} at once, MPS": (n, True) for n in AT_ONCE[1:]}
    in_turn, seconds = "one process, peers in turn", dict[str, list[float]]()
    failures: dict[str, str] = {}
    for turn in range(settings.turns):
        for way in (in_turn, *ways):
            settings.progress(f"turn {turn}: {way}")
            if way == in_turn:
                measured = measuring.simulate(tree)
            else:
                at_once, mps = ways[way]
                measured = measuring.launch({**tree, "gpu": {"peers_per_gpu": at_once, "mps": mps}})
            took = None if measured.failure else measuring.seconds_a_round(measured.rounds, skip=1)
            seconds.setdefault(way, []).extend([] if took is None else [took])
            failures[way] = measured.failure or failures.get(way, "")
    table = Table({"peers": "", "s a round": ".2f", "of one process": ".2f", "failure": ""})
    for way, times in seconds.items():
        table.add(way, [*times], ratio(median_of(times), median_of(seconds[in_turn])), failures[way])
    images = "part of CIFAR-10" if "plugins" in tree else "generated"
    text = (
        f"{', '.join(device.name for device in found)}; images: {images}. MAPL's Scenario 1 at the paper's size "
        f"(`topologies/paper/mapl-sc1-hetero.yaml`: {tree['peers']} peers, four architectures, 24 steps of two views "
        "of 64 images a round), all peers on one GPU. A round is the mean without the first and the last. One "
        "process is `p2pfl simulate`, which trains the peers in turn; the others are `p2pfl launch` with one process "
        "per peer, of which so many compute at once (`gpu.peers_per_gpu`), also under NVIDIA's Multi-Process Service "
        "(`gpu.mps`)."
    )
    return Report("gpu", "A round on one GPU", text, [table])


def _paper_size() -> RunTree:
    tree: dict[str, Any] = yaml.safe_load((TOPOLOGIES / "paper" / "mapl-sc1-hetero.yaml").read_text())
    part = (Path(os.environ.get("P2PFL_DATA", "")) / "cifar10-part").is_dir()
    synthetic = {"name": "synthetic", "size": 32, "train": 30_000, "test": 5_000}
    data = {**tree["data"], "dataset": "cifar10-part" if part else synthetic}
    plugins = {"plugins": [str(PLUGIN)]} if part else {}
    return {**tree, **plugins, "data": data, "rounds": 5, "device": "cuda", "eval_every": 1000}


def _quick() -> RunTree:
    tree: dict[str, Any] = yaml.safe_load((TOPOLOGIES / "quick4.yaml").read_text())
    return {**tree, "device": "cuda", "eval_every": 1000}
