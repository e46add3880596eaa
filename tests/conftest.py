"""What the tests share: conditions with an end, small runs, run folders, a warm process, and a look for what
was left behind."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, settings

from p2pfl.chaos import LinkFaults
from p2pfl.config import Run, Transport, from_dict
from p2pfl.keys import Keys
from p2pfl.net import Endpoint, LocalHub, Patience
from p2pfl.runfolder import RunFolder, write_atomically
from p2pfl.topology import Topology
from p2pfl.wire import Layout
from peers.health import Health
from peers.keys import new_pair
from peers.zmqlink import Leaving, ZmqLink
from tests.bodies import RUN_ID

PATIENCE = 200.0
"""Seconds after which a condition counts as never met. Nothing waits that long on a machine that is not stuck."""
ROOM = 100.0
"""Seconds of a deadline that nobody should miss, however slow the machine: it matters only when something hangs."""

# How fast examples are drawn and tried says something about the machine, and nothing about the code.
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
    "transport": {"deadline": ROOM, "give_up": 60},
    "device": "cpu",
}
"""A run of about a tenth of a second per peer and round. Whoever is slow is waited for."""


def tree(**changes: Any) -> dict[str, Any]:
    """TINY with other values; mappings are merged one level deep, except for named things."""
    tree = copy.deepcopy(TINY)
    for key, value in changes.items():
        merged = isinstance(value, dict) and isinstance(tree.get(key), dict) and "name" not in value
        tree[key] = {**tree[key], **value} if merged else value
    return tree


@pytest.fixture(scope="session")
def make_run() -> Callable[..., Run]:
    """``make_run(rounds=5, transport={"deadline": 9})``: a checked Run like TINY but for that."""

    def make(**changes: Any) -> Run:
        return from_dict(tree(**changes))

    return make


@pytest.fixture(scope="session")
def prepare() -> Callable[..., RunFolder]:
    """``prepare(path, run)``: a run folder as `p2pfl launch` would make it."""

    def make(root: Path, run: Run, run_id: str = RUN_ID) -> RunFolder:
        folder = RunFolder.create(root, range(run.peers))
        folder.write_about({"id": run_id})
        folder.run_file.write_text(run.to_yaml())
        return folder

    return make


def until(condition: Callable[[], Any], what: str = "", patience: float = PATIENCE) -> Any:
    """Block until ``condition()`` is true and return it; fail after ``patience`` seconds."""
    end = time.monotonic() + patience
    while not (met := condition()):
        assert time.monotonic() < end, f"not within {patience} s: {what or condition}"
        time.sleep(0.01)
    return met


async def eventually(condition: Callable[[], Any], what: str = "", patience: float = PATIENCE) -> Any:
    """The same without blocking the event loop."""
    end = time.monotonic() + patience
    while not (met := condition()):
        assert time.monotonic() < end, f"not within {patience} s: {what or condition}"
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
from p2pfl.session import Session

unhindered = Session._round

async def round(self, t):
    gate = self.folder.root.parents[1] / "gate"
    while gate.exists() and t >= int(gate.read_text()):
        self._release()
        self._say("queued", t)
        await asyncio.sleep(0.005)
    await unhindered(self, t)

Session._round = round
"""
"""What a warm process runs before it forks, so that ``hold`` stops its peers before a round."""


@pytest.fixture(scope="session")
def hold() -> Callable[[RunFolder, int | None], None]:
    """``hold(folder, 5)``: peers that a warm process with GATE has forked do not begin round 5 or a later one until
    it is called again; with None they go on to the end. What a test does in the middle of a run is never too late."""

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
        self.words: dict[int, str] = {}
        """What they have said last, by process id."""
        assert self._event() == {"event": "ready"}

    def _event(self) -> dict[str, Any]:
        while b"\n" not in self._pending:
            assert select.select([self._stdout], [], [], PATIENCE)[0], "the warm process says nothing"
            chunk = os.read(self._stdout.fileno(), 1 << 16)
            assert chunk, "the warm process has ended"
            self._pending += chunk
        line, self._pending = self._pending.split(b"\n", 1)
        event: dict[str, Any] = json.loads(line)
        if event["event"] == "exited":
            pid = self.running.pop(event["peer"])
            self.codes[pid], self.words[pid] = event["code"], event["words"]
        return event

    def start(self, folder: RunFolder, peers: Sequence[int] | None = None) -> dict[int, int]:
        """Fork peers of a run (all of them if not told which). Returns {peer: process id}."""
        peers = [place.peer for place in folder.peers()] if peers is None else list(peers)
        self._stdin.write(json.dumps({"run": str(folder.root), "peers": peers}).encode() + b"\n")
        started: dict[int, int] = {}
        while len(started) < len(peers):
            event = self._event()
            if event["event"] == "started":
                started[event["peer"]] = self.running[event["peer"]] = event["pid"]
                self.codes.pop(event["pid"], None)
        return started

    def wait(self, pids: Mapping[int, int]) -> dict[int, int]:
        """Wait for peers to end. Returns {peer: exit code}."""
        while not all(pid in self.codes for pid in pids.values()):
            self._event()
        return {peer: self.codes[pid] for peer, pid in pids.items()}

    def next_of(self, pids: Mapping[int, int]) -> int:
        """Wait until one of these peers has ended. Returns which."""
        while not (ended := [peer for peer, pid in pids.items() if pid in self.codes]):
            self._event()
        return ended[0]

    def run(self, folder: RunFolder) -> dict[int, int]:
        """All peers of a run from start to end. Returns {peer: exit code}."""
        return self.wait(self.start(folder))

    def kill(self) -> None:
        """kill -9 the warm process alone."""
        self.process.kill()
        self.process.wait()

    def clear(self) -> None:
        """Kill peers that a failed test has left, so that no other test meets them."""
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
        code = self.process.wait(PATIENCE)
        self._stdout.close()
        assert code in (0, -signal.SIGKILL)


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
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
    """One for all tests that ``hold`` peers in the middle of a run."""
    yield _gated_warm
    _gated_warm.clear()


