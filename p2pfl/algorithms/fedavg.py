"""FedAvg without a server: train, exchange whole models, average.

Brendan McMahan, Eider Moore, Daniel Ramage, Seth Hampson, Blaise Agüera y Arcas: "Communication-Efficient Learning of
Deep Networks from Decentralized Data", AISTATS 2017. https://arxiv.org/abs/1602.05629

Algorithm 1, in round t on peer i:

    1  S_t ← a random fraction C of the peers      (the same draw on every peer)
    2  i ∈ S_t: w_i ← E epochs of SGD from w_i; send w_i to the neighbors
    3  w_i ← Σ_j n_j w_j / Σ_j n_j  over the j ∈ S_t that are i or its neighbors

Every peer computes what the paper's server computes, from what it receives. On a complete graph the parameters of all
peers are equal after each round, and they are the paper's.

Differs from the paper:

- On a sparse graph each peer averages over its own neighborhood.
- Peers outside S_t neither train nor send, but receive and average, so that they start from the current model when
  selected. A peer that receives no model in a round keeps its own.
- With a momentum, which the paper does not have, the optimizer's state persists across rounds.
- Batch-normalization statistics stay local, unless ``share_statistics: true`` averages them too. The statistics of a
  peer that receives no model in a round stay.
- The average skips neighbors that miss the deadline and models that have diverged: a peer whose training diverged
  continues with the average of the others.
"""

from __future__ import annotations

from p2pfl.algorithms.averaging import AnyPart, Averaging, Shared
from p2pfl.algorithms.registration import algorithm


@algorithm("fedavg")
class FedAvg(Averaging):
    """FedAvg, Algorithm 1."""

    summary = "whole models are sent; each peer averages its own and its neighbors', weighted by sample counts"
    title = "Communication-Efficient Learning of Deep Networks from Decentralized Data"
    authors = "McMahan, Moore, Ramage, Hampson, Agüera y Arcas"
    venue = "AISTATS 2017"
    url = "https://arxiv.org/abs/1602.05629"
    Hyper = AnyPart
    homogeneous = True
    screened = Shared
