"""Base class of all codecs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from p2pfl.messaging.schema import TensorSpec
from p2pfl.options import Options
from p2pfl.registry import Table, options_decorator


@dataclass(frozen=True)
class Codec(Options):
    """Packs one dense tensor into others. This one leaves all tensors as they are.

    Its fields are its parameters in the run file. Only floating-point tensors that are not empty are packed. Random
    numbers come from torch's global generators, which hold the peer's stream meanwhile.
    """

    required: ClassVar[tuple[str, ...]] = ("parts", "pack", "unpack")
    """What a codec of a plug-in defines."""

    def parts(self, spec: TensorSpec) -> Mapping[str, TensorSpec] | None:
        """Return into what a tensor with this dtype and shape is packed, by name; None leaves it as it is.

        Receivers accept nothing else, and know it before they allocate memory. Dimensions that depend on the values
        are ``free``.
        """
        return None

    def pack(self, tensor: Tensor) -> Mapping[str, Tensor]:
        """Return the parts of a tensor."""
        raise NotImplementedError

    def unpack(self, parts: Mapping[str, Tensor], spec: TensorSpec) -> Tensor:
        """Return the tensor that these parts stand for; a neighbor chooses their values."""
        raise NotImplementedError


CODECS: Table[type[Codec]] = Table("codec", {"none": Codec})
codec = options_decorator(CODECS, Codec)
"""Registers a subclass of ``Codec``."""
