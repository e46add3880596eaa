"""FedStyle: style infusion for contrastive learning without labels.

Yuewei Yang, Jingwei Sun, Ang Li, Hai Li, Yiran Chen: «More Generalized and Personalized Unsupervised Representation
Learning In A Distributed System», 2022. https://arxiv.org/abs/2211.06470

Peers have unlabelled images of the same things in different styles. Each first learns what marks its own style, by
contrasting its images with their edges; the style net then stays as it is. Rounds train a content net by contrastive
learning that should hold under augmentation *and* under style, which a generator mixes into the features. Content
nets travel and are averaged; style nets and generators never leave the peer. Labels are for evaluation alone.

    content net f_c: x → h_c      style net f_s: x → h_s      generator G: [h_c, h_s] → h_c'
    projectors g_c, g_s: h → z    Sobel(x): the edges of x

Algorithm 4, on peer i:

    2       before round 0: f_s by Algorithm 2, on L_style (Eq. 2)
    4–5     in round t: do I take part?
    6       f_c ← w, the mix
    7–9     E_l epochs of Algorithm 3, on Eq. 3
    11      w ← mean of the content nets over {i} ∪ N_i, of those that took part, weighted by samples

Differs from the paper:

- no server: every peer averages what it hears. On a complete graph that is the paper's global model.
- weights are n_j / Σ n_j; the paper's 1 / |D_k| do not sum to one. All its peers have equally many samples.
- L_style is a mean over samples where Eq. 2 is a sum: about a B-th of it, so that one learning rate suits both nets.
- Eq. 3 by Algorithm 3 leaves the generator untrained, and so does the default. But G cannot collapse (Table 4) unless
  it is trained, as ``train_generator`` does.
- the frozen style net is in evaluation mode; edges are rescaled to the range of their image.
- personalization is measured, and personal probes are trained, on w_c,i as peer i trained it last, before the mean:
  the paper's «local content model». Generalization is that of w.
- batch-normalisation statistics are averaged with the weights, so that there is one global model, as evaluation
  asks for (``share_statistics: false`` keeps them local). SimSiam's predictor travels with the projector.
- the two views of a batch pass the content net together, and images with their edges the style net.
- projector, predictor and generator have half as many hidden units as there are features, and a quarter as outputs:
  the paper's 256 and 128 of ResNet18's 512. The generator returns to the number of features, which Eq. 4 asks for.
- style extraction is part of round 0: a peer that is stopped before that round is over, or crashes before its first
  checkpoint, extracts again.
- peers that do not take part in a round neither train nor send, but hear and mix; one that hears nobody who does
  keeps its w. One that has not taken part yet is personalized with the net that it started with.
- a neighbour that misses a deadline is left out of that round's mean, and so is a net with NaN or infinity, the own
  one too.
- the paper refers to Zhuang et al. (2021) for the linear probe and gives no numbers: Adam, 3e-3, 200 epochs and 2048
  features are theirs.
- Office-Home is cut 70:30 once; the paper averages over four random cuts.
- of the paper's baselines FedAvg is here (``style: false``); unsupervised FedPer, FedRep, FedProx, APFL and Ditto
  are not.
- a last batch of a single image is left out when there are others.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import conv2d, cosine_similarity, pad

from p2pfl import losses, rng
from p2pfl.algorithms.base import Algorithm
from p2pfl.net import Net
from p2pfl.options import Options
from p2pfl.probe import fit, new_probe, train_probe
from p2pfl.runfolder import PeerId
from p2pfl.tensors import assign, average, buffers_of, parameters_of
from p2pfl.training import Measure, PeerData, Samples, make_optimizer
from p2pfl.wire import Body, Layout, is_finite

Share = Annotated[float, Field(gt=0.0, le=1.0)]


@dataclass(frozen=True)
class Hyper(Options):
    style: bool = True
    """Extract and infuse style; otherwise this is unsupervised FedAvg, the paper's baseline."""
    style_epochs: NonNegativeInt = 10
    """E_s, epochs of style extraction before round 0 (the figure with 0, 10 and 100)."""
    style_weight: NonNegativeFloat = 0.5
    """λ of the style-infused loss (0.1 to 1 in Tables 1 to 3; Table 4)."""
    train_generator: bool = False
    """Train G with the content net; otherwise it keeps its initial values. Evaluation trains a copy of it anyway."""
    loss: Literal["simclr", "simsiam"] = "simclr"
    """L_unsup."""
    temperature: PositiveFloat = 0.07
    """τ of L_style and of SimCLR."""
    local_epochs: PositiveInt = 5
    """E_l, epochs in one round."""
    batch: PositiveInt = 64
    """B samples, in two augmented views each, in one step."""
    lr: PositiveFloat = 0.1
    """Learning rate of SGD, for the style net and for the content net."""
    momentum: NonNegativeFloat = 0.0
    """Of SGD; forgotten between rounds."""
    weight_decay: NonNegativeFloat = 0.0
    """ℓ2 penalty added to the gradient."""
    participation: Share = 1.0
    """α, share of the peers that take part in a round (0.5 in Tables 2 and 3). The others hear and mix."""
    hidden: PositiveInt | None = None
    """Hidden width of projectors, predictor and generator; default: half the features (256 of 512)."""
    output: PositiveInt | None = None
    """Width of projections; default: a quarter of the features (128 of 512)."""
    share_projector: bool = True
    """g_c travels with f_c."""
    share_statistics: bool = True
    """Batch-normalisation statistics travel with the weights."""

    stylized: bool = True
    """Personal evaluation with h_c + G([h_c, h_s]) (Eq. 4); otherwise with h_c, as the baselines."""
    probe_samples: PositiveInt | None = None
    """Training samples of each style that the probe of the global model learns from; default: all."""
    probe_peers: PositiveInt | None = None
    """Evaluate the global model on peers below this number only; default: all, who on a complete graph agree."""
    probe_epochs: PositiveInt = 200
    """Epochs of a linear probe."""
    probe_lr: PositiveFloat = 3e-3
    """Its learning rate, of Adam."""
    probe_batch: PositiveInt = 2048
    """Features in one of its steps."""


