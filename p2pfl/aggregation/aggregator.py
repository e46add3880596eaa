"""Apply a run's aggregation rule to what a peer and its neighbors have sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from p2pfl import PeerId
from p2pfl.aggregation.distances import Distances
from p2pfl.aggregation.mean import Mean
from p2pfl.aggregation.rule import Contributions, Rule
from p2pfl.messaging.schema import Body
from p2pfl.tensors import Tensors, clone, equal, fractions, has_diverged


class Aggregator:
    """Combines received tensors with the peer's own, everywhere where a method averages.

    Not in ``Net.allreduce``, whose sums are formed on the way along a tree: no peer sees what the others have sent.

    Args:
        loss: as ``Contributions.loss``.
        measures: measure for the records how far what neighbors send is from the peer's own, and what is taken of it.

    Attributes:
        t: the current round.
        ages: of the bodies that the round has taken so far, by kind and sender, as ``Contributions.ages``.
        distances: those of the current round; None if they are not measured.
    """

    def __init__(
        self,
        rule: Rule,
        me: PeerId,
        rounds: int,
        loss: Callable[[Tensors], float] | None = None,
        *,
        measures: bool = False,
    ) -> None:
        self.rule = rule
        self.me = me
        self.rounds = rounds
        self.loss = loss
        self.t = 0
        self.ages: Mapping[str, Mapping[PeerId, int]] = {}
        self.distances = Distances() if measures else None
        self._states: dict[str, dict[str, Any]] = {}
        """What the rule keeps, by what it combines, and the last results if it needs them."""

    @property
    def is_mean(self) -> bool:
        """Whether the rule is the mean, which a method may compute by its paper's formula: that rounds otherwise."""
        return type(self.rule) is Mean

    def combine(
        self,
        bodies: Mapping[PeerId, Body],
        weights: Mapping[PeerId, float] | None = None,
        out: Tensors | None = None,
        *,
        part: str = "values",
        step: Tensors | None = None,
        of: str = "",
    ) -> Tensors:
        """Combine the tensors of several bodies of one kind; the mean is Σ_j w_j x_j.

        Args:
            bodies: by sender, with the peer's own if that takes part.
            weights: of the senders, which sum to 1; default: equal ones.
            out: receives the result, for the names in it; may be this peer's own tensors. Default: new tensors.
            part: the field of the bodies that holds the tensors.
            step: added to the result before it is rounded.
            of: tells combinations of the same kind of body apart that a peer makes in one round.
        """
        found = {j: getattr(bodies[j], part) for j in sorted(bodies)}
        first = next(iter(found))
        names = (found[first] if out is None else out).keys()
        tensors = {j: x if x.keys() == names else {name: x[name] for name in names} for j, x in found.items()}
        return self.combine_tensors(type(bodies[first]), tensors, weights, out, step=step, of=of)

    @torch.no_grad()
    def combine_tensors(
        self,
        kind: type[Body],
        tensors: Mapping[PeerId, Tensors],
        weights: Mapping[PeerId, float] | None = None,
        out: Tensors | None = None,
        *,
        step: Tensors | None = None,
        of: str = "",
    ) -> Tensors:
        """Combine parts of bodies, as ``combine`` does."""
        weights = equal(tensors) if weights is None else weights
        if abs((total := sum(weights[j] for j in tensors)) - 1.0) > 1e-6:  # not if one is NaN
            raise ValueError(f"combine: weights must sum to 1, not to {total:g}; see p2pfl.tensors.fractions")
        own = tensors.get(self.me, out)
        if own is out and own is not None and not self.is_mean and any(map(has_diverged, own.values())):
            own = None
        key = f"{kind.kind()} {of}"
        state, last = self._states.get(key, {}), self._states.get(f"{key}, last")
        if last is not None and any(last[name].shape != x.shape for name, x in next(iter(tensors.values())).items()):
            last = None  # slices of models that differ from round to round
        ages = self.ages.get(kind.kind(), {})
        given = Contributions(
            tensors, weights, self.me, own, kind.kind(), self.t, self.rounds, state, self.loss, last, ages
        )
        if self.distances is not None and own is not None:
            self.distances.measure(given.kind, tensors, self.me, own)
        transformed = self.rule.transform(given)
        combined = self.rule.combine(transformed, out, step)
        if self.distances is not None:
            left = {j for j in transformed.tensors if transformed.weights[j] > 0}
            taken = {j: given.taken.get(j, 1.0) if j in left else 0.0 for j in tensors}
            self.distances.note(given.kind, taken, sum(x.numel() for x in combined.values()))
        if state:
            self._states[key] = state
        if self.rule.needs_last:
            self._states[f"{key}, last"] = clone(combined)
        return combined

    def combine_rows(
        self, kind: type[Body], rows: Iterable[tuple[int, PeerId, Tensor, float]], out: Tensor
    ) -> Tensor:
        """Combine the rows of tables one by one, each over the peers that have it: prototypes by class.

        Args:
            rows: (number of the row, sender, float [d], weight), with any scale of the weights; not if that is 0.
            out: float [K, d]; receives the rows, and keeps its values in rows that no sender has.
        """
        for k, found in _by_row(rows).items():
            tensors = {j: {"row": row.to(out.device)} for j, (row, _) in found.items()}
            weights = fractions({j: weight for j, (_, weight) in found.items()})
            out[k] = self.combine_tensors(kind, tensors, weights, of=f"row {k}")["row"]
        return out

    def measure_rows(self, kind: type[Body], rows: Iterable[tuple[int, PeerId, Tensor, float]]) -> None:
        """Measure the distances of rows that a method combines by its paper's formula for the mean."""
        if self.distances is not None:
            for found in _by_row(rows).values():
                if self.me in found:
                    tensors = {j: {"row": row} for j, (row, _) in found.items()}
                    self.distances.measure(kind.kind(), tensors, self.me, tensors[self.me])

    def measured(self) -> dict[str, dict[PeerId, tuple[float, float]]]:
        """Return the distances of the round by kind and neighbor, and the fractions that were taken; only once."""
        return {} if self.distances is None else self.distances.drain()

    # ---- state

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return what the rule keeps from round to round; empty if it keeps nothing."""
        return self._states

    def load_state_dict(self, state: Mapping[str, dict[str, Any]]) -> None:
        self._states = dict(state)


def _by_row(
    rows: Iterable[tuple[int, PeerId, Tensor, float]],
) -> dict[int, dict[PeerId, tuple[Tensor, float]]]:
    """Return row and weight by number of the row and sender, both ascending, of those with a weight."""
    found: dict[int, dict[PeerId, tuple[Tensor, float]]] = {}
    for k, sender, row, weight in rows:
        if weight > 0:
            found.setdefault(k, {})[sender] = row, weight
    return {k: dict(sorted(found[k].items())) for k in sorted(found)}
