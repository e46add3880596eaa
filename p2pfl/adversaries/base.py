"""Base classes of all attacks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np
from torch import Tensor

from p2pfl import PeerId
from p2pfl.data.loaders import Inputs, Labels
from p2pfl.inputs import Size
from p2pfl.messaging.neighborhood import Neighborhood
from p2pfl.messaging.schema import Body, Layout, TensorPath
from p2pfl.options import Options
from p2pfl.registry import Table, options_decorator
from p2pfl.tensors import Tensors


class Combine(Protocol):
    """Returns what a rule makes of the tensors of several senders, which all have the same names."""

    def __call__(self, tensors: Mapping[PeerId, Tensors], me: PeerId, kind: str, t: int) -> Tensors: ...


@dataclass(frozen=True)
class Attacker:
    """The peer that attacks.

    Attributes:
        place: this peer in the graph of each round.
        adversaries: all peers of the run that attack, this one included.
        layouts: what this peer accepts of others, which accept the same.
        memory: what the attack remembers from round to round, tensors and plain values by name; part of the
            checkpoint.
        before: what the tensors of the body were when the peer began to train, by path. Only for attacks with
            ``uses_before``, and only of tensors that belong to a model: others are updates, or computed anew.
        others: what honest neighbors send in place of this body, at the same point of the round, ascending. Only for
            attacks that are ``rushing``; empty where a method has no such point, or where none arrived.
        combine: applies the run's aggregation rule, with equal weights and without what it keeps from round to round.
    """

    place: Neighborhood
    adversaries: frozenset[PeerId]
    layouts: Sequence[Layout] = ()
    memory: dict[str, Any] = field(default_factory=dict)
    before: Mapping[TensorPath, Tensor] = field(default_factory=dict)
    others: Mapping[PeerId, Body] = field(default_factory=dict)
    combine: Combine | None = None

    @property
    def me(self) -> PeerId:
        return self.place.me

    @property
    def peers(self) -> int:
        """Number of peers of the run."""
        return self.place.peers

    def attackers_nearby(self, t: int) -> list[PeerId]:
        """Return the attackers among this peer and the neighbors that send to it in round ``t``, ascending."""
        return sorted(self.adversaries.intersection((self.me, *self.place.topology_at(t).sources[self.me])))


@dataclass(frozen=True)
class Adversary(Options, ABC):
    """An attack; its fields are its parameters in the run file.

    Random numbers come from torch's global generators, which hold the peer's stream meanwhile.
    """

    uses_before: ClassVar[bool] = False
    """Whether ``Attacker.before`` is needed: then the peer keeps a copy of its models."""
    rushing: ClassVar[bool] = False
    """Whether ``Attacker.others`` is needed: then the peer sends only when its honest neighbors have sent."""
    uses_rule: ClassVar[bool] = False
    """Whether ``Attacker.combine`` is called: rules that need a peer's data are refused."""
    trains: ClassVar[bool] = True
    """Whether the peer trains."""

    @abstractmethod
    def attack(self, body: Body, to: Sequence[PeerId], t: int, attacker: Attacker) -> Body | Mapping[PeerId, Body]:
        """Return what to send in place of ``body``, which must not be modified.

        Args:
            body: what the method sends.
            to: its receivers, ascending.
            t: the round.
            attacker: this peer.

        Returns:
            A body for all receivers, or one for each receiver; a receiver without one gets nothing. Receivers drop a
            body that the method's layouts do not accept, so this peer refuses to send it.
        """

    def changes(self, layout: Layout) -> bool:
        """Return whether the attack can change bodies with this layout."""
        return True

    def has_effect(self, layouts: Iterable[Layout]) -> bool:
        """Return whether the attack does anything where such bodies are sent. A run file with one that does not is
        refused."""
        return any(map(self.changes, layouts))


@dataclass(frozen=True)
class Poisoning(Adversary):
    """An attack on the peer's own training samples, when they are loaded; those for validation and tests stay true.

    What the peer sends is the truth about what it has learned. A subclass implements ``poison``, and ``check`` if not
    every dataset suits.
    """

    required: ClassVar[tuple[str, ...]] = ("poison",)
    """The methods that a subclass must define."""

    def poison(
        self, inputs: Inputs, labels: Labels, classes: int, draw: np.random.Generator
    ) -> tuple[Inputs, Labels]:
        """Return the samples that the peer learns from.

        Args:
            inputs: as they are stored, [N, …]; a copy, which may be modified.
            labels: int64 [N], in [0, classes); a copy too.
            classes: K, number of classes of the dataset.
            draw: the only source of random numbers, equal whenever the data are loaded.
        """
        raise NotImplementedError

    def check(self, classes: int, channels: int, size: Size) -> None:
        """Raise DataError if the attack does not suit a dataset with such inputs (p2pfl/inputs.py)."""

    def attack(self, body: Body, to: Sequence[PeerId], t: int, attacker: Attacker) -> Body:
        return body

    def has_effect(self, layouts: Iterable[Layout]) -> bool:
        return True


ADVERSARIES: Table[type[Adversary]] = Table("adversary")
adversary = options_decorator(ADVERSARIES, Adversary)
"""Registers a subclass of ``Adversary``."""
