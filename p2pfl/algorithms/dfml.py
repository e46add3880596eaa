"""DFML: Decentralized Federated Mutual Learning.

Yasser H. Khalil, Amir H. Estiri, Mahdi Beitollahi, Nader Asadi, Sobhan Hemati, Xu Li, Guojun Zhang, Xi Chen,
TMLR 2024. https://arxiv.org/abs/2402.01863

Whole models travel, of any architecture. In each round one peer, the aggregator, receives its senders' models, lets
all of them and its own teach one another on its samples, and sends them back. How much they listen to one another
instead of to the labels, α, rises slowly and drops again, period after period. Each peer keeps a frozen copy of its
model from the rounds with the highest α: its *peak model*, which is what the paper evaluates.

    aggregator a   senders S   participants P = S ∪ {a}   logits z_n of model n   p_n = softmax(z_n)   Φ_n its size

Differs from the paper:

- roles are drawn from a stream that all peers share, and each computes α from the round; in the paper each aggregator
  hands both on to the next. On a graph that is not complete, senders are neighbours of the aggregator; all of them,
  if it has fewer than asked for.
- α rises along a cosine to α_max in the last round of its period, as in the paper's figures; Eq. 4 as printed falls.
  With ``shape: full`` it rises in the first half of the period and falls in the second.
- the paper gives no number for how much longer each period is than the one before; here 10 rounds.
- losses are means over a batch; Eqs. 2 and 3 are sums.
- momentum starts anew in each local training and at each aggregation, for all models. (The paper does not say.)
- low participation: N/|S| rounds of a period count as peaks, as the paper's formula says; its example (five where a
  tenth of the peers send) is half of that. ``peak_updates`` sets the number.
- batch-normalisation statistics travel with the parameters; at the aggregator all models are in training mode.
- on a graph that is not complete, any peer may be the next aggregator; handed from neighbour to neighbour, the role
  would move along edges.
- models of one architecture start different. (The paper does not say; its baselines' start equal.)
- α starts a little above 0: the first round of a period is step 1.
- ``ace`` masks the classes that a peer lacks, not those that a batch lacks.
- a last batch of one sample is left out when there are others.
- a sender whose model does not come back in time keeps its own; an aggregator goes on with the models that have come,
  and if none has, without aggregation. A peer whose model did not come back leaves its peak model alone, too.
- a model whose logits become infinite or NaN teaches nobody any more; otherwise all of P would follow it. One that
  holds NaN or infinity afterwards is not taken over by its owner.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor

from p2pfl import losses, rng
from p2pfl.algorithms.base import Algorithm
from p2pfl.algorithms.roles import Roles, Roster, Share
from p2pfl.losses import Supervision
from p2pfl.models import Model
from p2pfl.net import Net
from p2pfl.options import Options
from p2pfl.runfolder import PeerId
from p2pfl.tensors import assign, buffers_of, clone, is_finite, parameters_of
from p2pfl.training import Measure, make_optimizer
from p2pfl.wire import Body, Layout

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


@dataclass(frozen=True)
class Hyper(Options):
    participation: Share = 0.5
    """Senders in a round, as a fraction of all peers (Fig. 19)."""
    fixed_aggregator: bool = False
    """Peer 0 aggregates in every round (Fig. 13)."""
    local_epochs: PositiveInt = 1
    """Epochs over the own samples before the models meet."""
    batch: PositiveInt = 64
    """Samples in one step, of local training and of mutual learning."""
    lr: PositiveFloat = 0.01
    """Learning rate of SGD; the paper picks one of 0.1, 0.01, 0.001."""
    momentum: NonNegativeFloat = 0.9
    """Of SGD."""
    weight_decay: NonNegativeFloat = 5e-4
    """ℓ2 penalty added to the gradient."""
    supervision: Supervision = "wsm"
    """Loss on the labels: re-weighted softmax, asymmetric cross-entropy or plain cross-entropy (Table 9, Fig. 25)."""

    mutual_epochs: PositiveInt = 10
    """K, passes of mutual learning over the aggregator's samples (Fig. 22)."""
    mutual: bool = True
    """All models learn from one another; otherwise only the aggregator's learns from the others (Fig. 21)."""
    teachers: Literal["size", "equal"] = "size"
    """What a teacher counts: by its number of parameters Φ, or all alike (Fig. 20)."""
    mutual_batch_models: PositiveInt | None = None
    """Models whose activations the aggregator holds at a time; the others' are computed twice. Default: all. Changes
    memory and time only, not one bit of the outcome."""

    alpha_max: Fraction = 0.9
    """Largest α: 0.8 or 0.9 for IID data, ace and wsm; 1 for ce on other data (appendix A.5.1)."""
    shape: Literal["half", "full", "fixed"] = "half"
    """α rises to α_max within a period and drops; or falls again (Fig. 7); or is always α_max (Fig. 9)."""
    period: PositiveInt = 10
    """Rounds of the first period."""
    period_increment: NonNegativeInt = 10
    """Rounds by which each period is longer than the one before (Fig. 28)."""
    scheduled: Literal["both", "supervision", "distillation", "common"] = "both"
    """What α scales, γ L_WSM + α L_KL (Eq. 10): γ = 1 − α and α; γ alone; α alone; or α for both (Fig. 27)."""
    peak_updates: PositiveInt | None = None
    """So many rounds of a period, those with the largest α, count as peaks; default 1, or N/|S| where |S| < N/2."""

    patience: PositiveFloat = 3.0
    """Deadlines (transport.deadline) that an aggregation may take."""


