"""What a pipeline changes between a method and the wire, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from p2pfl.errors import Unexpected
from p2pfl.messaging.conversation import Conversation
from p2pfl.messaging.endpoint import Endpoint
from p2pfl.messaging.neighborhood import Neighborhood
from p2pfl.messaging.pipeline import Chain, Pipeline
from p2pfl.messaging.schema import Body
from p2pfl.messaging.topology import Topology
from p2pfl.messaging.wire import Message
from p2pfl.simulation.local_link import LocalHub
from tests.bodies import LAYOUTS, PAIR, RUN_ID, Vector, Word, complete, round_of, texts, vector


class Differences(Pipeline):
    """Sends the difference from what was sent before; the reader adds it to what it had before."""

    def __init__(self) -> None:
        self.sent: Tensor = torch.zeros(3)
        self.received: dict[int, Tensor] = {}

    def outgoing(self, body: Body, to: Sequence[int], t: int) -> Iterable[tuple[Sequence[int], Body]]:
        assert isinstance(body, Vector)
        before, self.sent = self.sent, body.x.clone()
        yield to, Vector(body.x - before)

    def incoming(self, message: Message) -> Message:
        assert isinstance(message.body, Vector)
        return replace(message, body=Vector(self.received.get(message.sender, torch.zeros(3)) + message.body.x))

    def left(self, message: Message) -> None:
        self.received[message.sender] = self.incoming(message).body.x  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        return {"sent": self.sent, "received": dict(self.received)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.sent, self.received = state["sent"], dict(state["received"])


class Appends(Pipeline):
    def __init__(self, text: str) -> None:
        self.text = text

    def outgoing(self, body: Body, to: Sequence[int], t: int) -> Iterable[tuple[Sequence[int], Body]]:
        assert isinstance(body, Word)
        return [([peer], Word(f"{body.text}{self.text}{peer}")) for peer in to]

    def incoming(self, message: Message) -> Message:
        return replace(message, body=Word(f"{message.body.text}-{self.text}"))  # type: ignore[attr-defined]


def connected(topology: Topology, *pipelines: Pipeline | None) -> list[Endpoint]:
    hub, endpoints = LocalHub(), []
    for me, pipeline in enumerate(pipelines):
        endpoints.append(Endpoint(Neighborhood(me, topology), RUN_ID, Conversation(LAYOUTS), pipeline=pipeline))
        hub.join(endpoints[-1])
    for endpoint in endpoints:
        endpoint.open(0)
    return endpoints


async def test_a_chain_sends_from_first_to_last_and_receives_from_last_to_first() -> None:
    chain = Chain([Appends("a"), Appends("b")])
    zero, one, two = connected(complete(3), chain, chain, chain)
    await round_of(zero, 0).broadcast(Word("x"))
    assert texts(await round_of(one, 0).gather(Word, of=[0])) == {0: "xa1b1-b-a"}
    assert texts(await round_of(two, 0).gather(Word, of=[0])) == {0: "xa2b2-b-a"}
    assert zero.sent[1]["Word"] == zero.sent[2]["Word"]


async def test_on_receive_gets_what_the_pipeline_returns() -> None:
    zero, one = connected(PAIR, Appends("a"), Appends("b"))
    one.on_receive = lambda body: Word(body.text.upper())  # type: ignore[attr-defined]
    await round_of(zero, 0).broadcast(Word("x"))
    assert texts(await round_of(one, 0).gather(Word)) == {0: "XA1-B"}


async def test_what_is_remembered_changes_when_a_message_is_taken_or_its_round_ends_without_it() -> None:
    reader = Differences()
    zero, one = connected(PAIR, Differences(), reader)
    for t in range(4):
        await round_of(zero, t).broadcast(vector(t + 1.0, 0, 0))  # it is ahead of the reader
        zero.finish(t)
    net = round_of(one, 0)
    assert reader.state_dict()["received"] == {}
    assert (await net.gather(Vector))[0].x[0] == 1.0
    one.finish(0)
    one.begin(1)
    assert reader.received[0][0] == 1.0
    one.finish(1)
    assert reader.received[0][0] == 2.0  # discarded before the checkpoint of round 1, which holds its effect
    assert (await round_of(one, 2).gather(Vector))[0].x[0] == 3.0
    one.finish(2)


async def test_a_restored_pipeline_continues_where_the_checkpoint_was() -> None:
    sender, reader = Differences(), Differences()
    zero, one = connected(PAIR, sender, reader)
    await round_of(zero, 0).broadcast(vector(1, 0, 0))
    await round_of(one, 0).gather(Vector)
    zero.finish(0)
    one.finish(0)
    kept, journal = zero.state_dict(), zero.journal.state_dict(before=1)
    await round_of(zero, 1).broadcast(vector(5, 0, 0))
    again = Endpoint(Neighborhood(0, PAIR), RUN_ID, Conversation(LAYOUTS), pipeline=Differences())
    again.load_state_dict(kept, journal, 1)
    assert again.state_dict()["pipeline"]["sent"].tolist() == [1.0, 0.0, 0.0]
    assert "pipeline" not in connected(PAIR, None, None)[0].state_dict()


async def test_late_messages_pass_the_pipeline_too() -> None:
    reader = Differences()
    zero, one = connected(PAIR, Differences(), reader)
    one.begin(0)
    one.finish(0)
    await round_of(zero, 0).broadcast(vector(1, 0, 0))
    assert (float(reader.received[0][0]), one.mailbox.expired) == (1.0, 1)


async def test_publish_returns_what_the_method_sent_not_what_travels() -> None:
    zero, _ = connected(PAIR, Differences(), Differences())
    zero.pipeline.sent = torch.ones(3)  # type: ignore[union-attr]
    body = vector(1, 2, 3)
    copy = await round_of(zero, 0).publish(body)
    assert torch.equal(copy.x, body.x)
    assert copy.x.data_ptr() != body.x.data_ptr()


async def test_a_changed_body_that_receivers_would_refuse_is_refused_at_its_sender() -> None:
    class Longer(Pipeline):
        def outgoing(self, body: Body, to: Sequence[int], t: int) -> Iterable[tuple[Sequence[int], Body]]:
            yield to, vector(1, 2, 3, 4)

    zero, _ = connected(PAIR, Longer(), None)
    with pytest.raises(Unexpected, match=r"Vector: x must be float32\[3\], got float32\[4\]"):
        await round_of(zero, 0).broadcast(vector(1, 2, 3))


async def test_the_sums_of_an_allreduce_pass_unchanged() -> None:
    zero, one = connected(PAIR, Differences(), Differences())
    nets = [round_of(zero, 0), round_of(one, 0)]
    for total in await asyncio.gather(*(net.allreduce(vector(1, 2, 3), "sum") for net in nets)):
        assert total.x.tolist() == [2.0, 4.0, 6.0]
