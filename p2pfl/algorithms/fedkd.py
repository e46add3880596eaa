"""FedKD: mutual learning with a shared small model, which is sent as truncated singular value decompositions.

Chuhan Wu, Fangzhao Wu, Lingjuan Lyu, Yongfeng Huang, Xing Xie: "Communication-Efficient Federated Learning via
Knowledge Distillation", Nature Communications 2022. https://arxiv.org/abs/2108.13323
As FedTGP's paper compares with it (Table 1; https://arxiv.org/abs/2401.03230).

Each peer has a private model of any architecture (the paper's mentor) and a small meme that all share (its mentee),
as in FML (fml.py). With the features z and the outputs p of both, and a matrix W_i that maps features of the meme to
features of the private model, line 2 of FML takes steps on (line numbers are ours)

    2a  L_i = CE_i + (KL(p_m ‖ p_i) + ‖z_i − W_i z_m‖² / d) / (CE_i + CE_m)
        L_m = CE_m + (KL(p_i ‖ p_m) + ‖z_i − W_i z_m‖² / d) / (CE_i + CE_m)
    2b  each matrix of m_i is sent as U_K Σ_K V_Kᵀ, K the least with  Σ_{k ≤ K} σ_k² ≥ T_t Σ_k σ_k²,
        T_t = T_start + (T_end − T_start) (t + 1) / R  in round t of R
    3   m_i ← Σ_j n_j m_j / Σ_j n_j  of the recovered memes, including the peer's own

Differs from the paper:

- There is no server, and what is averaged is not compressed once more; see fedavg.py for what follows from that.
- The memes' parameters are decomposed, as in the code of FedTGP's authors; the paper decomposes updates. Neighbors
  on a sparse graph do not know what an update is to be added to, and a lost one would be missed in all later rounds.
- The weights of the convolutions are a matrix of one row per output channel; FedTGP's authors decompose each kernel.
  A matrix is sent whole, and exact, if decomposing does not make it smaller.
- The weights 1 / (CE_i + CE_m) and the other model's p are constants. KL is the mean over the batch; FedTGP's authors
  also divide it by the number of classes.
- The squares count once for each model and for W_i, where L_i + L_m has them twice for W_i; both codes add the two
  losses, so that they count twice for all.
- The average is weighted by samples; both codes have a plain average.
- Features are compared where the head takes them; the models here need not have attention or as many layers.
- The norm of each gradient, of either model and of W_i, is clipped to 10, as by FedTGP's authors: where both models
  are right, the weight of the squares grows beyond bounds.
- Optimizers, initial values and divergence are as in fml.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from p2pfl import PeerId
from p2pfl.algorithms.averaging import Averaging, Shared
from p2pfl.algorithms.fml import WithMeme, distillation, initial_meme
from p2pfl.algorithms.registration import algorithm
from p2pfl.learning.evaluation import ExtraMetric, on_test_samples
from p2pfl.learning.gradients import Clipped
from p2pfl.messaging.net import Net
from p2pfl.messaging.schema import Layout
from p2pfl.models import Model
from p2pfl.tensors import Tensors, is_finite, widened

Energy = Annotated[float, Field(gt=0.0, le=1.0)]


@dataclass(frozen=True)
class CompressedMemeHyper(WithMeme):
    energy_start: Energy = 0.95
    """T_start, fraction of the squared singular values that is sent in the first rounds."""
    energy_end: Energy = 0.98
    """T_end, the same in the last round."""
    clip: PositiveFloat = 10.0
    """Largest norm of a gradient."""


@dataclass(frozen=True)
class Factors(Shared):
    """The meme, by name of the parameter, float32.

    A matrix [r, c] is either in ``values``, with K = 0, or the product of ``left`` [r, K] and ``right`` [K, c], with
    no rows in ``values``.
    """

    left: dict[str, Tensor]
    right: dict[str, Tensor]


def low_rank(matrix: Tensor, energy: float) -> tuple[Tensor, Tensor]:
    """Return U_K Σ_K [r, K] and V_Kᵀ [K, c] of a matrix, float [r, c], for the least K that keeps so much energy."""
    u, sigma, v = torch.linalg.svd(matrix, full_matrices=False)
    kept = sigma.double().square().cumsum(0)
    k = int((kept < energy * kept[-1]).sum()) + 1 if kept[-1] > 0 else 0
    return u[:, :k] * sigma[:k], v[:k]


def largest_rank(rows: int, columns: int) -> int:
    """Return the largest K with which the factors [rows, K] and [K, columns] are smaller than the matrix."""
    return (rows * columns - 1) // (rows + columns)


def compressed(parameters: Tensors, energy: float, samples: int) -> Factors:
    """Line 2b. With T_t = 1 nothing is decomposed, nor a matrix with NaN or infinity."""
    values = {name: parameter.detach().cpu() for name, parameter in parameters.items()}
    left, right = {}, {}
    for name, value in values.items():
        if value.dim() < 2:
            continue
        matrix = value.flatten(1)
        rows, columns = matrix.shape
        left[name], right[name] = matrix.new_empty(rows, 0), matrix.new_empty(0, columns)
        if energy < 1.0 and is_finite(matrix):
            one, other = (factor.to(value.dtype) for factor in low_rank(widened(matrix), energy))
            if len(other) <= largest_rank(rows, columns):
                values[name], left[name], right[name] = value[:0], one, other
    return Factors(values, samples, left, right)


def recovered(body: Factors, like: Tensors) -> dict[str, Tensor] | None:
    """Return the parameters, with the shapes and on the device of ``like``; None if parts do not fit."""
    found = {}
    for name, parameter in like.items():
        value = body.values[name]
        if name in body.left and len(value) == 0:
            left, right = body.left[name], body.right[name]
            if left.shape[1] != right.shape[0]:
                return None
            value = (widened(left.cpu()) @ widened(right.cpu())).view_as(parameter).to(parameter.dtype)
        if value.shape != parameter.shape:
            return None
        found[name] = value.to(parameter.device)
    return found


@algorithm("fedkd")
class FedKD(Averaging):
    """FedKD: FML with losses weighted by certainty, features that teach too, and compressed memes."""

    summary = "a private model and a small meme teach each other; memes are sent as factors of low rank and averaged"
    title = "Communication-Efficient Federated Learning via Knowledge Distillation"
    authors = "Wu, Wu, Lyu, Huang, Xie"
    venue = "Nature Communications 2022"
    url = "https://arxiv.org/abs/2108.13323"
    Hyper = CompressedMemeHyper
    hyper: CompressedMemeHyper
    named_loss = True
    trained_models = 2
    state = ("model", "meme", "optimizer", "projection")
    shared_norm_statistics = "averaged in the model that is sent, local in the personal one"

    def setup(self) -> None:
        self.meme = initial_meme(self, self.hyper.meme)
        with self.streams.torch("projection"):
            self.projection = nn.Linear(self.meme.features, self.model.features, bias=False).to(self.device)
        parts = [list(module.parameters()) for module in (self.model, self.meme, self.projection)]
        self.optimizer = self.hyper.make_optimizer([parameter for part in parts for parameter in part])
        self.gradient = Clipped(self.gradient, self.hyper.clip, parts)
        self.energy = self.hyper.energy_start

    @property
    def sent(self) -> Model:
        return self.meme

    async def round(self, t: int, net: Net) -> None:
        h = self.hyper
        self.energy = h.energy_start + (h.energy_end - h.energy_start) * (t + 1) / max(self.rounds, t + 1)
        if self.me not in net.participants(h.participation):
            self.energy = 1.0  # its meme is not sent
        self.average(self.recovered(await self.train_and_exchange(net), net))

    def local_training(self) -> None:
        """Line 2a."""
        beside = [self.meme, self.projection]
        self.train_or_roll_back(epochs=self.hyper.local_epochs, batch=self.hyper.batch, beside=beside)

    def loss(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Line 2a: L_i + L_m; the gradient of the squares reaches each model once."""
        z, z_meme = self.model.backbone(x), self.meme.backbone(x)
        scores, meme_scores = self.model.head(z), self.meme.head(z_meme)
        terms = dict(self.label_loss(scores, labels))
        terms |= {f"meme_{name}": term for name, term in self.label_loss(meme_scores, labels).items()}
        uncertainty = torch.stack(list(terms.values())).sum().detach().clamp(min=torch.finfo(z.dtype).eps)
        terms["kl"] = distillation(scores, meme_scores) / uncertainty
        terms["meme_kl"] = distillation(meme_scores, scores) / uncertainty
        terms["features"] = mse_loss(self.projection(z_meme), z) / uncertainty
        return terms

    def local_part(self) -> Factors:
        """Return the meme as it is sent: as it is if it has diverged, since it is then dropped on arrival."""
        values = self.shared_part()
        return compressed(values, 1.0 if self.what_diverged(values) else self.energy, len(self.data.train))

    def recovered(self, received: Mapping[PeerId, Shared], net: Net) -> dict[PeerId, Shared]:
        """Recover the memes. One counts as missing if it cannot be recovered, or if the product has diverged."""
        like, found = self.shared_part(), {}
        for j, body in received.items():
            values = recovered(body, like) if isinstance(body, Factors) else None
            if values is not None and not self.what_diverged(like, values):
                found[j] = Shared(values, body.samples)
            elif j != self.me:
                net.count_as_missing(type(body), j)
        return found

    def layouts(self) -> Sequence[Layout]:
        values = self.shared_part()
        matrices = {name: value.flatten(1) for name, value in values.items() if value.dim() > 1}
        ranks = {name: largest_rank(*matrix.shape) for name, matrix in matrices.items()}
        norms = {name: float(matrix.nan_to_num(0.0, 0.0, 0.0).norm()) for name, matrix in matrices.items()}
        # No entry of U Σ is larger than the norm of the matrix, and none of Vᵀ than 1.
        left = {name: matrix.new_full((len(matrix), ranks[name]), norms[name]) for name, matrix in matrices.items()}
        right = {name: matrix.new_ones(ranks[name], matrix.shape[1]) for name, matrix in matrices.items()}
        body = Factors(values, 1, left, right)
        free = {"values": {0: None}, "left": {1: None}, "right": {0: None}}
        return [Layout.of(body, free=free, ranges={"samples": self.sample_counts})]

    def extra_metrics(self, whole: bool) -> Iterable[ExtraMetric]:
        """The meme, the paper's global model, on the test samples."""
        return on_test_samples("meme", self.meme, self.data, whole)
