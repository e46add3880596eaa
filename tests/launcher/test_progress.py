from __future__ import annotations

import io
import os
import sys

import pytest
from rich.console import Console

from launcher import commands, progress, text
from launcher.progress import Clock, LineProgress, LiveProgress, progress_on, tell
from launcher.snapshot import Snapshot
from p2pfl.runfolder import Status


def snapshot(*done: int, rounds: int = 10, waiting_for: tuple[int, ...] = ()) -> Snapshot:
    statuses = [Status(peer, 1, "training", count, count, bytes_out=500) for peer, count in enumerate(done)]
    statuses[-1].waiting_for = list(waiting_for)
    return Snapshot(len(done), rounds, statuses)


class FakeTime:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch) -> FakeTime:
    fake = FakeTime()
    monkeypatch.setattr(progress, "time", fake)
    return fake


def console(**options: object) -> Console:
    return Console(file=io.StringIO(), markup=False, highlight=False, **options)


def test_a_snapshot_is_read_from_the_folder(make_folder):
    folder = make_folder(peers=3, results={0: {"accuracy": 0.5}, 1: {"rounds_done": 1}, 2: None})
    found = Snapshot.take(folder, range(3), 3)
    assert found.done == [3, 1, 0]
    assert found.fraction == pytest.approx(4 / 9)
    assert found.accuracy == 0.5
    assert found.phases == {"finished": 2, "starting": 1}


def test_the_slowest_peer_is_the_one_that_others_wait_for():
    found = snapshot(3, 2, 2, waiting_for=(1,))
    assert found.slowest is not None
    assert found.slowest.peer == 1
    assert Snapshot(2, 10, []).slowest is None


def test_the_estimate_leaves_out_the_start(time):
    clock = Clock()
    assert clock.left(0.0) is None
    time.now += 60  # importing, forking
    assert clock.left(0.1) is None
    time.now += 10
    assert clock.left(0.2) == pytest.approx(80)
    assert clock.elapsed == 70


def test_lines_come_with_each_tenth_and_not_more_often(time):
    out = console(width=160)
    with LineProgress(out) as lines:
        for done in (0, 5, 6, 10, 11, 19, 100):
            lines.update(snapshot(done, rounds=100))
        time.now += progress.LINE_EVERY
        lines.update(snapshot(100, rounds=100))
    assert [line.partition(" | ")[0] for line in out.file.getvalue().splitlines()] == [
        "rounds 10/100", "rounds 100/100", "rounds 100/100"
    ]  # fmt: skip


def test_a_line_says_what_matters(time):
    out = console(width=160)
    lines = LineProgress(out)
    lines.update(snapshot(1, 1, 1, waiting_for=(0, 1)))
    assert out.file.getvalue() == (
        "rounds 1/10 | accuracy – %, sent 1.5 kB | 0:00 elapsed | slowest: peer 0 in round 1, training\n"
    )


def test_a_terminal_gets_a_live_display_and_a_pipe_gets_lines():
    assert isinstance(progress_on(console()), LineProgress)
    assert isinstance(progress_on(console(force_terminal=True)), LiveProgress)


def test_nobody_who_reads_is_no_error(monkeypatch):
    """`p2pfl launch … | tee` and Ctrl-C, which ends tee: the peers are still to be stopped."""
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "w") as nobody:
        monkeypatch.setattr(sys, "stdout", nobody)
        lines = progress_on(commands._console())
        lines.say("stopping")
        lines.say("killing")


def test_the_live_display(time):
    out = console(force_terminal=True, width=80, color_system=None)
    with LiveProgress(out) as live:
        live.update(snapshot(2, 4, 5, waiting_for=(0,)))
        live.say("stopping")
    shown = out.file.getvalue()
    assert "rounds 3/10 (2 to 5)" in shown
    assert "peers: 3 training" in shown
    assert "slowest: peer 0 in round 2, training" in shown
    assert "stopping" in shown


def test_numbers_for_people():
    assert [text.duration(s) for s in (0.4, 61, 3723)] == ["0:00", "1:01", "1:02:03"]
    assert [text.size(b) for b in (0, 999, 1000, 99_949, 99_951, 999_600, 5e13)] == [
        "0 B", "999 B", "1.0 kB", "99.9 kB", "100 kB", "1.0 MB", "50.0 TB"
    ]  # fmt: skip
    assert text.percent(0.97345) == "97.3"
    assert text.ids([3, 1, 2, 7, 9]) == "1-3 7 9"
    assert text.ids(range(0, 40, 2)) == "0 2 4 6 8 10 12 14 …"


def test_a_runs_path_stays_in_one_line_however_narrow_the_terminal(make_folder):
    folder, out = make_folder(), console(width=20)
    tell(folder, out)
    assert out.file.getvalue() == f"run: {folder.root}\n"
