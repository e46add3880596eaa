"""Fault injection: the run file's ``chaos`` section, and the events that a session reports to the injector.

Each peer injects its faults itself, triggered by its local rounds. The seed determines which rounds are hit. The
faults are real: signals, delayed messages, closed sockets (peers/faults.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from p2pfl import PeerId, rng
from p2pfl.options import Section


class RoundFault(Section):
    """A fault of a peer in one of its rounds."""

    peer: NonNegativeInt | None = None
    """Peer to hit; default: every peer."""
    round: NonNegativeInt | None = None
    """Round to hit; default: drawn at random for each peer."""
    times: PositiveInt = 1
    """Number of faults."""


class Kill(RoundFault):
    """SIGKILL at a random moment of the round."""

    restart: bool = True
    """Whether the launcher may start the peer again."""


class Pause(RoundFault):
    """SIGSTOP at a random moment of the round, and SIGCONT later."""

    seconds: PositiveFloat
    """Duration of the pause in seconds."""


class Straggler(Section):
    """A peer that computes more slowly."""

    peer: NonNegativeInt
    factor: float = Field(gt=1.0)
    """Each batch takes this factor times as long."""


class LinkFaults(Section):
    """Faults of every message, injected by the sender."""

    delay: NonNegativeFloat = Field(default=0.0, le=60.0)
    """Seconds of delay."""
    jitter: NonNegativeFloat = Field(default=0.0, le=60.0)
    """Maximum seconds of additional random delay; messages of an edge are not reordered."""
    loss: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Probability that the connection breaks at a message, or at a chunk (1 MiB) of a larger one, which is lost with
    all others in transit on it."""
    bandwidth: PositiveFloat | None = None
    """Bytes per second of each directed edge."""


class Partition(Section):
    """A network partition: edges between peers of different groups are cut. Each peer cuts its edges when it reaches
    the round."""

    groups: tuple[tuple[NonNegativeInt, ...], ...] = Field(min_length=2)
    """Sets of peers that can still reach each other. A peer in no group keeps its edges."""
    round: NonNegativeInt
    """The first round of the partition."""
    rounds: PositiveInt | None = None
    """Duration in rounds of each peer; or"""
    seconds: PositiveFloat | None = None
    """duration in seconds."""

    def cuts_off(self, me: PeerId) -> frozenset[PeerId]:
        """The peers that ``me`` cannot reach."""
        mine = next((group for group in self.groups if me in group), None)
        others = [group for group in self.groups if group is not mine] if mine is not None else []
        return frozenset(peer for group in others for peer in group)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, dict) else value


class Chaos(Section):
    """Injected faults. A list with one entry may be given without brackets."""

    kill: Annotated[tuple[Kill, ...], BeforeValidator(_as_list)] = ()
    pause: Annotated[tuple[Pause, ...], BeforeValidator(_as_list)] = ()
    straggler: Annotated[tuple[Straggler, ...], BeforeValidator(_as_list)] = ()
    link: LinkFaults = LinkFaults()
    partition: Annotated[tuple[Partition, ...], BeforeValidator(_as_list)] = ()
    seed: NonNegativeInt | None = None
    """Seed of the rounds and moments that are hit; default: the run's seed."""


@dataclass(frozen=True)
class PlannedFault:
    """One planned fault of a peer: in round ``t``, after the fraction ``moment`` of a typical round."""

    name: str
    """Unique among the faults of the peer."""
    what: Literal["kill", "pause"]
    t: int
    moment: float
    seconds: float = 0.0
    restart: bool = True


def planned_faults(chaos: Chaos, me: PeerId, rounds: int, seed: int) -> Iterator[PlannedFault]:
    """The planned faults of peer ``me``; equal arguments give equal faults."""
    seed = seed if chaos.seed is None else chaos.seed
    rules: list[tuple[Literal["kill", "pause"], Kill | Pause]] = [("kill", kill) for kill in chaos.kill]
    rules += [("pause", pause) for pause in chaos.pause]
    for number, (what, rule) in enumerate(rules):
        if rule.peer not in (None, me):
            continue
        stream = rng.shared(seed, f"chaos.{what}.{number}", me)
        drawn = stream.choice(rounds, size=rule.times, replace=rule.times > rounds)
        for count, t in enumerate(sorted(map(int, drawn))):
            yield PlannedFault(
                name=f"{what} {number}.{count}",
                what=what,
                t=t if rule.round is None else rule.round,
                moment=float(stream.random()),
                seconds=rule.seconds if isinstance(rule, Pause) else 0.0,
                restart=rule.restart if isinstance(rule, Kill) else True,
            )


class Faults:
    """The events that a session reports to its fault injector. This one injects nothing."""

    def begins(self, t: int) -> None:
        """Round ``t`` begins."""

    def ends(self, t: int) -> None:
        """Round ``t`` is over and recorded."""

    def wait_ended(self) -> None:
        """A wait for neighbors, or for a compute slot, is over."""

    def batch(self) -> None:
        """A training batch is done."""
