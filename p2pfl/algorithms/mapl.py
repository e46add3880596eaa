"""MAPL: Model Agnostic Peer-to-peer Learning.

Sayak Mukherjee, Andrea Simonetto, Hadi Jamali-Rad, 2024. https://arxiv.org/abs/2403.19792

Peers with different backbones learn personalized models *and* the collaboration graph. They exchange class prototypes
every round, and classifier heads from round T_thr (``warmup``) on. Backbones never leave the peer.

    backbone f_θ: x → z      projector f_ψ: z → p      head g_φ: z → logits      prototypes ξ: K x d_p

Differs from the paper (``preset: paper``: its formulas as printed; ``preset: official``: the authors' released code):

- The temperature is 0.2; the paper's 100 flattens the softmax until the contrastive terms have almost no gradient.
- l_ce and l_cont are means over the batch, as l_proto is; the paper prints sums over all samples.
- A ReLU stands *before* the linear head, as in the released code, not on its output.
- Head, projector and prototypes start equal on all peers (``shared_init``); s_ij compares the heads' changes since
  then (``compare: changes``). The paper starts at random and compares weights. Adam's β1 is 0.9, in the paper 0.5.
- The optimizer's state persists across rounds, also for the prototypes, which averaging replaces.
- Similarity s_ij is the mean over classes of the row-wise cosine of the heads, as in the released code; biases are
  neither sent nor compared.
- γ counts the samples of {i} and its graph neighbors, including pruned ones; the paper's counts the samples of all
  peers, which no peer knows. (Without the pruned ones γ would grow with each of them, and with it the similarity term
  against the regularizer, until the peer is alone.)
- The degree in CGL's log term is a constant when differentiating (``degree_term: exact`` changes that), and w takes
  plain projected gradient steps of ``graph_lr``; with the models' rate, the paper's η, it would hardly move.
- A pruned neighbor never returns: without its head, no similarity can raise its weight.
- Prototypes of classes without samples at any averaged peer stay unchanged; peers send their classes with them.
- All peers average the prototypes from before averaging; the paper's Algorithm 4 replaces them one by one.
- A neighbor that misses the deadline or has diverged keeps its weight and is excluded from that round's graph step
  and average. A peer whose own head has diverged learns no graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from pydantic import PositiveFloat, PositiveInt, model_validator
from torch import Tensor, nn
from torch.nn.functional import relu

from p2pfl import PeerId, rng
from p2pfl.algorithms import mapl_losses, presets
from p2pfl.algorithms.base import Algorithm
from p2pfl.algorithms.mapl_graph import GraphLearning, collaborative_graph_learning, confidence, similarities
from p2pfl.algorithms.mapl_prototypes import Prototypes, aggregate
from p2pfl.algorithms.registration import algorithm
from p2pfl.learning.optimizers import Beta, OptimizerName
from p2pfl.messaging.net import Net
from p2pfl.messaging.schema import Body, Layout


@dataclass(frozen=True)
class Hyper(mapl_losses.Losses, GraphLearning):
    preset: Literal["default", "paper", "official"] = "default"
    """default: what works best here; paper: the formulas as printed; official: the released code. Other keys
    override it."""
    optimizer: OptimizerName = "adam"
    lr: PositiveFloat = 1e-4
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    fresh_optimizer: bool = False
    """Reset the optimizer's state at the start of each round."""
    projector_hidden: PositiveInt = 4096
    """Width of the projector's hidden layer; small backbones need a small one."""
    head_relu: bool = True
    """ReLU before the head."""
    head_init_scale: PositiveFloat = 1.0
    """Factor on torch's default initial weights of the head."""
    shared_init: bool = True
    """Head, projector and prototypes start equal on all peers."""
    message_budget: PositiveInt | None = None
    """End the run when all peers together have sent this many prototype messages (Table 4)."""

    PRESETS: ClassVar[presets.Presets] = presets.MAPL

    @model_validator(mode="after")
    def _heads_have_a_common_start(self) -> Self:
        if self.compare == "changes" and not self.shared_init:
            raise ValueError(
                "compare: changes needs heads with a common start; set compare: weights, or remove shared_init: false"
            )
        return self


@dataclass(frozen=True)
class Head(Body):
    """φ, float32 [K, d_z], and |D_j|."""

    weight: Tensor
    samples: int


@dataclass(frozen=True)
class Spent(Body):
    """Prototype messages sent so far, int64 []; summed over all peers by an allreduce if there is a budget."""

    messages: Tensor


