"""MAPL+: MAPL for peers with equal backbones, which mix those too.

From «MAPL: Model Agnostic Peer-to-peer Learning», Sayak Mukherjee, Andrea Simonetto, Hadi Jamali-Rad, 2024,
appendix B and Table 9. https://arxiv.org/abs/2403.19792

A round is one of MAPL (mapl.py), and then, with the weights w_i that it ended with,

    ϑ_i ← w_ii ϑ_i + Σ_{j∈N_i} w_ij ϑ_j,      ϑ: parameters of backbone f_θ and projector f_ψ.

Heads stay personal. In the rounds before CGL, weights are equal, and so backbones are mixed with everybody's; after
it, with those of the peers whose heads turned out to be alike.

Differs from the paper, which says no more than that backbones are aggregated too:

- projectors are mixed as well, and both in every round from the first on. (The authors' released code has functions
  for both, which nothing in it calls.)
- statistics of batch normalisation stay local; its gains and biases are mixed. The optimiser's state stays local.
- all peers start from one initial model; head, projector and prototypes too, unless ``shared_init`` is off.
- a neighbour whose backbone is missing, or holds NaN or infinity, is left out of that round's mix, and its weight is
  shared out; whether its prototypes came does not matter for that. If nobody who is here has any weight, backbone and
  projector stay as they are.
- a peer whose own backbone holds NaN or infinity takes the mix of the others.
- what mapl.py lists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from p2pfl.algorithms import mapl
from p2pfl.algorithms.mapl import MAPL
from p2pfl.net import Net
from p2pfl.runfolder import PeerId
from p2pfl.spool import Spool
from p2pfl.tensors import Tensors, assign, average, is_finite, parameters_of
from p2pfl.wire import Body, Layout


@dataclass(frozen=True)
class Hyper(mapl.Hyper):
    spool: bool = False
    """Keep the neighbours' backbones on disk ($TMPDIR), not in memory, until they are mixed; changes no bit."""


@dataclass(frozen=True)
class Backbone(Body):
    """ϑ: parameters of backbone and projector by name, float32."""

    values: Tensors


def mix(own: Tensors, theirs: Mapping[PeerId, Tensors], w: Tensor, me: PeerId) -> Tensors:
    """ϑ_i ← w_ii ϑ_i + Σ_{j∈N_i} w_ij ϑ_j, over those that are here, weights renormalised to sum 1.

    Args:
        own: ϑ_i. theirs: what came in.
        w: float64 [M], by peer id.
        me: i.
    """
    sound = all(map(is_finite, own.values()))  # if not, the others' are all there is
    weighty = {j: values for j, values in {**theirs, me: own}.items() if w[j] > 0 and (j != me or sound)}
    if not weighty:  # every neighbour with weight is missing, and the own weight is 0
        return own
    return average(weighty, {j: float(w[j]) for j in weighty})


class MAPLPlus(MAPL):
    """MAPL+: MAPL, and backbones and projectors mixed with the learned weights."""

    name = "mapl+"
    gist = "as mapl, and backbones travel too, mixed by the weights that mapl learns"
    Hyper = Hyper
    homogeneous = True

    def setup(self) -> None:
        super().setup()
        assert isinstance(self.hyper, Hyper)
        self.spool = Spool() if self.hyper.spool else None

    async def round(self, t: int, net: Net) -> None:
        await super().round(t, net)
        theirs = await net.exchange(Backbone(self.travelling()))
        self.mix_backbones(theirs)

    def travelling(self) -> dict[str, Tensor]:
        """ϑ_i, shared with the modules."""
        parts = {"backbone": self.model.backbone, "projector": self.projector}
        return {
            f"{part}.{name}": value for part, module in parts.items() for name, value in parameters_of(module).items()
        }

    def mix_backbones(self, theirs: Mapping[PeerId, Backbone]) -> None:
        own = self.travelling()
        assign(own, mix(own, {j: body.values for j, body in theirs.items()}, self.w, self.me))

    def stow(self, body: Body) -> Body:
        return Backbone(self.spool.put(body.values)) if self.spool and isinstance(body, Backbone) else body

    def layouts(self) -> Sequence[Layout]:
        return [*super().layouts(), Layout.of(Backbone(self.travelling()))]
