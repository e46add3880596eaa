"""Plays one schedule, and looks at what the project's code makes of it."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from random import Random
from typing import Any, cast
from unittest.mock import patch

from benchmarks.torture import disk as disks
from benchmarks.torture.clock import Stuck, VirtualLoop
from benchmarks.torture.disk import Disk, SimulatedPath
from benchmarks.torture.method import Digesting, Said, told
from benchmarks.torture.schedule import FOREVER, Fault, Schedule, draw
from benchmarks.torture.wires import Killed, Network, SimulatedWorld
from p2pfl import checkpoint, metrics, runfolder, session
from p2pfl.config import Run, from_dict
from p2pfl.errors import P2pflError
from p2pfl.net import LocalHub, Net
from p2pfl.rng import Streams
from p2pfl.runfolder import PeerFolder, PeerId, Result
from p2pfl.session import Session, Stopped
from p2pfl.wire import Body
from peers.zmqlink import CLOSING, STALE, Leaving, ZmqLink

RUN_ID = "0123456789abcdef"
DIGEST = "the run file's"
PATIENT_FOR = 3000.0
"""Virtual seconds after the last fault in which a patient mesh has to end. Slow wires may take a few hundred."""
SHORT = 1.0
"""Virtual seconds of a wait that no deadline has ended, or that a message may take."""
TOLERATED = {"waits in vain for what was said long ago": 1, "takes for gone": 1, "does not wait for": 2}
"""Rounds in which a peer may misjudge a neighbour: news take a moment, and so does what is sent again. That it is
heard again, it may learn from what it looks at in the next round only, and act upon in the one after that."""


@dataclass
class Outcome:
    """What one schedule came to."""

    seed: int
    schedule: Schedule
    violations: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    """Faults and what followed, by kind."""
    seconds: float = 0.0
    """Virtual time."""
    trace: list[str] = field(default_factory=list)

    @property
    def digest(self) -> str:
        """Of the trace."""
        return hashlib.sha256("\n".join(self.trace).encode()).hexdigest()


def play(seed: int) -> Outcome:
    """The schedule of that seed, from start to end."""
    random = Random(seed)
    schedule = draw(random)
    with _simulated():
        outcome = Outcome(seed, schedule)
        try:
            expected = _Calm(schedule).results() if schedule.patient else None
        except P2pflError as error:
            outcome.violations.append(f"the calm run fails: {error}")
        else:
            Mesh(outcome, random, expected).play()
    return outcome


@contextmanager
def _simulated() -> Iterator[None]:
    """What the session uses of the world besides its link is simulated inside."""

    def method(run: Run, me: PeerId, host: Any, device: Any, streams: Streams) -> Digesting:
        return Digesting(host, me, streams)

    with ExitStack() as stack:
        for module, name, value in (
            (session, "make_algorithm", method),
            (session, "perf_counter", lambda: asyncio.get_running_loop().time()),
            (session, "STATUS_EVERY", FOREVER),
            (checkpoint, "write_atomically", disks.write_atomically),
            (runfolder, "write_atomically", disks.write_atomically),
            (metrics, "write_atomically", disks.write_atomically),
            (metrics, "append_line", disks.append_line),
            (session, "sync", disks.sync),
        ):
            stack.enter_context(patch.object(module, name, value))
        yield


@cache
def _template() -> Run:
    return from_dict(
        {"name": "torture", "rounds": 1, "peers": 2, "data": {"dataset": "digits"}, "algorithm": "local"}
    )


def _run_of(schedule: Schedule) -> Run:
    template = _template()
    changes = {
        "rounds": schedule.rounds,
        "peers": schedule.topology.peers,
        "joins_at": dict(schedule.joins_at),
        "checkpoint_every": schedule.checkpoint_every,
        "eval_every": schedule.rounds,
        "transport": schedule.transport,
    }
    return replace(template, file=template.file.model_copy(update=changes), topology=schedule.topology)


class _Session(Session):
    def _evaluate(self) -> None:
        """There is no model."""


# ---- the calm run


@dataclass
class Expected:
    """What a patient mesh must come to."""

    results: list[Result]
    heard: dict[tuple[PeerId, int, int], str]
    """By peer, round and part."""


class _Calm:
    """The same schedule in one process without any wires: what ``p2pfl simulate`` does."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.expected = Expected([], {})

    def results(self) -> Expected:
        loop = VirtualLoop()
        try:
            loop.run_until_complete(self._play())
        finally:
            loop.close()
        return self.expected

    async def _play(self) -> None:
        run, hub = _run_of(self.schedule), LocalHub()
        log = logging.Logger("the calm run", logging.CRITICAL)  # what matters is what comes of it
        sessions = [_Session(run, me, RUN_ID, cast(Any, self), log=log) for me in range(run.peers)]
        for one in sessions:
            hub.join(one.endpoint)

        async def play(one: Session) -> Result:
            try:
                return await one.run()
            finally:
                hub.finish(one.me)

        self.expected.results = list(await asyncio.gather(*map(play, sessions)))

    async def train(self) -> None:
        return

    def speaks(self, net: Net, part: int, patience: float, said: Sequence[Said]) -> None:
        return

    def heard(self, net: Net, part: int, expected: Sequence[PeerId], bodies: Mapping[PeerId, Body]) -> None:
        self.expected.heard[net.me, net.t, part] = told(bodies)


