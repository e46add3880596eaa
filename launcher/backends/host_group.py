"""The host processes of a run: handshake, checks, rendezvous of addresses, and restarts of whole hosts.

Each host goes through these states, and again if its process ends while peers of it should run:

    starting    its process was started, and has not yet said hello
    greeted     it has the same version of p2pfl and torch as this host
    opened      it has the run folder, and its files
    checked     the hosts can connect to each other (only at the start of a run)
    ready       it has loaded the run, and forks peers on request

Nothing blocks: ``events`` waits for whatever comes first from any host.
"""

from __future__ import annotations

import json
import select
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from launcher.backends.hosts import Backend, Host, HostStream
from launcher.backends.mirror import Mirror
from launcher.backends.warm import Event
from launcher.errors import LaunchError
from p2pfl import PeerId
from p2pfl.run_file.addresses import split
from p2pfl.session.run_folder import RunFolder
from p2pfl.terminal import printable

HELLO_TIMEOUT = 120.0
"""Seconds until a host process must have said hello: starting Python from a network disk is slow."""
MAX_FAILURES = 3
"""A host process that ends this many times in STABLE seconds each is not started again."""
STABLE = 120.0
"""Seconds after which earlier failures of a host no longer count."""
RETRY = 2.0
"""Seconds between the end of a host process and the next attempt."""
PROTOCOL = 1
"""Version of the requests and events; see peers/host.py."""

