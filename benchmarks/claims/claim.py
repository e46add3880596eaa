"""What a claim is, and how a run is played for it."""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from p2pfl import checkpoint, metrics
from p2pfl.config import from_dict
from p2pfl.runfolder import Result, RunFolder
from p2pfl.simulate import simulate

Figures = Mapping[str, float]

RUN_ID = "0" * 16


@dataclass(frozen=True)
class Claim:
    """Something that a paper says will come out, as a check on real data.

    Attributes:
        name: short.
        paper: where it says so: "Fig. 4", "Table 8".
        expects: the expectation in words, with the comparison that ``holds`` makes.
        measure: seed to named figures.
        holds: whether one seed's figures bear the claim out.
    """

    name: str
    paper: str
    expects: str
    measure: Callable[[int], Figures]
    holds: Callable[[Figures], bool]


@dataclass(frozen=True)
class Played:
    """A run that was simulated: how its peers ended, what they recorded, and what state they ended in.

    States are whole models, and claims share many runs: they stay on disk until ``forget``.
    """

    results: list[Result]
    all_records: list[list[dict[str, Any]]]
    folder: RunFolder
    place: tempfile.TemporaryDirectory[str]

    def records(self, peer: int) -> list[dict[str, Any]]:
        """The peer's records, one per round; the form is that of p2pfl/metrics.py."""
        return self.all_records[peer]

    def state(self, peer: int) -> dict[str, Any]:
        """The method's state after the last round."""
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

    def measure(self, name: str) -> float:
        """Mean over peers of another measure of the method, after the last round, in percent."""
        return 100.0 * fmean(result.measures[name] for result in self.results)

    def curve(self, read: Callable[[dict[str, Any]], float]) -> list[float]:
        """Mean over peers of what ``read`` takes from their records, round by round."""
        return [fmean(map(read, records)) for records in zip(*self.all_records, strict=True)]

    def messages(self, kind: str) -> int:
        """Messages of a kind that all peers sent."""
        return sum(kinds.get(kind, [0])[0] for result in self.results for kinds in result.out.values())

    def bytes_sent(self) -> int:
        """Payload of all messages of all peers."""
        return sum(entry[1] for result in self.results for kinds in result.out.values() for entry in kinds.values())

    def weights(self) -> list[dict[int, float]]:
        """Each peer's last row of mixing weights."""
        return [{int(j): w for j, w in (result.weights or {}).items()} for result in self.results]


_played: dict[str, Played] = {}


def played(seed: int, **keys: Any) -> Played:
    """Simulate the run file with these keys; the same keys again return the same run without playing it again."""
    tree = {"name": "claim", "device": "cpu", **keys, "seed": seed}
    key = json.dumps(tree, sort_keys=True)
    if key not in _played:
        _played[key] = _play(tree)
    return _played[key]


def forget() -> None:
    """Give up all runs played so far, and their folders."""
    for run in _played.values():
        run.place.cleanup()
    _played.clear()


def _play(tree: dict[str, Any]) -> Played:
    run = from_dict(tree)
    place = tempfile.TemporaryDirectory(prefix="p2pfl-claim-")
    folder = RunFolder.create(Path(place.name) / "run", range(run.peers))
    folder.write_about({"id": RUN_ID})
    folder.run_file.write_text(run.to_yaml(), encoding="utf-8")
    results = simulate(run, folder)
    gc.collect()  # sessions are cycles, and hold models
    return Played(results, [metrics.read(peer.metrics) for peer in folder.peers()], folder, place)
