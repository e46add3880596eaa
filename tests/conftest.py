"""Shared fixtures: waiting for conditions, small runs, run folders, warm processes, and a check that no process
survives the tests."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import HealthCheck, settings

from p2pfl.plugins import loading
from p2pfl.run_file.load import from_dict
from p2pfl.run_file.run import Run
from p2pfl.run_folder.files import write_atomically
from p2pfl.run_folder.folder import RunFolder
from tests.bodies import GENEROUS_DEADLINE, RUN_ID

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # as in background jobs of a shell; what tests start inherits it
    signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)  # as a peer has by default; pytest-xdist uses the other cores

# The helper modules beside this file have assertions too; the plug-ins below are rewritten anyway.
pytest.register_assert_rewrite(
    *{f"tests.{file.stem}" for file in Path(__file__).parent.glob("*.py")} - set(sys.modules)
)

pytest_plugins = [
    "tests.fast_python.fixture",
    "tests.golden.fixture",
    "tests.launcher_fixtures",
    "tests.mesh_fixtures",
    "tests.plugin_fixtures",
]

TIMEOUT = 200.0
"""Seconds after which a condition counts as never met. Nothing takes that long unless it hangs."""

# The speed of examples depends on the machine, not on the code.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

TINY: dict[str, Any] = {
    "name": "tiny",
    "seed": 3,
    "rounds": 3,
    "peers": 4,
    "graph": "complete",
    "data": {
        "dataset": "digits",
        "partition": {"name": "clusters", "clusters": 2, "per_class": 8, "test_per_class": 5},
    },
    "models": "tiny-mixer",
    "algorithm": {"name": "dpsgd", "batch": 16},
    "transport": {"deadline": GENEROUS_DEADLINE, "give_up": 60},
    "device": "cpu",
}
"""A run of about a tenth of a second per peer and round, with generous deadlines."""


def tree(**changes: Any) -> dict[str, Any]:
    """Return TINY with other values; mappings are merged one level deep, unless they have a name."""
    tree = copy.deepcopy(TINY)
    for key, value in changes.items():
        merged = isinstance(value, dict) and isinstance(tree.get(key), dict) and "name" not in value
        tree[key] = {**tree[key], **value} if merged else value
    return tree


@pytest.fixture(scope="session")
def make_run() -> Callable[..., Run]:
    """``make_run(rounds=5, transport={"deadline": 9})``: a validated Run, TINY with these changes."""

    def make(**changes: Any) -> Run:
        return from_dict(tree(**changes))

    return make


@pytest.fixture(scope="session")
def prepare() -> Callable[..., RunFolder]:
    """``prepare(path, run)``: a run folder as `p2pfl launch` makes it."""

    def make(root: Path, run: Run, run_id: str = RUN_ID) -> RunFolder:
        folder = RunFolder.create(root, range(run.peers))
        folder.write_info({"id": run_id})
        folder.run_file.write_text(run.to_yaml())
        return folder

    return make


@pytest.fixture(autouse=True)
def no_plugin_stays_active() -> Iterator[None]:
    """Forget the names that a run file's plug-ins have registered: other tests go through the tables of names."""
    yield
    loading.activate([])


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("slow") and not os.environ.get("P2PFL_SLOW"):
        pytest.skip("takes long; scripts/check-slow runs it")


def until(condition: Callable[[], Any], what: str = "", timeout: float = TIMEOUT) -> Any:
    """Block until ``condition()`` is true and return its value; fail after ``timeout`` seconds."""
    end = time.monotonic() + timeout
    while not (met := condition()):
        assert time.monotonic() < end, f"not within {timeout} s: {what or condition}"
        time.sleep(0.01)
    return met


async def eventually(condition: Callable[[], Any], what: str = "", timeout: float = TIMEOUT) -> Any:
    """The same without blocking the event loop."""
    end = time.monotonic() + timeout
    while not (met := condition()):
        assert time.monotonic() < end, f"not within {timeout} s: {what or condition}"
        await asyncio.sleep(0.005)
    return met


@pytest.fixture(scope="session", name="until")
def until_fixture() -> Callable[..., Any]:
    return until


@pytest.fixture(scope="session", name="eventually")
def eventually_fixture() -> Callable[..., Any]:
    return eventually


GATE = """
import asyncio
from p2pfl.session.session import Session

unhindered = Session._round

async def round(self, t):
    gate = self.folder.root.parents[1] / "gate"
    while gate.exists() and t >= int(gate.read_text()):
        self.slot.release()
        self._enter("queued", t)
        await asyncio.sleep(0.005)
    await unhindered(self, t)

Session._round = round
"""
"""Run by a warm process before it forks, so that ``hold`` can stop its peers before a round."""


@pytest.fixture(scope="session")
def hold() -> Callable[[RunFolder, int | None], None]:
    """``hold(folder, 5)``: peers of a warm process with GATE do not begin round 5 or a later one until the next call;
    ``hold(folder, None)`` lets them run to the end. So a test can act in the middle of a run without a race."""

    def hold(folder: RunFolder, t: int | None) -> None:
        write_atomically(folder.root / "gate", f"{sys.maxsize if t is None else t}".encode())

    return hold


