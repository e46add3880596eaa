"""What a link uses of its environment: sockets, a thread, a clock, addresses, journals on this host.

``tests/simulation/world.py`` has the same methods, in virtual time.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import secrets
import threading
from collections.abc import Callable, Collection, Generator
from contextlib import suppress
from pathlib import Path
from time import monotonic

import zmq

from p2pfl import PeerId
from p2pfl.errors import AddressInUse, RunFolderError
from p2pfl.messaging.endpoint import Endpoint
from p2pfl.run_file.addresses import IN_USE, is_ipv6, join
from p2pfl.run_file.schema import Transport
from p2pfl.run_folder.key_files import Keys
from p2pfl.session.body_files import NeighborJournals
from peers.address_files import AddressFiles
from peers.admission import KeyAuthenticator
from peers.health import Health
from peers.limited_log import LimitedLog
from peers.resolver import Resolver
from peers.zmq_sockets import SocketContext, ZmqDealer, ZmqRouter, sockets_for

NICE = 19
"""Niceness of the I/O thread. A thread that yields to training finds several messages when it gets its turn; one that
is woken for each message reads each with cold caches, which takes twice the CPU time (docs/benchmarks.md)."""
Turns = Generator[float, Collection[object], None]
"""Yields a timeout in seconds, and is sent the sockets with a message, an event, or room if that is watched."""


class Sockets:
    """ZeroMQ sockets and a thread that drives the I/O loop. The thread owns all sockets.

    Args:
        endpoint: of this peer.
        addresses: folder in which each peer publishes its address while it runs.
        transport: the run file's section.
        log: receives a line when a host name cannot be resolved.
        journals: of this peer, and of neighbors on this host.
        keys: None disables encryption and authentication.
        health: answers health checks on this host; None disables them.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        addresses: Path,
        transport: Transport,
        log: logging.Logger,
        journals: NeighborJournals,
        keys: Keys | None,
        health: Health | None,
    ) -> None:
        self.me, self.neighbors = endpoint.me, endpoint.neighbors
        self.host = transport.host
        self.journals = journals
        self.keys = keys
        self.health = health
        book = transport.book(endpoint.neighborhood.peers)
        self.port = book.bound_port(self.me)
        # All peers bind the same transport.host: none listens at an IPv6 address that its name may have too.
        resolver = Resolver(monotonic, log, ipv4_first=not is_ipv6(transport.host))
        self.addresses = AddressFiles(self.me, addresses, book, self.neighbors, resolver, monotonic)
        self._woken = self._wake = -1
        """A pipe. Not an eventfd, which Python built with old headers lacks."""
        self._waking = threading.Lock()

    def now(self) -> float:
        """Return the seconds of a monotonic clock."""
        return monotonic()

    def new_number(self) -> int:
        """Return a random number from 0 to 2^53 - 1."""
        return secrets.randbits(53)

    def listen(self, log: LimitedLog) -> ZmqRouter:
        """Return the only Router, bound and watched. Call this first. Raises RunFolderError if it cannot be bound.

        Args:
            log: receives a line for each refused connection or message.
        """
        self.loop = asyncio.get_running_loop()
        self._shared = SocketContext(self.me, self.neighbors, self.keys, log, self.now)
        self._shared.context.set(zmq.MAX_SOCKETS, sockets_for(len(self.neighbors)))
        self._authenticator = KeyAuthenticator(self._shared.context, self.keys, self.neighbors) if self.keys else None
        address = join(self.host, self.port or "*")
        try:
            self._router = ZmqRouter(self._shared, self.host, address)
        except zmq.ZMQError as error:
            self._shared.destroy()
            number = error.errno or 0
            failed = f"{address} cannot be bound: {os.strerror(number)}"
            if number == errno.EADDRINUSE:
                raise AddressInUse(f"{failed}; {IN_USE}") from None
            if number in (errno.EADDRNOTAVAIL, errno.ENODEV):
                failed += "; transport.host must be an address of this host"
            raise RunFolderError(failed) from None
        return self._router

    def dealer(self, to: PeerId, address: str) -> ZmqDealer:
        """Return a new Dealer that connects to a neighbor."""
        return ZmqDealer(self._shared, to, address)

    # ---- the thread

    def start(self, io: Turns) -> None:
        """Start driving the I/O loop."""
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.thread = threading.Thread(target=self._drive, args=[io], name="p2pfl-io", daemon=True)
        self.thread.start()

    def _drive(self, io: Turns) -> None:
        with suppress(OSError):  # where the system has no priorities of threads
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        guard, shared, poller = self._router.guard, self._shared, self._shared.poller
        for each in (self._woken, guard.monitor, shared.monitors.fileno()):
            poller.register(each, zmq.POLLIN)
        if self._authenticator:
            poller.register(self._authenticator.socket, zmq.POLLIN)
        if self.health:
            self.health.open(poller)
        try:
            timeout = next(io)
            while True:
                ready = dict(poller.poll(int(timeout * 1000)))
                if self._woken in ready:
                    os.read(self._woken, 4096)
                if self._authenticator and self._authenticator.socket in ready:
                    self._authenticator.answer(shared.limited_log)
                if shared.monitors.fileno() in ready:
                    ready.update(shared.monitors.poll(0))
                timeout = io.send({shared.owners[each] for each in ready if each in shared.owners})
                guard.check(shared.limited_log, events=guard.monitor in ready)
                if self.health:
                    self.health.answer(ready, poller)
        except StopIteration:
            pass
        except Exception as error:  # of what is done between its turns
            with suppress(StopIteration):
                io.throw(error)  # the I/O loop reports it, so that the peer fails
        if self.health:
            self.health.close(poller)
        if self._authenticator:
            self._authenticator.socket.close()

    def wake(self) -> None:
        """Have the I/O loop take a turn; called by the event loop, and by the timers of injected faults."""
        with self._waking:  # the pipe is not closed meanwhile
            if self._wake >= 0:  # otherwise the I/O thread has not started, or has ended
                with suppress(BlockingIOError):  # full, so that a turn is due anyway
                    os.write(self._wake, b"\0")

    def call_soon(self, function: Callable[[], None]) -> None:
        """Schedule a call on the event loop, in order, unless that has ended; called by the I/O loop."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function)

    async def ended(self) -> None:
        """Wait until the I/O loop has ended, and free its resources."""
        await asyncio.to_thread(self.thread.join)
        with self._waking:
            if self._wake >= 0:
                os.close(self._woken)
                os.close(self._wake)
                self._woken = self._wake = -1
        self._shared.destroy()
