"""A link without sockets: connections and the receiver of one peer, and what passes between two of them."""

from __future__ import annotations

import logging
from itertools import count
from typing import Any, cast
from unittest.mock import Mock

import torch
from torch import Tensor

from p2pfl import PeerId
from p2pfl.messaging import control, wire
from p2pfl.messaging.control import FROM_WRITER, Control, Entry, Hello, Want
from p2pfl.messaging.conversation import Conversation
from p2pfl.messaging.endpoint import Endpoint
from p2pfl.messaging.journal import JournalEntry
from p2pfl.messaging.neighborhood import Neighborhood
from p2pfl.messaging.schema import Body, Layout
from p2pfl.messaging.topology import Topology
from p2pfl.messaging.wire import Buffer
from p2pfl.run_file.faults import LinkFaults
from p2pfl.run_file.schema import Transport
from peers.connection import Connection
from peers.effects import Effect, News
from peers.limited_log import LimitedLog
from peers.link_context import LinkContext
from peers.receiver import Receiver
from tests.bodies import PAIR, RUN_ID, Block, Word

LAYOUTS = [Layout.of(Word("")), Layout.of(Block(torch.zeros(3)))]
ADDRESS = "tcp://10.0.0.2:5700"


class LinkEnd:
    """What a link of peer ``me`` has without its I/O loop; ``now`` is its clock."""

    def __init__(
        self,
        me: PeerId = 0,
        topology: Topology = PAIR,
        faults: LinkFaults | None = None,
        config_hash: str = "d",
        **transport: Any,
    ) -> None:
        self.endpoint = endpoint = Endpoint(Neighborhood(me, topology), RUN_ID, Conversation(LAYOUTS))
        endpoint.link = Mock()
        self.now = 100.0
        log, numbers = logging.getLogger("link"), count(1000 * me + 1)
        hello, limited_log = Hello(config_hash, "boot", f"token-{me}"), LimitedLog(log, lambda: self.now)
        settings = Transport(**transport)
        self.context = LinkContext(
            endpoint, settings, faults or LinkFaults(), hello, lambda: next(numbers), log, limited_log
        )
        self.connections = {peer: Connection(self.context, peer, self.now) for peer in endpoint.neighbors}
        self.bodies: dict[tuple[int, int], bytes] = {}
        """What can be opened in neighbors' journals: {(segment, at): body}"""
        self.receiver = Receiver(self.context, self.connections, cast(Any, self), self.now)

    # ---- journals of neighbors

    own = ("boot", "token")

    def can_open(self, peer: PeerId, boot: str, token: str) -> bool:
        return boot == "boot"

    def open_body(self, peer: PeerId, segment: int, at: int, size: int) -> Tensor:
        if (segment, at) not in self.bodies:
            raise FileNotFoundError(2, "No such file or directory")
        return torch.frombuffer(bytearray(self.bodies[segment, at]), dtype=torch.uint8)

    def forget(self, body: Tensor) -> None:
        pass

    # ---- what the I/O loop does

    def effects(self) -> list[Effect | News]:
        """Return the effects, and then the news, since the last call."""
        found = [*self.context.effects, *self.context.news]
        self.context.effects.clear()
        self.context.news.clear()
        return found

    def append(self, body: Body, *, optional: bool = False) -> JournalEntry:
        """Write an entry for all neighbors into the journal, and announce it."""
        entry = self.endpoint.journal.append(wire.encode(body), self.endpoint.neighbors, optional=optional)
        for connection in self.connections.values():
            connection.announce(entry, self.now)
        return entry

    def outgoing(self, peer: PeerId, room: int = 1000) -> list[list[Buffer]]:
        """Take what is due for a neighbor, as a socket with room for so many messages does."""
        taken: list[list[Buffer]] = []
        for frames in self.connections[peer].outgoing(self.now):
            if len(taken) == room:
                break
            taken.append(frames)
        return taken

    def sends(self, peer: PeerId, room: int = 1000) -> list[Control]:
        """Return what ``outgoing`` takes, without its frames."""
        allowed = (*FROM_WRITER, Want)
        return [control.unpack(frames, RUN_ID, allowed)[0] for frames in self.outgoing(peer, room)]

    def receive(self, sender: PeerId, message: Control, *content: Buffer, run: str = RUN_ID) -> list[Effect | News]:
        """Receive a message of a neighbor, and return the effects.

        Args:
            content: the header of an entry, and its chunk, each in a frame of its own from the second on.
        """
        if isinstance(message, Entry) and content and not message.offset:
            message = message._replace(header=len(content[0]))
        inline = 0 if isinstance(message, Entry) and message.offset else 1
        frames = [control.pack(message, run, *content[:inline]), *content[inline:]]
        self.receiver.receive(f"{sender}>{self.endpoint.me}".encode(), frames, self.now)
        return self.effects()
