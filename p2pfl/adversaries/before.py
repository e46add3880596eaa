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
        of_body: for the body sent last, the earlier values of those of its tensors that belong to a model.
    """

    def __init__(self, tensors: Callable[[], Tensors]) -> None:
        self._tensors = tensors
        self._t = -1
        self._kept: dict[str, Tensor] = {}
        self.of_body: Mapping[TensorPath, Tensor] = {}

    def keep(self, t: int) -> None:
        """Copy the models, unless training has begun in round ``t`` before."""
        if t != self._t:
            self._kept = clone(self._tensors())
            self._t = t

    def outgoing(self, body: Body, to: Sequence[PeerId], t: int) -> Iterable[tuple[Sequence[PeerId], Body]]:
        names = {_place(tensor): name for name, tensor in self._tensors().items() if name in self._kept}
        found = {path: names.get(_place(tensor)) for path, tensor in tensors_of(body).items()}
        self.of_body = {path: self._kept[name] for path, name in found.items() if name is not None}
        return [(to, body)]

    def state_dict(self) -> dict[str, Any]:
        return {"t": self._t, "kept": self._kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._t, self._kept = state["t"], dict(state["kept"])


def _place(tensor: Tensor) -> tuple[object, ...]:
    """Return where a tensor lies, and how: equal for a parameter and what ``detach`` returns."""
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
