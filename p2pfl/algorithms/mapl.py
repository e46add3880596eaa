"""MAPL: Model Agnostic Peer-to-peer Learning.

Sayak Mukherjee, Andrea Simonetto, Hadi Jamali-Rad, 2024. https://arxiv.org/abs/2403.19792

Peers with different backbones learn personalized models *and* the graph of who should collaborate with whom.
They exchange class prototypes every round, and classifier heads from round T_thr (``warmup``) on. Backbones
never leave the peer.

    backbone f_θ: x → z      projector f_ψ: z → p      head g_φ: z → logits      prototypes ξ: K x d_p

Differs from the paper (``preset: official`` follows the authors' released code instead where it differs):

- temperature 0.2; the paper's 100 flattens the softmax until contrastive terms have almost no gradient.
- l_ce and l_cont are means over the batch, as l_proto is; the paper prints sums over all samples.
- a ReLU stands *before* the linear head, as in the released code, not on its output; it makes the heads of
  different backbones comparable.
- heads start small (``head_init_scale``) and head, projector and prototypes start equal on all peers
  (``shared_init``): both make the heads comparable earlier. The paper starts each peer at random.
- the optimiser's state lives across rounds, that of the prototypes too, which mixing replaces.
- similarity s_ij is the mean over classes of the row-wise cosine of the heads, as in the released code; biases
  are neither sent nor compared.
- γ counts the samples of {i} and its neighbours in the graph, also of those that it does not hear any more; not those
  of all peers, whom nobody knows. (Were those left out that have no weight, γ would grow with each of them, and with
  it the similarity term against the regulariser, until the peer is alone.)
- the degree in CGL's log term is a constant when differentiating (``degree_term: exact`` changes that), and w takes
  plain projected gradient steps of ``graph_lr``: the paper gives neither optimiser nor rate for it.
- a neighbour without weight is not heard again: without its head, no similarity could bring it back.
- prototype rows of classes that nobody in the mix has samples of stay as they are. For this, prototypes travel
  with the sender's classes, as heads do with its number of samples.
- all peers mix what the others had before mixing; the paper's pseudo-code (Algorithm 4) replaces them one by one.
- a neighbour that misses a deadline, or sends NaN or infinity, keeps its weight and is left out of that round's
  graph step and mix. A peer whose own head is not finite learns no graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy, normalize, relu

from p2pfl import losses, rng
from p2pfl.algorithms.base import Algorithm
from p2pfl.net import Net
from p2pfl.options import Options
from p2pfl.runfolder import PeerId
from p2pfl.tensors import is_finite
from p2pfl.training import make_optimizer
from p2pfl.wire import Body, Layout

Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


@dataclass(frozen=True)
class Hyper(Options):
    preset: Literal["paper", "official"] = "paper"
    """paper: the formulas as printed; official: what the authors' code does. Other keys win over it."""
    local_epochs: PositiveInt = 1
    """E, epochs of PML in one round."""
    batch: PositiveInt = 64
    """B samples, in two augmented views each, in one step."""
    lr: PositiveFloat = 1e-4
    """Adam's learning rate."""
    betas: tuple[Beta, Beta] = (0.5, 0.999)
    """Adam's betas."""
    weight_decay: NonNegativeFloat = 0.0
    """ℓ2 penalty added to the gradient."""
    fresh_optimizer: bool = False
    """Forget Adam's state at the start of each round."""

    temperature: PositiveFloat = 0.2
    """τ of l_cont and l_proto (the paper prints 100)."""
    losses: Literal["paper", "official"] = "paper"
    """Form of l_cont, l_proto and l_uni; official: sum inside the log, raw ξ at temperature 1, exp(<ξ,ξ>/100)."""
    contrastive: bool = True
    """l_cont on (Table 2)."""
    prototype: bool = True
    """l_proto on (Fig. 3)."""
    uniformity: bool = True
    """l_uni on (Table 2)."""
    projector_hidden: PositiveInt = 4096
    """Width of the projector's hidden layer; small backbones want a small one."""
    head_relu: bool = True
    """ReLU before the head."""
    head_init_scale: PositiveFloat = 0.1
    """Factor on torch's default initial weights of the head."""
    shared_init: bool = True
    """Head, projector and prototypes start equal on all peers."""

    cgl: bool = True
    """Learn the collaboration graph (Table 2); otherwise weights stay uniform and no head is sent."""
    warmup: NonNegativeInt = 100
    """T_thr, the first round with CGL."""
    graph_steps: PositiveInt = 1
    """E_g, gradient steps on w in one round (Table 6)."""
    graph_lr: PositiveFloat = 1.0
    """Learning rate of w."""
    graph_optimizer: Literal["sgd", "adam"] = "sgd"
    """sgd: plain projected gradient; adam: a fresh Adam each round with the betas above."""
    mu_similarity: NonNegativeFloat = 0.5
    """μ1, weight of the similarity term in l_g."""
    mu_regularizer: NonNegativeFloat = 0.1
    """μ2, weight of the regulariser in l_g."""
    beta: NonNegativeFloat = 0.5
    """β, weight of the norm in the regulariser."""
    epsilon: PositiveFloat = 1e-6
    """ε in the logarithm of the degree."""
    similarity: Literal["rows", "flat", "off"] = "rows"
    """s_ij: mean cosine of the heads' rows, cosine of the flattened heads, or 1 for all (Table 3)."""
    scale_similarity: bool = False
    """Divide the neighbours' s_ij by the largest of them, if that is positive."""
    confidence: bool = True
    """γ by sample counts; otherwise equal (Table 3)."""
    norm: Literal["l1", "l2"] = "l2"
    """Norm in the regulariser (Table 3)."""
    degree_term: Literal["constant", "exact"] = "constant"
    """Differentiate the logarithm of the degree (exact) or not."""
    prune: bool = True
    """Stop hearing peers whose weight is 0."""
    message_budget: PositiveInt | None = None
    """End the run when all peers together have sent so many prototype messages (Table 4)."""

    PRESETS: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "official": {
            "temperature": 100.0,
            "losses": "official",
            "fresh_optimizer": True,
            "head_init_scale": 1.0,
            "shared_init": False,
            "graph_optimizer": "adam",
            "graph_lr": 0.1,
            "scale_similarity": True,
            "prune": False,
        }
    }


