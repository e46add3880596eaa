"""FedStyle's and its baselines' small peers, and their rounds as the papers have them, in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from p2pfl.algorithms.fedavg_ssl import FedAvgSSL
from p2pfl.algorithms.fedstyle import FedStyle
from p2pfl.algorithms.fedstyle_extraction import sobel
from p2pfl.data import Dataset, Split
from p2pfl.messaging.topology import Topology
from p2pfl.models import Model
from p2pfl.models.fedstyle import mlp
from tests.bodies import net_of
from tests.support import peer_data, random_dataset, setting

Weights = dict[str, Tensor]

SIDE, FEATURES, CLASSES = 3, 4, 3
LINE = Topology.from_edges(3, [(0, 1), (1, 2)])
ALONE = Topology.from_edges(1, [])

SMALL: dict[str, Any] = {
    "style_epochs": 2,
    "local_epochs": 2,
    "lr": 0.05,
    "temperature": 0.5,
    "hidden": 3,
    "output": 3,
    "probe_epochs": 3,
    "probe_steps": 1,
}


def complete(peers: int) -> Topology:
    return Topology.from_edges(peers, [(i, j) for i in range(peers) for j in range(i)])


def hyper(of: type[FedAvgSSL] = FedStyle, **given: Any) -> Any:
    known = {name: value for name, value in SMALL.items() if name in of.Hyper.known()}
    return of.Hyper.parse({**known, **given})


def styled(samples: int, seed: int, styles: int = 2) -> Dataset:
    """Noise of 3x3 pixels; sample n has the label n mod 3, and the style n mod 2."""
    plain = random_dataset(samples, classes=CLASSES, size=(SIDE, SIDE), seed=seed, tests=12)
    train, test = (replace(half, styles=np.arange(len(half)) % styles) for half in (plain.train, plain.test))
    return replace(plain, train=train, test=test)


def network(kind: str) -> Model:
    """All peers start from the same values."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        layers: list[nn.Module] = [nn.Flatten(), nn.Linear(SIDE * SIDE, FEATURES)]
        if kind == "normalised":
            layers.append(nn.BatchNorm1d(FEATURES))
        return Model(kind, nn.Sequential(*layers), FEATURES, CLASSES)


def dimmed() -> Callable[[Tensor], Tensor]:
    """Darken every second batch of views by a varying amount: two different views without randomness."""
    calls = iter(range(10_000))
    return lambda x: x if (call := next(calls)) % 2 == 0 else x * (0.5 + 0.1 * (call % 3))


def make(
    h: Any,
    peers: int = 3,
    *,
    of: type[FedAvgSSL] = FedStyle,
    kind: str = "linear",
    labels: Callable[[NDArray[np.int64]], Any] = lambda y: y,
) -> list[Any]:
    """Peer i has 4 + 2 i samples of one dataset."""
    dataset = styled(60, seed=3)
    relabeled = [Split(half.images, labels(half.labels), half.styles) for half in (dataset.train, dataset.test)]
    dataset = replace(dataset, train=relabeled[0], test=relabeled[1])
    made: list[Any] = []
    for me in range(peers):
        chosen = range(10 * (me % 6), 10 * (me % 6) + 4 + 2 * (me % 3))
        data = peer_data(dataset, chosen, test=range(me % 2, 12, 2), augment=dimmed())
        made.append(of(h, setting(me, peers, network(kind), data)))
    return made


