"""FedSim: a shared head and personal backbones, updated simultaneously.

Krishna Pillutla, Kshitiz Malik, Abdelrahman Mohamed, Michael Rabbat, Maziar Sanjabi, Lin Xiao: "Federated Learning
with Partial Model Personalization", ICML 2022. https://arxiv.org/abs/2204.03809

A model has a shared part u and a personal part v_i. In the model-agnostic setting, in which MAPL compares with it, u
is the head, and v_i is a backbone of any architecture with the same number of features. In round t on peer i (line
numbers are ours):

    1  S_t ← a random fraction of the peers                      (the same draw on every peer)
    2  i ∈ S_t: (u_i, v_i) ← E epochs of SGD from (u_i, v_i), on both parts in each step
    3  i ∈ S_t: send u_i to the neighbors
    4  u_i ← the plain mean of u_j  over the j ∈ S_t that are i or its neighbors

On a complete graph the heads of all peers are equal after each round, and they are the paper's shared part. It is
LG-FedAvg with equal weights: no sample count is used.

Differs from the paper:

- There is no server; see fedavg.py for what follows from that.
- A peer is evaluated with the averaged head, and with its own, from before the average (``own_head`` in the records),
  which the code of MAPL's authors evaluates.
- The mean is plain, as in that code; the paper weighs losses, and its authors' code peers by their batches.
- The head is shared and the backbone is personal. The paper also has it the other way around, with equal models, and
  adapters; it starts from a model that was trained beforehand.
- Both parts have one learning rate, as in the released code; in the paper they may differ.
- Heads start equal on all peers, as if sent by a server; backbones may differ.
- Local training that diverges is rolled back.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

from p2pfl.algorithms.averaging import Averaging, Participation, Shared
from p2pfl.algorithms.registration import algorithm
from p2pfl.learning.evaluation import ExtraMetric, on_test_samples
from p2pfl.tensors import parameters_of


@algorithm("fedsim")
class FedSim(Averaging):
    """FedSim with a shared head."""

    summary = "heads are sent and averaged with equal weights; backbones stay local and may differ"
    title = "Federated Learning with Partial Model Personalization"
    authors = "Pillutla, Malik, Mohamed, Rabbat, Sanjabi, Xiao"
    venue = "ICML 2022"
    url = "https://arxiv.org/abs/2204.03809"
    Hyper = Participation
    share = "head"
    screened = Shared
    linear_heads = True
    equal_features = True
    weighted = False
    state = (*Averaging.state, "own_head")

    def setup(self) -> None:
        super().setup()
        self.own_head = copy.deepcopy(self.model.linear_head)
        """u_i, before the last average."""

    def local_training(self) -> None:
        """Line 2."""
        self.train_or_roll_back(epochs=self.hyper.local_epochs, batch=self.hyper.batch)
        self.assign_unless_diverged(parameters_of(self.own_head), self.shared_part())

    def extra_metrics(self, whole: bool) -> Iterable[ExtraMetric]:
        """The backbone with the peer's own head on the test samples."""
        return on_test_samples("own_head", lambda x: self.own_head(self.model.backbone(x)), self.data, whole)
