"""Runs on several hosts: what a backend has to provide (``ssh/``, ``slurm/``, ``ray/``, or another package).

A backend only starts one command on each host, the *host process* (``python -m peers --host``, peers/host.py), and
gives the launcher two byte streams to it. Everything else is here for all backends:

    several_hosts.py  the hosts as a group that is launched and followed as this host alone is (launch.py, follow.py)
    host_group.py     the host processes: handshake, checks, rendezvous of addresses, restarts of whole hosts
    host_files.py     files and keys for the hosts
    mirror.py         the small files of peers on other hosts, written into the launcher's run folder
    refresh.py        what runs on the hosts, and its files, when no launcher follows the run

A backend is a class that satisfies ``Backend`` and ``BackendType``. A package provides it by name, as an entry point
of the group ``p2pfl.backends`` (docs/guide/extensions.md). The launcher's calls are, in this order:

    make(options)                    for `p2pfl launch --backend NAME`, or
    restore(saved)                   for resume, stop and status, from what ``saved()`` returned
    hosts()                          the hosts of this run. Raises LaunchError. Not for stop and status.
    start(host, command) -> HostStream
                                     start ``command`` on that host, without waiting for it. Called once for each
                                     host, and again for one whose stream has ended while peers of it should run. A
                                     backend may start it on another machine then, if that has ``host.folder`` too.
                                     Raises HostsGone if nothing of the run can be running any more.
    close()                          at the end, after all streams are closed

A stream ends (``read`` returns b"") when the host process has exited or the host is lost; ``outcome`` returns the
reason.
``stream_of`` makes one from a Popen. A backend without pipes, e.g. one that relays lines of a Ray actor, passes the
two descriptors of a socketpair or of pipes to ``HostStream`` and relays on a thread.

The launcher never takes part in training. It forwards to each host the addresses of its peers' neighbors; from then
on it may die, and training goes on. What it does while it lives: restart peers, and write down their progress.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, cast

from launcher.descriptors import memory_file
from launcher.errors import LaunchError
from launcher.prepare import LaunchRequest
from p2pfl import PeerId
from p2pfl.errors import P2pflError
from p2pfl.installed import BACKENDS, load, names
from p2pfl.run_folder.files import read_json, write_atomically
from p2pfl.run_folder.folder import RunFolder

ENVIRONMENT = ".environment.json"
"""File of a run folder with the variables of each host, which only the owner can read: they may be secret."""
EXIT_TIMEOUT = 5.0
"""Seconds that a command that connects to a host may take to exit."""
MAX_OUTPUT = 4096
"""Bytes of a host process's error output that are kept."""


