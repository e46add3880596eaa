"""The I/O side of a link: owns the sockets, and connects, reconnects and disconnects neighbors.

    sockets ──▶ Connection, Receiver ──▶ effects ──▶ sockets, news for the event loop

A generator that yields a timeout in seconds and is sent the ready sockets. ``world`` drives it: peers/sockets.py on a
thread, or tests/simulation in virtual time, on one thread at a time.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Literal

from p2pfl import PeerId
from p2pfl.errors import P2pflError, error_text
from p2pfl.messaging import control
from p2pfl.messaging.control import Refused
from p2pfl.messaging.deadline import STALL
from p2pfl.messaging.edge import OPTIONAL_DELAY
from p2pfl.messaging.journal import JournalEntry
from p2pfl.run_file.addresses import leads_here, split
from peers.connection import Connection
from peers.effects import Close, Failed, Look, News, Refuse, Send
from peers.link_context import LinkContext
from peers.receiver import Receiver
from peers.sockets import Sockets, Turns
from peers.zmq_sockets import ZmqDealer, ZmqRouter

MESSAGES_PER_TURN = 256
"""Maximum messages read in one turn, so that other sockets are served too."""
TICK = 0.1
"""Seconds between two checks of the connections while some are down."""
SLOW_TICK = 1.0
"""Minimum seconds between two checks of neighbors that are connected, or have been down for ``LONG``."""
CHECKS_PER_SECOND, CHECKS_OF_DOWN_PER_SECOND = 16, 256
"""Maximum checks of neighbors in a second: with many that are connected, or down, each is checked less often."""
LONG = 10.0
"""Seconds after which a neighbor that is down is looked for less often; its Hello triggers a look at once."""
STALE = 2.0
"""Seconds without an answer after which an address is read again: its peer may have restarted elsewhere."""
OVERDUE = 20.0
"""Seconds after which the log names the neighbors not reached yet, and the addresses tried."""
NAMED = 8
"""Most neighbors that the log names then."""
REFUSAL_PERIOD = 1.0
"""Seconds for which a peer whose handshake has failed refuses its neighbors' handshakes before it closes."""
Leaving = Literal["finished", "failed", "stopped"]


