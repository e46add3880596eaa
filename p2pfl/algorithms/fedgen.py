"""FedGen: heads are averaged, and train a generator of features, which in turn teaches each peer's head.

Zhuangdi Zhu, Junyuan Hong, Jiayu Zhou: "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", ICML
2021. https://arxiv.org/abs/2105.10056
As FedTGP's paper compares with it (Table 1; https://arxiv.org/abs/2401.03230).

Peers with any backbones share one linear head h. A generator G(ε, y) makes features z of class y from noise ε; p̂(y)
is the distribution of the labels of all peers. In round t on peer i (the paper's Algorithm 1; line numbers are ours):

    1  train backbone and head on   CE(h(f(x)), y) + CE(h(G(ε, ŷ)), ŷ),  ŷ ~ p̂     (Eq. 5)
    2  send the head and the number of samples by class
    3  h ← mean of the heads, weighted by samples, as in LG-FedAvg
    4  S times: G ← G − Adam step on CE(Σ_j n_j h_j(G(ε, ŷ)) / Σ_j n_j, ŷ),  ŷ ~ p̂    (Eq. 4)

Heads are linear, so the mean of their scores is the score of their mean: line 4 needs only the h of line 3.

Differs from the paper:

- There is no server: each peer trains G on the heads that it has received. G starts equal everywhere, and noise and
  classes of line 4 are drawn from a stream that all peers share, so that on a complete graph all have the same G
  until one misses a head or joins late.
  Only the heads and the counts are sent, where a server also sends G.
- The settings are FedTGP's authors': 32 uniform noise values, one hidden layer as wide as the features, Adam
  with learning rate 0.1, started anew in each round, S = 100. Heads count by samples, where Eq. 4 has 1/K.
- Line 1 generates as many features as a batch has samples, at least two. G is not trained there. In round 0, before
  any counts are known, nothing is generated.
- p̂ is over the peers whose counts have arrived so far, and the peer itself once it has taken part.
- Batch normalization in G normalizes by the batch, in line 1 too.
- A peer that receives no head keeps G. A G that has diverged is restored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from p2pfl import PeerId, rng
from p2pfl.algorithms.averaging import Averaging, Participation, Shared
from p2pfl.algorithms.registration import algorithm
from p2pfl.learning.optimizers import Adam
from p2pfl.messaging.net import Net
from p2pfl.messaging.schema import Layout
from p2pfl.tensors import Tensors, clone


@dataclass(frozen=True)
class GeneratorHyper(Participation):
    generated: NonNegativeFloat = 1.0
    """Weight of the loss on generated features in line 1; 0 is LG-FedAvg."""
    noise: PositiveInt = 32
    """Noise values per generated feature vector."""
    generator_hidden: PositiveInt | None = None
    """Hidden units of G; null: as many as features."""
    generator_steps: NonNegativeInt = 100
    """S, steps that train G in each round."""
    generator_lr: PositiveFloat = 0.1
    """Learning rate of G, for Adam."""


@dataclass(frozen=True)
class Labeled(Shared):
    """The head h_j by name, float32; n_j; and the number of training samples of each class, K ints."""

    labels: tuple[int, ...]


class Generator(nn.Module):
    """G, from noise ε [B, e] and classes y, int64 [B], to features z [B, d]."""

    def __init__(self, noise: int, classes: int, hidden: int, features: int) -> None:
        super().__init__()
        self.classes = classes
        self.layers = nn.Sequential(
            nn.Linear(noise + classes, hidden),
            nn.BatchNorm1d(hidden, track_running_stats=False),
            nn.ReLU(),
            nn.Linear(hidden, features),
        )

    def forward(self, noise: Tensor, y: Tensor) -> Tensor:
        z: Tensor = self.layers(torch.cat([noise, one_hot(y, self.classes).to(noise.dtype)], dim=1))
        return z


@algorithm("fedgen")
class FedGen(Averaging):
    """FedGen: LG-FedAvg with a generator of features."""

    summary = "heads are sent and averaged; they train a generator of features, from which each head learns"
    title = "Data-Free Knowledge Distillation for Heterogeneous Federated Learning"
    authors = "Zhu, Hong, Zhou"
    venue = "ICML 2021"
    url = "https://arxiv.org/abs/2105.10056"
    Hyper = GeneratorHyper
    hyper: GeneratorHyper
    share = "head"
    linear_heads = True
    equal_features = True
    named_loss = True
    state = (*Averaging.state, "generator", "labels")

    def setup(self) -> None:
        super().setup()
        h, model = self.hyper, self.model
        with rng.torch_seeded(self.seed, "fedgen.init"):  # equal on all peers
            generator = Generator(h.noise, model.classes, h.generator_hidden or model.features, model.features)
        self.generator = generator.to(self.device)
        self.labels: dict[PeerId, tuple[int, ...]] = {}
        """Samples by class of each peer whose counts have arrived."""

    async def round(self, t: int, net: Net) -> None:
        received = await self.train_and_exchange(net)  # lines 1 and 2
        if self.average(received):  # line 3
            self.train_generator(received, net)  # line 4

    def loss(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Line 1, Eq. 5."""
        terms = super().loss(x, labels)
        if self.labels and self.hyper.generated:
            noise, y = self.drawn(self.streams.numpy("generated"), len(labels))
            with torch.no_grad():
                z = self.generator(noise, y)
            terms["generated"] = self.hyper.generated * cross_entropy(self.model.head(z), y)
        return terms

    def drawn(self, stream: np.random.Generator, samples: int) -> tuple[Tensor, Tensor]:
        """Draw noise ε ~ U(0, 1), float32 [B, e], and classes ŷ ~ p̂, int64 [B]."""
        samples = max(samples, 2)  # batch normalization needs two
        counts = np.sum(list(self.labels.values()), axis=0)
        noise = stream.random((samples, self.hyper.noise), dtype=np.float32)
        classes = stream.choice(len(counts), size=samples, p=counts / counts.sum())
        return torch.from_numpy(noise).to(self.device), torch.from_numpy(classes).to(self.device)

    def local_part(self) -> Labeled:
        counts = np.bincount(self.data.train.labels, minlength=self.model.classes)
        return Labeled(self.shared_part(), len(self.data.train), tuple(map(int, counts)))

    def train_generator(self, received: Mapping[PeerId, Shared], net: Net) -> None:
        """Train G, with draws that are the same on every peer."""
        arrived = {j: body.labels for j, body in received.items() if isinstance(body, Labeled)}
        self.labels |= {j: n for j, n in arrived.items() if len(n) == self.model.classes and any(n)}
        if not self.labels:
            return
        before = clone(self.generator.state_dict())
        inputs = {"generator": before, "head": self.shared_part(), "labels": sorted(self.labels.items())}
        trained = net.memoized("generator", inputs, lambda: self.trained_generator(net.shared))
        self.assign_unless_diverged(self.generator.state_dict(), trained)

    def trained_generator(self, stream: np.random.Generator) -> Tensors:
        """Return the tensors of G after S steps on Eq. 4."""
        h = self.hyper
        before = clone(self.generator.state_dict())
        optimizer = Adam(self.generator.parameters(), lr=h.generator_lr)
        self.generator.train()
        for _ in range(h.generator_steps):
            noise, y = self.drawn(stream, h.batch)
            optimizer.zero_grad(set_to_none=True)
            loss = cross_entropy(self.model.head(self.generator(noise, y)), y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            self.after_batch()  # allow a stop in between
        trained = clone(self.generator.state_dict())
        self.generator.load_state_dict(before)
        self.generator.eval()
        self.model.zero_grad(set_to_none=True)
        return trained

    def layouts(self) -> Sequence[Layout]:
        ranges = {"samples": self.sample_counts, "labels": self.sample_counts}
        return [Layout.of(self.local_part(), free={"labels": {0: self.model.classes}}, ranges=ranges)]
