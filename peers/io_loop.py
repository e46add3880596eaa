"""The I/O loop of a link: owns the sockets, and connects, reconnects and disconnects neighbors."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Literal

from p2pfl import PeerId
from p2pfl.messaging.deadline import STALL
from p2pfl.messaging.journal import JournalEntry
from peers.connection import Connection
from peers.io_context import TICK, IoContext
from peers.receiver import Receiver
from peers.world import Router, Turns

SLOW_TICK = 1.0
"""Minimum seconds between two checks of the neighbors that are connected, and of those that are down for long."""
CHECKS_PER_SECOND = 32
"""Checks of connected neighbors in a second: with many neighbors, each is checked less often."""
SLOWEST_TICK = 5.0
"""Seconds after which a connected neighbor is checked however many there are."""
LONG = 10.0
"""Seconds after which a neighbor that is down is looked for less often. Its HELLO has it looked for at once."""
STALE = 2.0
"""Seconds without an answer after which an address is read again: its peer may have restarted elsewhere."""
OVERDUE = 20.0
"""Seconds after which the log names the neighbors not reached yet, and the addresses tried."""
REFUSAL_PERIOD = 1.0
"""Seconds for which a peer whose handshake has failed keeps refusing its neighbors' handshakes before it closes."""

Leaving = Literal["finished", "failed", "stopped"]


