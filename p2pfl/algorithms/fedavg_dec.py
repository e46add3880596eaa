"""Decentralized FedAvg and FedProx, the baselines of "DFML: Decentralized Federated Mutual Learning".

Yasser H. Khalil, Amir H. Estiri, Mahdi Beitollahi, Nader Asadi, Sobhan Hemati, Xu Li, Guojun Zhang, Xi Chen,
TMLR 2024, Algorithm 2 and appendix A.3. https://arxiv.org/abs/2402.01863

As in DFML, one random peer per round is the aggregator a, some of its neighbors are the senders S, and whole models
travel to the aggregator and back. It averages them per architecture, weighted by sample counts.

Algorithm 2, in round t, with participants P = S ∪ {a} (the paper does not number its lines):

    1  n ∈ P: W̃_n ← W_n, then W_n ← local epochs from W_n on L_WSM          (FedProx: + μ/2 ‖W̃_n − W_n‖²)
    2  s ∈ S: send W_s to a
    3  a: for each architecture u among P: W_g^u ← Σ_{n∈u} d_n W_n / Σ_{n∈u} d_n                       (Eq. 5)
    4  a: send W_g^u to each s ∈ u ∩ S; the receivers, and a itself, continue from it

Models of one architecture start equal.

Differs from the paper:

- aggregators and senders come from a stream that all peers share (aggregator_roles.py); on a sparse graph senders are
  neighbors of the aggregator.
- batch-normalization statistics stay local, unless ``share_statistics: true`` averages them too.
- the optimizer's state is reset in each local training. (The paper does not specify this.)
- the loss is a mean over the batch; Eq. 2 is a sum.
- a sender that gets no reply in time keeps its model; an aggregator continues with the models that arrived.
- a model that has diverged is excluded; an aggregator with such a model adopts the others' average.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from pydantic import NonNegativeFloat
from torch import Tensor

from p2pfl import PeerId, rng
from p2pfl.aggregation.aggregator import Aggregator
from p2pfl.algorithms.aggregator_roles import Aggregation, AggregatorSchedule
from p2pfl.algorithms.base import Algorithm
from p2pfl.algorithms.registration import algorithm
from p2pfl.algorithms.shared_model import SharedModel, shared_tensors, statistics_stay_local
from p2pfl.learning import losses
from p2pfl.learning.evaluation import ExtraMetric
from p2pfl.learning.trainer import reset_norms
from p2pfl.messaging.net import Net
from p2pfl.messaging.schema import Body, Layout
from p2pfl.models import Model
from p2pfl.tensors import Tensors, assign, clone, fractions, parameters_of


@dataclass(frozen=True)
class Hyper(Aggregation, SharedModel):
    pass


@dataclass(frozen=True)
class ProxHyper(Hyper):
    mu: NonNegativeFloat = 1.0
    """μ, weight of the proximal term; the paper uses 0.5, 1 or 2."""


@dataclass(frozen=True)
class Trained(Body):
    """W_s on its way to the aggregator: the name of its architecture, its parameters, and d_s."""

    architecture: str
    values: dict[str, Tensor]
    samples: int


@dataclass(frozen=True)
class Averaged(Body):
    """W_g^u on its way back. An empty one tells a sender whose model came too late not to wait any longer."""

    values: Tensors


def by_architecture(models: Mapping[PeerId, Trained]) -> dict[str, dict[PeerId, Trained]]:
    """Return the clusters u, each with the models of one architecture."""
    clusters: dict[str, dict[PeerId, Trained]] = {}
    for n in sorted(models):
        clusters.setdefault(models[n].architecture, {})[n] = models[n]
    return clusters


def mean_model(cluster: Mapping[PeerId, Trained], aggregation: Aggregator) -> Tensors:
    """W_g^u, Eq. 5: the mean of the models weighted by sample counts; the plain mean if no peer has samples."""
    samples = {n: trained.samples for n, trained in cluster.items()}
    weights = fractions(samples) if any(samples.values()) else None
    return aggregation.combine(cluster, weights, of=next(iter(cluster.values())).architecture)


@algorithm("fedavg-dec")
class FedAvgDec(Algorithm[Aggregation]):
    """Decentralized FedAvg, Algorithm 2."""

    summary = "as dfml, but the aggregator averages the models of each architecture"
    title = "DFML: Decentralized Federated Mutual Learning"
    authors = "Khalil, Estiri, Beitollahi, Asadi, Hemati, Li, Zhang, Chen"
    venue = "TMLR 2024, Algorithm 2"
    url = "https://arxiv.org/abs/2402.01863"
    Hyper: ClassVar[type[Aggregation]] = Hyper
    replies = True
    state: ClassVar[tuple[str, ...]] = ("model",)

    def setup(self) -> None:
        h = self.hyper
        self.sent.load_state_dict(self.initial(self.sent.name).state_dict())
        self.schedule = AggregatorSchedule(self.seed, h.participation, h.fixed_aggregator)
        labels, classes = self.data.train.labels, self.data.classes
        self.supervision = losses.supervision_loss(h.supervision, labels, classes, self.device)

    @property
    def sent(self) -> Model:
        """The model that travels to the aggregator and back."""
        return self.model

    @property
    def sent_architectures(self) -> Iterable[str]:
        """The architectures of models that peers send."""
        return self.architectures

    def initial(self, architecture: str) -> Model:
        """Return the model from which all peers with this architecture start."""
        with rng.torch_seeded(self.seed, "fedavg-dec.init"):
            return self.build(self.architectures.index(architecture))

    async def round(self, t: int, net: Net) -> None:
        assignment = self.schedule.assignment(t, net)
        if self.me not in assignment.participants:
            return
        self.local_training()  # line 1
        local = self.trained(self.sent)
        if self.me == assignment.aggregator:
            deadline_factor = self.schedule.models_deadlines(net)
            received = await net.gather(type(local), of=assignment.senders, deadline_factor=deadline_factor)
            averaged = self.aggregated(self.including_local(received, local), t)  # line 3
            if self.me in averaged:
                self.adopt(averaged[self.me])
            await net.scatter({n: averaged.get(n, self.averaged({})) for n in assignment.senders})  # line 4
        else:
            self.note_contribution(local)
            await net.send(assignment.aggregator, local)  # line 2
            deadline_factor = self.schedule.reply_deadlines(net)
            reply = await net.gather(
                type(self.averaged({})), of=[assignment.aggregator], deadline_factor=deadline_factor
            )
            for body in reply.values():
                if body.values:
                    self.adopt(body)

    def shared_part(self, model: Model) -> dict[str, Tensor]:
        """Return the tensors of a model that travel and are averaged: parameters, and shared statistics."""
        return shared_tensors(model, self.hyper)

    def trained(self, model: Model) -> Trained:
        """Return a model as it is sent to the aggregator."""
        return Trained(model.name, self.shared_part(model), len(self.data.train))

    def averaged(self, values: Tensors) -> Averaged:
        """Return an average as it is sent back."""
        return Averaged(values)

    def aggregated(self, trained: Mapping[PeerId, Trained], t: int) -> dict[PeerId, Averaged]:
        """Return what each of the peers with these models continues from, and this peer too, if anything (line 3)."""
        clusters = by_architecture(trained)
        means = {name: self.averaged(mean_model(cluster, self.aggregation)) for name, cluster in clusters.items()}
        architectures = {**{n: body.architecture for n, body in trained.items()}, self.me: self.sent.name}
        return {n: means[name] for n, name in architectures.items() if name in means}

    def adopt(self, averaged: Averaged) -> None:
        """Continue from what came back (line 4). The statistics of a model that has diverged start anew."""
        diverged = self.what_diverged(self.sent.state_dict())
        assign(self.shared_part(self.sent), averaged.values)
        if diverged and statistics_stay_local(self.hyper):
            reset_norms(self.sent)  # the optimizer's state starts anew in each training

    def local_training(self) -> None:
        self.optimizer = self.hyper.make_optimizer(self.model.parameters())
        self.train(epochs=self.hyper.local_epochs, batch=self.hyper.batch)

    def loss(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """L_WSM (Eq. 2), or the other loss that ``supervision`` names."""
        return {self.hyper.supervision: self.supervision(self.model(x), labels)}

    def extra_metrics(self, whole: bool) -> Iterable[ExtraMetric]:
        """The model on the local validation samples: the paper's local accuracy."""
        yield ExtraMetric("local", self.predict, self.data.validation)

    def layouts(self) -> Sequence[Layout]:
        """Models of every architecture of the mesh may arrive to be averaged; only the peer's own comes back."""
        trained = map(self.trained, map(self.initial, dict.fromkeys(self.sent_architectures)))
        replies = [self.averaged(values) for values in (self.shared_part(self.sent), {})]
        return [
            *(Layout.of(body, fixed=["architecture"], ranges=self.ranges()) for body in trained),
            *(Layout.of(body, ranges=self.ranges()) for body in replies),
        ]

    def ranges(self) -> dict[str, range]:
        """Return the ints that peers may send."""
        return {"samples": self.sample_counts}


@algorithm("fedprox-dec")
class FedProxDec(FedAvgDec):
    """Decentralized FedProx, Algorithm 2: each peer's model at the start of the round serves as its global model."""

    summary = "as fedavg-dec, with a proximal term that keeps local training near the start of the round"
    Hyper = ProxHyper
    hyper: ProxHyper

    def setup(self) -> None:
        super().setup()
        self.start = parameters_of(self.model)  # during local training, a copy

    def local_training(self) -> None:
        self.start = clone(parameters_of(self.model))  # W̃_n
        super().local_training()
        self.start = parameters_of(self.model)

    def loss(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {**super().loss(x, labels), "prox": losses.proximal(self.model, self.start, self.hyper.mu)}
