"""Local training without communication: the baseline of every personalized algorithm."""

from __future__ import annotations

from collections.abc import Sequence

from p2pfl.algorithms.base import Algorithm
from p2pfl.algorithms.registration import algorithm
from p2pfl.learning.optimizers import LocalTraining
from p2pfl.messaging.net import Net
from p2pfl.messaging.schema import Layout


@algorithm("local")
class Local(Algorithm[LocalTraining]):
    """Each peer trains on its local samples with the cross-entropy."""

    summary = "nothing is sent; each peer trains on its local samples: the baseline of the others"
    title = "Local training"
    authors = "—"
    venue = "—"
    url = "—"
    Hyper = LocalTraining

    def setup(self) -> None:
        self.optimizer = self.hyper.make_optimizer(self.model.parameters())

    async def round(self, t: int, net: Net) -> None:
        self.train(epochs=self.hyper.local_epochs, batch=self.hyper.batch)

    def layouts(self) -> Sequence[Layout]:
        return ()
