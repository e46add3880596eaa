"""One peer's slice of the machine: threads, GPU, GPU memory."""

from __future__ import annotations

import os
import socket

import torch

from p2pfl import PeerId
from p2pfl.errors import P2pflError
from p2pfl.run_file.schema import RunFile
from p2pfl.session.gpus import NO_GPU, peers_at_once, slices


def claim_device(run: RunFile, me: PeerId) -> torch.device:
    """Return the device that ``me`` computes on, with its fraction of the GPU's memory as a limit.

    Peer i uses GPU i mod n. Raises P2pflError if the run file requires a GPU and there is none.
    """
    torch.set_num_threads(run.threads)
    gpus = torch.cuda.device_count() if run.device != "cpu" else 0
    if gpus == 0:
        if run.device == "cuda":
            raise P2pflError(f"device: cuda, but {NO_GPU}")
        return torch.device("cpu")
    # cuBLAS is deterministic only with a workspace of fixed size.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    index = me % gpus
    torch.cuda.set_device(index)
    torch.cuda.set_per_process_memory_fraction(slices(run, gpus)[index].memory, index)
    return torch.device("cuda", index)


def slots_on(run: RunFile, device: torch.device) -> tuple[int, str]:
    """Return how many peers may compute at once on this peer's device, and a prefix for the device's lock files.

    The prefix contains the host name, because hosts may share the run folder.
    """
    host = socket.gethostname()
    if device.type == "cuda":
        return peers_at_once(run, torch.cuda.device_count()), f"{host}-gpu{device.index}-"
    return peers_at_once(run, 0), f"{host}-"
