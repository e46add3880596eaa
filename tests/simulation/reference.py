"""The fault-free run of a schedule: all peers in one process without sockets, as `p2pfl simulate` runs them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, cast

from p2pfl import PeerId
from p2pfl.graphs import Schedule as GraphSchedule
from p2pfl.messaging.net import Net
from p2pfl.messaging.newest import NewestMailbox, Take
from p2pfl.messaging.schema import Body
from p2pfl.run_file.load import from_dict
from p2pfl.run_file.run import Run
from p2pfl.run_folder.folder import Result
from p2pfl.session.session import Runtime, Session
from p2pfl.simulation.local_link import LocalHub
from p2pfl.simulation.virtual_loop import VirtualLoop
from tests.simulation.algorithm import Said, summary
from tests.simulation.schedule import Schedule

RUN_ID = "0123456789abcdef"


@dataclass
class Expected:
    """What every peer of a schedule without deadlines must end with and receive."""

    results: list[Result] = field(default_factory=list)
    received: dict[tuple[PeerId, int, int], str] = field(default_factory=dict)
    """By peer, round and part."""


class ModelFreeSession(Session):
    def _evaluate(self) -> None:
        """There is no model to evaluate."""


def reference_results(schedule: Schedule, orders: Sequence[Iterable[Take]] = ()) -> Expected:
    """Run without faults.

    Args:
        orders: what the rounds of each peer take, if they do not wait for one another.
    """
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(_ReferenceRun(schedule).run(orders))
    finally:
        loop.close()


class _ReferenceRun:
    """The host of all peers' algorithms."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.expected = Expected()

    async def run(self, orders: Sequence[Iterable[Take]]) -> Expected:
        run, hub = run_of(self.schedule), LocalHub()
        log = logging.Logger("reference run", logging.CRITICAL)
        sessions = [
            ModelFreeSession(run, me, RUN_ID, cast(Any, self), runtime=Runtime(log=log)) for me in range(run.peers)
        ]
        for session in sessions:
            hub.join(session.endpoint)
            if isinstance(session.endpoint.mailbox, NewestMailbox):
                session.endpoint.mailbox.repeat(orders[session.me])

        async def result_of(session: Session) -> Result:
            try:
                return await session.run()
            finally:
                hub.finish(session.me)

        self.expected.results = list(await asyncio.gather(*map(result_of, sessions)))
        return self.expected

    async def train(self) -> None:
        return

    def on_send(self, net: Net, part: int, deadlines: float, bodies: Sequence[Said]) -> None:
        return

    def on_received(self, net: Net, part: int, sources: Sequence[PeerId], bodies: Mapping[PeerId, Body]) -> None:
        self.expected.received[net.me, net.t, part] = summary(bodies)

    def on_collected(self, net: Net, part: int, bodies: Mapping[PeerId, Sequence[Said]]) -> None:
        return


def run_of(schedule: Schedule) -> Run:
    """Return the checked run file of a schedule."""
    template = _template()
    changes = {
        "rounds": schedule.rounds,
        "peers": schedule.topology.peers,
        "joins_at": dict(schedule.joins_at),
        "checkpoint_every": schedule.checkpoint_every,
        "eval_every": schedule.rounds,
        "transport": schedule.transport,
        "synchrony": schedule.synchrony,
    }
    return replace(
        template,
        file=template.file.model_copy(update=changes),
        topology=schedule.topology,
        schedule=None if schedule.rounds_graphs is None else GraphSchedule(schedule.rounds_graphs, None),
    )


@cache
def _template() -> Run:
    return from_dict(
        {"name": "simulated", "rounds": 1, "peers": 2, "data": {"dataset": "digits"}, "algorithm": "local"}
    )
