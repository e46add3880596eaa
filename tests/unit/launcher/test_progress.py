"""Progress displays."""

from __future__ import annotations

import io
import os
import sys
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from rich.console import Console

from launcher import formatting
from launcher.facts.snapshot import Snapshot
from launcher.formatting.console import make_console
from launcher.views import progress
from launcher.views.progress import Clock, Display, LineProgress, LiveProgress, print_run_path, progress_on
from p2pfl.run_folder.folder import Status
from tests.launcher_fixtures import MakeFolder


def snapshot(*done: int, rounds: int = 10, waiting_for: tuple[int, ...] = ()) -> Snapshot:
    statuses = [Status(peer, 1, "training", count, count, bytes_out=500) for peer, count in enumerate(done)]
    statuses[-1].waiting_for = list(waiting_for)
    return Snapshot(len(done), rounds, statuses)


def output(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


class FakeTime:
    def __init__(self) -> None:
        self.now = 100.0
        self.used = 0.0

    def monotonic(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.used


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    monkeypatch.setattr(progress, "time", fake)
    return fake


def console(**options: Any) -> Console:
    return Console(file=io.StringIO(), markup=False, highlight=False, **options)


def test_a_snapshot_reads_the_status_files(make_folder: MakeFolder) -> None:
    folder = make_folder(peers=3, results={0: {"accuracy": 0.5}, 1: {"rounds_done": 1}, 2: None})
    found = Snapshot.take(folder, range(3), 3)
    assert found.done == [3, 1, 0]
    assert found.fraction == pytest.approx(4 / 9)
    assert found.accuracy == 0.5
    assert found.phases == {"finished": 2, "starting": 1}


def test_what_earlier_processes_of_starting_peers_did_is_not_shown(make_folder: MakeFolder) -> None:
    folder = make_folder(peers=2, results={0: {"accuracy": 0.5, "phase": "stopped"}})
    found = Snapshot.take(folder, range(2), 3, lambda status: status.peer == 0)
    assert found.phases == {"starting": 1, "finished": 1}
    assert (found.done, found.accuracy) == ([3, 3], 0.5)
    lines = LineProgress(console(width=80))
    lines.update(replace(found, statuses=found.statuses[:1], peers=1, rounds=4))
    assert "slowest: peer 0, starting" in output(lines._console)


def test_the_slowest_peer_is_one_that_computes() -> None:
    found = snapshot(3, 2, 2, waiting_for=(1,))
    assert found.slowest is not None
    assert found.slowest.peer == 1
    assert Snapshot(2, 10, []).slowest is None


def test_the_estimate_excludes_startup(time: FakeTime) -> None:
    clock = Clock()
    assert clock.remaining(0.0) is None
    time.now += 60  # importing, forking
    assert clock.remaining(0.1) is None
    time.now += 10
    assert clock.remaining(0.2) == pytest.approx(80)
    assert clock.elapsed == 70


def test_prints_a_line_after_each_tenth(time: FakeTime) -> None:
    out = console(width=160)
    with LineProgress(out) as lines:
        for done in (0, 5, 6, 10, 11, 19, 100):
            lines.update(snapshot(done, rounds=100))
        time.now += progress.LINE_INTERVAL
        lines.update(snapshot(100, rounds=100))
    assert [line.partition(" | ")[0] for line in output(out).splitlines()] == [
        "rounds 10/100", "rounds 100/100", "rounds 100/100"
    ]  # fmt: skip


def test_a_line_shows_rounds_accuracy_traffic_and_slowest_peer(time: FakeTime) -> None:
    out = console(width=160)
    lines = LineProgress(out)
    lines.update(snapshot(1, 1, 1, waiting_for=(0, 1)))
    assert output(out) == (
        "rounds 1/10 | accuracy – %, sent 1.5 kB | 0:00 elapsed | slowest: peer 0 in round 1, training\n"
    )


@pytest.mark.parametrize(("cost", "interval"), [(0.0001, progress.UPDATE_INTERVAL), (0.02, 2.0)])
def test_updates_take_at_most_one_percent_of_a_core(
    time: FakeTime, make_folder: MakeFolder, cost: float, interval: float
) -> None:
    updates: list[float] = []

    class Slow(LineProgress):
        def update(self, snapshot: Snapshot) -> None:
            updates.append(time.now)
            time.used += cost

    display = Display(Slow(console()), make_folder(), range(2), rounds=3)
    for _ in range(1000):
        display.update()
        time.now += 0.01
    gaps = [after - before for before, after in pairwise(updates)]
    assert min(gaps) >= interval
    assert max(gaps) < interval + 0.02
    display.update(now=True)
    assert updates[-1] == time.now


def test_uses_a_live_display_on_terminals_only() -> None:
    assert isinstance(progress_on(console()), LineProgress)
    assert isinstance(progress_on(console(force_terminal=True)), LiveProgress)


def test_ignores_a_broken_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """After `p2pfl launch … | tee` and Ctrl-C, which ends tee, the peers must still be stopped."""
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        lines = progress_on(make_console())
        lines.print("stopping")
        lines.print("killing")


def test_the_live_display(time: FakeTime) -> None:
    out = console(force_terminal=True, width=80, color_system=None)
    with LiveProgress(out) as live:
        live.update(snapshot(2, 4, 5, waiting_for=(0,)))
        live.print("stopping")
    shown = output(out)
    assert "rounds 3/10 (2 to 5)" in shown
    assert "peers: 3 training" in shown
    assert "slowest: peer 0 in round 2, training" in shown
    assert "stopping" in shown


def test_formats_numbers() -> None:
    assert [formatting.duration(s) for s in (0.4, 61, 3723)] == ["0:00", "1:01", "1:02:03"]
    assert [formatting.size(b) for b in (0, 999, 1000, 99_949, 99_951, 999_600, 5e13)] == [
        "0 B", "999 B", "1.0 kB", "99.9 kB", "100 kB", "1.0 MB", "50.0 TB"
    ]  # fmt: skip
    assert formatting.percent(0.97345) == "97.3"
    assert formatting.ids([3, 1, 2, 7, 9]) == "1-3 7 9"
    assert formatting.ids(range(0, 40, 2)) == "0 2 4 6 8 10 12 14 …"


def test_does_not_wrap_the_path_of_a_run(make_folder: MakeFolder) -> None:
    folder, out = make_folder(), console(width=20)
    print_run_path(folder, out)
    assert output(out) == f"run: {folder.root}\n"
