"""SWIFT: wait-free decentralized learning, which averages the models that have arrived.

Marco Bornstein, Tahseen Rabbani, Evan Wang, Amrit Singh Bedi, Furong Huang: "SWIFT: Rapid Decentralized Federated
Learning via Wait-Free Model Communication", ICLR 2023. https://arxiv.org/abs/2210.14026

Algorithm 1, on peer i with the counter c_i = t + 1 in round t:

    1  send x_i to all neighbors, which store the newest x_i that has arrived
    2  draw a batch and compute the gradient ∇F_i(x_i)
    3  x_i^{½} = Σ_j w_ij x_j over the stored models if s + 1 divides c_i (c_i ∈ C_s), otherwise x_i
    4  x_i ← x_i^{½} − γ ∇F_i(x_i)

So models are sent in every round, and averaged in every (s + 1)-th. Algorithm 2 (client-communication selection), in
descending order of the degrees d, with equal influence scores p_i = 1/n, finds symmetric w_ij = w_ji:

    a  i takes the w_ij that neighbors of larger degree have chosen, and divides the rest of 1 equally among itself
       and its other neighbors:   u_i = (1 − Σ_{d_j > d_i} w_ij) / (1 + |{j : d_j ≤ d_i}|)
    b  w_ij = min(u_i, u_j) if d_j = d_i,   u_i if d_j < d_i
    c  w_ii = 1 − Σ_j w_ij

With ``synchrony: none`` peers never wait, as in the paper. With rounds, each waits in every round for the models sent
in it.

Differs from the paper:

- Influence scores are equal, as in the authors' code.
- w_ij ≤ 1 / (1 + d_j) if d_j < d_i. Otherwise the weights of a peer with several neighbors of larger degree, which in
  turn have neighbors of still larger degrees, could sum to more than 1.
- The weights follow from the graph, which all peers know, and are not exchanged. If it changes, so do they.
- The weight of a neighbor from which nothing has arrived, or whose model has diverged, goes to the local model.
- ``local_steps`` > 1 or ``local_epochs`` adds the displacement of several local steps in line 4.
- Batch-normalization statistics stay local, or are averaged with ``share_statistics: true``, as in dpsgd.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

from pydantic import PositiveInt

from p2pfl import PeerId
from p2pfl.algorithms.base import Algorithm
from p2pfl.algorithms.dpsgd import Parameters, average_neighborhood, with_self_weight
from p2pfl.algorithms.registration import algorithm
from p2pfl.algorithms.shared_model import StepsOrEpochs, shared_parameters, shared_statistics, shared_tensors
from p2pfl.messaging.net import Net
from p2pfl.messaging.schema import Layout
from p2pfl.tensors import displacement


@dataclass(frozen=True)
class Hyper(StepsOrEpochs):
    average_every: PositiveInt = 1
    """s + 1, rounds from one average to the next: 1 is the paper's C_0, 2 its C_1."""


def communication_weights(me: PeerId, neighbors_of: Callable[[PeerId], Sequence[PeerId]]) -> dict[PeerId, float]:
    """Return w_ij of each neighbor j of peer i = ``me`` by Algorithm 2, ascending; they sum to less than 1."""

    @cache
    def degree(i: PeerId) -> int:
        return len(neighbors_of(i))

    @cache
    def u(i: PeerId) -> float:
        larger = [j for j in neighbors_of(i) if degree(j) > degree(i)]
        return (1.0 - sum(weight(i, j) for j in larger)) / (1 + degree(i) - len(larger))  # line a

    def weight(i: PeerId, j: PeerId) -> float:
        larger, smaller = sorted((i, j), key=degree, reverse=True)
        limit = u(smaller) if degree(i) == degree(j) else 1.0 / (1 + degree(smaller))
        return min(u(larger), limit)  # line b

    return {j: weight(me, j) for j in neighbors_of(me)}


@algorithm("swift")
class Swift(Algorithm[Hyper]):
    """SWIFT, Algorithms 1 and 2."""

    summary = "whole models are sent; the newest that have arrived are averaged around a step, or every few steps"
    title = "SWIFT: Rapid Decentralized Federated Learning via Wait-Free Model Communication"
    authors = "Bornstein, Rabbani, Wang, Bedi, Huang"
    venue = "ICLR 2023"
    url = "https://arxiv.org/abs/2210.14026"
    Hyper = Hyper
    homogeneous = asynchronous = True
    state = ("model", "optimizer", "row")

    def setup(self) -> None:
        self.optimizer = self.hyper.make_optimizer(self.model.parameters())
        self.row: dict[PeerId, float] = {}
        """w_ij of the last average."""

    async def round(self, t: int, net: Net) -> None:
        x, statistics = shared_parameters(self.model, self.hyper), shared_statistics(self.model, self.hyper)
        published = (await net.publish(Parameters(x | statistics))).values  # line 1
        before = {name: published[name] for name in x}
        self.train(epochs=self.hyper.local_epochs, steps=self.hyper.steps, batch=self.hyper.batch)  # line 2
        self.note_contribution(Parameters(x | statistics))
        received = await net.gather(Parameters)
        if (t + 1) % self.hyper.average_every == 0:
            self.row, step = communication_weights(self.me, partial(net.neighbors_of, t=t)), displacement(x, before)
            average_neighborhood(self.aggregation, before, received, self.row, step=step, out=x)  # lines 3 and 4
            # On their own: a variance plus a step might be negative.
            average_neighborhood(self.aggregation, statistics, received, self.row, of="statistics")

    def layouts(self) -> Sequence[Layout]:
        return [Layout.of(Parameters(shared_tensors(self.model, self.hyper)))]

    def weights(self) -> Mapping[PeerId, float]:
        return with_self_weight(self.row, self.me)
