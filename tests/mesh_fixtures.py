"""Meshes of links: endpoints of one process that are connected in one of several ways."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from p2pfl.messaging import edge
from p2pfl.messaging.conversation import Conversation
from p2pfl.messaging.deadline import WaitPolicy
from p2pfl.messaging.endpoint import Endpoint
from p2pfl.messaging.neighborhood import Neighborhood
from p2pfl.messaging.net import Net
from p2pfl.messaging.schema import Layout
from p2pfl.messaging.topology import Topology
from p2pfl.run_file.faults import LinkFaults
from p2pfl.run_file.schema import Transport
from p2pfl.run_folder.key_files import Keys
from p2pfl.session.body_files import FileStore, NeighborJournals
from p2pfl.simulation.local_link import LocalHub
from peers.health import Health
from peers.io_loop import Leaving
from peers.keys import new_pair
from peers.sockets import Sockets
from peers.zmq_link import ZmqLink
from tests.bodies import GENEROUS_DEADLINE, RUN_ID, round_of


async def run_all(endpoints: list[Endpoint], program: Callable[[Endpoint], Awaitable[Any]]) -> list[Any]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_coroutine(program(endpoint))) for endpoint in endpoints]
    return [task.result() for task in tasks]


async def _coroutine(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


async def run_rounds(
    endpoint: Endpoint, count: int, one_round: Callable[[Net], Awaitable[Any]], start: int = 0
) -> list[Any]:
    """Run ``count`` rounds and return the outcome of each."""
    outcomes = []
    for t in range(start, start + count):
        net = round_of(endpoint, t)
        outcomes.append(await one_round(net))
        endpoint.finish(t)
    return outcomes


async def yield_randomly(seed: object) -> None:
    """Let other tasks run first, or not."""
    for _ in range(random.Random(f"{seed}").randrange(6)):
        await asyncio.sleep(0)


def change_transport(link: ZmqLink, **changes: float) -> None:
    """Change settings of a link's connections while it runs; ``link.transport`` stays."""
    object.__setattr__(link.context, "transport", link.transport.model_copy(update=changes))


class OpeningEndpoint(Endpoint):
    """Opens each round at the latest when it begins; a session opens it at the end of the one before."""

    opened = -1

    def open(self, t: int) -> None:
        self.opened = t
        super().open(t)

    def begin(self, t: int) -> None:
        if t > self.opened:
            self.open(t)
        super().begin(t)


class Mesh:
    """Endpoints of one process on one event loop, over links of one kind.

    ``local``: LocalLinks. ``mapped``: sockets, and journals that neighbors open. ``tcp``: sockets only.
    ``encrypted``: sockets with keys. Peers 0 to 39 have keys.
    """

    def __init__(self, kind: str, root: Path) -> None:
        self.kind = kind
        self.addresses = root
        self.hub = LocalHub()
        self.endpoints: list[Endpoint] = []
        self.links: list[ZmqLink] = []
        self.pairs = [new_pair() for _ in range(40)] if kind == "encrypted" else []
        self._layouts: dict[int, Sequence[Layout]] = {}

    def keys(self, me: int) -> Keys | None:
        return Keys(tuple(public for public, _ in self.pairs), self.pairs[me][1]) if self.pairs else None

    def journal(self, me: int) -> Path:
        return self.addresses / f"journal-{me}"

    def endpoint(
        self,
        me: int,
        topology: Topology,
        layouts: Sequence[Layout],
        deadline: float = GENEROUS_DEADLINE,
        *,
        prunes: bool = False,
    ) -> Endpoint:
        self._layouts[me] = layouts
        store = None if self.kind == "local" else FileStore(self.journal(me))
        conversation = Conversation(layouts, prunes)
        return OpeningEndpoint(Neighborhood(me, topology), RUN_ID, conversation, WaitPolicy(deadline), store=store)

    def revived(self, dead: Endpoint, t: int) -> Endpoint:
        """Return the endpoint of a new process of that peer, which continues in round ``t`` from a checkpoint."""
        state, journal = dead.state_dict(), dead.journal.state_dict(before=t)
        endpoint = self.endpoint(dead.me, dead.neighborhood.topology, self._layouts[dead.me], prunes=dead.prunes)
        assert not endpoint.journal.damaged(journal)
        endpoint.load_state_dict(state, journal, t)
        endpoint.durable = t
        return endpoint

    def link(
        self,
        endpoint: Endpoint,
        config_hash: str = "d",
        faults: Mapping[str, float] | None = None,
        keys: Keys | None = None,
        health: Health | None = None,
        **transport: Any,
    ) -> ZmqLink:
        """Return a link that is not started."""
        transport = {"deadline": GENEROUS_DEADLINE, "give_up": GENEROUS_DEADLINE, **transport}
        transport = {"same_host": self.kind == "mapped", **transport}
        store = endpoint.journal.store
        assert isinstance(store, FileStore)
        settings, log = Transport(**transport), logging.getLogger("mesh")
        journals = NeighborJournals(store.token, self.journal)
        world = Sockets(endpoint, self.addresses, settings, log, journals, keys or self.keys(endpoint.me), health)
        endpoint.link = link = ZmqLink(endpoint, world, settings, config_hash, log, LinkFaults(**(faults or {})))
        self.links.append(link)
        return link

    async def open(
        self,
        topology: Topology,
        layouts: Sequence[Layout],
        deadline: float = GENEROUS_DEADLINE,
        *,
        prunes: bool = False,
        faults: Mapping[str, float] | None = None,
        **transport: Any,
    ) -> list[Endpoint]:
        """Return one endpoint per peer, connected. By default, sockets delay messages at random."""
        self.endpoints = [
            self.endpoint(me, topology, layouts, deadline, prunes=prunes) for me in range(topology.peers)
        ]
        for endpoint in self.endpoints:
            if self.kind == "local":
                self.hub.join(endpoint)
            else:
                await self.link(endpoint, faults=faults or {"jitter": 0.004}, **transport).start()
        return self.endpoints

    async def shut(self, link: ZmqLink, leaving: Leaving = "failed") -> None:
        """Close a link: sent messages arrive, but no peer waits for checkpoints, which these tests do not write."""
        self.links.remove(link)
        await link.close(leaving)

    async def close(self) -> None:
        for link in self.links:  # no reconnections from here on
            change_transport(link, give_up=0.5)
        await asyncio.gather(*(self.shut(link) for link in list(self.links)))


@pytest.fixture(params=["local", "mapped", "tcp", "encrypted"])
async def mesh(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Mesh]:
    """For behavior that all kinds of links have in common; even small bodies travel by reference or in chunks."""
    monkeypatch.setattr(edge, "BY_VALUE", 0)
    monkeypatch.setattr(edge, "CHUNK", 8)
    mesh = Mesh(request.param, tmp_path)
    yield mesh
    await mesh.close()


@pytest.fixture
def local(tmp_path: Path) -> Mesh:
    """For behavior that does not depend on the link."""
    return Mesh("local", tmp_path)


@pytest.fixture
async def sockets(tmp_path: Path) -> AsyncIterator[Mesh]:
    """For behavior that only sockets have."""
    mesh = Mesh("mapped", tmp_path)
    yield mesh
    await mesh.close()


@pytest.fixture
async def encrypted(tmp_path: Path) -> AsyncIterator[Mesh]:
    """For behavior of sockets with keys."""
    mesh = Mesh("encrypted", tmp_path)
    yield mesh
    await mesh.close()