# ---- what peers say ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pupil(Body):
    """W_s on its way to the aggregator: the name of its architecture, all parameters, batch-norm statistics."""

    architecture: str
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]


@dataclass(frozen=True)
class Taught(Body):
    """W_s⁺ on its way back."""

    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]


NOT_TAUGHT = Taught({}, {})
"""To a sender whose model did not come in time, or was not sound: it need not wait any longer."""


# ---- the schedule of α (Eq. 4) -------------------------------------------------------------------------------


def period_of(t: int, h: Hyper) -> range:
    """The rounds, from 0, of the period that round ``t`` lies in."""
    start, length = 0, h.period
    while t >= start + length:
        start, length = start + length, length + h.period_increment
    return range(start, start + length)


def alpha_at(t: int, h: Hyper) -> float:
    """α in step τ = 1 … P of its period: α_max/2 · (1 − cos(π τ/P)), which is α_max in the last.

    The full cycle is up to α_max in the first half of the period (rounded up), and falls to 0 in the second.
    """
    rounds = period_of(t, h)
    step, length = t - rounds.start + 1, len(rounds)
    if h.shape == "fixed":
        return h.alpha_max
    rise = length if h.shape == "half" else (length + 1) // 2
    if step <= rise:
        return h.alpha_max / 2 * (1 - math.cos(math.pi * step / rise))
    return h.alpha_max / 2 * (1 + math.cos(math.pi * (step - rise) / (length - rise)))


def among_the_largest(number: int, t: int, h: Hyper) -> bool:
    """Whether α of round ``t`` is one of the so many largest of its period."""
    ranked = sorted(period_of(t, h), key=lambda other: (-round(alpha_at(other, h), 12), other))
    return t in ranked[:number]


def scales(alpha: float, scheduled: str) -> tuple[float, float]:
    """Factors (γ, α) of the loss on the labels and of the distillation loss, Eqs. 1 and 10."""
    return {
        "both": (1.0 - alpha, alpha),
        "supervision": (1.0 - alpha, 1.0),
        "distillation": (1.0, alpha),
        "common": (alpha, alpha),
    }[scheduled]


# ---- mutual learning (Eqs. 1 and 3) --------------------------------------------------------------------------


def distillation(logits: Tensor, teachers: Tensor, phi: Tensor) -> Tensor:
    """L_KL, Eq. 3: Σ_q Φ_q KL(p_q ‖ p_n) / Σ_q Φ_q, mean over the batch; 0 if there is no teacher.

    Args:
        logits: z_n, float [B, K].
        teachers: log p_q, float [P, B, K], without gradient.
        phi: Φ_q, float [P]; 0 for whoever does not teach n, as n itself, and at least 1 for the others.
    """
    divergences = (teachers.exp() * (teachers - logits.log_softmax(1))).sum(2)
    return (phi @ divergences).mean() / phi.sum().clamp(min=1.0)


