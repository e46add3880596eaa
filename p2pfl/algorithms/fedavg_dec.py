"""Decentralized FedAvg and FedProx: the baselines of «DFML: Decentralized Federated Mutual Learning».

Yasser H. Khalil, Amir H. Estiri, Mahdi Beitollahi, Nader Asadi, Sobhan Hemati, Xu Li, Guojun Zhang, Xi Chen,
TMLR 2024, Algorithm 2 and appendix A.3. https://arxiv.org/abs/2402.01863

The roles are DFML's (one aggregator a round and its senders), and whole models travel to the aggregator and back, but
there it only averages: models of one architecture with one another, weighted by sample counts.

Algorithm 2, in round t, with participants P = S ∪ {a}:

    1  n ∈ P: W̃_n ← W_n, then W_n ← local epochs from W_n on L_WSM          (FedProx: + μ/2 ‖W̃_n − W_n‖²)
    2  s ∈ S: send W_s to a
    3  a: for each architecture u among P: W_g^u ← Σ_{n∈u} d_n W_n / Σ_{n∈u} d_n                       (Eq. 5)
    4  a: send W_g^u to each s ∈ u ∩ S; who gets it, and a itself, go on from it

Models of one architecture start equal.

Differs from the paper:

- roles are drawn from a stream that all peers share, as in dfml.py; on a sparse graph senders are neighbours of the
  aggregator.
- only parameters are averaged and travel; batch-normalisation statistics stay local.
- momentum starts anew in each local training. (The paper does not say.)
- the loss is a mean over a batch; Eq. 2 is a sum. A last batch of one sample is left out when there are others.
- a sender whose model does not come back in time keeps its own; an aggregator goes on with the models that have come.
- a model that holds NaN or infinity is left out; its owner, if it aggregates, goes on with the others' average.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

from p2pfl import losses, rng
from p2pfl.algorithms.base import Algorithm
from p2pfl.algorithms.roles import Roster, Share
from p2pfl.losses import Supervision
from p2pfl.models import Model
from p2pfl.net import Net
from p2pfl.options import Options
from p2pfl.runfolder import PeerId
from p2pfl.tensors import Tensors, assign, average, clone, parameters_of
from p2pfl.training import Measure, make_optimizer
from p2pfl.wire import Body, Layout, is_finite


@dataclass(frozen=True)
class Hyper(Options):
    participation: Share = 0.5
    """Senders in a round, as a fraction of all peers (Fig. 19)."""
    fixed_aggregator: bool = False
    """Peer 0 aggregates in every round."""
    local_epochs: PositiveInt = 1
    """Epochs over the own samples before the models meet."""
    batch: PositiveInt = 64
    """Samples in one step."""
    lr: PositiveFloat = 0.01
    """Learning rate of SGD; the paper picks one of 0.1, 0.01, 0.001."""
    momentum: NonNegativeFloat = 0.9
    """Of SGD."""
    weight_decay: NonNegativeFloat = 5e-4
    """ℓ2 penalty added to the gradient."""
    supervision: Supervision = "wsm"
    """Loss on the labels: re-weighted softmax, asymmetric cross-entropy or plain cross-entropy."""


@dataclass(frozen=True)
class ProxHyper(Hyper):
    mu: NonNegativeFloat = 1.0
    """μ, weight of the proximal term; the paper picks one of 0.5, 1, 2."""


@dataclass(frozen=True)
class Trained(Body):
    """W_s on its way to the aggregator: the name of its architecture, its parameters, and d_s."""

    architecture: str
    values: dict[str, Tensor]
    samples: int


@dataclass(frozen=True)
class Averaged(Body):
    """W_g^u on its way back."""

    values: dict[str, Tensor]


NOT_AVERAGED = Averaged({})
"""To a sender whose model did not come in time: it need not wait any longer."""


def by_architecture(models: Mapping[PeerId, Trained]) -> dict[str, dict[PeerId, Trained]]:
    """The clusters u, each of the models of one architecture."""
    clusters: dict[str, dict[PeerId, Trained]] = {}
    for n in sorted(models):
        clusters.setdefault(models[n].architecture, {})[n] = models[n]
    return clusters


def mean_model(cluster: Mapping[PeerId, Trained]) -> dict[str, Tensor]:
    """W_g^u, Eq. 5: the mean of these models, weighted by their samples; by number, if nobody has samples."""
    models: dict[int, Tensors] = {n: trained.values for n, trained in cluster.items()}
    samples = {n: float(max(0, trained.samples)) for n, trained in cluster.items()}
    return average(models, samples if any(samples.values()) else dict.fromkeys(samples, 1.0))


class FedAvgDec(Algorithm[Hyper]):
    """Decentralized FedAvg, Algorithm 2."""

    name = "fedavg-dec"
    gist = "as dfml, but the aggregator averages, only models of one architecture with one another"
    title = "DFML: Decentralized Federated Mutual Learning"
    authors = "Khalil, Estiri, Beitollahi, Asadi, Hemati, Li, Zhang, Chen"
    venue = "TMLR 2024, Algorithm 2"
    url = "https://arxiv.org/abs/2402.01863"
    Hyper = Hyper
    state = ("model",)  # momentum does not outlive a round

    def setup(self) -> None:
        h = self.hyper
        self.model.load_state_dict(self.initial(self.model.name).state_dict())
        self.roster = Roster(self.seed, h.participation, h.fixed_aggregator)
        log_weights = losses.softmax_log_weights(h.supervision, self.data.train.labels, self.data.classes)
        self.log_weights = log_weights.to(self.device)

    def initial(self, architecture: str) -> Model:
        """The model from which all peers with this architecture start."""
        with rng.torch_seeded(self.seed, "fedavg-dec.init"):
            return self.build(self.architectures.index(architecture))

    async def round(self, t: int, net: Net) -> None:
        roles = self.roster.roles(t, net)
        if self.me not in roles.participants:
            return
        self.local_training()  # line 1
        w = parameters_of(self.model)
        own = Trained(self.model.name, w, len(self.data.train))
        if self.me == roles.aggregator:
            trained = await net.gather(Trained, of=roles.senders, patience=self.roster.coming(net))
            if is_finite(own):
                trained[self.me] = own
            means = {name: Averaged(mean_model(cluster)) for name, cluster in by_architecture(trained).items()}  # 3
            answers = {n: means[model.architecture] for n, model in trained.items()}
            if self.model.name in means:
                assign(w, means[self.model.name].values)
            await net.scatter({n: answers.get(n, NOT_AVERAGED) for n in roles.senders})  # line 4
        else:
            await net.send(roles.aggregator, own)  # line 2
            answer = await net.gather(Averaged, of=[roles.aggregator], patience=self.roster.returning(net))
            for averaged in answer.values():
                assign(w, averaged.values or w)

    def local_training(self) -> None:
        h = self.hyper
        self.optimizer = make_optimizer(
            "sgd", self.model.parameters(), lr=h.lr, momentum=h.momentum, weight_decay=h.weight_decay
        )
        self.train(epochs=h.local_epochs, batch=h.batch)

    def loss(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """L_WSM (Eq. 2), or what else ``supervision`` says."""
        return {self.hyper.supervision: losses.reweighted_cross_entropy(self.model(x), labels, self.log_weights)}

    def measures(self, whole: bool) -> Iterable[Measure]:
        """The model on held-out own samples: the paper's local accuracy."""
        yield Measure("local", self.predict, self.data.validation)

    def layouts(self) -> Sequence[Layout]:
        """Models of every architecture in the mesh may come to be averaged; only one of the own comes back."""
        models = (self.initial(name) for name in dict.fromkeys(self.architectures))
        trained = (Trained(model.name, parameters_of(model), 0) for model in models)
        averaged = Averaged(parameters_of(self.model))
        return [
            *(Layout.of(one, fixed=["architecture"]) for one in trained),
            *(Layout.of(answer) for answer in (averaged, NOT_AVERAGED)),
        ]


class FedProxDec(FedAvgDec):
    """Decentralized FedProx, Algorithm 2: each peer's own model at the start of the round is its global one."""

    name = "fedprox-dec"
    gist = "as fedavg-dec, and a proximal term keeps local training near where the round began"
    Hyper = ProxHyper
    hyper: ProxHyper

    def local_training(self) -> None:
        self.start = clone(parameters_of(self.model))  # W̃_n
        super().local_training()

    def loss(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        moved = [(w - self.start[name]).square().sum() for name, w in self.model.named_parameters()]
        return {**super().loss(x, labels), "prox": self.hyper.mu / 2 * torch.stack(moved).sum()}
