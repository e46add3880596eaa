"""FLT: before they train, peers learn from summaries of their images whose models to average.

Hadi Jamali-Rad, Mohammad Abdizadeh, Anuj Singh: "Federated Learning with Taskonomy for Non-IID Data", IEEE
Transactions on Neural Networks and Learning Systems, 2022. https://arxiv.org/abs/2103.15947
Details follow the authors' code, https://github.com/hjraad/FLT.

An autoencoder, equal on all peers, has an encoder E and a decoder D. On peer i, in round 0 (line numbers are ours):

    1  repeat: E, D ← one epoch of Adam on ‖D(E(x)) − x‖² over the local images;  E, D ← AllReduce(E, D), the mean
    2  c_i ← the centers of k-means on E(x), as many as local classes; send c_i to the neighbors
    3  u ← UMAP of all centers, in two dimensions
    4  d_ij ← min over matchings π of  √Σ_k ‖u_ik − u_jπ(k)‖² / min(|u_i|, |u_j|)
    5  drop the neighbors with d_ij ≥ Γ for good

and in every round, over the remaining neighbors, FedAvg:

    6  w_i ← E epochs of SGD from w_i;  w_i ← Σ_j n_j w_j / Σ_j n_j

Lines 1 to 5 use labels to count classes only, and images do not leave their peer.

Differs from the paper:

- There is no server. Each peer embeds the centers of its neighborhood and decides for itself; on a complete graph all
  embed the same centers, and decide what the paper's server decides.
- A server has the autoencoder trained on other images (CIFAR-100 for CIFAR-10) and perhaps finetuned. Here the peers
  train it together, on the images that they have; ``encoder`` starts it from an earlier run, on any images of the
  same channels and size, and ``encoder_epochs: 0`` keeps it as it starts. The code keeps the epoch with the least
  loss on test images, and lowers the learning rate while it finetunes.
- One small autoencoder for all images: the code's for gray ones, with as many channels as the images have, and
  without the sigmoid at its end, as images are normalized. For colors the code has a residual one.
- Embedded centers are as UMAP fitted them; the code transforms them a second time, which moves them slightly.
- Fewer than four centers are too few for UMAP: no neighbor is dropped.
- A neighbor whose centers do not arrive in round 0, e.g. because it joins later, is not dropped; nor is one that has
  another autoencoder, because a message of AllReduce was lost. A peer whose centers have diverged drops no neighbor.
- The average is over the peers that take part in the round, and all averages are of the models that were sent. The
  code can average the last models of all clients, and averages in place: one client after the other.
- Disjoint clusters, which the paper can make of the graph by hierarchical clustering, are not available.
- An autoencoder that has diverged in an epoch is restored from before it. All that fedavg.py lists.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor

from p2pfl import PeerId, rng
from p2pfl.algorithms.averaging import AnyPart, Averaging
from p2pfl.algorithms.flt_centers import LEAST_CENTERS, Autoencoder, embed, k_means, matching_distance
from p2pfl.algorithms.registration import algorithm
from p2pfl.errors import MissingExtra
from p2pfl.learning.optimizers import Adam
from p2pfl.messaging.net import Net
from p2pfl.messaging.schema import Body, Layout
from p2pfl.options import OptionErrors
from p2pfl.paths import LocalPath
from p2pfl.tensors import Tensors, assign, clone, digest, fractions, parameters_of


@dataclass(frozen=True)
class RelatednessHyper(AnyPart):
    encoder: LocalPath | None = None
    """Autoencoder to start from: the folder of an flt run, or a peer's checkpoint of one; null: random."""
    encoder_epochs: NonNegativeInt = 5
    """Epochs in which all peers train the autoencoder; 0 keeps it as it starts."""
    encoder_batch: PositiveInt = 10
    """Images in a batch of the autoencoder."""
    encoder_lr: PositiveFloat = 0.001
    """Learning rate of the autoencoder, for Adam."""
    latent: PositiveInt = 128
    """Length of an image's code, E(x)."""
    centers: PositiveInt | None = None
    """Clusters of k-means on each peer; null: as many as the peer has classes."""
    manifold: Literal["umap", "none"] = "umap"
    """umap: distances between centers embedded in two dimensions by UMAP; none: between the centers themselves."""
    threshold: PositiveFloat = 1.0
    """Γ: neighbors at this distance or farther are dropped."""


@dataclass(frozen=True)
class AutoencoderParameters(Body):
    """E and D: all parameters by name, float32; averaged over all peers."""

    values: Tensors


@dataclass(frozen=True)
class Centers(Body):
    """c_j, float32 [centers, latent], and the digest of the autoencoder that made the codes."""

    values: Tensor
    encoder: str


