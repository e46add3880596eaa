"""CGA: cross-gradient aggregation.

Yasaman Esfandiari, Sin Yong Tan, Zhanhong Jiang, Aditya Balu, Ethan Herron, Chinmay Hegde, Soumik Sarkar:
"Cross-Gradient Aggregation for Decentralized Learning from Non-IID Data", ICML 2021. https://arxiv.org/abs/2103.02051
As L2C's paper compares with it (Table 2).

Algorithm 1, in round t on peer i (line numbers are ours):

    1  send x_i to the neighbors
    2  draw a batch; g_ii ← ∇F_i(x_i); for each neighbor j: send g_ji ← ∇F_i(x_j), on the same batch, back to j
    3  g̃_i ← the vector closest to g_ii with ⟨g̃_i, g_ij⟩ ≥ 0 for all neighbors j
           = g_ii + Σ_j u_j g_ij,  u = argmin_{u ≥ 0} ‖g_ii + Σ_j u_j g_ij‖²
    4  v_i ← β v_i − η g̃_i;  x_i ← Σ_j W_ij x_j + v_i

W are the graph's Metropolis weights, as in D-PSGD (dpsgd.py).

Differs from the paper:

- ``optimizer: adam`` may take the place of the momentum in line 4.
- Batch-normalization statistics stay local, or are averaged as in dpsgd.py (``share_statistics: true``); gradients
  are computed in training mode, with the statistics of the batch.
- The weight of a neighbor whose model is missing or has diverged goes to the local model; a gradient that is missing
  or has diverged does not bind line 3. A peer whose local gradient has diverged takes no step; if its model has, it
  stays diverged.
- The authors' code projects each tensor by itself, multiplies all gradients by W_ij first, takes a step like
  Nesterov's, and asks for u ≥ 1/2, so that neighbors' gradients also count where none conflict: ``margin: 0.5``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import NonNegativeFloat
from torch import Tensor
from torch.func import functional_call

from p2pfl import PeerId
from p2pfl.algorithms.base import Algorithm
from p2pfl.algorithms.dpsgd import Parameters, average_neighborhood, with_self_weight
from p2pfl.algorithms.registration import algorithm
from p2pfl.algorithms.shared_model import SharedStatistics, shared_statistics, shared_tensors
from p2pfl.messaging.net import Net
from p2pfl.messaging.schema import Body, Layout
from p2pfl.outcomes import TRAININGS
from p2pfl.tensors import Tensors, buffers_of, clone, displacement, parameters_of

Array = NDArray[np.float64]
REPLY_DEADLINES = 2.0
"""Deadlines to wait for gradients: neighbors may have to wait for the models of others first."""


@dataclass(frozen=True)
class Hyper(SharedStatistics):
    local_epochs: None = field(default=None)  # type: ignore[assignment]
    """Always null: a round is one step on one batch."""
    drop_last: None = field(default=None)  # type: ignore[assignment]
    """Always null, as local_epochs."""
    margin: NonNegativeFloat = 0.0
    """Least u_j in line 3; 0.5 in the authors' code."""


@dataclass(frozen=True)
class CrossGradient(Body):
    """g_ji, by the name of the parameter, float32; empty if the model did not arrive in time."""

    values: Tensors


def least_nonnegative(products: Array, local: Array) -> Array:
    """Return u ≥ 0, float64 [n], that minimizes ½ uᵀ A u + bᵀ u.

    Args:
        products: A, float64 [n, n], the inner products of the n gradients g_ij, each of length 1.
        local: b, float64 [n], theirs with g_ii.
    """
    from scipy.optimize import nnls  # takes half a second

    values, vectors = np.linalg.eigh(products)
    roots = np.sqrt(values.clip(min=0.0))
    present = roots > 1e-7 * roots[-1]  # equal gradients leave eigenvalues that are zero but for rounding
    half = roots[present, None] * vectors.T[present]  # A = halfᵀ half
    target = -(vectors.T[present] @ local) / roots[present]
    u: Array = nnls(half, target)[0]
    return u


def projected(local: Tensors, others: Sequence[Tensors], margin: float = 0.0) -> dict[str, Tensor]:
    """Line 3: g̃_i, by the name of the parameter, from g_ii and the g_ij, computed in float64."""

    def flat(gradient: Tensors) -> Tensor:
        return torch.cat([gradient[name].detach().flatten().cpu().double() for name in local])

    g = flat(local)
    if others:
        rows = torch.stack([flat(gradient) for gradient in others])
        g = g + margin * rows.sum(0)
        lengths = rows.norm(dim=1)
        rows = rows[lengths > 0] / lengths[lengths > 0, None]  # the constraints are the same, and no scale dominates
        if len(rows):
            u = least_nonnegative((rows @ rows.T).numpy(), (rows @ g).numpy())
            g = g + torch.from_numpy(u) @ rows
    parts = torch.split(g, [tensor.numel() for tensor in local.values()])
    return {
        name: part.to(tensor.dtype).view_as(tensor).to(tensor.device)
        for (name, tensor), part in zip(local.items(), parts, strict=True)
    }


