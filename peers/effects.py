"""What a connection or the receiver has others do, as values: it needs no sockets, threads or clock itself.

The I/O loop carries out each ``Effect`` at once and in order, and passes all ``News`` of a turn on to the event loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from p2pfl import PeerId
from p2pfl.messaging.wire import Message

SocketEvent = Literal["connected", "lost", "rejected", "unproven"]
"""Events of the connection of a DEALER.

``rejected``: the listener does not accept this peer's key; the DEALER stops reconnecting. ``unproven``: the listener
uses another protocol, or did not prove possession of the neighbor's key; the DEALER reconnects.
"""


# ---- carried out by the I/O loop


@dataclass(frozen=True, slots=True)
class Send:
    """Pass to the socket what the connection to ``peer`` has to send."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Close:
    """Close the socket, and look for the neighbor's address again."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Look:
    """Read the addresses of disconnected neighbors again: one of them may listen at a new one."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer the connection with this identity that it is refused."""

    identity: bytes
    reason: str


Effect = Send | Close | Look | Refuse


# ---- news for the event loop


@dataclass(frozen=True, slots=True)
class Deliver:
    """A message has arrived."""

    message: Message


@dataclass(frozen=True, slots=True)
class NothingComes:
    """``peer`` sends this peer nothing in round ``t``."""

    peer: PeerId
    t: int


@dataclass(frozen=True, slots=True)
class Lost:
    """No message of ``peer`` from before round ``t`` will arrive."""

    peer: PeerId
    t: int


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """A neighbor that was waited for has few entries left to read."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """No more messages will arrive from ``peer``: it has finished, or was declared dead."""

    peer: PeerId
    finished: bool


@dataclass(frozen=True, slots=True)
class Reconnected:
    """``peer`` was declared dead, and is there again."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Failed:
    """The link failed and cannot continue."""

    error: BaseException


News = Deliver | NothingComes | Lost | CaughtUp | Disconnected | Reconnected | Failed
