"""The runner of a sweep: memory, what starts when, and what becomes of failures. Its jobs are fakes."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable
from hashlib import sha256
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import yaml
from rich.console import Console

from launcher.commands import sweep as sweep_command
from launcher.errors import CompareError, SweepError
from launcher.facts.sweep_folder import Sweep, SweepFolder, SweepRun
from launcher.sweep import runner, search
from launcher.sweep.display import LEAST_RUNS, SweepDisplay
from launcher.sweep.jobs import Job
from launcher.sweep.memory import MARGIN, Estimate
from launcher.sweep.runner import Queue, Runner, SweepProgress
from launcher.sweep.search import Search
from launcher.views.progress import LINE_INTERVAL, Clock
from p2pfl.errors import WriteError
from tests.launcher_fixtures import Invoke, MakeFolder

GB = 10**9

# ---- memory ------------------------------------------------------------------------------------------------


def estimate(**measured: int) -> Estimate:
    return Estimate({"a": 4, "b": 4, "c": 8, "d": 2}, {"a": "x", "b": "x", "c": "y", "d": "z"}, measured)


def test_runs_with_the_same_values_are_the_best_guide() -> None:
    assert estimate(b=2 * GB, c=9 * GB).of("a") == int(MARGIN * 2 * GB)


def test_other_runs_count_in_proportion_to_more_peers_but_not_to_fewer() -> None:
    assert estimate(a=2 * GB).of("c") == int(MARGIN * 4 * GB)
    assert estimate(a=2 * GB).of("d") == int(MARGIN * 2 * GB)
    assert estimate().of("a") is None


def test_nothing_starts_beside_the_first_run_until_that_is_measured() -> None:
    assert estimate().fits("a", {}, free=0, total=8 * GB)
    assert not estimate().fits("a", {"b": GB}, free=100 * GB, total=100 * GB)


def test_counts_what_running_runs_may_still_grow_and_a_reserve() -> None:
    known = estimate(a=1 * GB, b=1 * GB)  # 1.2 GB each
    assert known.fits("a", {"b": 0}, free=int(2.91 * GB), total=10 * GB)
    assert not known.fits("a", {"b": 0}, free=int(2.89 * GB), total=10 * GB)
    assert known.fits("a", {"b": 2 * GB}, free=int(1.71 * GB), total=10 * GB)


# ---- what starts when --------------------------------------------------------------------------------------


class FakeJob(Job):
    """A run that ends after two looks at it; ``peaks`` says what it takes, ``failing`` which do not finish."""

    peaks: dict[str, int]
    failing: set[str]
    log: list[str]

    def __init__(self, folder: SweepFolder, name: str, *, adopt: bool = False) -> None:
        self.name, self.adopted, self.pruned = name, adopt, False
        self.memory = self.peak = 0
        self.began = 0.0
        self._looks = 0
        self._run = folder.run(name)
        if not adopt:
            self.log.append(f"start {name}")

    def snapshot(self) -> None:
        return None

    def running(self) -> bool:
        self._looks += 1
        if self._looks > 2:
            self.log.append(f"end {self.name}")
        return self._looks <= 2

    def measure(self) -> bool:
        self.memory = self.peak = self.peaks[self.name]
        return True

    def busy(self) -> bool:
        return True

    def failure(self) -> str:
        return "it broke" if self.name in self.failing else ""

    def stop(self, *, kill: bool = False) -> None:
        self.log.append(f"stop {self.name}")
        self._looks = 2


class Lines:
    """A display that keeps what was printed."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def update(self, progress: SweepProgress, *, now: bool = False) -> None:
        pass

    def print(self, line: str) -> None:
        self.lines.append(line)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SweepFolder:
    """A sweep of three runs, of which none has begun."""
    found = SweepFolder(tmp_path)
    points = tuple(SweepRun(name, {"graph": name}, 0) for name in "abc")
    found.write(Sweep("", "x.yaml", True, points=points))
    for name in "abc":
        found.plan(name).parent.mkdir(parents=True)
        found.plan(name).write_text(yaml.safe_dump({"peers": 2, "rounds": 3, "seed": 0, "graph": name}))
    FakeJob.peaks, FakeJob.failing, FakeJob.log = dict.fromkeys("abc", GB), set(), []
    monkeypatch.setattr(runner, "Job", FakeJob)
    monkeypatch.setattr(runner, "wait", lambda jobs, timeout: None)
    monkeypatch.setattr(runner, "total_memory", lambda: 10 * GB)
    return found