@dataclass(eq=False)
class Participant:
    """One model at the aggregator."""

    model: Model
    optimizer: torch.optim.Optimizer
    phi: Tensor
    """What each of P counts as its teacher, float [P]; 0 for itself."""

    def think(self, x: Tensor, draws: int) -> Tensor:
        """z_n [B, K], to be learned from. ``draws`` seeds what is random in it."""
        with rng.torch_seeded(draws, "mutual learning"):
            logits: Tensor = self.model(x)
        return logits

    @torch.no_grad()
    def recite(self, x: Tensor, draws: int) -> Tensor:
        """The same z_n, for the others only: no activations are held, and the model stays as it was."""
        statistics = buffers_of(self.model)
        before = clone(statistics)
        logits = self.think(x, draws)
        assign(statistics, before)
        return logits

    def learn(self, loss: Tensor) -> None:
        """One step, after which nothing of it is left in memory."""
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class DFML(Algorithm[Hyper]):
    """DFML, Algorithm 1."""

    name = "dfml"
    gist = "whole models travel to one aggregator a round, teach one another there, and go back"
    title = "DFML: Decentralized Federated Mutual Learning"
    authors = "Khalil, Estiri, Beitollahi, Asadi, Hemati, Li, Zhang, Chen"
    venue = "TMLR 2024"
    url = "https://arxiv.org/abs/2402.01863"
    Hyper = Hyper
    state = ("model", "peak", "peak_alpha")

    def setup(self) -> None:
        h = self.hyper
        self.peak = deepcopy(self.model).requires_grad_(False)
        self.peak_alpha = 0.0
        self.roster = Roster(self.seed, h.participation, h.fixed_aggregator, h.patience)
        log_weights = losses.softmax_log_weights(h.supervision, self.data.train.labels, self.data.classes)
        self.log_weights = log_weights.to(self.device)
        self.observed: dict[str, float] = {}

    def _optimizer(self, model: Model) -> torch.optim.Optimizer:
        h = self.hyper
        return make_optimizer("sgd", model.parameters(), lr=h.lr, momentum=h.momentum, weight_decay=h.weight_decay)

    async def round(self, t: int, net: Net) -> None:
        alpha = alpha_at(t, self.hyper)
        self.observed = {"alpha": alpha}
        roles = self.roster.roles(t, net)
        if self.me in roles.participants:
            self.local_training()
            if self.me == roles.aggregator:
                updated = await self.aggregate(roles, alpha, net)
            else:
                updated = await self.be_taught(roles, net)
            if updated:
                self.remember_peak(t, alpha, net)
        self.observed["peak_alpha"] = self.peak_alpha

    def local_training(self) -> None:
        self.optimizer = self._optimizer(self.model)
        self.train(epochs=self.hyper.local_epochs, batch=self.hyper.batch)

    def loss(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {self.hyper.supervision: self.supervision(self.model(x), labels)}

    def supervision(self, logits: Tensor, labels: Tensor) -> Tensor:
        """L_WSM, Eq. 2, with the label frequencies of the own samples."""
        return losses.reweighted_cross_entropy(logits, labels, self.log_weights)

    def remember_peak(self, t: int, alpha: float, net: Net) -> None:
        """Ŵ ← W and α_n ← α, if α is not less than α_n."""
        senders = self.roster.senders(net.peers)
        few = 2 * senders < net.peers
        updates = self.hyper.peak_updates or (round(net.peers / senders) if few else 1)
        if alpha >= self.peak_alpha or among_the_largest(updates, t, self.hyper):
            self.peak.load_state_dict(self.model.state_dict())
            self.peak_alpha = max(self.peak_alpha, alpha)

    # -- senders

    async def be_taught(self, roles: Roles, net: Net) -> bool:
        """Bring the own model to the aggregator and wait for it. False if it does not come back: then it stays."""
        own = Pupil(self.model.name, parameters_of(self.model), buffers_of(self.model))
        await net.send(roles.aggregator, own)
        answer = await net.gather(Taught, of=[roles.aggregator], patience=self.roster.returning(net))
        updated = [taught for taught in answer.values() if taught.parameters]
        for taught in updated:
            assign(parameters_of(self.model), taught.parameters)
            assign(buffers_of(self.model), taught.buffers)
        return bool(updated)

    # -- the aggregator

    async def aggregate(self, roles: Roles, alpha: float, net: Net) -> bool:
        """Let all models that come, and the own one, teach one another; hand them back.

        False if none comes, or if the own one has diverged: then it stays as it was before.
        """
        pupils = await net.gather(Pupil, of=roles.senders, patience=self.roster.coming(net))
        models = {n: self.received(pupils.pop(n)) for n in sorted(pupils)}
        before = clone(self.model.state_dict())
        if models:
            self.mutual_learning({**models, self.me: self.model}, alpha)
        sound = all(map(is_finite, self.model.state_dict().values()))
        if not sound:
            self.model.load_state_dict(before)
        answers = {n: Taught(parameters_of(model), buffers_of(model)) for n, model in models.items()}
        await net.scatter({n: answers.get(n, NOT_TAUGHT) for n in roles.senders})
        return bool(models) and sound

    def received(self, pupil: Pupil) -> Model:
        """A model of the sender's architecture with the sender's values, in training mode."""
        model = self._like(pupil.architecture)
        assign(parameters_of(model), pupil.parameters)
        assign(buffers_of(model), pupil.buffers)
        return model.train()

    def mutual_learning(self, models: Mapping[PeerId, Model], alpha: float) -> None:
        """K passes over the own samples; the models of all participants are updated in place."""
        h, ids = self.hyper, sorted(models)
        sizes = [sum(parameter.numel() for parameter in models[n].parameters()) for n in ids]
        phi = torch.tensor(sizes if h.teachers == "size" else [1] * len(ids), dtype=torch.float32, device=self.device)
        others = 1.0 - torch.eye(len(ids), device=self.device)
        everyone = [
            Participant(models[n], self._optimizer(models[n]), phi * mask)
            for n, mask in zip(ids, others, strict=True)
        ]
        students = everyone if h.mutual else [everyone[ids.index(self.me)]]
        step = partial(self.mutual_step, everyone, students, scales(alpha, h.scheduled))
        self.train(epochs=h.mutual_epochs, batch=h.batch, step=step)
        self.observed["models"] = len(models)

    def mutual_step(
        self,
        everyone: Sequence[Participant],
        students: Sequence[Participant],
        scales: tuple[float, float],
        images: Tensor,
        labels: Tensor,
    ) -> None:
        """All logits first; then each student takes a step on γ L_WSM + α L_KL (Eqs. 1 and 10).

        No more than ``mutual_batch_models`` models hold their activations at a time. The others' logits are computed
        without at first, and once more, with the same dropout, when their turn to learn comes.
        """
        gamma, alpha = scales
        with self.streams.torch("augmentation"):
            x = self.inputs(images)
        draws = self.streams.numpy("mutual learning").integers(2**62, size=len(everyone)).tolist()
        held = students[: self.hyper.mutual_batch_models]
        logits = [
            one.think(x, seed) if one in held else one.recite(x, seed)
            for one, seed in zip(everyone, draws, strict=True)
        ]
        spoken = torch.stack([z.detach() for z in logits])
        sound = spoken.isfinite().all(2).all(1)  # whoever diverges teaches nobody any more
        teachers = spoken.where(sound[:, None, None], 0.0).log_softmax(2)
        for one, z, seed in zip(everyone, logits, draws, strict=True):
            if one in students:
                own = z if one in held else one.think(x, seed)
                supervised, distilled = self.supervision(own, labels), distillation(own, teachers, one.phi * sound)
                one.learn(gamma * supervised + alpha * distilled)

    # -- what there is to evaluate, to record, to hear

    def predict_peak(self, x: Tensor) -> Tensor:
        """Class scores [B, K] of the peak model."""
        scores: Tensor = self.peak(x)
        return scores

    def measures(self, whole: bool) -> Iterable[Measure]:
        """The peak model on the own test split and, if asked for, the whole test set; both models on held-out own
        samples (the paper's local accuracy)."""
        yield Measure("peak", self.predict_peak, self.data.test)
        if whole:
            yield Measure("peak_global", self.predict_peak, self.data.everything)
        yield Measure("local", self.predict, self.data.validation)
        yield Measure("peak_local", self.predict_peak, self.data.validation)

    def observations(self) -> Mapping[str, float]:
        """α of the round; α_n after it; where this peer was the aggregator, how many models met there, its own
        among them."""
        return self.observed

    def layouts(self) -> Sequence[Layout]:
        """Models of every architecture in the mesh may come to be taught; only one of the own comes back."""
        models = (self._like(name) for name in dict.fromkeys(self.architectures))
        pupils = (Pupil(model.name, parameters_of(model), buffers_of(model)) for model in models)
        taught = Taught(parameters_of(self.model), buffers_of(self.model))
        return [
            *(Layout.of(pupil, fixed=["architecture"]) for pupil in pupils),
            *(Layout.of(answer) for answer in (taught, NOT_TAUGHT)),
        ]

    def _like(self, architecture: str) -> Model:
        """A model of this architecture; its values are to be overwritten."""
        with rng.torch_seeded(self.seed, "dfml.overwritten"):
            return self.build(self.architectures.index(architecture))
