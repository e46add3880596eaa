"""Rounds that do not wait for one another, in an order that a test chooses."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

from p2pfl.algorithms.base import Algorithm
from p2pfl.messaging.conversation import Conversation
from p2pfl.messaging.endpoint import Endpoint
from p2pfl.messaging.neighborhood import Neighborhood
from p2pfl.messaging.net import Net
from p2pfl.messaging.newest import NewestMailbox, Take
from p2pfl.messaging.topology import Topology
from p2pfl.simulation.local_link import LocalHub
from tests.bodies import RUN_ID


def run_in_order(algorithms: Sequence[Algorithm[Any]], topology: Topology, order: Sequence[int]) -> list[list[Take]]:
    """Have one peer after the other compute its next round with ``synchrony: none``; messages arrive at once.

    Returns:
        What each peer took, in order.
    """
    return asyncio.run(_run_in_order(algorithms, topology, order))


async def _run_in_order(
    algorithms: Sequence[Algorithm[Any]], topology: Topology, order: Sequence[int]
) -> list[list[Take]]:
    hub = LocalHub()
    taken: list[list[Take]] = [[] for _ in algorithms]
    for algorithm in algorithms:
        conversation = Conversation(algorithm.layouts(), algorithm.prunes, algorithm.on_receive)
        neighbors = topology.neighbors[algorithm.me]
        mailbox = NewestMailbox(neighbors, math.inf, conversation.once, taken[algorithm.me].append)
        hub.join(Endpoint(Neighborhood(algorithm.me, topology), RUN_ID, conversation, mailbox=mailbox))
    for endpoint in hub.endpoints.values():
        endpoint.open(0)
    for me in order:
        endpoint, algorithm = hub.endpoints[me], algorithms[me]
        endpoint.begin(endpoint.t)
        algorithm.aggregation.t = endpoint.t
        await algorithm.round(endpoint.t, Net(endpoint, endpoint.t, algorithm.seed))
        endpoint.finish(endpoint.t)
    return taken
