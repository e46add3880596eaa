"""State shared by the parts of a link's I/O side: clock, settings, log, notifications to the event loop."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable
from typing import Any, Protocol

from p2pfl import PeerId
from p2pfl.messaging.control import Hello
from p2pfl.messaging.endpoint import Endpoint
from p2pfl.messaging.wire import OVERHEAD, Message
from p2pfl.run_file.faults import LinkFaults
from p2pfl.run_file.schema import Transport
from peers.limited_log import LimitedLog
from peers.world import World

TICK = 0.1
"""Seconds between two checks of the connections while some are down."""
MIN_ENTRIES = 16
"""Entries of the largest size that fit into the budget: an algorithm may take those of a round in any order."""

Notification = tuple[Callable[..., None], tuple[Any, ...]]


class LinkEvents(Protocol):
    """Notifications from the I/O side to the event loop. Called on the event loop's thread, in order."""

    def message_received(self, message: Message) -> None: ...

    def neighbor_caught_up(self, peer: PeerId) -> None:
        """``peer`` has few entries left to read, or is no longer there."""

    def neighbor_disconnected(self, peer: PeerId, finished: bool) -> None:
        """No more messages will arrive from ``peer``: it has finished, or was declared dead."""

    def neighbor_reconnected(self, peer: PeerId) -> None: ...

    def failed(self, error: BaseException) -> None:
        """The link failed and cannot continue."""

    def dispatch(self, notifications: list[Notification]) -> None:
        """Make the calls collected in one turn of the I/O loop."""


class IoContext:
    """State shared by the I/O loop, the connections and the receiver. I/O thread only, once it runs."""

    def __init__(
        self,
        endpoint: Endpoint,
        transport: Transport,
        config_hash: str,
        log: logging.Logger,
        world: World,
        faults: LinkFaults,
        events: LinkEvents,
    ) -> None:
        self.endpoint = endpoint
        self.me = endpoint.me
        self.transport = transport
        self.log = log
        self.world = world
        self.faults = faults
        self.events = events
        self.hello = Hello(config_hash, *world.same_host)
        self.largest = endpoint.schema.largest(transport.max_message)
        """Bytes of the largest entry that a neighbor may send."""
        self.budget = MIN_ENTRIES * (self.largest + OVERHEAD)
        """Bytes of one neighbor's entries that may be on their way, or not yet taken by the algorithm."""
        self.delivered: dict[PeerId, int] = dict.fromkeys(endpoint.neighbors, 0)
        """Bytes of each neighbor's messages that were passed to the event loop."""
        self.told: dict[PeerId, int] = dict.fromkeys(endpoint.neighbors, 0)
        """Bytes of each neighbor's messages that the algorithm had taken when Want was last sent."""
        self.stood_still = 0.0
        """Seconds for which this process was suspended (SIGSTOP, no CPU time)."""
        self.limited_log = LimitedLog(log, self.now)
        self.random = random.Random(f"{self.me} {os.getpid()}")  # timing only: must differ between runs
        self.next_check = 0.0
        """When to check the connections next."""
        self.seen_addresses = 0
        """``Addresses.version()`` when addresses were last read; 0: read them at the next check."""
        self.closing_since: float | None = None
        self.was_refused = False
        """A neighbor has refused this peer."""
        self._notifications: list[Notification] = []

    def now(self) -> float:
        """Return seconds on a clock that stops while this process is suspended.

        Otherwise neighbors would be declared dead before the messages that they sent in that time are read.
        """
        return self.world.now() - self.stood_still

    def new_epoch(self) -> int:
        return self.world.new_epoch()

    def pending(self, peer: PeerId) -> int:
        """Return the bytes of a neighbor's messages that the algorithm has not taken yet."""
        return self.delivered[peer] - self.endpoint.mailbox.taken_bytes[peer]

    def untold(self, peer: PeerId) -> int:
        """Return the bytes that the algorithm has taken since the neighbor was last told. On any thread."""
        return self.endpoint.mailbox.taken_bytes[peer] - self.told[peer]

    def check_soon(self) -> None:
        self.next_check = min(self.next_check, self.now() + TICK)

    def notify(self, function: Callable[..., None], *arguments: Any) -> None:
        """Schedule a call on the event loop, in order, at the end of this turn of the I/O loop."""
        self._notifications.append((function, arguments))

    def deliver_notifications(self) -> None:
        """Wake the event loop once for all notifications of this turn."""
        if self._notifications:
            notifications, self._notifications = self._notifications, []
            self.world.call_soon(lambda: self.events.dispatch(notifications))
