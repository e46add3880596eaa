"""Decentralized HeteroFL: networks of different widths are averaged entry by entry, over those that hold an entry.

Enmao Diao, Jie Ding, Vahid Tarokh: "HeteroFL: Computation and Communication Efficient Federated Learning for
Heterogeneous Clients", ICLR 2021. https://arxiv.org/abs/2010.01264

Decentralized as in DFML (arXiv 2402.01863, Algorithm 3 and appendix A.3.3), whose Tables 4 and 5 compare with it: a
random peer per round is the aggregator a, some of its neighbors are the senders S. All networks are width-scaled
versions of one. A narrower one is a slice of the widest one: the first channels of each layer.

In round t, with participants P = S ∪ {a} (line numbers are ours, equation numbers DFML's):

    1  n ∈ P: W_n ← local epochs from W_n on L_WSM                                               (Eq. 2)
    2  s ∈ S: send W_s to a
    3  a: for each layer i and entry j of the widest network:
          W_g[i, j] ← mean of W_n[i, j] over the n ∈ P that hold it                              (Eq. 6)
    4  a: send W_g[X_n] to each n ∈ S, with X_n the first channels of each layer, as many as n has  (Eq. 8);
          the receivers, and a itself, continue from it

All networks start as slices of one initial network.

Differs from the paper:

- there is no server: aggregators and senders are drawn from a stream that all peers share (aggregators.py), and
  idle peers receive nothing. With full participation on a complete graph W_g is the server's model. Eq. 6 as
  printed divides by the number of participants; like HeteroFL, this divides by the number of those that hold the
  entry.
- batch-normalization statistics are not sent. Those of a network do not suit another slice, so each peer estimates
  them anew on its training samples when a slice comes back; HeteroFL does so at the end, on the samples of all
  clients.
- parameters that do not train are averaged too, as they are slices of the widest network's.
- no scaler: HeteroFL divides activations by a network's rate in training; DFML's version has none.
- the loss is DFML's. ``supervision: masked`` comes close to HeteroFL's masked cross-entropy.
- only whole attention heads are sliced, and the same ones of queries, keys and values.
- the optimizer's state is reset in each local training. A last batch of one sample is skipped if there are others.
- a sender that gets no reply in time keeps its model; an aggregator continues with the models that arrived.
- a model that has diverged is excluded; an aggregator with such a model adopts its slice of W_g
  if others hold all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from p2pfl import PeerId
from p2pfl.algorithms.aggregators import Aggregation
from p2pfl.algorithms.fedavg_dec import Averaged, FedAvgDec, Trained
from p2pfl.algorithms.width_scaling import Slice, Whole, Width, by_width
from p2pfl.errors import ModelError
from p2pfl.models import Model
from p2pfl.models.backbone import stays_in_evaluation
from p2pfl.options import OptionErrors
from p2pfl.tensors import Tensors, assign, frozen_of, parameters_of


class HeteroFL(FedAvgDec):
    """Decentralized HeteroFL (DFML, Algorithm 3)."""

    name = "heterofl"
    summary = "as fedavg-dec, but networks of different widths are averaged, over the first channels of each layer"
    title = "HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous Clients"
    authors = "Diao, Ding, Tarokh"
    venue = "ICLR 2021"
    url = "https://arxiv.org/abs/2010.01264"
    Hyper = Aggregation
    norm_statistics = "estimated anew on local samples"

    def setup(self) -> None:
        models = map(super().initial, dict.fromkeys(self.architectures))
        try:
            self.widths = by_width([Width.of(model, self.shared_part(model)) for model in models])
        except ModelError as error:
            text = f"{self.name} needs width-scaled versions of one network, but {error}; choose e.g. dfml-h1-cnn"
            raise OptionErrors([((), text)]) from None
        super().setup()

    def initial(self, architecture: str) -> Model:
        """Return the model from which all peers with this architecture start: a slice of the widest one's."""
        model, widest = super().initial(architecture), self.widths[-1]
        whole = self.mean([(Slice(widest), self.shared_part(super().initial(widest.name)))])
        assign(self.shared_part(model), whole.take(Slice(self.width_of(architecture))))
        return model

    def shared_part(self, model: Model) -> dict[str, Tensor]:
        """Return all parameters, also those that do not train: they are slices, too, of the widest network's."""
        return parameters_of(model) | frozen_of(model)

    def width_of(self, architecture: str) -> Width:
        return next(width for width in self.widths if width.name == architecture)

    def mean(self, models: Sequence[tuple[Slice, Tensors]]) -> Whole:
        """Return W_g (Eq. 6)."""
        return Whole.mean(self.widths[-1], 1, models)

    def slice_of(self, trained: Trained) -> Slice:
        """Return X_n, the channels that a model holds (Eq. 8)."""
        return Slice(self.width_of(trained.architecture))

    def next_slice(self, last: Slice, t: int) -> Slice:
        """Return the channels that a peer gets after round ``t``."""
        return last

    def adopt(self, averaged: Averaged) -> None:
        super().adopt(averaged)
        self.estimate_statistics()

    @torch.no_grad()
    def estimate_statistics(self) -> None:
        """Set the batch-normalization statistics to the means over the batches of the local samples."""
        norms = [
            module
            for module in self.model.modules()
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and not stays_in_evaluation(module)
        ]
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # the mean over all batches
            norm.train()
        if norms:
            with self.streams.evaluation():
                for images, _ in self.data.batches(self.hyper.batch, self.streams.numpy("statistics")):
                    self.model(self.data.input(images, augmented=False))
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
            norm.eval()

    def averaged_slice(self, values: Tensors, slice_: Slice) -> Averaged:
        """Return a slice as it is sent back."""
        return self.averaged(values)

    def aggregated(self, trained: Mapping[PeerId, Trained], t: int) -> dict[PeerId, Averaged]:
        """Return W_g[X_n] for each of the peers with these models, and for this one if W_g has it (lines 3 and 4)."""
        slices = {n: self.slice_of(trained[n]) for n in sorted(trained)}
        whole = self.mean([(slices[n], trained[n].values) for n in slices])
        taken: dict[tuple[str, int], Averaged | None] = {}

        def take(slice_: Slice) -> Averaged | None:
            key = (slice_.width.name, slice_.first)
            if key not in taken:
                taken[key] = self.averaged_slice(whole.take(slice_), slice_) if whole.holds(slice_) else None
            return taken[key]

        last = {**slices, self.me: self.slice_of(self.trained(self.model))}
        replies = {n: take(self.next_slice(slice_, t)) or take(slice_) for n, slice_ in last.items()}
        return {n: averaged for n, averaged in replies.items() if averaged is not None}
