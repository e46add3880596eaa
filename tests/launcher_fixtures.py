"""Hand-made run folders, fake programs, and fake peers that need no torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from click.testing import Result as Outcome

from launcher.collect.collection import collect
from launcher.commands import commands
from launcher.facts.registration import peer_title
from p2pfl.run_folder.folder import Phase, Result, RunFolder, Status

RUN_FILE = {
    "name": "toy",
    "seed": 0,
    "rounds": 3,
    "data": {"dataset": {"name": "digits"}},
    "algorithm": {"name": "local"},
}

RING = "name: toy\nrounds: 1\npeers: 3\ngraph: ring\nalgorithm: local\ndata: {dataset: digits}\n"
"""The text of a run file."""

RUN_ID = "0" * 16
MakeFolder = Callable[..., RunFolder]
Invoke = Callable[..., Outcome]
Host = Callable[..., RunFolder]


@pytest.fixture
def invoke() -> Invoke:
    """Run a command line in this process."""
    runner = CliRunner()
    return lambda *arguments: runner.invoke(commands, [str(a) for a in arguments], catch_exceptions=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The run file RING; its runs go to ``tmp_path / "runs"``."""
    path = tmp_path / "toy.yaml"
    path.write_text(f"{RING}out: {tmp_path / 'runs'}\n")
    return path


@pytest.fixture
def make_folder(tmp_path: Path) -> MakeFolder:
    """Make a finished run folder. ``results`` changes fields of a peer's result; None: no status and no result."""

    def make(
        name: str = "toy", peers: int = 2, *, results: dict[int, dict[str, object] | None] | None = None
    ) -> RunFolder:
        folder = RunFolder.create(tmp_path / name, range(peers))
        folder.run_file.write_text(yaml.safe_dump({**RUN_FILE, "peers": peers}))
        info = {"id": RUN_ID, "started": "2026-11-21T09:30:00+00:00", "launcher_pid": 2**22 + 1}
        folder.write_info({**info, "command": "p2pfl launch toy.yaml"})
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
def host(make_folder: MakeFolder) -> Host:
    """Make the run folder of some peers of a run of four, as it is on their own host. Each log ends in the name."""

    def make(name: str, *peers: int, phase: Phase = "finished", rounds: int = 3, **info: object) -> RunFolder:
        folder = make_folder(f"hosts/{name}", peers=4)
        for files in list(folder.peers()):
            if files.peer not in peers:
                shutil.rmtree(files.root)
                continue
            files.log.write_text(f"2026-11-21T02:41:0{files.peer}.000 INFO    {name}\n")
            files.metrics.write_text('{"t": 0}\n')
            files.checkpoint.write_bytes(b"large")
            if phase != "finished":
                files.clear_result()
            else:
                files.write_result(Result(files.peer, "finished", rounds, f"{files.peer:064x}", "tiny-cnn", 0))
            files.write_status(Status(files.peer, os.getpid(), phase, rounds, rounds))
        (folder.addresses / "00").write_text("tcp://10.0.0.1:40123")
        folder.write_info({**folder.info, "config_hash": "d" * 64, "host": name, **info})
        return folder

    return make


@pytest.fixture
def into(tmp_path: Path) -> Path:
    """Where to collect."""
    return tmp_path / "runs" / "all"


def hosts_by_peer(folder: RunFolder) -> dict[int, str]:
    """Return the host that each peer's log comes from."""
    logs = {files.peer: files.log for files in folder.peers()}
    return {peer: log.read_text().split()[-1] for peer, log in logs.items() if log.exists()}


def gather(into: Path, *locations: object, **options: bool) -> tuple[RunFolder, list[str]]:
    """Collect, and return the collection and the reported lines."""
    lines: list[str] = []
    collected = collect(into, [str(location) for location in locations], lines.append, **options)
    assert not collected.unread
    return collected.folder, lines


