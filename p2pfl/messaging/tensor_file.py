"""Received models on disk, read back tensor by tensor, bit for bit.

A method that needs whole models of many neighbors more than once would hold all of them in memory. With a Spool, each
model goes to a file as it arrives (``Algorithm.on_receive``).
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from p2pfl.errors import RunFolderError, SpoolError
from p2pfl.tensors import Tensors, raw


@dataclass(frozen=True)
class _Extent:
    """Position of a tensor in the file, in bytes."""

    dtype: torch.dtype
    shape: torch.Size
    offset: int


class Spool:
    """One unnamed file for any number of models. It disappears with the process.

    The file is created in $TMPDIR, which should not be a RAM disk, with the first model. The space of a model is
    reused by one of the same size once nothing refers to it. One thread may put models, any thread may read and
    release them.
    """

    def __init__(self) -> None:
        self._file = -1
        self._free: dict[int, list[int]] = {}
        """{bytes of a model: offsets where one of that size may be written}"""
        self.size = 0
        """Bytes of the file."""

    def put(self, tensors: Tensors) -> Mapping[str, Tensor]:
        """Write CPU tensors to the file and return a mapping that reads them.

        Raises SpoolError if they cannot be written.
        """
        size = sum(tensor.nbytes for tensor in tensors.values())
        try:
            if self._file < 0:
                with tempfile.TemporaryFile(prefix="p2pfl-") as file:
                    self._file = os.dup(file.fileno())
                weakref.finalize(self, os.close, self._file)
            free = self._free.setdefault(size, [])
            offset = free.pop() if free else self.size
            self.size = max(self.size, offset + size)
            spooled = Spooled(self, {})
            weakref.finalize(spooled, free.append, offset)
            for name, tensor in tensors.items():
                spooled.extents[name] = _Extent(tensor.dtype, tensor.shape, offset)
                offset = _write(self._file, raw(tensor).numpy().data, offset)
        except OSError as error:
            raise SpoolError(tempfile.gettempdir(), error) from None
        return spooled

    def read(self, extent: _Extent) -> Tensor:
        tensor = torch.empty(extent.shape, dtype=extent.dtype)
        view = raw(tensor).numpy().data
        offset = extent.offset
        while len(view):
            if (count := os.preadv(self._file, [view], offset)) == 0:
                raise RunFolderError(f"the spool file in {tempfile.gettempdir()} was truncated; restart the peer")
            view, offset = view[count:], offset + count
        return tensor


class Spooled(Mapping[str, Tensor]):
    """Tensors by name, each read from the file at every access."""

    def __init__(self, spool: Spool, extents: dict[str, _Extent]) -> None:
        self.extents = extents
        self._spool = spool

    def __getitem__(self, name: str) -> Tensor:
        return self._spool.read(self.extents[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.extents)

    def __len__(self) -> int:
        return len(self.extents)


def _write(file: int, view: memoryview, offset: int) -> int:
    """Write all of ``view`` at an offset and return the end."""
    while len(view):
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written
    return offset
