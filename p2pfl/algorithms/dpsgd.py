"""D-PSGD: decentralized parallel stochastic gradient descent.

Xiangru Lian, Ce Zhang, Huan Zhang, Cho-Jui Hsieh, Wei Zhang, Ji Liu: "Can Decentralized Algorithms Outperform
Centralized Algorithms?", NeurIPS 2017. https://arxiv.org/abs/1705.09056

Algorithm 1, in round t on peer i:

    1  draw a batch and compute the gradient ∇F_i(x_i)
    2  x_i^{½} = Σ_j W_ij x_j            (exchanged with the neighbors)
    3  x_i ← x_i^{½} − η ∇F_i(x_i)

W are the Metropolis weights of the graph: symmetric and doubly stochastic, and each peer can compute its own row. If
the graph changes, every round t has a W(t).

Differs from the paper:

- ``local_steps`` > 1 adds the displacement of several local steps in line 3 instead of one gradient step.
- ``local_epochs``, or ``order: atc``, trains first and averages the trained models (adapt-then-combine).
- Each round draws batches from a new random permutation, so steps of different rounds sample with replacement.
- Batch-normalization statistics stay local. ``share_statistics: true`` averages them with the same weights; with
  ``local_steps``, the neighbors' from before their step and the local ones from after it.
- The weight of a neighbor that is missing or has diverged goes to the local model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from p2pfl import PeerId
from p2pfl.aggregation.aggregator import Aggregator
from p2pfl.algorithms.base import Algorithm
from p2pfl.algorithms.registration import algorithm
from p2pfl.algorithms.shared_model import StepsOrEpochs, shared_parameters, shared_statistics, shared_tensors
from p2pfl.messaging.net import Net
from p2pfl.messaging.schema import Body, Layout
from p2pfl.tensors import Tensors, displacement


@dataclass(frozen=True)
class Hyper(StepsOrEpochs):
    order: Literal["cta", "atc"] | None = None
    """cta, combine-then-adapt: what training changes is added to the average of the old models, as in Algorithm 1.
    atc, adapt-then-combine: the trained models are averaged. Default: cta with local_steps, atc with local_epochs."""

    @property
    def adapts_first(self) -> bool:
        """Whether the trained models are averaged."""
        return self.local_epochs is not None if self.order is None else self.order == "atc"


@dataclass(frozen=True)
class Parameters(Body):
    """x_j: all parameters of the model by name, float32, and its statistics if these are shared."""

    values: dict[str, Tensor]


def with_self_weight(row: Mapping[PeerId, float], me: PeerId) -> dict[PeerId, float]:
    """Return the row with W_ii, which makes it sum to 1, ascending."""
    complete = {**row, me: 1.0 - sum(row[j] for j in sorted(row))}
    return {j: complete[j] for j in sorted(complete)}


def average_neighborhood(
    aggregation: Aggregator,
    x: Tensors,
    received: Mapping[PeerId, Parameters],
    row: Mapping[PeerId, float],
    *,
    step: Tensors | None = None,
    out: Tensors | None = None,
    of: str = "parameters",
) -> None:
    """Line 2: x_i ← Σ_j W_ij x_j in ascending order of j, in place. Weights of missing neighbors go to x_i itself.

    Args:
        step: line 3: it is added to the sum.
        out: receives the sum in place of ``x``.
        of: what is averaged, as for ``Aggregator.combine``.
    """
    me = aggregation.me
    weights = with_self_weight({j: row[j] for j in received}, me)
    aggregation.combine({**received, me: Parameters(dict(x))}, weights, x if out is None else out, step=step, of=of)


@algorithm("dpsgd")
class DPSGD(Algorithm[Hyper]):
    """D-PSGD, Algorithm 1."""

    summary = "whole models are sent; averaged with the graph's Metropolis weights around one gradient step"
    title = "Can Decentralized Algorithms Outperform Centralized Algorithms?"
    authors = "Lian, Zhang, Zhang, Hsieh, Zhang, Liu"
    venue = "NeurIPS 2017"
    url = "https://arxiv.org/abs/1705.09056"
    Hyper = Hyper
    homogeneous = asynchronous = True
    screened = Parameters
    state = ("model", "optimizer", "row")

    def setup(self) -> None:
        self.optimizer = self.hyper.make_optimizer(self.model.parameters())
        self.row: dict[PeerId, float] = {}

    async def round(self, t: int, net: Net) -> None:
        self.row = net.mixing_weights
        x, statistics = shared_parameters(self.model, self.hyper), shared_statistics(self.model, self.hyper)
        if self.hyper.adapts_first:
            self.train(epochs=self.hyper.local_epochs, steps=self.hyper.steps, batch=self.hyper.batch)
            self.note_contribution(Parameters(x | statistics))
            received = await net.exchange(Parameters(x | statistics))
            average_neighborhood(self.aggregation, x | statistics, received, self.row)
        else:
            # While this peer trains, for line 2 of the neighbors.
            published = (await net.publish(Parameters(x | statistics))).values
            before = {name: published[name] for name in x}
            self.train(epochs=self.hyper.local_epochs, steps=self.hyper.steps, batch=self.hyper.batch)  # line 1
            self.note_contribution(Parameters(x | statistics))
            received = await net.gather(Parameters)
            step = displacement(x, before)
            average_neighborhood(self.aggregation, before, received, self.row, step=step, out=x)  # lines 2 and 3
            # On their own: a variance plus a step might be negative.
            average_neighborhood(self.aggregation, statistics, received, self.row, of="statistics")

    def layouts(self) -> Sequence[Layout]:
        return [Layout.of(Parameters(shared_tensors(self.model, self.hyper)))]

    def weights(self) -> Mapping[PeerId, float]:
        return with_self_weight(self.row, self.me)
