"""FedProto: Federated Prototype Learning across Heterogeneous Clients.

Yue Tan, Guodong Long, Lu Liu, Tianyi Zhou, Qinghua Lu, Jing Jiang, Chengqi Zhang: «FedProto: Federated Prototype
Learning across Heterogeneous Clients», AAAI 2022. https://arxiv.org/abs/2105.00243
As FedTGP's paper restates and runs it (Eqs. 2 to 4; https://arxiv.org/abs/2401.03230).

Peers with different models exchange nothing but class prototypes: the mean feature of each class that they have
samples of. In round t, peer i

    1  trains on  cross-entropy + λ · distance of f_i(x) to the global prototype P̄^y
    2  computes its own prototypes  P_i^c = mean of f_i(x) over its training samples of class c      (Eq. 2)
    3  sends them, and averages those of {i} ∪ N_i class by class, weighted by |D_{j,c}|, to P̄       (Eq. 3)

and classifies x by the nearest P̄^c. On a complete graph all peers have the paper's global prototypes, bit for bit.

Differs from the paper:

- the distance in line 1 is the mean squared error over batch and dimensions, as in the released code of both papers,
  with λ = 10, which FedTGP's authors ran (FedProto's own README has 1, and 0.1 for CIFAR-10). Eq. 4 has the Euclidean
  distance between class means, to which FedTGP's λ = 0.1 belongs (``distance: euclidean``; class means are then those
  of the batch).
- Eq. 3 prints the weights |D_{j,c}| / N_c and divides by the number of peers besides; here weights sum to 1.
- a class that nobody who was heard in a round has samples of keeps its global prototype (the code drops it).
- classes that never were heard of have no prototype: nothing pulls there, and nothing is classified so.
- peers that do not take part in a round (``participation``) hear the others, and move their global prototypes.
- on a sparse graph each peer's global prototypes are those of its own neighbourhood.
- before there is any global prototype the head classifies.
- a neighbour that misses a deadline is left out of that round's mean, and so are prototypes with NaN or infinity or
  absurdly large numbers, the own ones too.
- a last training batch of one sample is left out when there are others.

What FedTGP has in common with it is ``Guided``.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar

import numpy as np
import torch
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss, one_hot

from p2pfl.algorithms.base import Algorithm
from p2pfl.algorithms.fedavg import Share
from p2pfl.net import Net
from p2pfl.options import Options
from p2pfl.runfolder import PeerId
from p2pfl.training import make_optimizer
from p2pfl.wire import Body, Layout, is_finite


@dataclass(frozen=True)
class Guidance(Options):
    """What every method has whose local training is guided by global prototypes."""

    local_epochs: PositiveInt = 1
    """E, epochs over the own samples in one round."""
    batch: PositiveInt = 10
    """Samples in one training step."""
    lr: PositiveFloat = 0.01
    """η of SGD."""
    momentum: NonNegativeFloat = 0.0
    """Of SGD; its state lives as long as the peer."""
    weight_decay: NonNegativeFloat = 0.0
    """ℓ2 penalty added to the gradient."""
    alignment: NonNegativeFloat | None = None
    """λ, weight of the distance between features and global prototypes; by default 10 for mse, 0.1 for euclidean."""
    distance: Literal["mse", "euclidean"] = "mse"
    """mse: mean over batch and dimensions of (f(x) − P^y)²; euclidean: mean over the batch's classes of the
    distance between the class's mean feature and P^c (Eq. 4 as printed)."""
    participation: Share = 1.0
    """ρ, share of the peers that train and send in a round (Table 2 of FedTGP: 0.5)."""


@dataclass(frozen=True)
class Hyper(Guidance):
    weighted: bool = True
    """Weigh each peer's prototype by its number of samples of that class; otherwise equally, as the released code
    does, and then no count leaves the peer."""


# ---- what peers say ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prototypes(Body):
    """P_j^c, float32 [C_j, d], one row for each class that the sender has; those classes; |D_{j,c}| of each, or
    nothing where the method does not weigh by them."""

    values: Tensor
    classes: tuple[int, ...]
    samples: tuple[int, ...]


@dataclass(frozen=True)
class Heard:
    """Prototypes of several peers, a row for each peer and class, by peer, then by class, ascending.

    Attributes:
        values: float32 [n, d].
        labels: int64 [n], the classes.
        senders: int64 [n].
        samples: float64 [n], the weight of each row in a mean.
    """

    values: Tensor
    labels: Tensor
    senders: Tensor
    samples: Tensor

    def of(self, peer: PeerId) -> Tensor:
        """[C_j, d], the prototypes of one peer."""
        return self.values[self.senders == peer]


