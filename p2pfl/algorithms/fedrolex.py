"""Decentralized FedRolex: HeteroFL with slices that roll over the channels of the widest network, round by round.

Samiul Alam, Luyang Liu, Ming Yan, Mi Zhang: "FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model
Extraction", NeurIPS 2022. https://arxiv.org/abs/2212.01548

Decentralized as in DFML (arXiv 2402.01863, Algorithm 3 and appendix A.3.3). A round is that of heterofl.py, except
that the channels of a network change:

    3  W_n is averaged over the channels X_n that n was given the last time it took part, at first the first ones
    4  a: send W_g[X_n] to each n ∈ S, where now X_n ← as many channels of each layer as n has, from channel t + 1 on,
          starting over after the last one; n ∈ P remembers X_n                                       (Eq. 9)

A network as wide as the widest one always holds all channels, in their order.

Differs from the paper:

- there is no server; see heterofl.py for what follows from that. With full participation on a complete graph, W_g is
  the server's model and X_n the paper's.
- W_g is always as wide as the widest network of the mesh, in DFML as the widest participant.
- DFML as printed averages a network over the channels of the current round, also those of a peer that was given
  others in its last turn. That mixes channels that have nothing to do with each other, and learns far less (see the
  page), so here channels return to where they were taken from, as in FedRolex. A peer sends the number of the first
  one.
- a peer is given the channels that it has had if the participants do not hold all of the next ones; FedRolex's server
  remembers those that nobody holds.
- per round, a slice moves by the same fraction of the channels of all layers: one channel of those with the
  greatest common divisor of their numbers (dfml-cnn-128-256: by 1 of 128 and 2 of 256), not one of each. So the
  outputs of a layer and the inputs of the next one always are the same channels, in flattened images and attention
  heads too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from p2pfl.algorithms.fedavg_dec import Averaged, Trained
from p2pfl.algorithms.heterofl import HeteroFL
from p2pfl.algorithms.registration import algorithm
from p2pfl.algorithms.width_scaling import Slice, Whole, common_steps
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
class FedRolex(HeteroFL):
    """Decentralized FedRolex (DFML, Algorithm 3)."""

    summary = "as heterofl, but over channels that roll by the round"
    title = "FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction"
    authors = "Alam, Liu, Yan, Zhang"
    venue = "NeurIPS 2022"
    url = "https://arxiv.org/abs/2212.01548"
    state = ("model", "first")

    def setup(self) -> None:
        self.first = 0
        super().setup()

    @property
    def units(self) -> int:
        """Steps until a slice is back at the first channel."""
        return common_steps(self.widths[-1], self.widths[0])

    def mean(self, models: Sequence[tuple[Slice, Tensors]]) -> Whole:
        return Whole.mean(self.widths[-1], self.units, models)

    def trained(self, model: Model) -> Trained:
        body = super().trained(model)
        return TrainedSlice(body.architecture, body.values, body.samples, self.first)

    def averaged(self, values: Tensors) -> Averaged:
        return AveragedSlice(values, 0)

    def averaged_slice(self, values: Tensors, slice_: Slice) -> Averaged:
        return AveragedSlice(values, slice_.first)

    def slice_of(self, trained: Trained) -> Slice:
        """Return X_n, the channels that a model was given."""
        assert isinstance(trained, TrainedSlice)
        return replace(super().slice_of(trained), first=trained.first)

    def next_slice(self, last: Slice, t: int) -> Slice:
        """Return X_n of the next round (Eq. 9)."""
        return replace(last, first=(t + 1) % self.units)

    def adopt(self, averaged: Averaged) -> None:
        assert isinstance(averaged, AveragedSlice)
        super().adopt(averaged)
        self.first = averaged.first

    def ranges(self) -> dict[str, range]:
        return {**super().ranges(), "first": range(self.units)}
