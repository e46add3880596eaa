"""A peer process as a user sees it: its title, its files, its threads, and errors at the start."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from p2pfl.session import checkpoint
from tests.conftest import Warm
from tests.peer_processes import ENDLESS, LOCAL, log_of, rounds_done

# ---- seen from outside


def open_files(pid: int) -> set[str]:
    """What the descriptors of a running process lead to; without those that it closes meanwhile."""
    found = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found.add(os.readlink(descriptor))
    return found


def test_peer_process_has_a_title_and_no_files_of_its_parent(
    make_run: Any, prepare: Any, warm: Any, until: Any, tmp_path: Path
) -> None:
    folder = prepare(tmp_path / "run", make_run(rounds=ENDLESS, chaos={"link": {"jitter": 0.01}}))
    pids = warm.start(folder)
    until(lambda: all(rounds_done(folder, peer) for peer in pids))
    try:
        parents = open_files(warm.pid)
        for peer, pid in pids.items():
            process = psutil.Process(pid)
            assert " ".join(process.cmdline()).strip() == f"p2pfl peer {peer} {folder.root}"
            files = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in (0, 1, 2)}
            assert files == {os.devnull, str(folder.peer(peer).output)}
            assert not {one for one in open_files(pid) & parents if one.startswith(("pipe:", "socket:"))}
            connections = process.net_connections("tcp")
            listening = {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}
            assert len(listening) == 1
            assert (folder.addresses / f"{peer:02d}").read_text().endswith(f":{listening.pop()}")
            assert (
                sum(c.status == psutil.CONN_ESTABLISHED for c in connections) == 6
            )  # two with each of three neighbors
    finally:
        for pid in pids.values():
            os.kill(pid, signal.SIGTERM)
    assert set(warm.wait(pids).values()) == {0}


def test_warm_process_has_one_thread(make_run: Any, prepare: Any, tmp_path: Path) -> None:
    folder = prepare(tmp_path / "run", make_run(rounds=1, algorithm=LOCAL, data={"augment": "mapl"}))
    real: Any = SimpleNamespace(executable=sys.executable, pid=lambda process: process.pid)
    with closing(Warm(real)) as warm:
        assert set(warm.run(folder).values()) == {0}
        assert psutil.Process(warm.pid).num_threads() == 1


def test_warm_process_survives_a_request_without_run_folder(
    make_run: Any, prepare: Any, warm: Any, tmp_path: Path
) -> None:
    warm.running[0] = 0
    warm._stdin.write(f'{{"run": "{tmp_path}", "peers": [0]}}\n'.encode())
    error = f"{tmp_path}: not a run folder (no run.yaml in it); `p2pfl list` shows the runs"
    assert warm._event() == {"event": "exited", "peer": 0, "code": 1, "error": error}
    folder = prepare(tmp_path / "run", make_run(rounds=1, peers=2, algorithm=LOCAL))
    assert warm.run(folder) == {0: 0, 1: 0}


# ---- errors at the start


def test_peer_is_not_started_twice(make_run: Any, prepare: Any, warm: Any, tmp_path: Path) -> None:
    """Peers outlive their launcher: resuming the run must not start a second process."""
    folder = prepare(tmp_path / "run", make_run(peers=2, rounds=1, algorithm=LOCAL))
    files = folder.peer(1)
    with files.log.open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert warm.wait(warm.start(folder, [1])) == {
            1: os.EX_OSFILE
        }  # alone: another peer would wait for it at its end
    assert files.status() is None  # the other process writes it
    assert (
        "peer 1 is already running (process unknown, perhaps on another host or in another container); exiting"
        in log_of(folder, 1)
    )
    assert warm.run(folder) == {0: 0, 1: 0}


def failed(folder: Any, peer: int, *expected: str) -> None:
    status = folder.peer(peer).status()
    assert status.phase == "failed"
    for text in expected:
        assert text in status.error
        assert text in log_of(folder, peer)
    assert "Traceback" not in log_of(folder, peer)
    assert status.error.count("\n") == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a host without GPU")
def test_reports_a_missing_gpu(make_run: Any, prepare: Any, warm: Any, tmp_path: Path) -> None:
    folder = prepare(tmp_path / "run", make_run(peers=2, algorithm=LOCAL, device="cuda"))
    assert warm.run(folder) == {0: 1, 1: 1}
    failed(folder, 0, "device: cuda, but torch finds no GPU on this host; use device: auto or cpu")


def test_reports_two_damaged_checkpoints(make_run: Any, prepare: Any, warm: Any, tmp_path: Path) -> None:
    run = make_run(peers=2, rounds=1, algorithm=LOCAL, transport={"give_up": 2})
    folder = prepare(tmp_path / "run", run)
    assert warm.run(folder) == {0: 0, 1: 0}
    path = folder.peer(1).checkpoint
    for one in (path, checkpoint.previous(path)):
        one.write_bytes(b"torn")
    assert warm.run(folder) == {0: 0, 1: 1}
    failed(folder, 1, "checkpoint.pt: damaged", "checkpoint-previous.pt: damaged", "remove both")
    assert folder.peer(0).result().phase == "finished"


def test_reports_an_invalid_run_file(make_run: Any, prepare: Any, warm: Any, tmp_path: Path) -> None:
    folder = prepare(tmp_path / "run", make_run(peers=2))
    folder.run_file.write_text(folder.run_file.read_text().replace("name: dpsgd", "name: dpsdg"))
    assert warm.run(folder) == {0: 1, 1: 1}
    failed(folder, 0, "run.yaml:", "algorithm.name", "did you mean 'dpsgd'?")


def test_earlier_result_does_not_hide_a_failure(make_run: Any, prepare: Any, warm: Any, tmp_path: Path) -> None:
    folder = prepare(tmp_path / "run", make_run(peers=2, rounds=1, algorithm=LOCAL))
    assert warm.run(folder) == {0: 0, 1: 0}
    folder.run_file.write_text(folder.run_file.read_text().replace("rounds: 1", "rounds: 0"))
    assert warm.run(folder) == {0: 1, 1: 1}
    assert folder.peer(0).result() is None
    failed(folder, 0, "run.yaml:", "rounds")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--run", "{tmp}/nowhere", "--me", "0"], "not a run folder (no run.yaml in it)"),
        (["--run", "{tmp}/run", "--me", "7"], "has no folder of peer 7"),
        (["--run", "{tmp}/run"], "give --run FOLDER and --me N"),
        (["--me", "1"], "give --run FOLDER and --me N"),
    ],
)
def test_reports_wrong_arguments(
    make_run: Any, prepare: Any, tmp_path: Path, arguments: list[str], expected: str
) -> None:
    from click.testing import CliRunner

    from peers.__main__ import main

    prepare(tmp_path / "run", make_run(peers=2))
    result = CliRunner().invoke(main, [argument.format(tmp=tmp_path) for argument in arguments])
    assert result.exit_code in (1, 2)
    assert expected in result.output
    assert "Traceback" not in result.output


def test_peer_started_by_hand_echoes_its_log(make_run: Any, prepare: Any, tmp_path: Path) -> None:
    from click.testing import CliRunner

    from peers.__main__ import main

    folder = prepare(tmp_path / "run", make_run(peers=1, algorithm=LOCAL, data={"partition": "iid"}))
    outcome = CliRunner().invoke(main, ["--run", str(folder.root), "--me", "0"])
    assert outcome.exit_code == 0, outcome.output
    first, *shown = outcome.stdout.splitlines()
    kept = [line for line in log_of(folder, 0).splitlines() if not line.startswith(" ")]  # not further details
    assert first == "peer 0: loading torch"
    assert len(shown) == len(kept) > 2
    for line, whole in zip(shown, kept, strict=True):
        assert whole.partition("T")[2].startswith(line)
    assert "finished accuracy=" in shown[-1]
    assert outcome.stderr == ""


def test_peer_started_by_hand_prints_its_error(make_run: Any, prepare: Any, tmp_path: Path, monkeypatch: Any) -> None:
    from click.testing import CliRunner

    from peers import runtime
    from peers.__main__ import main

    folder = prepare(tmp_path / "run", make_run(peers=2))

    def run_peer(folder: Any, me: int, run: Any, *, report_error: Any, echo: Any) -> int:
        report_error(f"{folder.peer(me).metrics}: no room")
        return 73

    monkeypatch.setattr(runtime, "run_peer", run_peer)
    outcome = CliRunner().invoke(main, ["--run", str(folder.root), "--me", "1"])
    assert outcome.exit_code == 73
    assert outcome.stderr == f"{folder.peer(1).metrics}: no room\n"
