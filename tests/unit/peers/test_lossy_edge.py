"""Both ends of an edge, over a connection that breaks, between processes that restart."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from p2pfl.messaging import wire
from p2pfl.messaging.control import BEFORE, CHUNK, Entry, Hello, Id, Start, Want
from p2pfl.messaging.edge import Reader, Writer, WriterState
from p2pfl.messaging.journal import Journal
from p2pfl.messaging.wire import cost
from tests.bodies import Block

HELLO = Hello("digest", "boot", "token")
PEER = 1


class Pipe:
    """A writer and a reader whose connection breaks, and whose processes restart, at random."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.epochs = iter(range(1, 1 << 40))
        self.now = 0.0
        self.t = 0
        """The writer's round."""
        self.addressed: dict[tuple[Id, bytes], None] = {}
        """What was addressed to the reader, in order."""
        self.taken: list[tuple[Id, bytes]] = []
        self.pending = 0
        self.durable = 0
        self.journal = Journal([PEER, 2])
        self.writer = Writer(self.journal, PEER, HELLO)
        self.reader = self.new_reader(0)
        self.forward: list[tuple[Any, tuple[Any, ...]]] = []
        self.back: list[Want] = []
        self.body: bytearray | None = None
        self.plan: tuple[Id, int] = (BEFORE, 0)

    def new_reader(self, t: int) -> Reader:
        return Reader(Id(t, 0), 40_000, self.epochs.__next__)

    def round(self) -> None:
        """Write a round that depends on its number only, as one computed again does."""
        chance = random.Random(self.t)
        self.journal.begin(self.t)
        self.append(b"", (PEER, 2), optional=self.t % 3 == 0)
        for number in range(chance.randrange(4)):
            size = chance.choice((8, 300, 5_000, 60_000, 2 * CHUNK + 3))
            content = bytes([self.t % 256, number]) + chance.randbytes(6) + bytes(size - 8)
            self.append(content, chance.choice(((PEER,), (2,), (PEER, 2))))
        self.t += 1

    def append(self, content: bytes, to: tuple[int, ...], *, optional: bool = False) -> None:
        body = torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8)[: len(content)]
        entry = self.journal.append(wire.encode(Block(body)), to, optional=optional)
        if PEER in to and not optional:
            self.addressed[entry.id, content] = None

    def connection_lost(self) -> None:
        """What is on its way is lost from some message on; the rest was delivered."""
        del self.forward[self.chance.randrange(len(self.forward) + 1) :]
        del self.back[self.chance.randrange(len(self.back) + 1) :]
        self.writer.lost()

    def restart_writer(self) -> None:
        """Roll back to a checkpoint that holds what the reader may need; compute the rounds since again."""
        self.connection_lost()
        goal, self.t = self.t, self.chance.randint(self.durable, self.t)
        state, store = self.journal.state_dict(self.t), self.journal.store
        store.restore = lambda segments: set(segments)  # type: ignore[method-assign]
        self.journal = Journal([PEER, 2], store)
        self.journal.load_state_dict(state)
        self.writer = Writer(self.journal, PEER, HELLO)
        while self.t < goal:
            self.round()

    def restart_reader(self) -> None:
        """Want the checkpoint's round from its start: what was taken since is taken again."""
        self.connection_lost()
        self.forward.clear()
        self.reader = self.new_reader(t := self.chance.randint(self.durable, max(self.durable, self.next_round)))
        self.taken = [each for each in self.taken if each[0] < Id(t, 0)]
        self.pending, self.body = 0, None

    @property
    def next_round(self) -> int:
        return self.reader.next.t

    def send(self) -> None:
        message = self.writer.next(hold_optional=self.chance.random() < 0.3)
        if message is not None:
            self.writer.sent(message)
            self.forward.append((message.control, message.frames))

    def receive(self) -> None:
        if not self.forward:
            return
        control, frames = self.forward.pop(0)
        if isinstance(control, Hello):
            self.reader.hello(references=False)
        elif isinstance(control, Start):
            assert self.reader.start(control) is None  # nothing that it may need was dropped
        else:
            self.chunk(control, frames)

    def chunk(self, control: Entry, frames: tuple[Any, ...]) -> None:
        if control.offset == 0:
            if self.reader.entry(control) != "take":
                return
            self.body, self.plan = bytearray(), (control.id, control.epoch)
            frames = frames[1:]
        elif self.body is None or self.plan != (control.id, control.epoch):
            return
        elif len(self.body) != control.offset:
            self.body = None
            self.reader.gap()
            return
        self.body += b"".join(map(bytes, frames))
        if len(self.body) == control.size:
            self.reader.passed(control.id, 40, control.size)
            self.taken.append((control.id, bytes(self.body)))
            self.pending += cost(40, control.size)
            self.body = None

    def step(self) -> None:
        self.now += 0.05
        self.writer.tick(self.now)
        asked = self.reader.want(self.pending, self.now, waiting=True)
        if asked is not None:
            self.reader.stated(asked, self.now)
            self.back.append(asked)
        if self.back and self.chance.random() < 0.7:
            self.writer.want(self.back.pop(0), self.now)
        for _ in range(self.chance.randrange(5)):
            self.chance.choice((self.send, self.send, self.receive))()
        if self.chance.random() < 0.5:
            self.pending = 0  # the algorithm takes what has arrived
        if self.writer.state is WriterState.DOWN:
            self.writer.connected()
            self.reader.restate()


@pytest.mark.parametrize("seed", range(30))
def test_the_reader_takes_each_entry_once_and_in_order_whatever_breaks(seed: int) -> None:
    pipe = Pipe(seed)
    for _ in range(600):
        draw = pipe.chance.random()
        if draw < 0.05 and pipe.t < 40:
            pipe.round()
        elif draw < 0.07:
            pipe.connection_lost()
        elif draw < 0.08:
            pipe.restart_writer()
        elif draw < 0.09:
            pipe.restart_reader()
        elif draw < 0.11:
            pipe.durable = pipe.reader.durable = max(pipe.durable, pipe.next_round - 1)
        pipe.step()
        assert [id for id, _ in pipe.taken] == sorted({id for id, _ in pipe.taken})
    pipe.round()
    for _ in range(2000):  # nothing breaks any more
        pipe.step()
    required = list(pipe.addressed)
    assert [each for each in pipe.taken if each in pipe.addressed] == required
    optional = {id for id, _ in pipe.taken} - {id for id, _ in required}
    assert all(id.number == 0 and id.t % 3 == 0 for id in optional)
    assert pipe.writer.next() is None
