"""Mutual learning at DFML's aggregator (arXiv 2402.01863): several models teach each other on the same batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from p2pfl import rng
from p2pfl.algorithms.base import Algorithm
from p2pfl.models import Model
from p2pfl.tensors import assign, buffers_of, clone


def distillation(logits: Tensor, teachers: Tensor, phi: Tensor, weights: Tensor | float = 1.0) -> Tensor:
    """L_KL, Eq. 3: Σ_q Φ_q KL(p_q ‖ p_n) / Σ_q Φ_q, mean over the batch; 0 if there is no teacher.

    Args:
        logits: z_n, float [B, K].
        teachers: log p_q, float [P, B, K], without gradient.
        phi: Φ_q, float [P]; 0 for a model that does not teach n, such as n itself, and at least 1 for the others.
        weights: of each teacher's samples, float [P, B].
    """
    divergences = weights * (teachers.exp() * (teachers - logits.log_softmax(1))).sum(2)
    phi = phi.to(divergences.dtype)
    return (phi @ divergences).mean() / phi.sum().clamp(min=1.0)


@torch.no_grad()
def wsl_weights(logits: Tensor, teachers: Tensor, labels: Tensor) -> Tensor:
    """Return WSL's weight of each sample, float [P, B]: 1 − exp(−CE_n / CE_q), less where teacher q is less certain.

    Helong Zhou et al.: "Rethinking Soft Labels for Knowledge Distillation: A Bias-Variance Tradeoff Perspective",
    ICLR 2021. https://arxiv.org/abs/2102.00650

    Args:
        logits, teachers: as for ``distillation``.
        labels: int64 [B].
    """
    student = cross_entropy(logits, labels, reduction="none")
    teacher = -teachers[:, torch.arange(len(labels), device=labels.device), labels]
    return 1.0 - torch.exp(-student / teacher.clamp(min=torch.finfo(teacher.dtype).eps))


def loss_factors(alpha: float, scheduled: str) -> tuple[float, float]:
    """Return the factors (γ, α) of the loss on the labels and of the distillation loss, Eqs. 1 and 10."""
    return {
        "both": (1.0 - alpha, alpha),
        "supervision": (1.0 - alpha, 1.0),
        "distillation": (1.0, alpha),
        "common": (alpha, alpha),
    }[scheduled]


def teacher_weights(models: Sequence[Model], by_size: bool) -> Tensor:
    """Return Φ_q for each student n, float [P, P]: the size of model q, or 1; 0 where q = n."""
    sizes = [sum(parameter.numel() for parameter in model.parameters()) for model in models]
    phi = torch.tensor(sizes if by_size else [1] * len(models), dtype=torch.float32)
    return phi * (1.0 - torch.eye(len(models)))


@dataclass(eq=False)
class Participant:
    """One model at the aggregator."""

    model: Model
    optimizer: torch.optim.Optimizer
    phi: Tensor
    """Weights of the participants as teachers of this model, float [P]; 0 for itself."""

    def logits(self, x: Tensor, seed: int) -> Tensor:
        """Return z_n [B, K] with its graph. ``seed`` determines dropout."""
        with rng.torch_seeded(seed, "mutual learning"):
            logits: Tensor = self.model(x)
        return logits

    @torch.no_grad()
    def detached_logits(self, x: Tensor, seed: int) -> Tensor:
        """Return the same z_n without holding activations and without changing batch-normalization statistics."""
        statistics = buffers_of(self.model)
        before = clone(statistics)
        logits = self.logits(x, seed)
        assign(statistics, before)
        return logits


def make_participants(
    models: Sequence[Model], make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer], by_size: bool
) -> list[Participant]:
    """Return one participant per model, each with a new optimizer."""
    phi = teacher_weights(models, by_size)
    return [
        Participant(model, make_optimizer(model.parameters()), row.to(next(model.parameters()).device))
        for model, row in zip(models, phi, strict=True)
    ]


def mutual_step(
    participants: Sequence[Participant],
    students: Sequence[Participant],
    x: Tensor,
    minimize: Callable[[torch.optim.Optimizer, Tensor], None],
    supervision: Callable[[Tensor], Tensor],
    factors: tuple[float, float],
    seeds: Sequence[int],
    max_graphs: int | None = None,
    wsl_labels: Tensor | None = None,
) -> None:
    """Compute all logits, then take one step of each student on γ L_WSM + α L_KL (Eqs. 1 and 10).

    A model whose logits hold NaN or infinity stops teaching, because it would make all others diverge too.

    Args:
        x: one batch of network input, float [B, C, H, W].
        minimize: takes one step of an optimizer on a loss, and frees the gradients.
        supervision: L_WSM of a student's logits.
        factors: (γ, α).
        seeds: one per participant, for dropout.
        max_graphs: number of models that hold their activations at a time. The logits of the others are computed
            twice, with the same dropout: first for the other students, then for the model's own step.
        wsl_labels: labels of the batch, int64 [B], if distillation weights samples by ``wsl_weights``.
    """
    gamma, alpha = factors
    held = students[:max_graphs]
    logits = [
        participant.logits(x, seed) if participant in held else participant.detached_logits(x, seed)
        for participant, seed in zip(participants, seeds, strict=True)
    ]
    values = torch.stack([z.detach() for z in logits])
    finite = values.isfinite().all(2).all(1)
    teachers = values.where(finite[:, None, None], 0.0).log_softmax(2)
    for participant, z, seed in zip(participants, logits, seeds, strict=True):
        if participant in students:
            student = z if participant in held else participant.logits(x, seed)
            supervised = supervision(student)
            weights = 1.0 if wsl_labels is None else wsl_weights(student, teachers, wsl_labels)
            distilled = distillation(student, teachers, participant.phi * finite, weights)
            minimize(participant.optimizer, gamma * supervised + alpha * distilled)


def train_mutually(
    peer: Algorithm[Any],
    participants: Sequence[Participant],
    students: Sequence[Participant],
    supervision: Callable[[Tensor, Tensor], Tensor],
    factors: tuple[float, float],
    epochs: int,
    max_graphs: int | None = None,
    wsl: bool = False,
) -> None:
    """Update the students' models in place by ``epochs`` over the peer's samples.

    Args:
        supervision: L_WSM of logits and labels.
        factors, max_graphs: as in ``mutual_step``.
        wsl: distillation weights samples by ``wsl_weights``.
    """

    def step(images: Tensor, labels: Tensor) -> None:
        with peer.streams.torch("augmentation"):
            x = peer.inputs(images)
        seeds = peer.streams.numpy("mutual learning").integers(2**62, size=len(participants)).tolist()
        minimize = partial(peer.minimize, x=x, labels=labels)
        weighted = labels if wsl else None

        def supervised(logits: Tensor) -> Tensor:
            return supervision(logits, labels)

        mutual_step(participants, students, x, minimize, supervised, factors, seeds, max_graphs, weighted)

    peer.train(epochs=epochs, batch=peer.hyper.batch, step=step, models=len(students))
