"""Links between peers of one process on a simulated clock, which see what links over sockets see.

    Entry ── waits for its turn ──▶ transfer ── latency ──▶ arrives

- Each direction of an edge is a link, which sends the entries of the writer's journal one after the other, in order.
- The connection of an edge breaks when one of its ends goes down; what is in transit is lost. When both are up, it is
  there again, and the link continues at the first entry that has not arrived.
- A peer notices at once that a connection breaks, and declares the neighbor dead if it has none to it for ``give_up``
  seconds in which it is up itself. For a neighbor declared dead it keeps only two rounds of entries.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from p2pfl import PeerId
from p2pfl.messaging.control import FOREVER, Id
from p2pfl.messaging.deadline import Deadline
from p2pfl.messaging.edge import OPTIONAL_DELAY
from p2pfl.messaging.endpoint import Endpoint
from p2pfl.messaging.journal import JournalEntry
from p2pfl.messaging.link import Link
from p2pfl.run_file.schema import Transport
from p2pfl.simulation.local_link import LocalHub
from p2pfl.simulation.simulated_time import SimulatedTime
from p2pfl.simulation.transfers import Transfer, Transfers


class ClockHub(LocalHub):
    """Connects the endpoints of one process by links that take time.

    Args:
        time: speeds, latencies, and when peers are up.
        transport: the run file's section.
        logs: of the peers; each is there when its peer joins.
    """

    def __init__(self, time: SimulatedTime, transport: Transport, logs: Mapping[PeerId, logging.Logger]) -> None:
        super().__init__()
        self.logs = logs
        self.time = time
        self.transport = transport
        network = time.settings.network
        self.transfers = Transfers(time.loop, time.peers, network.bandwidth, network.interface)
        self._links: dict[PeerId, ClockLink] = {}

    def join(self, endpoint: Endpoint) -> None:
        super().join(endpoint)
        endpoint.link = self._links[endpoint.me] = ClockLink(endpoint, self)
        endpoint.mailbox.on_block = lambda: None  # no wait is a deadlock: its deadline ends it

    def start(self) -> None:
        for peer in self._links:
            self._change(peer, self.time.now())

    def finish(self, peer: PeerId) -> None:
        self.endpoints[peer].open(FOREVER)

    def end(self, of: PeerId, to: PeerId) -> LinkEnd:
        """Return one peer's end of an edge."""
        return self._links[of].ends[to]

    def _change(self, peer: PeerId, now: float) -> None:
        """Connect or disconnect the edges of a peer that goes down or is back, now and at its next changes."""
        uptimes = self.time.uptimes
        for neighbor, end in self._links[peer].ends.items():
            up = uptimes[peer].is_up(now) and uptimes[neighbor].is_up(now)
            for each in (end, self.end(neighbor, peer)):
                if up:
                    each.connect()
                else:
                    each.disconnect()
        change = uptimes[peer].next_change(now)
        self.time.call_at(change, partial(self._change, peer, change))


