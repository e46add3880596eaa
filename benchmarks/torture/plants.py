"""Bugs planted on purpose, one at a time: each goes against one sentence of docs/reliability.md or docs/wire.md.

A plant replaces a method of the project's code in this process, and nothing on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from p2pfl.net import START, Endpoint, Mailbox, Place, Sent
from p2pfl.session import Session
from p2pfl.wire import Message
from peers.zmqlink import Close, Durable, Hello, ZmqLink

Wrapped = Callable[..., Any]


@dataclass(frozen=True)
class Plant:
    """What is wrong then, and what makes of a method the one that takes its place."""

    says: str
    owner: type
    method: str
    change: Callable[[Wrapped], Wrapped]

    @contextmanager
    def planted(self) -> Iterator[None]:
        with patch.object(self.owner, self.method, self.change(getattr(self.owner, self.method))):
            yield


def _expects(which: Callable[[int, int], int]) -> Callable[[Wrapped], Wrapped]:
    """A receiver expects, of what it does and the number of a message that comes, ``which`` chooses."""

    def change(heard: Wrapped) -> Wrapped:
        def planted(self: ZmqLink, identity: bytes, frames: list[Any]) -> None:
            via = self._neighbors.get(identity)
            if via is not None:
                message: Message = self.endpoint.decode(frames, via, self._vocabulary)
                if not isinstance(message.body, Hello | Durable | Close):
                    place = self._places[via]
                    self._places[via] = place._replace(expected=which(place.expected, message.seq))
            heard(self, identity, frames)

        return planted

    return change


def _says_durable_too_early(checkpointed: Wrapped) -> Wrapped:
    # Two rounds: one is what the checkpoint before the last one is kept for.
    return lambda self, rounds_done: checkpointed(self, rounds_done + 2)


def _resends_too_late(go_on: Wrapped) -> Wrapped:
    def planted(self: ZmqLink, edge: Any, place: Place) -> None:
        go_on(self, edge, place._replace(expected=place.expected + (place.expected > 0)))

    return planted


def _closes_before_durable(begin_closing: Wrapped) -> Wrapped:
    return lambda self, leaving: begin_closing(self, "failed" if leaving == "finished" else leaving)


def _keeps_nothing_on_disk(state_dict: Wrapped) -> Wrapped:
    def planted(self: Endpoint) -> dict[str, Any]:
        kept, self.sent = self.sent, {to: Sent(self._sequence[to]) for to in self.neighbors}
        try:
            state: dict[str, Any] = state_dict(self)
        finally:
            self.sent = kept
        return state

    return planted


def _expects_from_the_start(start: Wrapped) -> Wrapped:
    async def planted(self: ZmqLink) -> None:
        heard = self.endpoint.heard
        self.endpoint.heard = dict.fromkeys(heard, START)
        await start(self)
        self.endpoint.heard = heard

    return planted


def _remembers_too_much(mark: Wrapped) -> Wrapped:
    def planted(self: Endpoint, t: int) -> None:
        mark(self, t)
        for sender, arrived in self._arrived.items():
            if arrived:
                self.heard[sender] = Place(arrived[-1][0] + 1, arrived[-1][1])

    return planted


def _says_durable_before_it_is(save: Wrapped) -> Wrapped:
    def planted(self: Session, *, final: bool = False) -> None:
        if self._saved is not None:
            self.endpoint.link.checkpointed(self._saved["rounds_done"])
        save(self, final=final)

    return planted


def _stays_gone(regained: Wrapped) -> Wrapped:
    return lambda self, sender: None


def _never_catches_up(next_round: Wrapped) -> Wrapped:
    return lambda self, t: t


def _forgets_the_stop(note_stop: Wrapped) -> Wrapped:
    def planted(self: Endpoint, message: Message) -> None:
        if message.seq % 3:
            note_stop(self, message)

    return planted


def _drops_at_full_queue(handed_over: Wrapped) -> Wrapped:
    def planted(self: ZmqLink, to: int) -> None:
        if self._room[to] > 0 or self.transport.queue > 2:
            handed_over(self, to)

    return planted


PLANTS: Mapping[str, Plant] = {
    "duplicates": Plant("what a receiver has it takes again", ZmqLink, "_heard", _expects(min)),
    "gaps": Plant("what came before may be missing", ZmqLink, "_heard", _expects(max)),
    "durable-early": Plant("DURABLE is said too early", ZmqLink, "checkpointed", _says_durable_too_early),
    "durable-before": Plant("DURABLE is said before it is true", Session, "_save", _says_durable_before_it_is),
    "resend-late": Plant("sending goes on one message too late", ZmqLink, "_go_on", _resends_too_late),
    "close-early": Plant("CLOSE before all is durable", ZmqLink, "_begin_closing", _closes_before_durable),
    "nothing-kept": Plant("checkpoints lack what was sent", Endpoint, "state_dict", _keeps_nothing_on_disk),
    "expects-all": Plant("who restarts expects number 0", ZmqLink, "start", _expects_from_the_start),
    "heard-ahead": Plant("messages of later rounds count as used", Endpoint, "_mark", _remembers_too_much),
    "room-lost": Plant("a full queue never empties", ZmqLink, "_handed_over", _drops_at_full_queue),
    "stop-missed": Plant("STOP is overlooked at times", Endpoint, "_note", _forgets_the_stop),
    "stays-gone": Plant("who comes back stays gone", Mailbox, "regained", _stays_gone),
    "never-catches-up": Plant("who comes back goes through all rounds", Endpoint, "next_round", _never_catches_up),
}
