"""A rule for rounds that do not wait for one another: the older a contribution, the less it counts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field

from p2pfl.aggregation.rule import Contributions, Rule, aggregation
from p2pfl.tensors import fractions, has_diverged


@aggregation("age-weighted")
@dataclass(frozen=True)
class AgeWeighted(Rule):
    """Multiply the weight of each neighbor by (1 + age)^(−power); the peer's own contribution gets the rest.

    The serverless form of FedAsync's polynomial staleness function. Cong Xie, Oluwasanmi Koyejo, Indranil Gupta:
    "Asynchronous Federated Optimization", OPT 2020. https://arxiv.org/abs/1903.03934
    With its power of 0.5, also that of FedBuff. John Nguyen, Kshitiz Malik, Hongyuan Zhan, Ashkan Yousefpour, Michael
    Rabbat, Mani Malek, Dzmitry Huba: "Federated Learning with Buffered Asynchronous Aggregation", AISTATS 2022.
    https://arxiv.org/abs/2106.06639

    x_i ← x_i + Σ_j s_j w_j (x_j − x_i),  s_j = (1 + max(0, age_j))^(−power)

    In both papers, what is taken off a stale update leaves the server's model as it is: here, the peer's own.
    """

    needs_ages = True
    only_weighs = True

    power: Annotated[float, Field(gt=0.0, le=10.0)] = 0.5
    """a: how fast weights fall with the age in rounds. A neighbor that is ahead has the age 0."""

    def transform(self, given: Contributions) -> Contributions:
        factors = {j: (1.0 + max(0, given.ages.get(j, 0))) ** -self.power for j in given.tensors}
        weights = {j: factors[j] * given.weights[j] for j in given.tensors}
        own = given.tensors.get(given.me, given.own)
        if own is None or (given.me not in given.tensors and any(map(has_diverged, own.values()))):
            return replace(given, weights=fractions(weights))
        given.taken.update({j: factor * given.taken.get(j, 1.0) for j, factor in factors.items()})
        rest = sum(given.weights[j] - weights[j] for j in given.tensors)
        weights[given.me] = weights.get(given.me, 0.0) + rest
        tensors = {**given.tensors, given.me: own}
        return replace(given, tensors={j: tensors[j] for j in sorted(tensors)}, weights=weights)
