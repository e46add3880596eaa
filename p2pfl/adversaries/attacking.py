"""The pipeline of a peer that attacks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from p2pfl import PeerId
from p2pfl.adversaries.base import Adversary, Attacker
from p2pfl.adversaries.before import Before
from p2pfl.errors import PluginError
from p2pfl.messaging.pipeline import Pipeline
from p2pfl.messaging.schema import Body, take_apart
from p2pfl.messaging.wire import Message
from p2pfl.rng import Streams


class Attacking(Pipeline):
    """Sends what an attack says.

    Args:
        adversary: the attack.
        attacker: this peer.
        streams: its random streams.
        first: the first round of the attack.
        kinds: the kinds of bodies that it changes; empty: all.
        before: keeps what the models were before they were trained, ahead in the same chain.
    """

    def __init__(
        self,
        adversary: Adversary,
        attacker: Attacker,
        streams: Streams,
        first: int = 0,
        kinds: Collection[str] = (),
        before: Before | None = None,
    ) -> None:
        self._adversary = adversary
        self._attacker = attacker
        self._streams = streams
        self._first = first
        self._kinds = kinds
        self._before = before
        self._seen: dict[str, dict[PeerId, Body]] = {}
        """What others have sent, by kind, until the method takes it."""

    def _attacks(self, kind: str, t: int) -> bool:
        return t >= self._first and (not self._kinds or kind in self._kinds)

    def awaits(self, kind: str, senders: Collection[PeerId], t: int) -> Collection[PeerId]:
        """Return the honest senders: attackers, which the run file names, do not wait for one another."""
        rushes = self._adversary.rushing and self._attacks(kind, t)
        return set(senders) - self._attacker.adversaries if rushes else ()

    def see(self, kind: str, bodies: Mapping[PeerId, Body]) -> None:
        if self._adversary.rushing:
            self._seen[kind] = dict(bodies)

    def left(self, message: Message) -> None:
        self._seen.get(message.kind, {}).pop(message.sender, None)

    def outgoing(self, body: Body, to: Sequence[PeerId], t: int) -> Iterable[tuple[Sequence[PeerId], Body]]:
        if not self._attacks(body.kind(), t):
            return [(to, body)]
        before = {} if self._before is None else self._before.of_body
        attacker = replace(self._attacker, before=before, others=dict(self._seen.get(body.kind(), {})))
        with self._streams.torch("adversary"), torch.no_grad():
            sent = self._adversary.attack(body, to, t, attacker)
        bodies = dict.fromkeys(to, sent) if isinstance(sent, Body) else {j: sent[j] for j in to if j in sent}
        return [(peers, self._checked(each, body)) for peers, each in _by_body(bodies)]

    def _checked(self, sent: Body, true: Body) -> Body:
        """Return ``sent``. Raises PluginError if receivers would drop it, as a message of another form."""
        if type(sent) is not type(true) or _form(sent) != _form(true):
            text = f"attack should return a {true.kind()} with the same fields, tensors, dtypes and dimensions"
            raise PluginError.of(type(self._adversary).attack, text)
        return sent

    def state_dict(self) -> dict[str, Any]:
        return {"memory": dict(self._attacker.memory)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._attacker.memory.clear()
        self._attacker.memory.update(state["memory"])


def _form(body: Body) -> dict[Any, Any]:
    tensors, plain = take_apart(body)
    return {path: (x.dtype, x.dim()) for path, x in tensors.items()} | {name: type(x) for name, x in plain.items()}


def _by_body(bodies: Mapping[PeerId, Body]) -> Iterator[tuple[list[PeerId], Body]]:
    """Yield each body once, with the peers that get it."""
    while bodies:
        first = next(iter(bodies.values()))
        yield [peer for peer, body in bodies.items() if body is first], first
        bodies = {peer: body for peer, body in bodies.items() if body is not first}
