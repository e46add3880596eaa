"""All peers of a schedule: starts and restarts their processes and injects the faults."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from random import Random
from typing import TYPE_CHECKING, Any

from p2pfl import PeerId
from p2pfl.errors import P2pflError
from p2pfl.messaging.newest import Take
from p2pfl.run_folder.files import read_lines
from p2pfl.session import checkpoint
from p2pfl.session.order import takes
from p2pfl.session.session import Stopped
from p2pfl.simulation.virtual_loop import Stuck, VirtualLoop
from tests.simulation.disk import Disk, SimulatedPath
from tests.simulation.network import Killed, Network
from tests.simulation.oracle import Oracle
from tests.simulation.process import SimulatedProcess
from tests.simulation.reference import Expected, reference_results, run_of
from tests.simulation.schedule import Fault

if TYPE_CHECKING:
    from tests.simulation.run_schedule import Outcome


class Mesh:
    """Runs one schedule.

    Args:
        outcome: has the schedule; gets the trace, the results and the violations.
        random: draws everything that the schedule leaves open.
        expected: what the fault-free run gave; None for a schedule with deadlines.
    """

    def __init__(self, outcome: Outcome, random: Random, expected: Expected | None) -> None:
        self.outcome = outcome
        self.schedule = schedule = outcome.schedule
        self.random = random
        self.run = run_of(schedule)
        self.loop = VirtualLoop()
        self.loop.set_exception_handler(self._on_exception)
        self.network = Network(self.loop, random, schedule.conditions, self.trace, outcome.counts)
        self.disks = [Disk() for _ in range(self.run.peers)]
        self.processes: dict[PeerId, SimulatedProcess] = {}
        """The latest process of each peer."""
        self.results = outcome.results
        self.oracle = Oracle(self, expected)
        self.crashes_left = schedule.crashes
        self.last_fault = max((partition.heals for partition in schedule.conditions.partitions), default=0.0)
        self.stalled = 0.0
        """Total seconds for which threads were stalled."""
        self._finished: set[PeerId] = set()
        self._ended = False

    @property
    def now(self) -> float:
        return self.loop.time()

    def trace(self, event: str) -> None:
        self.outcome.trace.append(f"{self.now:12.6f}  {event}")

    def violation(self, text: str) -> None:
        self.trace(f"VIOLATION: {text}")
        if text not in self.outcome.violations:
            self.outcome.violations.append(text)

    def _on_exception(self, loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, Killed):
            self.violation(f"{context['message']}: {error!r}")

    def execute(self) -> None:
        try:
            self.loop.run_until_complete(self._execute())
        except Stuck as error:
            self.violation(f"the run does not end: {error}; {self._state()}")
        finally:
            self.outcome.seconds = self.now
            for process in self.processes.values():
                process.dead = True
                process.world.vanish()
            while tasks := asyncio.all_tasks(self.loop):  # one that saves a checkpoint takes several turns to end
                for task in tasks:
                    task.cancel()
                self.loop.run_until_complete(asyncio.sleep(0.0))
            self.loop.close()
        if self._ended:
            if self.schedule.synchrony.bound is not None and self.schedule.waits_forever:
                orders = [self._order(me) for me in range(self.run.peers)]
                try:
                    self.oracle.expected = reference_results(self.schedule, orders)
                except P2pflError as error:
                    self.violation(f"the replay fails: {error}")
            self.oracle.check_results()

    def _order(self, me: PeerId) -> list[Take]:
        """Return what the rounds of a peer have taken."""
        path: Any = SimulatedPath(self.disks[me], lambda step: None, "/order.jsonl")
        return list(takes(read_lines(path)))

    async def _execute(self) -> None:
        peers = {asyncio.ensure_future(self._keep_running(me)) for me in range(self.run.peers)}
        faults = asyncio.ensure_future(self._inject_faults())
        while peers:
            done, peers = await asyncio.wait(peers, timeout=100.0, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            if peers and self.now > self.last_fault + self.oracle.time_limit():
                self.violation(f"the run does not end: {self._state()}")
                break
        faults.cancel()
        self._ended = not peers

    def _state(self) -> str:
        """Describe what each unfinished peer waits for."""
        parts = []
        for process in self.processes.values():
            if process.peer not in self._finished and hasattr(process, "session"):
                waits = process.session.endpoint.mailbox.waits_for
                parts.append(f"{process} in round {process.session.rounds_done} waits for {waits or 'its end'}")
        return "; ".join(parts)

    async def _keep_running(self, me: PeerId) -> None:
        """Start a peer and restart it after crashes, as the launcher does."""
        random, schedule = self.random, self.schedule
        await asyncio.sleep(self.network.draw(0.3))
        restarts = 0
        while True:
            crash_step = int(self.network.draw(schedule.steps_to_crash)) + 1
            process = self.processes[me] = SimulatedProcess(self, me, restarts, crash_step)
            self.trace(f"{process}: starts")
            process.task = asyncio.ensure_future(process.run())
            while not process.task.done():
                await asyncio.wait([process.task])
            error = None if process.task.cancelled() else process.task.exception()
            process.world.vanish()
            if not process.dead and error is None:
                self.trace(f"{process}: finished")
                self._finished.add(me)
                return
            if not process.dead and not isinstance(error, Stopped):
                self.violation(f"{process} failed: {error!r}")
                return
            if process.dead and me in schedule.never_restarted:
                self.trace(f"{process}: is not restarted")
                if schedule.launcher_declares_dead:
                    self.network.declare_dead(me)
                return
            restarts += 1
            delay = self.network.draw(schedule.restart_delay)
            self.last_fault = max(self.last_fault, self.now + delay)
            await asyncio.sleep(delay)
            if random.random() < schedule.corruption_rate:
                self._corrupt_checkpoint(me)
            elif random.random() < schedule.corruption_rate:
                self._corrupt_journal(me)

    # -- faults

    async def _inject_faults(self) -> None:
        faults: dict[Fault, Callable[[], None]] = {
            "crash": self._crash_some,
            "disconnect": self._disconnect,
            "isolate": self._isolate,
            "stall-io": self._stall_io,
            "stall-loop": self._stall_event_loop,
            "stop": self._stop,
        }
        for fault in self.schedule.faults:
            await asyncio.sleep(self.network.draw(self.schedule.fault_interval))
            self.last_fault = max(self.last_fault, self.now)
            faults[fault]()

    def crash(self, process: SimulatedProcess, where: str) -> None:
        """Kill a process; sometimes others with it."""
        self.outcome.counts["crashes"] += 1
        self.crashes_left -= 1
        self.last_fault = self.now
        self.trace(f"{process}: killed {where}")
        process.dead = True
        self.loop.call_soon(process.task.cancel)
        if self.random.random() < 0.2:
            self.loop.call_soon(self._crash_some)

    def _crash_some(self) -> None:
        alive = self._alive()
        for process in self.random.sample(alive, self.random.randint(0, len(alive))):
            if self.crashes_left:
                self.crash(process, "at the same time")

    def _alive(self) -> list[SimulatedProcess]:
        return [process for process in self.processes.values() if not process.dead and not process.task.done()]

    def _corrupt_checkpoint(self, me: PeerId) -> None:
        """Flip a bit in the latest checkpoint; the one before stays intact."""
        files = self.disks[me].files
        if content := files.get("/checkpoint.pt"):
            self.outcome.counts["checkpoints corrupted"] += 1
            self.trace(f"peer {me}: checkpoint corrupted")
            at = self.random.randrange(len(content))
            files["/checkpoint.pt"] = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]

    def _corrupt_journal(self, me: PeerId) -> None:
        """Flip a bit in a body that the checkpoint before the last one does not refer to."""
        disk = self.disks[me]
        previous: Any = SimulatedPath(disk, lambda step: None, "/checkpoint-previous.pt")
        entries = checkpoint.read(previous)["journal"]["entries"] if previous.exists() else []
        places = [place for *_, place, _, _, _ in entries if place is not None]
        if found := sorted(disk.segments.keys() - {segment for segment, _ in places}):
            segment = self.random.choice(found)
            content = disk.segments[segment]
            self.outcome.counts["bodies corrupted"] += 1
            self.trace(f"peer {me}: segment {segment} of the journal corrupted")
            at = self.random.randrange(len(content))
            disk.segments[segment] = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]

    def _disconnect(self) -> None:
        if self.network.connections:
            self.outcome.counts["connections broken"] += 1
            self.random.choice(list(self.network.connections)).break_off()

    def _isolate(self) -> None:
        peer = self.random.randrange(self.run.peers)
        for connection in list(self.network.connections):
            if peer in connection.ends:
                self.outcome.counts["connections broken"] += 1
                connection.break_off()

    def _stall_io(self) -> None:
        if alive := self._alive():
            process, seconds = self.random.choice(alive), self.network.draw(1.0)
            self.outcome.counts["I/O threads stalled"] += 1
            self.stalled += seconds
            self.trace(f"{process}: I/O thread stalled for {seconds:.3f} s")
            process.stalled_until = max(process.stalled_until, self.now + seconds)

    def _stall_event_loop(self) -> None:
        if alive := self._alive():
            process, seconds = self.random.choice(alive), self.network.draw(1.0)
            self.outcome.counts["event loops stalled"] += 1
            self.stalled += seconds
            self.trace(f"{process}: event loop stalled for {seconds:.3f} s")
            process.busy_until = max(process.busy_until, self.now + seconds)

    def _stop(self) -> None:
        alive = [process for process in self._alive() if hasattr(process, "link")]
        if alive:
            process = self.random.choice(alive)
            self.outcome.counts["stops"] += 1
            self.trace(f"{process}: asked to stop")
            process.session.stop()
            process.session.interrupt()
