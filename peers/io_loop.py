"""The I/O side of a link: owns the sockets, and connects, reconnects and disconnects neighbors.

A generator that yields a timeout in seconds and is sent the ready sockets. ``world`` drives it: peers/sockets.py on a
thread, or tests/simulation in virtual time, on one thread at a time.
"""

from __future__ import annotations

import logging
import math
import os
import random
import threading
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from p2pfl import PeerId
from p2pfl.errors import P2pflError, error_text
from p2pfl.messaging.control import Hello
from p2pfl.messaging.deadline import STALL
from p2pfl.messaging.endpoint import Endpoint
from p2pfl.messaging.journal import JournalEntry
from p2pfl.messaging.wire import OVERHEAD
from p2pfl.run_file.addresses import leads_here, split
from p2pfl.run_file.faults import LinkFaults
from p2pfl.run_file.schema import Transport
from peers.connection import Connection
from peers.limited_log import LimitedLog
from peers.receiver import Receiver

if TYPE_CHECKING:
    from peers.sockets import Sockets
    from peers.zmq_link import ZmqLink
    from peers.zmq_sockets import ZmqRouter

TICK = 0.1
"""Seconds between two checks of the connections while some are down."""
SLOW_TICK = 1.0
"""Minimum seconds between two checks of the neighbors that are connected, and of those that are down for long."""
CHECKS_PER_SECOND, CHECKS_OF_DOWN_PER_SECOND = 16, 256
"""Maximum checks of neighbors in a second: with many that are connected, or down, each is checked less often."""
LONG = 10.0
"""Seconds after which a neighbor that is down is looked for less often. Its HELLO has it looked for at once."""
STALE = 2.0
"""Seconds without an answer after which an address is read again: its peer may have restarted elsewhere."""
OVERDUE = 20.0
"""Seconds after which the log names the neighbors not reached yet, and the addresses tried."""
NAMED = 8
"""Most neighbors that the log names then."""
REFUSAL_PERIOD = 1.0
"""Seconds for which a peer whose handshake has failed keeps refusing its neighbors' handshakes before it closes."""
MIN_ENTRIES = 16
"""Entries of the largest size that fit into the budget: an algorithm may take those of a round in any order."""

Turns = Generator[float, Collection[object], None]
"""Yields a timeout in seconds, and is sent the sockets with a message, an event, or room if that is watched."""
Leaving = Literal["finished", "failed", "stopped"]