@algorithm("mapl")
class MAPL(Algorithm[Hyper]):
    """MAPL, Algorithm 3."""

    summary = "prototypes are sent, later heads too; each peer learns mixing weights from the similarity of heads"
    title = "MAPL: Model Agnostic Peer-to-peer Learning"
    authors = "Mukherjee, Simonetto, Jamali-Rad"
    venue = "arXiv 2024"
    url = "https://arxiv.org/abs/2403.19792"
    Hyper = Hyper
    linear_heads = equal_features = True
    prunes = named_loss = asynchronous = True
    learns_weights = True
    state = ("model", "projector", "prototypes", "w", "known_neighbors", "samples", "spent", "optimizer")

    def setup(self) -> None:
        h, head = self.hyper, self.model.linear_head
        self.views = h.views(len(self.data.train))
        d, hidden = head.in_features, h.projector_hidden
        with rng.torch_seeded(self.seed, "mapl.init") if h.shared_init else self.streams.torch("mapl.init"):
            self.model.reset_linear_head()
            with torch.no_grad():
                head.weight.mul_(h.head_init_scale)
            layers = nn.Linear(d, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, d)
            self.projector = nn.Sequential(*layers).to(self.device)
            xi = torch.empty(head.out_features, d).uniform_(-(d**-0.5), d**-0.5)
            self.prototypes = nn.Parameter(xi.to(self.device))
        self.head_start = torch.zeros_like(head.weight) if h.compare == "weights" else head.weight.detach().clone()
        self.optimizer = h.make_optimizer(self.learned())
        self.w = torch.zeros(self.peers, dtype=torch.float64)
        self.w[self.me] = 1.0
        self.known_neighbors: list[PeerId] = []
        self.samples = {self.me: len(self.data.train)}
        self.spent = 0

    def learned(self) -> list[nn.Parameter]:
        return [*self.model.parameters(), *self.projector.parameters(), self.prototypes]

    async def round(self, t: int, net: Net) -> None:
        h = self.hyper
        self.add_neighbors(net.neighbors)
        self.personalized_model_learning()  # line 2
        if h.cgl and t >= h.warmup:  # line 3
            heads = await net.exchange(self.local_head())  # line 4
            self.learn_graph(heads)  # line 5
            if h.prune:
                net.receive_only_from(j for j in net.sources if self.w[j] > 0)
        own = self.local_prototypes()
        self.note_contribution(own)
        received = await net.exchange(own)  # line 7
        own.values.copy_(aggregate(own, received, self.w, self.aggregation))  # line 8
        if h.message_budget:
            await self.check_message_budget(t, net, h.message_budget)

    def add_neighbors(self, neighbors: Sequence[PeerId]) -> None:
        """Give neighbors that have just joined the initial weight 1 / (1 + |N_i|)."""
        new = [j for j in neighbors if j not in self.known_neighbors]
        if new:
            self.w *= (1 + len(neighbors) - len(new)) / (1 + len(neighbors))
            self.w[new] = 1.0 / (1 + len(neighbors))
            self.known_neighbors = sorted([*self.known_neighbors, *new])

    def personalized_model_learning(self) -> None:
        """PML, Algorithm 1: E epochs on l_ce + l_cont + l_proto + l_uni."""
        if self.hyper.fresh_optimizer:
            self.optimizer = self.hyper.make_optimizer(self.learned())
        self.train(epochs=self.hyper.local_epochs, batch=self.hyper.batch)

    def loss(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        h, xi = self.hyper, self.prototypes
        z = self.model.backbone(x)
        p = self.projector(z)
        terms = self.label_loss(self.classify(z), labels)
        if h.contrastive:
            terms["cont"] = mapl_losses.contrastive(p, labels, h)
        if h.prototype:
            terms["proto"] = mapl_losses.prototype_contrastive(p, labels, xi, h)
        if h.uniformity:
            terms["uni"] = mapl_losses.uniformity(xi, h)
        return terms

    def classify(self, z: Tensor) -> Tensor:
        """g_φ: features [B, d_z] to logits [B, K]."""
        logits: Tensor = self.model.head(relu(z) if self.hyper.head_relu else z)
        return logits

    def predict(self, x: Tensor) -> Tensor:
        return self.classify(self.model.backbone(x))

    def local_head(self) -> Head:
        return Head(self.model.linear_head.weight.detach(), len(self.data.train))

    def local_prototypes(self) -> Prototypes:
        """Return ξ_i, sharing memory with the trained parameter."""
        return Prototypes(self.prototypes.detach(), self.data.local_classes)

    def learn_graph(self, heads: Mapping[PeerId, Head]) -> None:
        """CGL over {i} and the neighbors whose heads arrived; the others keep their weights."""
        h, head, start = self.hyper, self.local_head().weight, self.head_start
        if not self.note_contribution(self.local_head()):
            return
        ids = sorted([*heads, self.me])
        others = {j: body.weight.to(self.device) - start for j, body in heads.items()}
        s = similarities(head - start, others, self.me, h)
        self.samples = {**self.samples, **{j: body.samples for j, body in heads.items()}}
        gamma = confidence(self.samples, ids) if h.confidence else torch.ones_like(s)
        self.w[ids] = collaborative_graph_learning(self.w[ids], s, gamma, ids.index(self.me), h)

    async def check_message_budget(self, t: int, net: Net, budget: int) -> None:
        """Table 4: end the run on all peers in the round whose total reaches the budget; ignore impossible totals."""
        self.spent += len(net.receivers)
        total = await net.allreduce(Spent(torch.tensor(self.spent)), op="sum")
        self.finished = int(total.messages) in range(budget, 1 + (t + 1) * self.peers * (self.peers - 1))

    def layouts(self) -> Sequence[Layout]:
        classes = len(self.prototypes)
        return [
            Layout.of(self.local_head(), ranges={"samples": self.sample_counts}),
            Layout.of(self.local_prototypes(), free={"classes": {0: classes}}, ranges={"classes": range(classes)}),
            Layout.of(Spent(torch.tensor(0))),
        ]

    def weights(self) -> Mapping[PeerId, float]:
        return {j: float(weight) for j, weight in enumerate(self.w) if weight > 0}