@pytest.fixture(scope="module")
def altered_warm(request: pytest.FixtureRequest) -> Iterator[Warm]:
    """One for a module, which runs the module's PRELUDE before it forks, besides GATE."""
    warm = Warm(GATE + request.module.PRELUDE)
    yield warm
    warm.close()


@pytest.fixture
def another_warm() -> Iterator[Warm]:
    """A warm process of one's own, to be killed, with GATE."""
    warm = Warm(GATE)
    yield warm
    warm.close()


@pytest.fixture(scope="session", autouse=True)
def _nothing_left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail the session if a process survives it: a child of ours, or a peer of a run in our temporary folder."""
    yield
    base = str(tmp_path_factory.getbasetemp())

    def survivors() -> list[psutil.Process]:
        ours = set(psutil.Process().children(recursive=True))
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if base in " ".join(process.cmdline()) and process.pid != os.getpid():
                    ours.add(process)
        return [process for process in ours if _alive(process.pid)]

    end = time.monotonic() + PATIENCE
    while survivors() and time.monotonic() < end:
        time.sleep(0.05)
    left = survivors()
    described = [f"{process.pid}: {process.name()}" for process in left]
    for process in left:
        process.kill()
    assert not left, f"processes survived the tests: {described}"


class Mesh:
    """Endpoints of one process on one event loop, over LocalLinks, over sockets or over encrypted ones."""

    def __init__(self, sort: str, addresses: Path) -> None:
        self.sort = sort
        self.addresses = addresses
        self.hub = LocalHub()
        self.endpoints: list[Endpoint] = []
        self.links: list[ZmqLink] = []
        self.pairs = [new_pair() for _ in range(40)] if sort == "encrypted" else []

    def keys(self, me: int) -> Keys | None:
        return Keys(tuple(public for public, _ in self.pairs), self.pairs[me][1]) if self.pairs else None

    def endpoint(self, me: int, topology: Topology, layouts: Sequence[Layout], deadline: float = ROOM) -> Endpoint:
        return Endpoint(me, topology, RUN_ID, 5, layouts, Patience(deadline))

    def revived(self, dead: Endpoint) -> Endpoint:
        """The endpoint of a new process of that peer, with the state that the old one had between its last rounds."""
        endpoint = self.endpoint(dead.me, dead.topology, dead.layouts[:-2])
        endpoint.load_state_dict(dead.state_dict())
        endpoint.t = endpoint.durable = dead.t
        return endpoint

    def link(
        self,
        endpoint: Endpoint,
        digest: str = "d",
        jitter: float = 0.0,
        keys: Keys | None = None,
        health: Health | None = None,
        **transport: Any,
    ) -> ZmqLink:
        """A link that is not started."""
        transport = {"deadline": ROOM, "give_up": ROOM, **transport}
        endpoint.link = link = ZmqLink(
            endpoint, self.addresses, Transport(**transport), digest, logging.getLogger("mesh"),
            keys=keys or self.keys(endpoint.me), faults=LinkFaults(jitter=jitter), health=health,
        )  # fmt: skip
        self.links.append(link)
        return link

    async def open(
        self, topology: Topology, layouts: Sequence[Layout], deadline: float = ROOM, **transport: Any
    ) -> list[Endpoint]:
        """One endpoint per peer. Over sockets, messages are held back at random."""
        self.endpoints = [self.endpoint(me, topology, layouts, deadline) for me in range(topology.peers)]
        for endpoint in self.endpoints:
            if self.sort == "local":
                self.hub.join(endpoint)
            else:
                await self.link(endpoint, **{"jitter": 0.004, **transport}).start()
        return self.endpoints

    async def shut(self, link: ZmqLink, leaving: Leaving = "failed") -> None:
        """Everything that was sent arrives, but nobody waits for checkpoints, which nobody here makes."""
        self.links.remove(link)
        await link.close(leaving)

    async def close(self) -> None:
        for link in self.links:  # nobody comes back any more
            link.transport = link.transport.model_copy(update={"give_up": 0.5})
        await asyncio.gather(*(self.shut(link) for link in list(self.links)))


@pytest.fixture(params=["local", "sockets", "encrypted"])
async def mesh(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Mesh]:
    """For the behaviour that all sorts of link have in common."""
    mesh = Mesh(request.param, tmp_path)
    yield mesh
    await mesh.close()


@pytest.fixture
async def sockets(tmp_path: Path) -> AsyncIterator[Mesh]:
    """For the behaviour that only sockets have."""
    mesh = Mesh("sockets", tmp_path)
    yield mesh
    await mesh.close()


@pytest.fixture
async def encrypted(tmp_path: Path) -> AsyncIterator[Mesh]:
    """For the behaviour that sockets with keys have. Peers 0 to 39 have keys."""
    mesh = Mesh("encrypted", tmp_path)
    yield mesh
    await mesh.close()
