"""The launcher's connection to one host process: its state, its requests, and the handshake."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from launcher import formatting
from launcher.backends.hosts import Backend, Host, HostStream
from launcher.backends.mirror import Mirror
from launcher.errors import LaunchError
from p2pfl import PeerId
from p2pfl.run_folder.folder import RunFolder

PROTOCOL = 1
"""Version of the requests and events; see peers/host.py."""
MAX_NOISE = 5
"""Lines on a host's stdout, e.g. of a login script, that are kept for an error message."""

State = Literal["starting", "greeted", "opened", "listening", "probed", "ready", "ended", "lost"]
"""The states of a host; see host_group.py."""


def this_version() -> dict[str, Any]:
    """Return the versions and the code that the hosts must have too, from a process like theirs."""
    command = [sys.executable, "-P", "-c", "import json; from peers.host import hello; print(json.dumps(hello()))"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise LaunchError(f"this Python cannot start peers: {done.stderr.strip()}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@dataclass(frozen=True)
class Files:
    """What a host needs of the run.

    Attributes:
        folder: the launcher's run folder.
        token: contents of its TOKEN file.
        common: {path in the run folder: (content, mode)} for every host.
        private: the same for some peers: their private keys.
        sets: changes to the run file on a host, given the host, its address, its folder and whether that is shared.
        port: what a host listens on to be probed, 0 for any port: the first port of its peers, if that is fixed.
        neighbors: of each peer.
        copied: peers without their files restore copies of their checkpoints.
    """

    folder: RunFolder
    token: str
    common: Mapping[str, tuple[bytes, int]]
    private: Mapping[PeerId, Mapping[str, tuple[bytes, int]]]
    sets: Callable[[Host, str, str, bool], list[str]]
    port: Callable[[Host], int]
    neighbors: Sequence[Sequence[PeerId]]
    copied: bool = False


@dataclass(eq=False)
class HostConnection:
    """A host and its process.

    Attributes:
        since: when the process was started, has become ready, or has ended.
        hello: how the host describes itself.
        folder: the run folder on the host; ``shared``: it is the launcher's.
        waiting: peers to fork when the host is ready.
        wanted: peers that were asked for and have not exited as far as known.
        pids: process ids of the peers that run.
        port: where the host listens to be probed.
        failures: how often in a row its process has ended too early; ``hopeless``: it is not started again.
        problem: why it has ended or cannot be used.
        last_event_at: when the last event has arrived; None while no sign of life is due.
        synced: whether it has answered the last ``sync``.
    """

    host: Host
    stream: HostStream | None = None
    state: State = "starting"
    since: float = 0.0
    hello: dict[str, Any] = field(default_factory=dict)
    folder: str = ""
    shared: bool = False
    waiting: list[PeerId] = field(default_factory=list)
    wanted: set[PeerId] = field(default_factory=set)
    pids: dict[PeerId, int] = field(default_factory=dict)
    port: int = 0
    failures: int = 0
    hopeless: bool = False
    problem: str = ""
    synced: bool = False
    last_event_at: float | None = None
    mirror: Mirror | None = None
    _pending: bytes = b""
    _noise: list[str] = field(default_factory=list)

    @property
    def address(self) -> str:
        """What other hosts connect to."""
        return str(self.host.address or self.hello.get("address") or self.hello.get("hostname") or "127.0.0.1")

    @property
    def has_opened(self) -> bool:
        """Whether the process has opened the run, so that it can take addresses."""
        return self.state in ("opened", "listening", "probed", "ready")

    def start(self, backend: Backend) -> None:
        """Start the host process. Raises LaunchError."""
        self.state, self.since = "starting", time.monotonic()
        self._pending, self._noise, self.problem = b"", [], ""
        self.pids, self.stream, self.last_event_at = {}, None, None
        self.stream = backend.start(self.host, self.host.command)

    def send(self, do: str, **fields: Any) -> None:
        """Send a request, unless the process has ended."""
        if self.stream is not None:
            self.stream.send((json.dumps({"do": do, **fields}) + "\n").encode())

    def receive(self) -> Iterator[dict[str, Any]]:
        """Yield the events that have arrived.

        Raises:
            EOFError: the process has ended, for this reason.
        """
        assert self.stream is not None
        chunk = self.stream.read()
        if not chunk:
            reason = self.stream.outcome()
            self.drop()
            raise EOFError("; ".join([*self._noise, reason]))
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        for line in lines:
            try:
                event = json.loads(line)
                event["event"] + ""
            except (ValueError, TypeError, KeyError):
                self._noise = [*self._noise, line.decode(errors="replace")[:200]][-MAX_NOISE:]
            else:
                due = self.state == "ready" and event["event"] != "loading"
                self.last_event_at = time.monotonic() if due else None
                yield event

    def drop(self, *, kill: bool = False) -> None:
        """Close the stream."""
        stream, self.stream = self.stream, None
        if stream is not None:
            stream.close()
            if kill:
                stream.kill()

    # ---- the handshake ---------------------------------------------------------------------------------------

    def greet(self, event: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
        """Compare the host's versions with the ``expected`` ones. Raises LaunchError."""
        self.hello = dict(event)
        if event.get("protocol") != PROTOCOL or event.get("code") != expected["code"]:
            there, here = (
                f"{found['versions'].get('p2pfl-mesh')} (code {found.get('code')})" for found in (event, expected)
            )
            raise LaunchError(f"has p2pfl {there}, this host {here}; install the same version on all hosts")
        for package in ("torch", "numpy", "pyzmq"):
            there, here = event["versions"].get(package), expected["versions"].get(package)
            if there is None:
                raise LaunchError(f"has no {package} for {self.host.python}; install p2pfl there")
            if there != here and package == "torch":
                raise LaunchError(f"has {package} {there}, this host {here}: results would differ; install the same")
        self.state = "greeted"

    def open(self, files: Files) -> None:
        """Ask the host to open or create the run folder."""
        self.mirror = Mirror(files.folder, self.host.peers)
        folder = self.host.folder or str(files.folder.root)
        have = self.mirror.sizes()
        run = files.folder.info["id"]
        self.send("open", folder=folder, run=run, token=files.token, peers=list(self.host.peers), have=have)

    def opened(self, event: Mapping[str, Any], files: Files) -> None:
        """Send the files of the run, unless the host shares the folder."""
        self.state = "opened"
        self.shared, self.folder = event["shared"], event["folder"]
        self.pids = {int(peer): pid for peer, pid in event["running"].items()}
        statuses = [files.folder.peer(peer).status() for peer in event["new"]]
        lost = [status.peer for status in statuses if status is not None and status.rounds_done]
        if lost and not files.copied:
            raise LaunchError(
                f"has no checkpoints of peers {formatting.ids(lost)}: they were on another node, or were removed; "
                "keep copies of them: --set checkpoint_copies=FOLDER or URL"
            )
        self.wanted |= self.pids.keys()
        if not self.shared:
            for part in (files.common, *(files.private.get(peer, {}) for peer in self.host.peers)):
                for path, (content, mode) in part.items():
                    self.send("file", path=path, mode=mode, data=base64.b64encode(content).decode())

    def load(self, files: Files) -> None:
        """Ask the host to load the run."""
        self.send("load", sets=files.sets(self.host, self.address, self.folder, self.shared))
