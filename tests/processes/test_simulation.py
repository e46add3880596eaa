"""`p2pfl simulate`: several processes, interruptions, and the choice of the device."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import yaml

from p2pfl.algorithms.dpsgd import DPSGD, Parameters
from p2pfl.errors import CheckpointError, Deadlock, RunFailed, RunFileError, RunFolderError
from p2pfl.messaging.net import Net
from p2pfl.run_folder.folder import RunFolder
from p2pfl.session import metrics
from p2pfl.simulation import forked
from p2pfl.simulation.forked import ForkedHub
from p2pfl.simulation.simulate import simulate, simulation_device
from p2pfl.stop_signals import stop_signals
from tests.conftest import tree
from tests.fast_python.fixture import FastPython
from tests.golden.runs import MAPL

RUNS: dict[str, dict[str, Any]] = {
    "a ring": {"graph": "ring", "peers": 5},
    "edges that are dropped": {
        "peers": 5,
        "rounds": 5,
        "models": "tiny4",
        "algorithm": {**MAPL, "graph_lr": 5.0},
    },
    "late joiners": {"peers": 5, "rounds": 4, "joins_at": {4: 2, 0: 1}},
}


def outcome(folder: RunFolder) -> list[Any]:
    """Everything that must be equal: digests, bytes, records without times."""
    found: list[Any] = []
    for files in folder.peers():
        result = files.result()
        assert result is not None
        records = [{**record, **dict.fromkeys(metrics.MEASURED)} for record in metrics.read(files.metrics)]
        found.append((result.digest, result.rounds_done, result.accuracy, result.sent, result.weights, records))
    return found


@pytest.mark.parametrize(("name", "jobs"), [*((name, 2) for name in RUNS), ("edges that are dropped", 4)])
def test_several_processes_end_with_the_same_bits_and_files(
    make_run: Any, prepare: Any, tmp_path: Path, name: str, jobs: int
) -> None:
    changes = RUNS[name]
    run = make_run(**changes)
    alone, together = prepare(tmp_path / "alone", run), prepare(tmp_path / "together", run)
    rounds: list[tuple[int, int]] = []
    expected = simulate(run, alone)
    found = simulate(run, together, lambda peer, t: rounds.append((peer, t)), jobs)
    assert [result.digest for result in found] == [result.digest for result in expected]
    assert outcome(together) == outcome(alone)
    joins = changes.get("joins_at", {})
    assert sorted(rounds) == [(m, t) for m in range(run.peers) for t in range(joins.get(m, 0), run.rounds)]
    for files in (*alone.peers(), *together.peers()):  # no message is left on the disk
        assert [path.name[:6] for path in files.journal.iterdir()] == ["token-"]


def test_processes_need_a_folder_for_their_messages(make_run: Any) -> None:
    with pytest.raises(ValueError, match="exchange messages by the files of a run folder"):
        simulate(make_run(), jobs=2)


# ---- signals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["before the parent follows", "while a fork starts"])
def test_no_signal_is_lost_while_the_processes_start(
    make_run: Any, prepare: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, until: Any
) -> None:
    original = ForkedHub.become

    def become(self: ForkedHub, process: int) -> None:
        original(self, process)
        if where == "before the parent follows" and process == forked.PARENT:
            os.kill(os.getpid(), signal.SIGTERM)
        elif where == "while a fork starts" and process == 1:
            os.kill(os.getppid(), signal.SIGTERM)
            until(lambda: signal.SIGTERM in signal.sigpending(), "the parent stops this process too")

    monkeypatch.setattr(ForkedHub, "become", become)
    run = make_run(rounds=2000)
    folder = prepare(tmp_path / "run", run)
    before = signal.signal(
        signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT)
    )  # as `p2pfl` does
    try:
        with pytest.raises(KeyboardInterrupt):
            simulate(run, folder, jobs=2)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert {status.phase for files in folder.peers() if (status := files.status())} == {"stopped"}
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & set(stop_signals())


# ---- errors ----------------------------------------------------------------------------------------------------


def test_deadlock_between_processes_is_noticed(
    make_run: Any, prepare: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def round(self: DPSGD, t: int, net: Net) -> None:
        if t == 1:
            await net.gather(Parameters)  # nobody has sent any
        await net.exchange(Parameters(dict(self.model.named_parameters())))

    monkeypatch.setattr(DPSGD, "round", round)
    run = make_run()
    with pytest.raises(Deadlock, match=r"peer [02] waits for Parameters of peer \d in round 1; peer"):
        simulate(run, prepare(tmp_path / "run", run), jobs=2)


def test_nothing_is_in_transit_once_all_that_was_sent_has_arrived() -> None:
    """Sums over all processes would not do: here one message is on its way, and a later one was counted."""
    one, other = ((0, 1), (0, 2)), ((2, 0), (1, 0))
    assert forked.nothing_in_transit({0: one, 1: other})
    assert not forked.nothing_in_transit({0: one})
    assert not forked.nothing_in_transit({0: ((0, 2), (0, 2)), 1: other})
    three = {0: ((0, 0, 1), (0, 0, 0)), 1: ((1, 0, 0), (0, 0, 0)), 2: ((0, 0, 0), (1, 1, 0))}
    assert not forked.nothing_in_transit(three)


def test_deadlock_is_noticed_though_a_checkpoint_is_written_during_the_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes tell one another of it, and have no reason to tell the parent again that they wait."""
    hubs = [ForkedHub(2, 2), ForkedHub(2, 2)]
    told: dict[int, forked.PipeCounts] = {}
    dropped: list[tuple[int, int]] = []

    def send(me: int, to: int, kind: str, *values: Any) -> None:
        if to == forked.PARENT:
            told[me] = values[0], values[1]
        else:
            hubs[to].handle(me, (kind, *values))

    for me, hub in enumerate(hubs):
        hub.become(me)
        monkeypatch.setattr(hub.bus, "send", partial(send, me))
        journal = SimpleNamespace(drop=lambda *what: dropped.append(what))
        mailbox = SimpleNamespace(blocked=True, waits_for=[(0, "Parameters", 1 - me)], nothing=lambda *what: None)
        for peer in (0, 1):
            endpoint: Any = SimpleNamespace(neighbors=[1 - peer], journal=journal, mailbox=mailbox)
            hub.endpoints[peer] = endpoint
    hubs[0].nothing(0, 1, 0)
    hubs[1].nothing(1, 0, 0)
    for hub in hubs:
        hub.check()
    assert forked.nothing_in_transit(told)
    hubs[0].drop(0, {1: 7})
    assert dropped == [(0, 7)]
    hubs[1].check()
    assert forked.nothing_in_transit(told)


