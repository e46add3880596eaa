"""NVIDIA's Multi-Process Service for one run: kernels of several peers overlap on one GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from launcher.errors import LaunchError
from p2pfl.run_folder.files import write_errors

CONTROL = "nvidia-cuda-mps-control"
LIMIT = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
TIMEOUT = 60.0
"""Seconds that the control program may take."""


@contextmanager
def multi_process_service(
    logs: Path, peers_per_gpu: int | None, warn: Callable[[str], object]
) -> Iterator[dict[str, str]]:
    """Run a control daemon for this run, and yield the environment variables that make a process its client.

    The daemon is stopped at the end; if it cannot be, ``warn`` is called with a line, since the run has its results.
    Each peer's kernels may use 1 / ``peers_per_gpu`` of the GPU's multiprocessors; None: all of them.
    If the launcher is killed, the daemon keeps running for the peers that use it.

    Raises:
        LaunchError: the daemon does not start.
    """
    if shutil.which(CONTROL) is None:
        raise LaunchError(
            f"gpu.mps needs {CONTROL}, which is not on PATH; it comes with the NVIDIA driver. Set gpu.mps: false"
        )
    with write_errors(logs):
        logs.mkdir(exist_ok=True)
    # The pipe directory holds sockets, whose paths are limited to 107 characters: keep it short.
    with tempfile.TemporaryDirectory(prefix="p2pfl-mps-") as pipes:
        daemon = {"CUDA_MPS_PIPE_DIRECTORY": pipes, "CUDA_MPS_LOG_DIRECTORY": str(logs)}
        if problem := _control(["-d"], daemon):
            raise LaunchError(f"{problem}; see {logs}/control.log and nvidia-smi, or set gpu.mps: false")
        try:
            yield daemon if peers_per_gpu is None else {**daemon, LIMIT: str(max(1, 100 // peers_per_gpu))}
        finally:
            if problem := _control([], daemon, "quit\n"):
                warn(f"{problem}; its daemon may still be running: end it with `pkill nvidia-cuda-mps`")


def _control(arguments: list[str], environment: dict[str, str], stdin: str = "") -> str:
    """Run the control program. Return what went wrong, or nothing."""
    try:
        done = subprocess.run(
            [CONTROL, *arguments],
            input=stdin,
            env={**os.environ, **environment},
            # The daemon inherits these: a pipe would stay open as long as it runs.
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        return f"{CONTROL} did not answer within {TIMEOUT:g} s"
    except OSError as error:
        return f"{CONTROL} cannot be run: {error.strerror}"
    return f"{CONTROL} failed with exit code {done.returncode}" if done.returncode else ""
