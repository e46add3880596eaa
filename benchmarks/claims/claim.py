"""The definition of a claim, and simulated runs to measure it on."""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from p2pfl.run_file.load import from_dict
from p2pfl.session import checkpoint, metrics
from p2pfl.session.run_folder import Result, RunFolder
from p2pfl.session.simulate import simulate

Figures = Mapping[str, float]

RUN_ID = "0" * 16


@dataclass(frozen=True)
class Claim:
    """A result stated by a paper, as a check on real data.

    Attributes:
        name: a short sentence.
        paper: where the paper states it: "Fig. 4", "Table 8".
        expects: the expectation, with the comparison that ``holds`` makes.
        measure: from a seed to named figures.
        holds: whether the figures of one seed support the claim.
    """

    name: str
    paper: str
    expects: str
    measure: Callable[[int], Figures]
    holds: Callable[[Figures], bool]


@dataclass(frozen=True)
class SimulatedRun:
    """Results, records and final states of a simulated run.

    States are whole models and claims share many runs, so they stay on disk until ``forget``.
    """

    results: list[Result]
    all_records: list[list[dict[str, Any]]]
    folder: RunFolder
    scratch: tempfile.TemporaryDirectory[str]

    def records(self, peer: int) -> list[dict[str, Any]]:
        """Return the peer's records, one per round, as p2pfl/session/metrics.py writes them."""
        return self.all_records[peer]

    def state(self, peer: int) -> dict[str, Any]:
        """Return the algorithm's state after the last round."""
        saved = checkpoint.load(self.folder.peer(peer).checkpoint, RUN_ID, peer)
        assert saved is not None
        state: dict[str, Any] = saved["algorithm"]
        return state

    @property
    def accuracy(self) -> float:
        """Mean over peers of the last personal accuracy, in percent."""
        return 100.0 * fmean(result.accuracy for result in self.results if result.accuracy is not None)

    @property
    def best(self) -> float:
        """Mean over peers of the best personal accuracy, in percent."""
        return 100.0 * fmean(result.best for result in self.results if result.best is not None)

    def extra_metric(self, name: str) -> float:
        """Mean over peers of one of the algorithm's extra metrics after the last round, in percent."""
        return 100.0 * fmean(result.extra_metrics[name] for result in self.results)

    def curve(self, read: Callable[[dict[str, Any]], float]) -> list[float]:
        """Mean over peers of ``read(record)``, by round."""
        return [fmean(map(read, records)) for records in zip(*self.all_records, strict=True)]

    def messages(self, kind: str) -> int:
        """Return the number of messages of a kind that all peers sent."""
        return sum(kinds.get(kind, [0])[0] for result in self.results for kinds in result.sent.values())

    def bytes_sent(self) -> int:
        """Return the payload bytes of all messages."""
        return sum(entry[1] for result in self.results for kinds in result.sent.values() for entry in kinds.values())

    def weights(self) -> list[dict[int, float]]:
        """Return each peer's last row of mixing weights."""
        return [{int(j): w for j, w in (result.weights or {}).items()} for result in self.results]


_runs: dict[str, SimulatedRun] = {}


def simulated(seed: int, **keys: Any) -> SimulatedRun:
    """Simulate the run file with these keys, or return the run if it was simulated before."""
    tree = {"name": "claim", "device": "cpu", **keys, "seed": seed}
    key = json.dumps(tree, sort_keys=True)
    if key not in _runs:
        _runs[key] = _simulate(tree)
    return _runs[key]


def forget() -> None:
    """Delete all runs and their folders."""
    for run in _runs.values():
        run.scratch.cleanup()
    _runs.clear()


def _simulate(tree: dict[str, Any]) -> SimulatedRun:
    run = from_dict(tree)
    scratch = tempfile.TemporaryDirectory(prefix="p2pfl-claim-")
    folder = RunFolder.create(Path(scratch.name) / "run", range(run.peers))
    folder.write_info({"id": RUN_ID})
    folder.run_file.write_text(run.to_yaml(), encoding="utf-8")
    results = simulate(run, folder)
    gc.collect()  # sessions are reference cycles that hold models
    return SimulatedRun(results, [metrics.read(peer.metrics) for peer in folder.peers()], folder, scratch)
