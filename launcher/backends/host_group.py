"""The host processes of a run: checks, rendezvous of addresses, and restarts of whole hosts.

Each host goes through these states, and again if its process ends while peers of it should run:

    starting              its process was started, and has not yet said hello
    greeted               it has the same version of p2pfl and torch as this host
    opened                it has the run folder, and its files
    listening, probed     the hosts can connect to each other (only at the start of a run)
    ready                 it has loaded the run, and forks peers on request
    ended                 its process has ended; it is started again while peers of it should run
    lost                  that has failed too often

Nothing blocks: ``events`` waits for the first event of any host.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from launcher.backends.group import Event
from launcher.backends.host_connection import Files, HostConnection, State
from launcher.backends.hosts import Backend, Host, ready
from launcher.errors import HostsGone, LaunchError
from launcher.facts.processes import HOST_LOST
from p2pfl import PeerId
from p2pfl.errors import WriteError
from p2pfl.run_file.addresses import split
from p2pfl.terminal import printable

ALLOCATION_ENDED = re.compile(r"Slurm job \d+ has expired|DUE TO TIME LIMIT")
"""In the reason why a host process has ended: none can be started any more."""
NOT_INSTALLED = re.compile(r"No module named '?peers\b|python[\d.]*: (No such file or directory|not found)")
"""In the reason why a host process has ended: its Python does not have p2pfl."""
LOAD_TIMEOUT = 900.0
"""Seconds from the start of a host process until it must have loaded the run: datasets may be downloaded."""
SYNC_TIMEOUT = 120.0
"""Seconds that a host may take to send what has changed in its files."""
HELLO_TIMEOUT = 120.0
"""Seconds until a host process must have said hello: starting Python from a network disk is slow."""
MAX_FAILURES = 3
"""A host process that ends more often than this, each time before it was ready for STABLE seconds, is not started
again, or ever more rarely (``keep_trying``)."""
MAX_RETRY = 60.0
"""Most seconds until the next attempt."""
STABLE = 120.0
"""Seconds for which a host must have been ready, so that its earlier failures no longer count."""
RETRY = 2.0
"""Seconds between the end of a host process and the next attempt."""
SILENCE = 20.0
"""Seconds without a sign of life, due every 5 s, after which a host process is started anew. Less than the usual
``transport.give_up``, for which neighbors wait for the peers of a host that has died without closing its streams."""
EXIT_TIMEOUT = 10.0
"""Seconds that host processes without peers may take to exit."""
ORDER: tuple[State, ...] = ("starting", "greeted", "opened", "listening", "probed", "ready")


class HostGroup:
    """The host processes of a run.

    Args:
        expected: ``versions`` and ``code`` of this host, which the others must have too.
        keep_trying: start hosts again however often their processes have ended, ever more rarely.
    """

    def __init__(
        self, backend: Backend, hosts: Sequence[Host], expected: Mapping[str, Any], *, keep_trying: bool = False
    ) -> None:
        self._backend = backend
        self._keep_trying = keep_trying
        self._expected = expected
        self._connections = [HostConnection(host) for host in hosts]
        self._of_peer: dict[PeerId, HostConnection] = {}
        self._files: Files | None = None
        self._addresses: dict[PeerId, str | None] = {}
        self._dead: dict[PeerId, str] = {}
        """Paths of the death notices of peers that are not restarted, in the run folder."""
        self._notices: list[str] = []
        self._queued: list[Event] = []
        self._preparing = False
        """Whether a problem of a host is raised: before the peers are started."""

    @property
    def cores(self) -> dict[str, int]:
        """The cores of each host."""
        return {each.host.name: each.hello.get("cores", 1) for each in self._connections}

    @property
    def addresses(self) -> dict[str, str]:
        """What other hosts connect to, by host."""
        return {each.host.name: each.address for each in self._connections}

    @property
    def running(self) -> dict[PeerId, int]:
        """Process ids of the peers that are known to run."""
        return {peer: pid for each in self._connections for peer, pid in each.pids.items()}

    @property
    def shared(self) -> bool:
        """Whether all hosts have the launcher's run folder."""
        return all(each.shared for each in self._connections)

    def host_of(self, peer: PeerId) -> str:
        """Return the name of the host of a peer."""
        return self._of_peer[peer].host.name

    # ---- the start -------------------------------------------------------------------------------------------

    def connect(self) -> list[Host]:
        """Start all host processes. Return the hosts when all have said hello. Raises LaunchError."""
        self._preparing = True
        for each in self._connections:
            self._start(each)
        self._wait_for("greeted")
        return [each.host for each in self._connections]

    def open(self, hosts: Sequence[Host], files: Files, *, probe: bool = True, load: bool = True) -> None:
        """Send the files of the run to the hosts, and wait until they have loaded it. Raises LaunchError.

        Args:
            hosts: the hosts that ``connect`` has returned, with their peers; without the hosts that have none.
            probe: check whether the hosts can connect to each other, unless a peer runs.
            load: False: only find out which peers run.
        """
        self._files = files
        placed = {host.name: host for host in hosts}
        for each in [each for each in self._connections if each.host.name not in placed]:
            self._connections.remove(each)
            self._close([each])
        for each in self._connections:
            each.host, each.since = placed[each.host.name], time.monotonic()  # it was not asked anything before
            self._of_peer |= dict.fromkeys(each.host.peers, each)
            each.open(files)
        self._wait_for("opened")
        if probe and len(hosts) > 1 and not self.running:  # otherwise fixed ports may be in use
            for each in self._connections:
                each.send("listen", port=files.port(each.host))
            self._wait_for("listening")
            for each in self._connections:
                _probe(each, {self._of_peer[j] for i in each.host.peers for j in files.neighbors[i]} - {each})
            self._wait_for("probed")
        if load:
            for each in self._connections:
                each.load(files)
            self._wait_for("ready")
        self._preparing = False

    def sync(self) -> None:
        """Wait until the files of all hosts are up to date. Raises LaunchError."""
        self._preparing = True
        for each in self._connections:
            each.synced = False
            each.send("sync")
        end = time.monotonic() + SYNC_TIMEOUT
        while late := [each.host.name for each in self._connections if not each.synced]:
            if time.monotonic() > end:
                raise LaunchError(f"hosts {', '.join(late)}: no answer within {SYNC_TIMEOUT:.0f} s")
            self._wait_for("opened")
            self.events(1.0)
        self._preparing = False

    def _wait_for(self, state: State) -> None:
        while True:
            if problems := [_problem(each) for each in self._connections if each.problem]:
                raise LaunchError(printable("\n".join(problems)))
            if all(ORDER.index(each.state) >= ORDER.index(state) for each in self._connections):
                return
            self.events(1.0)

    def _start(self, host: HostConnection) -> None:
        try:
            host.start(self._backend)
        except HostsGone as error:
            if self._preparing:
                raise
            self._ended(host, str(error), final=True)
        except LaunchError as error:
            self._ended(host, str(error))

    # ---- the peers -------------------------------------------------------------------------------------------

    def fork(self, peers: Iterable[PeerId]) -> None:
        """Request the peers, each on its host. Each is answered by ``started`` and, at its end, by ``exited``."""
        for host, mine in self._by_host(peers):
            if host.state == "lost":
                self._queued += _exits(host, mine)
                continue
            host.wanted |= set(mine)
            if host.state == "ready":
                host.send("fork", peers=mine)
            else:
                host.waiting += mine

    def declare_dead(self, peer: PeerId) -> None:
        """Have the neighbors of a peer that is not restarted continue without it, on every host."""
        assert self._files is not None
        folder = self._files.folder
        self._dead[peer] = str(folder.death_notice(peer).relative_to(folder.root))
        for each in self._connections:
            if each.has_opened:
                self._send_death_notice(peer, each)

    def _send_death_notice(self, peer: PeerId, host: HostConnection) -> None:
        host.send("file", path=self._dead[peer], mode=0o644, data="")

    def signal(self, peers: Iterable[PeerId], number: int) -> None:
        """Send a signal to peers."""
        for host, mine in self._by_host(peers):
            host.send("signal", peers=mine, signal=int(number))

    def cancel(self) -> None:
        """Withdraw the requests that no host has got yet."""
        for host in self._connections:
            self._queued += [Event("vanished", peer) for peer in host.waiting]
            host.wanted -= set(host.waiting)
            host.waiting = []

    def _by_host(self, peers: Iterable[PeerId]) -> Iterable[tuple[HostConnection, list[PeerId]]]:
        found: dict[HostConnection, list[PeerId]] = defaultdict(list)
        for peer in peers:
            found[self._of_peer[peer]].append(peer)
        return found.items()

    def events(self, timeout: float) -> list[Event]:
        """Return the events of all hosts since the last call; wait up to ``timeout`` seconds for the first."""
        found, self._queued = self._queued + self._overdue(), []
        timeout = 0.0 if found else timeout
        streams = {each.stream.events: each for each in self._connections if each.stream is not None}
        unsent = {
            each.stream.requests: each.stream
            for each in self._connections
            if each.stream is not None and each.stream.unsent and not each.stream.closed
        }
        if not streams:
            time.sleep(timeout)  # nothing will arrive before the next attempt to start a host again
            return found
        readable, writable = ready(streams, unsent, timeout)
        now = time.monotonic()  # not later: to end the process of a silent host may take seconds
        for descriptor in writable:
            unsent[descriptor].flush()
        for descriptor, host in streams.items():
            if descriptor in readable:
                found += self._receive(host)
            elif host.last_event_at is not None and now - host.last_event_at > SILENCE:
                host.drop(kill=True)
                self._ended(host, f"no sign of life for {SILENCE:.0f} s")
        return found

    def notices(self) -> list[str]:
        """Return what to print about hosts, each line once."""
        lines, self._notices = self._notices, []
        return lines

    def close(self) -> None:
        """End the host processes without peers; the others end with their last one."""
        self._close(self._connections)
        self._backend.close()

    def __enter__(self) -> HostGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _close(self, connections: Sequence[HostConnection]) -> None:
        for each in connections:
            if each.stream is not None:
                each.stream.close_requests()
        end = time.monotonic() + EXIT_TIMEOUT
        for each in connections:
            while not each.wanted and each.stream is not None:
                remaining = end - time.monotonic()
                if remaining <= 0 or not ready([each.stream.events], timeout=remaining)[0]:
                    break
                if not each.stream.read():
                    break
            each.drop(kill=not each.wanted)

    # ---- events ------------------------------------------------------------------------------------------------

    def _receive(self, host: HostConnection) -> list[Event]:
        found: list[Event] = []
        try:
            for event in host.receive():
                found += self._handle(host, event["event"], event)
        except EOFError as end:
            self._ended(host, str(end))
        except LaunchError as error:
            host.drop(kill=True)
            self._ended(host, str(error), final=True)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            host.drop(kill=True)
            self._ended(host, f"it sent an invalid event: {type(error).__name__}: {error}", final=True)
        return found

    def _handle(self, host: HostConnection, kind: str, event: Mapping[str, Any]) -> list[Event]:
        if "peer" in event and event["peer"] not in host.host.peers:
            raise LaunchError(f"it reports peer {event['peer']!r}, which is not one of its peers")
        if kind == "hello":
            host.greet(event, self._expected)
            if self._files is not None:
                host.open(self._files)
        elif kind == "opened":
            self._opened(host, event)
        elif kind == "listening":
            host.port, host.state = event["port"], "listening"
        elif kind == "probed":
            host.state = "probed"
            _check_connections(event["failures"], self._connections)
        elif kind == "ready":
            return self._ready(host)
        elif kind == "synced":
            host.synced = True
        elif kind == "failed":
            why = host.host.without_gpu
            raise LaunchError(event["error"] + (f". {why}" if why and "GPU" in event["error"] else ""))
        elif kind == "notice":
            self._notices.append(f"host {host.host.name}: {printable(event['text'])}")
        elif kind == "started":
            host.pids[event["peer"]] = event["pid"]
            return [Event("started", event["peer"], pid=event["pid"])]
        elif kind == "exited":
            peer, code, error = event["peer"], event["code"], event["error"]
            host.wanted.discard(peer)
            host.pids.pop(peer, None)
            return [Event("vanished", peer) if code is None else Event("exited", peer, code=code, error=error)]
        elif kind == "address":
            self._addresses[event["peer"]] = event["address"]
            self._forward(event["peer"], event["address"], self._connections)
        elif kind == "file" and host.mirror is not None:
            try:
                host.mirror.write(event)
            except WriteError as error:  # training does not need the copies
                host.mirror = None
                self._notices.append(f"host {host.host.name}: files of its peers are no longer copied here: {error}")
        return []

    def _opened(self, host: HostConnection, event: Mapping[str, Any]) -> None:
        assert self._files is not None
        host.opened(event, self._files)
        for peer, address in self._addresses.items():
            self._forward(peer, address, [host])
        for peer in self._dead:
            self._send_death_notice(peer, host)
        if not self._preparing:  # it has come back
            host.load(self._files)

    def _ready(self, host: HostConnection) -> list[Event]:
        """Find out which of the wanted peers run, and fork the waiting ones."""
        host.state, host.since = "ready", time.monotonic()
        missing = sorted(host.wanted - host.pids.keys() - set(host.waiting))
        host.wanted -= set(missing)
        if host.failures:
            alive = f"{len(host.pids)} of its peers still run" if host.pids else "none of its peers runs"
            self._notices.append(f"host {host.host.name} is back; {alive}")
        if host.waiting:
            host.send("fork", peers=host.waiting)
            host.waiting = []
        started = [Event("started", peer, pid=pid) for peer, pid in host.pids.items()]
        return started + [Event("vanished", peer) for peer in missing]

    def _forward(self, peer: PeerId, address: str | None, hosts: Iterable[HostConnection]) -> None:
        """Send a peer's address to the other hosts that have neighbors of it and have opened the run."""
        assert self._files is not None
        if address is not None:
            try:
                split(address)
            except ValueError as error:
                raise LaunchError(f"peer {peer}: {error}") from None
        neighbors = self._files.neighbors[peer]
        owner = self._of_peer[peer]
        for other in hosts:
            if owner.shared and other.shared:
                continue  # the file is there, and may be newer
            if other.has_opened and other is not owner and any(self._of_peer[j] is other for j in neighbors):
                other.send("address", peer=peer, address=address)

    def _ended(self, host: HostConnection, reason: str, *, final: bool = False) -> None:
        """Note that a host process has ended. ``final``: it would end again."""
        stable = host.state == "ready" and time.monotonic() - host.since > STABLE
        host.failures = 1 if stable else host.failures + 1
        final = final or ALLOCATION_ENDED.search(reason) is not None
        host.hopeless = final or (host.failures > MAX_FAILURES and not self._keep_trying)
        host.problem, host.state, host.since = reason, "ended", time.monotonic()
        if not self._preparing and host.wanted:
            again = "" if host.hopeless else "; starting it again"
            self._notices.append(f"host {host.host.name}: its process has ended: {printable(reason)}{again}")

    def _overdue(self) -> list[Event]:
        """Start hosts again whose process has ended; give up the hosts that fail too often."""
        found: list[Event] = []
        for host in self._connections:
            waited = time.monotonic() - host.since
            limit = HELLO_TIMEOUT if host.state == "starting" else LOAD_TIMEOUT
            if host.state not in ("ready", "ended", "lost") and waited > limit:
                host.drop(kill=True)
                self._ended(host, f"{host.state}, and no answer within {limit:.0f} s")
            elif self._preparing or host.state != "ended" or not host.wanted:
                continue
            elif host.hopeless:
                found += _exits(host, sorted(host.wanted))
                host.state, host.wanted, host.waiting, host.pids = "lost", set(), [], {}
            elif waited > min(MAX_RETRY, RETRY * 2 ** min(8, max(0, host.failures - MAX_FAILURES))):
                self._start(host)
        return found