class Warm:
    """A warm process (peers/warm.py) and the peers that it forked."""

    def __init__(self, prelude: str = "") -> None:
        main = "import os, peers.warm; os._exit(peers.warm.serve())"  # what `python -m peers --warm` does
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"{prelude}\n{main}"] if prelude else [sys.executable, "-m", "peers", "--warm"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._stdin, self._stdout = self.process.stdin, self.process.stdout
        self._pending = b""
        self.running: dict[int, int] = {}
        """Process ids of peers that have not ended."""
        self.codes: dict[int, int] = {}
        """Exit codes of those that have, by process id."""
        self.errors: dict[int, str] = {}
        """Their error messages, by process id."""
        assert self._event() == {"event": "ready"}

    def _event(self) -> dict[str, Any]:
        while b"\n" not in self._pending:
            assert select.select([self._stdout], [], [], TIMEOUT)[0], "the warm process sends no event"
            chunk = os.read(self._stdout.fileno(), 1 << 16)
            assert chunk, "the warm process has ended"
            self._pending += chunk
        line, self._pending = self._pending.split(b"\n", 1)
        event: dict[str, Any] = json.loads(line)
        if event["event"] == "exited":
            pid = self.running.pop(event["peer"])
            self.codes[pid], self.errors[pid] = event["code"], event["error"]
        return event

    def start(self, folder: RunFolder, peers: Sequence[int] | None = None) -> dict[int, int]:
        """Fork peers of a run, by default all. Return {peer: process id}."""
        peers = [files.peer for files in folder.peers()] if peers is None else list(peers)
        self._stdin.write(json.dumps({"run": str(folder.root), "peers": peers}).encode() + b"\n")
        started: dict[int, int] = {}
        while len(started) < len(peers):
            event = self._event()
            if event["event"] == "started":
                started[event["peer"]] = self.running[event["peer"]] = event["pid"]
                self.codes.pop(event["pid"], None)
        return started

    def wait(self, pids: Mapping[int, int]) -> dict[int, int]:
        """Wait for peers to end. Return {peer: exit code}."""
        while not all(pid in self.codes for pid in pids.values()):
            self._event()
        return {peer: self.codes[pid] for peer, pid in pids.items()}

    def next_of(self, pids: Mapping[int, int]) -> int:
        """Wait until one of these peers has ended. Return which."""
        while not (ended := [peer for peer, pid in pids.items() if pid in self.codes]):
            self._event()
        return ended[0]

    def run(self, folder: RunFolder) -> dict[int, int]:
        """Run all peers of a run to the end. Return {peer: exit code}."""
        return self.wait(self.start(folder))

    def kill(self) -> None:
        """kill -9 the warm process alone."""
        self.process.kill()
        self.process.wait()

    def clear(self) -> None:
        """Kill peers that a failed test left running."""
        left = dict(self.running)
        for pid in left.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.process.poll() is None:
            self.wait(left)

    def close(self) -> None:
        """Let the warm process end by itself."""
        self.clear()
        self._stdin.close()
        code = self.process.wait(TIMEOUT)
        self._stdout.close()
        assert code in (0, -signal.SIGKILL)


def _alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="session")
def _warm() -> Iterator[Warm]:
    warm = Warm()
    yield warm
    warm.close()


@pytest.fixture
def warm(_warm: Warm) -> Iterator[Warm]:
    """One warm process for all tests."""
    yield _warm
    _warm.clear()


@pytest.fixture(scope="session")
def _gated_warm() -> Iterator[Warm]:
    warm = Warm(GATE)
    yield warm
    warm.close()


@pytest.fixture
def gated_warm(_gated_warm: Warm) -> Iterator[Warm]:
    """One warm process with GATE for all tests."""
    yield _gated_warm
    _gated_warm.clear()


@pytest.fixture(scope="module")
def _altered_warm(request: pytest.FixtureRequest) -> Iterator[Warm]:
    warm = Warm(GATE + request.module.PRELUDE)
    yield warm
    warm.close()


@pytest.fixture
def altered_warm(_altered_warm: Warm) -> Iterator[Warm]:
    """One warm process for a module, with GATE and the module's PRELUDE."""
    yield _altered_warm
    _altered_warm.clear()


@pytest.fixture
def another_warm() -> Iterator[Warm]:
    """A warm process with GATE that the test may kill."""
    warm = Warm(GATE)
    yield warm
    warm.close()


@pytest.fixture(scope="session", autouse=True)
def _nothing_left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail the session if a process survives it: a child, or a peer of a run in the temporary folder."""
    yield
    base = str(tmp_path_factory.getbasetemp())

    def survivors() -> list[psutil.Process]:
        ours = set(psutil.Process().children(recursive=True))
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if base in " ".join(process.cmdline()) and process.pid != os.getpid():
                    ours.add(process)
        return [process for process in ours if _alive(process.pid)]

    end = time.monotonic() + TIMEOUT
    while survivors() and time.monotonic() < end:
        time.sleep(0.05)
    left = survivors()
    described = [f"{process.pid}: {process.name()}" for process in left]
    for process in left:
        process.kill()
    assert not left, f"processes survived the tests: {described}"
