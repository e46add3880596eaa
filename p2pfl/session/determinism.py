"""Deterministic kernels of torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.deterministic

_memory: Any = torch.utils.deterministic  # a module whose attribute torch does not declare


@contextmanager
def deterministic(*, strictly: bool = True, fill: bool = False) -> Iterator[None]:
    """Restrict torch to deterministic kernels inside.

    Args:
        strictly: raise an error where torch lacks a deterministic kernel; otherwise warn (bit-identical results are
            guaranteed on the CPU only).
        fill: fill new tensors with NaN, so that a program that reads uninitialized memory is deterministic too. torch
            does so by default, at a few percent of the time on a CPU and a kernel per tensor on a GPU; here, only if
            asked to, or if the caller has already turned deterministic kernels on.
    """
    before, filled = torch.get_deterministic_debug_mode(), _memory.fill_uninitialized_memory
    # Not use_deterministic_algorithms, which does the same but imports torch's compiler.
    torch.set_deterministic_debug_mode("error" if strictly else "warn")
    _memory.fill_uninitialized_memory = fill or (filled and before > 0)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
        _memory.fill_uninitialized_memory = filled
