"""Faults on purpose: the run file's ``chaos`` section, and what a session reports to whoever injects them.

Each peer injects its own faults, by its own rounds; nobody has to watch it. Which rounds are hit follows from the
seed. What is injected is real: signals, held back messages, closed sockets (peers/faults.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

from pydantic import BeforeValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from p2pfl import rng
from p2pfl.options import Section
from p2pfl.runfolder import PeerId


class Strike(Section):
    """Something that happens to a peer in a round."""

    peer: NonNegativeInt | None = None
    """Which one; default: each."""
    round: NonNegativeInt | None = None
    """In which of its rounds; default: in one drawn at random, for each peer another."""
    times: PositiveInt = 1
    """How often."""


class Kill(Strike):
    """SIGKILL at a random moment of the round."""

    restart: bool = True
    """Whether the launcher may start the peer again."""


class Pause(Strike):
    """SIGSTOP at a random moment of the round, and SIGCONT later."""

    seconds: PositiveFloat
    """How long the process stands still."""


class Straggler(Section):
    """A peer that computes more slowly."""

    peer: NonNegativeInt
    factor: float = Field(gt=1.0)
    """Each batch takes so many times as long."""


class LinkFaults(Section):
    """What happens to every message, on the sender's side."""

    delay: NonNegativeFloat = Field(default=0.0, le=60.0)
    """Seconds by which it comes later."""
    jitter: NonNegativeFloat = Field(default=0.0, le=60.0)
    """Seconds of a further random delay, at most; the order on an edge stays."""
    loss: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Probability that the connection breaks at this message, which is lost with all that is under way on it."""
    bandwidth: PositiveFloat | None = None
    """Bytes per second of each directed edge."""


class Partition(Section):
    """Some edges carry nothing for a while: those between peers of different groups. Each peer cuts its own when it
    comes to the round."""

    groups: tuple[tuple[NonNegativeInt, ...], ...] = Field(min_length=2)
    """Peers that still reach each other. A peer in no group keeps its edges."""
    round: NonNegativeInt
    """The first round of the partition."""
    rounds: PositiveInt | None = None
    """How many of its rounds each peer stays cut off; or"""
    seconds: PositiveFloat | None = None
    """for how long."""

    def cuts_off(self, me: PeerId) -> frozenset[PeerId]:
        """The peers that ``me`` does not reach."""
        mine = next((group for group in self.groups if me in group), None)
        others = [group for group in self.groups if group is not mine] if mine is not None else []
        return frozenset(peer for group in others for peer in group)


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, dict) else value


class Chaos(Section):
    """Faults on purpose. Lists with one entry may be given without the brackets."""

    kill: Annotated[tuple[Kill, ...], BeforeValidator(_listed)] = ()
    pause: Annotated[tuple[Pause, ...], BeforeValidator(_listed)] = ()
    straggler: Annotated[tuple[Straggler, ...], BeforeValidator(_listed)] = ()
    link: LinkFaults = LinkFaults()
    partition: Annotated[tuple[Partition, ...], BeforeValidator(_listed)] = ()
    seed: NonNegativeInt | None = None
    """Of the rounds and moments that are hit; default: the run's."""


@dataclass(frozen=True)
class Blow:
    """One fault that will hit this peer, in its round ``t``, when the share ``moment`` of a typical round is over."""

    name: str
    """Tells it from the others of this peer."""
    what: Literal["kill", "pause"]
    t: int
    moment: float
    seconds: float = 0.0
    restart: bool = True


def blows(chaos: Chaos, me: PeerId, rounds: int, seed: int) -> Iterator[Blow]:
    """All that will hit peer ``me``; the same each time it is asked for."""
    seed = seed if chaos.seed is None else chaos.seed
    strikes: list[tuple[Literal["kill", "pause"], Kill | Pause]] = [("kill", kill) for kill in chaos.kill]
    strikes += [("pause", pause) for pause in chaos.pause]
    for number, (what, strike) in enumerate(strikes):
        if strike.peer not in (None, me):
            continue
        stream = rng.shared(seed, f"chaos.{what}.{number}", me)
        drawn = stream.choice(rounds, size=strike.times, replace=strike.times > rounds)
        for count, t in enumerate(sorted(map(int, drawn))):
            yield Blow(
                name=f"{what} {number}.{count}",
                what=what,
                t=t if strike.round is None else strike.round,
                moment=float(stream.random()),
                seconds=strike.seconds if isinstance(strike, Pause) else 0.0,
                restart=strike.restart if isinstance(strike, Kill) else True,
            )


class Faults(Protocol):
    """Whoever injects faults into a session hears from it."""

    def begins(self, t: int) -> None:
        """Round ``t`` begins."""

    def ends(self, t: int) -> None:
        """Round ``t`` is over and written down."""

    def goes_on(self) -> None:
        """A wait for neighbours, or for a compute slot, is over."""

    def batch(self) -> None:
        """A batch has been learned from."""


class NoFaults:
    def begins(self, t: int) -> None:
        return

    def ends(self, t: int) -> None:
        return

    def goes_on(self) -> None:
        return

    def batch(self) -> None:
        return
