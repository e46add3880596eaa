"""The hosts of a run as the launcher sees them: this host (local.py), or the hosts of a backend (several_hosts.py).

A launch (launch.py) prepares the run in a process of the group, opens the run folder on its hosts, and follows the
peers (follow.py). This host is a group of one that shares the launcher's folder: nothing is copied, and the process
that has prepared the run forks its peers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, Self, TypeVar

from p2pfl import PeerId
from p2pfl.run_folder.folder import RunFolder

if TYPE_CHECKING:
    from p2pfl.run_file.run import Run

T = TypeVar("T")


@dataclass(frozen=True)
class Event:
    """What has happened to a peer. Fields that do not apply to an event have the defaults."""

    event: Literal["ready", "started", "exited", "vanished"]
    """``vanished``: the peer has exited in an unknown way."""
    peer: PeerId = -1
    pid: int = 0
    code: int = 0
    """Negative if a signal killed the peer."""
    error: str = ""
    """What the peer reported."""


@dataclass(frozen=True)
class Plan:
    """What the launcher keeps of a Run, which refers to torch."""

    peers: int
    rounds: int
    neighbors: tuple[tuple[PeerId, ...], ...]
    bind: str
    port: int | None
    has_addresses: bool
    keys: str | None
    insecure: bool
    copied: bool
    slots: int | None
    threads: int
    mps: bool
    peers_per_gpu: int | None

    @classmethod
    def of(cls, run: Run) -> Plan:
        transport, gpu = run.file.transport, run.file.gpu
        return cls(
            peers=run.peers,
            rounds=run.rounds,
            neighbors=run.topology.neighbors,
            bind=transport.host,
            port=transport.port,
            has_addresses=bool(transport.address or transport.hosts),
            keys=None if transport.keys is None else str(Path(transport.keys).absolute()),
            insecure=transport.insecure,
            copied=run.file.checkpoint_copies is not None,
            slots=run.file.slots,
            threads=run.file.threads,
            mps=gpu.mps,
            peers_per_gpu=gpu.peers_per_gpu,
        )


class Group(Protocol):
    """The hosts of a run. As a context manager, it ends the processes that fork the peers, but not the peers.

    Attributes:
        is_here: the only host is this host. It is checked before peers start; another launcher may follow some of
            the peers; and the peers outlive this launcher if SIGTERM ends it.
        running: process ids of the peers that were running when the group was opened, and that it follows.
    """

    is_here: bool

    @property
    def running(self) -> Mapping[PeerId, int]: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, /, *_: object) -> None: ...

    # ---- the start, in this order; a resumed run is registered first ---------------------------------------------

    def connect(self) -> None:
        """Reach all hosts. Raises LaunchError."""

    def prepare(self, function: Callable[[], T]) -> T:
        """Call a function that imports torch in another process. Raises P2pflError, SystemExit, as ``in_child``."""

    def registered(self, folder: RunFolder, *, fresh: bool) -> AbstractContextManager[object]:
        """Let other commands find this launcher from now on. ``fresh``: the run is new."""

    def open(self, folder: RunFolder, plan: Plan, report: Callable[[str], object]) -> None:
        """Make hosts ready to start the peers of a run. ``report`` prints a line. Raises LaunchError."""

    def following(self, report: Callable[[str], object]) -> AbstractContextManager[object]:
        """Provide what peers need while they are followed. Raises LaunchError, at the end if none could start."""

    # ---- the peers ------------------------------------------------------------------------------------------------

    def fork(self, peers: Iterable[PeerId]) -> None:
        """Request peers. Each is answered by ``started`` and, at its end, by ``exited`` or ``vanished``."""

    def cancel(self) -> None:
        """Withdraw the requests for peers that no process has begun to fork."""

    def signal(self, peers: Iterable[PeerId], number: int) -> None:
        """Send a signal to running peers."""

    def declare_dead(self, peer: PeerId) -> None:
        """Have the neighbors of a peer that is not restarted continue without it."""

    def events(self, timeout: float) -> list[Event]:
        """Return what has happened since the last call; wait up to ``timeout`` seconds for the first event."""

    def notices(self) -> list[str]:
        """Return what to print about the hosts, each line once."""

    def requests(self) -> list[str]:
        """Return what `p2pfl stop` has asked for since the last call, besides the signals that it sends."""
