"""A run in virtual time: real messages of all peers, but no training, to predict what a run would take.

Endpoints, journals, mailboxes, headers, graphs and each method's conversation (``Algorithm.dry_round``) are the same
as in a real run, and so are bytes, receivers and waits. Bodies are shared zeros. A machine (simulation/machine.py)
says how long computing and messages take.

- A peer computes in a compute slot of its host, for which it queues, and leaves it in every wait, as in a real run.
- CPU time of messages is the peer's: it is spent in the slot, before the next wait or after the last one. So the
  peers of a host never use more CPU time than its slots have.
- A message departs once its CPU time is spent. Bodies that a host writes queue for its disk, and bodies for other
  hosts for its network interface. A Begin that no method awaits is not sent if an entry follows soon.
- Peers of one architecture share one model; what a method learns does not exist.
"""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from p2pfl import PeerId
from p2pfl.algorithms.base import Algorithm
from p2pfl.data import Dataset, Subset
from p2pfl.errors import P2pflError
from p2pfl.learning.peer_data import Samples
from p2pfl.messaging.control import FOREVER
from p2pfl.messaging.conversation import Conversation
from p2pfl.messaging.edge import OPTIONAL_DELAY
from p2pfl.messaging.endpoint import Endpoint
from p2pfl.messaging.inbox import MessageCounts
from p2pfl.messaging.journal import BodyStore, JournalEntry, Place
from p2pfl.messaging.link import Link
from p2pfl.messaging.neighborhood import Neighborhood
from p2pfl.messaging.schema import Body, Layout
from p2pfl.messaging.wire import Encoded, Message, Plan
from p2pfl.models import architecture
from p2pfl.rng import Streams
from p2pfl.run_file.run import Run
from p2pfl.session.build import RunData, load_data, make_algorithm, poisoned
from p2pfl.session.compute_slot import HeldSlot
from p2pfl.session.determinism import deterministic
from p2pfl.session.method_results import layouts_of
from p2pfl.session.metrics import add_counts
from p2pfl.session.pipelines import make_pipeline
from p2pfl.simulation.machine import Computing, Machine, computing
from p2pfl.simulation.unscreened import virtual_net
from p2pfl.simulation.virtual_loop import VirtualLoop

SMALL = 64
"""Bytes up to which bodies are real: they may hold a number that a method acts on, e.g. a sum."""
HEADERS = 4096
"""Headers for which bodies of zeros are kept; some methods put changing numbers into headers."""
TICK = 1e-9
"""Seconds between two messages of a peer, at least: timers that are due at the same time fire in any order."""


@dataclass
class VirtualPeer:
    """What a peer did in a virtual run.

    Attributes:
        host: where it ran.
        architecture: of its model.
        rounds: seconds of each round; the first one begins when the peer has started.
        ends: virtual time at the end of each round.
        seconds: sums over the rounds: training, evaluating, messages and other CPU time, queued for a slot, waiting.
        sent: of all rounds, as in records.
        missing: messages that missed a deadline.
    """

    host: int
    architecture: str
    rounds: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(
            ("training", "evaluating", "messages", "other", "queued", "waiting"), 0.0
        )
    )
    sent: MessageCounts = field(default_factory=dict)
    missing: int = 0


@dataclass(frozen=True)
class VirtualRun:
    """How a virtual run went.

    Attributes:
        computing: seconds of CPU of each architecture.
        model_bytes: parameters and buffers of each architecture.
        written: bytes that each peer wrote into its journal.
        crossing: bytes that each host sent to other ones.
    """

    run: Run
    machine: Machine
    peers: Sequence[VirtualPeer]
    computing: Mapping[str, Computing]
    model_bytes: Mapping[str, int]
    written: Sequence[int]
    crossing: Sequence[float]