# ---- what peers say ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Content(Body):
    """w_c,j: f_c and g_c by name, float32; and |D_j|."""

    values: dict[str, Tensor]
    samples: int


# ---- style (Algorithm 2) -------------------------------------------------------------------------------------

_SOBEL = torch.tensor([[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]])


def sobel(images: Tensor) -> Tensor:
    """Sobel(x): the edges of each channel, as images again.

    √(G_x² + G_y²) with the 3x3 kernels, borders repeated; then from the darkest to the brightest value that the
    image had. An image without edges becomes its darkest value.

    Args:
        images: uint8 [B, C, H, W], and so is what comes out.
    """
    x = images.to(torch.float32)
    kernels = torch.stack([_SOBEL, _SOBEL.T]).unsqueeze(1).to(x.device)
    gradients = conv2d(pad(x.flatten(0, 1).unsqueeze(1), (1, 1, 1, 1), mode="replicate"), kernels)
    strength = gradients.square().sum(1).sqrt().reshape(x.shape)
    darkest, brightest = (extreme((1, 2, 3), keepdim=True) for extreme in (x.amin, x.amax))
    strongest = strength.amax((1, 2, 3), keepdim=True).clamp(min=1.0)  # the weakest edge of bytes is 1
    return (darkest + (brightest - darkest) * strength / strongest).round().to(torch.uint8)


