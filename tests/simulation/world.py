"""The simulated outside world of one process: what peers/sockets.py is in production."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from errno import ENOENT
from os import strerror
from pathlib import Path

import torch
from torch import Tensor

from p2pfl import PeerId
from peers.limited_log import LimitedLog
from peers.sockets import Turns
from tests.simulation.disk import Disk
from tests.simulation.network import Killed, Network, Process
from tests.simulation.sockets import SimulatedDealer, SimulatedRouter


class SimulatedWorld:
    """Sockets, addresses, and the two threads of a process: its I/O loop and its event loop run in random order."""

    def __init__(self, network: Network, process: Process, queue: int, disks: Sequence[Disk]) -> None:
        self.network = network
        self.disks = disks
        self.process = process
        self.queue = queue
        self.addresses = self.journals = self
        self.folder = Path("addresses")
        self.sockets: list[SimulatedRouter | SimulatedDealer] = []
        self._io: Turns | None = None
        self._started = False
        self._io_ended: asyncio.Future[None] = network.loop.create_future()
        self._next_turn: asyncio.TimerHandle | None = None
        self._calls: deque[Callable[[], None]] = deque()

    def now(self) -> float:
        return self.network.loop.time()

    def new_number(self) -> int:
        return self.network.random.getrandbits(52)

    # -- bodies on the same host

    @property
    def own(self) -> tuple[str, str]:
        return ("host", f"token-{self.process.peer}") if self.network.conditions.same_host else ("", "")

    def can_open(self, peer: PeerId, boot: str, token: str) -> bool:
        return self.network.conditions.same_host and token == f"token-{peer}"

    def open_body(self, peer: PeerId, segment: int, at: int, size: int) -> Tensor:
        self.process.step("map a body")
        bodies = self.disks[peer].segments
        if segment not in bodies or self.network.random.random() < 0.05:
            raise FileNotFoundError(ENOENT, strerror(ENOENT))
        return torch.frombuffer(bytearray(bodies[segment][at : at + size]), dtype=torch.uint8)

    def forget(self, body: Tensor) -> None:
        pass

    def listen(self, log: LimitedLog) -> SimulatedRouter:
        self.process.step("listen")
        router = SimulatedRouter(self)
        self.sockets.append(router)
        return router

    def dealer(self, to: PeerId, address: str) -> SimulatedDealer:
        dealer = SimulatedDealer(self, to, address)
        self.sockets = [socket for socket in self.sockets if socket.open]
        self.sockets.append(dealer)
        return dealer

    # -- addresses

    def publish(self, bound: str) -> str:
        self.process.step(f"publish {bound}")
        self.network.publish(self.process.peer, bound)
        return bound

    def withdraw(self, address: str) -> None:
        self.process.step(f"withdraw {address}")
        if self.address_of(self.process.peer) == address:
            self.network.publish(self.process.peer, None)

    def address_of(self, peer: PeerId) -> str | None:
        return self.network.addresses.get(peer)

    def given(self, peer: PeerId) -> str | None:
        return self.address_of(peer)

    def look(self, among: Collection[PeerId]) -> tuple[Collection[PeerId], Collection[PeerId]]:
        return self.network.addresses, self.network.declared_dead

    def is_fixed(self, peer: PeerId) -> bool:
        return False

    def is_withdrawn(self, peer: PeerId) -> bool:
        return self.address_of(peer) is None

    def version(self) -> int:
        return self.network.address_changes if self.now() - self.network.addresses_changed_at > 2.0 else 0

    # -- the I/O thread

    def start(self, io: Turns) -> None:
        self._io = io
        self.wake()

    def wake(self) -> None:
        self.process.step("wake the I/O loop")
        self._turn_at(self.now() + self.network.draw(self.network.conditions.thread_latency))

    def wake_if_ready(self) -> None:
        """Schedule a turn of the I/O loop if any socket is ready."""
        if self._started and any(socket.is_ready for socket in self.sockets):
            self._turn_at(self.now() + self.network.draw(self.network.conditions.thread_latency))

    def _turn_at(self, when: float) -> None:
        """Schedule a turn of the I/O loop at ``when`` at the latest, or when the thread is no longer stalled."""
        when = max(when, self.process.stalled_until)
        if self._next_turn is not None:
            if self._next_turn.when() <= when and not self._next_turn.cancelled():
                return
            self._next_turn.cancel()
        self._next_turn = self.network.loop.call_at(when, self._turn)

    def _turn(self) -> None:
        self._next_turn = None
        if self.process.dead or self._io is None:
            return
        if self.process.stalled_until > self.now():
            self._turn_at(self.process.stalled_until)
            return
        try:
            if self._started:
                ready: Collection[object] = [socket for socket in self.sockets if socket.open and socket.is_ready]
                timeout = self._io.send(ready)
            else:
                self._started = True
                timeout = next(self._io)
        except StopIteration:
            self._io = None
            self._io_ended.set_result(None)
            return
        except Killed:
            return
        self._turn_at(self.now() + timeout)
        self.wake_if_ready()

    # -- the event loop's thread

    def call_soon(self, function: Callable[[], None]) -> None:
        self.process.step("call the event loop")
        self._calls.append(function)
        if len(self._calls) == 1:
            when = self.now() + self.network.draw(self.network.conditions.thread_latency)
            self._run_calls_at(when, postponed=when < self.process.busy_until)

    def _run_calls_at(self, when: float, *, postponed: bool = False) -> None:
        self.network.loop.call_at(max(when, self.process.busy_until), self._run_calls, postponed)

    def _run_calls(self, postponed: bool) -> None:
        """Run the functions that the I/O loop has scheduled.

        Args:
            postponed: they have waited for training to end. The event loop turns once before it trains again, so they
                run now even if the process is busy again.
        """
        if self.process.dead:
            return
        if self.process.busy_until > self.now() and not postponed:
            self._run_calls_at(self.process.busy_until, postponed=True)
            return
        while self._calls:
            function = self._calls.popleft()
            with suppress(Killed):
                self.process.step("run a call of the I/O loop")
                function()

    @property
    def has_pending_calls(self) -> bool:
        return bool(self._calls)

    async def ended(self) -> None:
        self.process.step("wait for the I/O loop to end")
        await self._io_ended

    # -- the end of the process

    def vanish(self) -> None:
        """The process has ended: close its sockets, as the operating system does."""
        if self._next_turn is not None:
            self._next_turn.cancel()
        if self._io is not None and self._started:
            with suppress(Killed):
                self._io.close()
        for socket in self.sockets:
            socket.close()
