"""MAPL+: MAPL for peers with equal backbones, which are averaged too.

From "MAPL: Model Agnostic Peer-to-peer Learning", Sayak Mukherjee, Andrea Simonetto, Hadi Jamali-Rad, 2024,
appendix B and Table 9. https://arxiv.org/abs/2403.19792

A round is one of MAPL (mapl.py); then, with the weights w_i at its end,

    ϑ_i ← w_ii ϑ_i + Σ_{j∈N_i} w_ij ϑ_j,      ϑ: parameters of backbone f_θ and projector f_ψ.

Heads stay personal. Before CGL starts, weights are equal and backbones are averaged over the whole neighborhood;
afterwards, over the peers with similar heads.

Differs from the paper, which states only that backbones are aggregated too:

- Projectors are averaged as well, and both in every round from the first on. (The authors' released code has unused
  functions for both.)
- Batch-normalization statistics stay local; its scales and biases are averaged. The optimizer's state stays local.
- All peers start from one initial model; head, projector and prototypes too, unless ``shared_init`` is off.
- The average skips backbones that are missing or have diverged, including the peer's own, and renormalizes the
  weights, whether or not the neighbor's prototypes arrived. If no remaining peer has a positive weight, backbone and
  projector stay unchanged. A peer that has diverged is evaluated with the others' backbone, but does not recover:
  its head, prototypes and optimizer state have diverged too, and it trains no further.
- All that mapl.py lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from p2pfl.algorithms import mapl
from p2pfl.algorithms.mapl import MAPL
from p2pfl.algorithms.registration import algorithm
from p2pfl.messaging.net import Net
from p2pfl.messaging.schema import Body, Layout
from p2pfl.tensors import Tensors, fractions, parameters_of


@dataclass(frozen=True)
class Hyper(mapl.Hyper):
    spool: bool = False
    """Keep received backbones on disk ($TMPDIR), not in memory, until they are averaged; bit-identical."""


@dataclass(frozen=True)
class Backbone(Body):
    """ϑ: parameters of backbone and projector by name, float32."""

    values: Tensors


@algorithm("mapl+")
class MAPLPlus(MAPL):
    """MAPL+: MAPL, and backbones and projectors averaged with the learned weights."""

    summary = "as mapl, but backbones are sent too, and averaged with the weights that mapl learns"
    Hyper = Hyper
    homogeneous = True

    async def round(self, t: int, net: Net) -> None:
        await super().round(t, net)
        theta = self.local_backbone()
        bodies = await self.exchange_including_own(net, Backbone(theta))
        weights = {j: float(self.w[j]) for j in bodies if self.w[j] > 0}
        if weights:
            self.aggregation.combine({j: bodies[j] for j in weights}, fractions(weights), out=theta)

    def local_backbone(self) -> dict[str, Tensor]:
        """Return ϑ_i, sharing memory with the modules."""
        parts = {"backbone": self.model.backbone, "projector": self.projector}
        return {
            f"{part}.{name}": value for part, module in parts.items() for name, value in parameters_of(module).items()
        }

    def layouts(self) -> Sequence[Layout]:
        return [*super().layouts(), Layout.of(Backbone(self.local_backbone()))]