def style_loss(z: Tensor, temperature: float) -> Tensor:
    """L_style, Eq. 2: supervised InfoNCE with two labels, the own style and edges.

    Args:
        z: float [2 B, d], the images' projections above those of their edges.
    """
    styles = torch.arange(2, device=z.device).repeat_interleave(len(z) // 2)
    return losses.supervised_contrastive(z, styles, temperature)


# ---- content (Algorithm 3) -----------------------------------------------------------------------------------


def info_nce(z: Tensor, temperature: float) -> Tensor:
    """SimCLR's loss: supervised InfoNCE with one label per image.

    Args:
        z: float [2 B, d], the first views' projections above those of the second ones.
    """
    images = torch.arange(len(z) // 2, device=z.device).repeat(2)
    return losses.supervised_contrastive(z, images, temperature)


def simsiam(z: Tensor, p: Tensor) -> Tensor:
    """SimSiam's loss: −½ mean cos(p¹, z²) − ½ mean cos(p², z¹), without gradient through z.

    Args:
        z: float [2 B, d], as of ``info_nce``.
        p: of the same shape, what the predictor makes of them.
    """
    first, second = z.detach().chunk(2)
    return -cosine_similarity(p, torch.cat([second, first]), dim=1).mean()


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    """Two layers with a ReLU between them."""
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


class ContentNet(nn.Module):
    """w_c: content net f_c, projector g_c, and for SimSiam a predictor."""

    def __init__(self, backbone: nn.Module, features: int, hidden: int, output: int, predictor: bool) -> None:
        super().__init__()
        self.backbone = backbone
        self.projector = mlp(features, hidden, output)
        self.predictor = mlp(output, hidden, output) if predictor else None

    def contrast(self, h: Tensor, temperature: float) -> Tensor:
        """L_unsup of features [2 B, d], first views above second ones: SimSiam's with a predictor, or SimCLR's."""
        z = self.projector(h)
        return info_nce(z, temperature) if self.predictor is None else simsiam(z, self.predictor(z))


class Stylist(nn.Module):
    """What never leaves a peer: style net f_s and generator G."""

    def __init__(self, network: nn.Module, features: int, hidden: int) -> None:
        super().__init__()
        self.network = network.requires_grad_(False).eval()
        self.generator = mlp(2 * features, hidden, features)

    def forward(self, content: Tensor, style: Tensor) -> Tensor:
        """h_c' = G([h_c, h_s]), float [B, d]."""
        infused: Tensor = self.generator(torch.cat([content, style], dim=1))
        return infused

    def train(self, mode: bool = True) -> Stylist:
        """The style net stays in the mode it is in: frozen, its features are those of the image, not of its batch."""
        self.generator.train(mode)
        return self


# ---- evaluation ----------------------------------------------------------------------------------------------


class Personalized(nn.Module):
    """Eq. 4 and a linear layer: classes of [h_c, h_s], float [B, 2 d]."""

    def __init__(self, generator: nn.Module, probe: nn.Linear) -> None:
        super().__init__()
        self.generator = generator
        self.probe = probe

    def forward(self, features: Tensor) -> Tensor:
        content, _ = features.chunk(2, dim=1)
        scores: Tensor = self.probe(content + self.generator(features))
        return scores


@torch.no_grad()
def features_of(samples: Samples, data: PeerData, features: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Of all samples, un-augmented: float [N, d] and labels, int64 [N]; N > 0."""
    found = [(features(x), labels) for x, labels in data.sweep(samples)]
    return torch.cat([one for one, _ in found]), torch.cat([labels for _, labels in found])


class FedStyle(Algorithm[Hyper]):
    """FedStyle, Algorithm 4."""

    name = "fedstyle"
    gist = "content nets travel and are averaged; trained without labels, with each peer's own style mixed in"
    title = "More Generalized and Personalized Unsupervised Representation Learning In A Distributed System"
    authors = "Yang, Sun, Li, Li, Chen"
    venue = "arXiv 2022"
    url = "https://arxiv.org/abs/2211.06470"
    Hyper = Hyper
    homogeneous = True
    state = ("content", "mixed", "stylist", "style_extracted", "row")
    views = 2

    def setup(self) -> None:
        h, features = self.hyper, self.model.features
        self.widths = features, h.hidden or max(1, features // 2), h.output or max(1, features // 4)
        with rng.torch_seeded(self.seed, "fedstyle.content"):
            self.content = ContentNet(self.model.backbone, *self.widths, predictor=h.loss == "simsiam")
        self.content.to(self.device)
        self.mixed = copy.deepcopy(self.content)
        self.row: dict[PeerId, float] = {}
        self.stylist: Stylist | None = None
        self.style_extracted = False
        self.classifier: nn.Module | None = None
        if h.style:
            with self.streams.torch("fedstyle.style"):
                self.stylist = Stylist(self.build(self.me).backbone, *self.widths[:2]).to(self.device)
            self.stylist.generator.requires_grad_(h.train_generator)
            self.views = 4

    async def round(self, t: int, net: Net) -> None:
        h = self.hyper
        first = not self.style_extracted
        if first:
            self.extract_style()  # line 2
        participants = net.participants(h.participation)  # line 4
        if self.me in participants:  # line 5
            assign(self.traveling(self.content), self.traveling(self.mixed))  # line 6
            self.infuse_style()  # lines 7 to 9
        patience = 1.0 if not first or self.stylist is None else 1.0 + h.style_epochs / h.local_epochs
        own = self.own_content()
        theirs = await net.exchange(own, among=participants, patience=patience)
        if self.me in participants and is_finite(own):
            theirs[self.me] = own
        self.mix(theirs)  # line 11
        self.classifier = None  # it was for the nets of the round before

    # -- Algorithm 2

    def extract_style(self) -> None:
        """Style net and projector learn to tell images from their edges, for E_s epochs."""
        self.style_extracted = True
        if self.stylist is None:
            return
        h, network = self.hyper, self.stylist.network
        with self.streams.torch("fedstyle.style"):
            projector = mlp(*self.widths).to(self.device)  # g_s: of no use afterwards
        learner = nn.Sequential(network, projector)
        optimizer = self.sgd(learner.parameters())

        def step(images: Tensor, labels: Tensor) -> None:
            x = self.with_edges(images)
            self.descend(optimizer, lambda: {"style": style_loss(learner(x), h.temperature)}, len(images))

        network.requires_grad_(True).train()
        try:
            self.train(epochs=h.style_epochs, batch=h.batch, step=step, order="style batches")
        finally:
            network.requires_grad_(False).eval()

    def with_edges(self, images: Tensor) -> Tensor:
        """x and below it Sobel(x): uint8 [B, C, H, W] to network input [2 B, C, H, W]."""
        return self.data.input(torch.cat([images, sobel(images)]), augmented=False)

    def sgd(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        h = self.hyper
        return make_optimizer("sgd", parameters, lr=h.lr, momentum=h.momentum, weight_decay=h.weight_decay)

    # -- Algorithm 3

    def infuse_style(self) -> None:
        """The content net and its projector learn to withstand augmentation and style, for E_l epochs."""
        learned = [*self.content.parameters()]
        if self.stylist is not None and self.hyper.train_generator:
            learned += self.stylist.generator.parameters()
        self.optimizer = self.sgd(learned)
        self.train(epochs=self.hyper.local_epochs, batch=self.hyper.batch)

    def inputs(self, images: Tensor) -> Tensor:
        """x¹, x², augmented, and with style x and Sobel(x), as they are; one below the other."""
        augmented = [self.data.input(images, augmented=True) for _ in range(2)]  # line 5
        return torch.cat(augmented if self.stylist is None else [*augmented, self.with_edges(images)])

    def loss(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Eq. 3 of what ``inputs`` made. Labels are not looked at."""
        h = self.hyper
        both_views = 2 * (len(x) // self.views)
        content = self.content.backbone(x[:both_views])  # line 6
        terms = {"content": self.content.contrast(content, h.temperature)}
        if self.stylist is not None:
            style = self.stylist.network(x[both_views:])  # line 4
            infused = self.stylist(content, style)  # lines 7 and 8: own style to first views, edges to second ones
            terms["infused"] = h.style_weight * self.content.contrast(infused, h.temperature)
        return terms

    # -- what travels

    def traveling(self, net: ContentNet) -> dict[str, Tensor]:
        """The part of w_c that peers exchange, shared with ``net``."""
        h, values = self.hyper, parameters_of(net)
        if h.share_statistics:
            values |= {name: buffer for name, buffer in buffers_of(net).items() if buffer.is_floating_point()}
        return {name: value for name, value in values.items() if h.share_projector or name.startswith("backbone.")}

    def own_content(self) -> Content:
        return Content(self.traveling(self.content), len(self.data.train))

    def mix(self, contents: Mapping[PeerId, Content]) -> None:
        """w ← Σ_j n_j w_c,j / Σ_j n_j over those that took part; w stays if nobody near did, or none has samples."""
        samples = {j: contents[j].samples for j in sorted(contents)}
        if total := sum(samples.values()):
            mean = average({j: body.values for j, body in contents.items()}, samples)
            assign(self.traveling(self.mixed), mean)
            self.row = {j: n / total for j, n in samples.items()}
        if not self.hyper.share_statistics:
            assign(buffers_of(self.mixed), buffers_of(self.content))

    def layouts(self) -> Sequence[Layout]:
        return [Layout.of(self.own_content())]

    def weights(self) -> Mapping[PeerId, float]:
        return self.row

    # -- evaluation, the only place where labels are read

    def predict(self, x: Tensor) -> Tensor:
        """Personalization: a classifier of the peer's own features, learned from its own samples."""
        if self.classifier is None:
            self.classifier = self.personalize()
        scores: Tensor = self.classifier(self.personal_features(x))
        return scores

    def personal_features(self, x: Tensor) -> Tensor:
        """[h_c, h_s] of the peer's own nets, float [B, 2 d]; h_c alone without style."""
        content: Tensor = self.content.backbone(x)
        if self.stylist is None or not self.hyper.stylized:
            return content
        return torch.cat([content, self.stylist.network(x)], dim=1)

    def personalize(self) -> nn.Module:
        """A linear probe on h_c + G([h_c, h_s]), or on h_c alone; a copy of G learns with it."""
        stream = self.streams.fresh("fedstyle.probe")
        probe = new_probe(self.model.features, self.data.classes, stream, self.device)
        classifier: nn.Module = probe
        if self.stylist is not None and self.hyper.stylized:
            classifier = Personalized(copy.deepcopy(self.stylist.generator).requires_grad_(True), probe)
        if len(self.data.train):
            fit(classifier, *features_of(self.data.train, self.data, self.personal_features), stream, **self.recipe)
        return classifier

    def measures(self, whole: bool) -> Iterable[Measure]:
        """Generalization: the mix under a linear probe for each style, learned from that style's training samples."""
        if self.hyper.probe_peers is not None and self.me >= self.hyper.probe_peers:
            return
        for number, style in enumerate(self.data.styles):
            if not len(style.train):
                continue
            predict = self.generalize(number, style.train)
            yield Measure(f"generalization, style {number}", predict, style.test, part_of="generalization")

    def generalize(self, number: int, samples: Samples) -> Callable[[Tensor], Tensor]:
        stream = rng.shared(self.seed, "fedstyle.probe", number)  # equal nets get equal probes on all peers
        chosen = np.sort(stream.permutation(samples.indices)[: self.hyper.probe_samples])
        features, labels = features_of(Samples(samples.images, chosen), self.data, self.mixed.backbone)
        probe = train_probe(features, labels, self.data.classes, stream, **self.recipe)
        return lambda x: probe(self.mixed.backbone(x))

    @property
    def recipe(self) -> dict[str, Any]:
        return {"lr": self.hyper.probe_lr, "epochs": self.hyper.probe_epochs, "batch": self.hyper.probe_batch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.classifier = None
