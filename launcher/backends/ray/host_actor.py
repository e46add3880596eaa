"""The Ray actor on a node: starts host processes (peers/host.py) as its subprocesses, and relays their bytes.

Sent to the nodes by value, so that a node with another version of p2pfl, or none, can say so: it imports only the
standard library and Ray. It outlives the launcher (``lifetime="detached"``), and so do the peers; but peers never
outlive the actor: Ray may start their successors on another node then. Three guards see to that:

- a shell for each host process kills its process group when this process dies;
- a thread does the same when the raylet of the node dies, or ends because the cluster has declared the node dead;
- Ray kills this process if it removes the actor, which the shells notice.

When all host processes have ended and no launcher asks any more, the actor ends, and the last one of a run removes
its placement group.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from tempfile import TemporaryFile
from time import monotonic
from typing import IO, Any

GUARD = 'read -r _; kill -KILL "-$1"'
"""Kills a process group when the pipe on its stdin closes."""
LOST = 60.0
"""Seconds without a request after which the launcher counts as dead. It asks every few seconds."""
INTERVAL = 5.0
"""Seconds between two checks for that."""
MAX_BUFFER = 8 << 20
"""Bytes that are read ahead of the launcher."""
MAX_OUTPUT = 4096
"""Bytes of a host process's error output that are reported."""


class _Process:
    """A host process, its guard, and what it has written."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.errors: IO[bytes] = TemporaryFile()  # noqa: SIM115  # as long as the process
        self.popen = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env={**os.environ, **environment},
            start_new_session=True,
            bufsize=0,
        )
        self.guard = subprocess.Popen(
            ["sh", "-c", GUARD, "guard", str(self.popen.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.output = bytearray()
        self.start = 0
        """Bytes that the launcher has, and that were dropped."""
        self.abandoned = False
        """Whether the launcher seems dead: the process must not wait until it reads."""
        self.ended = False
        self.changed = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        complete = True
        while chunk := os.read(self.popen.stdout.fileno(), 1 << 16):
            with self.changed:
                self.changed.wait_for(lambda: len(self.output) < MAX_BUFFER or self.abandoned)
                complete = complete and len(self.output) < MAX_BUFFER
                if complete:  # otherwise the rest is dropped: a launcher that was only suspended gets no gap
                    self.output += chunk
                    self.changed.notify_all()
        with self.changed:
            self.ended = True
            self.changed.notify_all()

    @property
    def running(self) -> bool:
        """Whether a process of its group, e.g. a peer, runs."""
        self.popen.poll()
        try:
            os.killpg(self.popen.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def close_requests(self) -> None:
        assert self.popen.stdin is not None
        with suppress(OSError):
            self.popen.stdin.close()

    def abandon(self) -> None:
        """Let it end with its peers, for want of a launcher."""
        self.close_requests()
        with self.changed:
            self.abandoned = True
            self.changed.notify_all()

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)

    def outcome(self) -> str:
        """Why it has ended: the end of its error output, or its exit code."""
        code = self.popen.wait()
        size = os.fstat(self.errors.fileno()).st_size
        text = os.pread(self.errors.fileno(), MAX_OUTPUT, max(0, size - MAX_OUTPUT)).decode(errors="replace")
        said = [line.strip() for line in text.splitlines() if line.strip()]
        return "; ".join(said[-3:]) or f"the host process exited with code {code}"


class HostActor:
    """Runs on a node of the cluster, in the bundle of a host."""

    def __init__(self) -> None:
        self._processes: dict[str, _Process] = {}
        self._asked = monotonic()
        for guard in (self._watch_raylet, self._watch_launcher):
            threading.Thread(target=guard, daemon=True).start()

    def describe(self) -> dict[str, Any]:
        """Return where this is."""
        import ray

        self._asked = monotonic()
        context = ray.get_runtime_context()
        return {
            "node": context.get_node_id(),
            "address": ray.util.get_node_ip_address(),
            "hostname": socket.gethostname(),
        }

    def start(self, key: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start a host process, and know it by ``key``. The first word of the command is the Python of this node."""
        import ray

        self._asked = monotonic()
        address = {"P2PFL_ADDRESS": ray.util.get_node_ip_address()}
        self._processes[key] = _Process([sys.executable, *command[1:]], {**address, **environment})

    def write(self, key: str, data: bytes) -> bool:
        """Pass on requests. Return False if the process reads no more."""
        process = self._processes[key]
        assert process.popen.stdin is not None
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(process.popen.stdin.fileno(), view) :]
        except (OSError, ValueError):
            return False
        return True

    def close_requests(self, key: str) -> None:
        """Let the host process know that no request will follow: it exits after its last peer."""
        self._processes[key].close_requests()

    def read(self, key: str, start: int, timeout: float) -> bytes | None:
        """Return what was written after the first ``start`` bytes, empty at the end; None after ``timeout``."""
        self._asked = monotonic()
        process = self._processes[key]
        with process.changed:
            del process.output[: start - process.start]
            process.start = start
            process.changed.notify_all()
            process.changed.wait_for(lambda: process.output or process.ended, timeout)
            if process.output:
                return bytes(process.output[: 1 << 20])
            return b"" if process.ended else None

    def outcome(self, key: str) -> str:
        return self._processes[key].outcome()

    def busy(self) -> bool:
        """Return whether a host process or a peer runs here."""
        return any(process.running for process in list(self._processes.values()))

    def _watch_raylet(self) -> None:
        """Kill the peers with the raylet, which is this process's parent."""
        raylet = os.getppid()
        try:
            select.select([os.pidfd_open(raylet)], [], [])
        except (AttributeError, OSError):  # Python or the kernel lacks it
            waiting = threading.Event()
            while os.getppid() == raylet:
                waiting.wait(INTERVAL)
        for process in list(self._processes.values()):
            process.kill()
        os._exit(1)

    def _watch_launcher(self) -> None:
        """After the launcher's death, let the host processes end with their peers, and then this process."""
        waiting = threading.Event()
        while True:
            waiting.wait(INTERVAL)
            if monotonic() - self._asked < LOST:
                continue
            for process in list(self._processes.values()):
                process.abandon()
            if not self.busy():
                self._leave()

    def _leave(self) -> None:
        """End this process; of several, that with the first name stays until the others have, and cleans up."""
        import ray

        with suppress(Exception):  # of a cluster that shuts down
            names = sorted(ray.util.list_named_actors())
            if names[:1] == [ray.get_runtime_context().get_actor_name()]:
                if len(names) > 1:
                    return
                if (group := ray.util.get_current_placement_group()) is not None:
                    ray.util.remove_placement_group(group)
        os._exit(0)