# ---- what peers say ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Head(Body):
    """φ, float32 [K, d_z], and |D_j|."""

    weight: Tensor
    samples: int


@dataclass(frozen=True)
class Prototypes(Body):
    """ξ, float32 [K, d_p], and the classes that the sender has samples of."""

    values: Tensor
    classes: tuple[int, ...]


@dataclass(frozen=True)
class Spent(Body):
    """Prototype messages sent so far, int64 []; summed over all peers when there is a budget."""

    messages: Tensor


# ---- CGL: learning the collaboration graph (Algorithm 2) ------------------------------------------------------


def head_similarity(own: Tensor, other: Tensor, form: str) -> float:
    """s_ij in [-1, 1] of two heads [K, d_z]."""
    own, other = own.double(), other.double()
    if form == "off":
        return 1.0
    if form == "flat":
        return float(cosine_similarity(own.flatten(), other.flatten(), dim=0))
    return float(cosine_similarity(own, other, dim=1).mean())


def scaled(s: Tensor, me: int) -> Tensor:
    """s [n] with the neighbours' entries divided by the largest of them; the own one, at ``me``, stays 1."""
    others = torch.arange(len(s)) != me
    largest = float(s[others].max()) if others.any() else 0.0
    # A negative one would turn the order of similarities round.
    return torch.where(others, s / largest, s) if largest > 0 else s


def confidence(samples: Mapping[PeerId, int], ids: Sequence[PeerId]) -> Tensor:
    """γ_j = |D_j| / Σ_l |D_l| of the peers ``ids``, float64 [n]; the sum is over all of ``samples``.

    Equal for all if nobody has any. What neighbours say may be negative.
    """
    counts = {j: max(0, count) for j, count in samples.items()}
    if not any(counts.values()):
        counts = dict.fromkeys(counts, 1)
    return torch.tensor([counts[j] for j in ids], dtype=torch.float64) / sum(counts.values())


def graph_loss(w: Tensor, s: Tensor, gamma: Tensor, me: int, h: Hyper) -> Tensor:
    """l_g, Eqs. 7 and 8: μ1 Σ_j γ_j (−s_ij) w_ij + μ2 ( β ‖w_i‖ − log(Σ_{j≠i} w_ij + ε) ).

    Args:
        w, s, gamma: float64 [n] over {i} ∪ N_i.
        me: position of i in them.
    """
    size = w.norm() if h.norm == "l2" else w.abs().sum()
    degree = w.sum() - w[me]
    if h.degree_term == "constant":
        degree = degree.detach()
    return -h.mu_similarity * (gamma * s * w).sum() + h.mu_regularizer * (
        h.beta * size - torch.log(degree + h.epsilon)
    )


