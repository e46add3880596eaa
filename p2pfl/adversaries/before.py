"""What a peer's models were before it trained, for attacks on its updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from p2pfl import PeerId
from p2pfl.messaging.pipeline import Pipeline
from p2pfl.messaging.schema import Body, TensorPath, tensors_of
from p2pfl.tensors import Tensors, clone


class Before(Pipeline):
    """Keeps a copy of the models at the beginning of the round's training, and finds in it what is sent.

    A method that sends before it trains (D-PSGD with steps) sends the result of the last round, so the copy is
    part of the checkpoint.

    Args:
        tensors: returns parameters and buffers of all models by name, without a copy.

    Attributes:
        of_body: for the body sent last, the earlier values of those of its tensors that are a model's, or a range of
            the entries of one.
    """

    def __init__(self, tensors: Callable[[], Tensors]) -> None:
        self._tensors = tensors
        self._t = -1
        self._kept: dict[str, Tensor] = {}
        self.of_body: dict[TensorPath, Tensor] = {}

    def keep(self, t: int) -> None:
        """Copy the models, unless training has begun in round ``t`` before."""
        if t != self._t:
            self._kept = clone(self._tensors())
            self._t = t

    def outgoing(self, body: Body, to: Sequence[PeerId], t: int) -> Iterable[tuple[Sequence[PeerId], Body]]:
        models = [(tensor, self._kept[name]) for name, tensor in self._tensors().items() if name in self._kept]
        whole = {_place(tensor): kept for tensor, kept in models}
        self.of_body = {}
        for path, tensor in tensors_of(body).items():
            if (place := _place(tensor)) in whole:
                self.of_body[path] = whole[place]
            elif found := [kept.view(-1)[part] for model, kept in models if (part := _range(tensor, model))]:
                self.of_body[path] = found[0]
        return [(to, body)]

    def state_dict(self) -> dict[str, Any]:
        return {"t": self._t, "kept": self._kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._t, self._kept = state["t"], dict(state["kept"])


def _place(tensor: Tensor) -> tuple[object, ...]:
    """Return where a tensor lies, and how: equal for a parameter and what ``detach`` returns."""
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _range(part: Tensor, model: Tensor) -> slice | None:
    """Return which entries of a model's tensor, flat, are in ``part``, if it is a range of them."""
    storages = {tensor.untyped_storage().data_ptr() for tensor in (part, model)}
    contiguous = part.is_contiguous() and model.is_contiguous()
    first = part.storage_offset() - model.storage_offset()
    if len(storages) > 1 or not contiguous or part.dim() != 1 or not 0 <= first <= model.numel() - part.numel():
        return None
    return slice(first, first + part.numel())