def run_virtually(
    run: Run, machine: Machine, on_round: Callable[[PeerId, int], None] = lambda peer, t: None
) -> VirtualRun:
    """Run all peers in virtual time.

    Args:
        on_round: called after each round with the peer and the round.

    Raises:
        RunFileError: the dataset is not available, or the method has no ``dry_round``.
    """
    if run.algorithm.dry_round is Algorithm.dry_round:
        reason = f"{run.algorithm.name} does not define dry_round, which says what it sends without training"
        raise run.error_at("algorithm", P2pflError(reason))
    torch.set_num_threads(run.file.threads)
    mesh = _Mesh(run, machine, load_data(run), on_round)
    loop = VirtualLoop(max_turns=math.inf, stall=math.inf)
    try:
        loop.run_until_complete(mesh.execute())
    finally:
        loop.close()
    return VirtualRun(
        run,
        machine,
        [peer.record for peer in mesh.peers],
        {name: kind.computing for name, kind in mesh.kinds.items()},
        {name: kind.model_bytes for name, kind in mesh.kinds.items()},
        [peer.written for peer in mesh.peers],
        [host.crossing for host in mesh.hosts],
    )


class _NoBodies(BodyStore):
    """Stores nothing but small bodies."""

    def write(self, encoded: Encoded) -> Place:
        if encoded.size <= SMALL:
            return super().write(encoded)
        self.current += 1
        return Place(self.current - 1, 0)


class _Kind:
    """What peers of one architecture share: a real peer's algorithm, and the headers that they have received."""

    def __init__(self, run: Run, me: PeerId, data: RunData, machine: Machine) -> None:
        self.run = run
        self.algorithm = make_algorithm(run, me, data, torch.device("cpu"), Streams(run.seed, me))
        self.layouts: Sequence[Layout] = layouts_of(self.algorithm)
        tensors = (x for x in self.algorithm.model.state_dict().values() if isinstance(x, torch.Tensor))
        self.model_bytes = sum(x.numel() * x.element_size() for x in tensors)
        self.computing = computing(machine, self.algorithm)
        self.received: dict[bytes, tuple[Plan, Body]] = {}
        self._zeros = torch.zeros(0, dtype=torch.uint8)

    def copy(self, me: PeerId, dataset: Dataset, subset: Subset) -> Algorithm[Any]:
        """Return the algorithm of another peer with the same model."""
        algorithm = copy.copy(self.algorithm)
        algorithm.me, algorithm.data = me, copy.copy(algorithm.data)
        images = dataset.pool if subset.merged else dataset.train
        vars(algorithm.data).pop("local_classes", None)
        algorithm.data.train = poisoned(self.run, me, Samples(images, subset.train), dataset.classes)
        return algorithm

    def body(self, plan: Plan) -> Body:
        """Return a body of zeros; all of them share their memory."""
        if len(self._zeros) < plan.size:
            self._zeros = torch.zeros(plan.size, dtype=torch.uint8)
        whole: Tensor | None = self._zeros[: plan.size] if plan.size else None
        return plan.message(0, 0, whole).body


class _Endpoint(Endpoint):
    """An endpoint that decodes each header once for all peers of its kind."""

    kind: _Kind

    def receive(self, entry: JournalEntry, sender: Endpoint) -> None:
        found = self.kind.received.get(entry.header)
        if found is None:
            plan = self.check(entry.header)
            if len(self.kind.received) >= HEADERS:
                del self.kind.received[next(iter(self.kind.received))]
            found = self.kind.received[entry.header] = plan, self.kind.body(plan)
        plan, body = found
        if 0 < entry.size <= SMALL:
            body = plan.message(entry.id.t, sender.me, sender.journal.map(entry)).body
        self.accept(Message(body, entry.id.t, sender.me, plan, ""))


class _Host:
    def __init__(self, slots: int) -> None:
        self.slots = asyncio.Semaphore(slots)
        self.disk_free = 0.0
        """Virtual time at which everything is written."""
        self.interface_free = 0.0
        """Virtual time at which everything is sent."""
        self.crossing = 0.0


