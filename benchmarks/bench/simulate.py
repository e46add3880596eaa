"""`p2pfl simulate` against a plain PyTorch loop, and against fluke: the same FedAvg in one process each."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.bench import measuring, runs
from benchmarks.bench.measuring import Measurement, RunTree
from benchmarks.bench.report import Goal, Report, Table, known, median_of
from benchmarks.bench.settings import Settings
from benchmarks.bench.work import OURS, column, cpu, in_turns, ratios, seconds
from p2pfl.run_file.load import load
from p2pfl.session.build import load_data

PROJECT = Path(__file__).parents[2]
PLAIN, FLUKE = "plain loop", "fluke"
OF_A_PLAIN_LOOP = 1.05
"""CPU seconds of the rounds, at most, per second of the plain loop."""


class Work(NamedTuple):
    """FedAvg on a complete graph: SGD, one epoch over ``samples`` samples of each peer, evaluation in every round."""

    peers: int
    samples: int
    rounds: int
    batch: int = 32
    lr: float = 0.01

    def run(self) -> RunTree:
        return {
            "name": "fedavg",
            "seed": 1,
            "rounds": self.rounds,
            "peers": self.peers,
            "graph": "complete",
            "data": {"dataset": runs.fashion_mnist(), "partition": {"name": "iid", "per_peer": self.samples}},
            "models": runs.CNN,
            "algorithm": {"name": "fedavg", "batch": self.batch, "lr": self.lr},
            "device": "cpu",
        }


FULL, QUICK = Work(20, 600, 6), Work(4, 64, 3)


def simulate(settings: Settings) -> Report:
    """FedAvg in one process, in turns with a plain loop."""
    work = QUICK if settings.quick else FULL
    tree = work.run()
    systems: dict[str, Callable[[], Measurement]] = {
        OURS: partial(measuring.simulate, tree),
        PLAIN: partial(_measure, work, [sys.executable, "-m", "benchmarks.bench.plain_fedavg"]),
    }
    if settings.fluke_python is not None:
        systems[FLUKE] = partial(_measure, work, [str(settings.fluke_python), "-m", "benchmarks.bench.fluke_fedavg"])
    found = in_turns(systems, settings)
    table = Table(
        {
            "FedAvg with": "",
            "CPU s of rounds": ".1f",
            "of the plain loop": ".3f",
            "CPU s in all": ".1f",
            "of the plain loop in all": ".3f",
            "seconds": ".1f",
        }
    )
    for name, measurements in found.items():
        rounds, plain = column(measurements, cpu_of_rounds), column(found[PLAIN], cpu_of_rounds)
        whole = cpu(measurements)
        in_all = (known(whole), ratios(whole, cpu(found[PLAIN])))
        table.add(name, known(rounds), ratios(rounds, plain), *in_all, known(seconds(measurements)))
    text = (
        f"FedAvg with {work.peers} peers on a complete graph in one process: `p2pfl simulate`, with the files of a "
        "run, and a plain PyTorch loop, which averages once a round and writes nothing. "
        f"`{runs.CNN}`, {work.samples} samples a peer, batches of {work.batch}, one epoch a round, {work.rounds} "
        "rounds, each with an evaluation on all test samples. The CPU seconds of rounds leave out the first round; "
        "those in all begin with the process. "
        f"Dataset: {runs.dataset_name()}."
    )
    report = Report("simulate", "Simulation", text, [table])
    ours = ratios(column(found[OURS], cpu_of_rounds), column(found[PLAIN], cpu_of_rounds))
    report.goal(Goal("simulate: CPU of a round, of a plain loop", median_of(ours), OF_A_PLAIN_LOOP), tree)
    return report


def cpu_of_rounds(measured: Measurement) -> float | None:
    """CPU seconds of the command from the end of the first round to the end of the last; None with fewer rounds."""
    count = min(map(len, measured.rounds), default=0)
    if measured.failure or count < 2:
        return None
    ends = [max(times[ended - 1] for times in measured.rounds) for ended in (1, count)]
    at, spent = zip(*measured.launcher, strict=True)
    first, last = np.interp(ends, at, spent)
    return float(last - first)


def _measure(work: Work, command: Sequence[str]) -> Measurement:
    """Run another program on the samples of the run."""
    with measuring.scratch_folder() as folder:
        _write_samples(work, folder)
        environment = {"PYTHONPATH": str(PROJECT)}
        return measuring.measure(
            [*command, str(folder)], folder, "rounds.log", " round done t=", environment=environment
        )


def _write_samples(work: Work, folder: Path) -> None:
    """Write the peers' samples as network input, and the settings, for `plain_fedavg.read`."""
    file = folder / "run.yaml"
    file.write_text(json.dumps(work.run()))
    dataset, subsets = load_data(load(file))
    mean, std = (np.array(values, np.float32).reshape(-1, 1, 1) for values in (dataset.mean, dataset.std))
    arrays: dict[str, npt.NDArray[np.generic]] = {}
    for k, subset in enumerate(subsets):
        for split, images, chosen in (
            ("train", dataset.train, subset.train),
            ("test", dataset.test, subset.test),
        ):
            x = (images.images[chosen].astype(np.float32) / 255 - mean) / std
            arrays[f"{split}_x_{k}"], arrays[f"{split}_y_{k}"] = x, images.labels[chosen]
    np.savez(folder / "samples.npz", **arrays)  # type: ignore[arg-type]
    (folder / "work.json").write_text(json.dumps(work._asdict()))
