"""NewestMailbox: where rounds do not wait for one another, the newest bodies that have arrived.

    synchrony: {staleness: s}    round t takes of each source the newest body of rounds t − s to t + s; waits for one
    synchrony: none              round t takes the newest body, however old, and never waits

A body stays until no round can take it any more, so several rounds may take the same one. Where each body counts
(``Body.counts``), the next round takes all that have arrived, once; round t waits for those of round t − s.

Which ones a round takes depends on the order in which messages arrive. So each ``Take`` is recorded before anything
that depends on it is sent. A peer that restarts repeats the takes since its checkpoint, and computes the same bits
again; `p2pfl simulate --replay` repeats all takes of a run.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from p2pfl import PeerId
from p2pfl.messaging import wire
from p2pfl.messaging.directions import Begin
from p2pfl.messaging.mailbox import Key, Mailbox
from p2pfl.messaging.schema import tensors_of, with_tensors
from p2pfl.messaging.wire import Buffer, Message, Plan

NEXT = -1
"""In place of a round, in a wait: the next body that no round has taken."""
Place = tuple[str, PeerId]
"""Kind and sender."""


@dataclass(frozen=True)
class Take:
    """What round ``t`` took of one kind: by source, the rounds of the bodies, ascending."""

    t: int
    kind: str
    rounds: Mapping[PeerId, Sequence[int]]


class NewestMailbox(Mailbox):
    """The bodies that a round may still take.

    Args:
        senders: the neighbors.
        staleness: s; infinite for ``none``.
        once: the kinds whose bodies count once.
        record: called with each new take.
        on_lost: called with a take that cannot be repeated as it was, and the source whose body is lost: its sender
            no longer keeps it.
    """

    keeps = True

    def __init__(
        self,
        senders: Iterable[PeerId],
        staleness: float,
        once: Collection[str] = (),
        record: Callable[[Take], None] = lambda take: None,
        on_lost: Callable[[Take, PeerId], None] = lambda take, sender: None,
    ) -> None:
        super().__init__(senders)
        self.staleness = staleness
        self.waits = staleness < math.inf
        self._once = once
        self._record = record
        self._on_lost = on_lost
        self._held: dict[Place, dict[int, Message]] = {}
        """By round."""
        self._arrived: dict[Place, int] = {}
        """The round of the newest body, of kinds that count once."""
        self._named: defaultdict[Place, set[int]] = defaultdict(set)
        """The rounds of the bodies that takes to repeat name, of kinds that count once. Up to the newest of them, no
        other one has ever arrived: its sender had replaced it."""
        self._repeated: dict[tuple[int, str], Take] = {}
        """Takes to repeat, by round and kind."""
        self._uses: defaultdict[Place, Counter[int]] = defaultdict(Counter)
        """How often these take which body: it stays, whatever supersedes it."""
        self._needed: dict[int, Mapping[PeerId, int]] = {}
        """By the number of rounds of a state: the first round of each sender of whose messages it lacks some."""
        self._uncounted: set[tuple[Place, int]] = set()
        """Bodies that count as taken only after these takes: otherwise, all of them could be in memory at once."""

    def repeat(self, takes: Iterable[Take]) -> None:
        """Repeat takes of an earlier process, or of another run; called before the first message arrives."""
        self._repeated = {(take.t, take.kind): take for take in takes}  # of two, the first could not be repeated
        for take in self._repeated.values():
            self._note_used(take)
            for sender, rounds in take.rounds.items():
                places: Mapping[Place, Any] = self._uses if self.retakes(take.kind) else self._named
                places[take.kind, sender].update(rounds)

    def _note_used(self, take: Take) -> None:
        for sender, rounds in take.rounds.items():
            self.used[sender] = max(self.used.get(sender, 0), *(r + 1 for r in rounds), 0)

    # ---- what arrives

    def put(self, message: Message) -> None:
        """Add a message, and discard what it supersedes; discard the message itself if it is not new."""
        place = message.kind, message.sender
        held = self._held.setdefault(place, {})
        if not self.retakes(message.kind):
            self._put_once(message, place)
        else:
            if self._uses[place][message.t] and message.t not in held:
                self._uncounted.add((place, message.t))
            else:
                self.taken_bytes[message.sender] += message.cost
            held.setdefault(message.t, message)
            self._supersede(place)
        self.advance_sender(message.sender, message.t)

    def _put_once(self, message: Message, place: Place) -> None:
        """Add a message, unless it is read again, or had not arrived when later ones were taken that are repeated."""
        new, named = message.t > self._arrived.get(place, NEXT), self._named[place]
        if new:
            self._arrived[place] = message.t
        if new and (message.t in named or message.t > max(named, default=NEXT)):
            self._held[place][message.t] = message
        else:
            self.taken_bytes[message.sender] += message.cost

    def retakes(self, kind: str) -> bool:
        return kind not in self._once

    def _supersede(self, place: Place) -> None:
        """Discard the bodies that no round can take any more."""
        held, uses = self._held[place], self._uses[place]
        newest = max((t for t in held if t <= self._round + self.staleness), default=0)
        for t in sorted(held):
            if t < newest and not uses[t]:
                self.on_discard(held.pop(t))

    def begin(self, t: int) -> None:
        self._round = t
        for place in self._held:
            if self.retakes(place[0]):
                self._supersede(place)

    def nothing(self, sender: PeerId, t: int) -> None:
        """Do nothing: an earlier body of the sender stands."""

    @property
    def unread(self) -> int:
        return len(self._uncounted) + sum(
            len(held) for (kind, _), held in self._held.items() if not self.retakes(kind)
        )

    # ---- takes

    def __contains__(self, key: Key) -> bool:
        t, kind, sender = key
        if kind == Begin.kind():
            return super().__contains__(key)
        held, wanted = self._held.get((kind, sender), {}), self._wanted(kind, sender)
        if wanted is not None:
            return held.keys() >= set(wanted)
        if self.retakes(kind):
            return not self.waits or bool(self._choice(kind, sender))
        return bool(held) if t == NEXT else self._arrived.get((kind, sender), NEXT) >= t

    def repeats(self, kind: str) -> Collection[PeerId]:
        take = self._repeated.get((self._round, kind))
        return () if take is None else [sender for sender, rounds in take.rounds.items() if rounds]

    def _wanted(self, kind: str, sender: PeerId) -> Sequence[int] | None:
        """Return the rounds of the bodies that a take to repeat names; None if the take will be a new one."""
        take = self._repeated.get((self._round, kind))
        return None if take is None else take.rounds.get(sender, ())

    def _choice(self, kind: str, sender: PeerId, *, any_round: bool = False) -> Sequence[int]:
        """Return the rounds of the bodies that a new take chooses."""
        s, t, held = self.staleness, self._round, self._held.get((kind, sender), {})
        if not self.retakes(kind):
            return sorted(r for r in held if any_round or r <= t + s)
        return sorted(r for r in held if t - s <= r <= t + s)[-1:]

    def _impossible(self, key: Key, addressed: bool) -> bool:
        t, kind, sender = key
        if kind == Begin.kind() or self.is_disconnected(sender):
            return super()._impossible(key, addressed)
        if (wanted := self._wanted(kind, sender)) is not None:
            return max(wanted, default=t) < self.sender_round(sender)
        return t != NEXT and t + (self.staleness if self.retakes(kind) else 0) < self.sender_round(sender)

    def take_all(
        self, kind: str, senders: Sequence[PeerId], t: int, *, any_round: bool = False
    ) -> dict[PeerId, list[Message]]:
        """Return what round ``t`` takes of each sender: copies, if later rounds may take the same."""
        repeated = self._repeated.pop((t, kind), None)
        rounds = {} if repeated is None else {sender: repeated.rounds.get(sender, ()) for sender in senders}
        lost = [s for s, each in rounds.items() if not self._held.get((kind, s), {}).keys() >= set(each)]
        for sender in senders if repeated is None else lost:
            rounds[sender] = self._choice(kind, sender, any_round=any_round)
        take = Take(t, kind, rounds)
        if repeated is None or lost:
            self._note_used(take)
            self._record(take)
        for sender in lost:
            self._on_lost(take, sender)
        taken = {s: [self._taken((kind, s), r) for r in each] for s, each in rounds.items() if each}
        if repeated is not None and self.retakes(kind):
            for sender, each in repeated.rounds.items():
                for r in each:
                    self._repeated_once((kind, sender), r)
        return taken

    def _taken(self, place: Place, r: int) -> Message:
        if self.retakes(place[0]):
            return _copy(self._held[place][r])
        message = self._held[place].pop(r)
        self.taken_bytes[message.sender] += message.cost
        return message

    def _repeated_once(self, place: Place, r: int) -> None:
        uses = self._uses[place]
        uses[r] -= 1
        if not uses[r] and (place, r) in self._uncounted:
            self._uncounted.discard((place, r))
            self.taken_bytes[place[1]] += self._held[place][r].cost
            self._supersede(place)

    # ---- checkpoints

    def first_read(self, sender: PeerId, t: int) -> int:
        # More messages of its last round may follow, unless it has finished.
        return max(0, self.sender_round(sender) + (sender in self._finished))

    def needed_after(self, done: int) -> Mapping[PeerId, int]:
        self._needed = {state: needed for state, needed in self._needed.items() if state >= done}
        return self._needed.get(done, dict.fromkeys(self.taken_bytes, 0))

    def state_dict(self, done: int) -> dict[str, Any]:
        self._note_needed(done)
        held = [
            [message.sender, message.t, wire.encode(message.body).header, message.stored]
            for place in sorted(self._held)
            for _, message in sorted(self._held[place].items())
        ]
        arrived = [[*place, t] for place, t in sorted(self._arrived.items())]
        finished = sorted(self._finished)
        return {"held": held, "arrived": arrived, "rounds": dict(self._sender_round), "finished": finished}

    def _note_needed(self, done: int) -> None:
        """Note what a state of this moment lacks."""
        self._needed[done] = {sender: self.first_read(sender, done) for sender in self.taken_bytes}

    def load_state_dict(self, state: Mapping[str, Any], check: Callable[[Buffer], Plan], done: int) -> None:
        for sender, t, header, stored in state["held"]:
            message = check(header).message(t, sender, None if stored is None else stored.clone())
            self._held.setdefault((message.kind, sender), {})[t] = message
            if not self.retakes(message.kind):
                self.taken_bytes[sender] -= message.cost  # when it is taken: this process has not read it
        self._arrived.update({(kind, sender): t for kind, sender, t in state["arrived"]})
        self._sender_round.update(state["rounds"])
        self._finished.update(state["finished"])
        self._disconnected.update(state["finished"])  # by now it may have left for good
        self._note_needed(done)


def _copy(message: Message) -> Message:
    tensors = {path: tensor.clone() for path, tensor in tensors_of(message.body).items()}
    return replace(message, body=with_tensors(message.body, tensors))
