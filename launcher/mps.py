"""NVIDIA's Multi-Process Service for one run: kernels of several peers overlap on one GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from launcher.errors import LaunchError
from p2pfl.runfolder import writing

CONTROL = "nvidia-cuda-mps-control"


@contextmanager
def multi_process_service(logs: Path, peers_per_gpu: int) -> Iterator[dict[str, str]]:
    """A control daemon of this run's own; yields the environment that makes a process its client.

    It is stopped at the end. Only a launcher that is killed leaves it behind, with the peers that use it.
    """
    if shutil.which(CONTROL) is None:
        raise LaunchError(
            f"gpu.mps needs {CONTROL}, which is not on PATH; it comes with the NVIDIA driver. Set gpu.mps: false"
        )
    with writing(logs):
        logs.mkdir(exist_ok=True)
    # Its sockets lie in the pipe directory, and a socket's path has at most 107 characters: no deep folders.
    with tempfile.TemporaryDirectory(prefix="p2pfl-mps-") as pipes:
        daemon = {"CUDA_MPS_PIPE_DIRECTORY": pipes, "CUDA_MPS_LOG_DIRECTORY": str(logs)}
        _control(["-d"], daemon)
        try:
            yield {**daemon, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(max(1, 100 // peers_per_gpu))}
        finally:
            _control([], daemon, "quit\n")


def _control(arguments: list[str], environment: dict[str, str], say: str = "") -> None:
    done = subprocess.run(
        [CONTROL, *arguments],
        input=say,
        env={**os.environ, **environment},
        # The daemon keeps what it inherits, so a pipe would stay open as long as it lives.
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=60,
    )
    if done.returncode:
        logs = environment["CUDA_MPS_LOG_DIRECTORY"]
        raise LaunchError(f"{CONTROL} failed with exit code {done.returncode}; see {logs}/control.log")