class Reference:
    """One peer of fedavg-ssl by the paper's algorithms, in float64; one batch holds all samples."""

    def __init__(self, peer: Any) -> None:
        self.h, data = peer.hyper, peer.data
        self.samples = len(data.train)
        raw, _ = data.train.take(np.arange(self.samples))
        self.raw = raw
        self.x = raw.reshape(self.samples, -1).double() / 255.0
        self.w = self.of(peer.content)
        self.local = dict(self.w)
        """What is sent: w_i, or w_i,g."""
        self.views = dimmed()

    @staticmethod
    def of(module: nn.Module) -> Weights:
        return {name: parameter.detach().double() for name, parameter in module.named_parameters()}

    @staticmethod
    def linear(x: Tensor, weights: Mapping[str, Tensor], name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def two_layers(self, x: Tensor, weights: Mapping[str, Tensor], prefix: str = "") -> Tensor:
        return self.linear(self.linear(x, weights, f"{prefix}0").clamp(min=0.0), weights, f"{prefix}2")

    def descend(self, loss: Callable[[], Tensor], *learned: Weights) -> None:
        for weights in learned:
            for name in weights:
                weights[name] = weights[name].detach().requires_grad_()
        loss().backward()  # type: ignore[no-untyped-call]
        for weights in learned:
            for name, value in weights.items():
                step = torch.zeros_like(value) if value.grad is None else self.h.lr * value.grad
                weights[name] = (value - step).detach()

    def nce(self, z: Tensor, label: Callable[[int], int]) -> Tensor:
        """Mean over samples of the mean over their positives of −log of the fraction of e^{cos/τ}."""
        z = z / z.norm(dim=1, keepdim=True)
        others = 1.0 - torch.eye(len(z), dtype=torch.float64)
        score = others * torch.exp(z @ z.T / self.h.temperature)
        positive = torch.tensor([[i != n and label(i) == label(n) for n in range(len(z))] for i in range(len(z))])
        fraction = torch.where(positive, score / score.sum(1, keepdim=True), 1.0)
        return (-fraction.log().sum(1) / positive.sum(1)).mean()

    def features(self, x: Tensor, weights: Weights) -> Tensor:
        return self.linear(x, weights, "backbone.1")

    def project(self, x: Tensor, weights: Weights) -> Tensor:
        return self.two_layers(self.features(x, weights), weights, "projector.")

    def unsupervised(self, z1: Tensor, z2: Tensor, weights: Weights) -> Tensor:
        if self.h.loss == "simclr":
            return self.nce(torch.cat([z1, z2]), lambda i: i % self.samples)
        p1, p2 = (self.two_layers(z, weights, "predictor.") for z in (z1, z2))

        def distance(p: Tensor, z: Tensor) -> Tensor:
            z = z.detach()
            cosines: Tensor = ((p / p.norm(dim=1, keepdim=True)) * (z / z.norm(dim=1, keepdim=True))).sum(1)
            return -cosines.mean()

        return distance(p1, z2) / 2 + distance(p2, z1) / 2

    def contrast(self, weights: Weights, x1: Tensor, x2: Tensor) -> Tensor:
        return self.unsupervised(self.project(x1, weights), self.project(x2, weights), weights)

    def is_shared(self, name: str) -> bool:
        return True

    def train(self) -> None:
        """LocalUpdate and LocalTraining."""
        self.local |= {name: value for name, value in self.w.items() if self.is_shared(name)}
        self.local_training()

    def local_training(self) -> None:
        for _ in range(self.h.local_epochs):
            x1, x2 = self.views(self.x), self.views(self.x)
            self.descend(partial(self.contrast, self.local, x1, x2), self.local)


class StyleReference(Reference):
    """One peer of fedstyle."""

    def __init__(self, peer: FedStyle) -> None:
        super().__init__(peer)
        self.edges = sobel(self.raw).reshape(self.samples, -1).double() / 255.0
        self.style, self.generator = self.of(peer.infusion.style_net), self.of(peer.infusion.generator)
        with peer.streams.torch("fedstyle.style"):  # as the peer itself would draw it later
            self.style_projector = self.of(mlp(*peer.widths))

    def extract(self) -> None:
        """Algorithm 2."""

        def loss() -> Tensor:
            h = self.linear(torch.cat([self.x, self.edges]), self.style, "1")
            return self.nce(self.two_layers(h, self.style_projector), lambda i: i // self.samples)

        for _ in range(self.h.style_epochs):
            self.descend(loss, self.style, self.style_projector)

    def local_training(self) -> None:
        """Algorithm 3."""
        for _ in range(self.h.local_epochs):
            x1, x2 = self.views(self.x), self.views(self.x)

            def loss(x1: Tensor = x1, x2: Tensor = x2) -> Tensor:
                h1, h2 = self.features(x1, self.local), self.features(x2, self.local)
                hs, hsobel = (self.linear(x, self.style, "1").detach() for x in (self.x, self.edges))
                infused = (
                    self.two_layers(torch.cat(pair, dim=1), self.generator) for pair in ((h1, hs), (h2, hsobel))
                )
                z1, z2 = (self.two_layers(h, self.local, "projector.") for h in infused)
                weight: float = self.h.style_weight
                return self.contrast(self.local, x1, x2) + weight * self.unsupervised(z1, z2, self.local)

            self.descend(loss, self.local, *([self.generator] if self.h.train_generator else []))


def participants(peers: int, fraction: float, t: int) -> tuple[int, ...]:
    return net_of(0, complete(peers), t, 0).participants(fraction)


def reference_rounds(peers: Sequence[Reference], topology: Topology, rounds: int, fraction: float = 1.0) -> None:
    """Algorithms 1 and 4, over neighborhoods."""
    for peer in peers:
        if isinstance(peer, StyleReference):
            peer.extract()
    for t in range(rounds):
        chosen = participants(len(peers), fraction, t)
        for j in chosen:
            peers[j].train()
        for me, peer in enumerate(peers):
            near = [j for j in chosen if j == me or j in topology.neighbors[me]]
            total = sum(peers[j].samples for j in near)
            if near:
                for name in filter(peer.is_shared, peer.w):
                    parts = [peers[j].samples / total * peers[j].local[name] for j in near]
                    peer.w[name] = torch.stack(parts).sum(0)


def agree(module: nn.Module, expected: Weights) -> None:
    found = dict(module.named_parameters())
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name].detach().double(), value, atol=2e-5, rtol=1e-4)
