"""For the authors of plug-ins: does a run over sockets end with the same bits as the same run simulated?

from p2pfl.testing import check_parity

def test_my_method():
    check_parity("mine.yaml", rounds=3, crash=True)
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from p2pfl.api import PlannedRun, RecordedRun, load
from p2pfl.session.determinism import deterministic
from p2pfl.session.metrics import MEASURED

__all__ = ["check_parity"]

JITTER = 0.02
"""Maximum seconds by which messages are delayed, so that they arrive in another order."""


def check_parity(
    run: PlannedRun | str | os.PathLike[str] | Mapping[str, Any], *, crash: bool = False, **overrides: Any
) -> None:
    """Simulate a run, launch it with random delays, and compare everything that must be equal.

    If the rounds of the run do not wait for one another (``synchrony``), it is launched first, and then replayed.

    Args:
        run: a run, or an argument of ``p2pfl.load``.
        crash: also kill every peer once (``kill -9``): an attribute that is missing in ``Algorithm.state`` shows.
        overrides: other values for keys, as in ``p2pfl.load``.

    Raises:
        AssertionError: naming the first difference.
        P2pflError: the run failed.
    """
    with tempfile.TemporaryDirectory(prefix="p2pfl-parity-") as folder:
        planned = run if isinstance(run, PlannedRun) else load(run, **{"device": "cpu", **overrides})
        if planned.settings["device"] == "cuda":
            raise ValueError("results on a GPU are not reproducible bit by bit: load the run with device='cpu'")
        if isinstance(run, PlannedRun) and overrides:
            raise TypeError("give overrides to p2pfl.load, which made this run")
        chaos: dict[str, Any] = {"link": {"jitter": JITTER}}
        if crash:
            chaos["kill"] = [{"round": planned.settings["rounds"] // 2}]

        faults = {"chaos": chaos, "checkpoint_every": 1, "device": "cpu"}

        def simulate(replay: RecordedRun | None = None) -> RecordedRun:
            with deterministic(strictly=False, fill=True):  # uninitialized memory, if it is read, makes a difference
                return planned.simulate(Path(folder) / "simulated", replay=replay)

        def launch(source: Path | Mapping[str, Any]) -> RecordedRun:
            with load(source, **faults).launch(Path(folder) / "launched") as running:
                return running.wait()

        if planned.settings.get("synchrony") is None:
            simulated = simulate()
            launched = launch(simulated.folder / "run.yaml")
        else:
            launched = launch(planned.settings)
            simulated = simulate(launched)
        difference = first_difference(simulated, launched)
    assert difference is None, difference


def first_difference(simulated: RecordedRun, launched: RecordedRun) -> str | None:
    """Describe the first difference between two finished runs, apart from times; None if they are equal."""
    counts = ("phase", "rounds_done", "sent", "received", "weights", "missing")
    fields = (*counts, "accuracy", "metrics", "extra_metrics", "digest")
    results = zip(simulated.results(), launched.results(), strict=True)
    records = list(simulated.records()), list(launched.records())
    if len(records[0]) != len(records[1]):
        return f"{len(records[1])} rounds of all peers are recorded, but {len(records[0])} simulated"
    for one, other in zip(*records, strict=True):
        for key in {**one, **other}:
            if key not in MEASURED and one.get(key) != other.get(key):
                return (
                    f"peer {one['peer']}, round {one['t']}: {key} is {other.get(key)}, but {one.get(key)} simulated"
                )
    for mine, theirs in results:
        for key in fields:
            if getattr(mine, key) != getattr(theirs, key):
                found, expected = getattr(theirs, key), getattr(mine, key)
                return f"peer {mine.peer}, at the end: {key} is {found}, but {expected} simulated"
    return None