@pytest.fixture
def searching(folder: SweepFolder, file: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make the sweep a search of these trials and values, each of which has the accuracy 0.5."""
    pytest.importorskip("optuna")
    monkeypatch.setattr(search, "in_child", lambda function: function())
    monkeypatch.setattr(Search, "_value", lambda self, name: 0.5)

    def make(trials: int, space: dict[str, list[Any]]) -> None:
        settings = {"trials": trials, "prune": False, "space": space, "seed": 0}
        folder.write(Sweep("", str(file), True, search=settings, sha256=sha256(file.read_bytes()).hexdigest()))
        FakeJob.peaks = defaultdict(lambda: GB)

    return make


def run(folder: SweepFolder, most: int, free: int, **options: Any) -> tuple[SweepProgress, list[str]]:
    lines = Lines()
    found = Runner(folder, Queue(folder), lines, most, available=lambda: free, **options).run()
    return found, lines.lines


def test_the_second_run_starts_when_the_first_is_measured(folder: SweepFolder) -> None:
    found, _ = run(folder, 3, 100 * GB)
    assert FakeJob.log[:2] == ["start a", "start b"]
    assert FakeJob.log.index("start c") < FakeJob.log.index("end a")
    assert (found.finished, found.failures) == (3, {})
    assert folder.memory == dict.fromkeys("abc", GB)


def test_a_run_that_does_not_fit_beside_others_waits_for_them(folder: SweepFolder) -> None:
    found, _ = run(folder, 3, int(1.8 * GB))  # 1.2 GB each, 0.2 GB to grow, 0.5 GB in reserve
    assert FakeJob.log == [f"{what} {name}" for name in "abc" for what in ("start", "end")]
    assert found.finished == 3


def test_the_reserve_is_a_fraction_of_what_the_control_groups_allow(
    folder: SweepFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("M", (), {"total": 1000 * GB}))  # of the host
    found, _ = run(folder, most=1, free=4 * GB)
    assert not found.failures
    assert not found.waits


def test_a_run_that_does_not_fit_alone_is_not_started(folder: SweepFolder) -> None:
    found, lines = run(folder, 1, GB)
    assert FakeJob.log == ["start a", "end a"]
    assert found.failures["b"].startswith("not started: it needs about 1.2 GB of memory")
    assert found.failures["b"].endswith("1.0 GB are available")
    assert "c: failed: not started" in lines[-1]


def test_a_search_keeps_what_does_not_fit_for_later_and_asks_for_no_more(
    folder: SweepFolder, searching: Callable[..., None]
) -> None:
    searching(4, {"algorithm.lr": [0.1, 0.2, 0.3, 0.4]})
    free = iter([9 * GB, 0])

    def search_with(available: Callable[[], int]) -> SweepProgress:
        return Runner(folder, Search(folder), Lines(), 1, available=available).run()

    first = search_with(lambda: next(free))  # two are asked for, not all four
    assert first.finished == 1
    assert [failure.partition(":")[0] for failure in first.failures.values()] == ["not started"]
    begun = len(FakeJob.log)
    second = search_with(lambda: 9 * GB)
    assert FakeJob.log[begun] == f"start {next(iter(first.failures))}"
    assert (second.finished, second.failures) == (3, {})


@pytest.mark.parametrize(("peak", "later"), [(GB, ["b", "c"]), (9 * GB, [])])
def test_a_run_too_large_for_the_host_has_failed(
    folder: SweepFolder, monkeypatch: pytest.MonkeyPatch, peak: int, later: list[str]
) -> None:
    FakeJob.peaks["a"] = peak
    source = Queue(folder)
    kept: list[str] = []
    lost: list[str] = []
    monkeypatch.setattr(source, "not_started", kept.append)
    monkeypatch.setattr(source, "ended", lambda job, failure: lost.append(job.name))
    found = Runner(folder, source, Lines(), 1, available=lambda: 0).run()
    assert set(found.failures) == {"b", "c"}
    assert kept == later
    assert lost == ["a", *sorted({"b", "c"} - set(later))]


@pytest.mark.parametrize("way", ["log", "process"])
def test_a_run_whose_process_cannot_start_fails_alone(
    folder: SweepFolder, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    if way == "log":
        folder.log("a").parent.mkdir(parents=True)
        folder.log("a").symlink_to("/dev/full")
    else:
        monkeypatch.setattr(sys, "executable", "/missing/python")
    problem = {
        "log": "No space left on device",
        "process": "its process cannot be started: No such file or directory",
    }
    with pytest.raises((WriteError, SweepError), match=problem[way]):
        Job(folder, "a")


def test_a_lock_on_nfs_takes_a_file_that_is_open_for_writing(
    folder: SweepFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(file: int, operation: int) -> None:
        """NFS turns flock into locks of byte ranges."""
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    folder.log("a").parent.mkdir(parents=True)
    folder.log("a").touch()
    monkeypatch.setattr(fcntl, "flock", flock)
    assert folder.state("a") == "waiting"


@pytest.mark.parametrize("kill", [False, True])
def test_each_call_of_stop_sends_one_signal_until_all_are_sent(folder: SweepFolder, kill: bool) -> None:
    """Two at once may count as one, and then `p2pfl launch` would not kill its peers."""
    sweep = folder.sweep
    folder.write(Sweep("", "x.yaml", False, points=sweep.points))
    job = FakeJob(folder, "a")
    job._folder, job._signals = folder, 0
    job.process = Mock(**{"poll.return_value": None})
    sent = []
    for _ in range(3):
        Job.stop(job, kill=kill)
        sent.append(job.process.send_signal.call_count)
    assert sent == ([1, 2, 2] if kill else [1, 1, 1])


def test_tasks_of_a_job_array_add_to_what_others_have_measured(folder: SweepFolder) -> None:
    folder.write_memory({"a": GB})
    SweepFolder(folder.root).write_memory({"b": 2 * GB})
    assert folder.memory == {"a": GB, "b": 2 * GB}


def test_the_report_has_json_although_the_runs_cannot_be_compared(
    folder: SweepFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [(point, folder.run(point.name)) for point in folder.sweep.points]
    monkeypatch.setattr(SweepFolder, "runs", lambda self: runs)
    monkeypatch.setattr(SweepFolder, "state", lambda self, name: "finished")
    monkeypatch.setattr(
        "launcher.commands.compare.show", Mock(side_effect=CompareError("they differ in masked_test"))
    )
    assert sweep_command._report(folder, SweepProgress(3, 3), [], None, as_json=True, retries=True)
    captured = capsys.readouterr()
    assert json.loads(captured.out)["finished"] == 3
    assert captured.err == "no table: they differ in masked_test\n"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--sbatch", "--task", "1"], "leave out --task"),
        (["--task", "1", "--json"], "--json is not for --task"),
        (["--sbatch", "--json"], "--json is not for --sbatch"),
        (["--task", "1", "--jobs", "2"], "leave out --jobs"),
    ],
)
def test_options_without_effect_are_refused(
    folder: SweepFolder, invoke: Invoke, options: list[str], problem: str
) -> None:
    outcome = invoke("sweep", folder.root, *options)
    assert outcome.exit_code == 2
    assert problem in outcome.stderr


def test_what_was_measured_is_known_after_a_restart(folder: SweepFolder) -> None:
    folder.write_memory({"a": GB})
    run(folder, 2, 100 * GB)
    assert FakeJob.log[:2] == ["start a", "start b"]


def test_a_failure_does_not_end_the_sweep(folder: SweepFolder) -> None:
    FakeJob.failing = {"b"}
    found, lines = run(folder, 1, 100 * GB)
    assert (found.finished, found.failures) == (2, {"b": "it broke"})
    assert "b: failed: it broke" in lines


def test_a_run_without_plan_fails_alone(folder: SweepFolder) -> None:
    folder.plan("b").unlink()
    found, _ = run(folder, 1, 100 * GB)
    assert found.finished == 2
    assert "plans/b/run.yaml: cannot be read" in found.failures["b"]


@pytest.mark.exhaustive
def test_an_invalid_combination_fails_alone_and_the_search_goes_on(
    folder: SweepFolder, file: Path, searching: Callable[..., None]
) -> None:
    file.write_text(file.read_text().replace("graph: ring", "graph: {name: regular, degree: 2}"))
    searching(8, {"peers": [4, 6], "graph.degree": [2, 4]})
    source, lines = Search(folder), Lines()
    found = Runner(folder, source, lines, 3, available=lambda: 100 * GB).run()
    assert found.failures
    for failure in found.failures.values():
        assert failure.endswith("graph: degree 4 needs more than 4 peers; there are 4")
    assert found.finished == 8 - len(found.failures) > 0
    assert len({*found.failures, *source.best()}) == 8
    continued = Search(folder)
    assert continued.next() is None
    assert sorted(continued.failed) == sorted(found.failures)
    assert continued.finished == found.finished
    assert all(folder.plan(point.name).is_file() for point in folder.sweep.points)


def test_an_error_of_the_sweep_stops_its_running_runs(folder: SweepFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SweepFolder, "write_memory", lambda *_: fail(WriteError(folder.root, OSError(28, "full"))))
    lines = Lines()
    with pytest.raises(WriteError):
        Runner(folder, Queue(folder), lines, 1, available=lambda: 100 * GB).run()
    assert FakeJob.log == ["start a", "stop a"]
    assert lines.lines[-1] == "a: stopping: it writes checkpoints and ends"


def fail(error: Exception) -> None:
    raise error


def test_finished_runs_are_not_started_again(folder: SweepFolder, make_folder: MakeFolder) -> None:
    made = make_folder("made")
    (folder.root / "runs").mkdir()
    made.root.rename(folder.run("a").root)
    queue = Queue(folder)
    assert queue.finished == ["a"]
    assert [queue.next(), queue.next(), queue.next()] == ["b", "c", None]


def test_interrupted_runs_come_first(folder: SweepFolder, make_folder: MakeFolder) -> None:
    made = make_folder("made", results={0: None})
    (folder.root / "runs").mkdir()
    made.root.rename(folder.run("c").root)
    assert Queue(folder).next() == "c"


def test_an_incomplete_run_folder_is_deleted_before_its_run_starts(folder: SweepFolder) -> None:
    root = folder.run("a").root
    (root / "peers" / "00").mkdir(parents=True)
    assert folder.state("a") == "waiting"
    folder.clear_unresumable("a")
    assert not root.exists()
    root.mkdir()
    (root / "run.yaml").touch()
    folder.clear_unresumable("a")
    assert root.exists()


# ---- progress ----------------------------------------------------------------------------------------------


def test_time_left_is_estimated_from_what_this_sweep_has_done(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(LEAST_RUNS)

    def remaining(done: float, elapsed: float) -> float | None:
        monkeypatch.setattr("launcher.views.progress.time.monotonic", lambda: clock.began + elapsed)
        return clock.remaining(done, 10)

    assert remaining(4.5, 3.0) is None  # four and a half runs were done before
    assert remaining(4.6, 20.0) is None
    assert remaining(5.5, 23.0) == pytest.approx(90.0)
    assert remaining(10.0, 99.0) == 0.0


@pytest.mark.parametrize("terminal", [True, False])
def test_the_display_shows_counts_and_why_the_next_run_waits(folder: SweepFolder, terminal: bool) -> None:
    text = StringIO()
    console = Console(file=text, force_terminal=terminal, width=100, markup=False)
    progress = SweepProgress(
        9, 2, 1, {"x": "it broke"}, waits="it needs about 3.0 GB", jobs=[FakeJob(folder, "a", adopt=True)]
    )
    display = SweepDisplay(console)
    with display:
        display.print("a: started")
        display._printed -= LINE_INTERVAL
        display.update(progress, now=True)
    shown = text.getvalue()
    assert "runs 4/9, 1 running, 1 pruned, 1 failed" in shown
    assert ("next run waits: it needs about 3.0 GB" in shown) == terminal


def test_a_damaged_file_of_measurements_is_measured_again(folder: SweepFolder) -> None:
    (folder.root / "memory.json").write_text('{"a": "much", "b": 3, "c": -1}')
    assert folder.memory == {"b": 3}
    (folder.root / "memory.json").write_text("{")
    assert folder.memory == {}


def test_the_line_about_a_finished_run_says_how_accurate_it_is(folder: SweepFolder) -> None:
    FakeJob.peaks["a"] = GB
    job = FakeJob(folder, "a")
    assert job.result() == ""
    summary = folder.run("a").summary
    summary.parent.mkdir(parents=True)
    summary.write_text('{"accuracy": {"mean": 0.772}, "seconds": 99.0}')
    assert job.result() == ", 77.2 %, 1:39"
    summary.write_text('{"accuracy": null, "seconds": null}')
    assert job.result() == ""
