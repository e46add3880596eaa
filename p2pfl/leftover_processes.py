"""Processes that plug-ins have started and left running, which the forks of this process could not use."""

from __future__ import annotations

import sys
from collections.abc import Collection
from contextlib import suppress
from multiprocessing.process import BaseProcess  # noqa: TID251  # unpickles nothing


def end_servers() -> None:
    """End the processes that joblib and the method forkserver keep for later calls: forks cannot use them."""
    if (server := sys.modules.get("multiprocessing.forkserver")) is not None:
        with suppress(AttributeError, ChildProcessError):  # of another version; inherited from another process
            server._forkserver._stop()
    if (loky := sys.modules.get("joblib.externals.loky.reusable_executor")) is not None:
        with suppress(AttributeError):  # of another version
            if loky._executor is not None:
                loky._executor.shutdown(wait=True, kill_workers=True)


def left_running(processes: Collection[BaseProcess]) -> str:
    """Return what an error says about these processes, and kill those for which Python would wait at its exit."""
    for process in processes:
        if not process.daemon:
            process.kill()
    return (
        f"leaves {len(processes)} processes running, which peers cannot use: they are forked from this process. End "
        "them where they were started, e.g. `with multiprocessing.Pool(2) as pool:`"
    )
