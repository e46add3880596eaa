"""Running a command and measuring it, and the figures that come from times of rounds."""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bench import measuring, procfs
from benchmarks.bench.measuring import (
    Measurement,
    all_after,
    cpu_fraction,
    cpu_until,
    log_times,
    recorded_cpu,
    seconds_a_round,
    seconds_a_round_alone,
    slope,
)
from benchmarks.bench.simulate import cpu_of_rounds

ROUNDS = [[1.0, 2.0, 4.0, 6.0, 9.0], [1.5, 2.5, 4.0, 6.5, 9.5]]
"""Two peers, five rounds."""


def test_a_round_is_a_mean_over_rounds_without_warm_up_and_evaluation() -> None:
    assert seconds_a_round(ROUNDS) == pytest.approx((6.5 - 2.5) / 2)
    assert seconds_a_round(ROUNDS, skip=1) == pytest.approx((6.5 - 1.5) / 3)


@pytest.mark.parametrize("rounds", [[], [[]], [[1.0, 2.0, 3.0]], [ROUNDS[0], [1.0]]])
def test_there_is_no_time_of_a_round_without_enough_rounds(rounds: list[list[float]]) -> None:
    assert seconds_a_round(rounds) is None


def test_a_round_without_neighbors_is_the_time_in_which_any_peer_was_in_it() -> None:
    in_turns = [[1.0, 2.0, 3.0, 4.0, 6.0], [1.5, 2.5, 3.5, 4.5, 6.5]]
    assert seconds_a_round_alone(in_turns) == pytest.approx((4.5 - 2.0) / 2)
    one_after_the_other = [in_turns[0], [7.0, 8.0, 9.0, 10.0, 12.0]]
    assert seconds_a_round_alone(one_after_the_other) == pytest.approx((2.0 + 2.0) / 2)
    assert seconds_a_round_alone([*in_turns, in_turns[0]]) == seconds_a_round_alone(in_turns)
    assert seconds_a_round_alone([times[:3] for times in in_turns]) is None
    assert seconds_a_round_alone([]) is None


def test_the_cpu_of_rounds_is_between_the_ends_of_the_first_and_the_last() -> None:
    measured = Measurement(launcher=[(0.0, 0.0), (10.0, 8.0)], rounds=[[1.0, 3.0, 5.0], [2.0, 4.0, 6.0]])
    assert cpu_of_rounds(measured) == pytest.approx(0.8 * (6.0 - 2.0))
    assert cpu_of_rounds(Measurement(rounds=[[1.0], [2.0]])) is None


def test_all_peers_are_in_a_round_when_the_last_one_is() -> None:
    assert all_after(ROUNDS, 1) == 1.5
    assert all_after([*ROUNDS, []], 1) is None
    assert all_after([], 1) is None


def test_the_cpu_of_a_round_is_the_slope_between_a_short_and_a_long_run() -> None:
    start, each = 2.5, 0.02  # CPU seconds of a run, and of a peer's round
    runs = slope(lambda tree: Measurement(cpu=start + each * tree["rounds"] * 4), {"rounds": 60, "peers": 4}, 10)
    assert runs.cpu == pytest.approx(each)
    assert runs.long.cpu == pytest.approx(start + 0.02 * 60 * 4)
    assert runs._replace(short=Measurement(failure="killed")).cpu is None
    assert runs._replace(short=Measurement(failure="killed")).failure == "killed"


def test_the_cpu_of_a_round_is_told_from_the_records_of_all_peers(tmp_path: Path) -> None:
    assert recorded_cpu(tmp_path) is None
    for peer, cpu in enumerate(([9.0, 9.0, 0.1, 0.2, 9.0], [9.0, 9.0, 0.3, 0.4, 9.0])):
        folder = tmp_path / "peers" / f"{peer:02d}"
        folder.mkdir(parents=True)
        lines = [json.dumps({"t": t, "cost": {"cpu_seconds": seconds}}) for t, seconds in enumerate(cpu)]
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert recorded_cpu(tmp_path) == pytest.approx(0.25)


