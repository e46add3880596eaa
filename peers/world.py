"""A link's interface to its environment: sockets, a thread, a clock, published addresses.

    ZmqLink, the protocol  ──  World  ──  Sockets: ROUTER, DEALERs and their monitors on an I/O thread
                                      └─  simulated connections in virtual time, for tests

The link's I/O loop is a generator: it yields a timeout in seconds and is sent the ready sockets. The protocol is the
same code in every World. The generator runs on one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor

from p2pfl import PeerId
from p2pfl.messaging.wire import Buffer

Turns = Generator[float, Collection[object], None]
"""The I/O loop: yields a timeout in seconds, and is sent the ready Routers and Dealers.

A Router is ready if it has a message and is watched, a Dealer if it has an event, or room while that is watched.
"""

WRITABLE = 2
"""Event to watch a Dealer for: room to send."""

Event = Literal["connected", "lost", "rejected", "unproven"]
"""Events of a Dealer's connection.

``rejected``: the listener does not accept this peer's key; the Dealer stops reconnecting. ``unproven``: the listener
uses another protocol, or did not prove possession of the neighbor's key; the Dealer reconnects.
"""


class Router(Protocol):
    """Receives from all neighbors, in order for each of them."""

    bound: str
    """The address that it is bound to."""
    address: str
    """The address that neighbors connect to."""

    def receive(self) -> tuple[bytes, list[Buffer]] | None:
        """Return the next message, if there is one: the sender's identity and the frames.

        With keys, the identity is verified against the connection's key. It is empty if they do not match: the
        message was refused.
        """

    def send(self, identity: bytes, frames: Sequence[Buffer]) -> None:
        """Refuse a connection; lost if the other side is disconnected or does not read."""

    def watch(self, on: bool) -> None:
        """Set whether messages wake the I/O loop."""

    def close(self) -> None: ...


class Dealer(Protocol):
    """Sends to one neighbor and receives its answers. Reconnects automatically."""

    def connect(self, address: str) -> None:
        """Connect; call it once. Until then, nothing else but ``close`` may be called."""

    def send(self, frames: Sequence[Buffer]) -> bool:
        """Send a message. Return False if there is no room.

        The message is lost if the connection breaks before it has arrived. Large frames are not copied and must not
        be modified afterwards.
        """

    def receive(self) -> list[bytes] | None:
        """Return the next answer, if there is one."""

    def event(self) -> Event | None:
        """Return the connection's next event, if there is one. An event wakes the I/O loop."""

    def watch(self, events: int) -> None:
        """Set whether WRITABLE wakes the I/O loop (otherwise 0); initially not."""

    def close(self) -> None: ...


class Addresses(Protocol):
    """The peers' addresses, from the run file or published by the peers."""

    folder: Path
    """Where addresses are published; for log lines."""

    def publish(self, address: str) -> None:
        """Publish this peer's address."""

    def withdraw(self, address: str) -> None:
        """Withdraw this peer's published address."""

    def address_of(self, peer: PeerId) -> str | None:
        """Return a peer's address, or None if it is currently unknown. Called until there is a connection."""

    def known(self) -> Collection[PeerId]:
        """Return the peers that may have an address now; cheaper than asking for each of them."""

    def is_fixed(self, peer: PeerId) -> bool:
        """Return whether the run file determines the address."""

    def is_withdrawn(self, peer: PeerId) -> bool:
        """Return whether a peer that publishes its address has none published now.

        It has not started, has finished or has failed; a killed or stopped peer leaves its address.
        """

    def version(self) -> int:
        """Return a number that changes whenever an address may have changed; 0 if a change cannot be detected."""


class World(Protocol):
    """Everything that a link uses besides its endpoint. Each link has its own."""

    @property
    def addresses(self) -> Addresses: ...

    @property
    def same_host(self) -> tuple[str, str]:
        """The boot id of this host, and the name of a file in this peer's journal folder; see Hello."""

    def can_open(self, peer: PeerId, boot: str, token: str) -> bool:
        """Return whether this peer can read the bodies in a neighbor's journal."""

    def open_body(self, peer: PeerId, segment: int, at: int, size: int) -> Tensor:
        """Return a body in a neighbor's journal, uint8 [size], which may be modified. Raises OSError."""

    def forget_body(self, body: Tensor) -> None:
        """Free the memory of a body from ``open_body``, which was not modified, until it is read again."""

    def new_epoch(self) -> int:
        """Return a random number from 0 to 2^53 - 1."""

    def now(self) -> float:
        """Return the seconds of a monotonic clock."""

    def listen(self) -> Router:
        """Return the only Router, bound and watched. Call this first. Raises RunFolderError if it cannot be bound."""

    def dealer(self, to: PeerId) -> Dealer:
        """Return a new, unconnected Dealer for a neighbor."""

    def start(self, io: Turns) -> None:
        """Start driving the I/O loop."""

    def wake(self) -> None:
        """Have the I/O loop take a turn; called by the event loop."""

    def call_soon(self, function: Callable[[], None]) -> None:
        """Schedule a call on the event loop, in order; called by the I/O loop.

        Do nothing if the event loop has ended.
        """

    async def ended(self) -> None:
        """Wait until the I/O loop has ended and its resources are freed."""
