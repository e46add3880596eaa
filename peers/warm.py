"""The warm process: imports torch once, then forks peers on request.

Forking twenty peers takes seconds and shares memory; starting twenty interpreters takes minutes. Requests and events
are lines of JSON:

    ← {"run": "<folder>", "peers": [0, 1, 2]}
    → {"event": "ready"}                            imports are done
    → {"event": "started", "peer": 0, "pid": 123}
    → {"event": "exited", "peer": 0, "code": 0, "error": ""}    negative code: killed by that signal;
                                                    error: the peer's error message

Events go to what was stdout at the start; what plug-ins print goes to stderr, and in a peer to its output file.

The process takes no part in training. When its stdin closes, it waits for its children and exits; if it is killed,
they continue.

It computes with one thread: after a fork, a library waits forever for threads that it has started before. Forked
peers set the number of their threads.
"""

from __future__ import annotations

import errno
import gc
import io
import json
import mmap
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from p2pfl import PeerId
from p2pfl.errors import P2pflError, error_text
from p2pfl.models import architecture
from p2pfl.process_title import set_title
from p2pfl.rng import Streams
from p2pfl.run_file.load import load
from p2pfl.run_file.run import Run
from p2pfl.run_folder.folder import RunFolder
from p2pfl.session.build import RunData, load_data, make_algorithm
from p2pfl.session.free_memory import forget_files, free_heap
from p2pfl.stop_signals import nothing, stop_signals
from p2pfl.terminal import encode_as_utf8
from peers.runtime import run_peer

MAX_ERROR = 4096
"""Bytes of a peer's error message."""


def serve() -> int:
    """Serve requests on stdin until it closes and all children have ended."""
    set_title("p2pfl warm")
    torch.set_num_threads(1)
    events = os.dup(1)
    os.dup2(2, 1)
    encode_as_utf8()
    send_event(events, {"event": "ready"})
    forks = Forks(events)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    listening, pending = True, b""
    while listening or forks.children:
        ready, _, _ = select.select([woken, *([0] if listening else [])], [], [])
        if woken in ready:
            os.read(woken, 4096)
            forks.reap()
        if 0 in ready:
            chunk = os.read(0, 65536)
            listening = bool(chunk)
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                request = json.loads(line)
                forks.fork(Path(request["run"]), request["peers"], (woken, wake, events), is_wanted=_has_client)
    return 0


def _has_client() -> bool:
    """Return whether a process still holds the other end of stdin."""
    poll = select.poll()
    poll.register(0, 0)  # a hang-up is always reported
    return not poll.poll(0)