LARGEST = 1e18
"""Length of the longest prototype that is believed."""


def together(bodies: Mapping[PeerId, Prototypes], classes: int, features: int, device: torch.device) -> Heard:
    """What several peers said, as one table. No counts are ones.

    Left out are rows of classes that do not exist or that the peer has named already, of less than one sample, and
    of a size whose square is no float32 any more: distances to them would be infinite, and spoil everybody's.
    """
    values, labels, senders, samples = [torch.empty(0, features, device=device)], [], [], []
    for peer in sorted(bodies):
        body = bodies[peer]
        counts = body.samples or (1,) * len(body.classes)
        named = zip(body.classes, counts, range(len(body.values)), strict=False)
        sound = (torch.linalg.vector_norm(body.values, dim=1) < LARGEST).tolist()
        good = [
            (label, count, row)
            for label, count, row in named
            if 0 <= label < classes and count > 0 and sound[row] and label not in body.classes[:row]
        ]
        values.append(body.values[[row for _, _, row in good]].to(device))
        labels += [label for label, _, _ in good]
        senders += [peer] * len(good)
        samples += [float(count) for _, count, _ in good]
    return Heard(
        torch.cat(values),
        torch.tensor(labels, dtype=torch.int64, device=device),
        torch.tensor(senders, dtype=torch.int64, device=device),
        torch.tensor(samples, dtype=torch.float64, device=device),
    )


# ---- the equations -------------------------------------------------------------------------------------------


