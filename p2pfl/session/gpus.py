"""The GPUs of this host, and how peers share them: peer i uses GPU i mod n."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from p2pfl.control_groups import usable_cores
from p2pfl.errors import P2pflError

if TYPE_CHECKING:
    from p2pfl.run_file.run import Run
    from p2pfl.run_file.schema import RunFile

NO_GPU = "torch finds no GPU on this host; use device: auto or cpu"


@dataclass(frozen=True)
class HostGpu:
    """A GPU; ``memory`` in bytes."""

    name: str
    memory: int


@dataclass(frozen=True)
class GpuSlice:
    """What the peers on one GPU get: ``memory`` is the fraction that each may allocate."""

    peers: range
    memory: float
    at_once: int


def slices(run: RunFile, gpus: int) -> list[GpuSlice]:
    """Return the part of each of this host's GPUs that a peer gets. GPUs without peers have no slice."""
    on_gpu = [range(index, run.peers, gpus) for index in range(min(gpus, run.peers))]
    at_once = peers_at_once(run, gpus)
    return [GpuSlice(peers, run.gpu.memory_fraction or 1.0 / len(peers), at_once) for peers in on_gpu]


def peers_at_once(run: RunFile, gpus: int) -> int:
    """Return how many peers may compute at the same time on one of this host's GPUs, or on its cores if it has none.

    A peer with small batches spends its time in launching kernels, on a core: more cores keep a GPU busier.
    """
    by_cores = max(1, usable_cores() // run.threads // max(1, gpus))
    return run.slots or (run.gpu.peers_per_gpu if gpus else None) or by_cores


def find_gpus() -> list[HostGpu]:
    """Return the GPUs that torch finds.

    It looks in a fork: a process that has used CUDA cannot fork peers that use it.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.write(writer, json.dumps([asdict(gpu) for gpu in _gpus()]).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        found = pipe.read()
    os.waitpid(pid, 0)
    return [HostGpu(**gpu) for gpu in json.loads(found or b"[]")]


def torch_build() -> tuple[str, str | None, str]:
    """Return the versions of torch, of CUDA that it is built for (None for the CPU), and of torchvision."""
    import torch
    import torchvision

    return torch.__version__, torch.version.cuda, torchvision.__version__


def _gpus() -> list[HostGpu]:
    import torch

    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [HostGpu(found.name, found.total_memory) for found in properties]


def require_gpu(run: Run) -> None:
    """Raise RunFileError if the run requires a GPU and this host has none."""
    if run.file.device == "cuda" and not find_gpus():
        raise run.error_at("device", P2pflError(f"cuda, but {NO_GPU}"))
