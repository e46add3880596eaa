"""The World of a link in production: ZeroMQ sockets on an I/O thread."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic

import zmq
from torch import Tensor

from p2pfl import PeerId
from p2pfl.errors import RunFolderError
from p2pfl.run_file.addresses import AddressBook, join
from p2pfl.run_file.schema import Transport
from p2pfl.session.key_files import Keys
from peers.address_files import AddressFiles
from peers.admission import KeyAuthenticator, readable
from peers.free_memory import forget
from peers.health import Health
from peers.journal_files import NeighborJournals
from peers.limited_log import LimitedLog
from peers.resolver import Resolver
from peers.world import Dealer, Router, Turns
from peers.zmq_sockets import Monitors, ZmqDealer, ZmqRouter, sockets_for


class Sockets:
    """ZeroMQ sockets and a thread that drives the I/O loop.

    The thread owns all sockets except one end of the pipe that wakes it.

    Args:
        me: this peer.
        addresses: folder in which each peer publishes its address.
        book: addresses from the run file.
        transport: the run file's section.
        neighbors: peers that may connect.
        log: receives a line for each refused connection or message.
        journals: where bodies of neighbors on this host can be read; None: nowhere.
        keys: None disables encryption and authentication.
        health: answers health checks on this host; None disables them.
    """

    def __init__(
        self,
        me: PeerId,
        addresses: Path,
        book: AddressBook,
        transport: Transport,
        neighbors: tuple[PeerId, ...],
        log: logging.Logger,
        journals: NeighborJournals | None = None,
        keys: Keys | None = None,
        health: Health | None = None,
    ) -> None:
        self.me = me
        self.book = book
        self.transport = transport
        self.neighbors = neighbors
        self.journals = journals
        self.keys = keys
        self.health = health
        self.limited_log = LimitedLog(log, monotonic)
        self.addresses = AddressFiles(me, addresses, book, neighbors, Resolver(monotonic, log), monotonic)

    def now(self) -> float:
        return monotonic()

    def new_epoch(self) -> int:
        return secrets.randbits(53)

    # ---- bodies on the same host

    @property
    def same_host(self) -> tuple[str, str]:
        return ("", "") if self.journals is None else self.journals.own

    def can_open(self, peer: PeerId, boot: str, token: str) -> bool:
        return self.journals is not None and self.journals.can_open(peer, boot, token)

    def open_body(self, peer: PeerId, segment: int, at: int, size: int) -> Tensor:
        assert self.journals is not None
        return self.journals.open_body(peer, segment, at, size)

    def forget_body(self, body: Tensor) -> None:
        forget(body)

    def listen(self) -> Router:
        self.loop = asyncio.get_running_loop()
        self.poller = zmq.Poller()
        self.owners: dict[zmq.Socket[bytes], object] = {}
        """{socket: the ZmqRouter or ZmqDealer that owns it}"""
        self.context = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, sockets_for(len(self.neighbors)))
        self.monitors = Monitors()
        self._wake = self.context.socket(zmq.PAIR)
        self._wake.bind("inproc://wake")
        self._authenticator = KeyAuthenticator(self.context, self.keys, self.neighbors) if self.keys else None
        try:
            self._router = ZmqRouter(self)
        except zmq.ZMQError as error:
            self.monitors.close()
            self.context.destroy(linger=0)
            raise RunFolderError(f"{self.address_to_bind()} cannot be bound: {error}") from None
        return self._router

    def address_to_bind(self) -> str:
        port = self.book.bound_port(self.me)
        return join(self.transport.host, "*" if port is None else port)

    def dealer(self, to: PeerId) -> Dealer:
        return ZmqDealer(self, to)

    # ---- the thread

    def start(self, io: Turns) -> None:
        self.thread = threading.Thread(target=self._drive, args=[io], name="p2pfl-io", daemon=True)
        self.thread.start()

    def _drive(self, io: Turns) -> None:
        woken = self.context.socket(zmq.PAIR)
        woken.connect("inproc://wake")
        self.poller.register(woken, zmq.POLLIN)
        guard = self._router.guard
        self.poller.register(guard.monitor, zmq.POLLIN)
        self.poller.register(self.monitors.fileno(), zmq.POLLIN)
        if self._authenticator:
            self.poller.register(self._authenticator.socket, zmq.POLLIN)
        if self.health:
            self.health.open(self.poller)
        with suppress(StopIteration):
            timeout = next(io)
            while True:
                ready = dict(self.poller.poll(int(timeout * 1000)))
                if woken in ready:
                    while readable(woken):
                        woken.recv()
                if self._authenticator and self._authenticator.socket in ready:
                    self._authenticator.answer(self.limited_log)
                owners = {self.owners[socket] for socket in ready if socket in self.owners}
                if self.monitors.fileno() in ready:
                    owners |= self.monitors.ready()
                timeout = io.send(owners)
                guard.check(self.limited_log)
                if self.health:
                    self.health.answer(ready, self.poller)
                self.limited_log.summarize()
        self.limited_log.summarize(last=True)
        if self.health:
            self.health.close(self.poller)
        if self._authenticator:
            self._authenticator.socket.close()
        woken.close(0)

    def wake(self) -> None:
        with suppress(zmq.Again):  # the I/O thread has ended, or is already awake
            self._wake.send(b"", zmq.NOBLOCK)

    def call_soon(self, function: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the event loop has ended
            self.loop.call_soon_threadsafe(function)

    async def ended(self) -> None:
        await asyncio.to_thread(self.thread.join)
        self.monitors.close()
        self.context.destroy(linger=0)
