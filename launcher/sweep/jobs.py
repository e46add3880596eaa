"""The commands of a sweep's runs: `p2pfl launch`, `simulate` or `resume`, each a process in a separate session.

So a crash of one does not end the sweep, the terminal's Ctrl-C reaches the sweep only, and if the sweep is killed
they go on; the next sweep finds them by the locks on their logs and by their peers' process titles.
"""

from __future__ import annotations

import os
import select
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil

from launcher import formatting
from launcher.descriptors import ProcessEnd
from launcher.errors import SweepError
from launcher.facts.host_state import HostState
from launcher.facts.processes import outcome
from launcher.facts.registration import request
from launcher.facts.snapshot import Snapshot
from launcher.facts.summary import summarize, written_summary
from launcher.facts.sweep_folder import ELSEWHERE, SweepFolder, has_peers, peers_of
from launcher.sweep import memory
from p2pfl.attackers import attacks
from p2pfl.errors import P2pflError, WriteError
from p2pfl.file_locks import lock
from p2pfl.run_folder.files import write_errors

FIRST_SAMPLE = 0.5
"""Seconds until the memory of a run is measured for the first time."""
SAMPLE_INTERVAL = 1.0
"""Minimum seconds between two measurements."""
SAMPLE_LOAD = 0.02
"""Maximum fraction of a core that measurements take."""