@pytest.fixture
def make_process() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start a process with the title and the status of a peer, or with another title."""
    made = []

    def make(
        folder: RunFolder, peer: int, *, ignore_sigterm: bool = False, title: str = ""
    ) -> subprocess.Popen[bytes]:
        code = """
            import signal, sys
            from setproctitle import setproctitle
            if sys.argv[2] == "True":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            setproctitle(sys.argv[1])
            print(flush=True)
            signal.pause()
        """
        title = title or peer_title(folder, peer)
        arguments = [sys.executable, "-c", textwrap.dedent(code), title, str(ignore_sigterm)]
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
    from p2pfl.run_folder.folder import Result, RunFolder, Status

    def emit(**event):
        os.write(1, (json.dumps(event) + "\\n").encode())

    def run_peer(folder, peer, behavior):
        setproctitle(f"p2pfl peer {peer} {folder.root}")
        files = folder.peer(peer)
        def end(phase, rounds_done):
            files.write_result(Result(peer, phase, rounds_done, "0" * 64, "fake", 0))
            files.write_status(Status(peer, os.getpid(), phase, rounds_done=rounds_done))
            os._exit(0)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        if behavior == "waits":
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # a handler could run just before a pause
        if behavior == "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        files.write_status(Status(peer, os.getpid(), "training"))
        if behavior == "waits":
            signal.sigwait({signal.SIGTERM})
        if behavior in ("waits", "stops"):
            end("stopped", 1)
        if behavior == "crashes in round 1":
            files.write_status(Status(peer, os.getpid(), "training", rounds_done=1))
            os.kill(os.getpid(), signal.SIGKILL)
        if behavior == "finishes on SIGUSR1":
            signal.sigwait({signal.SIGUSR1})
        if behavior.startswith("finishes"):
            end("finished", 3)
        if behavior == "outlives the warm process":
            while os.getppid() == warm:
                time.sleep(0.01)
            end("finished", 3)
        if behavior == "crashes":
            os.kill(os.getpid(), signal.SIGSEGV)
        if behavior == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if behavior == "exits with 3":
            os._exit(3)
        if behavior == "cannot write":
            os._exit(os.EX_CANTCREAT)
        if behavior == "sends too much":
            os._exit(os.EX_CONFIG)
        if behavior == "address in use":
            os._exit(os.EX_TEMPFAIL)
        while True:
            signal.pause()

    behaviors = json.loads(os.environ["BEHAVIORS"])
    if behaviors == "dies at once":
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
            peer, error = children.pop(pid)
            emit(event="exited", peer=peer, code=os.waitstatus_to_exitcode(status), error=error)
        try:
            line = os.read(0, 1 << 16)
        except BlockingIOError:
            time.sleep(0.005)
            continue
        if not line:
            listening = False
            continue
        emit(event="ready")
        for request in map(json.loads, line.splitlines()):  # several may have arrived
            environment = {key: os.environ.get(key) for key in ("OMP_NUM_THREADS", "CUDA_MPS_PIPE_DIRECTORY")}
            (Path(request["run"]) / "environment.json").write_text(json.dumps(environment))
            for peer in request["peers"]:
                # "crashes, finishes": crash the first time, finish the second time
                behavior, _, later = behaviors[peer].partition(", ")
                behaviors[peer] = later or behavior
                pid = os.fork()
                if not pid:
                    null = os.open(os.devnull, os.O_RDWR)
                    for descriptor in range(3):
                        os.dup2(null, descriptor)
                    run_peer(RunFolder(Path(request["run"])), peer, behavior)
                children[pid] = peer, "metrics.jsonl: no room\\nreally" if behavior == "cannot write" else ""
                emit(event="started", peer=peer, pid=pid)
        if "outlives the warm process" in behaviors:
            os._exit(1)
"""


@pytest.fixture
def fake_peers(tmp_path: Path) -> Callable[[object], dict[str, str]]:
    """Make the environment in which ``python -m peers --warm`` starts fake peers with the given behaviors."""
    package = tmp_path / "fake" / "peers"
    package.mkdir(parents=True)
    (package / "__main__.py").write_text(textwrap.dedent(FAKE_PEERS))
    (package / "__init__.py").touch()
    project = Path(__file__).parents[1]
    path = os.pathsep.join([str(package.parent), str(project)])
    return lambda behaviors: {"PYTHONPATH": path, "BEHAVIORS": json.dumps(behaviors)}


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Put fake programs first on the PATH. Return the file to which each appends its arguments."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def make(name: str, body: str) -> Path:
        calls = folder / f"{name}.calls"
        path = folder / name
        path.write_text(f"#!/bin/bash\nprintf '%s\\n' \"$*\" >> {calls}\n{textwrap.dedent(body)}")
        path.chmod(0o755)
        return calls

    return make


def replace_peers(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have new processes and forks of this one start the fake peers of ``environment``."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(environment["PYTHONPATH"].partition(os.pathsep)[0])
    for module in [module for module in sys.modules if module.partition(".")[0] == "peers"]:
        monkeypatch.delitem(sys.modules, module)


@pytest.fixture
def launch(
    tmp_path: Path, fake_peers: Any, monkeypatch: pytest.MonkeyPatch, invoke: Invoke
) -> Callable[..., tuple[Outcome, Path]]:
    """`p2pfl launch` of one fake peer per behavior."""
    file = tmp_path / "toy.yaml"

    def run(behaviors: list[str], *arguments: str) -> tuple[Outcome, Path]:
        file.write_text(
            f"name: toy\nrounds: 3\npeers: {len(behaviors)}\nalgorithm: local\ndata: {{dataset: digits}}\n"
        )
        replace_peers(fake_peers(behaviors), monkeypatch)
        return invoke("launch", file, "--run-dir", tmp_path / "run", *arguments), tmp_path / "run"

    return run
