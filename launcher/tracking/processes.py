"""Start the trackers of a run as processes, report what goes wrong with them, and end them in bounded time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import psutil

from launcher.tracking.tracker import require
from p2pfl.errors import MissingExtra, RunFolderError
from p2pfl.run_folder.files import write_errors
from p2pfl.run_folder.folder import RunFolder
from p2pfl.terminal import printable

if TYPE_CHECKING:
    from p2pfl.run_file.run import Run

TIMEOUT = 60.0
"""Seconds that all trackers of a run together may take to send the last records after its end."""
TRACKED = os.EX_TEMPFAIL
"""Exit code of a tracker whose run another process passes on to the same tracker already."""
PATIENCE = 2.0
"""Seconds of them without a line that says so."""


def check_trackers(run: Run) -> None:
    """Raise RunFileError, before any peer starts, if a tracker's library is not installed."""
    for number, entry in enumerate(run.file.track):
        try:
            require(entry.name)
        except MissingExtra as error:
            raise run.error_at(f"track.{number}", error) from None


class TrackerProcess:
    """The process of one tracker, in a separate session: Ctrl-C does not reach it."""

    def __init__(self, folder: RunFolder, entry: Mapping[str, Any]) -> None:
        self.name = entry["name"]
        self.log = folder.root / "tracking" / f"{self.name}.log"
        self._reported = False
        with write_errors(self.log):
            self.log.parent.mkdir(exist_ok=True)
        command = [sys.executable, "-P", "-m", "launcher.tracking", str(folder.root), json.dumps(entry)]
        with write_errors(self.log), self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )

    def failure(self) -> str | None:
        """Return, once, what to print about a tracker that has failed."""
        if self._reported or self._process.poll() in (None, 0, TRACKED):
            return None
        self._reported = True
        return f"tracker {self.name} failed: {self._reason()}; the run is not affected; see {self.log}"

    @property
    def tracked_elsewhere(self) -> bool:
        return self._process.poll() == TRACKED

    def _reason(self) -> str:
        code = self._process.returncode
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        with suppress(OSError):
            lines = self.log.read_bytes()[-4096:].decode(errors="replace").strip().splitlines()
            if lines:
                return printable(lines[-1])[:300]
        return f"exit code {code}"

    def end(self) -> None:
        """Close its stdin: the run is over."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()

    def wait(self, seconds: float) -> bool:
        """Return whether it exits within ``seconds``."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, seconds))
        return self._process.poll() is not None

    def kill(self) -> None:
        """Kill it with all its descendants: libraries start processes too."""
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self._process.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    child.kill()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Trackers:
    """All trackers of a run."""

    def __init__(self, folder: RunFolder, entries: Iterable[Mapping[str, Any]]) -> None:
        self._processes = [TrackerProcess(folder, entry) for entry in entries]

    def failures(self) -> list[str]:
        """Return what to print about trackers that have failed since the last call."""
        return [line for process in self._processes if (line := process.failure()) is not None]

    def wait(self, report: Callable[[str], None]) -> bool:
        """Wait until the run has ended and everything is sent. Return whether no tracker failed."""
        failed = False
        for process in self._processes:
            process.end()
        try:
            while not self._all_end(time.monotonic() + PATIENCE):
                pass
        finally:
            for process in self._processes:
                if not process.wait(0):
                    process.kill()
                elif process.tracked_elsewhere:
                    report(f"tracker {process.name}: another process follows this run already")
                elif (line := process.failure()) is not None:
                    failed = True
                    report(line)
        return not failed

    def end(self, report: Callable[[str], None]) -> None:
        """Let the trackers send the last records, for at most TIMEOUT, and kill those that go on."""
        for process in self._processes:
            process.end()
        deadline = time.monotonic() + TIMEOUT
        try:
            if not self._all_end(time.monotonic() + min(PATIENCE, TIMEOUT)):
                left = ", ".join(process.name for process in self._processes if not process.wait(0))
                report(f"waiting up to {TIMEOUT:.0f} s for trackers that send the last records: {left}")
                self._all_end(deadline)
        except KeyboardInterrupt:
            report("not waiting for trackers any longer")
        for process in self._processes:
            if not process.wait(0):
                process.kill()
                report(
                    f"tracker {process.name} did not end and was killed: its last records may be missing; "
                    f"see {process.log}"
                )
            elif (line := process.failure()) is not None:
                report(line)

    def _all_end(self, deadline: float) -> bool:
        return all(process.wait(deadline - time.monotonic()) for process in self._processes)


@contextmanager
def tracking(folder: RunFolder, report: Callable[[str], None]) -> Iterator[Trackers]:
    """Track a run in this block as its run file asks. What goes wrong is reported, and never raised."""
    entries: list[dict[str, Any]] = folder.settings.get("track") or []
    try:
        trackers = Trackers(folder, entries)
    except (RunFolderError, OSError) as error:
        report(f"without trackers: {error}")
        trackers = Trackers(folder, [])
    try:
        yield trackers
    finally:
        trackers.end(report)
