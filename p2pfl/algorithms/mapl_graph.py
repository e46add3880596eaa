"""MAPL's collaborative graph learning: Algorithm 2 of the paper, as pure functions. See mapl.py for what differs.

Notation: peer i with the neighbors N_i, mixing weights w_i on the simplex, head similarity s_ij, confidence γ_j.
Vectors are float64 [n] over {i} ∪ N_i, as far as their heads arrived; ``me`` is the position of i.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor
from torch.nn.functional import cosine_similarity

from p2pfl import PeerId
from p2pfl.learning.optimizers import SGD, Adam, LocalTraining


@dataclass(frozen=True)
class GraphLearning(LocalTraining):
    cgl: bool = True
    """Learn the collaboration graph (Table 2); otherwise weights stay uniform and no head is sent."""
    warmup: NonNegativeInt = 100
    """T_thr, the first round with CGL."""
    prune: bool = True
    """Stop receiving from peers whose weight is 0."""
    graph_steps: PositiveInt = 1
    """E_g, gradient steps on w per round (Table 6)."""
    graph_lr: PositiveFloat = 1.0
    """Learning rate of w."""
    graph_optimizer: Literal["sgd", "adam"] = "sgd"
    """sgd: plain projected gradient; adam: a new Adam each round, with ``betas``."""
    mu_similarity: NonNegativeFloat = 0.5
    """μ1, weight of the similarity term in l_g."""
    mu_regularizer: NonNegativeFloat = 0.1
    """μ2, weight of the regularizer in l_g."""
    beta: NonNegativeFloat = 0.5
    """β, weight of the norm in the regularizer."""
    epsilon: PositiveFloat = 1e-6
    """ε in the logarithm of the degree."""
    similarity: Literal["rows", "flat", "off"] = "rows"
    """s_ij: mean cosine of the heads' rows, cosine of the flattened heads, or 1 for all (Table 3)."""
    compare: Literal["weights", "changes"] = "changes"
    """What s_ij compares: the heads' weights, or their changes since the common start (needs ``shared_init``).
    Weights are comparable only if the start is small (``head_init_scale``)."""
    scale_similarity: bool = False
    """Divide the neighbors' s_ij by the largest of them, if it is positive."""
    confidence: bool = True
    """γ from sample counts; otherwise γ = 1 for all (Table 3)."""
    norm: Literal["l1", "l2"] = "l2"
    """Norm in the regularizer (Table 3)."""
    degree_term: Literal["constant", "exact"] = "constant"
    """exact: differentiate the logarithm of the degree; constant: do not."""


def head_similarity(head: Tensor, other: Tensor, form: str) -> float:
    """Return s_ij in [-1, 1] of two heads [K, d_z]."""
    head, other = head.double(), other.double()
    if form == "off":
        return 1.0
    if form == "flat":
        return float(cosine_similarity(head.flatten(), other.flatten(), dim=0))
    return float(cosine_similarity(head, other, dim=1).mean())


def scaled(s: Tensor, me: int) -> Tensor:
    """Return s with the neighbors' entries divided by the largest of them; entry ``me`` stays 1."""
    neighbors = torch.arange(len(s)) != me
    largest = float(s[neighbors].max()) if neighbors.any() else 0.0
    # Dividing by a negative number would reverse the order.
    return torch.where(neighbors, s / largest, s) if largest > 0 else s


def similarities(head: Tensor, others: Mapping[PeerId, Tensor], me: PeerId, h: GraphLearning) -> Tensor:
    """Return s over ``me`` and the ``others``, ascending by id; s_ii = 1."""
    ids = sorted([*others, me])
    s = torch.ones(len(ids), dtype=torch.float64)
    for n, j in enumerate(ids):
        if j != me:
            s[n] = head_similarity(head, others[j].to(head.device), h.similarity)
    return scaled(s, ids.index(me)) if h.scale_similarity else s


def confidence(samples: Mapping[PeerId, int], ids: Sequence[PeerId]) -> Tensor:
    """Return γ_j = |D_j| / Σ_l |D_l| for the peers ``ids``; the sum is over all ``samples``. Equal if it is 0."""
    if not any(samples.values()):
        samples = dict.fromkeys(samples, 1)
    return torch.tensor([samples[j] for j in ids], dtype=torch.float64) / sum(samples.values())


def graph_loss(w: Tensor, s: Tensor, gamma: Tensor, me: int, h: GraphLearning) -> Tensor:
    """l_g, Eqs. 7 and 8: μ1 Σ_j γ_j (−s_ij) w_ij + μ2 ( β ‖w_i‖ − log(Σ_{j≠i} w_ij + ε) )."""
    norm = w.norm() if h.norm == "l2" else w.abs().sum()
    degree = w.sum() - w[me]
    if h.degree_term == "constant":
        degree = degree.detach()
    return -h.mu_similarity * (gamma * s * w).sum() + h.mu_regularizer * (
        h.beta * norm - torch.log(degree + h.epsilon)
    )


def project_to_simplex(v: Tensor, mass: float = 1.0) -> Tensor:
    """Return the nearest point to v [n] with entries >= 0 that sum to ``mass`` (Condat, 2016; by sorting)."""
    if mass <= 0.0:
        return torch.zeros_like(v)
    u = v.sort(descending=True).values
    excess = (u.cumsum(0) - mass) / torch.arange(1, len(v) + 1, dtype=v.dtype)
    support = max(1, int((u > excess).sum()))  # 0 if ``mass`` is below the rounding error of u
    threshold = excess[support - 1]
    return (v - threshold).clamp(min=0.0)


def collaborative_graph_learning(w: Tensor, s: Tensor, gamma: Tensor, me: int, h: GraphLearning) -> Tensor:
    """Algorithm 2: E_g gradient steps on l_g, each followed by a projection onto the simplex.

    The projection preserves the sum of ``w``: 1, minus the weights of the neighbors that are missing.
    """
    mass = float(w.sum())
    w = w.clone().requires_grad_()
    if h.graph_optimizer == "adam":
        optimizer: torch.optim.Optimizer = Adam([w], lr=h.graph_lr, betas=h.betas)
    else:
        optimizer = SGD([w], lr=h.graph_lr)
    for _ in range(h.graph_steps):  # line 1
        optimizer.zero_grad()
        graph_loss(w, s, gamma, me, h).backward()  # type: ignore[no-untyped-call]  # line 5
        optimizer.step()  # line 7
        with torch.no_grad():
            w.copy_(project_to_simplex(w, mass))  # line 8
    return w.detach()
