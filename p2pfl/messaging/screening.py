"""Sketches first: a peer fetches only the models whose sketches it accepts.

Where a method exchanges models, each peer

1. sends each receiver a sketch of what that will receive of it,
2. tells each sender, by the sketches that have arrived, whether it wants its model,
3. sends its model to the receivers that want it, and gathers the models that it wants.

Invariants:

- A peer's model is fixed, and what its pipeline makes of it, before the peer sees a model of the round: a model that
  does not have the sketch announced is dropped.
- Each step has a deadline. A peer that misses one is not asked, is sent nothing, or is left out.
- Sketches are not packed: what they stand for is what the receivers unpack.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from p2pfl import PeerId
from p2pfl.messaging import wire
from p2pfl.messaging.net import Messenger, Net
from p2pfl.messaging.pipeline import Pipeline
from p2pfl.messaging.schema import B, Body, copied

ANSWERS_DEADLINES, MODELS_DEADLINES = 2.0, 3.0
"""Deadlines to wait: neighbors may first have to wait for the sketches of others, and for their answers."""


@dataclass(frozen=True)
class ModelSketch(Body):
    """What is known of a model before it is sent, float32 [size]."""

    values: Tensor


@dataclass(frozen=True)
class WantedModels(Body):
    """The peers whose models the sender wants, of those that get this message."""

    peers: tuple[int, ...]


class Screen(Protocol):
    """Decides by sketches which models a peer wants."""

    @property
    def kind(self) -> type[Body]:
        """Class of the bodies that hold models."""

    def sketch(self, body: Body) -> Tensor:
        """Return the sketch of a model."""

    def accepted(self, own: Body | None, sketches: Mapping[PeerId, Tensor]) -> Collection[PeerId]:
        """Return the neighbors whose models the peer wants, given its own model, if it has one."""

    def fits(self, sender: PeerId, body: Body, announced: Tensor) -> bool:
        """Return whether a model that has arrived has the sketch that its sender has announced."""


class OpenMessenger(Messenger, Protocol):
    """A Messenger that shows what it does to bodies."""

    @property
    def pipeline(self) -> Pipeline | None: ...

    def check(self, header: wire.Buffer) -> wire.Plan: ...


class ScreeningNet(Net):
    """A Net that sends bodies of one kind, models, only to the peers that want them.

    ``broadcast``, ``publish`` and ``exchange`` send the sketch; the model is sent when this peer gathers those of the
    others, once in a round.
    """

    _endpoint: OpenMessenger

    def __init__(self, endpoint: OpenMessenger, t: int, seed: int, screen: Screen) -> None:
        super().__init__(endpoint, t, seed)
        self._screen = screen
        self._own: Body | None = None
        self._announced: list[tuple[Sequence[PeerId], Body]] = []
        """What will be sent in place of this peer's model, and to whom."""

    async def broadcast(self, body: Body, to: Iterable[PeerId] | None = None) -> None:
        if type(body) is not self._screen.kind:
            await super().broadcast(body, to)
            return
        receivers, pipeline = await self._receivers_among(to), self._endpoint.pipeline or Pipeline()
        self._own = copied(body)  # the method may go on training
        made = pipeline.outgoing(body, receivers, self.t)
        self._announced = [(some, self._own if each is body else copied(each)) for some, each in made]
        for some, each in self._announced:
            plan = self._endpoint.check(wire.encode(each).header)
            received = pipeline.incoming(wire.Message(each, self.t, self.me, plan, ""))
            await self._endpoint.send(some, ModelSketch(self._screen.sketch(received.body)))

    async def publish(self, body: B) -> B:
        if type(body) is not self._screen.kind:
            return await super().publish(body)
        await self.broadcast(body)
        return copied(body)

    async def exchange(
        self, body: B, among: Iterable[PeerId] | None = None, deadline_factor: float = 1.0
    ) -> dict[PeerId, B]:
        if type(body) is self._screen.kind:
            self._own = body  # whether or not this peer is among the senders
        return await super().exchange(body, among, deadline_factor)

    async def gather(
        self, kind: type[B], of: Iterable[PeerId] | None = None, deadline_factor: float = 1.0
    ) -> dict[PeerId, B]:
        if kind is not self._screen.kind:
            return await super().gather(kind, of, deadline_factor)
        senders = self.sources if of is None else tuple(of)
        sketches = await super().gather(ModelSketch, senders, deadline_factor)
        announced = {j: sketch.values for j, sketch in sketches.items()}
        wanted = self._screen.accepted(self._own, announced)
        await super().broadcast(WantedModels(tuple(wanted)), to=set(senders) & await self._endpoint.receivers())
        await self._send_to_those_who_want(deadline_factor)
        models = await super().gather(kind, wanted, MODELS_DEADLINES * deadline_factor)
        return {j: body for j, body in models.items() if self._fits(j, body, announced[j])}

    async def _send_to_those_who_want(self, deadline_factor: float) -> None:
        asked = {j for some, _ in self._announced for j in some}.intersection(self.sources)
        answers = await super().gather(WantedModels, asked, ANSWERS_DEADLINES * deadline_factor)
        wanting = {j for j, answer in answers.items() if self.me in answer.peers}
        for some, body in self._announced:
            await self._endpoint.send([j for j in some if j in wanting], body, count=1)
        self._announced = []

    def _fits(self, sender: PeerId, body: Body, announced: Tensor) -> bool:
        fits = self._screen.fits(sender, body, announced)
        if not fits:
            self.count_as_missing(type(body), sender)
        return fits