def test_message_that_cannot_be_handed_over_ends_the_run(
    make_run: Any, prepare: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = ForkedHub.handle

    def handle(self: ForkedHub, source: int, message: forked.BusMessage) -> None:
        if message[0] == "entry":
            raise ZeroDivisionError("in its receiver")
        original(self, source, message)

    monkeypatch.setattr(ForkedHub, "handle", handle)
    run = make_run()
    with pytest.raises(RunFailed, match="ZeroDivisionError: in its receiver"):
        simulate(run, prepare(tmp_path / "run", run), jobs=2)


@pytest.mark.parametrize("error", [ZeroDivisionError("of peer 2"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_error_of_one_process_stops_the_others(
    make_run: Any, prepare: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    original = DPSGD.round

    async def round(self: DPSGD, t: int, net: Net) -> None:
        if self.me == 2 and t == 1:
            if isinstance(error, KeyboardInterrupt):
                os.kill(os.getppid(), signal.SIGTERM)
            else:
                raise error
        await original(self, t, net)

    monkeypatch.setattr(DPSGD, "round", round)
    run = make_run(rounds=200)
    folder = prepare(tmp_path / "run", run)
    expected = RunFailed if isinstance(error, ZeroDivisionError) else KeyboardInterrupt
    with pytest.raises(expected, match="ZeroDivisionError: of peer 2" if expected is RunFailed else None):
        simulate(run, folder, jobs=2)
    phases = [status.phase for files in folder.peers() if (status := files.status())]
    assert phases[:2] == ["stopped", "stopped"]
    assert phases[2] == ("failed" if expected is RunFailed else "stopped")


# ---- interruptions ---------------------------------------------------------------------------------------------


Start = Callable[..., tuple[subprocess.Popen[bytes], RunFolder]]


@pytest.fixture
def start(tmp_path: Path, fast_python: FastPython) -> Iterator[Start]:
    """Start `p2pfl simulate` as a process, and wait until every peer has computed the first rounds."""
    processes: list[tuple[subprocess.Popen[bytes], bool]] = []

    def start(
        changes: dict[str, Any], rounds: int, *options: str, python: str = fast_python.executable
    ) -> tuple[subprocess.Popen[bytes], RunFolder]:
        file = tmp_path / "tiny.yaml"
        file.write_text(yaml.safe_dump(tree(**{**changes, "rounds": rounds, "checkpoint_every": 3})))
        command = [python, "-m", "launcher.cli", "simulate", str(file)]
        command += ["--run-dir", str(tmp_path / "run")]
        with (tmp_path / "log").open("wb") as log:
            process = subprocess.Popen([*command, *options], stdout=log, stderr=log)
        processes.append((process, python == fast_python.executable))
        return process, RunFolder(tmp_path / "run")

    yield start
    for process, fast in processes:
        if process.poll() is None:
            for child in psutil.Process(fast_python.pid(process) if fast else process.pid).children():
                child.kill()
        process.kill()
        process.wait()


def computed(folder: RunFolder, rounds: int) -> bool:
    paths = [folder.peer(peer).metrics for peer in range(5)]
    return all(path.exists() and len(metrics.read(path)) >= rounds for path in paths)


def has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # between the two
        return True


def command(*arguments: object, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    words = [python, "-m", "launcher.cli", *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=200)


@pytest.mark.parametrize(
    ("jobs", "name"), [pytest.param(1, "edges that are dropped", marks=pytest.mark.slow), (2, "a ring")]
)
def test_killed_simulation_resumes_with_the_same_bits(
    make_run: Any, prepare: Any, tmp_path: Path, start: Start, fast_python: Any, until: Any, jobs: int, name: str
) -> None:
    rounds = 30  # so many that the simulation does not end before it is killed
    process, folder = start(RUNS[name], rounds, "--jobs", str(jobs))
    until(lambda: computed(folder, 4) or process.poll() is not None)
    simulation = psutil.Process(fast_python.pid(process))
    children = simulation.children()
    simulation.kill()
    process.wait()
    assert len(children) == (jobs if jobs > 1 else 0)
    until(lambda: all(map(has_ended, children)))
    assert not all(files.result() for files in folder.peers())
    done = command("resume", folder.root, "--json", python=fast_python.executable)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["finished"]
    run = make_run(**{**RUNS[name], "rounds": rounds})
    calm = prepare(tmp_path / "calm", run)
    simulate(run, calm)
    assert outcome(folder) == outcome(calm)
    again = command("resume", folder.root, python=fast_python.executable)
    assert again.returncode == 1
    assert again.stderr.endswith("nothing to resume: every peer is finished\n")


def test_a_killed_process_is_named_and_the_others_stop(start: Start, fast_python: FastPython, until: Any) -> None:
    process, folder = start(RUNS["a ring"], 5000, "--jobs", "2")
    until(lambda: computed(folder, 2) or process.poll() is not None)
    running = command("resume", folder.root, python=fast_python.executable)
    assert "already running; stop it with `p2pfl stop" in running.stderr
    psutil.Process(fast_python.pid(process)).children()[1].kill()
    assert process.wait(200) == 1
    text = (folder.root.parent / "log").read_text()
    assert "the process of the peers 3 to 4 was killed by SIGKILL" in text
    assert [status.phase for files in folder.peers() if (status := files.status())][:3] == ["stopped"] * 3


def test_simulation_that_a_shell_started_in_the_background_can_be_stopped(start: Start, until: Any) -> None:
    """A shell without job control starts it with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process, folder = start(RUNS["a ring"], 5000, python=sys.executable)
    finally:
        signal.signal(signal.SIGINT, before)
    until(lambda: computed(folder, 2) or process.poll() is not None)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(200) == 1
    assert {result.phase for files in folder.peers() if (result := files.result())} == {"stopped"}


def test_two_processes_cannot_simulate_one_run(make_run: Any, prepare: Any, tmp_path: Path) -> None:
    run = make_run()
    folder = prepare(tmp_path / "run", run)
    with folder.peer(2).log.open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(RunFolderError, match="run: already running; stop it with `p2pfl stop"):
            simulate(run, folder)
    assert all(files.status() is None for files in folder.peers())
    assert [result.phase for result in simulate(run, folder)] == ["finished"] * 4


def test_stopped_simulation_says_how_to_resume_it(start: Start, until: Any) -> None:
    process, folder = start(RUNS["a ring"], 5000, "--jobs", "2")
    until(lambda: computed(folder, 2) or process.poll() is not None)
    with subprocess.Popen([sys.executable, "-m", "launcher.cli", "stop", str(folder.root)]) as stop:
        assert process.wait(200) == 1  # while the command waits: a child that nobody waits for counts as running
    assert stop.returncode == 0
    assert f"resume from the checkpoints with: p2pfl resume {folder.root}" in (folder.root.parent / "log").read_text()
    results = [result for files in folder.peers() if (result := files.result())]
    assert {result.phase for result in results} == {"stopped"}
    assert min(result.rounds_done for result in results) >= 2


def test_resume_without_the_messages_of_others_is_an_error(
    make_run: Any, prepare: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as in folders of versions that kept none."""
    original = DPSGD.round

    async def round(self: DPSGD, t: int, net: Net) -> None:
        await original(self, t, net)
        if self.me == 2 and t == 2:
            raise ZeroDivisionError

    monkeypatch.setattr(DPSGD, "round", round)
    run = make_run(checkpoint_every=1)
    folder = prepare(tmp_path / "run", run)
    with pytest.raises(ZeroDivisionError):
        simulate(run, folder)
    monkeypatch.setattr(DPSGD, "round", original)
    for files in folder.peers():
        if files.peer == 2:
            (files.root / "checkpoint-previous.pt").replace(files.checkpoint)
        shutil.rmtree(files.journal)
    with pytest.raises(CheckpointError, match=r"peer 2 resumes in round 1, but peer \d has deleted"):
        simulate(run, folder)


# ---- the device ------------------------------------------------------------------------------------------------


def test_log_options_hold_for_each_peer_and_in_later_parts_of_the_run(
    tmp_path: Path, fast_python: FastPython
) -> None:
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(tree(peers=2, rounds=1)))
    options = ["--log-format", "json", "--log-level", "error", "--log-level", "1=info", "--log-size", 2]
    done = command("simulate", file, "--run-dir", tmp_path / "run", *options, python=fast_python.executable)
    assert done.returncode == 0, done.stderr
    folder = RunFolder(tmp_path / "run")
    assert folder.info["log"] == {"format": "json", "level": "error", "levels": {"1": "info"}, "max_bytes": 2 << 20}
    assert folder.peer(0).log.read_text() == ""
    entries = [json.loads(line) for line in folder.peer(1).log.read_text().splitlines()]
    assert any(entry["message"].startswith("round done t=0 ") for entry in entries)
    refused = command("simulate", file, "--log-level", "2=info", python=fast_python.executable)
    assert refused.returncode == 1
    assert "--log-level 2=info: should be LEVEL or PEER=LEVEL" in refused.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="for hosts without a GPU")
@pytest.mark.parametrize("kind", ["simulate", "launch"])
def test_a_required_gpu_that_is_not_there_is_refused_before_any_peer_starts(
    tmp_path: Path, kind: str, fast_python: FastPython
) -> None:
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(tree(device="auto")))
    done = command(kind, file, "--set", "device=cuda", "--run-dir", tmp_path / "run", python=fast_python.executable)
    assert done.returncode == 2
    shown = "error: --set device=cuda: device: cuda, but torch finds no GPU on this host; use device: auto or cpu\n"
    assert done.stderr == shown
    assert not (tmp_path / "run").exists()


def test_a_gpu_is_used_in_one_process_and_only_if_required(make_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [simulation_device(make_run(device=name)).type for name in ("auto", "cpu")] == ["cpu", "cpu"]
    with pytest.raises(RunFileError, match="device: peers on a GPU are simulated in one process; leave out --jobs"):
        simulation_device(make_run(device="cuda"), jobs=2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; scripts/check-gpu runs it")
def test_simulates_on_a_gpu(make_run: Any, prepare: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices: set[str] = set()
    original = DPSGD.round

    async def round(self: DPSGD, t: int, net: Net) -> None:
        await original(self, t, net)
        devices.update(parameter.device.type for parameter in self.model.parameters())

    monkeypatch.setattr(DPSGD, "round", round)
    run = make_run(device="cuda")
    results = simulate(run, prepare(tmp_path / "run", run))
    assert {result.phase for result in results} == {"finished"}
    assert devices == {"cuda"}