def _problem(host: HostConnection) -> str:
    """Return what is wrong with a host, and what to do if that is known."""
    text = f"host {host.host.name}: {host.problem}"
    if NOT_INSTALLED.search(str(host.problem)):
        text += f"; install p2pfl for {host.host.python} there, or name the Python that has it"
    return text


def _exits(host: HostConnection, peers: Iterable[PeerId]) -> list[Event]:
    """Return the exits of the peers of a lost host."""
    return [Event("exited", peer, code=HOST_LOST, error=f"host {host.host.name} is lost") for peer in peers]


def _probe(host: HostConnection, near: Iterable[HostConnection]) -> None:
    """Ask a host to connect to the hosts of its peers' neighbors."""
    host.send("probe", hosts={other.host.name: (other.address, other.port) for other in near})


def _check_connections(failures: Mapping[str, str], connections: Iterable[HostConnection]) -> None:
    """Raise LaunchError if a host could not connect to others, given why by their names."""
    others = {each.host.name: each for each in connections}
    problems = [
        f"cannot connect to host {name} at {others[name].address}, port {others[name].port}: {reason}"
        for name, reason in failures.items()
    ]
    if problems:
        remedy = "open the TCP ports between the hosts (transport.port limits them), and check the addresses"
        raise LaunchError(f"{'; '.join(problems)}; {remedy}")
