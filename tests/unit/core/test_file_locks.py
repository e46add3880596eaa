"""File systems without locks: what a lock protects is refused with the remedy, other things go on."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.backends.launch import resume
from launcher.errors import SweepError
from launcher.facts.sweep_folder import Sweep, SweepFolder, SweepRun
from launcher.prepare import LaunchRequest
from launcher.sweep.jobs import Job
from launcher.sweep.plan import SweepRequest
from launcher.sweep.plan import prepare as prepare_sweep
from p2pfl.data import DATASETS, cache_folder, open_dataset
from p2pfl.data.loaders.synthetic import Synthetic
from p2pfl.errors import UnsuitableFileSystem
from p2pfl.file_locks import lock
from p2pfl.run_file.run import Run
from p2pfl.run_folder.folder import RunFolder
from p2pfl.simulation.simulate import simulate
from peers.runtime import run_peer
from peers.slots import HostSlot
from tests.unit.peers.test_host_process import Events

REFUSALS = [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EACCES]
"""How file systems without locks answer."""
REMEDY = "file system with locks, e.g. a local disk: --run-dir FOLDER or --set out=FOLDER"


@pytest.fixture(params=REFUSALS, ids=errno.errorcode.get)
def refused(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """No file can be locked. Returns the reason."""

    def refuse(file: object, operation: int) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(fcntl, "lockf", refuse)
    return os.strerror(request.param)


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(fcntl, "lockf", refuse)


def test_a_refusal_names_the_file_the_reason_and_the_remedy(tmp_path: Path, refused: str) -> None:
    path = tmp_path / "file"
    for of_process in (False, True):
        with path.open("w") as file, pytest.raises(UnsuitableFileSystem) as raised:
            lock(file, path, of_process=of_process)
        assert str(raised.value).startswith(f"{path}: cannot be locked: {refused}; put the run folder on a ")


def test_a_lock_that_another_holds_is_not_a_refusal(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("w") as one, path.open("w") as other:
        assert lock(one, path)
        assert lock(one, path)
        assert not lock(other, path)


# ---- what a lock protects


def test_a_run_is_refused_before_there_is_a_folder(
    make_run: Any, tmp_path: Path, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(out=str(tmp_path / "runs"))
    for folder in (tmp_path / "run", None):
        with pytest.raises(UnsuitableFileSystem, match=f"cannot be locked: {refused}; .*{REMEDY}"):
            LaunchRequest(tmp_path / "x.yaml", run_dir=folder).prepare(run)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_locks")
def test_a_run_on_other_hosts_needs_no_locks_in_the_folder_of_its_launcher(make_run: Any, tmp_path: Path) -> None:
    LaunchRequest(tmp_path / "x.yaml", run_dir=tmp_path / "run").prepare(make_run(), here=False)
    host = Events()
    host.open(tmp_path / "there", "run")
    (event,) = host.close()
    assert f"{tmp_path / 'there'}: cannot be locked: No locks available; put run folders on" in event
    assert "--host-dir FOLDER" in event
    assert not (tmp_path / "there").exists()


@pytest.mark.usefixtures("no_locks")
def test_a_run_folder_that_was_moved_there_is_not_resumed(make_run: Any, prepare: Any, tmp_path: Path) -> None:
    run: Run = make_run()
    folder: RunFolder = prepare(tmp_path / "run", run)
    with pytest.raises(UnsuitableFileSystem, match=f"{folder.root}: cannot be locked: .*{REMEDY}"):
        resume(folder, (), console=None)  # type: ignore[arg-type]
    with pytest.raises(UnsuitableFileSystem, match=r"run/peers/00/peer\.log: cannot be locked"):
        simulate(run, folder)


@pytest.mark.usefixtures("no_locks")
def test_a_peer_says_why_it_ends_and_is_not_restarted(make_run: Any, prepare: Any, tmp_path: Path) -> None:
    folder: RunFolder = prepare(tmp_path / "run", make_run())
    told: list[str] = []
    assert run_peer(folder, 1, report_error=told.append) == os.EX_CANTCREAT  # follow() starts no such peer again
    assert told == [f"{folder.peer(1).log}: cannot be locked: No locks available; put the run folder on a {REMEDY}"]
    assert told[0] in folder.peer(1).log.read_text()


def test_a_sweep_is_refused_and_leaves_no_folder(file: Path, tmp_path: Path, refused: str) -> None:
    with pytest.raises(UnsuitableFileSystem, match=f"out: cannot be locked: {refused}; .* --out FOLDER"):
        prepare_sweep(SweepRequest(file, out=tmp_path / "out", simulate=True))
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("no_locks")
def test_a_sweep_whose_folder_was_moved_there_can_be_read_and_not_continued(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path)
    folder.write(Sweep("", "x.yaml", True, points=(SweepRun("a", {}, 0),)))
    folder.log("a").parent.mkdir()
    folder.log("a").touch()
    assert folder.state("a") == "waiting"
    with pytest.raises(UnsuitableFileSystem, match=r"lock: cannot be locked: .* --out FOLDER"), folder.locked():
        pass
    with pytest.raises(UnsuitableFileSystem, match=r"logs/a\.log: cannot be locked"):
        Job(folder, "a")


def test_another_sweep_is_still_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def held(file: object, operation: int) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(fcntl, "lockf", held)
    with pytest.raises(SweepError, match="another `p2pfl sweep` works"), SweepFolder(tmp_path).locked():
        pass


@pytest.mark.usefixtures("no_locks")
async def test_a_slot_that_cannot_be_locked_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UnsuitableFileSystem, match=r"0\.fifo: cannot be locked"):
        await HostSlot(tmp_path, 1).acquire()


async def test_slots_are_limited_where_only_their_queue_cannot_be_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel locks FIFOs itself, on whatever file system."""
    flock = fcntl.flock

    def refuse(file: int, operation: int) -> None:
        if os.readlink(f"/proc/self/fd/{file}").endswith("turnstile"):
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", refuse)
    one, other = HostSlot(tmp_path, 1), HostSlot(tmp_path, 1)
    await one.acquire()
    waiting = asyncio.create_task(other.acquire())
    await asyncio.sleep(0)
    assert not waiting.done()
    one.release()
    await asyncio.wait_for(waiting, 200)


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_fifos_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(path: Path, mode: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "mkfifo", refuse)
    with pytest.raises(UnsuitableFileSystem, match=f"0.fifo: cannot be created as a FIFO: .*{REMEDY}"):
        HostSlot(tmp_path, 1)