class _Mesh:
    """All peers, hosts and messages of a virtual run."""

    def __init__(
        self,
        run: Run,
        machine: Machine,
        data: RunData,
        on_round: Callable[[PeerId, int], None],
    ) -> None:
        self.run, self.machine, self.data, self.on_round = run, machine, data, on_round
        self.kinds: dict[str, _Kind] = {}
        slots = run.file.slots or max(1, machine.cores // run.file.threads)
        self.hosts = [_Host(slots) for _ in range(machine.hosts)]
        self.peers: list[_Peer] = []

    async def execute(self) -> None:
        group = self.run.file.models.group
        placed = [0] * len(self.hosts)
        for me in range(self.run.peers):
            name = architecture(group, me)
            if name not in self.kinds:
                with deterministic():
                    self.kinds[name] = _Kind(self.run, me, self.data, self.machine)
            host = self.machine.host_of(me, self.run.peers)
            placed[host] += 1
            starting = placed[host] * self.machine.peer_start_seconds / self.machine.cores
            self.peers.append(_Peer(self, me, self.kinds[name], host, self.machine.start_seconds + starting))
        async with asyncio.TaskGroup() as tasks:
            for peer in self.peers:
                tasks.create_task(peer.execute())


class _Peer(Link):
    """One peer: its link, its work, and its rounds as ``Session`` runs them."""

    def __init__(self, mesh: _Mesh, me: PeerId, kind: _Kind, host: int, starts_at: float) -> None:
        run, machine = mesh.run, mesh.machine
        self.mesh, self.me, self.kind, self.machine = mesh, me, kind, machine
        self.host = mesh.hosts[host]
        self.starts_at = starts_at
        self.record = VirtualPeer(host, kind.algorithm.model.name)
        dataset, subsets = mesh.data
        self.algorithm = kind.copy(me, dataset, subsets[me])
        self.tests = len(subsets[me].test) + (len(dataset.test) if run.file.global_test else 0)
        factors = {straggler.peer: straggler.factor for straggler in run.file.chaos.straggler}
        self.factor = factors.get(me, 1.0) * machine.slow.get(me, 1.0)
        place = Neighborhood(me, run.topology, run.schedule, run.file.joins_at)
        self.endpoint = _Endpoint(
            place,
            "0" * 16,
            Conversation(kind.layouts, self.algorithm.prunes),
            run.file.transport.wait_policy,
            self._idle,
            _NoBodies(),
            make_pipeline(run, place, kind.layouts, Streams(run.seed, me)),
        )
        self.endpoint.kind = kind
        self.endpoint.link = self
        self.written = 0
        self.gone = False
        self._owed = 0.0
        """Seconds of CPU for messages that are not spent yet."""
        self._last_departure = 0.0
        self._clock: Callable[[], float] = lambda: 0.0

    # -- rounds

    async def execute(self) -> None:
        loop = asyncio.get_running_loop()
        self._clock = loop.time
        self._slot = HeldSlot(self.host.slots, clock=loop.time)
        await asyncio.sleep(self.starts_at)
        rounds, dies = self.mesh.run.rounds, self.machine.dies.get(self.me)
        first = self.mesh.run.file.joins_at.get(self.me, 0)
        self.endpoint.open(first)
        for t in range(first, rounds):
            if dies is not None and t >= dies:
                self._die(loop)
                return
            await self._round(t)
            if self.algorithm.finished:
                break
        self.endpoint.open(FOREVER)
        await self._work_off()
        self._slot.release()

    def _die(self, loop: asyncio.AbstractEventLoop) -> None:
        """End for good. The neighbors notice at once, and wait for ``give_up`` seconds."""
        self.gone = True
        self._slot.release()
        for neighbor in self.endpoint.neighbors:
            mailbox = self.mesh.peers[neighbor].endpoint.mailbox
            loop.call_later(self.mesh.run.file.transport.give_up, mailbox.mark_disconnected, self.me)

    async def _round(self, t: int) -> None:
        began = self._clock()
        settings, seconds = self.mesh.run.file, self.record.seconds
        self._slot.queued = 0.0
        await self._slot.acquire()
        self.endpoint.begin(t)
        await self.endpoint.await_start(t)
        net = virtual_net(self.algorithm, self.endpoint, t, settings.seed)
        await self.algorithm.dry_round(t, net, self)
        self.endpoint.finish(t)
        if t + 1 == settings.rounds or self.algorithm.finished or (t + 1) % settings.eval_every == 0:
            await self._compute("evaluating", self.tests * self.kind.computing.sample)
        waiting = self.machine.waiting_cpu * (self._clock() - began)
        await self._compute("other", self.machine.round_seconds + waiting)
        await self._work_off()
        now = self._clock()
        self.endpoint.waits.policy.took(now - began - self.endpoint.waits.wasted)
        self.record.rounds.append(now - began)
        self.record.ends.append(now)
        seconds["queued"] += self._slot.queued
        seconds["waiting"] += self.endpoint.waits.seconds
        self.record.missing += sum(map(len, self.endpoint.missing.values()))
        add_counts(self.record.sent, self.endpoint.sent)
        self.mesh.on_round(self.me, t)

    # -- computing

    async def train(
        self, *, epochs: int | None = None, steps: int | None = None, batch: int, models: int = 1
    ) -> None:
        batches = self.algorithm.data.batch_count(batch, drop_last=self.algorithm.drop_last)
        count = (steps if batches else 0) if steps is not None else (epochs or 0) * batches
        await self._compute("training", count * models * self.kind.computing.batch)

    async def _compute(self, what: str, seconds: float) -> None:
        seconds *= self.factor
        self.record.seconds[what] += seconds
        await asyncio.sleep(seconds)

    async def _work_off(self) -> None:
        """Spend what messages have cost so far."""
        owed, self._owed = self._owed, 0.0
        self.record.seconds["messages"] += owed
        await asyncio.sleep(owed)

    @asynccontextmanager
    async def _idle(self, waits_for: Callable[[], list[PeerId]]) -> AsyncIterator[None]:
        await self._work_off()
        with self._slot.released():
            yield
        await self._slot.take_back()
        await self._work_off()

    # -- the link (p2pfl/messaging/link.py)

    def announce(self, entry: JournalEntry) -> None:
        if entry.size:
            self.written += entry.size
            self._owed += self.machine.write_seconds_per_byte * entry.size
            host = self.host
            host.disk_free = max(self._clock(), host.disk_free) + entry.size / self.machine.journal_rate
        if entry.optional:
            asyncio.get_running_loop().call_later(OPTIONAL_DELAY, self._send_unless_superfluous, entry)
        else:
            self._send(entry, entry.to, self.host.disk_free if entry.size else 0.0)

    def _send_unless_superfluous(self, entry: JournalEntry) -> None:
        journal = self.endpoint.journal
        found = {to: journal.after(to, entry.id) for to in entry.to}
        self._send(entry, [to for to, next in found.items() if next is not None and next[0] is entry])

    def _send(self, entry: JournalEntry, receivers: Iterable[PeerId], written_at: float = 0.0) -> None:
        machine, host, now = self.machine, self.host, self._clock()
        loop, delay = asyncio.get_running_loop(), self.mesh.run.file.chaos.link.delay
        size = len(entry.header) + entry.size
        for to in receivers:
            receiver = self.mesh.peers[to]
            remote = receiver.host is not host
            self._owed += machine.send_seconds + remote * size * machine.send_seconds_per_byte
            self._last_departure = departs = max(now + self._owed, written_at, self._last_departure + TICK)
            if remote:
                host.crossing += size
                host.interface_free = max(departs, host.interface_free) + size / machine.bandwidth_between
                departs = host.interface_free
            latency = machine.latency_between if remote else machine.latency_within
            loop.call_at(departs + latency + delay, self._arrive, entry, receiver, size, remote)

    def _arrive(self, entry: JournalEntry, receiver: _Peer, size: int, remote: bool) -> None:
        machine = self.machine
        if not receiver.gone:
            each = machine.receive_seconds_per_byte if remote else machine.local_seconds_per_byte
            receiver._owed += machine.receive_seconds + size * each
            receiver.endpoint.receive(entry, self.endpoint)
        self.endpoint.journal.drop(receiver.me, entry.id.t)  # nothing of an earlier round is on its way

    def nothing(self, to: PeerId, t: int) -> None:
        self.mesh.peers[to].endpoint.mailbox.nothing(self.me, t)