# ---- the mesh


class Life:
    """One process of a peer, from its start to its end, and where its method runs."""

    def __init__(self, mesh: Mesh, peer: PeerId, number: int, doomed_at: int) -> None:
        self.mesh = mesh
        self.schedule = mesh.schedule
        self.peer = peer
        self.number = number
        self.born = mesh.now
        self.dead = False
        self.busy_until = 0.0
        self.stalled_until = 0.0
        self.doomed_at = doomed_at
        self.former = mesh.begun.get(peer, -1)
        """The last round in which a former process of this peer may have said something."""
        self.acts = 0
        self.task: asyncio.Task[None]
        self.session: Session
        self.link: ZmqLink
        self.world = SimulatedWorld(mesh.network, self, mesh.schedule.transport.queue)
        self._wait: _Wait | None = None
        self._misjudged: defaultdict[tuple[PeerId, str], set[int]] = defaultdict(set)

    def __str__(self) -> str:
        return f"peer {self.peer}" + f" ({self.number})" * bool(self.number)

    def act(self, what: str) -> None:
        if self.dead:
            raise Killed
        self.acts += 1
        if self.acts == self.doomed_at and self.mesh.crashes_left:
            self.mesh.crash(self, f"about to {what}")
            raise Killed

    # -- the process

    async def live(self) -> None:
        """As peers/runtime.py does it."""
        mesh, run = self.mesh, self.mesh.run
        folder = PeerFolder(cast(Any, SimulatedPath(mesh.disks[self.peer], self.act)), self.peer)
        log = logging.Logger(f"{self}", logging.DEBUG)
        log.addHandler(_Notes(self))
        patience = self.schedule.transport.patience
        self.session = _Session(
            run, self.peer, RUN_ID, cast(Any, self), folder=folder, patience=patience, log=log, faults=self
        )
        self.session.resume()
        transport, world = self.schedule.transport, cast(Any, self.world)
        self.link = ZmqLink(self.session.endpoint, cast(Any, None), transport, DIGEST, log, world=world)
        self.session.endpoint.link = self.link
        await self.link.start()
        leaving: Leaving = "failed"
        try:
            mesh.results[self.peer] = await self.session.run()
            leaving = "finished"
            if self.schedule.patient and (late := self.session.endpoint.mailbox.late):
                mesh.violated(f"{self} got {late} messages that it had no use for")
        except Stopped:
            leaving = "stopped"
            raise
        finally:
            await self.link.close(leaving)

    def in_touch(self, other: PeerId) -> bool:
        """Whether the connections to and from a neighbour are up on both sides."""
        it = self.mesh.lives.get(other)
        if it is None or it.dead or self.dead or not hasattr(it, "link"):
            return False
        edges = it.link._edges.get(self.peer), self.link._edges.get(other)
        return all(edge is not None and edge.up for edge in edges)

    # -- where the method runs

    async def train(self) -> None:
        seconds = self.mesh.network.draw(self.schedule.training)
        self.busy_until = max(self.busy_until, self.mesh.now + seconds)
        while self.busy_until > self.mesh.now:
            await asyncio.sleep(self.busy_until - self.mesh.now)

    def speaks(self, net: Net, part: int, patience: float, said: Sequence[Said]) -> None:
        for body in said:
            self.mesh.said.add((body.sender, body.to, body.t, body.part, body.digest))
        self.mesh.addressed[self.peer, net.t, part] = net.listeners
        sends = 2 * len(self.session.endpoint.neighbors)
        transport = self.schedule.transport
        longest = patience * transport.deadline + 2 * transport.give_up * bool(transport.quorum)
        in_touch = {j: it for j in net.sources if (it := self.mesh.lives.get(j)) is not None and self.in_touch(j)}
        self._wait = _Wait(self.mesh.now, longest + sends * transport.deadline, in_touch)

    def has_done(self, t: int) -> bool:
        return hasattr(self, "session") and self.session.rounds_done > t and not self.dead

    def heard(self, net: Net, part: int, expected: Sequence[PeerId], bodies: Mapping[PeerId, Body]) -> None:
        mesh, t = self.mesh, net.t
        mesh.note(f"{self}: round {t}, part {part}: heard {told(bodies)}")
        for sender, body in bodies.items():
            if isinstance(body, Said):
                facts = (body.sender, body.to, body.t, body.part)
                if facts not in ((sender, -1, t, part), (sender, self.peer, t, part)):
                    mesh.violated(f"{self} was handed {body} as part {part} of round {t} from peer {sender}")
                elif (*facts, body.digest) not in mesh.said:
                    mesh.violated(f"{self} was handed {body}, which was never said")
        if mesh.expected is not None and told(bodies) != (right := mesh.expected.heard[self.peer, t, part]):
            mesh.violated(f"{self} heard {told(bodies)} in part {part} of round {t}, instead of {right}")
        assert self._wait is not None
        lasted = mesh.now - self._wait.began
        if lasted > self._wait.longest + mesh.stalled + 1.0:
            mesh.violated(f"{self} waited {lasted:.1f} s in round {t}; at most {self._wait.longest:.1f} were due")
        for j in sorted(set(expected) - bodies.keys()):
            parted = mesh.network.parted(self.peer, j, self._wait.began - self.schedule.transport.deadline, mesh.now)
            still_there = j in self._wait.in_touch and self._wait.in_touch[j] is self.mesh.lives[j]
            if still_there and self.in_touch(j) and not parted:
                self._misses(j, t, part, lasted)

    def _misses(self, other: PeerId, t: int, part: int, waited: float) -> None:
        """A neighbour has been left out though nothing was in its way, as it seems."""
        mailbox, it = self.session.endpoint.mailbox, self.mesh.lives[other]
        # When the last that it said in that round could leave, and be read here.
        free = max(self.mesh.done_at.get((other, t), 0.0), it.stalled_until, self.stalled_until)
        if waited >= self.schedule.transport.deadline and it.has_done(t) and self.mesh.now - free > SHORT:
            if t <= self.former:
                return  # the others have what that one said, be it that it hears them no more, and we say nothing new
            what = "waits in vain for what was said long ago"
        elif it.has_done(t) and self.peer not in self.mesh.addressed.get((other, t, part), ()):
            return  # we came back to a round that it was done with, and it could not know yet that we hear it again
        elif waited < SHORT and not mailbox.is_gone(other) and mailbox._silent_before.get(other, 0) <= t:
            what = "does not wait for"
        elif waited < SHORT and mailbox.is_gone(other) and not self.world.has_news:
            what = "takes for gone"
        else:
            return
        self._misjudged[other, what].add(t)
        if len(self._misjudged[other, what]) > TOLERATED[what]:
            self.mesh.violated(f"{self} {what}: peer {other}, which is there, in round {t}")

    # -- told by the session

    def begins(self, t: int) -> None:
        self.mesh.begun[self.peer] = max(t, self.mesh.begun.get(self.peer, -1))
        endpoint = self.session.endpoint
        silent = [later for j, later in endpoint._ahead.items() if not endpoint.mailbox.is_gone(j)]
        if silent and min(silent) > t:
            self.mesh.violated(
                f"{self} goes through round {t} alone; the others keep nothing of before {min(silent)}"
            )

    def ends(self, t: int) -> None:
        self.mesh.done_at[self.peer, t] = self.mesh.now
        self.mesh.note(f"{self}: round {t} done, digest {cast(Digesting, self.session.algorithm).digest[:8]}")

    def goes_on(self) -> None:
        return

    def batch(self) -> None:
        return