def class_means(values: Tensor, labels: Tensor, weights: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Σ w x / Σ w over the rows of each class: Eq. 3, and with equal weights FedTGP's Q.

    Args:
        values: float [n, d].
        labels: int64 [n].
        weights: float64 [n], positive.
        classes: K.

    Returns:
        float [K, d] like ``values``, rows of absent classes 0; bool [K], which classes there are.
    """
    shares = one_hot(labels, classes).to(torch.float64) * weights[:, None]
    totals = shares.sum(0)
    means = shares.T @ values.to(torch.float64) / totals.clamp(min=torch.finfo(torch.float64).tiny)[:, None]
    return means.to(values.dtype), totals > 0


def distances(points: Tensor, prototypes: Tensor) -> Tensor:
    """Euclidean distances [n, K] of points [n, d] to prototypes [K, d], from differences and so exact near 0."""
    return torch.cdist(points, prototypes, compute_mode="donot_use_mm_for_euclid_dist")


def gaps(prototypes: Tensor) -> Tensor:
    """The prototype margin of each row (Fig. 1 of FedTGP): distance [n] to the nearest of the others, inf if none."""
    between = distances(prototypes, prototypes)
    return between.fill_diagonal_(torch.inf).amin(1) if len(between) else between.new_empty(0)


def misalignment(z: Tensor, labels: Tensor, prototypes: Tensor, known: Tensor, distance: str) -> Tensor:
    """φ in Eq. 4 on one batch, without λ. Classes without a prototype contribute 0.

    Args:
        z: features, float [B, d].
        labels: int64 [B].
        prototypes: float [K, d].
        known: bool [K], which of them exist.
        distance: ``mse`` or ``euclidean``, see Guidance.
    """
    if distance == "mse":
        targets = torch.where(known[labels, None], prototypes[labels], z.detach())
        return mse_loss(z, targets)
    members = one_hot(labels, len(prototypes)).to(z.dtype)
    counts = members.sum(0)
    present = (counts > 0) & known
    means = (members.T @ z)[present] / counts[present, None]
    apart: Tensor = torch.linalg.vector_norm(means - prototypes[present], dim=1)
    return apart.sum() / (counts > 0).sum()


# ---- the methods ---------------------------------------------------------------------------------------------

G = TypeVar("G", bound=Guidance)


class Guided(Algorithm[G]):
    """Local training guided by global prototypes, which each peer makes of what it hears; a subclass says how."""

    equal_features = True
    state: ClassVar[tuple[str, ...]] = ("model", "optimizer", "prototypes", "known")
    weighted = False
    """Whether sample counts travel."""

    def setup(self) -> None:
        h = self.hyper
        self.optimizer = make_optimizer(
            "sgd", self.model.parameters(), lr=h.lr, momentum=h.momentum, weight_decay=h.weight_decay
        )
        self.prototypes = torch.zeros(self.model.classes, self.model.features, device=self.device)
        self.known = torch.zeros(self.model.classes, dtype=torch.bool, device=self.device)
        self.observed: dict[str, float] = {}
        usual = 10.0 if h.distance == "mse" else 0.1
        self.alignment = usual if h.alignment is None else h.alignment

    async def round(self, t: int, net: Net) -> None:
        h = self.hyper
        self.observed = {}
        taking_part = net.participants(h.participation)
        bodies: dict[PeerId, Prototypes] = {}
        if self.me in taking_part:
            self.train(epochs=h.local_epochs, batch=h.batch)  # line 1
            own = self.own_prototypes()  # line 2
            await net.broadcast(own)
            if is_finite(own):  # else the others leave it out too
                bodies[self.me] = own
        bodies |= await net.gather(Prototypes, of=[j for j in net.sources if j in taking_part])
        heard = together(bodies, self.model.classes, self.model.features, self.device)
        if len(heard.labels):
            self.globalize(heard, net)  # line 3
            self.observed.update(compared(heard, self.prototypes, self.known))

    @abstractmethod
    def globalize(self, heard: Heard, net: Net) -> None:
        """Set ``prototypes`` and ``known`` from what the peers said, which is something."""

    def loss(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        z = self.model.backbone(x)
        terms = {"ce": cross_entropy(self.model.head(z), labels)}
        if bool(self.known.any()):
            distance = misalignment(z, labels, self.prototypes, self.known, self.hyper.distance)
            terms["proto"] = self.alignment * distance
        return terms

    @torch.no_grad()
    def own_prototypes(self) -> Prototypes:
        """Eq. 2 over the training samples, not augmented, with the model in evaluation mode."""
        classes = self.model.classes
        sums = torch.zeros(classes, self.model.features, device=self.device)
        for x, labels in self.data.sweep(self.data.train):
            z = self.model.backbone(x)
            sums += one_hot(labels, classes).to(z.dtype).T @ z
        own = self.data.own_classes
        counts = np.bincount(self.data.train.labels, minlength=classes)[list(own)]
        values = sums[list(own)] / torch.tensor(counts, dtype=sums.dtype, device=self.device)[:, None]
        return Prototypes(values, own, tuple(map(int, counts)) if self.weighted else ())

    def predict(self, x: Tensor) -> Tensor:
        """Minus the distance to each global prototype, −inf for classes that have none; before there are any, what
        the head says."""
        if not bool(self.known.any()):
            return super().predict(x)
        return -distances(self.model.backbone(x), self.prototypes).masked_fill(~self.known, torch.inf)

    def layouts(self) -> Sequence[Layout]:
        return [Layout.of(Prototypes(self.prototypes, (), ()), free={"values": (0,)})]

    def observations(self) -> Mapping[str, float]:
        """Of the last round, if something was heard in it; see ``compared``."""
        return {name: value for name, value in self.observed.items() if math.isfinite(value)}


def compared(heard: Heard, prototypes: Tensor, known: Tensor) -> dict[str, float]:
    """Fig. 1 of FedTGP: do the global prototypes stand apart as those of the best peer do?

    ``margin``, the smallest distance between two global prototypes; ``peer_margin``, the largest among the peers of
    the smallest distance between two prototypes of one peer; ``wider``, the share of the classes whose global
    prototype is at least as far from the nearest other as it is at the best peer. Left out where nothing can be
    compared, because there is one class or every peer has one.
    """
    best = torch.zeros(len(prototypes), dtype=prototypes.dtype, device=prototypes.device)
    smallest = []
    for peer in sorted(set(heard.senders.tolist())):
        if len(own := gaps(heard.of(peer))) > 1:
            labels = heard.labels[heard.senders == peer]
            best[labels] = torch.maximum(best[labels], own)
            smallest.append(float(own.min()))
    if not smallest:
        return {}
    margins = torch.zeros_like(best)
    margins[known] = gaps(prototypes[known])
    among = best > 0
    return {
        "margin": float(margins[known].min()),
        "peer_margin": max(smallest),
        "wider": float((margins >= best)[among].double().mean()) if bool(among.any()) else 1.0,
    }


class FedProto(Guided[Hyper]):
    """FedProto: global prototypes are means."""

    name = "fedproto"
    gist = "class prototypes travel and are averaged; features are drawn to them, the nearest classifies"
    title = "FedProto: Federated Prototype Learning across Heterogeneous Clients"
    authors = "Tan, Long, Liu, Zhou, Lu, Jiang, Zhang"
    venue = "AAAI 2022"
    url = "https://arxiv.org/abs/2105.00243"
    Hyper = Hyper

    def setup(self) -> None:
        super().setup()
        self.weighted = self.hyper.weighted

    def globalize(self, heard: Heard, net: Net) -> None:
        """Eq. 3; classes that nobody has keep what they had."""
        means, present = class_means(heard.values, heard.labels, heard.samples, self.model.classes)
        self.prototypes = torch.where(present[:, None], means, self.prototypes)
        self.known = self.known | present
