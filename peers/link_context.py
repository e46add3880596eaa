"""What the connections of a link and its receiver share, instead of a reference to the I/O loop."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from p2pfl.messaging.control import Hello
from p2pfl.messaging.endpoint import Endpoint
from p2pfl.messaging.wire import OVERHEAD
from p2pfl.run_file.faults import LinkFaults
from p2pfl.run_file.schema import Transport
from peers.effects import Effect, News
from peers.limited_log import LimitedLog

MIN_ENTRIES = 16
"""Entries of the largest size that fit into the budget: an algorithm may take a round's entries in any order."""
MIN_BUDGET = 1 << 20
"""Bytes. A Want follows each quarter of the budget: with small entries, more than one for each would be wasted."""


@dataclass(frozen=True)
class LinkContext:
    """What the connections and the receiver of a link share.

    Attributes:
        endpoint: of this peer.
        transport: the run file's section.
        faults: faults to inject into messages.
        hello: the first message of every connection; its number is drawn each time.
        new_number: draws the number of an epoch or a Hello.
        log: the peer's log.
        limited_log: for events that other processes can cause.
        effects: for the I/O loop to carry out.
        news: for the event loop.
    """

    endpoint: Endpoint
    transport: Transport
    faults: LinkFaults
    hello: Hello
    new_number: Callable[[], int]
    log: logging.Logger
    limited_log: LimitedLog
    effects: deque[Effect] = field(default_factory=deque)
    news: list[News] = field(default_factory=list)

    @cached_property
    def largest(self) -> int:
        """Bytes of the largest entry that a neighbor may send."""
        return self.endpoint.schema.largest(self.transport.max_message)

    @cached_property
    def budget(self) -> int:
        """Bytes of one neighbor's entries that may be on their way, or not yet taken by the algorithm."""
        return max(MIN_BUDGET, MIN_ENTRIES * (self.largest + OVERHEAD))
