"""Independent random streams, by name, from one seed.

Every random choice of a run comes from ``(seed, peer, name)`` through numpy's SeedSequence, so that streams do not
affect one another: one more augmentation on peer 3 changes neither peer 4 nor the order in which peer 3 visits its
samples. No stream depends on a clock, a process id or the order of events.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from p2pfl.seeds import PEER, SHARED, sequence
from p2pfl.seeds import shared as shared


@contextmanager
def torch_seeded(seed: int, name: str) -> Iterator[None]:
    """Seed torch's global RNG from a *shared* stream, for equal initial values on every peer; restore it on exit."""
    with _global_rng(_torch_state(sequence(seed, SHARED, name))):
        yield


class Streams:
    """The named random streams of one peer.

    ``numpy(name)`` returns a numpy Generator that lives as long as the peer; ``torch(name)`` swaps the peer's stream
    into torch's global RNG for a block of code that draws from there (initialization, augmentation, dropout). Such a
    block must not await: other peers may share the process.
    """

    def __init__(self, seed: int, peer: int) -> None:
        self.seed = seed
        self.peer = peer
        self._numpy: dict[str, np.random.Generator] = {}
        self._torch: dict[str, torch.Tensor] = {}
        self._evaluation: torch.Tensor | None = None
        """Where the stream for evaluations starts."""

    def _start(self, name: str) -> torch.Tensor:
        return _torch_state(sequence(self.seed, PEER, self.peer, name))

    def numpy(self, name: str) -> np.random.Generator:
        if name not in self._numpy:
            self._numpy[name] = self.fresh(name)
        return self._numpy[name]

    def fresh(self, name: str) -> np.random.Generator:
        """Return the stream of that name from its start, for what must not depend on earlier draws (evaluation)."""
        return np.random.default_rng(sequence(self.seed, PEER, self.peer, name))

    @contextmanager
    def torch(self, name: str) -> Iterator[None]:
        if name not in self._torch:
            self._torch[name] = self._start(name)
        with _global_rng(self._torch[name]) as after:
            yield
        self._torch[name] = after[0]

    @contextmanager
    def restarted(self, name: str) -> Iterator[None]:
        """Seed all global generators, NumPy's and Python's too, from the start of the stream of that name."""
        with _global_rng(self._start(name)), python_seeded():
            yield

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Seed all global generators, NumPy's and Python's too, for networks that predict and do not train.

        Each block restarts the stream. So predictions of a network that draws random numbers depend on its parameters
        and inputs, not on earlier blocks: evaluations change nothing and can be repeated.
        """
        if self._evaluation is None:
            self._evaluation = self._start("evaluation")
        with _global_rng(self._evaluation), python_seeded():
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return the positions of all streams used so far, as plain numbers and uint8 tensors."""
        return {
            "numpy": {name: stream.bit_generator.state for name, stream in self._numpy.items()},
            "torch": dict(self._torch),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore those positions; streams that were unused then start from their beginning."""
        for name in {*self._numpy, *state["numpy"]}:
            position = state["numpy"].get(name) or self.fresh(name).bit_generator.state
            self.numpy(name).bit_generator.state = position
        self._torch = dict(state["torch"])


def _torch_state(sequence: np.random.SeedSequence) -> torch.Tensor:
    seed = int(sequence.generate_state(1, np.uint64)[0])
    return torch.Generator().manual_seed(seed).get_state()


_SPARE: list[np.random.MT19937] = []
"""Bit generators that no block uses. To swap NumPy's takes a thirtieth of the time of saving and restoring its state,
and loses nothing but the second of the two numbers that ``np.random.randn`` draws at a time.
"""


@contextmanager
def python_seeded() -> Iterator[None]:
    """Seed the global generators of Python and NumPy from torch's, without a draw from it; restore them on exit."""
    python, numpy = random.getstate(), np.random.get_bit_generator()  # type: ignore[attr-defined]
    spare = _SPARE.pop() if _SPARE else np.random.MT19937(0)
    try:
        seed = _next_number(torch.get_rng_state()) % 2**32
        random.seed(seed)
        np.random.set_bit_generator(spare)  # type: ignore[attr-defined]
        np.random.seed(seed)
        yield
    finally:
        np.random.set_bit_generator(numpy)  # type: ignore[attr-defined]
        _SPARE.append(spare)
        random.setstate(python)


def _next_number(state: torch.Tensor) -> int:
    """Return the integer that a generator in this state would draw."""
    copy = torch.Generator()
    copy.set_state(state)
    return int(torch.randint(0, 2**62, (), generator=copy))


@contextmanager
def _global_rng(state: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Put ``state`` into the global CPU generator; on exit, the yielded list holds the state reached.

    The generator of the current GPU is seeded from the same stream, so that dropout is reproducible there too. That
    takes nothing from the stream: what is drawn on the CPU, such as initial weights, is the same on all devices.
    """
    before = torch.get_rng_state()
    after: list[torch.Tensor] = []
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    try:
        torch.set_rng_state(state)
        with torch.random.fork_rng(devices=devices, enabled=bool(devices)):
            if devices:
                torch.cuda.manual_seed(_next_number(state))
            yield after
            if devices and torch.equal(torch.get_rng_state(), state):
                torch.randint(0, 2**62, ())  # only the GPU has drawn; its next seed must differ
            after.append(torch.get_rng_state())
    finally:
        torch.set_rng_state(before)
