"""What a peer says that does not fit into memory."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from p2pfl.config import RunFile
from p2pfl.errors import OutOfMemory
from p2pfl.runfolder import PeerId

# Of these torch makes plain RuntimeErrors.
ON_THE_GPU = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
ON_THE_HOST = "allocate memory"


@contextmanager
def fitting(me: PeerId, device: torch.device, run: RunFile) -> Iterator[None]:
    """Raises OutOfMemory in place of all the errors by which Python and torch say that there is no memory left."""
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        if _is_of_the_gpu(error):
            share = run.gpu.memory_fraction
            raise OutOfMemory(
                f"peer {me}: out of memory on {device} ({_first_line(error)}); its gpu.memory_fraction is "
                f"{'an equal share' if share is None else f'{share:g}'}: use a smaller batch or model, or place "
                "fewer peers on a GPU and give each more of it"
            ) from error
        if _is_of_the_host(error):
            raise OutOfMemory(
                f"peer {me}: out of memory on its host ({_first_line(error)}); let fewer peers compute at once "
                "(slots), start fewer, or use a smaller batch or model"
            ) from error
        raise


def _is_of_the_gpu(error: Exception) -> bool:
    return isinstance(error, torch.cuda.OutOfMemoryError) or any(text in str(error) for text in ON_THE_GPU)


def _is_of_the_host(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or ON_THE_HOST in str(error)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
