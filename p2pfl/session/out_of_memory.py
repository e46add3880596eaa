"""Errors of a peer that does not fit into memory."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from p2pfl import PeerId
from p2pfl.errors import OutOfMemory, first_line
from p2pfl.run_file.schema import RunFile

# Messages of plain RuntimeErrors that torch raises.
ON_THE_GPU = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
ON_THE_HOST = "allocate memory"


@contextmanager
def memory_errors(me: PeerId, device: torch.device, run: RunFile) -> Iterator[None]:
    """Turn every error by which Python and torch report exhausted memory into OutOfMemory."""
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        if _is_gpu_error(error):
            fraction = run.gpu.memory_fraction
            raise OutOfMemory(
                f"peer {me}: out of memory on {device} ({first_line(error)}); gpu.memory_fraction is "
                f"{'1 / peers per GPU' if fraction is None else f'{fraction:g}'}: use a smaller batch or model, or "
                "fewer peers per GPU with a larger fraction each"
            ) from error
        if _is_host_error(error):
            raise OutOfMemory(
                f"peer {me}: out of memory on its host ({first_line(error)}); use fewer compute slots (slots), "
                "fewer peers, or a smaller batch or model"
            ) from error
        raise


def _is_gpu_error(error: Exception) -> bool:
    return isinstance(error, torch.cuda.OutOfMemoryError) or any(text in str(error) for text in ON_THE_GPU)


def _is_host_error(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or ON_THE_HOST in str(error)
