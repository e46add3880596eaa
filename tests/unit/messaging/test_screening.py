"""Models that are fetched by their sketches: who sends what to whom, and liars, attackers and missing peers."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch

from p2pfl.adversaries import ADVERSARIES
from p2pfl.adversaries.attacking import Attacking
from p2pfl.adversaries.base import Attacker
from p2pfl.aggregation import AGGREGATIONS
from p2pfl.aggregation.aggregator import Aggregator
from p2pfl.aggregation.screening import RuleScreen
from p2pfl.codecs.base import Codec
from p2pfl.codecs.packing import Packing
from p2pfl.messaging.conversation import Conversation
from p2pfl.messaging.deadline import WaitPolicy
from p2pfl.messaging.endpoint import Endpoint
from p2pfl.messaging.neighborhood import Neighborhood
from p2pfl.messaging.pipeline import Chain, Pipeline
from p2pfl.messaging.schema import Body, Layout, TensorSpec
from p2pfl.messaging.screening import ModelSketch, ScreeningNet, WantedModels
from p2pfl.messaging.topology import Topology
from p2pfl.rng import Streams
from p2pfl.simulation.local_link import LocalHub
from tests.bodies import LAYOUTS, RUN_ID, SEED, Vector, Word, complete, line, vector

SIZE = 32
SCREENED = [Layout.of(ModelSketch(torch.zeros(SIZE))), Layout.of(WantedModels(()), free={"peers": {0: 9}})]
NEAR = {0: (10.0, 0.0, 0.0), 1: (10.0, 1.0, 0.0), 2: (10.0, 0.0, 1.0)}
"""Models that accept one another: nearer than half their norm."""
FAR = (-10.0, 0.0, 0.0)


def screen_of(me: int) -> RuleScreen:
    rule = AGGREGATIONS["sketchguard"].parse({"gamma": 0.5, "kappa": 0.0, "size": SIZE})
    assert rule.screening is not None
    return RuleScreen(rule.screening, Aggregator(rule, me, rounds=10, measures=True), Vector, SEED)


def nets(
    topology: Topology, pipelines: Mapping[int, Pipeline] | None = None, deadline: float = 60.0
) -> list[ScreeningNet]:
    """Return the nets of all peers in round 0."""
    hub, found = LocalHub(), []
    for me in range(topology.peers):
        pipeline = (pipelines or {}).get(me)
        endpoint = Endpoint(
            Neighborhood(me, topology),
            RUN_ID,
            Conversation([*LAYOUTS, *SCREENED]),
            WaitPolicy(deadline),
            pipeline=pipeline,
        )
        hub.join(endpoint)
        found.append(ScreeningNet(endpoint, 0, SEED, screen_of(me)))
    for net in found:
        endpoint_of(net).open(0)
        endpoint_of(net).begin(0)
    return found


def endpoint_of(net: ScreeningNet) -> Any:
    return net._endpoint


def sent(net: ScreeningNet, kind: type[Body] = Vector) -> list[int]:
    """Return to whom a peer has sent bodies of a kind."""
    return sorted(to for to, kinds in endpoint_of(net).sent.items() if kind.kind() in kinds)


def taken(net: ScreeningNet) -> dict[int, float]:
    screen = net._screen
    assert isinstance(screen, RuleScreen)
    return {j: fraction for j, (_, fraction) in screen.aggregator.measured().get("Vector", {}).items()}


async def exchange(nets: Sequence[ScreeningNet], models: Mapping[int, Sequence[float]], **options: Any) -> list[Any]:
    """Return the senders and models that each peer has received."""
    received = await asyncio.gather(*(net.exchange(vector(*models[net.me]), **options) for net in nets))
    return [{j: body.x.tolist() for j, body in bodies.items()} for bodies in received]


async def test_a_model_is_sent_only_to_those_that_accept_its_sketch() -> None:
    models = {**NEAR, 3: FAR}
    peers = nets(complete(4))
    received = await exchange(peers, models)
    assert received == [{j: list(models[j]) for j in range(3) if j != me} for me in range(3)] + [{}]
    assert [sent(peer) for peer in peers] == [[1, 2], [0, 2], [0, 1], []]
    for kind in (ModelSketch, WantedModels):
        assert [sent(peer, kind) for peer in peers] == [[j for j in range(4) if j != me] for me in range(4)]
    assert all(not endpoint_of(peer).missing and endpoint_of(peer).mailbox.unread == 0 for peer in peers)
    assert [taken(peer) for peer in peers] == [{3: 0.0}, {3: 0.0}, {3: 0.0}, {0: 0.0, 1: 0.0, 2: 0.0}]


async def test_other_kinds_of_messages_are_sent_at_once() -> None:
    peers = nets(complete(3))
    found = await asyncio.gather(*(peer.exchange(Word("hello")) for peer in peers))
    assert [sorted(each) for each in found] == [[1, 2], [0, 2], [0, 1]]
    assert sent(peers[0], ModelSketch) == []


async def test_a_model_that_is_published_is_sent_as_it_was_although_training_goes_on() -> None:
    async def round_of(net: ScreeningNet) -> tuple[Any, Any]:
        x = torch.tensor(NEAR[net.me])
        copy = await net.publish(Vector(x))
        assert sent(net) == []
        x.zero_()
        copy.x[1] = 9.0
        return copy.x.tolist(), {j: body.x.tolist() for j, body in (await net.gather(Vector)).items()}

    copies, received = zip(*await asyncio.gather(*map(round_of, nets(complete(3)))), strict=True)
    assert list(copies) == [[10.0, 9.0, x[2]] for x in NEAR.values()]
    assert list(received) == [{j: list(NEAR[j]) for j in NEAR if j != me} for me in NEAR]


async def test_peers_that_do_not_send_receive_what_they_accept() -> None:
    peers = nets(complete(4))
    received = await exchange(peers, {**NEAR, 3: FAR}, among=[1, 3])
    assert [sorted(found) for found in received] == [[1], [], [1], []]
    assert [sent(peer, WantedModels) for peer in peers] == [[1, 3], [3], [1, 3], [1]]
    assert all(not endpoint_of(peer).missing for peer in peers)


async def test_without_a_model_of_its_own_a_peer_accepts_what_is_near_the_median() -> None:
    peers = nets(complete(4))
    models: dict[int, Sequence[float]] = {0: (float("nan"), 0.0, 0.0), 1: NEAR[1], 2: NEAR[2], 3: NEAR[0]}
    received = await exchange(peers, models)
    assert [sorted(found) for found in received] == [[1, 2, 3], [2, 3], [1, 3], [1, 2]]


# ---- attackers -------------------------------------------------------------------------------------------------


def attacking(me: int, peers: int, name: str, kinds: Collection[str] = ("Vector",), **options: Any) -> Chain:
    attacker = Attacker(Neighborhood(me, complete(peers)), frozenset([me]))
    return Chain([Attacking(ADVERSARIES[name].parse(options), attacker, Streams(0, me), kinds=kinds)])


async def test_an_attacker_announces_the_model_that_it_will_send() -> None:
    peers = nets(complete(3), {2: attacking(2, 3, "sign-flip")})
    received = await exchange(peers, NEAR)
    assert [sorted(found) for found in received] == [[1], [0], [0, 1]]
    assert sent(peers[2]) == []
    assert all(not endpoint_of(peer).missing for peer in peers)


async def test_different_models_have_different_sketches() -> None:
    attack = attacking(2, 3, "equivocate", attacks=["none", "sign-flip"])
    received = await exchange(nets(complete(3), {2: attack}), NEAR)
    assert [sorted(found) for found in received] == [[1, 2], [0], [0, 1]]


class Liar(Pipeline):
    """Announces its model, and sends another one."""

    def incoming(self, message: Any) -> Any:
        return message

    def outgoing(self, body: Body, to: Sequence[int], t: int) -> Iterable[tuple[Sequence[int], Body]]:
        if isinstance(body, ModelSketch):
            body = ModelSketch(screen_of(2).sketch(vector(*NEAR[2])))
        elif isinstance(body, Vector):
            body = vector(10.0, 0.0, 1.1)
        return [(to, body)]


async def test_a_model_that_does_not_have_the_sketch_announced_is_dropped_and_counts_as_rejected() -> None:
    peers = nets(complete(3), {2: Liar()})
    received = await exchange(peers, NEAR)
    assert [sorted(found) for found in received] == [[1], [0], [0, 1]]
    assert sent(peers[2]) == [0, 1]
    assert [endpoint_of(peer).missing for peer in peers] == [{"Vector": [2]}, {"Vector": [2]}, {}]
    assert [taken(peer) for peer in peers] == [{2: 0.0}, {2: 0.0}, {}]


async def test_an_attack_that_names_sketches_changes_them_alone() -> None:
    peers = nets(complete(3), {2: attacking(2, 3, "sign-flip", ["ModelSketch"])})
    received = await exchange(peers, NEAR)
    assert [sorted(found) for found in received] == [[1], [0], [0, 1]]
    assert (sent(peers[2]), sent(peers[2], ModelSketch)) == ([], [0, 1])


# ---- codecs ----------------------------------------------------------------------------------------------------


class Rounded(Codec):
    """Packs numbers into integers: far from exact."""

    def parts(self, spec: TensorSpec) -> Mapping[str, TensorSpec]:
        return {"q": TensorSpec(torch.int8, spec.shape)}

    def pack(self, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {"q": (tensor / 3).round().to(torch.int8)}

    def unpack(self, parts: Mapping[str, torch.Tensor], spec: TensorSpec) -> torch.Tensor:
        return parts["q"].to(spec.dtype) * 3


async def test_a_sketch_stands_for_what_receivers_unpack() -> None:
    def packing(me: int) -> Packing:
        return Packing(lambda kind: Rounded() if kind == "Vector" else None, Streams(0, me))

    peers = nets(complete(3), {me: packing(me) for me in range(3)})
    assert await exchange(peers, NEAR) == [{j: [9.0, 0.0, 0.0] for j in NEAR if j != me} for me in NEAR]


# ---- peers that are missing ------------------------------------------------------------------------------------


async def test_a_disconnected_neighbor_is_neither_waited_for_nor_sent_a_model() -> None:
    peers = nets(complete(3))
    for peer in peers[:2]:
        endpoint_of(peer).mailbox.mark_disconnected(2)
    received = await exchange(peers[:2], NEAR)
    assert [sorted(found) for found in received] == [[1], [0]]
    assert [sent(peer) for peer in peers] == [[1], [0], []]
    assert endpoint_of(peers[0]).missing == {"ModelSketch": [2], "WantedModels": [2]}


@pytest.mark.parametrize("step", [ModelSketch, WantedModels, Vector])
async def test_a_neighbor_that_leaves_out_a_step_hangs_nobody(
    step: type[Body], monkeypatch: pytest.MonkeyPatch
) -> None:
    idle = Topology.from_edges(4, [(0, 1), (0, 2), (1, 2)])  # peer 3 might act, so waits end by their deadline
    peers = nets(idle, deadline=0.05)
    send = endpoint_of(peers[2]).send

    async def send_all_but_one(to: Iterable[int], body: Body, **options: Any) -> Any:
        return await send([] if type(body) is step else to, body, **options)

    monkeypatch.setattr(endpoint_of(peers[2]), "send", send_all_but_one)
    received = await exchange(peers[:3], NEAR)
    answers = step is not WantedModels  # who wants nothing is sent nothing, and what it sends is welcome
    expected = [[1], [0], [0, 1]] if answers else [[1, 2], [0, 2], []]
    assert [sorted(found) for found in received] == expected
    assert [sent(peer) for peer in peers[:2]] == ([[1, 2], [0, 2]] if answers else [[1], [0]])
    assert list(endpoint_of(peers[0]).missing) == [step.kind()]


async def test_peers_on_a_line_screen_their_own_neighbors() -> None:
    peers = nets(line(4))
    received = await exchange(peers, {0: NEAR[0], 1: NEAR[1], 2: FAR, 3: FAR})
    assert [sorted(found) for found in received] == [[1], [0], [3], [2]]