def project_to_simplex(v: Tensor, mass: float = 1.0) -> Tensor:
    """The nearest point to v [n] with entries >= 0 that sum to ``mass`` (Condat, 2016; by sorting)."""
    if mass <= 0.0:
        return torch.zeros_like(v)
    u = v.sort(descending=True).values
    excess = (u.cumsum(0) - mass) / torch.arange(1, len(v) + 1, dtype=v.dtype)
    support = max(1, int((u > excess).sum()))  # 0 when the mass is lost in the rounding of u
    threshold = excess[support - 1]
    return (v - threshold).clamp(min=0.0)


def collaborative_graph_learning(w: Tensor, s: Tensor, gamma: Tensor, me: int, h: Hyper) -> Tensor:
    """Algorithm 2: E_g gradient steps on l_g, each followed by projection onto the simplex.

    The projection keeps the sum that w came with: 1, less what belongs to neighbours that are missing.
    """
    mass = float(w.sum())
    w = w.clone().requires_grad_()
    if h.graph_optimizer == "adam":
        optimizer: torch.optim.Optimizer = torch.optim.Adam([w], lr=h.graph_lr, betas=h.betas)
    else:
        optimizer = torch.optim.SGD([w], lr=h.graph_lr)
    for _ in range(h.graph_steps):  # line 1
        optimizer.zero_grad()
        graph_loss(w, s, gamma, me, h).backward()  # type: ignore[no-untyped-call]  # line 5
        optimizer.step()  # line 7
        with torch.no_grad():
            w.copy_(project_to_simplex(w, mass))  # line 8
    return w.detach()


# ---- mixing (Algorithm 3, line 8) ----------------------------------------------------------------------------


def mix(
    own: Tensor,
    own_classes: Sequence[int],
    theirs: Mapping[PeerId, Prototypes],
    w: Tensor,
    me: PeerId,
) -> Tensor:
    """ξ_i ← w_ii ξ_i + Σ_{j∈N_i} w_ij ξ_j, over those that are here, weights renormalised to sum 1.

    Args:
        own: ξ_i [K, d_p]. own_classes: classes that peer i has samples of.
        theirs: what came in.
        w: float64 [M], by peer id.
        me: i.
    """
    heard = [j for j in sorted(theirs) if w[j] > 0]
    total = float(w[me] + sum(w[j] for j in heard))
    if total == 0.0:  # every neighbour with weight is missing, and the own weight is 0
        return own
    mixed = torch.zeros_like(own)
    seen = torch.zeros(len(own), dtype=torch.bool, device=own.device)
    for j in sorted([*heard, me]):
        values, classes = (own, own_classes) if j == me else (theirs[j].values, theirs[j].classes)
        mixed += float(w[j]) / total * values.to(own.device)
        if w[j] > 0:
            seen[[k for k in classes if 0 <= k < len(own)]] = True
    return torch.where(seen[:, None], mixed, own)


