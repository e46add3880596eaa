"""What ZmqLink does besides what tests/p2pfl/test_net.py asks of every link: finding, greeting, losing and
closing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import random
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Literal

import msgpack
import psutil
import pytest
import torch
import zmq

from p2pfl import wire
from p2pfl.errors import HandshakeError, NetError, RunFolderError
from p2pfl.net import SEQUENCES
from p2pfl.topology import Topology
from p2pfl.wire import Body, Layout, Vocabulary
from peers import resolver, zmqlink
from peers.runtime import allow_many_sockets
from peers.zmqlink import Close, Closed, Durable, Hello, Hold, Refused, Welcome, ZmqLink, _Edge
from tests.bodies import PAIR, RUN_ID, Block, Word

BLOCK = Block(torch.zeros(1000, 1000))
LAYOUTS = [Layout.of(Word("")), Layout.of(BLOCK)]
CONTROL = Vocabulary(
    [
        Layout.of(body)
        for body in (Hello("", 0, 0, 0, 0, 0), Welcome(0, -1), Durable(0), Refused(""), Close(), Closed(), Word(""))
    ]
)


def complete(peers: int) -> Topology:
    return Topology.from_edges(peers, [(i, j) for i in range(peers) for j in range(i)])


def in_error(error: BaseException) -> list[BaseException]:
    return list(error.exceptions) if isinstance(error, BaseExceptionGroup) else [error]


async def die(link: ZmqLink) -> None:
    """End as kill -9 would end it: the sockets are gone, and nothing was said."""

    def fall_over() -> None:
        raise ConnectionAbortedError("killed by the test")

    link._command(fall_over)
    await asyncio.to_thread(link.world.thread.join)


class RawPeer:
    """A neighbour made of bare sockets, which says only what a test has it say."""

    def __init__(self, me: int, addresses: Path) -> None:
        self.me = me
        self.context = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.dealer = self.context.socket(zmq.DEALER)
        for end in (self.router, self.dealer):
            end.set(zmq.RCVTIMEO, 100_000)
            end.set(zmq.LINGER, 0)
        self.router.bind("tcp://127.0.0.1:*")
        self.address = self.router.get_string(zmq.LAST_ENDPOINT)
        (addresses / f"{me:02d}").write_text(self.address)

    def connect(self, link: ZmqLink, identity: str | None = None) -> None:
        self.dealer.set(zmq.IDENTITY, (identity or f"{self.me}>{link.me}").encode())
        self.dealer.connect(link.address)

    def frames(self, body: Body, run: str = RUN_ID, seq: int = 0, t: int = 0) -> list[Any]:
        return wire.encode(body).to(run, t, self.me, seq)

    def say(self, body: Body, **header: Any) -> None:
        self.dealer.send_multipart(self.frames(body, **header))

    async def answer(self) -> Body:
        """To what we said."""
        frames = await asyncio.to_thread(self.dealer.recv_multipart)
        return wire.decode(frames, None, CONTROL).body

    async def heard(self) -> tuple[bytes, wire.Message]:
        """What the other side says on its own connection."""
        identity, *frames = await asyncio.to_thread(self.router.recv_multipart)
        return identity, wire.decode(frames, None, CONTROL)

    async def welcome(self) -> None:
        identity, message = await self.heard()
        assert isinstance(message.body, Hello)
        self.reply(identity, Welcome(0, -1), seq=message.seq)

    def reply(self, identity: bytes, body: Body, **header: Any) -> None:
        self.router.send_multipart([identity, *self.frames(body, **header)])

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def raw(tmp_path: Path) -> Iterator[Any]:
    made: list[RawPeer] = []

    def make(me: int) -> RawPeer:
        made.append(RawPeer(me, tmp_path))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(autouse=True)
def _closing_takes_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits that long though it need not is stopped by pytest."""
    monkeypatch.setattr(zmqlink, "CLOSING", 1000.0)


@pytest.fixture
async def alone(sockets: Any) -> AsyncIterator[Any]:
    """Peer 0 of two, whose neighbour is not up."""
    endpoint = sockets.endpoint(0, PAIR, LAYOUTS)
    await sockets.link(endpoint).start()
    return endpoint


# ---- finding one another


async def test_peers_may_start_in_any_order(sockets: Any) -> None:
    endpoints = [sockets.endpoint(me, complete(5), LAYOUTS) for me in range(5)]
    links = [sockets.link(endpoint) for endpoint in endpoints]
    tasks = []
    for me in random.sample(range(5), 5):
        await links[me].start()
        tasks.append(asyncio.create_task(endpoints[me].begin(0).exchange(Word(f"from {me}"))))
        await asyncio.sleep(random.choice([0, 0.03]))
    for task in tasks:
        assert len(await task) == 4


async def test_what_was_said_before_the_neighbor_came_up_arrives(sockets: Any, alone: Any, eventually: Any) -> None:
    net = alone.begin(0)
    for number in range(10):
        await net.broadcast(Word(str(number)))
    await eventually(lambda: alone.link._next_look > 0)
    late = sockets.endpoint(1, PAIR, LAYOUTS)
    await sockets.link(late).start()
    there = late.begin(0)
    assert [(await there.gather(Word))[0].text for _ in range(10)] == list(map(str, range(10)))


async def test_an_address_that_appears_within_one_tick_of_the_file_systems_clock_is_seen(
    sockets: Any, alone: Any, eventually: Any, tmp_path: Path
) -> None:
    await eventually(lambda: alone.link._next_look > 0)
    before = tmp_path.stat()
    late = sockets.endpoint(1, PAIR, LAYOUTS)
    await sockets.link(late).start()
    os.utime(tmp_path, ns=(before.st_atime_ns, before.st_mtime_ns))
    await late.begin(0).broadcast(Word("here I am"))
    assert await alone.begin(0).gather(Word) == {1: Word("here I am")}
    await alone.begin(0).broadcast(Word("so I see"))
    assert await late.begin(0).gather(Word) == {0: Word("so I see")}