@algorithm("cga")
class CGA(Algorithm[Hyper]):
    """CGA, Algorithm 1."""

    summary = (
        "models are sent, their gradients on the neighbors' data come back; the step conflicts with none of them"
    )
    title = "Cross-Gradient Aggregation for Decentralized Learning from Non-IID Data"
    authors = "Esfandiari, Tan, Jiang, Balu, Herron, Hegde, Sarkar"
    venue = "ICML 2021"
    url = "https://arxiv.org/abs/2103.02051"
    Hyper = Hyper
    homogeneous = True
    replies = True
    own_gradients = sends_training = True
    state = ("model", "optimizer", "row")

    def setup(self) -> None:
        self.optimizer = self.hyper.make_optimizer(self.model.parameters())
        self.row: dict[PeerId, float] = {}
        least_nonnegative(np.eye(1), np.zeros(1))  # its first call imports scipy, which forked peers share

    async def round(self, t: int, net: Net) -> None:
        self.row = net.mixing_weights
        x, statistics = parameters_of(self.model), shared_statistics(self.model, self.hyper)
        published = (await net.publish(Parameters(x | statistics))).values  # line 1
        before = {name: published[name] for name in x}
        models = await net.gather(Parameters)
        gradients = self.gradients({j: body.values for j, body in models.items()})  # line 2
        local = gradients.pop(self.me)
        await net.scatter({j: CrossGradient(gradients.get(j, {})) for j in net.neighbors})
        replies = await net.gather(CrossGradient, deadline_factor=REPLY_DEADLINES)
        self.displace(local, [body.values for body in replies.values() if body.values])  # line 3
        step = displacement(x, before)  # v_i
        average_neighborhood(self.aggregation, before, models, self.row, step=step, out=x)  # line 4
        average_neighborhood(self.aggregation, statistics, models, self.row, of="statistics")

    def gradients(self, models: Mapping[PeerId, Tensors]) -> dict[PeerId, dict[str, Tensor]]:
        """Line 2: return the gradients of these models and of the local one, on one batch; {} without samples."""
        found: dict[PeerId, dict[str, Tensor]] = {self.me: {}}

        def on_batch(images: Tensor, labels: Tensor) -> None:
            with self.streams.torch("augmentation"):
                inputs = self.inputs(images)
            statistics = clone(buffers_of(self.model))
            for j in (*sorted(models), self.me):
                parameters = models[j] if j != self.me else parameters_of(self.model)
                values = {name: value.detach().to(self.device) for name, value in parameters.items()}
                leaves = {name: values[name].requires_grad_() for name in self.trainable()}
                buffers = clone(statistics) if j != self.me else buffers_of(self.model)
                with self.streams.torch("dropout"):
                    scores = functional_call(self.model, {**values, **buffers}, (inputs,))
                    terms = self.label_loss(scores, labels)
                total = torch.stack(list(terms.values())).sum()
                gradient = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
                found[j] = dict(zip(leaves, gradient, strict=True))
                if j == self.me:
                    self.meter.add(terms, len(images))

        self.train(steps=1, batch=self.hyper.batch, step=on_batch, models=1 + len(models))
        return found

    def trainable(self) -> list[str]:
        """Return the names of the parameters that are not frozen."""
        return [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]

    def displace(self, local: Tensors, others: Sequence[Tensors]) -> None:
        """Lines 3 and 4: move the model by v_i, unless the local gradient is missing or has diverged."""
        if not local:
            return
        if diverged := self.what_diverged(parameters_of(self.model), local):
            self.outcomes.note(TRAININGS, diverged)
            return
        direction = projected(local, others, self.hyper.margin)
        for name, parameter in self.model.named_parameters():
            parameter.grad = direction.get(name)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.outcomes.note(TRAININGS, self.what_diverged(parameters_of(self.model)))

    def layouts(self) -> Sequence[Layout]:
        x = parameters_of(self.model)
        whole = CrossGradient({name: x[name] for name in self.trainable()})
        model = Layout.of(Parameters(shared_tensors(self.model, self.hyper)))
        return [model, Layout.of(whole), Layout.of(CrossGradient({}))]

    def weights(self) -> Mapping[PeerId, float]:
        return with_self_weight(self.row, self.me)