def test_a_failed_run_has_no_figures() -> None:
    measured = Measurement(failure="killed", rounds=ROUNDS)
    assert (measured.all_in_round_1, measured.seconds_a_round) == (None, None)
    assert Measurement(rounds=ROUNDS).all_in_round_1 == 1.5
    assert Measurement(rounds=ROUNDS).last_round == 9.0


def test_cpu_time_is_read_from_samples() -> None:
    samples = [(1.0, 0.5), (2.0, 0.6), (5.0, 0.9), (9.0, 3.0)]
    assert cpu_until(samples, 1.5) == 0.6
    assert cpu_until(samples, 99.0) == 3.0
    assert cpu_until(samples, None) is None
    assert cpu_until([], 1.0) is None
    assert cpu_fraction(samples, 1.5, 6.0) == pytest.approx(0.1)
    assert cpu_fraction(samples, 1.5, 3.0) is None
    assert cpu_fraction(samples, None, 3.0) is None


def test_times_of_logs_are_read_in_both_formats() -> None:
    formatter = logging.Formatter("%(asctime)s")  # local time, as in the logs that are read
    began = time.time() - 5  # stamps of logs follow the wall clock
    now = formatter.format(logging.makeLogRecord({}))
    log = f"{now.replace(' ', 'T').replace(',', '.')} INFO round done t=3\n[{now}][node] round done\n  round done\n"
    times = log_times(log, "round done", began)
    assert times == pytest.approx([5, 5], abs=2)
    assert log_times(log, "started", began) == []


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(procfs, "available", lambda: 1 << 40)  # whatever else runs on this machine
    (tmp_path / "run").mkdir()
    return tmp_path


def measure_code(code: str, folder: Path, timeout: float = 60.0) -> Measurement:
    return measuring.measure([sys.executable, "-c", code], folder, "*.log", "done", timeout=timeout)


@pytest.mark.exhaustive
def test_runs_a_command_and_measures_it(folder: Path) -> None:
    code = f"""
import time
stop = time.process_time() + 0.3
while time.process_time() < stop: pass
stamp = time.strftime("%Y-%m-%dT%H:%M:%S.000")
open({str(folder / "run" / "0.log")!r}, "w").write(f"{{stamp}} done\\n" * 5)
"""
    measured = measure_code(code, folder)
    assert measured.failure == ""
    assert measured.seconds > measured.launcher[0][0] > 0
    assert 0.3 <= measured.cpu < 10
    assert [len(times) for times in measured.rounds] == [5]
    assert measured.rounds[0][0] < measured.seconds


def test_reports_the_last_line_of_a_command_that_fails(folder: Path) -> None:
    measured = measure_code("print('one'); raise SystemExit('no such thing')", folder)
    assert measured.failure == "exit status 1: no such thing"
    measured = measure_code("print('one'); print('two'); raise SystemExit(3)", folder)
    assert measured.failure == "exit status 3: two"


@pytest.mark.exhaustive
def test_stops_a_command_that_takes_too_long_with_its_children(
    folder: Path, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = folder / "pid"
    code = f"""
import os, time
pid = os.fork()
if pid: open({str(pid)!r}, "w").write(str(pid))
time.sleep(600)
"""
    # Asked before the time is: the command is not stopped before it has a child.
    monkeypatch.setattr(procfs, "available", lambda: until(lambda: pid.exists() and pid.read_text()) and 1 << 40)
    measured = measure_code(code, folder, timeout=1.0)
    assert measured.failure == "stopped after 1 s"
    child = int(pid.read_text())
    assert procfs.pss(child) == 0


@pytest.mark.exhaustive
def test_stops_a_command_that_leaves_too_little_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(procfs, "available", lambda: measuring.RESERVE - 1)
    failure = measure_code("import time; time.sleep(600)", folder).failure
    assert failure == "stopped: less than 1 GiB of memory were left"