@dataclass
class _Wait:
    began: float
    longest: float
    in_touch: Mapping[PeerId, Life]
    """Neighbours that could be heard when it began."""


class _Notes(logging.Handler):
    """A peer's log becomes part of the trace; what only a bug brings about is a violation."""

    def __init__(self, life: Life) -> None:
        super().__init__()
        self.life = life

    def emit(self, record: logging.LogRecord) -> None:
        text = f"{self.life}: {record.getMessage()}"
        self.life.mesh.note(f"{text} [{record.levelname}]" if record.levelno > logging.INFO else text)
        if record.levelno >= logging.ERROR:
            self.life.mesh.violated(f"{text}: {record.exc_info[1]!r}" if record.exc_info else text)


class Mesh:
    """All peers of a schedule, each with its disk and its lives."""

    def __init__(self, outcome: Outcome, random: Random, expected: Expected | None) -> None:
        self.outcome = outcome
        self.schedule = schedule = outcome.schedule
        self.random = random
        self.expected = expected
        self.run = _run_of(schedule)
        self.loop = VirtualLoop()
        self.loop.set_exception_handler(self._went_wrong)
        self.network = Network(self.loop, random, schedule.weather, self.note, outcome.counts)
        self.disks = [Disk() for _ in range(self.run.peers)]
        self.lives: dict[PeerId, Life] = {}
        self.results: dict[PeerId, Result] = {}
        self.ended: dict[PeerId, float] = {}
        self.perished: set[PeerId] = set()
        self.said: set[tuple[PeerId, PeerId, int, int, str]] = set()
        self.begun: dict[PeerId, int] = {}
        """The last round that a peer has begun."""
        self.done_at: dict[tuple[PeerId, int], float] = {}
        """When a peer has last ended a round."""
        self.addressed: dict[tuple[PeerId, int, int], tuple[PeerId, ...]] = {}
        """To whom a peer has last spoken in a round and part."""
        self.crashes_left = schedule.crashes
        self.last_fault = max((partition.heals for partition in schedule.weather.partitions), default=0.0)
        self.stalled = 0.0
        """Seconds that threads were stalled, all in all."""

    @property
    def now(self) -> float:
        return self.loop.time()

    def note(self, event: str) -> None:
        self.outcome.trace.append(f"{self.now:12.6f}  {event}")

    def violated(self, what: str) -> None:
        self.note(f"VIOLATION: {what}")
        if what not in self.outcome.violations:
            self.outcome.violations.append(what)

    def _went_wrong(self, loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, Killed):
            self.violated(f"{context['message']}: {error!r}")

    def play(self) -> None:
        try:
            self.loop.run_until_complete(self._play())
        except Stuck as error:
            self.violated(f"does not end: {error}; {self._state()}")
        finally:
            self.outcome.seconds = self.now
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            for life in self.lives.values():
                life.dead = True
                life.world.vanish()
            self.loop.run_until_complete(asyncio.sleep(0.0))
            self.loop.close()

    async def _play(self) -> None:
        peers = {asyncio.ensure_future(self._peer(me)) for me in range(self.run.peers)}
        faults = asyncio.ensure_future(self._befall())
        while peers:
            done, peers = await asyncio.wait(peers, timeout=100.0, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            if peers and self.now > self.last_fault + self._longest():
                self.violated(f"does not end: {self._state()}")
                break
        faults.cancel()
        if not peers:
            self._check()

    def _longest(self) -> float:
        """Virtual seconds that a life may last, and so all of it after the last fault."""
        if self.schedule.patient:
            return PATIENT_FOR
        transport, degree = self.schedule.transport, max(map(len, self.schedule.topology.neighbors))
        wait = transport.deadline + 2 * transport.give_up * bool(transport.quorum)
        rounds = 0.0
        for verbs in self.schedule.verbs:
            waits = len(verbs) + 2 * self.run.peers * verbs.count("sum") + 2  # Begun, Listening
            rounds += waits * (wait + degree * transport.deadline) + 20 * self.schedule.training
        return rounds + 2 * transport.deadline + CLOSING + STALE + self.stalled

    def _state(self) -> str:
        """Who is where, and waits for what."""
        parts = []
        for life in self.lives.values():
            if life.peer not in self.ended and hasattr(life, "session"):
                waits = life.session.endpoint.mailbox.waits_for
                parts.append(f"{life} in round {life.session.rounds_done} waits for {waits or 'its end'}")
        return "; ".join(parts)

    async def _peer(self, me: PeerId) -> None:
        """What a launcher does for a peer: start it, and start it again."""
        random, schedule = self.random, self.schedule
        await asyncio.sleep(self.network.draw(0.3))
        number = 0
        while True:
            doomed_at = int(self.network.draw(schedule.lifetime)) + 1
            life = self.lives[me] = Life(self, me, number, doomed_at)
            self.note(f"{life}: starts")
            life.task = asyncio.ensure_future(life.live())
            while not life.task.done():
                await asyncio.wait([life.task])
            error = None if life.task.cancelled() else life.task.exception()
            life.world.vanish()
            if not life.dead and error is None:
                self.note(f"{life}: has finished")
                self.ended[me] = self.now
                return
            if not life.dead and not isinstance(error, Stopped):
                self.violated(f"{life} fails: {error!r}")
                return
            if life.dead and me in schedule.mortal:
                self.note(f"{life}: is dead for good")
                self.perished.add(me)
                return
            number += 1
            away = self.network.draw(schedule.restart)
            self.last_fault = max(self.last_fault, self.now + away)
            await asyncio.sleep(away)
            if random.random() < schedule.rot:
                self._rot(me)

    # -- faults

    def crash(self, life: Life, where: str) -> None:
        """Kill a process; sometimes others with it."""
        self.outcome.counts["crashes"] += 1
        self.crashes_left -= 1
        self.last_fault = self.now
        self.note(f"{life}: is killed {where}")
        life.dead = True
        self.loop.call_soon(life.task.cancel)
        if self.random.random() < 0.2:
            self.loop.call_soon(self._crash_some)

    def _rot(self, me: PeerId) -> None:
        """The newest checkpoint is damaged; the one before is not."""
        files = self.disks[me].files
        if content := files.get("/checkpoint.pt"):
            self.outcome.counts["checkpoints damaged"] += 1
            self.note(f"peer {me}: its checkpoint is damaged")
            place = self.random.randrange(len(content))
            files["/checkpoint.pt"] = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]

    def _crash_some(self) -> None:
        alive = self._alive()
        for life in self.random.sample(alive, self.random.randint(0, len(alive))):
            if self.crashes_left:
                self.crash(life, "at the same time")

    def _alive(self) -> list[Life]:
        return [life for life in self.lives.values() if not life.dead and not life.task.done()]

    async def _befall(self) -> None:
        faults: dict[Fault, Callable[[], None]] = {
            "crash": self._crash_some,
            "break": self._break,
            "part": self._part,
            "stall": self._stall,
            "train": self._train,
            "stop": self._stop,
        }
        for fault in self.schedule.faults:
            await asyncio.sleep(self.network.draw(self.schedule.pause))
            self.last_fault = max(self.last_fault, self.now)
            faults[fault]()

    def _break(self) -> None:
        if self.network.connections:
            self.outcome.counts["connections broken"] += 1
            self.random.choice(list(self.network.connections)).break_off()

    def _part(self) -> None:
        peer = self.random.randrange(self.run.peers)
        for connection in list(self.network.connections):
            if peer in connection.ends:
                self.outcome.counts["connections broken"] += 1
                connection.break_off()

    def _stall(self) -> None:
        if alive := self._alive():
            life, seconds = self.random.choice(alive), self.network.draw(1.0)
            self.outcome.counts["I/O threads stalled"] += 1
            self.stalled += seconds
            self.note(f"{life}: its I/O thread is stalled for {seconds:.3f} s")
            life.stalled_until = max(life.stalled_until, self.now + seconds)

    def _train(self) -> None:
        if alive := self._alive():
            life, seconds = self.random.choice(alive), self.network.draw(1.0)
            self.outcome.counts["event loops stalled"] += 1
            self.stalled += seconds
            self.note(f"{life}: its event loop is stalled for {seconds:.3f} s")
            life.busy_until = max(life.busy_until, self.now + seconds)

    def _stop(self) -> None:
        alive = [life for life in self._alive() if hasattr(life, "link")]
        if alive:
            life = self.random.choice(alive)
            self.outcome.counts["stops"] += 1
            self.note(f"{life}: is asked to stop")
            life.session.stop()
            life.session.interrupt()

    # -- what must hold at the end

    def _check(self) -> None:
        for me in range(self.run.peers):
            if me not in self.results:  # dead for good, or has failed, which was said
                continue
            result = self.results[me]
            self.outcome.counts["rounds left out"] += result.left_out
            if result.rounds_done != self.schedule.rounds:
                self.violated(f"peer {me} ends after {result.rounds_done} of {self.schedule.rounds} rounds")
            if self.expected is not None:
                self._compare(me, result, self.expected.results[me])
            rounds = [record["t"] for record in self._records(me)]
            if rounds != sorted(set(rounds)):
                self.violated(f"peer {me} has records of rounds {rounds}")

    def _compare(self, me: PeerId, result: Result, expected: Result) -> None:
        for what in ("digest", "out", "inn", "missing", "left_out"):
            ours, theirs = getattr(result, what), getattr(expected, what)
            if ours != theirs:
                self.violated(f"peer {me} ends with {what} {ours}; the calm run with {theirs}")
        rounds = [record["t"] for record in self._records(me)]
        if rounds != list(range(self.schedule.joins_at.get(me, 0), self.schedule.rounds)):
            self.violated(f"peer {me} has records of rounds {rounds}")

    def _records(self, me: PeerId) -> list[dict[str, Any]]:
        root = SimulatedPath(self.disks[me], lambda what: None)
        return metrics.read(cast(Any, PeerFolder(cast(Any, root), me).metrics))