@dataclass(frozen=True)
class Host:
    """A host of a run.

    Attributes:
        name: for messages, and for the backend.
        address: what other hosts connect to; None: what the host process finds out itself.
        python: the Python that has p2pfl on that host.
        folder: the run folder on the host; None: the same path as the launcher's.
        weight: how many peers it gets, relative to other hosts; None: its number of slots or cores.
        slots: peers that compute at the same time; None: as the run file says.
        peers: the peers on this host; before ``place`` only the peers that the user wants there.
        environment: variables of the host process.
        cores: cores that it may use; None: all that it has.
        without_gpu: why it has no GPU, for errors.
    """

    name: str
    address: str | None = None
    python: str = "python3"
    folder: str | None = None
    weight: float | None = None
    slots: int | None = None
    peers: tuple[PeerId, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    cores: int | None = None
    without_gpu: str = ""

    @property
    def command(self) -> list[str]:
        """The command of the host process, with ``env`` for its variables."""
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        return [*(["env", *variables] if variables else []), self.python, "-P", "-m", "peers", "--host"]


@dataclass(frozen=True)
class BackendOptions:
    """What the user asks of a backend.

    Attributes:
        hosts: ``--hosts``.
        settings: the ``KEY=VALUE`` of ``--option``.
        request: the run to launch.
    """

    hosts: Path | None = None
    settings: tuple[str, ...] = ()
    request: LaunchRequest | None = None


class HostStream:
    """The two byte streams of a host process. ``send`` never blocks.

    Args:
        requests: descriptor to write to; the stream closes it.
        events: descriptor to read from; the stream closes it. May be the same as ``requests`` (a socket).
        outcome: return why ``events`` has ended, e.g. the last line of the error output.
        kill: end the host process, or what connects to it, at once.
        on_close: called when the stream is closed; ``outcome`` is not called later.
    """

    def __init__(
        self,
        requests: int,
        events: int,
        outcome: Callable[[], str],
        kill: Callable[[], object] = lambda: None,
        on_close: Callable[[], object] = lambda: None,
    ) -> None:
        self.requests, self.events = requests, events
        self.outcome = outcome
        self.kill = kill
        self._on_close = on_close
        self.unsent = bytearray()
        self.closed = False
        os.set_blocking(requests, False)

    def send(self, line: bytes) -> None:
        """Send a line; what does not fit into the pipe now is sent by ``flush``."""
        self.unsent += line
        self.flush()

    def flush(self) -> None:
        """Send as much of ``unsent`` as fits."""
        while self.unsent and not self.closed:
            try:
                del self.unsent[: os.write(self.requests, self.unsent[: 1 << 16])]
            except BlockingIOError:
                return
            except OSError:  # ``read`` will report the end
                self.unsent.clear()

    def read(self) -> bytes:
        """Return what has arrived; wait for it. Empty at the end."""
        try:
            return os.read(self.events, 1 << 16)
        except BlockingIOError:
            return os.read(self.events, 1 << 16) if self._wait() else b""
        except OSError:
            return b""

    def _wait(self) -> bool:
        return bool(ready([self.events])[0])

    def close_requests(self) -> None:
        """Let the host process know that no request will follow: it exits after its last peer."""
        if not self.closed:
            self.closed = True
            if self.requests != self.events:
                os.close(self.requests)
            else:
                import socket

                with suppress(OSError), socket.socket(fileno=os.dup(self.requests)) as copy:
                    copy.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close both descriptors."""
        self.close_requests()
        os.close(self.events)
        self._on_close()


def ready(
    readable: Iterable[int], writable: Iterable[int] = (), timeout: float | None = None
) -> tuple[set[int], set[int]]:
    """Wait until a descriptor can be read, or written, or has ended; up to ``timeout`` seconds. Return these
    descriptors.

    ``select`` accepts no descriptor above 1023, and the launcher has three for each host.
    """
    wanted = dict.fromkeys(readable, select.POLLIN)
    for descriptor in writable:
        wanted[descriptor] = wanted.get(descriptor, 0) | select.POLLOUT
    poll = select.poll()
    for descriptor, events in wanted.items():
        poll.register(descriptor, events)
    found = dict(poll.poll(None if timeout is None else max(0.0, 1000 * timeout)))
    return (
        {each for each, events in found.items() if wanted[each] & select.POLLIN and events & ~select.POLLOUT},
        {each for each, events in found.items() if wanted[each] & select.POLLOUT and events & ~select.POLLIN},
    )


def stream_of(command: Sequence[str]) -> HostStream:
    """Start a command whose stdin and stdout are connected to a host process, e.g. ``ssh HOST …``.

    It runs in a separate session: the terminal's Ctrl-C reaches the launcher only. Raises LaunchError.
    """
    errors = memory_file("p2pfl host")
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
            bufsize=0,
        )
    except OSError as error:
        os.close(errors)
        raise LaunchError(f"{command[0]}: {error.strerror}") from None
    assert process.stdin is not None
    assert process.stdout is not None
    # Copies: the Popen closes its files when it is collected.
    requests, events = os.dup(process.stdin.fileno()), os.dup(process.stdout.fileno())
    process.stdin.close()
    process.stdout.close()

    def outcome() -> str:
        try:
            code = process.wait(EXIT_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        return last_lines(errors) or f"{command[0]} exited with code {code}"

    def kill() -> None:
        process.terminate()  # srun ends its step then; after SIGKILL the step would go on
        try:
            process.wait(EXIT_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    return HostStream(requests, events, outcome, kill, lambda: os.close(errors))


def last_lines(output: int) -> str:
    """Return the last lines of a process's output, given the descriptor of its file."""
    start = max(0, os.fstat(output).st_size - MAX_OUTPUT)
    lines = os.pread(output, MAX_OUTPUT, start).decode(errors="replace").split("\n")
    return "; ".join([line.strip() for line in lines if line.strip()][-3:])


class Backend(Protocol):
    """What starts host processes; see the module docstring."""

    def hosts(self) -> list[Host]:
        """Return the hosts of a new run; after ``restore``, the hosts that replace those in run.json, or none."""

    def start(self, host: Host, command: Sequence[str]) -> HostStream: ...

    def saved(self) -> dict[str, Any]:
        """Return what ``restore`` needs to reach the same hosts, as JSON values; it is stored in run.json."""

    def close(self) -> None: ...


class BackendType(Protocol):
    """The class of a backend.

    Attributes:
        reads: which of ``--hosts`` and ``--option`` it reads.
    """

    reads: Sequence[str]

    def make(self, options: BackendOptions, /) -> Backend: ...

    def restore(self, saved: Mapping[str, Any], /) -> Backend: ...


class BatchSystem(BackendType, Protocol):
    """The class of a backend with ``--sbatch``."""

    def batch_script(self, name: str, out: Path, arguments: Sequence[str], resume: Sequence[str], /) -> str:
        """Return a batch script for a run called ``name``, whose run folder it creates in ``out``.

        Args:
            arguments: the arguments of `p2pfl launch`.
            resume: options of `p2pfl resume`, which the next starts use.
        """

    def array_script(self, folder: Path, tasks: Sequence[int], most: int | None, /) -> str:
        """Return a batch script for runs of the sweep in ``folder``.

        Args:
            tasks: numbers of the runs.
            most: maximum number of tasks at the same time; None: as many as the batch system allows.
        """


def find(name: str) -> BackendType:
    """Load an installed backend. Raises LaunchError."""
    if name not in (known := names(BACKENDS)):
        raise LaunchError(f"unknown backend {name!r}; installed: {', '.join(known)}")
    try:
        backend: BackendType = load(BACKENDS, name)
    except P2pflError as error:
        raise LaunchError(f"backend {error}") from error
    return backend


def batch_system(name: str) -> BatchSystem:
    """Load an installed backend that prints batch scripts. Raises LaunchError."""
    backend = find(name)
    if not hasattr(backend, "batch_script"):
        raise LaunchError(f"--sbatch: backend {name} prints no batch scripts")
    return cast(BatchSystem, backend)


def make(name: str, options: BackendOptions) -> Backend:
    """Make a backend by its name. Raises LaunchError."""
    backend = find(name)
    for option, value in (("--hosts", options.hosts), ("--option", options.settings)):
        if value and option not in backend.reads:
            raise LaunchError(f"{option} is not for --backend {name}")
    return backend.make(options)


def restore(saved: Mapping[str, Any]) -> Backend:
    """Make the backend that run.json names. Raises LaunchError."""
    return find(str(saved.get("backend"))).restore(saved["options"])


def hosts_from(folder: RunFolder) -> list[Host]:
    """Return the hosts of a run as stored in run.json and ENVIRONMENT. Raises LaunchError, RunFolderError."""
    values = read_json(folder.root / ENVIRONMENT) or {}
    found = []
    for host in folder.info["hosts"]["hosts"]:
        environment = values.get(host["name"], {})
        if missing := sorted(set(host["environment"]) - environment.keys()):
            raise LaunchError(
                f"{folder.root / ENVIRONMENT}: no value of {', '.join(missing)} of host {host['name']}: the file is "
                "missing or not of this run; resume where the run was launched"
            )
        found.append(Host(**{**host, "peers": tuple(host["peers"]), "environment": environment}))
    return found


def save(folder: RunFolder, name: str, backend: Backend, hosts: Sequence[Host]) -> None:
    """Store backend and hosts in run.json, the values of their variables in ENVIRONMENT. Raises WriteError."""
    values = {host.name: dict(host.environment) for host in hosts if host.environment}
    write_atomically(folder.root / ENVIRONMENT, json.dumps(values).encode(), durable=True, mode=0o600)
    saved = [{**asdict(host), "peers": list(host.peers), "environment": sorted(host.environment)} for host in hosts]
    folder.write_info({**folder.info, "hosts": {"backend": name, "options": backend.saved(), "hosts": saved}})


def place(peers: int, hosts: Sequence[Host], cores: Mapping[str, int]) -> list[Host]:
    """Assign every peer to a host: first the peers that hosts name, then the others in blocks by weight.

    Blocks of consecutive ids keep the edges of rings and grids within hosts. Each block is as close to its exact part
    as whole numbers allow.

    Args:
        cores: by host name, for hosts without weight and slots.

    Raises:
        LaunchError: a host names a peer that the run lacks, or two hosts name the same one.
    """
    owner: dict[PeerId, str] = {}
    for host in hosts:
        for peer in host.peers:
            if not 0 <= peer < peers:
                raise LaunchError(f"host {host.name}: no peer {peer}; the {peers} peers are 0 to {peers - 1}")
            if peer in owner:
                raise LaunchError(f"hosts {owner[peer]} and {host.name} both name peer {peer}; name it once")
            owner[peer] = host.name
    rest = [peer for peer in range(peers) if peer not in owner]
    open_hosts = [host for host in hosts if not host.peers] or list(hosts)
    weights = [
        host.weight if host.weight is not None else host.slots or cores.get(host.name, 1) for host in open_hosts
    ]
    total = sum(weights)
    if rest and total <= 0:
        raise LaunchError("the weights of all hosts are 0; give one of them a positive weight")
    parts: dict[str, list[PeerId]] = {}
    before = 0.0
    for host, weight in zip(open_hosts, weights, strict=True) if rest else ():
        first, last = round(before * len(rest)), round((before + weight / total) * len(rest))
        parts[host.name] = rest[first:last]
        before += weight / total
    placed = [replace(host, peers=tuple(sorted([*host.peers, *parts.get(host.name, ())]))) for host in hosts]
    return [host for host in placed if host.peers]
