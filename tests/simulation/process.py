"""One simulated process of a peer, from its start to its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from p2pfl import PeerId
from p2pfl.messaging.net import Net
from p2pfl.messaging.schema import Body
from p2pfl.run_file.faults import Faults
from p2pfl.run_folder.folder import PeerFolder
from p2pfl.session.session import Runtime, Session, Stopped
from peers.io_loop import Leaving
from peers.zmq_link import ZmqLink
from tests.simulation.algorithm import DigestAlgorithm, Said
from tests.simulation.disk import SimulatedPath, SimulatedStore
from tests.simulation.network import Killed
from tests.simulation.reference import RUN_ID, ModelFreeSession
from tests.simulation.world import SimulatedWorld

if TYPE_CHECKING:
    from tests.simulation.mesh import Mesh

CONFIG_HASH = "the run file's"


class SimulatedProcess(Faults):
    """Runs a session over simulated sockets. It is the host of the algorithm, and the session's source of faults.

    Args:
        mesh: the run that it is part of.
        peer: the peer that it runs.
        restarts: how often the peer was started before.
        crash_step: the step at which it crashes, if the schedule allows another crash.
    """

    def __init__(self, mesh: Mesh, peer: PeerId, restarts: int, crash_step: int) -> None:
        self.mesh = mesh
        self.schedule = mesh.schedule
        self.peer = peer
        self.restarts = restarts
        self.dead = False
        self.busy_until = 0.0
        self.stalled_until = 0.0
        self.crash_step = crash_step
        self.predecessor_round = mesh.oracle.last_begun.get(peer, -1)
        """The last round in which an earlier process of this peer may have sent messages."""
        self.steps = 0
        self.task: asyncio.Task[None]
        self.session: Session
        self.link: ZmqLink
        self.world = SimulatedWorld(mesh.network, self, mesh.schedule.transport.queue, mesh.disks)

    def __str__(self) -> str:
        return f"peer {self.peer}" + f" ({self.restarts})" * bool(self.restarts)

    def step(self, description: str) -> None:
        """Precede every step in the outside world; the process may crash here."""
        if self.dead:
            raise Killed
        self.steps += 1
        if self.steps == self.crash_step and self.mesh.crashes_left:
            self.mesh.crash(self, f"about to {description}")
            raise Killed

    async def run(self) -> None:
        """Run the peer's session, as peers/runtime.py does."""
        mesh, run = self.mesh, self.mesh.run
        folder = PeerFolder(cast(Any, SimulatedPath(mesh.disks[self.peer], self.step)), self.peer)
        log = logging.Logger(f"{self}", logging.DEBUG)
        log.addHandler(_TraceHandler(self))
        wait_policy = self.schedule.transport.wait_policy
        self.session = ModelFreeSession(
            run,
            self.peer,
            RUN_ID,
            cast(Any, self),
            folder,
            Runtime(wait_policy=wait_policy, log=log, store=SimulatedStore(mesh.disks[self.peer], self.step)),
        )
        self.session.faults = self
        self.session.resume()
        transport, world = self.schedule.transport, cast(Any, self.world)
        self.link = ZmqLink(self.session.endpoint, world, transport, CONFIG_HASH, log)
        self.session.endpoint.link = self.link
        await self.link.start()
        leaving: Leaving = "failed"
        try:
            mesh.results[self.peer] = await self.session.run()
            leaving = "finished"
            if self.schedule.waits_forever and (late := self.session.endpoint.mailbox.expired):
                mesh.violation(f"{self} received {late} messages that no round used")
        except Stopped:
            leaving = "stopped"
            raise
        finally:
            await self.link.close(leaving)

    def connected_to(self, other: PeerId) -> bool:
        """Whether the connections to and from a neighbor are up on both sides, and it has not finished."""
        process = self.mesh.processes.get(other)
        if process is None or process.dead or self.dead or not hasattr(process, "link"):
            return False
        ends = process.link.io.connections.get(self.peer), self.link.io.connections.get(other)
        return all(end is not None and end.up and not end.reader.finished for end in ends)

    def has_done(self, t: int) -> bool:
        return hasattr(self, "session") and self.session.rounds_done > t and not self.dead

    # -- host of the algorithm

    async def train(self) -> None:
        seconds = self.mesh.network.draw(self.schedule.training)
        self.busy_until = max(self.busy_until, self.mesh.now + seconds)
        while self.busy_until > self.mesh.now:
            await asyncio.sleep(self.busy_until - self.mesh.now)

    def on_send(self, net: Net, part: int, deadlines: float, bodies: Sequence[Said]) -> None:
        self.mesh.oracle.on_send(self, net, part, deadlines, bodies)

    def on_received(self, net: Net, part: int, sources: Sequence[PeerId], bodies: Mapping[PeerId, Body]) -> None:
        self.mesh.oracle.on_received(self, net, part, sources, bodies)

    def on_collected(self, net: Net, part: int, bodies: Mapping[PeerId, Sequence[Said]]) -> None:
        self.mesh.oracle.on_collected(self, net, part, bodies)

    # -- called by the session where faults are injected

    def begins(self, t: int) -> None:
        self.mesh.oracle.on_round_begins(self, t)

    def ends(self, t: int) -> None:
        self.mesh.oracle.done_at[self.peer, t] = self.mesh.now
        digest = cast(DigestAlgorithm, self.session.algorithm).digest[:8]
        self.mesh.trace(f"{self}: round done t={t} digest={digest}")

    def wait_ended(self) -> None:
        return

    def batch(self) -> None:
        return


class _TraceHandler(logging.Handler):
    """Copies a peer's log into the trace; a logged error is a violation."""

    def __init__(self, process: SimulatedProcess) -> None:
        super().__init__()
        self.process = process

    def emit(self, record: logging.LogRecord) -> None:
        text = f"{self.process}: {record.getMessage()}"
        self.process.mesh.trace(f"{text} [{record.levelname}]" if record.levelno > logging.INFO else text)
        if record.levelno >= logging.ERROR or ("order not repeated" in text and self.process.schedule.waits_forever):
            self.process.mesh.violation(f"{text}: {record.exc_info[1]!r}" if record.exc_info else text)