@pytest.mark.parametrize("years", [-30, 0, 30])
async def test_what_the_file_systems_clock_says_does_not_matter(
    years: int, sockets: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    link = sockets.link(sockets.endpoint(0, PAIR, LAYOUTS))  # not started: its thread would look too
    sockets.links.remove(link)
    world, now = link.world, 1000.0
    monkeypatch.setattr(world, "now", lambda: now)
    stamp = time.time() + years * 365 * 86400

    def look() -> int:
        os.utime(tmp_path, (stamp, stamp))  # what any change of the folder would set it to
        return int(world.published())

    assert look() == 0
    now += 1.9
    assert look() == 0
    now += 0.2
    settled = look()
    assert settled > 0
    now += 100
    assert look() == settled
    stamp -= 5  # the clock is set back, and the folder changes
    assert look() == 0
    now += 2.1
    assert look() not in (0, settled)


async def test_thirty_peers_of_a_complete_graph_come_up_in_seconds(sockets: Any) -> None:
    allow_many_sockets()
    endpoints = await sockets.open(complete(30), LAYOUTS, jitter=0.0)
    heard = await asyncio.gather(*(endpoint.begin(0).exchange(Word("hello")) for endpoint in endpoints))
    assert [len(one) for one in heard] == [29] * 30


async def test_an_address_that_belongs_to_another_peer_by_now_is_not_mistaken(
    sockets: Any, tmp_path: Path, eventually: Any
) -> None:
    """After a restart of all, the old port of peer 1 may be the new one of peer 2."""
    topology = complete(3)
    endpoints = [sockets.endpoint(me, topology, LAYOUTS) for me in range(3)]
    links = [sockets.link(endpoint) for endpoint in endpoints]
    await links[2].start()
    (tmp_path / "01").write_text(links[2].address)
    await links[0].start()
    nets = [endpoint.begin(0) for endpoint in endpoints]
    await nets[0].broadcast(Word("from 0"))
    assert await nets[2].gather(Word, of=[0]) == {0: Word("from 0")}
    await links[1].start()
    assert await nets[1].gather(Word, of=[0]) == {0: Word("from 0")}
    await nets[0].send(2, Word("once more"))
    assert await nets[2].gather(Word, of=[0]) == {0: Word("once more")}


async def test_the_address_is_removed_at_the_end(sockets: Any, alone: Any, tmp_path: Path) -> None:
    assert (tmp_path / "00").read_text() == alone.link.address
    await sockets.close()
    assert not (tmp_path / "00").exists()


async def test_an_address_that_cannot_be_bound(sockets: Any) -> None:
    endpoint = sockets.endpoint(0, PAIR, LAYOUTS)
    with pytest.raises(RunFolderError, match=r"tcp://203\.0\.113\.1:\* cannot be bound"):
        await sockets.link(endpoint, host="203.0.113.1").start()
    sockets.links.clear()


async def test_addresses_may_be_names_and_names_may_have_several_numbers(
    sockets: Any, monkeypatch: Any, eventually: Any
) -> None:
    monkeypatch.setattr(resolver, "EACH", 0.3)
    monkeypatch.setattr(zmqlink, "STALE", 0.1)
    monkeypatch.setattr(resolver, "look_up_host", lambda host, port: {"alpha": ["192.0.2.1", "127.0.0.1"]}[host])
    here, there = await sockets.open(PAIR, LAYOUTS, address="tcp://alpha:{port}")
    assert here.link.address == here.link.bound.replace("127.0.0.1", "alpha")
    heard = await asyncio.gather(*(endpoint.begin(0).exchange(Word("by name")) for endpoint in (here, there)))
    assert heard == [{1: Word("by name")}, {0: Word("by name")}]


@pytest.mark.skipif(not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists(), reason="no IPv6 here")
@pytest.mark.parametrize("host", ["::1", "[::1]"])
async def test_addresses_may_be_those_of_ipv6(encrypted: Any, host: str) -> None:
    here, there = await encrypted.open(PAIR, LAYOUTS, host=host)
    assert here.link.address.startswith("tcp://[::1]:")
    heard = await asyncio.gather(*(endpoint.begin(0).exchange(Word("six")) for endpoint in (here, there)))
    assert heard == [{1: Word("six")}, {0: Word("six")}]


# ---- greeting


@pytest.mark.parametrize("together", [True, False])
async def test_peers_of_different_run_files_name_each_other(
    sockets: Any, together: bool, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmqlink, "EXPLAINING", 1000.0)  # until both have failed, be it late
    endpoints = [sockets.endpoint(me, PAIR, LAYOUTS, deadline=1000) for me in range(2)]

    async def one(me: int) -> None:
        endpoint = endpoints[me]
        link = sockets.link(endpoint, digest=f"{me}" * 64, deadline=1000)
        await link.start()
        try:
            await endpoint.begin(0).gather(Word)
        finally:
            await sockets.shut(link)

    tasks = [asyncio.create_task(one(0))]
    if not together:
        await eventually(lambda: sockets.links and sockets.links[0]._next_look > 0)
    tasks.append(asyncio.create_task(one(1)))
    await eventually(lambda: all(endpoint.failure for endpoint in endpoints))
    monkeypatch.setattr(zmqlink, "EXPLAINING", 0.0)
    first, second = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(first, HandshakeError)
    assert isinstance(second, HandshakeError)
    assert "refuses peer 0: run file differs: digest 000000000000…, here 111111111111…" in str(first)
    assert "peer 0 at tcp://127.0.0.1:" in str(second)


async def test_another_run_is_refused(alone: Any, raw: Any) -> None:
    other = raw(1)
    other.connect(alone.link)
    other.say(Hello("d", 0, 0, 0, 0, 0), run="another run")
    refused = await other.answer()
    assert isinstance(refused, Refused)
    assert refused.reason == f"a message of run 'another run'; this is run '{RUN_ID}'"
    other.say(Hello("d", 0, 0, 0, 0, 0))
    assert isinstance(await other.answer(), Welcome)  # that one is nobody's fault


async def test_another_protocol_version_is_refused(alone: Any, raw: Any) -> None:
    other = raw(1)
    other.connect(alone.link)
    other.dealer.send(msgpack.packb([1, "whatever", "version 1 says"]))
    refused = await other.answer()
    assert isinstance(refused, Refused)
    assert refused.reason == "protocol version 1; this peer speaks 2"


async def test_a_refusal_ends_all_waits(alone: Any, raw: Any) -> None:
    other = raw(1)
    waiting = asyncio.create_task(alone.begin(0).gather(Word))
    identity, message = await other.heard()
    assert isinstance(message.body, Hello)
    other.reply(identity, Refused("I do not like you"), seq=message.seq)
    with pytest.raises(HandshakeError, match=r"peer 1 at tcp://\S+ refuses peer 0: I do not like you"):
        await waiting


@pytest.mark.parametrize("settled", [False, True])
async def test_who_listens_for_another_run_has_got_the_port_of_a_neighbor_or_its_settled_place(
    sockets: Any, raw: Any, settled: bool, caplog: Any, eventually: Any
) -> None:
    stranger = raw(1)
    endpoint = sockets.endpoint(0, PAIR, LAYOUTS)
    await sockets.link(endpoint, hosts={"1": stranger.address} if settled else {}).start()
    waiting = asyncio.create_task(endpoint.begin(0).gather(Word))
    identity, message = await stranger.heard()
    stranger.reply(identity, Refused("this is another run"), seq=message.seq, run="another run")
    if settled:
        with pytest.raises(HandshakeError, match=r"peer 1 at tcp://\S+ refuses peer 0: this is another run"):
            await waiting
        return
    await eventually(lambda: "peer 1 is no longer at" in caplog.text)
    stranger.close()
    neighbor = raw(1)  # it comes up, and writes down where
    await neighbor.welcome()
    await eventually(lambda: endpoint.link._edges[1].up)
    assert endpoint.failure is None
    waiting.cancel()


async def test_an_answer_of_another_protocol_version_is_a_refusal(alone: Any, raw: Any) -> None:
    other = raw(1)
    waiting = asyncio.create_task(alone.begin(0).gather(Word))
    identity, _ = await other.heard()
    other.router.send_multipart([identity, msgpack.packb([7])])
    with pytest.raises(HandshakeError, match=r"peer 1 .* refuses peer 0: protocol version 7; this peer speaks 2"):
        await waiting


async def test_a_refusal_ends_a_send_that_waits_for_room(sockets: Any, raw: Any) -> None:
    endpoint = sockets.endpoint(0, PAIR, LAYOUTS)
    await sockets.link(endpoint, queue=2).start()
    other = raw(1)
    net = endpoint.begin(0)
    for _ in range(2):
        await net.broadcast(Word("…"))
    sending = asyncio.create_task(net.broadcast(Word("no room")))
    identity, message = await other.heard()
    other.reply(identity, Refused("no"), seq=message.seq)
    with pytest.raises(HandshakeError):
        await sending


async def test_nothing_but_hello_is_said_before_welcome(alone: Any, raw: Any) -> None:
    other = raw(1)
    await alone.begin(0).broadcast(Word("after WELCOME"))
    identity, message = await other.heard()
    assert isinstance(message.body, Hello)
    assert identity == b"0>1"
    other.reply(identity, Welcome(0, -1), seq=message.seq + 1)  # to a HELLO that is not the one
    assert not await asyncio.to_thread(other.router.poll, 300)
    other.reply(identity, Welcome(0, -1), seq=message.seq)
    assert (await other.heard())[1].body == Word("after WELCOME")


# ---- what others may send


@pytest.mark.parametrize("identity", ["2>0", "1>3", "x", "1", "01>0", "0>1"])
async def test_strangers_are_not_heard(sockets: Any, raw: Any, identity: str, caplog: Any, eventually: Any) -> None:
    endpoint = sockets.endpoint(0, Topology.from_edges(3, [(0, 1), (1, 2)]), LAYOUTS)
    await sockets.link(endpoint).start()
    stranger, neighbor = raw(2), raw(1)
    stranger.connect(endpoint.link, identity)
    stranger.say(Word("let me in"))
    await eventually(lambda: f"dropped a message of a stranger: {identity.encode()!r}" in caplog.text)
    neighbor.connect(endpoint.link)
    neighbor.say(Word("it is me"))
    assert await endpoint.begin(0).gather(Word) == {1: Word("it is me")}
    assert endpoint.refused == {}


async def test_garbage_is_dropped_and_counted_and_the_peer_lives_on(
    alone: Any, raw: Any, caplog: Any, eventually: Any
) -> None:
    other = raw(1)
    other.connect(alone.link)
    good = other.frames(Word("good"))
    header = msgpack.unpackb(good[0])
    garbage: list[list[Any]] = [
        [b""],
        [b"\xc1garbage", b"more"],
        [os.urandom(100)],
        [msgpack.packb(7)],
        [msgpack.packb([])],
        [*good, b"a frame too many"],
        [msgpack.packb([*header[:4], 5, *header[5:]])],  # sender 5 over the link from peer 1
        other.frames(Refused("not a thing to say here")),
        wire.encode(Block(torch.zeros(2))).to(RUN_ID, 0, 1, 0),
        [msgpack.packb([*header[:3], -1, *header[4:]])],
    ]
    for frames in garbage:
        other.dealer.send_multipart(frames)
    other.dealer.send_multipart(good)
    assert await alone.begin(0).gather(Word) == {1: Word("good")}
    await eventually(lambda: alone.refused == {1: len(garbage)})
    assert caplog.text.count("dropped a message of peer 1") == len(garbage)
    assert alone.failure is None


async def test_a_tensor_larger_than_the_limit_is_the_senders_error(sockets: Any) -> None:
    endpoints = await sockets.open(PAIR, LAYOUTS, max_message=1000)
    with pytest.raises(NetError, match=r"4000000 bytes in one tensor; transport\.max_message is 1000"):
        await endpoints[0].begin(0).broadcast(BLOCK)


async def test_a_peer_in_the_middle_of_an_epoch_answers(alone: Any, raw: Any) -> None:
    other = raw(1)
    other.connect(alone.link)
    other.say(Hello("d", 0, 0, 0, 0, 0))
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(other.dealer.recv_multipart()))
    thread.start()
    thread.join(100)  # our event loop does not turn meanwhile
    assert isinstance(wire.decode(answers[0], None, CONTROL).body, Welcome)