class LinkEnd:
    """One peer's end of an edge: the link to the neighbor, and whether the neighbor is there."""

    def __init__(self, link: ClockLink, to: PeerId) -> None:
        self.link = link
        self.to = to
        self.gone = False
        """The neighbor was declared dead or has finished; the endpoint was notified."""
        self.finished = False
        """The neighbor has finished: it needs nothing more."""
        self.next = self._needed = Id(link.endpoint.t, 0)
        """The first entry that was not sent, and the first one that has not arrived."""
        link.endpoint.journal.read_by(to, self.next)
        self.optional_until = 0.0
        """An optional entry at the end is held until then: mostly another one follows, and makes it superfluous."""
        self._up: bool | None = None
        """Whether there is a connection; None before the run starts."""
        self._reached = False
        """Whether there has been one."""
        self._nothing = -1
        """The latest round in which the neighbor was told that it receives nothing."""
        self._transfer: Transfer | None = None
        self._flying: deque[Callable[[], None]] = deque()
        """What arrives after the latency, in order. Another deque takes its place when the connection breaks."""
        self._giving_up: asyncio.TimerHandle | None = None
        """Declares the neighbor dead."""

    # -- sending

    def send(self) -> None:
        """Begin to send the next entry, if the link is free and there is one."""
        time, link = self.link.hub.time, self.link
        if not self._up or self._transfer is not None:
            return
        if (found := link.endpoint.journal.after(self.to, self.next)) is None:
            return
        entry, _ = found
        if entry.optional and (held := self.optional_until) > time.now():
            time.call_at(held, self.send)
            return
        link.endpoint.journal.offer(self.to, entry)  # from now on, no newer entry takes its place
        size = len(entry.header) + entry.size
        self._transfer = link.hub.transfers.begin(link.me, self.to, size, partial(self._sent, entry))

    def _sent(self, entry: JournalEntry) -> None:
        self._transfer, self.next = None, entry.id.next
        self._fly(partial(self._arrive, entry))
        self.link.progress.set()
        self.send()

    def _fly(self, arrive: Callable[[], None]) -> None:
        time, flying = self.link.hub.time, self._flying
        flying.append(arrive)
        time.loop.call_later(time.latency(self.link.me, self.to), self._land, flying)

    def _land(self, flying: deque[Callable[[], None]]) -> None:
        if flying is not self._flying:  # it was lost
            return
        try:
            flying.popleft()()
        except Exception as error:  # the event loop would only log it, and receivers would wait in vain
            self.link.hub.fail(error)

    def _arrive(self, entry: JournalEntry) -> None:
        hub, me, journal = self.link.hub, self.link.me, self.link.endpoint.journal
        self._needed = entry.id.next
        if entry.id.t == FOREVER:
            hub.end(self.to, me).neighbor_finished()
        else:
            hub.deliver(me, entry, [self.to])
        journal.drop(self.to, entry.id.t)  # nothing of an earlier round is on its way

    def nothing(self, t: int) -> None:
        """Tell the neighbor that it receives nothing in round ``t``; again at each new connection."""
        self._nothing = max(t, self._nothing)
        if self._up:
            mailbox = self.link.hub.endpoints[self.to].mailbox
            self._fly(partial(mailbox.nothing, self.link.me, self._nothing))

    # -- the connection

    def connect(self) -> None:
        """Note that both ends are up: continue with the first entry that has not arrived."""
        if self._up:
            return
        link = self.link
        self._up = self._reached = True
        self._stop_giving_up()
        if self.finished:  # it needs nothing
            return
        if self.gone:
            self.gone = False
            link.log.info("neighbor reconnected peer=%d", self.to)
            link.endpoint.mailbox.mark_connected(self.to)
        kept_from = link.endpoint.journal.floor(self.to)
        if kept_from > self._needed.t:
            self.next = self._needed = Id(kept_from, 0)
            link.hub.end(self.to, link.me).lost_before(kept_from)
        if self._nothing >= 0:
            self.nothing(self._nothing)
        self.send()

    def disconnect(self) -> None:
        """Note that one of the ends is down: declare the neighbor dead unless it is back in time."""
        if self._up is False:
            return
        link = self.link
        self._up = False
        self._lose()
        if self.gone:
            return
        if self._reached:
            link.log.info("connection lost peer=%d", self.to)
        transport, time = link.hub.transport, link.hub.time
        patience = transport.give_up if self._reached else transport.deadline
        dead_at = time.uptimes[link.me].after(time.now(), patience)
        self._giving_up = time.loop.call_at(dead_at, self._declare_dead, patience)

    def _lose(self) -> None:
        """Lose what is in transit."""
        if self._transfer is not None:
            self.link.hub.transfers.cancel(self._transfer)
        self._transfer, self._flying, self.next = None, deque(), self._needed

    def lost_before(self, t: int) -> None:
        """Note that the neighbor no longer has its messages of rounds before ``t``, of which this peer lacks some."""
        self.link.log.warning("messages lost peer=%d t<%d: the neighbor no longer keeps them", self.to, t)
        self.link.endpoint.lost_before(self.to, t)

    def _declare_dead(self, patience: float) -> None:
        self.link.log.info("neighbor declared dead peer=%d: no connection for %g s", self.to, patience)
        self._leave()
        self.drop_old()

    def neighbor_finished(self) -> None:
        """Handle the neighbor's last Begin: nothing follows, and it needs nothing more from this peer."""
        self.finished = True
        self._lose()
        self._stop_giving_up()
        self.link.log.info("neighbor finished peer=%d", self.to)
        self._leave()
        self.drop_old()

    def _leave(self) -> None:
        self.gone = True
        self.link.endpoint.mailbox.mark_disconnected(self.to)
        self.link.progress.set()

    def drop_old(self) -> None:
        """Drop everything for a neighbor that has finished, and all but two rounds for one declared dead."""
        endpoint = self.link.endpoint
        if self.finished:
            endpoint.journal.drop(self.to, FOREVER)
        elif endpoint.t < FOREVER:
            endpoint.journal.drop(self.to, endpoint.t - 1, declared_dead=True)

    def _stop_giving_up(self) -> None:
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None


class ClockLink(Link):
    """One peer's link to the others of a ``ClockHub``."""

    def __init__(self, endpoint: Endpoint, hub: ClockHub) -> None:
        self.me = endpoint.me
        self.endpoint = endpoint
        self.hub = hub
        self.log = hub.logs[endpoint.me]
        self.ends = {neighbor: LinkEnd(self, neighbor) for neighbor in endpoint.neighbors}
        self.progress = asyncio.Event()
        """Set when an entry was sent, or a neighbor has finished or was declared dead."""

    def announce(self, entry: JournalEntry) -> None:
        held_until = self.hub.time.now() + OPTIONAL_DELAY if entry.optional else 0.0
        for to in entry.to:
            end = self.ends[to]
            end.optional_until = held_until
            if end.gone:
                end.drop_old()
            end.send()

    def behind(self, peers: Iterable[PeerId]) -> list[PeerId]:
        journal, queue = self.endpoint.journal, self.hub.transport.queue
        connected = ((peer, self.ends[peer]) for peer in peers if not self.ends[peer].gone)
        return [peer for peer, end in connected if journal.count(peer) > queue < journal.waiting(peer, end.next)]

    async def caught_up(self, peers: Iterable[PeerId]) -> None:
        time, limit = self.hub.time, self.hub.transport.deadline
        deadline = Deadline(time.uptimes[self.me].after(time.now(), limit))
        while peers := self.behind(peers):
            self.progress.clear()
            if not await deadline.allows(self.progress.wait()):
                names, queue = ",".join(map(str, peers)), self.hub.transport.queue
                self.log.warning(
                    "neighbors do not keep up peers=%s queue=%d deadline=%g: sending on", names, queue, limit
                )
                return

    def nothing(self, to: PeerId, t: int) -> None:
        self.ends[to].nothing(t)

    def undelivered(self) -> int:
        journal = self.endpoint.journal
        return sum(journal.waiting(to, end.next) for to, end in self.ends.items() if not end.gone)
