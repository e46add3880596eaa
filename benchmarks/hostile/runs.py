"""Simulate runs with attackers, each once: finished ones are read from a file."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterable
from pathlib import Path
from time import process_time
from typing import Any

import click
import numpy as np

import p2pfl

Settings = dict[str, Any]


class Results:
    """The results of runs, by their keys, in the lines of a JSON file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._found: dict[str, dict[str, Any]] = {}
        if file.exists():
            for line in file.read_text(encoding="utf-8").splitlines():
                result = json.loads(line)
                self._found[result["key"]] = result

    def has(self, key: str) -> bool:
        """Return whether a run has been simulated."""
        return key in self._found

    def items(self) -> Iterable[tuple[str, dict[str, Any]]]:
        return self._found.items()

    def of(self, key: str, settings: Settings) -> dict[str, Any]:
        """Return the result of a run, which is simulated unless it has been."""
        if key not in self._found:
            self._found[key] = {"key": key, **_simulate(settings)}
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(self._found[key]) + "\n")
            click.echo(f"{key}: {self._found[key]['accuracy']:.3f}, {self._found[key]['cpu_s']:.0f} s", err=True)
        return self._found[key]


def _simulate(settings: Settings) -> dict[str, Any]:
    """Return the accuracy of the honest peers on their test samples after the last round, and CPU seconds.

    Of methods that keep a peak model (DFML), that is the one to use.
    """
    began = process_time()
    with tempfile.TemporaryDirectory(prefix="p2pfl-hostile-") as scratch:
        if "shares" in settings["data"]:
            indices = Path(scratch, "indices.json")
            indices.write_text(json.dumps(settings["data"]["shares"]), encoding="utf-8")
            partition = {"name": "indices", "file": str(indices)}
            settings = settings | {"data": {"dataset": settings["data"]["dataset"], "partition": partition}}
        run = p2pfl.load(settings).simulate(Path(scratch, "run"))
        hostile = {peer for entry in settings.get("adversaries", ()) for peer in entry["peers"]}
        last = [r for r in run.records() if r["t"] == settings["rounds"] - 1 and r["peer"] not in hostile]
    accuracies = {r["peer"]: (r.get("extra_metrics") or {}).get("peak", r["personal"])["accuracy"] for r in last}
    return {
        "accuracy": statistics.fmean(accuracies.values()),
        "peers": accuracies,
        "cpu_s": round(process_time() - began, 1),
    }


def shares_by_similarity(
    labels: np.ndarray, honest: int, others: int, gamma: float, seed: int
) -> list[dict[str, list[int]]]:
    """Divide samples among honest peers: a fraction γ at random, the rest sorted by label, in equal parts.

    The data of the other peers are drawn at random from all.
    """
    stream = np.random.default_rng(seed)
    order = stream.permutation(len(labels))
    even, rest = np.split(order, [round(gamma * len(labels))])
    rest = rest[np.argsort(labels[rest], kind="stable")]
    parts = zip(np.array_split(even, honest), np.array_split(rest, honest), strict=True)
    shares = [np.concatenate(part) for part in parts]
    shares += [stream.choice(len(labels), len(labels) // honest, replace=False) for _ in range(others)]
    return [{"train": sorted(map(int, share))} for share in shares]


def mean_and_deviation(values: Iterable[float]) -> str:
    found = list(values)
    deviation = statistics.stdev(found) if len(found) > 1 else 0.0
    return f"{statistics.fmean(found):.2f} ± {deviation:.2f}"
