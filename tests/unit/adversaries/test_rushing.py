"""Rushing attacks: computed by hand, compared with the library byzfl, and when they send."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any

import byzfl
import pytest
import torch
from torch import Tensor

from p2pfl.adversaries import ADVERSARIES
from p2pfl.adversaries.attacking import Attacking
from p2pfl.adversaries.base import Adversary, Attacker
from p2pfl.adversaries.moments import largest_z, line_search
from p2pfl.algorithms.class_means import Prototypes
from p2pfl.algorithms.fedkd import Factors
from p2pfl.algorithms.mapl_prototypes import Prototypes as MAPLPrototypes
from p2pfl.messaging.conversation import Conversation
from p2pfl.messaging.endpoint import Endpoint
from p2pfl.messaging.neighborhood import Neighborhood
from p2pfl.messaging.net import Net
from p2pfl.messaging.pipeline import Chain
from p2pfl.messaging.schema import Body, Layout, TensorPath
from p2pfl.messaging.topology import Topology
from p2pfl.rng import Streams
from p2pfl.simulation.local_link import LocalHub
from tests.bodies import LAYOUTS, RUN_ID, SEED, Named, Vector, complete, vector

ATTACKERS = frozenset({4, 5})


def sent(
    name: str,
    others: Mapping[int, Body],
    body: Body,
    to: Sequence[int] = (0, 1),
    before: Tensor | None = None,
    topology: Topology | None = None,
    **options: Any,
) -> Any:
    """Return what peer 4 of a complete graph sends in place of a body: for all, or by receiver."""
    earlier: dict[TensorPath, Tensor] = {} if before is None else {("x", None): before}
    place = Neighborhood(4, topology or complete(6))
    attacker = Attacker(place, ATTACKERS, before=earlier, others=others)
    return ADVERSARIES[name].parse(options).attack(body, to, 0, attacker)


def x(body: Body) -> list[float]:
    assert isinstance(body, Vector)
    return body.x.tolist()


OTHERS = {0: vector(1, 2, 3), 1: vector(4, 5, 6), 2: vector(7, 8, 12)}
OWN = vector(9, 9, 9)


# ---- by hand -----------------------------------------------------------------------------------------------


def test_ipm_sends_the_opposite_of_the_mean() -> None:
    assert x(sent("ipm", OTHERS, OWN)) == [-2.0, -2.5, -3.5]
    assert x(sent("ipm", OTHERS, OWN, epsilon=2)) == [-8.0, -10.0, -14.0]
    before = torch.tensor([2.0, 5.0, 1.0])
    assert x(sent("ipm", OTHERS, OWN, before=before, of="updates")) == [1.0, 5.0, -2.0]  # 2 − ½ (4 − 2), …
    assert x(sent("ipm", OTHERS, OWN, of="updates")) == [-2.0, -2.5, -3.5]  # gradients have no earlier value


def test_alie_stays_within_the_spread() -> None:
    assert x(sent("alie", OTHERS, OWN, z=1)) == pytest.approx([4 - 3, 5 - 3, 7 - math.sqrt(21)])
    # 3 honest vectors and 2 attackers nearby: s = ⌊5/2⌋ + 1 − 2 = 1, z = Φ⁻¹(2/3).
    assert x(sent("alie", OTHERS, OWN))[0] == pytest.approx(4 - 3 * NormalDist().inv_cdf(2 / 3))


@pytest.mark.parametrize(
    ("honest", "attackers", "share"),
    [(8, 2, 4 / 8), (40, 10, 24 / 40), (5, 4, 4 / 5), (3, 9, 2 / 3), (2, 1, 1 / 2), (1, 1, None), (1, 3, None)],
)
def test_z_leaves_a_majority_farther_from_the_mean(honest: int, attackers: int, share: float | None) -> None:
    assert largest_z(honest, attackers) == (0.0 if share is None else NormalDist().inv_cdf(share))


def deviating(name: str, points: Tensor) -> tuple[Tensor, float]:
    """Return what is sent in place of some rows, and γ."""
    lie = sent(name, {j: Vector(point) for j, point in enumerate(points)}, OWN).x
    deviation = points.std(0)
    return lie, float(((points.mean(0) - lie) @ deviation) / (deviation @ deviation))


@pytest.mark.parametrize(
    ("name", "bound"),
    [
        ("min-max", lambda points, lie: (torch.cdist(points, points).max(), (points - lie).norm(dim=1).max())),
        (
            "min-sum",
            lambda points, lie: (
                torch.cdist(points, points).square().sum(1).max(),
                (points - lie).square().sum(),
            ),
        ),
    ],
)
def test_the_largest_deviation_within_the_bound_is_sent(name: str, bound: Any) -> None:
    points = torch.randn(7, 3, generator=torch.Generator().manual_seed(1))
    lie, gamma = deviating(name, points)
    low, high = 0.0, 100.0  # bisection, as in the paper
    for _ in range(60):
        middle = (low + high) / 2
        limit, found = bound(points.double(), points.double().mean(0) - middle * points.double().std(0))
        low, high = (middle, high) if found <= limit else (low, middle)
    assert gamma == pytest.approx(low, rel=1e-5)
    limit, found = bound(points, lie)
    assert float(found) == pytest.approx(float(limit), rel=1e-5)


def test_min_max_and_min_sum_by_hand() -> None:
    points = torch.tensor([[-1.0, 0, 0], [1, 0, 0]])  # mean 0, std √2, farthest 2
    assert deviating("min-max", points)[0].tolist() == pytest.approx([-1.0, 0.0, 0.0])  # 1 + γ √2 = 2
    assert deviating("min-sum", points)[0].tolist() == pytest.approx([-1.0, 0.0, 0.0])  # 2 + 2 (γ √2)² = 4
    scalars = {j: Named({"a": torch.tensor(j - 1.0), "b": torch.zeros(2)}) for j in (0, 2)}
    assert sent("min-max", scalars, scalars[0]).x["a"] == pytest.approx(-1.0)
    equal = {j: vector(1, 2, 3) for j in range(3)}
    assert [x(sent(name, equal, OWN)) for name in ("min-max", "min-sum")] == [[1, 2, 3]] * 2


def test_mimic_copies_a_neighbor() -> None:
    assert [sent("mimic", OTHERS, OWN, target=target) for target in (None, 2, 3)] == [OTHERS[0], OTHERS[2], OTHERS[0]]


def test_dissensus_sends_each_receiver_away_from_its_neighbors() -> None:
    found = sent("dissensus", OTHERS, OWN, to=[0, 1, 3, 5])
    assert x(found[0]) == [1 + (1 - 4) + (1 - 7), 2 + (2 - 5) + (2 - 8), 3 + (3 - 6) + (3 - 12)]
    assert x(found[1]) == [4 + 3 - 3, 5 + 3 - 3, 6 + 3 - 6]
    assert found[3] is found[5] is OWN  # one that was not heard, and an attacker
    sparse = Topology.from_edges(6, [(0, 1), (0, 4), (1, 4), (2, 4), (3, 4), (5, 4)])
    found = sent("dissensus", OTHERS, OWN, to=[0, 2], topology=sparse, epsilon=0.5)
    assert x(found[0]) == [1 - 1.5, 2 - 1.5, 3 - 1.5]
    assert x(found[2]) == x(OTHERS[2])  # without another neighbor there is nothing to cancel


@pytest.mark.parametrize("name", ["ipm", "alie", "min-max", "min-sum", "mimic", "dissensus"])
def test_without_honest_neighbors_the_truth_is_sent(name: str) -> None:
    found = sent(name, {}, OWN)
    assert (found if isinstance(found, Body) else found[0]) is OWN or x(found) == x(OWN)


# ---- the library byzfl -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "oracle"),
    [
        ("ipm", {"epsilon": 1.5}, byzfl.InnerProductManipulation(1.5)),
        ("ipm", {"epsilon": 1.0}, byzfl.SignFlipping()),  # there, of the honest mean
        ("alie", {"z": 1.2}, byzfl.ALittleIsEnough(-1.2)),  # there, in the other direction
        ("mimic", {"target": 3}, byzfl.Mimic(3)),
    ],
)
def test_attacks_agree_with_byzfl(name: str, options: dict[str, Any], oracle: Any) -> None:
    vectors = torch.randn(9, 50, generator=torch.Generator().manual_seed(3))
    whole = {j: Named({"a": row[:20].view(4, 5), "b": row[20:]}) for j, row in enumerate(vectors)}
    lie = sent(name, whole, whole[0], **options).x
    assert torch.allclose(torch.cat([lie["a"].flatten(), lie["b"]]), oracle(vectors), rtol=1e-5, atol=1e-6)


def middle(tensors: Mapping[int, Mapping[str, Tensor]], me: int, kind: str, t: int) -> dict[str, Tensor]:
    """The mean of the vectors without the two largest and the two smallest values of each coordinate."""
    assert list(tensors) == sorted(tensors)
    assert (me, kind, t) == (0, "Vector", 0)
    return {
        name: torch.stack([x[name] for x in tensors.values()]).sort(0).values[2:-2].mean(0) for name in tensors[0]
    }


@pytest.mark.parametrize(
    ("name", "sign", "oracle"),
    [
        ("ipm", 1, byzfl.Optimal_InnerProductManipulation(byzfl.TrMean(2), pre_agg_list=[], f=2)),
        ("alie", -1, byzfl.Optimal_ALittleIsEnough(byzfl.TrMean(2), pre_agg_list=[], f=2)),  # the other direction
    ],
)
def test_tuned_attacks_agree_with_byzfl(name: str, sign: int, oracle: Any) -> None:
    vectors = 1 + torch.randn(8, 30, generator=torch.Generator().manual_seed(4))
    peers = [j for j in range(10) if j not in (4, 5)]
    others = {j: Vector(row) for j, row in zip(peers, vectors, strict=True)}
    attacker = Attacker(Neighborhood(4, complete(10)), ATTACKERS, others=others, combine=middle)
    lie = ADVERSARIES[name].parse({"tune": True}).attack(others[0], [0], 0, attacker)
    assert isinstance(lie, Vector)
    assert torch.allclose(lie.x, sign * oracle(sign * vectors), rtol=1e-4, atol=1e-5)


def test_the_line_search_evaluates_twenty_times_and_keeps_the_best() -> None:
    tried: list[float] = []

    def value(x: float) -> float:
        tried.append(x)
        return -abs(x - 33.0)

    assert line_search(value) == pytest.approx(35.37, abs=0.01)  # steps only go up, by 0.8 of the last one
    assert (len(tried), tried[:5]) == (20, [0.0, 10.0, 30.0, 70.0, 62.0])
    assert line_search(lambda x: -x) == 0.0


def test_vectors_that_receivers_would_drop_do_no_damage() -> None:
    def mean(tensors: Mapping[int, Mapping[str, Tensor]], me: int, kind: str, t: int) -> Mapping[str, Tensor]:
        return {name: sum(x[name] for x in tensors.values()) / len(tensors) for name in tensors[me]}  # type: ignore

    attacker = Attacker(Neighborhood(4, complete(6)), ATTACKERS, others=OTHERS, combine=mean)
    lie = ADVERSARIES["ipm"].parse({"tune": True}).attack(OWN, [0], 0, attacker)
    assert isinstance(lie, Vector)
    assert 1e5 < float(lie.x.abs().max()) < 1e6  # the mean has no bound; divergence has


# ---- bodies ------------------------------------------------------------------------------------------------


def test_dtypes_stay_and_other_shapes_are_left_out() -> None:
    own = Named({"w": torch.zeros(2, dtype=torch.float16), "n": torch.tensor(3)})
    others = {
        0: Named({"w": torch.tensor([60000.0, 1.0], dtype=torch.float16), "n": torch.tensor(8)}),
        1: Named({"w": torch.zeros(3, dtype=torch.float16), "n": torch.tensor(8)}),
    }
    lie = sent("ipm", others, own, epsilon=3).x
    assert lie["w"].tolist() == [-65504.0, -3.0]
    assert (lie["w"].dtype, lie["n"]) == (torch.float16, 3)
    assert x(sent("ipm", {0: Named({"x": torch.zeros(3)})}, OWN)) == x(OWN)


def test_prototypes_are_attacked_class_by_class() -> None:
    def rows(*classes: int) -> Tensor:
        return torch.tensor([[10.0 * k, 1.0] for k in classes])

    others = {0: Prototypes(rows(1, 3), (1, 3), (5, 5)), 1: Prototypes(rows(3, 4) + 2, (3, 4), (5, 5))}
    lie = sent("ipm", others, Prototypes(torch.ones(3, 2), (1, 2, 3), (5, 6, 7)), epsilon=1)
    assert lie.values.tolist() == [[-10.0, -1.0], [1.0, 1.0], [-31.0, -2.0]]  # nobody else has class 2
    assert (lie.classes, lie.samples) == ((1, 2, 3), (5, 6, 7))
    whole = {
        j: MAPLPrototypes(torch.full((4, 2), 1.0 + j), (j, 3)) for j in range(2)
    }  # rows of all classes, some count
    lie = sent("ipm", whole, MAPLPrototypes(torch.zeros(4, 2), (0, 2, 3)), epsilon=1)
    assert lie.values[:, 0].tolist() == [-1.0, 0.0, 0.0, -1.5]


def test_bodies_whose_shapes_differ_between_peers_are_refused() -> None:
    alie, free = ADVERSARIES["alie"].parse({}), {"left": {1: None}}
    factors = Factors({}, 1, {"w": torch.ones(3, 2)}, {})
    assert not alie.changes(Layout.of(factors, free=free))
    assert alie.changes(Layout.of(Prototypes(torch.ones(3, 2), (0, 1, 2), ()), free={"values": {0: 9}}))


# ---- when they send ----------------------------------------------------------------------------------------


def rushing(peers: int, attackers: Sequence[int], *attacks: dict[str, Any]) -> list[Endpoint]:
    """Return the endpoints of a complete graph in round 0; default attack: ipm."""
    hub, endpoints = LocalHub(), []
    for me in range(peers):
        attacker = Attacker(place := Neighborhood(me, complete(peers)), frozenset(attackers))
        chain = Chain([Attacking(parsed(each), attacker, Streams(0, me)) for each in attacks or [{"name": "ipm"}]])
        pipeline = chain if me in attackers else None
        endpoints.append(Endpoint(place, RUN_ID, Conversation(LAYOUTS), pipeline=pipeline))
        hub.join(endpoints[-1])
    for endpoint in endpoints:
        endpoint.open(0)
        endpoint.begin(0)
    return endpoints


def parsed(entry: dict[str, Any]) -> Adversary:
    return ADVERSARIES[entry["name"]].parse({key: value for key, value in entry.items() if key != "name"})


def exchange(endpoint: Endpoint, among: Sequence[int] | None = None) -> Any:
    me = float(endpoint.me)
    return Net(endpoint, endpoint.t, SEED).exchange(vector(me, 10 * me, 1), among=among)


async def test_attackers_wait_for_honest_peers_and_not_for_each_other() -> None:
    endpoints = rushing(4, attackers=[0, 3])
    first = [asyncio.create_task(exchange(endpoints[j])) for j in (0, 3)]
    for _ in range(10):
        await asyncio.sleep(0)
    assert all(endpoints[j].sent == {} for j in (0, 3))
    assert endpoints[0].mailbox.waits_for == [(0, "Vector", 1), (0, "Vector", 2)]
    results = await asyncio.gather(*first, *(exchange(endpoints[j]) for j in (1, 2)))
    for found in results:
        assert all(x(found[j]) == [-0.75, -7.5, -0.5] for j in {0, 3} & found.keys())
    assert [sorted(found) for found in results] == [[1, 2, 3], [0, 1, 2], [0, 2, 3], [0, 1, 3]]
    assert all(endpoint.mailbox.unread == 0 and not endpoint.missing for endpoint in endpoints)


async def test_each_message_of_an_equivocating_attacker_is_made_of_what_it_has_seen() -> None:
    equivocate = {"name": "equivocate", "attacks": ["none", "sign-flip"]}
    endpoints = rushing(3, [0], equivocate, {"name": "ipm"})
    found = await asyncio.gather(*map(exchange, endpoints))
    assert x(found[1][0]) == x(found[2][0]) == [-0.75, -7.5, -0.5]
    await Net(endpoints[0], 0, SEED).send(1, OWN)  # what was seen is gone: the first attack alone
    assert x((await Net(endpoints[1], 0, SEED).gather(Vector, of=[0]))[0]) == [-9.0, -9.0, -9.0]


async def test_attackers_wait_only_for_peers_that_take_part_and_are_there() -> None:
    endpoints = rushing(4, attackers=[0])
    endpoints[0].mailbox.mark_disconnected(3)
    found, _ = await asyncio.gather(exchange(endpoints[0], [0, 1, 3]), exchange(endpoints[1], [0, 1]))
    assert {j: x(body) for j, body in found.items()} == {1: [1.0, 10.0, 1.0]}
    assert endpoints[0].sent.keys() == {1, 2, 3}
    lie = await Net(endpoints[2], 0, SEED).gather(Vector, of=[0])
    assert x(lie[0]) == [-0.5, -5.0, -0.5]


async def test_a_message_to_some_and_a_partial_sum_are_sent_at_once() -> None:
    endpoints = rushing(2, attackers=[0])
    await Net(endpoints[0], 0, SEED).send(1, OWN)
    assert {j: x(body) for j, body in (await Net(endpoints[1], 0, SEED).gather(Vector)).items()} == {0: x(OWN)}
    sums = await asyncio.gather(*(Net(endpoint, 0, SEED).allreduce(OWN) for endpoint in endpoints))
    assert [x(body) for body in sums] == [[9.0, 9.0, 9.0]] * 2