class Job:
    """A run whose processes are running.

    Args:
        adopt: an earlier sweep has started it, and was killed.
    """

    end: ProcessEnd | None = None
    """Of the command, if this process has started it."""

    def __init__(self, folder: SweepFolder, name: str, *, adopt: bool = False) -> None:
        self.name = name
        self.adopted = adopt
        self.pruned = False
        self.memory = 0
        self.peak = 0
        self.began = time.monotonic()
        self._folder = folder
        self._run = folder.run(name)
        self._sample_at = self.began + FIRST_SAMPLE
        self._signals = 0
        self._signaled: set[tuple[psutil.Process, signal.Signals]] = set()
        self.process = None if adopt else self._start()
        if self.process is not None:
            with suppress(OSError):  # too many open files
                self.end = ProcessEnd(self.process.pid)

    def _start(self) -> subprocess.Popen[bytes]:
        """Start or resume the run."""
        folder = self._folder
        folder.clear_unresumable(self.name)
        for path in (folder.log(self.name).parent, self._run.root.parent):
            with write_errors(path):
                path.mkdir(parents=True, exist_ok=True)
        if self._run.run_file.exists():
            arguments = ["resume", str(self._run.root)]
        else:
            sweep = folder.sweep
            simulate = ["simulate", *(["--clock"] if sweep.clock else [])]
            command = simulate if sweep.simulate else ["launch", "--backend", sweep.backend]
            arguments = [*command, str(folder.plan(self.name)), "--run-dir", str(self._run.root)]
        log_path = folder.log(self.name)
        with write_errors(log_path):
            log = os.open(log_path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            lock(log, log_path, ELSEWHERE, wait=True)  # held by the command as long as it has its stderr open
            with write_errors(log_path):
                os.write(log, f"$ p2pfl {shlex.join(arguments)}\n".encode())
            try:
                return subprocess.Popen(
                    [sys.executable, "-P", "-m", "launcher.cli", *arguments, "--json"],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                    start_new_session=True,
                )
            except OSError as error:  # too many processes, or no memory
                raise SweepError(f"its process cannot be started: {error.strerror}") from None
        finally:
            os.close(log)

    def close(self) -> None:
        if self.end is not None:
            self.end.close()

    @property
    def seconds(self) -> float:
        """Since this sweep has started or found it."""
        return time.monotonic() - self.began

    def running(self) -> bool:
        """Return whether the command or a peer runs."""
        if self.process is not None and self.process.poll() is None:
            return True
        if self.process is None and self._folder.command_runs(self.name):
            return True
        return has_peers(self._run)

    def snapshot(self) -> Snapshot | None:
        """Return the state of the peers; None before the run exists, or if its files are damaged."""
        if not self._run.run_file.exists():
            return None
        with suppress(P2pflError, KeyError):
            run = self._run.settings
            return Snapshot.take(self._run, range(run["peers"]), run["rounds"], attackers=attacks(run))
        return None

    def measure(self) -> bool:
        """Measure its memory if that is due. Return whether it was."""
        now = time.monotonic()
        if now < self._sample_at:
            return False
        began = time.thread_time()
        self.memory = memory.in_use(self._processes())
        self._sample_at = now + max(SAMPLE_INTERVAL, (time.thread_time() - began) / SAMPLE_LOAD)
        self.peak = max(self.peak, self.memory)
        return True

    def busy(self) -> bool:
        """Return whether every peer has completed a round: it takes hardly more memory later."""
        snapshot = self.snapshot()
        return snapshot is not None and min(snapshot.done) > 0

    def _processes(self) -> list[psutil.Process]:
        found = peers_of(self._run)
        if self.process is not None:
            with suppress(psutil.Error):
                command = psutil.Process(self.process.pid)
                found += [command, *command.children(recursive=True)]
        return list({process.pid: process for process in found}.values())

    def stop(self, *, kill: bool = False) -> None:
        """Ask it to write checkpoints and end, or kill it.

        Call it again and again: an adopted run may still be starting. Each process is signaled once, but the command
        twice if it is to kill its peers, once per call.
        """
        wanted = 2 if kill else 1
        first = self._signals < wanted
        if self.process is not None and self.process.poll() is None and not (kill and self._folder.sweep.simulate):
            if first:  # one in each call: two at once may count as one
                self._signals += 1
                self.process.send_signal(signal.SIGINT)  # a second one makes `p2pfl launch` kill the peers
            return
        self._signals = max(self._signals, wanted)
        if first and HostState.read(self._run.root) is None:  # a launcher of other hosts' peers is signaled instead
            with suppress(WriteError):  # the run may have no folder yet
                request(self._run.root, "kill" if kill else "stop")  # or its launcher would restart killed peers
        number = signal.SIGKILL if kill else signal.SIGTERM
        for process in self._processes():
            if (process, number) not in self._signaled:
                self._signaled.add((process, number))
                with suppress(psutil.Error):
                    process.send_signal(number)

    def result(self) -> str:
        """Return accuracy and duration of the finished run, as far as known: ``, 77.2 %, 0:39``."""
        summary = written_summary(self._run)
        accuracy, seconds = (summary.get("accuracy") or {}).get("mean"), summary.get("seconds")
        text = "" if accuracy is None else f", {formatting.percent(accuracy)} %"
        if seconds is None:
            return text
        return f"{text}, {formatting.duration(seconds)}{' simulated' if summary.get('clock') else ''}"

    def failure(self) -> str:
        """Say in one line why the run has not finished; empty if it has."""
        if self._folder.state(self.name) == "finished":
            with suppress(P2pflError):
                if not self._run.summary.exists():  # the command was killed at the very end
                    summarize(self._run)
            return ""
        ended = [outcome(files) for files in self._run.peers()] if (self._run.root / "peers").is_dir() else []
        failed = [f"peer {peer}: {text}" for peer, text in enumerate(ended) if text.startswith("failed")]
        if failed:
            return failed[0]
        code = self.process.poll() if self.process is not None else None
        if code is not None and code < 0:
            return f"its command was killed by {signal.Signals(-code).name}"
        lines = self._last_lines()
        errors = [line for line in lines if line.startswith("error:")]
        if errors:
            return errors[-1].removeprefix("error:").strip()
        if "died" in ended:
            return "a peer died"
        return lines[-1] if lines else "it ended without a message"

    def _last_lines(self) -> list[str]:
        """What the command of the last attempt has printed."""
        with suppress(OSError):
            text = self._folder.log(self.name).read_text(errors="replace")
            return [line for line in text.rpartition("$ p2pfl ")[2].splitlines()[1:] if line.strip()]
        return []


def wait(jobs: list[Job], timeout: float) -> None:
    """Wait until the command of a job ends, up to ``timeout`` seconds."""
    running = [job.end for job in jobs if job.process is not None and job.process.poll() is None]
    select.select([end for end in running if end is not None], [], [], timeout)
