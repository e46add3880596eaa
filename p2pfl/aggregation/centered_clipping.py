"""Rules that clip what differs from a center: from the last result, or from the peer's own contribution."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from p2pfl.aggregation.attackers import Expecting, minority
from p2pfl.aggregation.rule import Contributions, Rule, aggregation
from p2pfl.aggregation.vectors import center_of, clip_factor, distances, toward
from p2pfl.linear.combinations import terms_of
from p2pfl.tensors import Tensors, clone, equal, weighted_sum, widened


@aggregation("centered-clipping")
@dataclass(frozen=True)
class CenteredClipping(Rule):
    """Add the mean of the clipped differences from the last result to it.

    Sai Praneeth Karimireddy, Lie He, Martin Jaggi: "Learning from History for Byzantine Robust Optimization", ICML
    2021. https://arxiv.org/abs/2012.10333

    v ← v + 1/n Σ_j (x_j − v) · min(1, r / ‖x_j − v‖). It starts from the peer's own contribution, and from the
    coordinate-wise median without one; anew where the shapes have changed, as those of FedRolex's slices do.
    """

    weighted = False

    radius: PositiveFloat
    """r: how far a contribution can move the result in an iteration, times n."""
    iterations: PositiveInt = 1
    """Steps a round."""

    def tolerates(self, n: int) -> int:
        return minority(n)

    def combine(self, given: Contributions, out: Tensors | None = None, step: Tensors | None = None) -> Tensors:
        like = next(iter(given.tensors.values()))
        last: Tensors = given.state.get("center", {})
        if {name: x.shape for name, x in last.items()} != {name: x.shape for name, x in like.items()}:
            last = clone(center_of(given))
        v: Tensors = {name: widened(last[name].to(x.device)) for name, x in like.items()}
        for _ in range(self.iterations):
            kept, apart = distances(given, v)
            factors = {j: clip_factor(length, self.radius) for j, length in apart.items()}
            given.taken.update(dict.fromkeys(given.tensors, 0.0) | factors)
            clipped = toward(kept.tensors, v, factors)
            v = weighted_sum(terms_of([(weight, clipped[j]) for j, weight in equal(clipped).items()]), clone(v))
        given.state["center"] = v
        terms = [(1.0, v)] if step is None else [(1.0, v), (1.0, step)]
        if out is not None:
            return weighted_sum(terms, out)
        return {name: tensor.to(like[name].dtype) for name, tensor in weighted_sum(terms).items()}


@aggregation("self-centered-clipping")
@dataclass(frozen=True)
class SelfCenteredClipping(Expecting):
    """Clip the differences from the peer's own contribution: x_i + Σ_j W_ij clip(x_j − x_i, r_i).

    Lie He, Sai Praneeth Karimireddy, Martin Jaggi: "Byzantine-Robust Decentralized Learning via
    ClippedGossip", 2022. https://arxiv.org/abs/2202.01545

    W are the weights of the method. ``radius: auto`` is the theorem's: r_i² = 1/δ_i Σ_{j honest} W_ij ‖x_i − x_j‖²,
    where the n − f nearest contributions stand for the honest ones, and δ_i is the weight of the others.
    """

    radius: PositiveFloat | Literal["auto"] = "auto"
    """r_i: how far from its own a neighbor's contribution can be before it is clipped."""

    def transform(self, given: Contributions) -> Contributions:
        center = center_of(given)
        given, apart = distances(given, center)
        limit = self._limit(given, apart) if self.radius == "auto" else self.radius
        factors = {j: clip_factor(length, limit) for j, length in apart.items()}
        given.taken.update(factors)
        return replace(given, tensors=toward(given.tensors, center, factors))

    def _limit(self, given: Contributions, apart: dict[int, float]) -> float:
        ranked = sorted(apart, key=lambda j: (apart[j], j != given.me, j))
        honest = ranked[: len(ranked) - self.expected(len(ranked))]
        others = sum(given.weights[j] for j in ranked[len(honest) :])
        spread = sum(given.weights[j] * apart[j] ** 2 for j in honest)
        return float((spread / others) ** 0.5) if others > 0 else float("inf")