@algorithm("flt")
class FLT(Averaging):
    """FLT: FedAvg among peers with similar inputs."""

    summary = "as fedavg, among neighbors with similar images: in round 0, centers of encoded images are compared"
    title = "Federated Learning with Taskonomy for Non-IID Data"
    authors = "Jamali-Rad, Abdizadeh, Singh"
    venue = "TNNLS 2022"
    url = "https://arxiv.org/abs/2103.15947"
    Hyper = RelatednessHyper
    hyper: RelatednessHyper
    homogeneous = needs_images = True
    asynchronous = False
    prunes = True
    state = ("model", "optimizer", "encoder", "dropped", "w")
    pretrained: ClassVar[tuple[str, ...]] = ("encoder",)

    def setup(self) -> None:
        super().setup()
        h = self.hyper
        if h.manifold == "umap" and importlib.util.find_spec("umap") is None:
            missing = MissingExtra("umap-learn", "flt", "flt")
            raise OptionErrors([(("manifold",), f"{missing}, or choose none and another threshold")])
        channels, *size = self.data.train.take(np.arange(0))[0].shape[1:]
        if min(size) < 4:
            shown = "×".join(map(str, size))
            raise OptionErrors([((), f"flt's autoencoder needs images of at least 4×4 pixels, not {shown}")])
        with rng.torch_seeded(self.seed, "flt.encoder"):  # equal on all peers
            self.encoder = Autoencoder(channels, size, h.latent).to(self.device)
        self.dropped: list[PeerId] = []
        """Neighbors with d_ij ≥ Γ."""
        self.w: dict[PeerId, float] = {self.me: 1.0}
        self.measured: dict[str, float] = {}
        matching_distance(torch.eye(1), torch.eye(1))  # its first call imports scipy, which forked peers share

    async def round(self, t: int, net: Net) -> None:
        self.measured = {}
        if t == 0:
            await self.train_encoder(net)  # line 1
            await self.drop_unrelated(net)  # lines 2–5
        received = await self.train_and_exchange(net)  # line 6
        related = {j: body for j, body in received.items() if j not in self.dropped}  # some arrive in round 0
        if self.average(related):
            self.w = fractions({j: body.samples for j, body in related.items()})

    async def train_encoder(self, net: Net) -> None:
        """Line 1."""
        h, parameters = self.hyper, parameters_of(self.encoder)
        optimizer = Adam(self.encoder.parameters(), lr=h.encoder_lr)

        def step(images: Tensor, labels: Tensor) -> None:
            x = self.data.input(images, augmented=False)
            self.descend(optimizer, lambda x, labels: {"reconstruction": self.encoder.loss(x)}, x, labels)

        for _ in range(h.encoder_epochs):
            before = clone(parameters)
            self.train(epochs=1, batch=h.encoder_batch, step=step, order="encoder")
            if not self.outcomes.note("epochs of the autoencoder", self.what_diverged(parameters)):
                assign(parameters, before)
                optimizer.state.clear()  # NaN too
            assign(parameters, (await net.allreduce(AutoencoderParameters(parameters))).values)

    async def drop_unrelated(self, net: Net) -> None:
        """Lines 2 to 5."""
        local = Centers(self.local_centers(), digest(self.encoder.state_dict()))
        bodies = self.including_local(await net.exchange(local), local)
        centers = {j: bodies[j].values.cpu() for j in sorted(bodies) if bodies[j].encoder == local.encoder}
        if self.me not in centers:
            return
        if self.hyper.manifold == "umap":
            points = torch.cat(list(centers.values()))
            if len(points) < LEAST_CENTERS:
                return
            seed = int(rng.shared(self.seed, "flt.umap").integers(2**31))
            embedded = net.memoized("umap", {"points": points}, lambda: {"points": embed(points, seed)})["points"]
            rows = torch.split(embedded, [len(c) for c in centers.values()])
            centers = dict(zip(centers, rows, strict=True))
        distances = {j: matching_distance(centers[self.me], centers[j]) for j in centers if j != self.me}
        if not distances:
            return
        self.measured = {"nearest": min(distances.values()), "farthest": max(distances.values())}
        self.dropped = [j for j, distance in distances.items() if distance >= self.hyper.threshold]
        net.receive_only_from(set(net.sources) - set(self.dropped))

    @property
    def clusters(self) -> int:
        return self.hyper.centers or len(self.data.local_classes)

    @torch.no_grad()
    def local_centers(self) -> Tensor:
        """Line 2: c_i."""
        if not len(self.data.train):
            return torch.zeros(0, self.hyper.latent)
        encoded = torch.cat([self.encoder.encoder(x) for x, _ in self.data.sweep(self.data.train)])
        seed = int(self.streams.numpy("k-means").integers(2**31))
        return torch.from_numpy(k_means(encoded.cpu().numpy(), self.clusters, seed))

    def weights(self) -> Mapping[PeerId, float]:
        """Return n_j / Σ_j n_j of the last average."""
        return self.w

    def diagnostics(self) -> Mapping[str, float]:
        """Return the least and the largest d_ij, in round 0."""
        return self.measured

    def layouts(self) -> Sequence[Layout]:
        h = self.hyper
        most = h.centers or self.model.classes
        return [
            *super().layouts(),
            Layout.of(AutoencoderParameters(parameters_of(self.encoder))),
            Layout.of(Centers(torch.zeros(most, h.latent), digest({})), free={"values": {0: None}}),
        ]
