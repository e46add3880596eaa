"""Decentralized FedRolex: HeteroFL with slices that roll over the channels of the widest network, round by round.

Samiul Alam, Luyang Liu, Ming Yan, Mi Zhang: "FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model
Extraction", NeurIPS 2022. https://arxiv.org/abs/2212.01548

Decentralized as in DFML (arXiv 2402.01863, Algorithm 3 and appendix A.3.3). A round is as in heterofl.py, except
that the channels of a network change:

    3  W_n is averaged over the channels X_n that n was given the last time it took part, at first the first ones
    4  a: send W_g[X_n] to each n ∈ S, where now X_n ← as many channels of each layer as n has, from channel t + 1 on,
          starting over after the last one; n ∈ P remembers X_n                                       (Eq. 9)

A network as wide as the widest one always holds all channels, in their order.

Differs from the paper:

- there is no server; see heterofl.py for what follows from that. With full participation on a complete graph, W_g is
  the server's model and X_n the paper's.
- W_g is always as wide as the widest network of the mesh, in DFML as the widest participant.
- DFML as printed averages a network over the channels of the current round, also if the peer was given
  others in its last turn. That mixes channels that have nothing to do with each other, and learns far less (see the
  page), so here channels return to where they were taken from, as in FedRolex. A peer sends the number of the first
  one.
- a peer is given the channels that it has had if the participants do not hold all of the next ones; FedRolex's server
  remembers the entries that no participant holds.
- per round, a slice moves by the same fraction of the channels of all layers: by their number
  divided by the greatest common divisor of all these numbers (dfml-cnn-128-256: by 1 of 128 and 2 of 256), not by one
  each. So the outputs of a layer and the inputs of the next one always are the same channels, in flattened images and
  attention heads too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from p2pfl import PeerId
from p2pfl.algorithms.aggregator_roles import Aggregation
from p2pfl.algorithms.fedavg_dec import Averaged, FedAvgDec, Trained
from p2pfl.algorithms.registration import algorithm
from p2pfl.algorithms.sliced_models import SlicedModels, estimate_statistics, sliced_part
from p2pfl.models import Model
from p2pfl.tensors import Tensors


@dataclass(frozen=True)
class TrainedSlice(Trained):
    """W_s on its way to the aggregator, with the first step of X_s."""

    first: int


@dataclass(frozen=True)
class AveragedSlice(Averaged):
    """W_g[X_s] on its way back, with the first step of X_s."""

    first: int


@algorithm("fedrolex")
class FedRolex(FedAvgDec):
    """Decentralized FedRolex (DFML, Algorithm 3)."""

    summary = "as heterofl, but over channels that roll by the round"
    title = "FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction"
    authors = "Alam, Liu, Yan, Zhang"
    venue = "NeurIPS 2022"
    url = "https://arxiv.org/abs/2212.01548"
    Hyper = Aggregation
    norm_statistics = "estimated anew on local samples"
    state = ("model", "first")

    def setup(self) -> None:
        self.first = 0
        """The first step of X_n."""
        networks = list(map(super().initial, dict.fromkeys(self.architectures)))
        self.slices = SlicedModels(self.name, networks, rolling=True)
        super().setup()

    def initial(self, architecture: str) -> Model:
        """Return the model from which all peers with this architecture start: a slice of the widest one's."""
        return self.slices.sliced(super().initial(architecture), super().initial(self.slices.widths[-1].name))

    def shared_part(self, model: Model) -> dict[str, Tensor]:
        return sliced_part(model)

    def trained(self, model: Model) -> Trained:
        return TrainedSlice(model.name, self.shared_part(model), len(self.data.train), self.first)

    def averaged(self, values: Tensors) -> Averaged:
        return AveragedSlice(values, 0)

    def aggregated(self, trained: Mapping[PeerId, Trained], t: int) -> dict[PeerId, Averaged]:
        """Return W_g[X_n] (lines 3 and 4): for the next X_n (Eq. 9), or the last one if W_g lacks some of that."""
        bodies = {**trained, self.me: self.trained(self.model)}
        first = {n: body.first for n, body in bodies.items() if isinstance(body, TrainedSlice)}
        x = {n: self.slices.slice_of(bodies[n].architecture, step) for n, step in first.items()}
        models = {n: (x[n], body) for n, body in trained.items()}
        following = (t + 1) % self.slices.units
        wanted = {n: [self.slices.slice_of(bodies[n].architecture, following), last] for n, last in x.items()}
        return self.slices.averaged(
            models, wanted, lambda values, slice_: AveragedSlice(values, slice_.first), self.aggregation
        )

    def adopt(self, averaged: Averaged) -> None:
        assert isinstance(averaged, AveragedSlice)
        super().adopt(averaged)
        estimate_statistics(self)
        self.first = averaged.first

    def ranges(self) -> dict[str, range]:
        return {**super().ranges(), "first": range(self.slices.units)}
