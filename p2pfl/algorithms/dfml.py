"""DFML: Decentralized Federated Mutual Learning.

Yasser H. Khalil, Amir H. Estiri, Mahdi Beitollahi, Nader Asadi, Sobhan Hemati, Xu Li, Guojun Zhang, Xi Chen,
TMLR 2024. https://arxiv.org/abs/2402.01863

In each round one peer, the aggregator, receives its senders' models, of any architecture, lets them and its own teach
each other on its samples, and sends them back. The weight α of what models learn from each other, against what they
learn from labels, rises and drops in periods. Each peer keeps its model from the rounds with the highest α as its
*peak model*, which the paper evaluates.

Algorithm 1, in round t, with aggregator a, senders S, participants P = S ∪ {a} (line numbers are ours):

    1  n ∈ P: W_n ← local epochs on L_WSM                                             (Eq. 2)
    2  s ∈ S: send W_s to a
    3  α ← scheduler(t)                                                               (Eq. 4)
    4  a: K times, for each batch: compute all z_n, then update each W_n on Eq. 1,
          L = (1 − α) L_WSM + α Σ_{q≠n} Φ_q KL(p_q ‖ p_n) / Σ_{q≠n} Φ_q               (Eq. 3)
          with logits z_n, p_n = softmax(z_n), and model size Φ_n
    5  a: send W_s back to each s ∈ S
    6  n ∈ P: adopt the updated W_n; if α ≥ α_n: Ŵ_n ← W_n, α_n ← α

Differs from the paper:

- aggregators and senders come from a stream that all peers share (aggregator_roles.py), and each peer computes α from
  the round; in the paper each aggregator passes both on to the next. On a sparse graph the senders are neighbors of
  the aggregator, and all of them if it has fewer than asked for.
- α rises along a cosine to α_max in the last round of its period, as in the paper's figures; Eq. 4 as printed falls.
  Its first value is a little above 0, as the first round of a period is step 1. ``shape: full`` falls again.
- each period is 10 rounds longer than the previous one; the paper does not specify by how much.
- losses are means over a batch; Eqs. 2 and 3 are sums.
- the optimizer's state is reset in each local training and at each aggregation; the paper does not specify this.
- low participation: N/|S| rounds of a period count as peaks, as in the paper's formula; its example has half of that.
- batch-normalization statistics travel with the parameters; at the aggregator all models are in training mode.
- parameters that do not train are sent to the aggregator, as models may differ in them, and not back.
- models of one architecture start with different weights; the paper does not specify this. Those of its baselines
  start with equal weights.
- ``ace`` masks the classes that a batch lacks, as Caccia et al. do for new data (there is no replay here);
  ``masked`` masks the classes that a peer lacks.
- a sender that gets no reply in time keeps its model and its peak model; an aggregator continues with the models that
  arrived, and does not aggregate if none did.
- a model with NaN or infinity in its logits stops teaching; its owner does not adopt a model that has diverged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import PositiveFloat, PositiveInt
from torch import Tensor

from p2pfl import PeerId, rng
from p2pfl.algorithms import presets
from p2pfl.algorithms.aggregator_roles import Aggregation, AggregatorSchedule, Assignment
from p2pfl.algorithms.alpha_schedule import AlphaSchedule
from p2pfl.algorithms.base import Algorithm
from p2pfl.algorithms.dfml_messages import NOT_TAUGHT, Pupil, Taught, load
from p2pfl.algorithms.mutual_learning import loss_factors, make_participants, train_mutually
from p2pfl.algorithms.presets import Presets
from p2pfl.algorithms.registration import algorithm
from p2pfl.learning import losses
from p2pfl.learning.evaluation import ExtraMetric, on_test_samples
from p2pfl.learning.losses import Supervision
from p2pfl.learning.optimizers import OptimizerName
from p2pfl.messaging.net import Net
from p2pfl.messaging.schema import Layout
from p2pfl.models import Model
from p2pfl.outcomes import TRAININGS
from p2pfl.tensors import clone, constants_of, frozen_of


@dataclass(frozen=True)
class Hyper(AlphaSchedule, Aggregation):
    preset: Literal["default", "paper"] = "default"
    """default: what works best here; paper: the formulas as printed. Other keys override it."""
    optimizer: OptimizerName = "sgd"
    """sgd or adam; its state starts anew in each local training and at each aggregation."""
    supervision: Supervision = "wsm"
    """Loss on the labels: re-weighted softmax, asymmetric cross-entropy (over the batch's classes), masked
    cross-entropy (over the peer's classes) or plain cross-entropy (Table 9, Fig. 25)."""
    mutual_epochs: PositiveInt = 10
    """K, epochs of mutual learning over the aggregator's samples (Fig. 22)."""
    mutual: bool = True
    """All models learn from each other; otherwise only the aggregator's learns from the others (Fig. 21)."""
    teachers: Literal["size", "equal"] = "size"
    """Weight of a teacher: its number of parameters Φ, or equal for all (Fig. 20)."""
    wsl: bool = False
    """Weight the samples in L_KL by how certain the teacher is of the label (WSL, Fig. 26)."""
    mutual_batch_models: PositiveInt | None = None
    """Models that hold their activations at a time (default: all). Fewer save memory and cost time; bit-identical."""
    scheduled: Literal["both", "supervision", "distillation", "common"] = "both"
    """What α scales in γ L_WSM + α L_KL (Eq. 10): γ = 1 − α and α; γ alone; α alone; or α for both (Fig. 27)."""
    peak_updates: PositiveInt | None = None
    """Rounds per period, those with the largest α, that count as peaks; default 1, or N/|S| where |S| < N/2."""
    patience: PositiveFloat = 3.0
    """Deadlines (transport.deadline) that one aggregation may take."""

    PRESETS: ClassVar[Presets] = presets.DFML


@algorithm("dfml")
class DFML(Algorithm[Hyper]):
    """DFML, Algorithm 1."""

    summary = "sends whole models to one aggregator per round, where they teach each other, and back"
    title = "DFML: Decentralized Federated Mutual Learning"
    authors = "Khalil, Estiri, Beitollahi, Asadi, Hemati, Li, Zhang, Chen"
    venue = "TMLR 2024"
    url = "https://arxiv.org/abs/2402.01863"
    Hyper = Hyper
    replies = True
    state = ("model", "peak", "peak_alpha", "peak_round")
    norm_statistics = "sent with the models"

    def setup(self) -> None:
        h = self.hyper
        self.peak = deepcopy(self.model).requires_grad_(False)
        self.peak_alpha = 0.0
        self.peak_round = -1  # in which the peak model was last updated
        self.schedule = AggregatorSchedule(self.seed, h.participation, h.fixed_aggregator, h.patience)
        labels, classes = self.data.train.labels, self.data.classes
        self.supervision = losses.supervision_loss(h.supervision, labels, classes, self.device)
        self._diagnostics: dict[str, float] = {}

    async def round(self, t: int, net: Net) -> None:
        alpha = self.hyper.alpha_at(t)  # line 3
        self._diagnostics = {"alpha": alpha}
        assignment = self.schedule.assignment(t, net)
        if self.me in assignment.participants:
            self.local_training()  # line 1
            if self.me == assignment.aggregator:
                updated = await self.aggregate(assignment, alpha, net)  # lines 4 and 5
            else:
                updated = await self.send_model(assignment, net)  # lines 2 and 6
            if updated:
                self.update_peak(t, alpha, net)  # line 6
        self._diagnostics |= {"peak_alpha": self.peak_alpha, "peak_age": t - self.peak_round}

    def local_training(self) -> None:
        self.optimizer = self.hyper.make_optimizer(self.model.parameters())
        self.train(epochs=self.hyper.local_epochs, batch=self.hyper.batch)

    def loss(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """L_WSM, Eq. 2, with the label frequencies of the local samples, or the other loss of ``supervision``."""
        return {self.hyper.supervision: self.supervision(self.model(x), labels)}

    async def send_model(self, assignment: Assignment, net: Net) -> bool:
        """Send the model to the aggregator and adopt the reply; return whether a model came back."""
        aggregator, w = assignment.aggregator, self.model
        pupil = Pupil.of(w)
        self.note_contribution(pupil)
        await net.send(aggregator, pupil)
        reply = await net.gather(Taught, of=[aggregator], deadline_factor=self.schedule.reply_deadlines(net))
        updated = [taught for taught in reply.values() if taught.parameters]
        for taught in updated:
            load(w, taught)
            self.outcomes.note(TRAININGS)
        return bool(updated)

    async def aggregate(self, assignment: Assignment, alpha: float, net: Net) -> bool:
        """Let the models that arrive and the local one teach each other, and send them back.

        Return whether the local model was updated: not if no model arrived, nor if it diverged and was restored.
        """
        pupils = await net.gather(Pupil, of=assignment.senders, deadline_factor=self.schedule.models_deadlines(net))
        models: dict[PeerId, Model] = {}
        for n in sorted(pupils):
            models[n] = self.build_like(pupils[n].architecture).train()
            load(models[n], pupils.pop(n))
        if updated := bool(models):
            before = clone(self.model.state_dict())
            self.mutual_learning({**models, self.me: self.model}, alpha)  # line 4
            if not self.outcomes.note(TRAININGS, self.what_diverged(self.model.state_dict())):
                self.model.load_state_dict(before)
                updated = False
        replies = {n: Taught.of(model) for n, model in models.items()}
        await net.scatter({n: replies.get(n, NOT_TAUGHT) for n in assignment.senders})  # line 5
        return updated

    def mutual_learning(self, models: Mapping[PeerId, Model], alpha: float) -> None:
        """Line 4: update the models in place by K epochs over the local samples."""
        h, ids = self.hyper, sorted(models)
        participants = make_participants([models[n] for n in ids], h.make_optimizer, by_size=h.teachers == "size")
        students = participants if h.mutual else [participants[ids.index(self.me)]]
        factors = loss_factors(alpha, h.scheduled)
        train_mutually(
            self, participants, students, self.supervision, factors, h.mutual_epochs, h.mutual_batch_models, h.wsl
        )
        self._diagnostics["models"] = len(models)

    def update_peak(self, t: int, alpha: float, net: Net) -> None:
        """Line 6: Ŵ ← W and α_n ← α, if α ≥ α_n or this round is one of the period's peaks."""
        senders = self.schedule.sender_count(net.peers)
        peaks = self.hyper.peak_updates or (round(net.peers / senders) if 2 * senders < net.peers else 1)
        if alpha >= self.peak_alpha or self.hyper.is_among_largest(peaks, t):
            self.peak.load_state_dict(clone(self.model.state_dict()))  # a copy of extra state, too
            self.peak_alpha, self.peak_round = max(self.peak_alpha, alpha), t

    def extra_metrics(self, whole: bool) -> Iterable[ExtraMetric]:
        """The peak model on the test samples; both models on the validation samples, the paper's local accuracy."""
        yield from on_test_samples("peak", self.peak, self.data, whole)
        yield ExtraMetric("local", self.predict, self.data.validation)
        yield ExtraMetric("peak_local", self.peak, self.data.validation)

    def diagnostics(self) -> Mapping[str, float]:
        """α of the round, α_n after it, rounds since the last update of the peak model (from the start if there was
        none), and at an aggregator the number of models, with the local one."""
        return self._diagnostics

    def layouts(self) -> Sequence[Layout]:
        """Models of every architecture of the mesh may arrive to be taught; only the peer's own comes back."""
        layouts = []
        for model in map(self.build_like, dict.fromkeys(self.architectures)):
            constants = {"buffers": constants_of(model), "frozen": frozen_of(model)}
            layouts.append(Layout.of(Pupil.of(model), fixed=["architecture"], constants=constants))
        constants = {"buffers": constants_of(self.model)}
        return [*layouts, *(Layout.of(reply, constants=constants) for reply in (Taught.of(self.model), NOT_TAUGHT))]

    def build_like(self, architecture: str) -> Model:
        """Return a model of this architecture; the caller overwrites its values."""
        with rng.torch_seeded(self.seed, "dfml.overwritten"):
            return self.build(self.architectures.index(architecture))