class Forks:
    """The peers forked by this process.

    Each shares memory with this process for its error message. Not a pipe, because it may outlive this process; nor a
    file, because limits on open files and on their size apply to those.

    Args:
        events: descriptor that events are written to.
        sets: changes to keys of the run file that apply on this host only.
        before_exit: called before the exit of a peer is reported.
    """

    def __init__(
        self,
        events: int,
        sets: Sequence[str] = (),
        before_exit: Callable[[PeerId], None] = lambda peer: None,
    ) -> None:
        self._events = events
        self._sets = sets
        self._before_exit = before_exit
        self.children: dict[int, tuple[PeerId, mmap.mmap]] = {}
        """{process id: (peer, its error message)}"""
        self._known: dict[tuple[Path, bytes], tuple[Run, RunData]] = {}
        """The last run by its run file, for restarted peers."""

    def fork(
        self,
        root: Path,
        peers: Sequence[PeerId],
        close: tuple[int, ...],
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Fork peers of the run in the folder ``root``; each closes the descriptors ``close``.

        None is forked once ``is_wanted()`` is false: the run and its data may load for minutes; if the launcher ends
        meanwhile, `p2pfl stop` finds nothing to stop.
        """
        try:
            folder = RunFolder.open(root)
        except P2pflError as error:
            print(error, file=sys.stderr, flush=True)
            for peer in peers:
                send_event(self._events, {"event": "exited", "peer": peer, "code": 1, "error": str(error)})
            return
        set_title(f"p2pfl warm {folder.root}")
        try:
            run, data = self.load(folder)
        except P2pflError as error:  # each peer will raise the same error and log it
            print(error, file=sys.stderr)
            run, data = None, None
        sys.stdout.flush()  # what a plug-in has printed, which each fork would print again
        gc.collect()
        gc.freeze()  # keeps memory shared: the collector does not touch it in the children
        free_heap()
        forget_files()
        # Forks inherit it: none is killed by a signal before run_peer can stop.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals())
        try:
            for peer in peers:
                if not is_wanted():
                    break
                self._fork(folder, peer, run, data, close)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _fork(
        self, folder: RunFolder, peer: PeerId, run: Run | None, data: RunData | None, close: tuple[int, ...]
    ) -> None:
        message = mmap.mmap(-1, MAX_ERROR)
        try:
            pid = os.fork()
        except OSError as error:
            message.close()
            send_event(self._events, {"event": "exited", "peer": peer, "code": 1, "error": _why_not_forked(error)})
            return
        if pid == 0:
            for descriptor in close:
                os.close(descriptor)
            for _, other in self.children.values():
                other.close()
            _become(folder, peer, run, data, message)
        self.children[pid] = peer, message
        send_event(self._events, {"event": "started", "peer": peer, "pid": pid})

    def load(self, folder: RunFolder) -> tuple[Run, RunData]:
        """Load the run and its data, unless that was done before. Raises P2pflError."""
        file = folder.root, folder.run_file.read_bytes()
        if file not in self._known:
            run = load(folder.run_file, self._sets)
            data = load_data(run, folder.root, record=True)
            _import_what_peers_import(run, data)
            self._known = {file: (run, data)}
        return self._known[file]

    def reap(self) -> None:
        """Report the peers that have exited."""
        while self.children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if pid in self.children:
                peer, message = self.children.pop(pid)
                with message:
                    error = message[:].rstrip(b"\0").decode(errors="replace")
                code = os.waitstatus_to_exitcode(status)
                self._before_exit(peer)
                send_event(self._events, {"event": "exited", "peer": peer, "code": code, "error": error})


def _why_not_forked(error: OSError) -> str:
    text = f"cannot be forked: {error.strerror}"
    if error.errno == errno.EAGAIN:
        text += "; the limit on processes is reached: see `ulimit -u` and pids.max of the control group"
    return text


def _import_what_peers_import(run: Run, data: RunData) -> None:
    """Build and drop one peer of each architecture, so that forked peers share its imports."""
    first_of = {architecture(run.file.models.group, peer): peer for peer in reversed(range(run.peers))}
    for peer in first_of.values():
        algorithm = make_algorithm(run, peer, data, torch.device("cpu"), Streams(run.seed, peer))
        torch.save(algorithm.state_dict(), io.BytesIO())
    np.unique([])  # its first call, in an evaluation, imports numpy.ma


def _become(folder: RunFolder, peer: PeerId, run: Run | None, data: RunData | None, message: mmap.mmap) -> None:
    """Turn this fresh fork into a peer, and never return. ``message`` receives its error message."""
    code = 1

    def report_error(text: str) -> None:
        encoded = text.encode()[:MAX_ERROR]
        message[: len(encoded)] = encoded

    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in stop_signals():  # blocked until the peer handles them; a second one must not kill it later
            signal.signal(number, nothing)
        detach(folder, peer)
        code = run_peer(folder, peer, run, data, report_error)
    except BaseException as error:
        traceback.print_exc()
        report_error(error_text(error))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # skips the parent's exit handlers


def detach(folder: RunFolder, peer: PeerId) -> None:
    """Detach from the parent's stdio: read from /dev/null, write to the peer's output file if it can be opened."""
    null = os.open(os.devnull, os.O_RDONLY)
    try:
        output = os.open(folder.peer(peer).output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:
        output = os.open(os.devnull, os.O_WRONLY)
    for descriptor, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, target)
    os.close(null)
    os.close(output)
    encode_as_utf8()


def send_event(descriptor: int, event: Mapping[str, Any]) -> None:
    """Write an event, unless the launcher has exited: the children continue."""
    line = memoryview((json.dumps(event) + "\n").encode())
    with suppress(OSError):
        while line:  # a signal, e.g. of an exited child, interrupts a long write
            line = line[os.write(descriptor, line) :]
