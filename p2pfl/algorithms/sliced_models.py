"""Peers whose models are slices of one network, for HeteroFL and FedRolex: see heterofl.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from p2pfl import PeerId
from p2pfl.aggregation.aggregator import Aggregator
from p2pfl.algorithms.base import Algorithm
from p2pfl.algorithms.fedavg_dec import Averaged, Trained
from p2pfl.algorithms.width_scaling import Slice, Whole, Width, by_width, common_steps
from p2pfl.errors import ModelError
from p2pfl.models import Model
from p2pfl.models.backbone import stays_in_evaluation
from p2pfl.options import OptionErrors
from p2pfl.tensors import Tensors, assign, frozen_of, parameters_of


def sliced_part(model: Model) -> dict[str, Tensor]:
    """Return all parameters. Frozen ones, too, are slices of the widest network's."""
    return parameters_of(model) | frozen_of(model)


class SlicedModels:
    """The widths of a run's networks, and what participants of a round get of the mean of their models.

    Args:
        method: the name of the algorithm, for errors.
        networks: a model of each architecture.
        rolling: slices move over the channels of the widest network.

    Raises:
        OptionErrors: the networks are not width-scaled versions of one network.
    """

    def __init__(self, method: str, networks: Sequence[Model], *, rolling: bool = False) -> None:
        try:
            self.widths = by_width([Width.of(model, sliced_part(model)) for model in networks])
        except ModelError as error:
            text = f"{method} needs width-scaled versions of one network, but {error}; choose e.g. dfml-h1-cnn"
            raise OptionErrors([((), text)]) from None
        self.units = common_steps(self.widths[-1], self.widths[0]) if rolling else 1
        """Steps until a slice is back at the first channel."""

    def slice_of(self, architecture: str, first: int = 0) -> Slice:
        """Return the channels of a network, from step ``first`` on."""
        return Slice(next(width for width in self.widths if width.name == architecture), first)

    def sliced(self, model: Model, widest: Model) -> Model:
        """Return the model with the values of the first channels of the widest one."""
        whole = Whole.mean(self.widths[-1], 1, [(Slice(self.widths[-1]), sliced_part(widest))])
        assign(sliced_part(model), whole.take(self.slice_of(model.name)))
        return model

    def averaged(
        self,
        models: Mapping[PeerId, tuple[Slice, Trained]],
        wanted: Mapping[PeerId, Sequence[Slice]],
        reply: Callable[[Tensors, Slice], Averaged],
        aggregation: Aggregator,
    ) -> dict[PeerId, Averaged]:
        """Average the models (Eq. 6) and return a slice of W_g for each peer: the first wanted one that they hold."""
        held = {n: (slice_, body.values) for n, (slice_, body) in sorted(models.items())}
        whole = Whole.mean(self.widths[-1], self.units, list(held.values()))
        if not aggregation.is_mean:
            whole = whole.combined(Trained, held, aggregation)
        taken: dict[tuple[str, int], Averaged | None] = {}

        def take(slice_: Slice) -> Averaged | None:
            key = (slice_.width.name, slice_.first)
            if key not in taken:
                taken[key] = reply(whole.take(slice_), slice_) if whole.holds(slice_) else None
            return taken[key]

        replies = {n: next(filter(None, map(take, slices)), None) for n, slices in wanted.items()}
        return {n: averaged for n, averaged in replies.items() if averaged is not None}


@torch.no_grad()
def estimate_statistics(peer: Algorithm[Any]) -> None:
    """Set the batch-normalization statistics of a peer's model to the means over the batches of its samples."""
    norms = [
        module
        for module in peer.model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not stays_in_evaluation(module)
    ]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the mean over all batches
        norm.train()
    if norms:
        with peer.streams.evaluation():
            for images, _ in peer.data.batches(peer.hyper.batch, peer.streams.numpy("statistics")):
                peer.model(peer.data.input(images, augmented=False))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
        norm.eval()
