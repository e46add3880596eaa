"""LG-FedAvg: local representations, global heads.

Paul Pu Liang, Terrance Liu, Liu Ziyin, Nicholas B. Allen, Randy P. Auerbach, David Brent, Ruslan Salakhutdinov,
Louis-Philippe Morency: "Think Locally, Act Globally: Federated Learning with Local and Global Representations", 2020.
https://arxiv.org/abs/2001.01523

A round is FedAvg's, but only the head is sent and averaged. Backbones stay local and may have any architecture with
the same number of features. Head and backbone are trained together.

Differs from the paper:

- There is no server; see fedavg.py for what follows from that.
- The head is one linear layer, everything after the features.
- The local representation is trained with the cross-entropy alone, as in comparisons by later papers: no auxiliary
  self-supervised or adversarial term.
- Heads start equal on all peers, as if sent by a server.
- A peer whose backbone diverged stays diverged: only its head is replaced by the average of the others'.
"""

from __future__ import annotations

from p2pfl.algorithms.averaging import Averaging, Participation, Shared
from p2pfl.algorithms.registration import algorithm


@algorithm("lg-fedavg")
class LGFedAvg(Averaging):
    """LG-FedAvg: FedAvg of the heads."""

    summary = "heads are sent and averaged; backbones stay local and may differ"
    title = "Think Locally, Act Globally: Federated Learning with Local and Global Representations"
    authors = "Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency"
    venue = "arXiv 2020"
    url = "https://arxiv.org/abs/2001.01523"
    Hyper = Participation
    share = "head"
    screened = Shared
    linear_heads = True
    equal_features = True
