"""Each run of RUNS, simulated once for all tests."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from p2pfl.run_folder.folder import RunFolder
from p2pfl.session.determinism import deterministic
from tests.golden import pinned


@pytest.fixture(scope="session")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], RunFolder]:
    """``simulated(name)``: the folder of that run of RUNS, to read only.

    The first test that asks for it runs the simulation, also for the other processes of pytest-xdist.
    """
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "simulated"
    shared.mkdir(exist_ok=True)

    def simulated(name: str) -> RunFolder:
        root = shared / name
        with (shared / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not root.exists():
                unfinished = Path(tempfile.mkdtemp(dir=shared))
                with deterministic(fill=True):  # peers do not: a difference if uninitialized memory is read
                    pinned.simulated(name, unfinished)
                unfinished.rename(root)
        return RunFolder(root)

    return simulated