class IoLoop:
    """The I/O loop, which runs on a separate thread (``run``). The event loop's thread submits commands."""

    def __init__(self, context: IoContext) -> None:
        self.context = context
        self.connections: dict[PeerId, Connection] = {}
        self.receiver = Receiver(context, self.connections)
        self._commands: deque[Callable[[], None]] = deque()
        """Submitted by the event loop; appending and popping are atomic."""
        self._active: set[PeerId] = set()
        """Neighbors for which something waits for time only."""
        self.started_at = 0.0
        self._check_all_at = 0.0
        """When to check the connected neighbors next."""
        self._overdue_named = False
        self._cut_off: frozenset[PeerId] = frozenset()
        self._leaving: Leaving = "finished"

    def start(self, router: Router) -> None:
        self.receiver.router = router
        self.started_at = self.context.now()
        for peer in self.context.endpoint.neighbors:
            self.connections[peer] = Connection(self.context, peer, self.context.world.dealer(peer))
        self.context.world.start(self.run())

    def submit(self, command: Callable[[], None]) -> None:
        """Have the I/O loop call ``command``. Callable from any thread."""
        self._commands.append(command)
        if len(self._commands) == 1:  # otherwise the loop is already awake and will run all of them
            self.context.world.wake()

    def run(self) -> Turns:
        """Run the I/O loop as a generator, one turn at a time."""
        io, receiver = self.context, self.receiver
        try:
            turned_at = io.world.now()
            while not self._done():
                timeout = self._timeout()
                ready = yield timeout
                turned_at, before = io.world.now(), turned_at
                if turned_at - before > timeout + STALL:
                    io.stood_still += turned_at - before
                while self._commands:
                    self._commands.popleft()()
                receiver.end_pause()
                if receiver.router in ready:
                    receiver.read()
                self._pump_ready(ready)
                if io.now() >= io.next_check:
                    self._check_connections()
                io.deliver_notifications()
        except Exception as error:
            io.log.exception("the I/O thread failed")
            io.notify(io.events.failed, error)
        finally:
            io.limited_log.summarize(last=True)
            io.deliver_notifications()
            for connection in self.connections.values():
                connection.dealer.close()
            receiver.router.close()

    def _pump_ready(self, ready: Collection[object]) -> None:
        """Serve the connections with an event, room to send, or something that was due."""
        dealers = set(ready) - {self.receiver.router}
        for connection in list(self.connections.values()) if dealers else ():
            if connection.dealer in dealers:
                connection.handle_events()
                connection.pump()
        for peer in sorted(self._active):
            self.connections[peer].pump()

    def _timeout(self) -> float:
        """Return the seconds until something is due even without a socket event."""
        left = self.context.next_check - self.context.now()
        for peer in list(self._active):
            if (due_in := self.connections[peer].due_in()) == math.inf:
                self._active.discard(peer)
            left = min(left, due_in)
        if self.receiver.paused:
            left = min(left, self.receiver.pause_left())
        return max(0.001, left)

    def connected(self) -> int:
        """Return the number of connected neighbors."""
        return sum(connection.up for connection in self.connections.values())

    # ---- commands of the event loop

    def announce(self, entry: JournalEntry) -> None:
        for peer in entry.to:
            connection = self.connections[peer]
            connection.announce(entry)
            connection.pump()
            self._active.add(peer)

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
        self.context.seen_addresses = 0
        self.context.next_check = 0.0

    # ---- finding neighbors

    def _check_connections(self) -> None:
        """Handle lost connections, connect to neighbors that have started, and declare unreachable ones dead."""
        io = self.context
        now = io.now()
        give_up, deadline = io.transport.give_up, io.transport.deadline
        io.limited_log.summarize()
        all_due = now >= self._check_all_at
        if all_due:
            self._check_all_at = now + min(max(SLOW_TICK, len(self.connections) / CHECKS_PER_SECOND), SLOWEST_TICK)
        down = []
        for connection in self.connections.values():
            if connection.up and not all_due:
                continue
            connection.check(now)
            if connection.up:
                continue
            down.append(connection)
            if connection.disconnected:
                continue
            if connection.lost_at is not None and now - connection.lost_at > give_up:
                connection.declare_dead(f"no connection for {give_up:g} s")
            if connection.lost_at is None and now - self.started_at > deadline:
                connection.declare_dead(f"not reached within {deadline:g} s of the start")
        if down:
            self._look_for_addresses(down, now)
        if now - self.started_at > OVERDUE and not self._overdue_named:
            self._overdue_named = True
            self._name_overdue(
                [connection for connection in down if connection.lost_at is None and not connection.disconnected]
            )
        busy = io.closing_since is not None or any(
            now - (self.started_at if connection.lost_at is None else connection.lost_at) < LONG
            for connection in down
        )
        io.next_check = now + (TICK if busy else SLOW_TICK)

    def _name_overdue(self, connections: list[Connection], most: int = 8) -> None:
        """Log once which neighbors were not reached: not started yet, behind a firewall, or at another address."""
        if connections:
            names = [
                f"peer {connection.peer} at {connection.address or 'no known address'}"
                for connection in connections[:most]
            ]
            others = f" and {len(connections) - most} others" if len(connections) > most else ""
            addresses = self.context.world.addresses
            unwritten = any(
                not connection.address and not addresses.is_fixed(connection.peer) for connection in connections
            )
            where = f"; each peer writes its address to {addresses.folder} unless transport.hosts has it" * unwritten
            self.context.log.info("neighbors not reached yet: %s%s%s", ", ".join(names), others, where)

    def _look_for_addresses(self, down: list[Connection], now: float) -> None:
        """Connect to neighbors whose address has appeared or changed."""
        io, addresses = self.context, self.context.world.addresses
        version = addresses.version()
        if version and version == io.seen_addresses:
            return
        io.seen_addresses = version
        known = addresses.known()
        for connection in down:
            if connection.peer not in known or connection.peer in self._cut_off:
                continue
            unanswered = connection.wrong_peer_answered or (connection.address and connection.lost_at is None)
            if unanswered and now - connection.connected_at < STALE:
                io.seen_addresses = 0  # too early for an answer; check again later
                continue
            address = addresses.address_of(connection.peer)
            if address is not None and address != connection.address:
                connection.connect(address)

    # ---- closing

    def begin_closing(self, leaving: Leaving) -> None:
        self.context.closing_since = self.context.now()
        self._leaving = leaving
        self.context.next_check = 0.0

    def _done(self) -> bool:
        since = self.context.closing_since
        if since is None:
            return False
        if self._leaving == "stopped":
            return True
        closing_for = self.context.now() - since
        if self.context.was_refused and closing_for < REFUSAL_PERIOD:
            return False  # let the neighbors fail too instead of waiting for this peer
        finished = self._leaving == "finished"
        waiting = [
            connection
            for connection in self.connections.values()
            if connection.must_wait(finished=finished, closing_for=closing_for)
        ]
        if waiting and closing_for > self.context.transport.deadline:
            for connection in waiting:
                self.context.log.warning("final messages unacknowledged at the deadline peer=%d", connection.peer)
            return True
        return not waiting
