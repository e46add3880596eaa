"""Checks that every simulated run keeps the promises of docs/reliability.md."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from p2pfl import PeerId
from p2pfl.messaging.net import Net
from p2pfl.messaging.schema import Body
from p2pfl.run_folder.folder import PeerFolder, Result
from p2pfl.session import metrics
from peers.connection import CLOSE_TIMEOUT
from peers.io_loop import STALE
from tests.simulation.algorithm import Every, Said, collected, summary
from tests.simulation.disk import SimulatedPath
from tests.simulation.process import SimulatedProcess
from tests.simulation.reference import Expected

if TYPE_CHECKING:
    from tests.simulation.mesh import Mesh

NO_DEADLINE_LIMIT = 3000.0
"""Virtual seconds after the last fault within which a run without deadlines must end. Slow connections may take a few
hundred."""
SHORT = 1.0
"""Virtual seconds: a wait shorter than this did not end by a deadline, and a message may take this long."""
IN_VAIN, DECLARED_DEAD, NOT_WAITED_FOR = (
    "waits until the deadline for a message that was sent long ago",
    "declares a reachable neighbor dead",
    "does not wait for a reachable neighbor",
)
TOLERATED = {IN_VAIN: 1, DECLARED_DEAD: 1, NOT_WAITED_FOR: 2}
"""Rounds in which a peer may misjudge a neighbor, because news and replays take a moment. A peer learns only in the
next round that a neighbor receives from it again, and acts on it in the round after that."""


@dataclass
class _Wait:
    began: float
    limit: float
    connected: Mapping[PeerId, SimulatedProcess]
    """Neighbors that were connected when the wait began."""


class Oracle:
    """Observes all processes of a run and reports violations.

    Args:
        mesh: the run.
        expected: what the fault-free run gave; None for a schedule with deadlines.
    """

    def __init__(self, mesh: Mesh, expected: Expected | None) -> None:
        self.mesh = mesh
        self.schedule = mesh.schedule
        self.expected = expected
        self.bound = mesh.schedule.synchrony.bound
        self.last_begun: dict[PeerId, int] = {}
        """The last round that each peer has begun."""
        self.done_at: dict[tuple[PeerId, int], float] = {}
        """When a peer last completed a round."""
        self._sent: set[tuple[PeerId, PeerId, int, int, str]] = set()
        self._receivers: dict[tuple[PeerId, int, int], tuple[PeerId, ...]] = {}
        """To whom a peer last sent in a round and part."""
        self._waits: dict[SimulatedProcess, _Wait] = {}
        self._collected: defaultdict[tuple[PeerId, PeerId, str], dict[int, int]] = defaultdict(dict)
        """By receiver, sender and kind: in which round a body was collected, by the round in which it was sent."""
        self._misjudged: defaultdict[tuple[SimulatedProcess, PeerId, str], set[int]] = defaultdict(set)

    # -- while it runs

    def on_round_begins(self, process: SimulatedProcess, t: int) -> None:
        self.last_begun[process.peer] = max(t, self.last_begun.get(process.peer, -1))
        endpoint = process.session.endpoint
        present = [j for j in endpoint.neighborhood.joined(endpoint.t) if not endpoint.mailbox.is_disconnected(j)]
        ahead = [endpoint._first_kept[j] for j in present if endpoint._first_kept.get(j, 0) > t]
        if self.bound is None and 2 * len(ahead) > len(present):
            self.mesh.violation(
                f"{process} runs round {t} alone; most neighbors keep nothing from before round {min(ahead)}"
            )

    def on_send(
        self, process: SimulatedProcess, net: Net, part: int, deadlines: float, bodies: Sequence[Said]
    ) -> None:
        for body in bodies:
            self._sent.add((body.sender, body.to, body.t, body.part, body.digest))
        self._receivers[process.peer, net.t, part] = net.receivers
        sends = 2 * len(process.session.endpoint.neighbors)
        transport = self.schedule.transport
        limit = deadlines * transport.deadline + 2 * transport.give_up * bool(transport.quorum)
        processes = self.mesh.processes
        connected = {j: processes[j] for j in net.sources if j in processes and process.connected_to(j)}
        self._waits[process] = _Wait(self.mesh.now, limit + sends * transport.deadline, connected)

    def on_received(
        self,
        process: SimulatedProcess,
        net: Net,
        part: int,
        sources: Sequence[PeerId],
        bodies: Mapping[PeerId, Body],
    ) -> None:
        mesh, t = self.mesh, net.t
        mesh.trace(f"{process}: round {t}, part {part}: received {summary(bodies)}")
        self._check_bodies(process, t, part, bodies)
        wait, lasted = self._checked_wait(process, t)
        missing = sorted(set(sources) - bodies.keys())
        if self.bound is not None:
            if missing and self.bound < math.inf and self.schedule.waits_forever:
                mesh.violation(f"{process} took nothing of peers {missing} in round {t}")
            return
        for j in missing:
            since = wait.began - self.schedule.transport.deadline
            separated = mesh.network.separated(process.peer, j, since, mesh.now)
            same_process = j in wait.connected and wait.connected[j] is mesh.processes[j]
            if same_process and process.connected_to(j) and not separated:
                self._check_missing(process, j, t, part, lasted)

    def on_collected(
        self, process: SimulatedProcess, net: Net, part: int, bodies: Mapping[PeerId, Sequence[Said]]
    ) -> None:
        mesh, t = self.mesh, net.t
        mesh.trace(f"{process}: round {t}, part {part}: collected {collected(bodies)}")
        self._checked_wait(process, t)
        for sender, each in bodies.items():
            for body in each:
                if (body.sender, body.to, body.t, body.part, body.digest) not in self._sent:
                    mesh.violation(f"{process} collected {body} of peer {sender}, which was never sent")
                key = process.peer, sender, body.kind()
                before = self._collected[key].setdefault(body.t, t)
                if before != t and self.schedule.waits_forever:
                    mesh.violation(f"{process} collected {body} in round {before}, and again in round {t}")

    def _checked_wait(self, process: SimulatedProcess, t: int) -> tuple[_Wait, float]:
        """Return the wait of a process that has ended, and how long it took."""
        wait = self._waits[process]
        lasted = self.mesh.now - wait.began
        if lasted > wait.limit + self.mesh.stalled + 1.0:
            self.mesh.violation(f"{process} waited {lasted:.1f} s in round {t}; the limit is {wait.limit:.1f} s")
        return wait, lasted

    def _check_bodies(self, process: SimulatedProcess, t: int, part: int, bodies: Mapping[PeerId, Body]) -> None:
        mesh = self.mesh
        for sender, body in bodies.items():
            if isinstance(body, Said):
                envelope = (body.sender, body.to, body.t, body.part)
                if self.bound is not None and abs(body.t - t) <= self.bound:
                    envelope = (body.sender, body.to, t, body.part)  # of another round, as it may be
                if envelope not in ((sender, -1, t, part), (sender, process.peer, t, part)):
                    mesh.violation(f"{process} received {body} from peer {sender} in part {part} of round {t}")
                elif (body.sender, body.to, body.t, body.part, body.digest) not in self._sent:
                    mesh.violation(f"{process} received {body}, which was never sent")
        if self.expected is not None:
            received, expected = summary(bodies), self.expected.received[process.peer, t, part]
            if received != expected:
                mesh.violation(f"{process} received {received} in part {part} of round {t}; expected {expected}")

    def _check_missing(self, process: SimulatedProcess, other: PeerId, t: int, part: int, waited: float) -> None:
        """A message is missing although nothing seems to separate the two peers."""
        mailbox, sender = process.session.endpoint.mailbox, self.mesh.processes[other]
        if process.session.endpoint._first_kept.get(other, 0) > t:
            return  # it had declared the process dead, and says that it keeps nothing of this round
        if sender.has_done(t) and (other, t) not in self.done_at:
            return  # it has skipped this round; a wait that ended by the deadline was for another neighbor
        # From this time on the sender's last message of the round could be sent, and read here.
        free_at = max(self.done_at.get((other, t), 0.0), sender.stalled_until, process.stalled_until)
        overdue = waited >= self.schedule.transport.deadline and self.mesh.now - free_at > SHORT
        if sender.has_done(t) and overdue:
            if t <= process.predecessor_round:
                return  # it sends nothing new in these rounds, so the others may not know yet that it has restarted
            misjudgment = IN_VAIN
        elif sender.has_done(t) and process.peer not in self._receivers.get((other, t, part), ()):
            return  # the sender completed this round before it could know that the process receives from it again
        elif waited < SHORT and not mailbox.is_disconnected(other) and mailbox.sender_round(other) <= t:
            misjudgment = NOT_WAITED_FOR
        elif waited < SHORT and mailbox.is_disconnected(other) and not process.world.has_pending_calls:
            misjudgment = DECLARED_DEAD
        else:
            return
        self._misjudged[process, other, misjudgment].add(t)
        if len(self._misjudged[process, other, misjudgment]) > TOLERATED[misjudgment]:
            self.mesh.violation(f"{process} {misjudgment}: peer {other}, round {t}")

    # -- at the end

    def time_limit(self) -> float:
        """Return the virtual seconds within which every process must end after the last fault."""
        if self.schedule.waits_forever:
            return NO_DEADLINE_LIMIT
        transport, degree = self.schedule.transport, max(map(len, self.schedule.topology.neighbors))
        wait = transport.deadline + 2 * transport.give_up * bool(transport.quorum)
        rounds = 0.0
        for operations in self.schedule.operations:
            waits = len(operations) + 2 * self.mesh.run.peers * operations.count("sum") + 2  # Begun, Listening
            rounds += waits * (wait + degree * transport.deadline) + 20 * self.schedule.training
        return rounds + 2 * transport.deadline + CLOSE_TIMEOUT + STALE + self.mesh.stalled

    def check_results(self) -> None:
        if self.schedule.waits_forever and self.schedule.rounds_graphs is None:
            self._check_every()
        for me in range(self.mesh.run.peers):
            if me not in self.mesh.results:  # never restarted, or failed, which is a violation already
                continue
            result = self.mesh.results[me]
            self.mesh.outcome.counts["rounds skipped"] += result.skipped_rounds
            if result.rounds_done != self.schedule.rounds:
                self.mesh.violation(f"peer {me} ended after {result.rounds_done} of {self.schedule.rounds} rounds")
            rounds = [record["t"] for record in self._records(me)]
            if self.expected is not None:
                self._compare(me, result, self.expected.results[me], rounds)
            if rounds != sorted(set(rounds)):
                self.mesh.violation(f"peer {me} has records of rounds {rounds}")

    def _check_every(self) -> None:
        """Where all bodies of a kind count, none was left out."""
        joins = self.schedule.joins_at
        for (receiver, sender, kind), rounds in self._collected.items():
            if kind == Every.kind():
                first = max(joins.get(receiver, 0), joins.get(sender, 0))
                if left_out := sorted(set(range(first, max(rounds))) - rounds.keys()):
                    self.mesh.violation(
                        f"peer {receiver} did not collect what peer {sender} sent in rounds {left_out}"
                    )

    def _compare(self, me: PeerId, result: Result, expected: Result, rounds: Sequence[int]) -> None:
        for name in ("digest", "sent", "received", "missing", "skipped_rounds"):
            found, right = getattr(result, name), getattr(expected, name)
            if found != right:
                self.mesh.violation(f"peer {me} ended with {name}={found}; the fault-free run with {right}")
        if rounds != list(range(self.schedule.joins_at.get(me, 0), self.schedule.rounds)):
            self.mesh.violation(f"peer {me} has records of rounds {rounds}")

    def _records(self, me: PeerId) -> list[dict[str, Any]]:
        root = SimulatedPath(self.mesh.disks[me], lambda description: None)
        return metrics.read(cast(Any, PeerFolder(cast(Any, root), me).metrics))