async def test_nothing_is_lost_when_more_comes_during_an_epoch_than_may_wait(sockets: Any, raw: Any) -> None:
    endpoint = sockets.endpoint(0, complete(3), LAYOUTS)
    await sockets.link(endpoint, queue=4).start()
    one, two = raw(1), raw(2)
    for other in (one, two):
        other.connect(endpoint.link)
    for number in range(100):
        one.say(Word(str(number)), seq=number)
    one.say(Hello("d", 0, 0, 0, 0, 0))  # its answer would tell that all has been read
    assert not one.dealer.poll(500)  # our event loop does not turn meanwhile
    two.say(Word("me too"))
    net = endpoint.begin(0)
    assert await net.gather(Word, of=[2]) == {2: Word("me too")}
    assert [(await net.gather(Word, of=[1]))[1].text for _ in range(100)] == list(map(str, range(100)))
    assert isinstance(await one.answer(), Welcome)
    assert endpoint.refused == {}


# ---- losing one another


async def test_waits_for_a_neighbor_that_was_killed_end_and_the_others_go_on(sockets: Any, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    endpoints = await sockets.open(complete(4), LAYOUTS, give_up=0.5)

    async def play(endpoint: Any, first: int, last: int) -> list[int]:
        heard = []
        for t in range(first, last):
            heard.append(len(await endpoint.begin(t).exchange(Word("…"))))
            await endpoint.finish(t)
        return heard

    assert await asyncio.gather(*(play(endpoint, 0, 2) for endpoint in endpoints)) == [[3, 3]] * 4
    await die(endpoints[3].link)
    assert await asyncio.gather(*(play(endpoint, 2, 12) for endpoint in endpoints[:3])) == [[2] * 10] * 3
    assert caplog.text.count("peer 3 is gone: lost for 0.5 s") == 3  # each gives it up once, not in every round
    assert endpoints[0].missing == {"Word": [3]}


async def test_a_neighbor_that_restarts_elsewhere_is_found_and_heard(sockets: Any, eventually: Any) -> None:
    here, there = await sockets.open(PAIR, LAYOUTS, give_up=0.2)
    for t in range(2):
        await asyncio.gather(*(endpoint.begin(t).exchange(Word(f"{t}")) for endpoint in (here, there)))
    link = there.link
    for t in range(2, 4):
        await die(link)
        await eventually(lambda: 1 in here.mailbox._gone)
        there = again = sockets.revived(there)
        link = sockets.link(again)
        await link.start()
        net = here.begin(t)
        await again.begin(t).broadcast(Word("back"))
        await eventually(lambda: 1 not in here.mailbox._gone)
        await net.broadcast(Word("welcome back"))
        assert await net.gather(Word) == {1: Word("back")}
        assert await again.begin(t).gather(Word) == {0: Word("welcome back")}


async def test_a_neighbor_that_restarts_before_it_was_missed_takes_its_place(sockets: Any, eventually: Any) -> None:
    here, there = await sockets.open(PAIR, LAYOUTS)
    await asyncio.gather(*(endpoint.begin(0).exchange(Word("…")) for endpoint in (here, there)))
    await die(there.link)
    waiting = asyncio.create_task(here.begin(1).gather(Word))
    await eventually(lambda: not here.link._edges[1].up)
    again = sockets.revived(there)
    await sockets.link(again).start()
    await again.begin(1).broadcast(Word("back"))
    assert await waiting == {1: Word("back")}
    await here.begin(1).broadcast(Word("hello again"))
    assert await again.begin(1).gather(Word) == {0: Word("hello again")}


async def test_a_peer_that_stood_still_itself_gives_up_nobody_for_it(
    sockets: Any, eventually: Any, monkeypatch: Any
) -> None:
    here, there = await sockets.open(PAIR, LAYOUTS)
    await asyncio.gather(*(endpoint.begin(0).exchange(Word("…")) for endpoint in (here, there)))
    await die(there.link)
    waiting = asyncio.create_task(here.begin(1).gather(Word))
    await eventually(lambda: not here.link._edges[1].up)
    monkeypatch.setattr(here.link.world, "now", lambda: time.monotonic() + 1000)
    await eventually(lambda: here.link._stood_still > 999)
    assert not here.link._edges[1].given_up
    again = sockets.revived(there)
    await sockets.link(again).start()
    await again.begin(1).broadcast(Word("back"))
    assert await waiting == {1: Word("back")}


async def test_who_gets_the_port_of_a_neighbor_that_died_does_no_harm(
    sockets: Any, raw: Any, caplog: Any, eventually: Any
) -> None:
    endpoint = sockets.endpoint(0, PAIR, LAYOUTS)
    await sockets.link(endpoint, give_up=0.5).start()
    neighbor = raw(1)
    waiting = asyncio.create_task(endpoint.begin(0).gather(Word))
    await neighbor.welcome()
    neighbor.close()
    other = zmq.Context()
    router = other.socket(zmq.ROUTER)
    router.set(zmq.RCVTIMEO, 100_000)
    try:
        while True:
            with contextlib.suppress(zmq.ZMQError):
                router.bind(neighbor.address)
                break
        identity, *_ = await asyncio.to_thread(router.recv_multipart)
        router.send_multipart([identity, *wire.encode(Refused("wrong run")).to("another", 0, 1, 0)])
        assert await waiting == {}
        await eventually(lambda: "peer 1 is no longer at" in caplog.text)
    finally:
        other.destroy(linger=0)
    assert endpoint.failure is None


async def test_a_neighbor_is_found_again_where_somebody_else_was_meanwhile(
    sockets: Any, raw: Any, caplog: Any
) -> None:
    endpoint = sockets.endpoint(0, PAIR, LAYOUTS)
    await sockets.link(endpoint).start()
    neighbor = raw(1)
    waiting = asyncio.create_task(endpoint.begin(0).gather(Word))
    await neighbor.welcome()
    context, address = zmq.Context(), neighbor.address
    neighbor.close()
    try:
        for attempt in range(3):  # two strangers, and the neighbour
            router = context.socket(zmq.ROUTER)
            router.set(zmq.RCVTIMEO, 100_000)
            router.set(zmq.LINGER, 1000)
            while True:
                with contextlib.suppress(zmq.ZMQError):
                    router.bind(address)
                    break
            identity, *frames = await asyncio.to_thread(router.recv_multipart)
            seq = wire.decode(frames, RUN_ID, endpoint.link._vocabulary).seq
            answer = wire.encode(Refused("wrong run")) if attempt < 2 else wire.encode(Welcome(0, -1))
            router.send_multipart([identity, *answer.to(RUN_ID, 0, 1, seq)])
            if attempt < 2:
                router.close()  # lingers until the answer has gone
        while not endpoint.link._edges[1].up:
            await asyncio.sleep(0.01)
    finally:
        waiting.cancel()
        context.destroy(linger=0)
    assert caplog.text.count("peer 1 is no longer at") == 1
    assert endpoint.failure is None


async def test_a_neighbor_that_never_comes_up_costs_one_deadline_and_not_one_a_round(sockets: Any) -> None:
    endpoint = sockets.endpoint(0, PAIR, LAYOUTS, deadline=1000)
    await sockets.link(endpoint, deadline=0.3).start()
    for t in range(5):
        assert await endpoint.begin(t).exchange(Word("anyone?")) == {}
        await endpoint.finish(t)
    assert endpoint.missing == {"Word": [1]}


async def test_a_failure_of_the_io_thread_ends_the_waits(alone: Any) -> None:
    waiting = asyncio.create_task(alone.begin(0).gather(Word))
    await asyncio.sleep(0)
    await die(alone.link)
    with pytest.raises(ConnectionAbortedError):
        await waiting


# ---- bounded queues


async def test_neighbors_that_have_not_been_reached_are_named_once(
    sockets: Any, caplog: Any, monkeypatch: Any, eventually: Any
) -> None:
    caplog.set_level(logging.INFO)
    star = Topology.from_edges(4, [(0, 1), (0, 2), (0, 3)])
    links = [sockets.link(sockets.endpoint(me, star, LAYOUTS)) for me in range(2)]
    (sockets.addresses / "03").write_text("tcp://127.0.0.1:9")  # where nobody answers
    for link in links:
        await link.start()
    await eventually(lambda: links[0]._edges[1].up)
    assert "not reached yet" not in caplog.text
    monkeypatch.setattr(zmqlink, "OVERDUE", 0.0)
    await eventually(lambda: "not reached yet" in caplog.text)
    look = links[0]._next_look
    await eventually(lambda: links[0]._next_look > look + zmqlink.TICK)
    said = [record.getMessage() for record in caplog.records if "not reached yet" in record.getMessage()]
    where = f"each writes its address into {sockets.addresses}, unless transport.hosts tells it"
    assert said == [f"not reached yet: peer 2 at no known address, peer 3 at tcp://127.0.0.1:9; {where}"]


async def test_send_blocks_while_the_queue_is_full_and_gives_up_at_the_deadline(sockets: Any, caplog: Any) -> None:
    endpoint = sockets.endpoint(0, PAIR, LAYOUTS)
    link = sockets.link(endpoint, queue=3)
    await link.start()
    link._started = math.inf  # or the neighbour would be given up, since it does not come up in time
    link.transport = link.transport.model_copy(update={"deadline": 1.0})
    net = endpoint.begin(0)
    for _ in range(3):
        await net.broadcast(Word("…"))
    began = time.monotonic()
    await net.broadcast(Word("one too many"))
    assert time.monotonic() - began > 0.9
    assert "gave up a message to peer 1: 3 are waiting" in caplog.text
    assert endpoint.undelivered == 1


async def test_send_goes_on_when_there_is_room_again(sockets: Any) -> None:
    endpoint = sockets.endpoint(0, PAIR, LAYOUTS)
    await sockets.link(endpoint, queue=3).start()
    net = endpoint.begin(0)
    for _ in range(3):
        await net.broadcast(Word("…"))
    blocked = asyncio.create_task(net.broadcast(Word("last")))
    await asyncio.sleep(0)
    assert not blocked.done()
    there = sockets.endpoint(1, PAIR, LAYOUTS)
    await sockets.link(there, queue=3).start()
    await blocked
    other = there.begin(0)
    assert [(await other.gather(Word))[0].text for _ in range(4)] == ["…", "…", "…", "last"]
    assert endpoint.undelivered == 0


async def test_send_to_a_neighbor_that_is_gone_gives_up_at_once(sockets: Any, eventually: Any) -> None:
    here, there = await sockets.open(PAIR, LAYOUTS, queue=2, give_up=0.1)
    await asyncio.gather(*(endpoint.begin(0).exchange(Word("…")) for endpoint in (here, there)))
    await die(there.link)
    await eventually(lambda: 1 in here.mailbox._gone)
    net = here.begin(1)
    for _ in range(20):
        await net.broadcast(Word("…"))
    assert here.undelivered == 20


# ---- order


async def test_jitter_keeps_the_order_on_each_edge(sockets: Any) -> None:
    endpoints = await sockets.open(complete(3), LAYOUTS, jitter=0.02)
    nets = [endpoint.begin(0) for endpoint in endpoints]
    for number in range(30):
        for net in nets:
            await net.broadcast(Word(str(number)))
    for net in nets:
        heard = [await net.gather(Word) for _ in range(30)]
        assert heard == [{j: Word(str(n)) for j in net.sources} for n in range(30)]


# ---- connections that break


async def test_a_message_that_got_lost_with_a_connection_is_waited_for(alone: Any, raw: Any) -> None:
    """libzmq sends what waits in a socket as soon as it has connected again, before anybody can say HELLO."""
    other = raw(1)
    other.connect(alone.link)
    other.say(Hello("d", 0, 0, 0, 0, 0))
    assert await other.answer() == Welcome(0, -1)
    other.say(Word("first"), seq=0)
    other.say(Word("third"), seq=2)
    other.say(Hello("d", 0, 0, 0, 0, 0))
    assert await other.answer() == Welcome(1, 0)
    for seq, text in ((1, "second"), (2, "third")):
        other.say(Word(text), seq=seq)
    net = alone.begin(0)
    assert [(await net.gather(Word))[1].text for _ in range(3)] == ["first", "second", "third"]


async def test_numbers_that_do_not_follow_on_are_explained_before(alone: Any, raw: Any) -> None:
    other = raw(1)
    await other.welcome()
    await alone.begin(0).broadcast(Word("round 0"))
    assert (await other.heard())[1].seq == 0
    alone.skip_to(5)
    await alone.begin(5).broadcast(Word("round 5"))
    identity, message = await other.heard()
    assert isinstance(message.body, Hello)
    assert (message.body.first, message.body.oldest) == (5 * SEQUENCES, 5)
    other.reply(identity, Welcome(message.body.first, message.body.oldest - 1), seq=message.seq)
    assert (await other.heard())[1].body == Word("round 5")


async def test_who_falls_back_behind_rounds_that_it_left_out_is_heard_again(alone: Any, raw: Any) -> None:
    """With numbers below those that it had after the rounds that it left out."""
    other = raw(1)
    other.connect(alone.link)
    other.say(Hello("d", 0, 3 * SEQUENCES, 3, 3 * SEQUENCES, 3))
    assert await other.answer() == Welcome(3 * SEQUENCES, -1)
    other.say(Word("round 3"), seq=3 * SEQUENCES, t=3)
    assert (await alone.begin(3).gather(Word))[1].text == "round 3"

    other.say(Hello("d", 0, 0, 0, 0, 0))  # its next process, from a checkpoint of before
    assert await other.answer() == Welcome(3 * SEQUENCES + 1, 3)
    other.say(Word("round 3, otherwise"), seq=3, t=3)
    other.say(Hello("d", 0, 0, 0, 4, 4))
    assert await other.answer() == Welcome(4, 3)
    other.say(Word("round 4"), seq=4, t=4)
    assert (await alone.begin(4).gather(Word))[1].text == "round 4"

    for hello in (Hello("d", 0, 0, 0, 4, 4), Hello("d", 0, 0, 0, 0, 0)):  # the first lay in its socket, maybe
        other.say(hello)
        assert await other.answer() == Welcome(5, 4)
    assert alone.mailbox.late == 0


async def test_who_falls_back_goes_on_where_a_neighbor_is_in_need_of_it(alone: Any, raw: Any) -> None:
    other = raw(1)
    identity, message = await other.heard()
    other.reply(identity, Welcome(3 * SEQUENCES + 1, 1), seq=message.seq)  # to a process that was before this one
    for t in range(3):
        await alone.begin(t).broadcast(Word(f"round {t}"))
    identity, message = await other.heard()
    assert isinstance(message.body, Hello)
    assert (message.body.first, message.body.coming, message.body.of) == (0, 2, 2)
    other.reply(identity, Welcome(2, 1), seq=message.seq)
    assert (await other.heard())[1].body == Word("round 2")

    alone.link.cut(frozenset({1}))  # and so on a new connection
    alone.link.cut(frozenset())
    identity, message = await other.heard()
    assert (message.body.coming, message.body.of) == (0, 0)
    other.reply(identity, Welcome(3 * SEQUENCES + 1, 0), seq=message.seq)  # it has gone back, too
    identity, message = await other.heard()
    assert (message.body.coming, message.body.of) == (1, 1)
    other.reply(identity, Welcome(1, 0), seq=message.seq)
    assert [(await other.heard())[1].body for _ in range(2)] == [Word("round 1"), Word("round 2")]


async def test_what_was_given_up_at_a_full_queue_is_asked_for_and_sent(
    sockets: Any, raw: Any, eventually: Any
) -> None:
    endpoint = sockets.endpoint(0, PAIR, LAYOUTS)
    link = sockets.link(endpoint, queue=8)
    await link.start()
    other = raw(1)
    other.connect(link)
    await other.welcome()
    other.say(Hello("d", 0, 0, 0, 0, 0))
    await other.answer()
    await eventually(lambda: link._edges[1].up)
    other.say(Hold(True))
    await eventually(lambda: link._edges[1].held)
    link.transport = link.transport.model_copy(update={"deadline": 0.3})
    net = endpoint.begin(0)
    for number in range(9):
        await net.broadcast(Word(f"{number}"))
    assert endpoint.undelivered == 1
    other.say(Hold(False))
    await other.welcome()
    assert [(await other.heard())[1].body for _ in range(8)] == [Word(f"{n}") for n in range(8)]
    await eventually(lambda: not link.full(1))
    await net.broadcast(Word("9"))
    identity, message = await other.heard()
    assert isinstance(message.body, Hello)
    assert (message.body.first, message.body.coming) == (0, 9)  # the eighth is kept
    other.reply(identity, Welcome(8, 0), seq=message.seq)
    assert [(await other.heard())[1].body for _ in range(2)] == [Word("8"), Word("9")]


async def test_what_did_not_fit_into_the_queue_is_sent_when_there_is_room_again(
    sockets: Any, raw: Any, eventually: Any
) -> None:
    endpoint = sockets.endpoint(0, PAIR, LAYOUTS)
    link = sockets.link(endpoint, queue=1)
    await link.start()
    other = raw(1)
    await other.welcome()
    await eventually(lambda: link._edges[1].up)
    link.transport = link.transport.model_copy(update={"deadline": 0.3})
    net = endpoint.begin(0)
    while endpoint.undelivered < 2:  # libzmq and the system hold some, too
        await net.broadcast(Word("x" * 50_000))

    async def once_there_is_room() -> None:
        while link.full(1):
            await asyncio.sleep(0.005)
        await net.broadcast(Word("last"))

    last = asyncio.create_task(once_there_is_room())
    numbers: list[int] = []
    while True:
        identity, *frames = await asyncio.to_thread(other.router.recv_multipart)
        message = wire.decode(frames, None, CONTROL)
        if isinstance(message.body, Hello):
            other.reply(identity, Welcome(len(numbers), len(numbers) - 1), seq=message.seq)
            continue
        numbers.append(message.seq)
        if message.body == Word("last"):
            break
    await last
    assert numbers == list(range(len(numbers)))


class ScriptedDealer:
    """Answers and events as a test has them come."""

    def __init__(self) -> None:
        self.said: list[wire.Message] = []
        self.answers: list[list[bytes]] = []
        self.events: list[Literal["connected", "lost"]] = []

    def send(self, frames: Any) -> bool:
        self.said.append(wire.decode(frames, None, CONTROL))
        return True

    def receive(self) -> list[bytes] | None:
        return self.answers.pop(0) if self.answers else None

    def event(self) -> Literal["connected", "lost"] | None:
        return self.events.pop(0) if self.events else None

    def watch(self, events: int) -> None:
        return


async def test_a_welcome_that_is_read_after_its_connection_was_lost_counts_for_nothing(sockets: Any) -> None:
    link = sockets.link(sockets.endpoint(0, PAIR, LAYOUTS))
    sockets.links.remove(link)  # it never starts
    dealer = ScriptedDealer()
    edge = link._edges[1] = _Edge(1, dealer, lost_at=link.now())  # type: ignore[arg-type]
    dealer.events = ["connected"]
    link._watch(edge)
    (hello,) = dealer.said
    dealer.events = ["lost"]
    link._watch(edge)
    dealer.answers = [[bytes(frame) for frame in wire.encode(Welcome(0, -1)).to(RUN_ID, 0, 1, hello.seq)]]
    link._answered(edge)
    assert not edge.up
    dealer.events = ["connected"]
    link._watch(edge)
    dealer.answers = [[bytes(frame) for frame in wire.encode(Welcome(0, -1)).to(RUN_ID, 0, 1, dealer.said[-1].seq)]]
    link._answered(edge)
    assert edge.up


# ---- closing


async def test_close_delivers_everything(sockets: Any) -> None:
    here, there = await sockets.open(PAIR, LAYOUTS, jitter=0.0)
    net, other = here.begin(0), there.begin(0)

    async def talk() -> None:
        for number in range(1000):
            await net.broadcast(Word(str(number)))
            if number % 100 == 0:
                await net.broadcast(Block(torch.full((1000, 1000), float(number))))
        await sockets.shut(here.link)

    async def listen() -> None:
        for number in range(1000):
            assert await other.gather(Word) == {0: Word(str(number))}
        for number in range(0, 1000, 100):
            assert (await other.gather(Block))[0].x.unique().tolist() == [number]

    await asyncio.gather(talk(), listen())


async def test_close_delivers_what_a_busy_neighbor_has_not_read_yet(sockets: Any) -> None:
    here, there = await sockets.open(PAIR, LAYOUTS, jitter=0.0, queue=50)
    await asyncio.gather(*(endpoint.begin(0).exchange(Word("up")) for endpoint in (here, there)))
    net = here.begin(1)
    for number in range(150):
        await net.broadcast(Word(str(number)))
    await sockets.shut(here.link)
    other = there.begin(1)
    assert [(await other.gather(Word))[0].text for _ in range(150)] == list(map(str, range(150)))
    assert await other.gather(Word) == {}  # and the wait for more ends at once


async def test_close_comes_through_when_the_queue_is_full(sockets: Any, raw: Any, caplog: Any) -> None:
    endpoint = sockets.endpoint(0, PAIR, LAYOUTS)
    link = sockets.link(endpoint, queue=1)
    await link.start()
    other = raw(1)
    other.router.set(zmq.RCVHWM, 1)
    net = endpoint.begin(0)
    await other.welcome()
    big = Block(torch.zeros(1000, 1000))

    async def send_and_close() -> None:
        for _ in range(12):
            await net.broadcast(big)
        await sockets.shut(link)

    closing = asyncio.create_task(send_and_close())
    taken = 0
    while True:
        identity, *frames = await asyncio.to_thread(other.router.recv_multipart)
        if len(frames) == 1:
            break
        taken += 1
    message = wire.decode(frames, None, CONTROL)
    assert message.body == Close()
    other.reply(identity, Closed(), seq=message.seq)
    await closing
    assert taken == 12
    assert "did not confirm" not in caplog.text


async def test_peers_that_close_together_do_not_wait_for_each_other(sockets: Any) -> None:
    endpoints = await sockets.open(complete(6), LAYOUTS)

    async def life(endpoint: Any) -> int:
        heard = await endpoint.begin(0).exchange(Word("the only one"))
        await sockets.shut(endpoint.link)
        return len(heard)

    assert await asyncio.gather(*(life(endpoint) for endpoint in endpoints)) == [5] * 6


async def test_closing_does_not_wait_for_a_neighbor_that_never_was(sockets: Any, alone: Any) -> None:
    await sockets.shut(alone.link)


async def test_closing_waits_only_so_long_for_a_neighbor_that_says_nothing(
    sockets: Any, alone: Any, raw: Any, monkeypatch: Any, caplog: Any
) -> None:
    monkeypatch.setattr(zmqlink, "CLOSING", 0.3)
    other = raw(1)
    await other.welcome()
    await alone.begin(0).broadcast(Word("last words"))
    assert (await other.heard())[1].body == Word("last words")
    await sockets.close()
    assert "peer 1 did not confirm our last messages" in caplog.text


async def test_the_last_one_does_not_wait_for_those_who_have_finished_and_are_gone(sockets: Any, raw: Any) -> None:
    """They may go before their CLOSED has left."""
    endpoint = sockets.endpoint(0, PAIR, LAYOUTS)
    link = sockets.link(endpoint, give_up=1000)
    await link.start()
    other = raw(1)
    other.connect(link)
    await other.welcome()
    await endpoint.begin(0).broadcast(Word("last words"))
    assert (await other.heard())[1].body == Word("last words")
    closing = asyncio.create_task(sockets.shut(link, "finished"))
    assert (await other.heard())[1].body == Durable(zmqlink.FOREVER)
    other.say(Durable(zmqlink.FOREVER))
    assert (await other.heard())[1].body == Close()
    other.close()
    await closing


async def test_who_restarts_after_its_last_round_still_hands_out_what_it_has(sockets: Any, raw: Any) -> None:
    endpoint = sockets.endpoint(0, PAIR, LAYOUTS)
    await sockets.link(endpoint).start()
    await endpoint.begin(0).broadcast(Word("last words"))
    await die(endpoint.link)
    again = sockets.revived(endpoint)
    link = sockets.link(again)
    await link.start()
    closing = asyncio.create_task(sockets.shut(link, "finished"))
    other = raw(1)
    other.connect(link)
    await other.welcome()
    assert (await other.heard())[1].body == Word("last words")
    other.say(Durable(zmqlink.FOREVER))
    while not isinstance((await other.heard())[1].body, Close):
        pass
    other.close()
    await closing


async def test_who_restarts_after_its_last_round_does_not_wait_for_ever(sockets: Any) -> None:
    """The others may have finished while it was not there."""
    endpoint = sockets.endpoint(0, PAIR, LAYOUTS)
    await sockets.link(endpoint).start()
    await endpoint.begin(0).broadcast(Word("last words"))
    await die(endpoint.link)
    link = sockets.link(sockets.revived(endpoint), deadline=1000, give_up=0.5)
    await link.start()
    await sockets.shut(link, "finished")


@pytest.mark.parametrize("said", [True, False])
async def test_who_restarts_after_its_last_round_does_not_wait_for_those_who_have_left_for_good(
    sockets: Any, said: bool, eventually: Any
) -> None:
    """They have left while it was not there, or while they were getting in touch again."""
    here, there = await sockets.open(PAIR, LAYOUTS, jitter=0.0, give_up=0.5)
    net, other = here.begin(0), there.begin(0)
    await net.broadcast(Word("last words"))
    if said:
        await other.broadcast(Word("last words"))
        await net.gather(Word)
        await here.finish(0)
    await die(here.link)
    link = sockets.link(sockets.revived(here), deadline=1000, give_up=1000)
    if said:
        await sockets.shut(there.link)
        await link.start()
    else:
        await link.start()
        await eventually(lambda: link._edges and link._edges[1].address)
        await sockets.shut(there.link)
    await sockets.shut(link, "finished")  # or it would wait beyond all patience


async def test_who_restarts_after_its_last_round_waits_for_those_who_were_stopped(sockets: Any) -> None:
    here, there = await sockets.open(PAIR, LAYOUTS, jitter=0.0)
    nets = [endpoint.begin(0) for endpoint in (here, there)]
    await asyncio.gather(*(net.exchange(Word("before")) for net in nets))
    await asyncio.gather(*(endpoint.finish(0) for endpoint in (here, there)))
    await here.begin(1).broadcast(Word("last words"))
    await asyncio.gather(die(here.link), sockets.shut(there.link, "stopped"))
    link = sockets.link(sockets.revived(here))
    await link.start()
    closing = asyncio.create_task(sockets.shut(link, "finished"))
    again = sockets.revived(there)
    await sockets.link(again).start()
    assert await again.begin(1).gather(Word) == {0: Word("last words")}
    assert not closing.done()
    await sockets.shut(again.link, "finished")
    await closing


async def test_a_neighbor_that_has_closed_may_come_back(sockets: Any, eventually: Any) -> None:
    here, there = await sockets.open(PAIR, LAYOUTS)
    await asyncio.gather(*(endpoint.begin(0).exchange(Word("…")) for endpoint in (here, there)))
    await sockets.shut(there.link)
    assert await here.begin(1).exchange(Word("anyone?")) == {}
    again = sockets.revived(there)
    await sockets.link(again).start()
    await eventually(lambda: 1 not in here.mailbox._gone)
    nets = [endpoint.begin(2) for endpoint in (here, again)]
    assert await asyncio.gather(*(net.exchange(Word("…")) for net in nets)) == [{1: Word("…")}, {0: Word("…")}]


async def test_a_closed_link_leaves_no_thread_and_no_file_open(tmp_path: Path, sockets: Any, eventually: Any) -> None:
    process = psutil.Process()

    async def life() -> None:
        endpoints = await sockets.open(complete(4), LAYOUTS)
        await asyncio.gather(*(endpoint.begin(0).exchange(BLOCK) for endpoint in endpoints))
        await sockets.close()

    await life()  # pyzmq keeps a thread and a context of its own once it has sent without copying

    def held() -> tuple[int, int]:
        """Open files, and threads but for those in which asyncio waits for others."""
        waiting = sum(thread.name.startswith("asyncio_") for thread in threading.enumerate())
        return process.num_fds(), process.num_threads() - waiting

    before = held()
    for _ in range(3):
        await life()
    # Not equal: what earlier tests have left to the garbage collector may go meanwhile.
    await eventually(lambda: all(now <= then for now, then in zip(held(), before, strict=True)), "all of it is gone")
