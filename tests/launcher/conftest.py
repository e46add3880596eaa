"""Run folders made by hand, and a stand-in for the peers that needs no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from click.testing import Result as Outcome

from launcher.commands import commands
from launcher.processes import peer_title
from p2pfl.runfolder import Result, RunFolder, Status

RUN_FILE = {
    "name": "toy",
    "seed": 0,
    "rounds": 3,
    "data": {"dataset": {"name": "digits"}},
    "algorithm": {"name": "local"},
}

RING = "name: toy\nrounds: 1\npeers: 3\ngraph: ring\nalgorithm: local\ndata: {dataset: digits}\n"
"""A run file's text."""

MakeFolder = Callable[..., RunFolder]
Invoke = Callable[..., Outcome]


@pytest.fixture
def invoke() -> Invoke:
    """Run the command in this process."""
    runner = CliRunner()
    return lambda *arguments: runner.invoke(commands, [str(a) for a in arguments], catch_exceptions=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The run file RING, whose runs go into a folder beside it."""
    path = tmp_path / "toy.yaml"
    path.write_text(f"{RING}out: {tmp_path / 'runs'}\n")
    return path


@pytest.fixture
def make_folder(tmp_path: Path) -> MakeFolder:
    """A run folder as a launch leaves it; every peer has a status and a result, changed by ``results``."""

    def make(
        name: str = "toy", peers: int = 2, *, results: dict[int, dict[str, object] | None] | None = None
    ) -> RunFolder:
        folder = RunFolder.create(tmp_path / name, range(peers))
        folder.run_file.write_text(yaml.safe_dump({**RUN_FILE, "peers": peers}))
        about = {"id": "0" * 16, "started": "2026-11-21T09:30:00+00:00", "launcher_pid": 2**22 + 1}
        folder.write_about({**about, "command": "p2pfl launch toy.yaml"})
        for peer in range(peers):
            changes = (results or {}).get(peer, {})
            if changes is None:
                continue
            result = Result(peer, "finished", 3, f"{peer:064x}", "tiny-cnn", group=0)
            for key, value in changes.items():
                setattr(result, key, value)
            folder.peer(peer).write_result(result)
            status = Status(peer, 2**22 + 1, result.phase, 2, result.rounds_done, [], result.accuracy)
            folder.peer(peer).write_status(status)
        return folder

    return make


@pytest.fixture
def make_process() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """A process that calls itself a peer of a run, and has a status that says so."""
    made = []

    def make(folder: RunFolder, peer: int, *, ignore_sigterm: bool = False) -> subprocess.Popen[bytes]:
        code = """
            import signal, sys
            from setproctitle import setproctitle
            if sys.argv[2] == "True":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            setproctitle(sys.argv[1])
            print(flush=True)
            signal.pause()
        """
        arguments = [sys.executable, "-c", textwrap.dedent(code), peer_title(folder, peer), str(ignore_sigterm)]
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE)
        made.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        folder.peer(peer).write_status(Status(peer, process.pid, "training", 1, 1))
        return process

    yield make
    for process in made:
        process.kill()
        process.communicate()


FAKE_PEERS = """
    import json, os, signal, sys, time
    from pathlib import Path
    from setproctitle import setproctitle
    from p2pfl.runfolder import Result, RunFolder, Status

    def say(**event):
        os.write(1, (json.dumps(event) + "\\n").encode())

    def live(folder, peer, role):
        setproctitle(f"p2pfl peer {peer} {folder.root}")
        place = folder.peer(peer)
        def end(phase, rounds_done):
            place.write_result(Result(peer, phase, rounds_done, "0" * 64, "fake", 0))
            place.write_status(Status(peer, os.getpid(), phase, rounds_done=rounds_done))
            os._exit(0)
        if role == "waits":
            signal.signal(signal.SIGTERM, lambda *_: end("stopped", 1))
        if role == "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        place.write_status(Status(peer, os.getpid(), "training"))
        if role == "stops":
            end("stopped", 1)
        if role == "crashes in round 1":
            place.write_status(Status(peer, os.getpid(), "training", rounds_done=1))
            os.kill(os.getpid(), signal.SIGKILL)
        if role == "finishes":
            end("finished", 3)
        if role == "outlives the warm process":
            while os.getppid() == warm:
                time.sleep(0.01)
            end("finished", 3)
        if role == "crashes":
            os.kill(os.getpid(), signal.SIGSEGV)
        if role == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if role == "exits with 3":
            os._exit(3)
        if role == "cannot write":
            os._exit(os.EX_CANTCREAT)
        while True:
            signal.pause()

    roles = json.loads(os.environ["ROLES"])
    if roles == "dies at once":
        sys.exit("no torch here")
    warm = os.getpid()
    children = {}
    os.set_blocking(0, False)
    listening = True
    while listening or children:
        while children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            peer, words = children.pop(pid)
            say(event="exited", peer=peer, code=os.waitstatus_to_exitcode(status), words=words)
        try:
            line = os.read(0, 1 << 16)
        except BlockingIOError:
            time.sleep(0.005)
            continue
        if not line:
            listening = False
            continue
        say(event="ready")
        for request in map(json.loads, line.splitlines()):  # two may have come at once
            environment = {key: os.environ.get(key) for key in ("OMP_NUM_THREADS", "CUDA_MPS_PIPE_DIRECTORY")}
            (Path(request["run"]) / "environment.json").write_text(json.dumps(environment))
            for peer in request["peers"]:
                # "crashes, finishes": the first time one thing, the next time the other
                role, _, later = roles[peer].partition(", ")
                roles[peer] = later or role
                pid = os.fork()
                if not pid:
                    null = os.open(os.devnull, os.O_RDWR)
                    for descriptor in range(3):
                        os.dup2(null, descriptor)
                    live(RunFolder(Path(request["run"])), peer, role)
                children[pid] = peer, "metrics.jsonl: no room\\nreally" if role == "cannot write" else ""
                say(event="started", peer=peer, pid=pid)
        if "outlives the warm process" in roles:
            os._exit(1)
"""


@pytest.fixture
def fake_peers(tmp_path: Path) -> Callable[[object], dict[str, str]]:
    """Makes the environment in which ``python -m peers --warm`` is a stand-in that plays the given roles."""
    package = tmp_path / "fake" / "peers"
    package.mkdir(parents=True)
    (package / "__main__.py").write_text(textwrap.dedent(FAKE_PEERS))
    (package / "__init__.py").touch()
    here = Path(__file__).parents[2]
    path = os.pathsep.join([str(package.parent), str(here)])
    return lambda roles: {"PYTHONPATH": path, "ROLES": json.dumps(roles)}
