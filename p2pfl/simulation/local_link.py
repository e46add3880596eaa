"""LocalLink: all peers in one process."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from contextlib import suppress

from torch import Tensor

from p2pfl import PeerId
from p2pfl.errors import Deadlock
from p2pfl.messaging.endpoint import Endpoint
from p2pfl.messaging.journal import Journal, JournalEntry
from p2pfl.messaging.link import Link
from p2pfl.tensors import Tensors

PASSES = 50
"""Turns of the event loop without a peer that can continue, after which it is a deadlock."""
MAPPED = 1 << 20
"""Bytes from which each receiver maps a body instead of copying it. A mapping takes a file descriptor."""
NEVER_SENT = (
    "All peers wait for messages that nobody has sent: look for a net.broadcast or net.send without `await`, or for "
    "peers that send different kinds"
)


class LocalHub:
    """Connects the endpoints of one process, and detects when all of them wait for one another."""

    def __init__(self) -> None:
        self.endpoints: dict[PeerId, Endpoint] = {}
        self.finished: set[PeerId] = set()
        self.memo: dict[str, Tensors] = {}
        self.failure: Exception | None = None
        """What ``fail`` was called with."""
        self._looking = False
        self._active: PeerId | None = None
        """A peer that could continue at the last check: with many peers, most checks look at this one only."""

    def join(self, endpoint: Endpoint) -> None:
        self.endpoints[endpoint.me] = endpoint
        endpoint.link = LocalLink(endpoint.me, self)
        endpoint.mailbox.on_block = self.check
        endpoint.memo = self.memo

    def start(self) -> None:
        """Begin to deliver, once all endpoints have joined; in the event loop."""

    def deliver(self, sender: PeerId, entry: JournalEntry, to: Iterable[PeerId]) -> None:
        """Have receivers decode an entry as if it came over a network, each with a body that it may modify."""
        journal = self.endpoints[sender].journal
        stored = journal.map(entry)
        ordinary: bool | None = None
        for receiver in map(self.endpoints.__getitem__, to):
            plan = receiver.check(entry.header)
            body = None if stored is None else self.copy(stored, entry, journal)
            if ordinary is None:
                ordinary = plan.is_ordinary(stored)
            message = plan.message(entry.id.t, sender, body, ordinary=ordinary)
            receiver.accept(receiver.converted(message))

    def copy(self, stored: Tensor, entry: JournalEntry, journal: Journal) -> Tensor | None:
        """Return a copy of an entry's body, which takes no memory if it is large."""
        if entry.size >= MAPPED:
            with suppress(OSError):  # no descriptor is left, or no mapping
                return journal.map(entry)
        return stored.clone()

    def finish(self, peer: PeerId) -> None:
        """Note that ``peer`` will send nothing more."""
        self.finished.add(peer)
        self.check()

    @property
    def local(self) -> Collection[PeerId]:
        """The peers of this process."""
        return self.endpoints

    def check(self) -> None:
        """Check whether any peer can continue: no message is ever in flight here."""
        if self._looking or self.some_can_go_on():
            return
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            self.stuck()
        else:
            self._looking = True
            self._look_again(PASSES)

    def _look_again(self, passes: int) -> None:
        """Let ready tasks run first: one may have begun, or may continue because another has ended."""
        if self.some_can_go_on():
            self._looking = False
        elif passes:
            asyncio.get_running_loop().call_soon(self._look_again, passes - 1)
        else:
            self._looking = False
            self.stuck()

    def stuck(self) -> None:
        """End the waits of all peers with a Deadlock: none of them can continue."""
        if len(self.finished) < len(self.endpoints):
            self.deadlocked()

    def some_can_go_on(self) -> bool:
        """Return whether a peer of this process computes, or what it waited for has arrived."""
        if not self._can_go_on(self._active):
            self._active = next(filter(self._can_go_on, reversed(list(self.local))), None)
        return self._active is not None

    def _can_go_on(self, peer: PeerId | None) -> bool:
        return peer is not None and peer not in self.finished and not self.endpoints[peer].mailbox.blocked

    def deadlocked(self) -> None:
        """End the waits of this process's peers with an error that names them."""
        lines = [
            f"peer {peer} waits for {kind} of peer {sender} in round {t}"
            for peer in self.local
            for t, kind, sender in self.endpoints[peer].mailbox.waits_for
        ]
        waits = "; ".join(lines[:5]) + ("; …" if len(lines) > 5 else "")
        self.fail(Deadlock(f"deadlock: {waits}. {NEVER_SENT}"))

    def fail(self, error: Exception) -> None:
        """End the waits of this process's peers with an error."""
        self.failure = error
        for peer in self.local:
            self.endpoints[peer].mailbox.fail(error)


class LocalLink(Link):
    """Hands entries to the other endpoints of this process."""

    def __init__(self, me: PeerId, hub: LocalHub) -> None:
        self.me = me
        self.hub = hub

    def announce(self, entry: JournalEntry) -> None:
        journal, t = self.hub.endpoints[self.me].journal, entry.id.t
        self.hub.deliver(self.me, entry, entry.to)
        for to in entry.to:
            journal.read_by(to, entry.id.next)
            journal.drop(to, t + 1)  # delivered, and no peer crashes without the others

    def nothing(self, to: PeerId, t: int) -> None:
        self.hub.endpoints[to].mailbox.nothing(self.me, t)