@pytest.mark.exhaustive
def test_a_tracker_ends_with_one_line(prepare: Any, make_run: Any, tmp_path: Path) -> None:
    folder: RunFolder = prepare(tmp_path / "run", make_run())
    code = (
        "import errno, fcntl, os, runpy, sys\ndef refuse(*_): raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))"
    )
    code += "\nfcntl.flock = refuse\nrunpy.run_module('launcher.tracking', run_name='__main__', alter_sys=True)"
    command = [sys.executable, "-c", code, str(folder.root), '{"name": "tensorboard"}']
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    path = folder.root / "tracking" / "tensorboard.lock"
    assert done.stderr == f"{path}: cannot be locked: No locks available; put the run folder on a {REMEDY}\n"


# ---- what a lock makes faster


def test_a_dataset_is_prepared_without_locks_which_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("P2PFL_CACHE", str(tmp_path))
    cache_folder._warn_once.cache_clear()
    for train in (50, 60):
        dataset = open_dataset("synthetic", DATASETS["synthetic"].parse({"train": train, "test": 50}))
        assert len(dataset.train) == train
    assert capfd.readouterr().err == (
        f"warning: {tmp_path}/synthetic.lock: cannot be locked: {refused}; going on: processes that start together "
        "may each prepare it\n"
    )
    assert {path.name.partition("-")[0] for path in tmp_path.iterdir()} == {"synthetic", "synthetic.lock"}


@pytest.mark.usefixtures("no_locks")
def test_another_process_may_have_prepared_the_dataset_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("P2PFL_CACHE", str(tmp_path))
    loader = DATASETS["synthetic"].parse({"train": 50, "test": 50})
    read = Synthetic.read
    first: list[Any] = []

    def read_later(self: Synthetic, root: Path) -> Any:
        monkeypatch.setattr(Synthetic, "read", read)
        first.append(open_dataset("synthetic", loader))  # of the other process
        return read(self, root)

    monkeypatch.setattr(Synthetic, "read", read_later)
    second = open_dataset("synthetic", loader)
    assert second.sha256 == first[0].sha256
    assert (second.train.images == first[0].train.images).all()
    assert sorted(path.name for path in tmp_path.iterdir())[1:] == ["synthetic.lock"]
