"""Models on disk while they wait: what neighbours sent takes up no memory until it is looked at.

A method that hears whole models from many neighbours and needs each of them more than once would hold all of them
in memory. With a spool, each goes to a file as it arrives (``Algorithm.stow``), and comes back tensor by tensor,
with the same bits.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from p2pfl.errors import RunFolderError
from p2pfl.tensors import Tensors


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies in the file."""

    dtype: torch.dtype
    shape: torch.Size
    offset: int
    size: int


class Spool:
    """One file for any number of models of the same form. It has no name, and goes with the process.

    The file is made in $TMPDIR (which should be no RAM disk) when the first model comes; places in it are used
    again when their models are no longer referred to. One thread puts models in, any may read and forget them.
    """

    def __init__(self) -> None:
        self._file = -1
        self._free: list[int] = []
        self.size = 0
        """Bytes of the file."""

    def put(self, tensors: Tensors) -> Mapping[str, Tensor]:
        """A view of ``tensors`` (on the CPU) that reads them from the file. Raises RunFolderError: it has no room."""
        sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
        try:
            if self._file < 0:
                self._file = _unnamed_file()
                weakref.finalize(self, os.close, self._file)
            try:
                offset = self._free.pop()
            except IndexError:
                offset = self.size
                self.size += sum(sizes.values())
            spooled = Spooled(self, {}, offset)
            for name, tensor in tensors.items():
                place = _Place(tensor.dtype, tensor.shape, offset, sizes[name])
                spooled.places[name] = place
                offset += place.size
                _write(self._file, _bytes_of(tensor), place.offset)
        except OSError as error:
            where = f"{tempfile.gettempdir()}: {error.strerror}"
            raise RunFolderError(f"{where}; models are kept here: set TMPDIR to a folder with more room") from None
        return spooled

    def read(self, place: _Place) -> Tensor:
        tensor = torch.empty(place.shape, dtype=place.dtype)
        view = memoryview(_bytes_of(tensor))  # type: ignore[arg-type]
        done = 0
        while done < place.size:
            count = os.preadv(self._file, [view[done:]], place.offset + done)
            if count == 0:
                raise RunFolderError(f"{tempfile.gettempdir()}: the file of models there has been cut short")
            done += count
        return tensor

    def release(self, offset: int) -> None:
        self._free.append(offset)


class Spooled(Mapping[str, Tensor]):
    """Tensors by name, each read from the file whenever it is asked for."""

    def __init__(self, spool: Spool, places: dict[str, _Place], offset: int) -> None:
        self.places = places
        self._spool = spool
        weakref.finalize(self, spool.release, offset)

    def __getitem__(self, name: str) -> Tensor:
        return self._spool.read(self.places[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


def _unnamed_file() -> int:
    with tempfile.TemporaryFile(prefix="p2pfl-") as file:
        return os.dup(file.fileno())


def _bytes_of(tensor: Tensor) -> np.ndarray:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()


def _write(file: int, data: np.ndarray, offset: int) -> None:
    view = memoryview(data)  # type: ignore[arg-type]
    while len(view):
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written