class MAPL(Algorithm[Hyper]):
    """MAPL, Algorithm 3."""

    name = "mapl"
    gist = "prototypes travel, later heads too; each peer learns whom to mix with from how alike the heads are"
    title = "MAPL: Model Agnostic Peer-to-peer Learning"
    authors = "Mukherjee, Simonetto, Jamali-Rad"
    venue = "arXiv 2024"
    url = "https://arxiv.org/abs/2403.19792"
    Hyper = Hyper
    linear_heads = True
    equal_features = True
    views = 2
    state = ("model", "projector", "prototypes", "w", "met", "samples", "spent", "optimizer")

    def setup(self) -> None:
        h, head = self.hyper, self.model.linear_head
        d, classes = head.in_features, head.out_features
        with rng.torch_seeded(self.seed, "mapl.init") if h.shared_init else self.streams.torch("mapl.init"):
            head.reset_parameters()
            with torch.no_grad():
                head.weight.mul_(h.head_init_scale)
            self.projector = nn.Sequential(
                nn.Linear(d, h.projector_hidden),
                nn.BatchNorm1d(h.projector_hidden),
                nn.ReLU(),
                nn.Linear(h.projector_hidden, d),
            ).to(self.device)
            bound = d**-0.5
            self.prototypes = nn.Parameter(torch.empty(classes, d).uniform_(-bound, bound).to(self.device))
        self.optimizer = self._optimizer()
        self.w = torch.zeros(self.peers, dtype=torch.float64)
        self.w[self.me] = 1.0
        self.met: list[PeerId] = []
        self.samples = {self.me: len(self.data.train)}
        self.spent = 0

    def _optimizer(self) -> torch.optim.Optimizer:
        h = self.hyper
        learned = [*self.model.parameters(), *self.projector.parameters(), self.prototypes]
        return make_optimizer("adam", learned, lr=h.lr, betas=h.betas, weight_decay=h.weight_decay)

    async def round(self, t: int, net: Net) -> None:
        h = self.hyper
        self.meet(net.neighbors)
        self.personalized_model_learning()  # line 2
        if h.cgl and t >= h.warmup:  # line 3
            heads = await net.exchange(self.own_head())  # line 4
            self.learn_graph(heads)  # line 5
            if h.prune:
                net.listen_to(j for j in net.sources if self.w[j] > 0)
        theirs = await net.exchange(Prototypes(self.prototypes, self.data.own_classes))  # line 7
        self.mix_prototypes(theirs)  # line 8
        await self.mind_the_budget(net)

    def meet(self, neighbors: Sequence[PeerId]) -> None:
        """Neighbours that were not there before get the weight that all have at the start, 1 / (1 + |N_i|)."""
        new = [j for j in neighbors if j not in self.met]
        if new:
            self.w *= (1 + len(neighbors) - len(new)) / (1 + len(neighbors))
            self.w[new] = 1.0 / (1 + len(neighbors))
            self.met = sorted([*self.met, *new])

    def personalized_model_learning(self) -> None:
        """PML, Algorithm 1: E epochs on l_ce + l_cont + l_proto + l_uni."""
        if self.hyper.fresh_optimizer:
            self.optimizer = self._optimizer()
        self.train(epochs=self.hyper.local_epochs, batch=self.hyper.batch)

    def loss(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        h = self.hyper
        z = self.model.backbone(x)
        p = self.projector(z)
        official = h.losses == "official"
        terms = {"ce": cross_entropy(self.classify(z), labels)}
        if h.contrastive:
            form = losses.supervised_contrastive_inside if official else losses.supervised_contrastive
            terms["cont"] = form(p, labels, h.temperature)
        if h.prototype:
            if official:
                terms["proto"] = cross_entropy(normalize(p, dim=1) @ self.prototypes.T, labels)
            else:
                terms["proto"] = losses.prototype_contrastive(p, labels, self.prototypes, h.temperature)
        if h.uniformity:
            if official:
                inner = torch.exp(self.prototypes @ self.prototypes.T / 100.0)
                terms["uni"] = (inner.sum() - inner.diagonal().sum()) / len(inner)
            else:
                terms["uni"] = losses.uniformity(self.prototypes)
        return terms

    def classify(self, z: Tensor) -> Tensor:
        """g_φ: features [B, d_z] to logits [B, K]."""
        logits: Tensor = self.model.head(relu(z) if self.hyper.head_relu else z)
        return logits

    def predict(self, x: Tensor) -> Tensor:
        return self.classify(self.model.backbone(x))

    def own_head(self) -> Head:
        return Head(self.model.linear_head.weight.detach(), len(self.data.train))

    def learn_graph(self, heads: Mapping[PeerId, Head]) -> None:
        """CGL over {i} and the neighbours whose heads came; the others keep their weights."""
        h = self.hyper
        own = self.own_head()
        if not is_finite(own.weight):
            return
        ids = sorted([*heads, self.me])
        me = ids.index(self.me)
        s = torch.ones(len(ids), dtype=torch.float64)
        for n, j in enumerate(ids):
            if j != self.me:
                s[n] = head_similarity(own.weight, heads[j].weight.to(self.device), h.similarity)
        if h.scale_similarity:
            s = scaled(s, me)
        self.samples = {**self.samples, **{j: head.samples for j, head in heads.items()}}
        gamma = confidence(self.samples if h.confidence else dict.fromkeys(self.samples, 1), ids)
        self.w[ids] = collaborative_graph_learning(self.w[ids], s, gamma, me, h)

    @torch.no_grad()
    def mix_prototypes(self, theirs: Mapping[PeerId, Prototypes]) -> None:
        mixed = mix(self.prototypes, self.data.own_classes, theirs, self.w, self.me)
        self.prototypes.copy_(mixed)

    async def mind_the_budget(self, net: Net) -> None:
        """Table 4: all peers stop in the same round, when their messages add up to the budget."""
        if self.hyper.message_budget is None:
            return
        self.spent += len(net.listeners)
        total = await net.allreduce(Spent(torch.tensor(self.spent)), op="sum")
        self.finished = int(total.messages) >= self.hyper.message_budget

    def layouts(self) -> Sequence[Layout]:
        return [
            Layout.of(self.own_head()),
            Layout.of(Prototypes(self.prototypes, ())),
            Layout.of(Spent(torch.tensor(0))),
        ]

    def weights(self) -> Mapping[PeerId, float]:
        return {j: float(weight) for j, weight in enumerate(self.w) if weight > 0}