class IoLoop:
    """The I/O loop. Once it runs, I/O thread only, except ``submit`` and where noted.

    Args:
        context: shared with the connections and the receiver.
        world: the sockets, and what else a link uses of its environment.
        hear: called on the event loop's thread with the news of a turn, in order.
    """

    def __init__(self, context: LinkContext, world: Sockets, hear: Callable[[list[News]], None]) -> None:
        self.context = context
        self.world = world
        self.hear = hear
        self.log = context.log
        self.stood_still = 0.0
        """Seconds for which this process was suspended (SIGSTOP, no CPU time)."""
        self.next_check = 0.0
        """When to check the connections next."""
        self.closing_since: float | None = None
        self.connections: dict[PeerId, Connection] = {}
        self.receiver: Receiver
        self.router: ZmqRouter
        self._dealers: dict[PeerId, ZmqDealer] = {}
        """Of the connections with an address."""
        self._commands: deque[Callable[[], None]] = deque()
        """Submitted by the event loop and by timers of injected faults."""
        self._submitting = threading.Lock()
        self._woken = False
        """Whether the I/O loop is awake, or about to be, for the commands submitted."""
        self._pump_at: dict[PeerId, float] = {}
        """When something is due for these neighbors that waits for time only. Looked at once a turn: the cost of a
        turn must not grow with the number of neighbors, each of which causes turns."""
        self._started_at = 0.0
        self._seen_addresses = 0
        """``addresses.version()`` when addresses were last read; 0: read them at the next check."""
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

    def start(self, router: ZmqRouter) -> None:
        self.router = router
        now = self._started_at = self.now()
        for peer in self.context.endpoint.neighbors:
            self.connections[peer] = Connection(self.context, peer, now)
        self.receiver = Receiver(self.context, self.connections, self.world.journals, now)
        self.world.start(self.run())

    def submit(self, command: Callable[[], None], *, soon: bool = True) -> None:
        """Have the I/O loop call ``command``, unless ``soon`` when it wakes for something else. On any thread."""
        with self._submitting:  # otherwise each of two threads could leave it to the other to wake the loop
            self._commands.append(command)
            wakes, self._woken = soon and not self._woken, soon or self._woken
        if wakes:
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
                self._woken = False
                while self._commands:
                    self._commands.popleft()()
                if self.receiver.end_pause(self.now()):
                    self.router.watch(True)
                if self.router in ready:
                    self._read()
                self._serve(ready)
                if self.now() >= self.next_check:
                    self._check_connections()
                self._tell()
        except Exception as error:
            self.log.error("the I/O thread failed: %s", error_text(error), exc_info=not isinstance(error, P2pflError))
            self.context.news.append(Failed(error))
        finally:
            self.context.limited_log.summarize(last=True)
            self._tell()
            for dealer in self._dealers.values():
                dealer.close()
            self.router.close()

    def _timeout(self) -> float:
        """Return the seconds until something is due even without a socket event."""
        now = self.now()
        left = min(self.next_check, min(self._pump_at.values(), default=math.inf)) - now
        if self.receiver.paused:
            left = min(left, self.receiver.pause_left(now))
        return max(0.001, left)

    def _read(self) -> None:
        """Read what has arrived, and answer it."""
        for _ in range(MESSAGES_PER_TURN):
            if (received := self.router.receive()) is None:
                return
            self.receiver.receive(*received, self.now())
            if self.context.effects:
                self._carry_out()
            if self.receiver.paused:
                self.router.watch(False)
                return

    def _serve(self, ready: Collection[object]) -> None:
        """Serve the connections with an event, room to send, or something that was due."""
        for peer in [peer for peer, dealer in self._dealers.items() if dealer in ready] if ready else ():
            self._handle_events(self.connections[peer])
            self.pump([peer])
        if self._pump_at and min(self._pump_at.values()) <= (now := self.now()):
            due = sorted(peer for peer, at in self._pump_at.items() if at <= now)
            for peer in due:
                del self._pump_at[peer]
            self.pump(due)

    def _handle_events(self, connection: Connection) -> None:
        """Pass on the events of a connection's socket, and what its other side answers."""
        peer = connection.peer
        while (dealer := self._dealers.get(peer)) is not None and (event := dealer.event()) is not None:
            connection.event(event, self.now())
            self._carry_out()
        while (dealer := self._dealers.get(peer)) is not None and (frames := dealer.receive()) is not None:
            connection.answered(frames, fixed=self.world.addresses.is_fixed(peer))
            self._carry_out()

    # ---- effects

    def _carry_out(self) -> None:
        """Carry out what the connections and the receiver ask for."""
        effects = self.context.effects
        while effects:
            match effects.popleft():
                case Send(peer):
                    self._pump(peer, self.now())
                case Close(peer):
                    if dealer := self._dealers.pop(peer, None):
                        dealer.close()
                    self._look_soon()
                case Look():
                    self._look_soon()
                case Refuse(identity, reason):
                    self.router.send(identity, [control.pack(Refused(reason), self.context.endpoint.run_id)])

    def _pump(self, peer: PeerId, now: float) -> None:
        """Pass what is due for a neighbor to libzmq while its queue has room."""
        connection, dealer = self.connections[peer], self._dealers.get(peer)
        for frames in connection.outgoing(now):
            assert dealer is not None
            if not dealer.send(frames):
                dealer.watch(True)
                return
        if dealer is not None:
            dealer.watch(False)
        if connection.due_at < math.inf:
            self._pump_at[peer] = connection.due_at
        else:
            self._pump_at.pop(peer, None)

    def pump(self, peers: Iterable[PeerId]) -> None:
        now = self.now()
        for peer in peers:
            self._pump(peer, now)
        self._carry_out()

    def _look_soon(self) -> None:
        """Read the addresses at the next check, and soon."""
        self._seen_addresses = 0
        self.next_check = min(self.next_check, self.now() + TICK)

    def _tell(self) -> None:
        """Pass the news on, and wake the event loop once for all of this turn."""
        if news := self.context.news.copy():
            self.context.news.clear()
            self.world.call_soon(partial(self.hear, news))

    # ---- commands of the event loop

    def announce(self, entry: JournalEntry, at: float) -> None:
        """Send an entry that was written at the time ``at``."""
        for peer in entry.to:
            self.connections[peer].announce(entry, at)
        if entry.optional:
            due_at = at + OPTIONAL_DELAY
            self._pump_at.update({peer: min(due_at, self._pump_at.get(peer, due_at)) for peer in entry.to})
        else:
            self.pump(entry.to)

    def set_needed(self, needed: Mapping[PeerId, int]) -> None:
        for peer, connection in self.connections.items():
            connection.reader.durable = max(connection.reader.durable, needed[peer])
        self.pump(self.connections)

    def nothing(self, to: PeerId, t: int) -> None:
        self.connections[to].writer.nothing(t)
        self.pump([to])

    def cut(self, neighbors: frozenset[PeerId]) -> None:
        """Cut off exactly these neighbors (fault injection)."""
        for peer in neighbors - self._cut_off:
            if peer in self.connections:
                self.connections[peer].break_off(self.now())
        self._carry_out()
        self._cut_off = neighbors
        self._seen_addresses = 0
        self.next_check = 0.0

    # ---- finding neighbors

    def _check_connections(self) -> None:
        """Handle lost connections, connect to neighbors that have started, and declare unreachable ones dead."""
        now = self.now()
        self.context.limited_log.summarize()
        all_due = now >= self._check_all_at
        if all_due:
            self._check_all_at = now + max(SLOW_TICK, len(self.connections) / CHECKS_PER_SECOND)
        for connection in self.connections.values():
            if all_due or not connection.up:
                self._handle_events(connection)
                connection.check(now)
                self._carry_out()
        down = [connection for connection in self.connections.values() if not connection.up]
        if down:
            self._look_for_addresses(down, now)
        if now - self._started_at > OVERDUE and not self._overdue_named:
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
        where = ""
        if any(addresses.given(each.peer) is None for each in connections):
            where = f"; each peer writes its address to {addresses.folder} unless transport.hosts has it"
        self.log.info("neighbors not reached yet: %s%s%s%s", ", ".join(names), others, where, hint)

    def _describe_address(self, connection: Connection) -> str:
        given = self.world.addresses.given(connection.peer)
        if not connection.address:
            return f"{given}, which does not resolve" if given else "no known address"
        return connection.address if connection.address == given else f"{connection.address} (given as {given})"

    def _loopback_hint(self, connection: Connection) -> str:
        """Return why a peer on another host is not found at an address of this one, e.g. Debian's 127.0.1.1."""
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
        """Connect to neighbors with a new address; do not wait for neighbors that were declared dead."""
        addresses = self.world.addresses
        version = addresses.version()
        if version and version == self._seen_addresses:
            return
        self._seen_addresses = version
        known, dead = addresses.look([connection.peer for connection in down])
        for connection in down:
            if connection.peer in self._cut_off:
                continue
            if connection.peer in dead and not connection.disconnected:
                connection.declare_dead("it has failed repeatedly and is not restarted")
                self._carry_out()
            if connection.peer not in known:
                continue
            unanswered = connection.wrong_peer_answered or (connection.address and connection.lost_at is None)
            if unanswered and now - connection.connected_at < STALE:
                self._seen_addresses = 0  # too early for an answer; check again later
                continue
            address = addresses.address_of(connection.peer)
            if address is not None and address != connection.address:
                self._connect(connection, address)

    def _connect(self, connection: Connection, address: str) -> None:
        """Replace the socket, so that late answers to the old one cannot be misattributed."""
        if dealer := self._dealers.pop(connection.peer, None):
            dealer.close()
        self._dealers[connection.peer] = self.world.dealer(connection.peer, address)
        connection.connect(address, self.now())
        self._carry_out()

    # ---- closing

    def begin_closing(self, leaving: Leaving) -> None:
        self.closing_since = self.now()
        self._leaving = leaving
        self.next_check = 0.0
        for connection in self.connections.values():
            connection.closing = True
        self.pump(self.connections)

    def _done(self) -> bool:
        if self.closing_since is None:
            return False
        if self._leaving == "stopped":
            return True
        closing_for = self.now() - self.closing_since
        if closing_for < REFUSAL_PERIOD and any(each.refused for each in self.connections.values()):
            return False  # let the neighbors fail too instead of waiting for this peer
        finished = self._leaving == "finished"
        waiting = []
        for each in self.connections.values():
            if each.must_wait(finished, closing_for, self.world.addresses.is_withdrawn):
                waiting.append(each)
            else:
                each.forget_progress()
        # A neighbor that is many rounds behind may take its time while it makes progress.
        idle = [each for each in waiting if each.waits_without_progress(self.now()) > self.context.transport.deadline]
        if len(idle) < len(waiting):
            return False
        for connection in idle:
            self.log.warning("final messages unacknowledged at the deadline peer=%d", connection.peer)
        return True
