"""DFML's messages: a whole model on its way to the aggregator, and back. See dfml.py."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from p2pfl.messaging.schema import Body
from p2pfl.models import Model
from p2pfl.tensors import assign, buffers_of, frozen_of, parameters_of


@dataclass(frozen=True)
class Pupil(Body):
    """W_s on its way to the aggregator: name of the architecture, parameters, batch-normalization statistics.

    Also the parameters that do not train, in which models of one architecture may differ.
    """

    architecture: str
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    frozen: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Model) -> Pupil:
        return cls(model.name, parameters_of(model), buffers_of(model), frozen_of(model))


@dataclass(frozen=True)
class Taught(Body):
    """The updated W_s on its way back."""

    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]

    @classmethod
    def of(cls, model: Model) -> Taught:
        return cls(parameters_of(model), buffers_of(model))


NOT_TAUGHT = Taught({}, {})
"""Tells a sender whose model came too late, or was not finite, not to wait any longer."""


def load(model: Model, body: Pupil | Taught) -> None:
    """Copy the received parameters and statistics into ``model``."""
    assign(parameters_of(model), body.parameters)
    assign(buffers_of(model), body.buffers)
    if isinstance(body, Pupil):
        assign(frozen_of(model), body.frozen)
