"""What breaks first: the limits of a host, and the most peers within each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.scale.model import Model, Size
from peers.zmq_sockets import sockets_for

LIBZMQ_SOCKETS = 65_535
"""Most sockets of a libzmq context, as its option SOCKET_LIMIT says."""
MOST = 10_000_000


@dataclass(frozen=True)
class Limits:
    """Limits of a host; the defaults are the limits of Linux without any configuration.

    Attributes:
        memory: bytes.
        tasks: processes and threads, `kernel.pid_max`.
        descriptors: of one process, `ulimit -Hn`.
        ports: in `net.ipv4.ip_local_port_range`: each peer binds one.
        round_seconds: seconds that a round may take.
    """

    memory: float = 24 * 2**30
    tasks: int = 32_768
    descriptors: int = 524_288
    ports: int = 28_232
    round_seconds: float = 60.0


@dataclass(frozen=True)
class Limit:
    """A limit, and where a launch reaches it: that many peers on each host, or neighbors of each peer."""

    what: str
    unit: str
    limit: float
    most: int


def of_peers(model: Model, size: Size, limits: Limits) -> list[Limit]:
    """Return the limits on peers of one host, the tightest first; ``size`` gives the degree and the message."""
    found = [
        Limit("memory", "B", limits.memory, _most(model, size, "memory", limits.memory)),
        Limit("processes and threads", "", limits.tasks, _most(model, size, "tasks", limits.tasks)),
        Limit("ports to bind", "", limits.ports, limits.ports),
        Limit("seconds of a round", "s", limits.round_seconds, _most(model, size, "round", limits.round_seconds)),
    ]
    return sorted(found, key=lambda each: each.most)


def of_neighbors(model: Model, limits: Limits) -> list[Limit]:
    """Return the limits on neighbors of one peer, the tightest first."""
    constants = model.fits["descriptors"].constants
    most = int((limits.descriptors - constants["peer"]) / constants["neighbor"])
    sockets = (LIBZMQ_SOCKETS - sockets_for(0)) // (sockets_for(1) - sockets_for(0))
    found = [
        Limit("descriptors of a process", "", limits.descriptors, most),
        Limit("ZeroMQ sockets of a process", "", LIBZMQ_SOCKETS, sockets),
    ]
    return sorted(found, key=lambda each: each.most)


def _most(model: Model, size: Size, name: str, limit: float) -> int:
    """Return the most peers on one host for which a need is within a limit, by bisection."""

    def fits(peers: int) -> bool:
        return model.host(replace(size, peers=peers * size.hosts))[name] <= limit

    low, high = 1, MOST
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def first(model: Model, size: Size, limits: Limits) -> Iterator[str]:
    """Yield what a launch of this size exceeds."""
    for limit in of_peers(model, size, limits):
        if size.peers / size.hosts > limit.most:
            yield limit.what
