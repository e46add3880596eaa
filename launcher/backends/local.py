"""This host as a group of one: its peers use the launcher's run folder, and the warm process forks them.

The warm process has torch imported; it is the process that has prepared the run, or a new one in its place
(peers/warm.py). The launcher exchanges newline-delimited JSON with it over its stdin and stdout:

    → {"run": "<folder>", "peers": [0, 1, 2]}
    ← {"event": "ready"}
    ← {"event": "started", "peer": 0, "pid": 123}
    ← {"event": "exited", "peer": 0, "code": 0, "error": ""}

``code`` is negative if a signal killed the peer; ``error`` is what it reported. Peers inherit none of these
pipes: they keep running when the launcher or the warm process exits.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from io import FileIO
from multiprocessing.context import ForkProcess  # noqa: TID251  # only a type
from typing import BinaryIO, ClassVar, Self, TypeVar

import psutil

from launcher.backends.group import Event, Plan
from launcher.backends.mps import multi_process_service
from launcher.child import in_lasting_child
from launcher.descriptors import ProcessEnd, memory_file
from launcher.errors import LaunchError
from launcher.facts.processes import find_process
from launcher.facts.registration import Requests, register
from p2pfl import PeerId
from p2pfl.one_thread import ENVIRONMENT
from p2pfl.run_folder.folder import RunFolder

T = TypeVar("T")

EXIT_TIMEOUT = 30.0
"""Seconds that an idle warm process may take to exit, also after it has closed its output."""
ORPHAN_INTERVAL = 1.0
"""Seconds between two checks of the peers whose end no warm process reports."""


class _Fork:
    """A fork of this process, as a Popen."""

    def __init__(self, process: ForkProcess, stdin: FileIO, stdout: FileIO) -> None:
        self.stdin, self.stdout = stdin, stdout
        self.pid = process.pid or 0
        self.kill = process.kill
        self._process = process

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        if timeout is not None and self._process.exitcode is None:
            # Not join(timeout): it waits for the end of a pipe that the peers hold open too.
            with closing(ProcessEnd(self.pid)) as end:
                end.wait(timeout)
            if self._process.exitcode is None:
                raise subprocess.TimeoutExpired("peers --warm", timeout)
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode


class ThisHost:
    """This host as a Group.

    The warm process has a separate session, so that the terminal's Ctrl-C reaches the launcher only. It is closed at
    the end, and killed if an exception is raised before any peer was requested.

    Args:
        environment: variables of a warm process that is not forked from this process.
    """

    is_here = True
    running: ClassVar[dict[PeerId, int]] = {}
    """Empty: if peers run already, another launcher may follow them."""
    _folder: RunFolder
    _plan: Plan
    _requests: Requests

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = dict(environment or {})
        self._process: subprocess.Popen[bytes] | _Fork | None = None
        self._exited = False
        """Whether the warm process has closed its output."""
        self._pending = b""
        self._fork_requested = self._started = self._stopping = False
        self._processes: dict[PeerId, psutil.Process | None] = {}
        """The requested peers that have not exited, as far as known; None before the start."""
        self._orphans: set[PeerId] = set()
        self._orphans_checked = -ORPHAN_INTERVAL
        self._notices: list[str] = []

    def __enter__(self) -> Self:
        self._errors: BinaryIO = os.fdopen(memory_file("p2pfl warm"), "w+b")  # in memory: the disk may be full
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not self._fork_requested:
            self._kill()
        else:
            self._close()
        self._errors.close()

    # ---- the warm process ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start a warm process."""
        self._exited, self._pending = False, b""
        self._process = subprocess.Popen(
            # -P: ignore folders called peers or p2pfl in the working directory.
            [sys.executable, "-P", "-m", "peers", "--warm"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
            env={**os.environ, **self._environment},
            bufsize=0,
        )

    def prepare(self, function: Callable[[], T]) -> T:
        """Call a function that imports torch in a new process, which then becomes the warm process."""
        requests, events = os.pipe(), os.pipe()

        def prepare() -> T:
            os.setsid()
            # Never collect what this process was forked with: garbage of the launcher closes its descriptors, whose
            # numbers other files may have by now.
            gc.freeze()
            os.environ.update(ENVIRONMENT)
            return function()

        def serve() -> None:
            sys.stdout.flush()  # what a plug-in has printed, before stdout becomes the pipe of events
            for descriptor, target in ((self._errors.fileno(), 2), (requests[0], 0), (events[1], 1)):
                os.dup2(descriptor, target)
            # Peers outlive the launcher, and must not hold open what it has inherited or opened. The numbers stay in
            # use, because its objects still have them.
            self._errors.close()
            null = os.open(os.devnull, os.O_RDWR)
            for name in os.listdir("/proc/self/fd"):
                if int(name) not in (0, 1, 2, null):
                    try:
                        os.dup2(null, int(name), inheritable=False)
                    except OSError:  # its number is above the limit on open files, which was lowered since
                        os.close(int(name))
            sys.argv = ["peers", "--warm"]
            runpy.run_module("peers", run_name="__main__", alter_sys=True)

        try:
            result, process = in_lasting_child(prepare, serve)
        except BaseException:
            for descriptor in (requests[1], events[0]):
                os.close(descriptor)
            raise
        finally:
            os.close(requests[0])
            os.close(events[1])
        self._process = _Fork(process, FileIO(requests[1], "w"), FileIO(events[0]))
        return result

    @property
    def _outcome(self) -> str:
        """How the warm process has ended."""
        assert self._process is not None
        try:
            code = self._process.wait(EXIT_TIMEOUT)
        except subprocess.TimeoutExpired:
            return "has closed its output"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def _kill(self) -> None:
        """Kill the warm process and everything that it has forked in its session."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._exited = True
        self._close()

    def _close(self) -> None:
        """Close its stdin, and wait until it exits, which it does after the last peer that it has forked."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(EXIT_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _messages(self, timeout: float) -> list[Event]:
        """Return the events of the warm process; wait up to ``timeout`` seconds. Set ``_exited`` at end of file."""
        assert self._process is not None
        assert self._process.stdout is not None
        if self._exited:
            time.sleep(timeout)  # nothing will arrive, but the caller polls at this pace
            return []
        if not select.select([self._process.stdout], [], [], timeout)[0]:
            return []
        chunk = os.read(self._process.stdout.fileno(), 1 << 16)
        self._exited = not chunk
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        return [Event(**json.loads(line)) for line in lines]

    # ---- the start -------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Nothing: ``prepare`` starts the warm process."""

    @contextmanager
    def registered(self, folder: RunFolder, *, fresh: bool) -> Iterator[None]:
        self._requests = register(folder, fresh=fresh)
        yield

    def open(self, folder: RunFolder, plan: Plan, report: Callable[[str], object]) -> None:
        self._folder, self._plan = folder, plan

    @contextmanager
    def following(self, report: Callable[[str], object]) -> Iterator[None]:
        with ExitStack() as resources:
            if self._plan.mps:
                mps = multi_process_service(self._folder.root / "mps", self._plan.peers_per_gpu, report)
                self._environment |= resources.enter_context(mps)
                self._kill()
                self.start()
                resources.callback(lambda: self._close() if self._fork_requested else self._kill())
            yield
            output = os.pread(self._errors.fileno(), 1 << 20, 0).decode(errors="replace")
            if output:
                with suppress(OSError):
                    (self._folder.root / "warm.log").write_text(output, encoding="utf-8")
            if not self._started and not self._stopping:
                raise LaunchError(
                    f"the process that forks the peers {self._outcome}:\n{output.strip() or '(no output)'}"
                )

    # ---- the peers -------------------------------------------------------------------------------------------

    def fork(self, peers: Iterable[PeerId]) -> None:
        """Request peers. If the warm process has just died, ``events`` returns what it has sent before."""
        if self._exited:
            self._notices.append("starting another warm process")
            self._close()
            self.start()
        self._fork_requested = True
        peers = list(peers)
        self._processes |= dict.fromkeys(peers)
        self._orphans -= set(peers)
        for peer in peers:
            with suppress(OSError):
                self._folder.death_notice(peer).unlink()
        assert self._process is not None
        assert self._process.stdin is not None
        request = json.dumps({"run": str(self._folder.root), "peers": peers}) + "\n"
        with suppress(BrokenPipeError):
            self._process.stdin.write(request.encode())

    def cancel(self) -> None:
        """End a warm process that is still importing, and has forked no peer."""
        if not self._exited:
            self._kill()

    def signal(self, peers: Iterable[PeerId], number: int) -> None:
        self._stopping = True
        for peer in peers:
            if (process := self._processes.get(peer)) is not None:
                with suppress(psutil.NoSuchProcess):  # it compares start times too: a process id is used again
                    process.send_signal(number)

    def declare_dead(self, peer: PeerId) -> None:
        with suppress(OSError):  # otherwise they wait until their deadline
            self._folder.death_notice(peer).touch()

    def events(self, timeout: float) -> list[Event]:
        had_exited = self._exited
        found = [self._noted(event) for event in self._messages(timeout)]
        if self._exited:
            self._orphans |= self._processes.keys()
            if self._started and not had_exited and not self._stopping:
                self._notices.append(f"the warm process, which forks peers, {self._outcome}; the peers keep running")
        return found + self._ends_of_orphans()

    def notices(self) -> list[str]:
        lines, self._notices = self._notices, []
        return lines

    def requests(self) -> list[str]:
        return self._requests.new()

    def _noted(self, event: Event) -> Event:
        """Keep the process that an event is about. Return the event, or another one if the peer runs nevertheless."""
        if event.event == "started":
            self._started = True
            with suppress(psutil.NoSuchProcess):
                self._processes[event.peer] = psutil.Process(event.pid)
        return self._adopted(event.peer) or event if event.event == "exited" else event

    def _adopted(self, peer: PeerId) -> Event | None:
        """Look for a process of ``peer`` of which no event told, e.g. of another launcher, and follow that."""
        process = find_process(self._folder, peer)
        if process is None:
            self._processes.pop(peer, None)
            self._orphans.discard(peer)
            return None
        self._processes[peer] = process
        self._orphans.add(peer)
        return Event("started", peer, pid=process.pid)

    def _ends_of_orphans(self) -> list[Event]:
        now = time.monotonic()
        if now < self._orphans_checked + ORPHAN_INTERVAL:
            return []
        self._orphans_checked = now
        ended = [peer for peer in sorted(self._orphans) if not _is_running(self._processes.get(peer))]
        return [self._adopted(peer) or Event("vanished", peer) for peer in ended]


def _is_running(process: psutil.Process | None) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process is not None and process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
