"""What a peer says that does not fit into memory."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from p2pfl.config import RunFile
from p2pfl.errors import OutOfMemory
from p2pfl.runfolder import PeerId


@contextmanager
def fitting(me: PeerId, device: torch.device, run: RunFile) -> Iterator[None]:
    """Raises OutOfMemory in place of all the errors by which Python and torch say that there is no memory left."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        share = run.gpu.memory_fraction
        raise OutOfMemory(
            f"peer {me}: out of memory on {device} ({_first_line(error)}); its gpu.memory_fraction is "
            f"{'an equal share' if share is None else f'{share:g}'}: use a smaller batch or model, or place fewer "
            "peers on a GPU and give each more of it"
        ) from error
    except (MemoryError, OSError, RuntimeError) as error:
        if not _says_no_memory(error):
            raise
        raise OutOfMemory(
            f"peer {me}: out of memory on its host ({_first_line(error)}); let fewer peers compute at once (slots), "
            "start fewer, or use a smaller batch or model"
        ) from error


def _says_no_memory(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    # torch has no class of its own for what does not fit on the CPU.
    return isinstance(error, MemoryError) or "allocate memory" in str(error)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
