"""What a virtual run predicts of the real one: times, bytes, footprints, and which limit is reached first."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from p2pfl.simulation.virtual import VirtualRun

PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


@dataclass(frozen=True)
class Spread:
    """The median and the maximum of a quantity over peers, hosts or edges."""

    median: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        found = list(values) or [0.0]
        return cls(median(found), max(found))


@dataclass(frozen=True)
class Limit:
    """A limit of the machine.

    Attributes:
        unit: ``bytes``, ``seconds``, or empty for a count.
        needed: the most that a peer or a host of this run needs of it.
        available: what the machine has.
        peers: the largest number of peers on as many hosts that stays within it, in a larger run of the same form;
            None if it does not depend on the number of peers.
    """

    name: str
    unit: str
    needed: float
    available: float
    peers: int | None

    @property
    def exceeded(self) -> bool:
        return self.needed > self.available


@dataclass(frozen=True)
class Prediction:
    """Attributes:
    started: seconds until the last peer has started.
    seconds: until the last peer has finished.
    round: seconds of a peer's round, over peers and rounds.
    phases: mean seconds of a peer's round by activity.
    cpu: fraction of the hosts' CPU time that was used after the start.
    sent: bytes that a peer sends in a round, once for each receiver; messages too.
    edges: bytes of a round on an edge in one direction.
    kinds: {kind: [messages, payload bytes, header bytes]} of the whole run.
    crossing: bytes that a host sends to other hosts in a round.
    journal: bytes that a peer writes into its journal in a round.
    missing: messages that missed a deadline.
    peer, host: connections, descriptors, tasks, memory and files, by name; of a host, of all its peers.
    limits: in the order in which they are reached.
    notes: what the prediction leaves out.
    """

    name: str
    method: str
    peers: int
    hosts: int
    rounds: int
    started: float
    seconds: float
    round: Spread
    phases: Mapping[str, float]
    cpu: float
    sent: Spread
    messages: Spread
    edges: Spread
    kinds: Mapping[str, Sequence[int]]
    crossing: Spread
    journal: Spread
    missing: int
    peer: Mapping[str, Spread]
    host: Mapping[str, Spread]
    training_seconds: Mapping[str, float]
    limits: Sequence[Limit]
    notes: Sequence[str]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "limits": [{**asdict(limit), "exceeded": limit.exceeded} for limit in self.limits]}


def predict(virtual: VirtualRun) -> Prediction:
    run, machine, peers = virtual.run, virtual.machine, virtual.peers
    rounds = [max(1, len(peer.rounds)) for peer in peers]
    began = [peer.ends[0] - peer.rounds[0] for peer in peers if peer.ends]
    started, end = max(began, default=0.0), max((peer.ends[-1] for peer in peers if peer.ends), default=0.0)
    kinds: dict[str, list[int]] = {}
    edges: list[float] = []
    sent, messages = [0.0] * len(peers), [0.0] * len(peers)
    for me, peer in enumerate(peers):
        for by_kind in peer.sent.values():
            edges.append(sum(entry[1] + entry[2] for entry in by_kind.values()) / rounds[me])
            sent[me] += edges[-1]
            messages[me] += sum(entry[0] for entry in by_kind.values()) / rounds[me]
            for kind, entry in by_kind.items():
                kinds[kind] = [a + b for a, b in zip(kinds.get(kind, (0, 0, 0)), entry, strict=True)]
    busy = sum(peer.seconds[name] for peer in peers for name in ("training", "evaluating", "messages", "other"))
    first = min(began, default=0.0)
    footprint = _footprints(virtual)
    most = max(rounds)
    hosts = [[me for me, peer in enumerate(peers) if peer.host == host] for host in range(machine.hosts)]
    durations = Spread.of(seconds for peer in peers for seconds in peer.rounds)
    per_peer = {name: Spread.of(values) for name, values in footprint.items()}
    fixed = {"memory": machine.host_memory}
    per_host = {
        name: Spread.of(fixed.get(name, 0.0) + sum(values[me] for me in host) for host in hosts)
        for name, values in footprint.items()
    }
    return Prediction(
        name=run.name,
        method=run.file.algorithm.name,
        peers=len(peers),
        hosts=machine.hosts,
        rounds=run.rounds,
        started=started,
        seconds=end,
        round=durations,
        phases={
            name: fmean(peer.seconds[name] / count for peer, count in zip(peers, rounds, strict=True))
            for name in peers[0].seconds
        },
        cpu=busy / max(1e-9, (end - first) * machine.hosts * machine.cores),
        sent=Spread.of(sent),
        messages=Spread.of(messages),
        edges=Spread.of(edges),
        kinds=kinds,
        crossing=Spread.of(count / most for count in virtual.crossing),
        journal=Spread.of(count / each for count, each in zip(virtual.written, rounds, strict=True)),
        missing=sum(peer.missing for peer in peers),
        peer=per_peer,
        host=per_host,
        training_seconds={name: each.batch for name, each in virtual.computing.items()},
        limits=sorted(_limits(virtual, per_peer, per_host, hosts), key=_order),
        notes=_notes(virtual),
    )


def _order(limit: Limit) -> tuple[bool, float]:
    return not limit.exceeded, math.inf if limit.peers is None else limit.peers


def _footprints(virtual: VirtualRun) -> dict[str, list[float]]:
    machine, neighbors = virtual.machine, virtual.run.topology.neighbors
    degrees = [len(each) for each in neighbors]
    models = [virtual.model_bytes[peer.architecture] for peer in virtual.peers]
    threads = machine.peer_tasks + virtual.run.file.threads - 1
    return {
        "connections": [float(machine.neighbor_connections * degree) for degree in degrees],
        "descriptors": [float(machine.peer_descriptors + machine.neighbor_descriptors * each) for each in degrees],
        "tasks": [float(threads)] * len(degrees),
        "memory": [
            machine.peer_memory + machine.model_copies * model + machine.neighbor_memory * degree
            for model, degree in zip(models, degrees, strict=True)
        ],
        "files": [float(machine.peer_files)] * len(degrees),
    }


def _limits(
    virtual: VirtualRun, peer: Mapping[str, Spread], host: Mapping[str, Spread], hosts: Sequence[Sequence[int]]
) -> Iterable[Limit]:
    run, machine = virtual.run, virtual.machine
    count, fullest = run.peers, max(map(len, hosts))

    def on_all(needed: float, available: float, fixed: float = 0.0) -> int | None:
        """Peers on all hosts that ``available`` is enough for, if the fullest host needs ``needed``."""
        each = (needed - fixed) / fullest
        return machine.hosts * int(max(0.0, available - fixed) / each) if each > 0.0 else None

    memory, tasks = host["memory"].max, host["tasks"].max
    enough = on_all(memory, machine.memory, machine.host_memory)
    yield Limit("memory of a host", "bytes", memory, machine.memory, enough)
    yield Limit("processes and threads of a host", "", tasks, machine.tasks, on_all(tasks, machine.tasks))
    low, high = map(int, PORTS.read_text().split())
    if run.file.transport.port is None:
        yield Limit("ports of a host to listen on", "", fullest, high - low + 1, on_all(fullest, high - low + 1))
    hub, files, most = max(map(len, run.topology.neighbors)), peer["descriptors"].max, machine.descriptors
    enough = None
    if hub == count - 1 > 0 and files > machine.peer_descriptors:  # a complete graph, or a star
        enough = 1 + int(hub * max(0, most - machine.peer_descriptors) / (files - machine.peer_descriptors))
    yield Limit("open files of a peer", "", files, most, enough)
    longest = max((seconds for each in virtual.peers for seconds in each.rounds), default=0.0)
    slots = run.file.slots or max(1, machine.cores // run.file.threads)
    deadline = run.file.transport.deadline
    # Where peers queue for slots, the duration of a round is proportional to their number.
    enough = int(count * deadline / longest) if fullest > slots and longest else None
    yield Limit("seconds of a round, against transport.deadline", "seconds", longest, deadline, enough)


def _notes(virtual: VirtualRun) -> list[str]:
    run, chaos = virtual.run, virtual.run.file.chaos
    notes = []
    if differs := run.algorithm.dry_round.__doc__:  # what would be learned
        notes.append(f"{run.file.algorithm.name}, in a prediction: {' '.join(differs.replace('`', '').split())}")
    ignored = [name for name in ("kill", "pause", "partition") if getattr(chaos, name)]
    ignored += [f"link.{name}" for name in ("jitter", "loss", "bandwidth") if getattr(chaos.link, name)]
    if ignored:
        notes.append(f"ignored: chaos.{', chaos.'.join(ignored)}")
    if any(each.measured for each in virtual.computing.values()):
        notes.append("training and evaluation were measured on this host, one peer of each architecture")
    notes.append("what a method computes besides training, e.g. prototypes or weights, takes no time here")
    return notes
