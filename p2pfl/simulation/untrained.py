"""Runs without training (``time.train: false``): models and message bodies of all peers share memory.

What a tensor holds means nothing there, only its name, dtype and shape. So 10,000 peers take little more memory than
one. The values are those of initial models, which all computations of a method accept; messages of at most ``SMALL``
bytes are real, since a method may act on the numbers in them.
"""

from __future__ import annotations

from collections.abc import Hashable
from itertools import chain
from typing import Any

import msgpack
import torch
from torch import Tensor

from p2pfl import PeerId
from p2pfl.algorithms.base import Algorithm
from p2pfl.messaging.journal import BodyStore, Journal, JournalEntry, Place
from p2pfl.messaging.wire import Encoded
from p2pfl.simulation.clock_hub import ClockHub

SMALL = 64
"""Bytes of the bodies that are not shared: they may hold a count, or a sum."""


class SharedMemory:
    """The tensors and bodies that stand for all others of the same form."""

    def __init__(self) -> None:
        self._tensors: dict[Hashable, Tensor] = {}
        self._bodies: dict[bytes, Tensor] = {}

    def share(self, algorithm: Algorithm[Any]) -> None:
        """Have parameters and buffers of the same name, dtype and shape share memory with the first of them."""
        for module in algorithm.modules():
            for name, tensor in chain(module.named_parameters(), module.named_buffers()):
                form = name, tensor.dtype, tensor.shape
                tensor.data = self._tensors.setdefault(form, tensor.data)

    def body(self, encoded: Encoded, attacker: PeerId | None) -> Tensor:
        """Return the body, uint8 [size], of the first message of the same kind whose tensors have the same form.

        Args:
            attacker: the sender, if it attacks: then of one of the same sender.
        """
        kind, count, _, tensors = msgpack.unpackb(encoded.header)
        form = msgpack.packb([kind, count, tensors, attacker])
        if form not in self._bodies:
            self._bodies[form] = torch.frombuffer(bytearray().join(encoded.parts()), dtype=torch.uint8)
        return self._bodies[form]


class SharedBodies(BodyStore):
    """Keeps small bodies, and one body in place of all larger ones of the same form."""

    def __init__(self, memory: SharedMemory, attacker: PeerId | None) -> None:
        super().__init__()
        self._memory = memory
        self._attacker = attacker
        self._shared: dict[int, Tensor] = {}

    def write(self, encoded: Encoded) -> Place:
        if encoded.size <= SMALL:
            return super().write(encoded)
        self._shared[self.current] = self._memory.body(encoded, self._attacker)
        self.current += 1
        return Place(self.current - 1, 0)

    def map(self, place: Place, size: int) -> Tensor:
        shared = self._shared.get(place.segment)
        return super().map(place, size) if shared is None else shared

    def release(self, segment: int) -> None:
        super().release(segment)
        self._shared.pop(segment, None)


class UntrainedHub(ClockHub):
    """Delivers bodies without copying them."""

    def copy(self, stored: Tensor, entry: JournalEntry, journal: Journal) -> Tensor:
        return stored
