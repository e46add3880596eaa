"""The algorithm of docs/extending.md learns, and is bit-identical over sockets, simulated, and after kill -9."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from p2pfl.algorithms import ALGORITHMS
from p2pfl.errors import RunFileError
from p2pfl.run_file.options import notes
from p2pfl.session import metrics
from p2pfl.session.simulate import simulate
from tests.processes.extending import module

PRELUDE = """
from p2pfl.algorithms import ALGORITHMS
from tests.processes.extending import module

ALGORITHMS._entries["best-heads"] = module().BestHeads
"""

RUN: dict[str, Any] = {
    "algorithm": {"name": "best-heads", "batch": 16, "lr": 0.03},
    "data": {"partition": {"name": "groups", "groups": 2, "per_class": 10, "validation": 0.3}},
    "models": "tiny4",
    "peers": 5,
    "rounds": 6,
    "checkpoint_every": 1,
}


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALGORITHMS._entries, "best-heads", module().BestHeads)


def outcome(results: Any) -> list[tuple[Any, ...]]:
    return [(r.peer, r.rounds_done, r.digest, r.sent, r.received, r.accuracy, r.weights, r.missing) for r in results]


def test_learns_and_averages_with_the_best_heads(make_run: Any, prepare: Any, tmp_path: Path) -> None:
    run = make_run(**RUN)
    folder = prepare(tmp_path / "run", run)
    for result in simulate(run, folder):
        assert {kind for kinds in result.sent.values() for kind in kinds} == {"Head"}
        assert result.weights is not None
        assert sorted(result.weights.values()) == [1 / 3] * 3  # the local head and the two best
        assert str(result.peer) in map(str, result.weights)
        losses = [record["loss"]["ce"] for record in metrics.read(folder.peer(result.peer).metrics)]
        assert losses[-1] < 0.7 * losses[0]


def test_is_bit_identical_over_sockets_after_a_crash_and_simulated(
    make_run: Any, prepare: Any, altered_warm: Any, hold: Any, until: Any, tmp_path: Path
) -> None:
    run = make_run(**RUN, chaos={"link": {"jitter": 0.02}})
    folder = prepare(tmp_path / "run", run)
    hold(folder, 3)
    pids = altered_warm.start(folder)
    until(lambda: all((status := files.status()) and status.rounds_done == 3 for files in folder.peers()))
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
    altered_warm.wait(pids)
    hold(folder, None)
    assert altered_warm.run(folder) == dict.fromkeys(range(run.peers), 0)
    assert all("resumed t=3" in files.log.read_text() for files in folder.peers())
    assert outcome(files.result() for files in folder.peers()) == outcome(simulate(run))


def test_options_have_descriptions_and_limits(make_run: Any) -> None:
    assert all(note.text for note in notes(module().Hyper))
    with pytest.raises(RunFileError, match=r"algorithm\.smoothing: .*less than 1"):
        make_run(**{**RUN, "algorithm": {"name": "best-heads", "smoothing": 1}})


def test_ties_go_to_the_lower_id() -> None:
    assert module().lowest({3: 0.5, 1: 0.5, 2: 0.1, 0: 0.0}, [3, 2, 1], 2) == [2, 1]
