"""What an aggregation rule is given, and what it does.

A rule transforms the contributions, then combines them. One that clips or selects only transforms: what is left is
averaged, unless another rule follows (rule_list.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch import Tensor

from p2pfl import PeerId
from p2pfl.linear.combinations import terms_of
from p2pfl.options import Options
from p2pfl.registry import Table, options_decorator
from p2pfl.tensors import Tensors, equal, fractions, weighted_sum, widened


@dataclass(frozen=True)
class Contributions:
    """Tensors of several peers that one peer combines. A rule does not modify them."""

    tensors: Mapping[PeerId, Tensors]
    """By sender, ascending, all with the same names. Those of models on disk are read one by one."""
    weights: Mapping[PeerId, float]
    """Of these senders; they sum to 1."""
    me: PeerId
    own: Tensors | None
    """This peer's, whether or not it is among the senders; None if it has nothing of the kind, or that diverged."""
    kind: str
    """Kind of the messages."""
    t: int
    """The current round."""
    rounds: int
    """Number of rounds of the run."""
    state: dict[str, Any] = field(default_factory=dict)
    """What the rule keeps from round to round, in checkpoints too: tensors and plain values. Initially empty."""
    loss: Callable[[Tensors], float] | None = None
    """Returns the mean loss of a sender's model on one of this peer's batches, the same for all senders of a round;
    None if the method does not send whole models (``Rule.needs_loss``)."""
    last: Tensors | None = None
    """What this peer's last combination of the same kind returned; None in the first round, and unless the rule asks
    for it (``Rule.needs_last``)."""
    ages: Mapping[PeerId, int] = field(default_factory=dict)
    """Of the messages by sender, in rounds; negative if the sender is ahead, and 0 if it is not listed. All are 0
    unless the run file has a ``synchrony``."""
    taken: dict[PeerId, float] = field(default_factory=dict)
    """For the records, senders whose tensors are not taken as they are: the factor by which a rule clips them, or 0
    if ``combine`` leaves them out. Those that ``transform`` leaves out need not be noted. All that is made from these
    contributions shares it."""

    def only(self, senders: Collection[PeerId]) -> Contributions:
        """Return the contributions of some senders, with weights scaled to sum to 1; equal ones if all are 0."""
        chosen = {j: tensors for j, tensors in self.tensors.items() if j in senders}
        weights = {j: self.weights[j] for j in chosen}
        return replace(self, tensors=chosen, weights=fractions(weights if any(weights.values()) else equal(chosen)))

    def equally(self, senders: Collection[PeerId]) -> Contributions:
        """Return the contributions of some senders with equal weights: a weight may be what an attacker claims."""
        chosen = {j: tensors for j, tensors in self.tensors.items() if j in senders}
        return replace(self, tensors=chosen, weights=equal(chosen))


class Rule(Options):
    """Base of all rules, and the weighted mean. The fields of a subclass are its parameters."""

    weighted: ClassVar[bool] = True
    """Whether the result depends on the weights: methods that learn weights refuse rules that ignore them."""
    needs_loss: ClassVar[bool] = False
    """Whether it calls ``given.loss``: methods that do not send whole models refuse it."""
    needs_last: ClassVar[bool] = False
    """Whether it reads ``given.last``, of which a copy is kept from round to round."""
    needs_ages: ClassVar[bool] = False
    """Whether it reads ``given.ages``: refused where rounds wait for one another, as all are 0."""
    only_weighs: ClassVar[bool] = False
    """Whether it changes weights alone: no rule that ignores weights may follow in a list."""

    @property
    def screening(self) -> Screening | None:
        """The rule that screens models before they are sent, if any: methods that do not exchange whole models, to
        average them and no more, refuse it."""
        return None

    def tolerates(self, n: int) -> int:
        """Return the largest number of attackers among ``n`` contributions that the rule can be set to withstand.

        Set to it, so many attackers cannot move the result arbitrarily far, nor to infinity or NaN: its breakdown
        point, but never half of the contributions, nor more than the proof of its paper covers. Default: 0, as one
        attacker can move the mean anywhere.

        Args:
            n: the peer's own contribution included, which is honest.
        """
        return 0

    def withstands(self, n: int) -> int:
        """Return how many attackers among ``n`` contributions the rule withstands as it is set. Default: the most."""
        return self.tolerates(n)

    def assumed(self, n: int) -> dict[str, int]:
        """Return the parameters that follow from the number of contributions, for the log. Default: none do."""
        return {}

    def refusal(self, n: int) -> str | None:
        """Return why the rule cannot do what its parameters ask for with ``n`` contributions, without a subject, and
        what to do; None if it can."""
        return None

    def transform(self, given: Contributions) -> Contributions:
        """Return the contributions clipped, selected or weighted anew. Default: as they are."""
        return given

    def combine(self, given: Contributions, out: Tensors | None = None, step: Tensors | None = None) -> Tensors:
        """Return Σ_j w_j x_j + ``step``, rounded once.

        Args:
            out: receives the result; may be among the contributions. Default: new tensors.
        """
        terms = terms_of([(given.weights[j], tensors) for j, tensors in given.tensors.items()])
        return weighted_sum(terms if step is None else [*terms, (1.0, step)], out)


AGGREGATIONS: Table[type[Rule]] = Table("aggregation")
aggregation = options_decorator(AGGREGATIONS, Rule)


class PerTensor(Rule):
    """Base of rules that replace the mean by a function of one tensor of each peer.

    So at most one tensor of each peer is stacked at a time. A rule that needs whole models at once overrides
    ``combine``, and says so.
    """

    required: ClassVar[tuple[str, ...]] = ("combine_tensor",)
    """The methods that a subclass must define."""

    def combine_tensor(self, tensors: Sequence[Tensor], given: Contributions) -> Tensor:
        """Return the combination of tensors of equal shape, at least float32, in the order of ``given.tensors``."""
        raise NotImplementedError

    def combine(self, given: Contributions, out: Tensors | None = None, step: Tensors | None = None) -> Tensors:
        models = list(given.tensors.values())
        combined: dict[str, Tensor] = {}
        for name, first in models[0].items():
            result = self.combine_tensor([widened(model[name].to(first.device)) for model in models], given)
            if step is not None:
                result = result + step[name].to(result)
            combined[name] = result.to(first.dtype) if out is None else out[name].copy_(result)
        return combined if out is None else out


class Screening(Rule):
    """Base of rules that screen neighbors: peers send sketches first, and then their models to those that want them.

    ``transform`` and ``combine`` are given what was fetched.
    """

    required: ClassVar[tuple[str, ...]] = ("sketch", "accepted")
    """The methods that a subclass must define."""

    size: int
    """Numbers in a sketch."""

    @property
    def screening(self) -> Screening:
        return self

    def sketch(self, tensors: Tensors, seed: int) -> Tensor:
        """Return the sketch of a model, float32 [size] on the CPU: the same bits on all peers.

        Args:
            tensors: the model, with tensors of any device, in any order.
            seed: the run's.
        """
        raise NotImplementedError

    def accepted(self, center: Tensor, sketches: Mapping[PeerId, Tensor], t: int, rounds: int) -> list[PeerId]:
        """Return the neighbors whose models this peer wants.

        Args:
            center: the sketch of the peer's own model, or of what stands for it.
            sketches: of its neighbors, ascending.
            t: the current round.
            rounds: number of rounds of the run.
        """
        raise NotImplementedError