class IoLoop:
    """The I/O loop, and the state that it shares with the connections and the receiver.

    I/O thread only, once it runs, but for ``submit`` and where noted.

    Args:
        endpoint, transport, config_hash, log, world, faults: those of the link.
        link: notified, on the event loop's thread.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        transport: Transport,
        config_hash: str,
        log: logging.Logger,
        world: Sockets,
        faults: LinkFaults,
        link: ZmqLink,
    ) -> None:
        self.endpoint = endpoint
        self.me = endpoint.me
        self.transport = transport
        self.log = log
        self.world = world
        self.faults = faults
        self.link = link
        self.hello = Hello(config_hash, *(world.journals.own if transport.same_host else ("", "")))
        self.largest = endpoint.schema.largest(transport.max_message)
        """Bytes of the largest entry that a neighbor may send."""
        self.budget = MIN_ENTRIES * (self.largest + OVERHEAD)
        """Bytes of one neighbor's entries that may be on their way, or not yet taken by the algorithm."""
        self.delivered: dict[PeerId, int] = dict.fromkeys(endpoint.neighbors, 0)
        """Bytes of each neighbor's messages that were passed to the event loop."""
        self.reported: dict[PeerId, int] = dict.fromkeys(endpoint.neighbors, 0)
        """Bytes of each neighbor's messages that the algorithm had taken when Want was last sent."""
        self.stood_still = 0.0
        """Seconds for which this process was suspended (SIGSTOP, no CPU time)."""
        self.limited_log = LimitedLog(log, self.now)
        self.random = random.Random(f"{self.me} {os.getpid()}")  # timing only: must differ between runs
        self.next_check = 0.0
        """When to check the connections next."""
        self.seen_addresses = 0
        """``addresses.version()`` when addresses were last read; 0: read them at the next check."""
        self.closing_since: float | None = None
        self.was_refused = False
        """A neighbor has refused this peer."""
        self.connections: dict[PeerId, Connection] = {}
        self.receiver = Receiver(self)
        self._notifications: list[Callable[[], None]] = []
        self._commands: deque[Callable[[], None]] = deque()
        """Submitted by the event loop and by timers of injected faults."""
        self._submitting = threading.Lock()
        self._pump_at: dict[PeerId, float] = {}
        """When something is due for these neighbors that waits for time only. One look at it a turn: a turn must not
        cost more the more neighbors there are, since each of them brings turns."""
        self.started_at = 0.0
        self._check_all_at = 0.0
        """When to check the connected neighbors next."""
        self._overdue_named = False
        self._cut_off: frozenset[PeerId] = frozenset()
        self._leaving: Leaving = "finished"

    def now(self) -> float:
        """Return seconds on a clock that stops while this process is suspended.

        Otherwise neighbors would be declared dead before the messages that they sent in that time are read.
        """
        return self.world.now() - self.stood_still

    def pending(self, peer: PeerId) -> int:
        """Return the bytes of a neighbor's messages that the algorithm has not taken yet."""
        return self.delivered[peer] - self.endpoint.mailbox.taken_bytes[peer]

    def unreported(self, peer: PeerId) -> int:
        """Return the bytes that the algorithm has taken since the neighbor was last told so. On any thread."""
        return self.endpoint.mailbox.taken_bytes[peer] - self.reported[peer]

    def check_soon(self) -> None:
        self.next_check = min(self.next_check, self.now() + TICK)

    def notify(self, function: Callable[..., None], *arguments: Any) -> None:
        """Schedule a call on the event loop, in order, at the end of this turn of the I/O loop."""
        self._notifications.append(partial(function, *arguments))

    def _deliver_notifications(self) -> None:
        """Wake the event loop once for all notifications of this turn."""
        if self._notifications:
            notifications, self._notifications = self._notifications, []
            self.world.call_soon(partial(_call_all, notifications))

    def start(self, router: ZmqRouter) -> None:
        self.receiver.router = router
        self.started_at = self.now()
        for peer in self.endpoint.neighbors:
            self.connections[peer] = Connection(self, peer, self.world.dealer(peer))
        self.world.start(self.run())

    def submit(self, command: Callable[[], None]) -> None:
        """Have the I/O loop call ``command``. Callable from any thread."""
        with self._submitting:  # otherwise each of two threads could leave it to the other to wake the loop
            self._commands.append(command)
            first = len(self._commands) == 1
        if first:  # otherwise the loop is already awake and will run all of them
            self.world.wake()

    def run(self) -> Turns:
        try:
            turned_at = self.world.now()
            while not self._done():
                timeout = self._timeout()
                ready = yield timeout
                turned_at, before = self.world.now(), turned_at
                if turned_at - before > timeout + STALL:
                    self.stood_still += turned_at - before
                while self._commands:
                    self._commands.popleft()()
                self.receiver.end_pause()
                if self.receiver.router in ready:
                    self.receiver.read()
                self._pump_ready(ready)
                if self.now() >= self.next_check:
                    self._check_connections()
                self._deliver_notifications()
        except Exception as error:
            self.log.error("the I/O thread failed: %s", error_text(error), exc_info=not isinstance(error, P2pflError))
            self.notify(self.link.failed, error)
        finally:
            self.limited_log.summarize(last=True)
            self._deliver_notifications()
            for connection in self.connections.values():
                connection.dealer.close()
            self.receiver.router.close()

    def _pump_ready(self, ready: Collection[object]) -> None:
        """Serve the connections with an event, room to send, or something that was due."""
        dealers = set(ready) - {self.receiver.router}
        for connection in list(self.connections.values()) if dealers else ():
            if connection.dealer in dealers:
                connection.handle_events()
                connection.pump()
        if self._pump_at and min(self._pump_at.values()) <= (now := self.now()):
            due = sorted(peer for peer, at in self._pump_at.items() if at <= now)
            for peer in due:
                del self._pump_at[peer]
            self.pump(due)

    def pump_at(self, peer: PeerId, at: float) -> None:
        """Serve a neighbor's connection at this time, also without an event; at infinity: not without one."""
        if at < math.inf:
            self._pump_at[peer] = at
        else:
            self._pump_at.pop(peer, None)

    def _timeout(self) -> float:
        """Return the seconds until something is due even without a socket event."""
        left = min(self.next_check, min(self._pump_at.values(), default=math.inf)) - self.now()
        if self.receiver.paused:
            left = min(left, self.receiver.pause_left())
        return max(0.001, left)

    def connected(self) -> int:
        """Return the number of connected neighbors. On any thread."""
        return sum(connection.up for connection in self.connections.values())

    # ---- commands of the event loop

    def announce(self, entry: JournalEntry) -> None:
        for peer in entry.to:
            self.connections[peer].announce(entry)
        self.pump(entry.to)

    def set_durable(self, durable: int) -> None:
        for connection in self.connections.values():
            connection.reader.durable = max(connection.reader.durable, durable)
            connection.pump()

    def nothing(self, to: PeerId, t: int) -> None:
        self.connections[to].writer.nothing(t)
        self.connections[to].pump()

    def pump(self, peers: Iterable[PeerId]) -> None:
        for peer in peers:
            self.connections[peer].pump()

    def cut(self, neighbors: frozenset[PeerId]) -> None:
        """Cut off exactly these neighbors (fault injection)."""
        for peer in neighbors - self._cut_off:
            if peer in self.connections:
                self.connections[peer].break_connection()
        self._cut_off = neighbors
        self.seen_addresses = 0
        self.next_check = 0.0

    # ---- finding neighbors

    def _check_connections(self) -> None:
        """Handle lost connections, connect to neighbors that have started, and declare unreachable ones dead."""
        now = self.now()
        self.limited_log.summarize()
        all_due = now >= self._check_all_at
        if all_due:
            self._check_all_at = now + max(SLOW_TICK, len(self.connections) / CHECKS_PER_SECOND)
        for connection in self.connections.values():
            if all_due or not connection.up:
                connection.check(now)
        down = [connection for connection in self.connections.values() if not connection.up]
        if down:
            self._look_for_addresses(down, now)
        if now - self.started_at > OVERDUE and not self._overdue_named:
            self._overdue_named = True
            self._name_overdue([each for each in down if not (each.was_reached or each.disconnected)])
        busy = self.closing_since is not None or any(now - each.down_since < LONG for each in down)
        self.next_check = now + max(TICK if busy else SLOW_TICK, len(down) / CHECKS_OF_DOWN_PER_SECOND)

    def _name_overdue(self, connections: list[Connection]) -> None:
        """Log once which neighbors were not reached: not started yet, behind a firewall, or at another address."""
        if not connections:
            return
        named = connections[:NAMED]
        names = [f"peer {each.peer} at {self._describe_address(each)}" for each in named]
        hint = next(filter(None, map(self._loopback_hint, named)), "")
        others = f" and {len(connections) - NAMED} others" if len(connections) > NAMED else ""
        addresses = self.world.addresses
        unwritten = any(addresses.given(each.peer) is None for each in connections)
        where = f"; each peer writes its address to {addresses.folder} unless transport.hosts has it" * unwritten
        self.log.info("neighbors not reached yet: %s%s%s%s", ", ".join(names), others, where, hint)

    def _describe_address(self, connection: Connection) -> str:
        given = self.world.addresses.given(connection.peer)
        if not connection.address:
            return f"{given}, which does not resolve" if given else "no known address"
        return connection.address if connection.address == given else f"{connection.address} (given as {given})"

    def _loopback_hint(self, connection: Connection) -> str:
        """Say why a peer on another host is not found at an address of this one, e.g. 127.0.1.1 of Debian's hosts."""
        try:
            host = split(connection.address or "")[0]
        except ValueError:  # unknown, or not of TCP
            return ""
        if not leads_here(host):
            return ""
        given = self.world.addresses.given(connection.peer)
        remedy = "" if given == connection.address else "correct the line of its name in /etc/hosts here, or "
        return (
            f"; {host} is this host itself: if peer {connection.peer} runs on another one, {remedy}give its IP "
            "address in transport.hosts"
        )

    def _look_for_addresses(self, down: list[Connection], now: float) -> None:
        """Connect to neighbors whose address has appeared or changed; do not wait for those declared dead."""
        addresses = self.world.addresses
        version = addresses.version()
        if version and version == self.seen_addresses:
            return
        self.seen_addresses = version
        known, dead = addresses.look([connection.peer for connection in down])
        for connection in down:
            if connection.peer in self._cut_off:
                continue
            if connection.peer in dead and not connection.disconnected:
                connection.declare_dead("it has failed repeatedly and is not restarted")
            if connection.peer not in known:
                continue
            unanswered = connection.wrong_peer_answered or (connection.address and connection.lost_at is None)
            if unanswered and now - connection.connected_at < STALE:
                self.seen_addresses = 0  # too early for an answer; check again later
                continue
            address = addresses.address_of(connection.peer)
            if address is not None and address != connection.address:
                connection.connect(address)

    # ---- closing

    def begin_closing(self, leaving: Leaving) -> None:
        self.closing_since = self.now()
        self._leaving = leaving
        self.next_check = 0.0

    def _done(self) -> bool:
        if self.closing_since is None:
            return False
        if self._leaving == "stopped":
            return True
        closing_for = self.now() - self.closing_since
        if self.was_refused and closing_for < REFUSAL_PERIOD:
            return False  # let the neighbors fail too instead of waiting for this peer
        finished = self._leaving == "finished"
        waiting = []
        for each in self.connections.values():
            if each.must_wait(finished=finished, closing_for=closing_for):
                waiting.append(each)
            else:
                each.forget_progress()
        # One that is many rounds behind is not left while it makes progress.
        idle = [each for each in waiting if each.waits_without_progress(self.now()) > self.transport.deadline]
        if len(idle) < len(waiting):
            return False
        for connection in idle:
            self.log.warning("final messages unacknowledged at the deadline peer=%d", connection.peer)
        return True


def _call_all(functions: list[Callable[[], None]]) -> None:
    for function in functions:
        function()
