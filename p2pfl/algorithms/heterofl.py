"""Decentralized HeteroFL: networks of different widths are averaged, each entry over the networks that hold it.

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

- there is no server: aggregators and senders come from a stream that all peers share (aggregator_roles.py), and
  idle peers receive nothing. With full participation on a complete graph W_g is the server's model. Eq. 6 as
  printed divides by the number of participants; like HeteroFL, this divides by the number of networks that
  hold the entry.
- batch-normalization statistics are not sent. Those of a network do not suit another slice, so each peer estimates
  them anew on its training samples when a slice comes back; HeteroFL does so at the end, on the samples of all
  clients.
- parameters that do not train are averaged too, as they are slices of the widest network's.
- no scaler: HeteroFL divides activations by a network's rate in training; DFML's version has none.
- the loss is DFML's. ``supervision: masked`` comes close to HeteroFL's masked cross-entropy.
- only whole attention heads are sliced, and the same ones of queries, keys and values.
- the optimizer's state is reset in each local training.
- a sender that gets no reply in time keeps its model; an aggregator continues with the models that arrived.
- a model that has diverged is excluded; an aggregator with such a model adopts its slice of W_g
  if others hold all of it.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from p2pfl import PeerId
from p2pfl.algorithms.aggregator_roles import Aggregation
from p2pfl.algorithms.fedavg_dec import Averaged, FedAvgDec, Trained
from p2pfl.algorithms.registration import algorithm
from p2pfl.algorithms.sliced_models import SlicedModels, estimate_statistics, sliced_part
from p2pfl.models import Model


@algorithm("heterofl")
class HeteroFL(FedAvgDec):
    """Decentralized HeteroFL (DFML, Algorithm 3)."""

    summary = "as fedavg-dec, but networks of different widths are averaged, over the first channels of each layer"
    title = "HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous Clients"
    authors = "Diao, Ding, Tarokh"
    venue = "ICLR 2021"
    url = "https://arxiv.org/abs/2010.01264"
    Hyper = Aggregation
    norm_statistics = "estimated anew on local samples"

    def setup(self) -> None:
        self.slices = SlicedModels(self.name, list(map(super().initial, dict.fromkeys(self.architectures))))
        super().setup()

    def initial(self, architecture: str) -> Model:
        """Return the model from which all peers with this architecture start: a slice of the widest one's."""
        return self.slices.sliced(super().initial(architecture), super().initial(self.slices.widths[-1].name))

    def shared_part(self, model: Model) -> dict[str, Tensor]:
        return sliced_part(model)

    def aggregated(self, trained: Mapping[PeerId, Trained], t: int) -> dict[PeerId, Averaged]:
        """Return W_g[X_n] for each of the peers with these models, and for this one if W_g has it (lines 3 and 4)."""
        models = {n: (self.slices.slice_of(body.architecture), body) for n, body in trained.items()}
        x = {**{n: slice_ for n, (slice_, _) in models.items()}, self.me: self.slices.slice_of(self.model.name)}
        wanted = {n: [slice_] for n, slice_ in x.items()}
        return self.slices.averaged(models, wanted, lambda values, slice_: Averaged(values), self.aggregation)

    def adopt(self, averaged: Averaged) -> None:
        super().adopt(averaged)
        estimate_statistics(self)