State = Literal["starting", "greeted", "opened", "listening", "probed", "ready", "ended", "lost"]


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
    """

    folder: RunFolder
    token: str
    common: Mapping[str, tuple[bytes, int]]
    private: Mapping[PeerId, Mapping[str, tuple[bytes, int]]]
    sets: Callable[[Host, str, str, bool], list[str]]
    port: Callable[[Host], int]
    neighbors: Sequence[Sequence[PeerId]]


@dataclass(eq=False)
class _Connection:
    """A host and its process."""

    host: Host
    stream: HostStream | None = None
    state: State = "starting"
    since: float = 0.0
    """When the process was started; ``ended``: when it ended."""
    hello: dict[str, Any] = field(default_factory=dict)
    folder: str = ""
    shared: bool = False
    pending: bytes = b""
    noise: list[str] = field(default_factory=list)
    """Lines on stdout that are not ours, e.g. of a login script."""
    waiting: list[PeerId] = field(default_factory=list)
    """Peers to fork when it is ready."""
    wanted: set[PeerId] = field(default_factory=set)
    """Peers that were started, or asked for, and have not exited as far as known."""
    pids: dict[PeerId, int] = field(default_factory=dict)
    port: int = 0
    failures: int = 0
    problem: str = ""
    synced: bool = False
    mirror: Mirror | None = None

    @property
    def address(self) -> str:
        """What other hosts connect to."""
        return str(self.host.address or self.hello.get("address") or self.hello.get("hostname") or "127.0.0.1")


class HostGroup:
    """The host processes of a run. Takes the place of a WarmProcess in ``follow``.

    Args:
        expected: ``versions`` and ``code`` of this host, which the others must have too.
    """

    def __init__(self, backend: Backend, hosts: Sequence[Host], expected: Mapping[str, Any]) -> None:
        self._backend = backend
        self._expected = expected
        self._connections = [_Connection(host) for host in hosts]
        self._files: Files | None = None
        self._of_peer: dict[PeerId, _Connection] = {}
        self._probing = False
        self._addresses: dict[PeerId, str | None] = {}
        self._notices: list[str] = []
        self._queued: list[Event] = []
        self._failing = False
        """Whether problems are raised: before the peers are started."""

    # ---- the start -------------------------------------------------------------------------------------------

    def connect(self) -> list[Host]:
        """Start all host processes. Return the hosts when all have said hello. Raises LaunchError."""
        self._failing = True
        for connection in self._connections:
            self._start(connection)
        self._wait_for("greeted")
        return [connection.host for connection in self._connections]

    @property
    def cores(self) -> dict[str, int]:
        """The cores of each host."""
        return {connection.host.name: connection.hello.get("cores", 1) for connection in self._connections}

    def open(self, hosts: Sequence[Host], files: Files, *, probe: bool = True, load: bool = True) -> None:
        """Send the files of the run to the hosts, and wait until they have loaded it. Raises LaunchError.

        Args:
            hosts: those of ``connect`` that have peers, with these.
            probe: check whether the hosts can connect to each other.
            load: False: only look what runs there.
        """
        self._files, self._probing = files, probe and len(hosts) > 1
        placed = {host.name: host for host in hosts}
        for connection in [each for each in self._connections if each.host.name not in placed]:
            self._connections.remove(connection)
            self._close(connection)
        for connection in self._connections:
            connection.host = placed[connection.host.name]
            self._of_peer |= dict.fromkeys(connection.host.peers, connection)
            self._send_files(connection)
        if self._probing:
            self._wait_for("listening")
            self._probe()
            self._wait_for("probed")
        self._probing = False
        if load:
            for connection in self._connections:
                if connection.state in ("opened", "probed"):
                    self._load(connection)
            self._wait_for("ready")
        else:
            self._wait_for("opened")
        self._failing = False

    @property
    def addresses(self) -> dict[str, str]:
        """What other hosts connect to, by host."""
        return {connection.host.name: connection.address for connection in self._connections}

    def host_of(self, peer: PeerId) -> str:
        """Return the name of the host of a peer."""
        return self._of_peer[peer].host.name

    def sync(self) -> None:
        """Wait until the files of all hosts are up to date. Raises LaunchError."""
        self._failing = True
        for connection in self._connections:
            connection.synced = False
            self._send(connection, "sync")
        while not all(connection.synced for connection in self._connections):
            self._wait_for("opened")
            self.events(1.0)
        self._failing = False

    @property
    def running(self) -> dict[PeerId, int]:
        """Process ids of the peers that are known to run."""
        return {peer: pid for connection in self._connections for peer, pid in connection.pids.items()}

    def _wait_for(self, state: State) -> None:
        order = ("starting", "greeted", "opened", "listening", "probed", "ready")
        while True:
            problems = [
                f"host {connection.host.name}: {connection.problem}"
                for connection in self._connections
                if connection.problem
            ]
            if problems:
                raise LaunchError(printable("\n".join(problems)))
            if all(order.index(connection.state) >= order.index(state) for connection in self._connections):
                return
            self.events(1.0)

    def _start(self, connection: _Connection) -> None:
        connection.state, connection.since = "starting", time.monotonic()
        connection.pending, connection.problem, connection.noise = b"", "", []
        try:
            connection.stream = self._backend.start(connection.host, connection.host.command)
        except LaunchError as error:
            connection.stream = None
            self._ended(connection, str(error))

    def _send(self, connection: _Connection, do: str, **fields: Any) -> None:
        if connection.stream is not None:
            connection.stream.send((json.dumps({"do": do, **fields}) + "\n").encode())

    def _send_files(self, connection: _Connection) -> None:
        assert self._files is not None
        files, host = self._files, connection.host
        connection.mirror = Mirror(files.folder, host.peers)
        self._send(
            connection,
            "open",
            folder=host.folder or str(files.folder.root),
            token=files.token,
            peers=list(host.peers),
            have=connection.mirror.sizes(),
        )

    def _opened(self, connection: _Connection, event: Mapping[str, Any]) -> None:
        """Send the files after the host has said whether it shares the folder; then check or load."""
        import base64

        assert self._files is not None
        connection.state = "opened"
        connection.shared, connection.folder = event["shared"], event["folder"]
        connection.pids = {int(peer): pid for peer, pid in event["running"].items()}
        connection.wanted |= connection.pids.keys()
        if not connection.shared:
            private = [self._files.private.get(peer, {}) for peer in connection.host.peers]
            for part in (self._files.common, *private):
                for path, (content, mode) in part.items():
                    self._send(connection, "file", path=path, mode=mode, data=base64.b64encode(content).decode())
            for peer, address in self._addresses.items():
                self._forward(peer, address, [connection])
        if self._probing:
            self._send(connection, "listen", port=self._files.port(connection.host))
        elif not self._failing:
            self._load(connection)

    def _load(self, connection: _Connection) -> None:
        assert self._files is not None
        sets = self._files.sets(connection.host, connection.address, connection.folder, connection.shared)
        self._send(connection, "load", sets=sets)

    def _probe(self) -> None:
        """Ask every host to connect to those that have neighbors of its peers."""
        assert self._files is not None
        for connection in self._connections:
            near = {
                self._of_peer[j]
                for i in connection.host.peers
                for j in self._files.neighbors[i]
                if j in self._of_peer
            }
            targets = {
                other.host.name: (other.address, other.port)
                for other in self._connections
                if other in near and other is not connection
            }
            self._send(connection, "probe", hosts=targets)

    # ---- in place of a WarmProcess -----------------------------------------------------------------------------

    def fork(self, folder: RunFolder, peers: Iterable[PeerId]) -> None:
        """Request the peers, each on its host. Each is answered by ``started`` and, at its end, by ``exited``."""
        by_host: dict[int, list[PeerId]] = defaultdict(list)
        for peer in peers:
            by_host[self._connections.index(self._of_peer[peer])].append(peer)
        for index, mine in by_host.items():
            connection = self._connections[index]
            if connection.state == "lost":
                problem = f"host {connection.host.name}: {connection.problem}"
                self._queued += [Event("exited", peer, code=1, error=problem) for peer in mine]
                continue
            connection.wanted |= set(mine)
            if connection.state == "ready":
                self._send(connection, "fork", peers=mine)
            else:
                connection.waiting += mine

    def events(self, timeout: float) -> list[Event]:
        """Return the events of all hosts since the last call; wait up to ``timeout`` seconds for the first."""
        found, self._queued = self._queued + self._overdue(), []
        streams = {
            connection.stream.events: connection for connection in self._connections if connection.stream is not None
        }
        unsent = [
            connection.stream.requests
            for connection in self._connections
            if connection.stream is not None and connection.stream.unsent
        ]
        if not streams:
            time.sleep(0.0 if found else timeout)  # nothing will arrive before an attempt to start a host again
            return found
        readable, writable, _ = select.select(list(streams), unsent, [], 0.0 if found else timeout)
        for connection in list(streams.values()):
            if connection.stream is not None and connection.stream.requests in writable:
                connection.stream.flush()
        for descriptor in readable:
            found += self._receive(streams[descriptor])
        return found

    def restart(self) -> None:
        """Do nothing: hosts are started again one by one, by ``events``."""

    def kill(self) -> None:
        """Close the streams: host processes without peers exit."""
        self.close()

    def notices(self) -> list[str]:
        """Return what to print about hosts, each line once."""
        lines, self._notices = self._notices, []
        return lines

    def signal(self, peers: Iterable[PeerId], number: int) -> None:
        """Send a signal to peers, on whatever host they are."""
        by_host: dict[int, list[PeerId]] = defaultdict(list)
        for peer in peers:
            by_host[self._connections.index(self._of_peer[peer])].append(peer)
        for index, mine in by_host.items():
            self._send(self._connections[index], "signal", peers=mine, signal=int(number))

    def close(self) -> None:
        """End all host processes that have no peers; the others end with their last one."""
        for connection in self._connections:
            if connection.stream is not None:
                connection.stream.close_requests()
        for connection in self._connections:
            self._close(connection)
        self._backend.close()

    def __enter__(self) -> HostGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- events ------------------------------------------------------------------------------------------------

    def _close(self, connection: _Connection) -> None:
        stream, connection.stream = connection.stream, None
        if stream is not None:
            stream.close_requests()
            if connection.wanted:
                stream.close()  # its peers keep running, and its process with them
                return
            if select.select([stream.events], [], [], 5.0)[0] and stream.read():
                pass  # a last event
            stream.close()
            stream.kill()

    def _receive(self, connection: _Connection) -> list[Event]:
        stream = connection.stream
        if stream is None:
            return []
        chunk = stream.read()
        if not chunk:
            reason = stream.outcome()
            stream.close()
            connection.stream = None
            return self._ended(connection, "; ".join([*connection.noise[-3:], reason]))
        *lines, connection.pending = (connection.pending + chunk).split(b"\n")
        found: list[Event] = []
        for line in lines:
            try:
                event = json.loads(line)
                kind = event["event"]
            except (ValueError, TypeError, KeyError):
                connection.noise.append(line.decode(errors="replace")[:200])
                continue
            try:
                found += self._handle(connection, kind, event)
            except LaunchError as error:
                self._fail(connection, str(error))
            if connection.stream is None:
                break
        return found

    def _handle(self, connection: _Connection, kind: str, event: Mapping[str, Any]) -> list[Event]:
        if kind == "hello":
            self._greet(connection, event)
        elif kind == "opened":
            self._opened(connection, event)
        elif kind == "listening":
            connection.port, connection.state = event["port"], "listening"
        elif kind == "probed":
            connection.state = "probed"
            self._judge(connection, event["failures"])
        elif kind == "ready":
            return self._ready(connection)
        elif kind == "synced":
            connection.synced = True
        elif kind == "failed":
            raise LaunchError(event["error"])
        elif kind == "started":
            connection.pids[event["peer"]] = event["pid"]
            return [Event("started", event["peer"], pid=event["pid"])]
        elif kind == "exited":
            peer = event["peer"]
            connection.wanted.discard(peer)
            connection.pids.pop(peer, None)
            if event["code"] is None:
                return [Event("vanished", peer)]
            return [Event("exited", peer, code=event["code"], error=event["error"])]
        elif kind == "address":
            self._addresses[event["peer"]] = event["address"]
            self._forward(event["peer"], event["address"], self._connections)
        elif kind == "file" and connection.mirror is not None:
            connection.mirror.write(event)
        return []

    def _greet(self, connection: _Connection, event: Mapping[str, Any]) -> None:
        connection.hello = dict(event)
        if event.get("protocol") != PROTOCOL or event.get("code") != self._expected["code"]:
            there, here = (
                f"{found['versions'].get('p2pfl-mesh')} (code {found.get('code')})"
                for found in (event, self._expected)
            )
            raise LaunchError(f"has p2pfl {there}, this host {here}; install the same version on all hosts")
        for package in ("torch", "numpy", "pyzmq"):
            there, here = event["versions"].get(package), self._expected["versions"].get(package)
            if there is None:
                raise LaunchError(f"has no {package} for {connection.host.python}; install p2pfl there")
            if there != here and package == "torch":
                raise LaunchError(f"has {package} {there}, this host {here}: results would differ; install the same")
        connection.state = "greeted"
        if self._files is not None:
            self._send_files(connection)

    def _judge(self, connection: _Connection, failures: Mapping[str, str]) -> None:
        if failures:
            by_name = {other.host.name: other for other in self._connections}
            texts = [
                f"cannot connect to host {name} at {by_name[name].address}, port {by_name[name].port}: {reason}"
                for name, reason in failures.items()
                if name in by_name
            ]
            remedy = "open the TCP ports between the hosts (transport.port limits them), and check the addresses"
            raise LaunchError(f"{'; '.join(texts)}; {remedy}")

    def _ready(self, connection: _Connection) -> list[Event]:
        """Find out which of the wanted peers run, and fork those that wait."""
        again = bool(connection.failures)
        connection.state, connection.since = "ready", time.monotonic()
        found = [Event("started", peer, pid=pid) for peer, pid in connection.pids.items()]
        missing = connection.wanted - connection.pids.keys() - set(connection.waiting)
        connection.wanted -= missing
        found += [Event("vanished", peer) for peer in sorted(missing)]
        if connection.waiting:
            self._send(connection, "fork", peers=connection.waiting)
            connection.waiting = []
        if again:
            alive = f"{len(connection.pids)} of its peers still run" if connection.pids else "none of its peers runs"
            self._notices.append(f"host {connection.host.name} is back; {alive}")
        return found

    def _forward(self, peer: PeerId, address: str | None, connections: Iterable[_Connection]) -> None:
        """Tell hosts with neighbors of ``peer`` its address; a host that shares the folder knows it."""
        assert self._files is not None
        if address is not None:
            try:
                split(address)
            except ValueError as error:
                raise LaunchError(f"peer {peer}: {error}") from None
        neighbors = set(self._files.neighbors[peer])
        for connection in connections:
            if connection is not self._of_peer.get(peer) and neighbors & set(connection.host.peers):
                self._send(connection, "address", peer=peer, address=address)

    def _fail(self, connection: _Connection, problem: str) -> None:
        """End a host process that cannot be used."""
        if connection.stream is not None:
            connection.stream.close()
            connection.stream.kill()
            connection.stream = None
        connection.failures, connection.since = MAX_FAILURES, time.monotonic()  # it would fail again
        self._ended(connection, problem)

    def _ended(self, connection: _Connection, reason: str) -> list[Event]:
        connection.problem, connection.state = reason or "has ended", "ended"
        stable = time.monotonic() - connection.since > STABLE
        connection.failures = 1 if stable else connection.failures + 1
        connection.since = time.monotonic()
        if not self._failing and connection.wanted:
            retry = "; starting it again" if connection.failures <= MAX_FAILURES else ""
            self._notices.append(f"host {connection.host.name}: its process has ended: {printable(reason)}{retry}")
        return []

    def _overdue(self) -> list[Event]:
        """Start hosts again whose process has ended; give up those that fail again and again."""
        found = []
        for connection in self._connections:
            waited = time.monotonic() - connection.since
            if connection.state == "starting" and waited > HELLO_TIMEOUT:
                self._fail(connection, f"no answer within {HELLO_TIMEOUT:.0f} s; is it reachable?")
            if self._failing or connection.state != "ended" or not connection.wanted:
                continue
            if connection.failures > MAX_FAILURES:
                connection.state = "lost"
                connection.waiting = []
                problem = f"host {connection.host.name}: {connection.problem}"
                found += [Event("exited", peer, code=1, error=problem) for peer in sorted(connection.wanted)]
                connection.wanted, connection.pids = set(), {}
            elif waited > RETRY:
                connection.pids = {}
                self._start(connection)
        return found
