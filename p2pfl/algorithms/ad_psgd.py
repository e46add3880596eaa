"""AD-PSGD: asynchronous decentralized parallel stochastic gradient descent.

Xiangru Lian, Wei Zhang, Ce Zhang, Ji Liu: "Asynchronous Decentralized Parallel Stochastic Gradient Descent", ICML
2018, Algorithm 1. https://arxiv.org/abs/1710.06952

Each peer i repeats, and none waits for the others to do so:

    1  draw a batch and compute the gradient ∇F_i(x_i)
    2  average with a random neighbor j, both at once:   x_i, x_j ← ½ (x_i + x_j)
    3  x_i ← x_i − η ∇F_i, with the gradient of line 1, although line 2 has changed x_i since

The graph is bipartite. In line 2, active peers, those of one side, send x_i to a neighbor j before line 1, and wait
for x_j after it. Passive peers, those of the other side, do line 1, and then answer the requests that have arrived,
one after the other: they send x_j, and average.

Nobody waits in a circle. With ``synchrony: none``, a passive peer waits for no one. With rounds, it waits in round t
for the requests of those that draw it in round t. These send them before they wait in round t; so if all peers get to
round t, all requests of it arrive, then all replies, and all peers get to round t + 1. With a staleness s, a passive
peer in round t waits for a request of round t − s, so for a peer in an earlier round r < t − s. If this one waits, it
is for a passive peer that has not answered its round r, and cannot be in a later round than r + s: there it would
wait for the request, which has been sent. As r + s < t, every chain of waits ends.

Differs from the paper:

- A passive peer answers once in a round, after its gradient, not at any time. Of several requests of one peer, it
  answers the last one: the others were given up at a deadline. If the reply misses one, only one of the two averages,
  and the next average of the active peer may be with that reply.
- A passive neighbor that has ended its last round answers no more; its active neighbors continue alone.
- ``local_steps`` > 1, or ``local_epochs``, add the displacement of several local steps in line 3.
- Batch-normalization statistics stay local. With ``share_statistics: true``, a peer averages its statistics after
  its step with those that the neighbor sent: an active neighbor sends them before its step, a passive one after.
- A peer whose model has diverged takes its neighbor's in place of the average, and its gradient is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from p2pfl import PeerId
from p2pfl.algorithms.base import Algorithm
from p2pfl.algorithms.gossip import drawn, senders_of
from p2pfl.algorithms.registration import algorithm
from p2pfl.algorithms.shared_model import StepsOrEpochs, shared_parameters, shared_statistics, shared_tensors
from p2pfl.messaging.net import Net
from p2pfl.messaging.schema import Body, Layout
from p2pfl.tensors import Tensors, clone, displacement, weighted_sum

PASSIVE = 1
"""A side of the graph (``Net.sides``): not the larger one, since only active peers begin to average."""


@dataclass(frozen=True)
class Hyper(StepsOrEpochs):
    pass


@dataclass(frozen=True)
class Request(Body):
    """x_i: all parameters of the model by name, float32, and its statistics if these are shared; {} if diverged."""

    counts = "arrived"

    values: dict[str, Tensor]


@dataclass(frozen=True)
class Reply(Body):
    """x_j before the average with x_i, as in ``Request``."""

    counts = "arrived"

    values: dict[str, Tensor]


@algorithm("ad-psgd")
class ADPSGD(Algorithm[Hyper]):
    """AD-PSGD, Algorithm 1, with active and passive peers."""

    summary = "whole models are sent to one random neighbor each, which replies with its model; both average the two"
    title = "Asynchronous Decentralized Parallel Stochastic Gradient Descent"
    authors = "Lian, Zhang, Zhang, Liu"
    venue = "ICML 2018"
    url = "https://arxiv.org/abs/1710.06952"
    Hyper = Hyper
    homogeneous = asynchronous = replies = bipartite = True
    state = ("model", "optimizer", "row")

    def setup(self) -> None:
        self.optimizer = self.hyper.make_optimizer(self.model.parameters())
        self.row: dict[PeerId, float] = {}
        """The weights of the models that the last round has averaged."""

    async def round(self, t: int, net: Net) -> None:
        x, statistics = shared_parameters(self.model, self.hyper), shared_statistics(self.model, self.hyper)
        stale = clone(x)
        averaged = stale | statistics
        self.row = {self.me: 1.0}
        if net.sides[self.me] == PASSIVE:
            step = self.step_from(stale, x)
            requests = await net.collect(Request, partial(senders_of, net, self.me))
            for i, bodies in requests.items():
                local = self.usable(averaged)
                await net.reply(i, Reply(local))
                self.average(i, bodies[-1], local, averaged, step)
        else:
            local = self.usable(averaged)
            await net.broadcast(Request(local), to=drawn(net, t, self.me))
            step = self.step_from(stale, x)
            replies = await net.collect(Reply, partial(drawn, net, sender=self.me), replies=True)
            for j in drawn(net, t, self.me):
                if j in replies:
                    self.average(j, replies[j][-1], local, averaged, step)
        weighted_sum([(1.0, stale), (1.0, step)], out=x)  # line 3

    def step_from(self, stale: Tensors, x: Tensors) -> Tensors:
        """Line 1: train x, and return its displacement."""
        self.train(epochs=self.hyper.local_epochs, steps=self.hyper.steps, batch=self.hyper.batch)
        return displacement(x, stale)

    def usable(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return what to send of the local model: nothing if it has diverged, as the receiver would drop it."""
        return values if self.note_contribution(Reply(values)) else {}

    def average(self, j: PeerId, received: Request | Reply, local: Tensors, averaged: Tensors, step: Tensors) -> None:
        """Line 2, in place.

        Args:
            received: what peer j has sent.
            local: what this peer has sent to it.
            averaged: x_i; receives the average.
            step: is set to 0 if the local model, from which it was made, has diverged.
        """
        if not received.values:
            return
        models, weights = {j: received}, {j: 1.0}
        if local:
            models[self.me] = replace(received, values=dict(averaged))
            weights = {j: 0.5, self.me: 0.5}
        else:
            self.reset_after_divergence()
            for tensor in step.values():
                tensor.zero_()
        self.aggregation.combine(models, weights, averaged, of=f"peer {j}")
        kept = weights.get(self.me, 0.0)
        self.row = dict(sorted(({k: kept * weight for k, weight in self.row.items()} | {j: weights[j]}).items()))

    def layouts(self) -> Sequence[Layout]:
        values = shared_tensors(self.model, self.hyper)
        return [Layout.of(kind(each)) for kind in (Request, Reply) for each in (values, {})]

    def weights(self) -> Mapping[PeerId, float]:
        return self.row
