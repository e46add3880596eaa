"""Net and Endpoint in one process, which finds deadlocks. What every link must do is in tests/sockets/test_net.py."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from p2pfl.errors import Deadlock, NetError, NotANeighbor, Unexpected
from p2pfl.messaging.control import Id
from p2pfl.messaging.endpoint import Endpoint
from p2pfl.messaging.net import MEMOIZED
from p2pfl.messaging.schema import Layout
from p2pfl.messaging.topology import Rounds, Topology, WeightedTopology
from tests.bodies import LAYOUTS, PAIR, Vector, Word, complete, line, round_of, star, texts, vector
from tests.mesh_fixtures import run_all


async def test_broadcast_scatter_send_and_gather_reach_the_neighbors_that_they_name(local: Any) -> None:
    endpoints = await local.open(line(4), LAYOUTS)
    nets = [round_of(endpoint, 9) for endpoint in endpoints]
    await nets[1].broadcast(Word("to all"))
    await nets[1].scatter({2: Word("to 2"), 0: Word("to 0")})
    await nets[1].send(2, Word("last"))
    assert await nets[2].gather(Word, of=[]) == {}
    assert [texts(await nets[2].gather(Word, of=[1]))[1] for _ in range(3)] == ["to all", "to 2", "last"]
    assert [texts(await nets[0].gather(Word))[1] for _ in range(2)] == ["to all", "to 0"]
    assert sorted(endpoints[1].sent) == [0, 2]
    net = nets[1]
    assert (net.me, net.t, net.peers, net.degrees) == (1, 9, 4, {0: 1, 1: 2, 2: 2})
    assert net.neighbors == net.sources == net.receivers == nets[3].neighbors_of(1, 9) == (0, 2)


async def test_scatter_stores_a_body_that_several_receivers_get_once(
    local: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoints = await local.open(complete(5), LAYOUTS)
    nets = [round_of(endpoint, 0) for endpoint in endpoints]
    appended: list[tuple[int, ...]] = []
    append = endpoints[2].journal.append

    def remember(encoded: Any, to: Any, **options: Any) -> Any:
        appended.append(tuple(to))
        return append(encoded, to, **options)

    monkeypatch.setattr(endpoints[2].journal, "append", remember)
    same, other = vector(1.0, 2.0, 3.0), vector(4.0, 5.0, 6.0)
    await nets[2].scatter({4: same, 1: other, 0: same, 3: same})
    assert appended == [(0, 3, 4), (1,)]
    for receiver, body in {0: same, 1: other, 3: same, 4: same}.items():
        received = await nets[receiver].gather(type(body), of=[2])
        assert received[2].x.tolist() == body.x.tolist()
    assert {to: sum(count for count, *_ in kinds.values()) for to, kinds in endpoints[2].sent.items()} == {
        0: 1,
        1: 1,
        3: 1,
        4: 1,
    }


async def test_exchange_among_some_peers_reaches_every_peer(local: Any) -> None:
    endpoints = await local.open(complete(4), LAYOUTS)
    received = await run_all(endpoints, lambda each: round_of(each, 0).exchange(Word(f"{each.me}"), among=[3, 1]))
    assert [list(bodies) for bodies in received] == [[1, 3], [3], [1, 3], [1]]
    assert [len(endpoint.sent) for endpoint in endpoints] == [0, 3, 0, 3]


@pytest.mark.parametrize("lost", [False, True])
async def test_publish_returns_a_copy_although_the_journal_has_lost_the_body(
    local: Any, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    """All receivers were declared dead meanwhile, or somebody has deleted the file."""

    def missing(place: object, size: int) -> torch.Tensor:
        monkeypatch.undo()  # the link still delivers it
        raise FileNotFoundError

    zero, _ = await local.open(PAIR, LAYOUTS)
    if lost:
        monkeypatch.setattr(zero.journal.store, "map", missing)
    body = vector(1.0, 2.0, 3.0)
    copy = await round_of(zero, 0).publish(body)
    assert copy.x.tolist() == [1.0, 2.0, 3.0]
    copy.x.zero_()
    assert body.x.tolist() == [1.0, 2.0, 3.0]


async def test_broadcast_to_some_receivers_writes_the_body_once(local: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoints = await local.open(complete(4), LAYOUTS)
    append, written = endpoints[0].journal.append, []

    def observed(encoded: Any, to: Any, **rest: Any) -> Any:
        if encoded.kind == "Word":
            written.append(tuple(to))
        return append(encoded, to, **rest)

    monkeypatch.setattr(endpoints[0].journal, "append", observed)
    net = round_of(endpoints[0], 0)
    await net.broadcast(Word("to two"), to=[3, 1, 3])
    await net.broadcast(Word("to none"), to=[])
    assert written == [(1, 3)]
    assert [texts(await round_of(endpoints[j], 0).gather(Word, of=[0])) for j in (1, 3)] == [{0: "to two"}] * 2
    assert sorted(endpoints[0].sent) == [1, 3]


@pytest.mark.parametrize("verb", ["send", "scatter", "broadcast", "gather"])
async def test_peers_that_are_not_neighbors_are_rejected(local: Any, verb: str) -> None:
    endpoints = await local.open(line(3), LAYOUTS)
    net = round_of(endpoints[0], 4)
    calls: dict[str, Callable[[], Awaitable[Any]]] = {
        "send": lambda: net.send(2, Word("")),
        "scatter": lambda: net.scatter({1: Word(""), 2: Word("")}),
        "broadcast": lambda: net.broadcast(Word(""), to=[1, 2]),
        "gather": lambda: net.gather(Word, of=[1, 2]),
    }
    with pytest.raises(NotANeighbor, match=r"peer 0 .* peer 2 in round 4"):
        await calls[verb]()
    assert endpoints[0].sent == {}  # not even to the neighbor in the list


async def test_a_dropped_edge_rejects_messages_on_both_sides(local: Any) -> None:
    zero, one = await local.open(PAIR, LAYOUTS, prunes=True)
    net = round_of(zero, 0)
    net.receive_only_from([])
    assert net.sources == (1,)  # until the round ends
    for endpoint in (zero, one):
        endpoint.finish(0)
    assert round_of(zero, 1).sources == ()
    with pytest.raises(NotANeighbor, match="peer 1 cannot send to peer 0 in round 1: it stopped receiving"):
        await round_of(one, 1).send(0, Word("hello?"))
    with pytest.raises(NotANeighbor, match="peer 0 does not receive from peer 1 in round 1"):
        await round_of(zero, 1).gather(Word, of=[1])
    zero.prunes = False
    with pytest.raises(NetError, match="must declare `prunes = True`"):
        net.receive_only_from([])


ONE_WAY = WeightedTopology.averaging(3, [(0, 1), (1, 2)])
PAIRS = Topology.from_edges(3, [(0, 1)])


def change(endpoint: Endpoint, rounds: Rounds) -> None:
    endpoint.neighborhood = replace(endpoint.neighborhood, rounds=rounds)


def one_way_in_even_rounds(t: int) -> Topology:
    return PAIRS if t % 2 else ONE_WAY


async def test_the_rounds_graph_decides_who_sends_to_whom_and_with_which_weight(local: Any) -> None:
    endpoints = await local.open(line(3), LAYOUTS)
    for endpoint in endpoints:
        change(endpoint, rounds=one_way_in_even_rounds)
    nets = [round_of(endpoint, 0) for endpoint in endpoints]
    assert [net.sources for net in nets] == [(), (0,), (1,)]
    assert [net.receivers for net in nets] == [(1,), (2,), ()]
    assert [net.neighbors for net in nets] == [(1,), (0, 2), (1,)]
    assert [net.mixing_weights for net in nets] == [{}, {0: 0.5}, {1: 0.5}]
    assert [net.neighbors_of(2, t) for net in nets for t in (0, 1)] == [(1,), ()] * 3
    received = await run_all(endpoints, lambda each: round_of(each, 0).exchange(Word(f"{each.me}")))
    assert [texts(bodies) for bodies in received] == [{}, {0: "0"}, {1: "1"}]
    for endpoint in endpoints:
        endpoint.finish(0)
    received = await run_all(endpoints, lambda each: round_of(each, 1).exchange(Word(f"{each.me}")))
    assert [texts(bodies) for bodies in received] == [{1: "1"}, {0: "0"}, {}]
    assert round_of(endpoints[2], 1).mixing_weights == {}


async def test_neighbors_of_other_rounds_are_rejected(local: Any) -> None:
    endpoints = await local.open(line(3), LAYOUTS)
    for endpoint in endpoints:
        change(endpoint, rounds=one_way_in_even_rounds)
    net = round_of(endpoints[1], 0)
    with pytest.raises(NotANeighbor, match="peer 1 cannot send to peer 0 in round 0: not a neighbor"):
        await net.send(0, Word(""))
    with pytest.raises(NotANeighbor, match="peer 1 does not receive from peer 2 in round 0"):
        await net.gather(Word, of=[2])
    with pytest.raises(NotANeighbor, match="peer 0 cannot reply to peer 2: not a neighbor in any round"):
        await round_of(endpoints[0], 0).reply(2, Word(""))
    await net.reply(0, Word("of another round"))
    assert endpoints[1].sent.keys() == {0}
    with pytest.raises(NetError, match="allreduce: edges of this round's graph have one direction only"):
        await net.allreduce(vector(1.0, 2.0, 3.0))


async def test_allreduce_sums_over_the_component_of_the_rounds_graph(local: Any) -> None:
    endpoints = await local.open(line(3), LAYOUTS)
    for endpoint in endpoints:
        change(endpoint, rounds=lambda t: PAIRS)
    sums = await run_all(endpoints, lambda each: round_of(each, 0).allreduce(vector(each.me + 1.0, 0, 0), "sum"))
    assert [float(body.x[0]) for body in sums] == [3.0, 3.0, 3.0]
    assert [len(endpoint.sent) for endpoint in endpoints] == [1, 1, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e5m2])
@pytest.mark.parametrize("topology", [line(6), star(6, hub=5)])
async def test_allreduce_of_narrow_types_rounds_once(local: Any, dtype: torch.dtype, topology: Topology) -> None:
    stream = torch.Generator().manual_seed(0)
    values = [torch.rand(3, generator=stream).to(dtype) for _ in range(6)]
    endpoints = await local.open(topology, [Layout.of(Vector(values[0]))])
    exact = torch.stack([value.double() for value in values]).mean(0)
    means = await run_all(endpoints, lambda each: round_of(each, 0).allreduce(Vector(values[each.me])))
    for body in means:
        assert body.x.dtype is dtype
        assert torch.equal(body.x.float(), exact.float().to(dtype).float())
    # A leaf sends its own tensors, which need no more bits; a sum needs float32.
    sizes = {entry[1] // entry[0] for e in endpoints for kinds in e.sent.values() for entry in kinds.values()}
    assert sizes <= {3 * dtype.itemsize, 12}
    assert len(sizes) == 2


async def test_allreduce_of_equal_narrow_tensors_returns_them(local: Any) -> None:
    x = torch.tensor([0.1, 3.3, 1e-8]).bfloat16()
    endpoints = await local.open(line(7), [Layout.of(Vector(x))])
    means = await run_all(endpoints, lambda each: round_of(each, 0).allreduce(Vector(x)))
    assert all(torch.equal(body.x, x) for body in means)


async def test_allreduce_of_a_peer_alone_returns_its_narrow_tensors(local: Any) -> None:
    endpoints = await local.open(PAIR, [Layout.of(Vector(torch.zeros(3).half()))])
    for endpoint in endpoints:
        change(endpoint, rounds=lambda t: Topology.from_edges(2, []))
    for op in ("mean", "sum"):
        x = torch.tensor([0.1, 2.0, 3.0]).half()
        found = (await round_of(endpoints[0], 0).allreduce(Vector(x), op)).x
        assert torch.equal(found, x)
        assert found is not x


async def test_shared_draws_the_same_on_every_peer_and_anew_each_round(local: Any) -> None:
    endpoints = await local.open(complete(3), LAYOUTS)
    drawn = np.array([[round_of(endpoint, t).shared.random() for t in range(4)] for endpoint in endpoints])
    assert (drawn == drawn[0]).all()
    assert len(set(drawn[0])) == 4


@pytest.mark.exhaustive
@pytest.mark.parametrize("last", ["silent", "not finite"])
async def test_allreduce_omits_a_peer_without_a_usable_body(local: Any, last: str) -> None:
    endpoints = await local.open(line(4), LAYOUTS, deadline=1.0)
    if last == "silent":
        endpoints.pop()
    outcomes = await run_all(
        endpoints, lambda each: round_of(each, 0).allreduce(vector(each.me, 0, math.nan if each.me == 3 else 0.0))
    )
    assert [outcome.x.tolist() for outcome in outcomes] == [[1, 0, 0]] * len(endpoints)
    assert endpoints[2].missing == {"Vector": [3]}


@pytest.mark.exhaustive
async def test_a_message_that_is_too_late_for_its_allreduce_is_not_taken_for_the_next_ones(local: Any) -> None:
    endpoints = await local.open(PAIR, LAYOUTS, deadline=0.2)
    first, other = (round_of(endpoint, 0) for endpoint in endpoints)
    alone = await first.allreduce(vector(1.0, 0, 0), "sum")
    assert alone.x.tolist() == [1, 0, 0]
    late, following = await other.allreduce(vector(2.0, 0, 0), "sum"), vector(20.0, 0, 0)
    assert late.x.tolist() == [1, 0, 0]
    sums = await asyncio.gather(first.allreduce(vector(10.0, 0, 0), "sum"), other.allreduce(following, "sum"))
    assert [body.x.tolist() for body in sums] == [[30, 0, 0]] * 2
    assert endpoints[0].mailbox.expired == 1
    assert endpoints[0].missing == {"Vector": [1]}


async def test_allreduce_rejects_a_body_with_plain_fields(local: Any) -> None:
    endpoints = await local.open(PAIR, LAYOUTS)
    with pytest.raises(NetError, match="Word must hold tensors only"):
        await round_of(endpoints[0], 0).allreduce(Word("text"))


async def test_a_failure_ends_waits_now_and_later(local: Any) -> None:
    net = round_of((await local.open(PAIR, LAYOUTS))[0], 0)
    waiting = asyncio.create_task(net.gather(Word))
    await asyncio.sleep(0)
    local.endpoints[0].mailbox.fail(RuntimeError("the mesh is broken"))
    for wait in (waiting, net.gather(Word)):
        with pytest.raises(RuntimeError, match="broken"):
            await wait


async def test_a_deadlock_error_names_the_waiting_peers_and_what_to_look_for(local: Any) -> None:
    endpoints = await local.open(complete(3), LAYOUTS)
    waiting = asyncio.gather(
        *(round_of(e, 3).gather(Word, of=[1 - e.me]) for e in endpoints[:2]), return_exceptions=True
    )
    for _ in range(2):
        await asyncio.sleep(0)
    assert not waiting.done()  # peer 2 may still send
    local.hub.finish(2)
    for outcome in await waiting:
        assert isinstance(outcome, Deadlock)
        assert str(outcome) == (
            "deadlock: peer 0 waits for Word of peer 1 in round 3; peer 1 waits for Word of peer 0 in round 3. All "
            "peers wait for messages that nobody has sent: look for a net.broadcast or net.send without `await`, or "
            "for peers that send different kinds"
        )


async def test_no_deadlock_is_reported_while_a_peer_can_continue(local: Any) -> None:
    async def relay(endpoint: Endpoint) -> str:
        net = round_of(endpoint, 0)
        text = "start" if net.me == 0 else texts(await net.gather(Word, of=[net.me - 1]))[net.me - 1]
        if net.me < 3:
            await net.send(net.me + 1, Word(f"{text} {net.me}"))
        return text

    outcomes = await asyncio.gather(*map(relay, reversed(await local.open(line(4), LAYOUTS))))
    assert outcomes == ["start 0 1 2", "start 0 1", "start 0", "start"]


async def test_no_deadlock_is_reported_while_a_task_begins_or_another_has_just_ended(local: Any) -> None:
    first, second, third = (round_of(endpoint, 0) for endpoint in await local.open(complete(3), LAYOUTS))

    async def answer() -> None:
        waits = asyncio.gather(first.gather(Word, of=[1]), first.broadcast(Word("begun")))
        other = asyncio.create_task(first.gather(Word, of=[2]))
        await waits
        await first.send(2, Word("answer"))
        await other

    async def relay() -> None:
        await third.gather(Word, of=[0])
        await third.gather(Word, of=[0])
        await third.broadcast(Word("end"))

    async def start() -> None:
        await second.gather(Word, of=[0])
        await second.send(0, Word("start"))
        await second.gather(Word, of=[2])

    async with asyncio.timeout(10):
        await asyncio.gather(relay(), start(), answer())


async def test_the_senders_that_several_tasks_wait_for_are_known_until_each_wait_ends(local: Any) -> None:
    net, *others = (round_of(endpoint, 0) for endpoint in await local.open(complete(3), LAYOUTS))
    mailbox = local.hub.endpoints[0].mailbox
    tasks = [asyncio.create_task(net.gather(Word, of=[sender])) for sender in (1, 2)]
    for other, left in zip(others, [{2}, set()], strict=True):
        await asyncio.sleep(0)
        assert mailbox.awaited == left | {other.me}
        await other.send(0, Word("arrived"))
        await tasks.pop(0)
        assert mailbox.awaited == left


@pytest.mark.parametrize("answers", [True, False])
async def test_of_a_peer_with_several_tasks_a_deadlock_is_reported_only_when_none_can_continue(
    local: Any, answers: bool
) -> None:
    first, second, third = (round_of(endpoint, 0) for endpoint in await local.open(complete(3), LAYOUTS))

    async def answer() -> None:
        await first.gather(Word, of=[1])
        if answers:
            await first.send(2, Word("answer"))

    async def end() -> None:
        await third.gather(Word, of=[0])
        await third.broadcast(Word("end"))

    async def start() -> None:
        await second.send(0, Word("start"))
        await second.gather(Word, of=[2])

    waits = asyncio.gather(answer(), first.gather(Word, of=[2]), end(), start(), return_exceptions=True)
    async with asyncio.timeout(10):
        outcomes = await waits
    deadlocked = [isinstance(outcome, Deadlock) for outcome in outcomes]
    assert deadlocked == [False, *[not answers] * 3]


async def test_in_one_process_bodies_are_checked_copied_and_not_kept(local: Any) -> None:
    endpoints = await local.open(complete(3), LAYOUTS)
    body = vector(1, 2, 3)
    await round_of(endpoints[0], 0).broadcast(body)
    first, second = [(await each.take("Vector", [0], 0))[0].body for each in endpoints[1:]]
    first.x.zero_()
    assert torch.equal(second.x, body.x)
    assert endpoints[0].journal.after(1, Id(0, 0)) is None
    with pytest.raises(Unexpected, match=r"x must be float32\[3\], got float32\[4\]"):
        await round_of(endpoints[0], 0).broadcast(vector(1, 2, 3, 4))


async def test_memoized_work_is_done_once_by_the_peers_of_a_process_with_equal_inputs(local: Any) -> None:
    endpoints = await local.open(complete(3), LAYOUTS)
    done: list[int] = []

    def result_of(endpoint: Endpoint, inputs: list[float], t: int = 0, name: str = "sum") -> float:
        def compute() -> dict[str, torch.Tensor]:
            done.append(endpoint.me)
            return {"sum": torch.tensor(inputs).sum()}

        net = round_of(endpoint, t)
        return float(net.memoized(name, {"inputs": torch.tensor(inputs), "name": name}, compute)["sum"])

    zero, one, two = endpoints
    assert [result_of(each, [1.0, 2.0]) for each in endpoints] == [3.0, 3.0, 3.0]
    assert done == [0]
    assert [result_of(each, inputs) for each, inputs in ((one, [2.0, 1.0]), (two, [1.0, 2.0]))] == [3.0, 3.0]
    assert done == [0, 1]
    assert result_of(two, [1.0, 2.0], t=1) == result_of(zero, [1.0, 2.0], name="other") == 3.0
    assert done == [0, 1, 2, 0]
    for number in range(MEMOIZED):
        result_of(one, [float(number)])
    assert result_of(two, [1.0, 2.0]) == 3.0  # the oldest results are forgotten
    assert done[-1] == 2
    assert zero.memo is not None
    assert len(zero.memo) == MEMOIZED


async def test_a_peer_in_its_own_process_computes_what_others_might_have(local: Any) -> None:
    zero, _ = await local.open(PAIR, LAYOUTS)
    zero.memo = None
    results = [round_of(zero, 0).memoized("x", {}, lambda: {"x": torch.ones(1)}) for _ in range(2)]
    assert results[0]["x"] is not results[1]["x"]
