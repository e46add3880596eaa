"""Peers whose disk is full, or whose folder was removed: they end, nothing is damaged, and they resume later."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from p2pfl.errors import WriteError
from p2pfl.session import metrics
from p2pfl.simulation.simulate import simulate

ENDLESS = 1_000_000
SLOW = {"link": {"jitter": 0.02}}


def rounds_done(folder: Any, peer: int) -> int:
    status = folder.peer(peer).status()
    return 0 if status is None else status.rounds_done


def matches_simulate(folder: Any, run: Any) -> None:
    for files, calm in zip(folder.peers(), simulate(run), strict=True):
        result = files.result()
        assert (result.phase, result.rounds_done, result.missing) == ("finished", run.rounds, 0)
        assert (result.digest, result.sent, result.received) == (calm.digest, calm.sent, calm.received)
        assert [record["t"] for record in metrics.read(files.metrics)] == list(range(run.rounds))


@pytest.mark.parametrize("room", [0, 3000, 30_000])
def test_peer_that_cannot_write_ends_and_resumes_later(
    room: int, make_run: Any, prepare: Any, gated_warm: Any, hold: Any, until: Any, tmp_path: Path
) -> None:
    """From its fifth round on, the kernel limits the size of its files."""
    run = make_run(rounds=10, checkpoint_every=3, graph="ring", chaos=SLOW)
    folder = prepare(tmp_path / "run", run)
    hold(folder, 4)
    pids = gated_warm.start(folder)
    until(lambda: rounds_done(folder, 2) == 4)
    resource.prlimit(pids[2], resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
    hold(folder, None)
    assert gated_warm.wait({2: pids[2]}) == {2: WriteError.exit_code}
    files = folder.peer(2)
    if room:  # otherwise its result cannot be written either
        output = gated_warm.errors[pids[2]]
        # The metrics, the journal or the checkpoint: which grows beyond the limit first depends on the method.
        assert output.startswith(f"{files.root}/")
        assert ": cannot be written: File too large; " in output
        assert output.endswith(f"then `p2pfl resume {folder.root}`")
        assert (files.result().phase, files.result().error) == ("failed", output)
    assert not list(files.root.glob(".*.tmp"))
    pids.update(gated_warm.start(folder, [2]))
    assert gated_warm.wait(pids) == dict.fromkeys(range(4), 0)
    matches_simulate(folder, run)


def test_peers_end_with_an_error_when_their_folder_is_removed(
    make_run: Any, prepare: Any, warm: Any, until: Any, tmp_path: Path
) -> None:
    run = make_run(rounds=ENDLESS, chaos=SLOW, checkpoint_every=ENDLESS, transport={"give_up": 1})
    folder = prepare(tmp_path / "run", run)
    pids = warm.start(folder)
    until(lambda: all(rounds_done(folder, peer) for peer in pids))
    folder.root.rename(tmp_path / "aside")
    shutil.rmtree(tmp_path / "aside")
    assert warm.wait(pids) == dict.fromkeys(range(4), WriteError.exit_code)
    for peer, pid in pids.items():
        output = warm.errors[pid]
        assert output.startswith(f"{folder.peer(peer).root}/")  # its metrics or its journal
        assert ": cannot be written: No such file or directory; " in output
        assert output.endswith(f"{folder.root} does not exist")
    assert not folder.root.exists()


IN_A_SMALL_FILE_SYSTEM = """
import json, os, re, signal, subprocess, sys, time
from pathlib import Path
from p2pfl.run_file.load import load
from p2pfl.session import metrics
from p2pfl.run_folder.folder import RunFolder

files, file, runs = Path(sys.argv[1]), sys.argv[2], []
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", files], check=True)
root, ballast = files / "run", files / "ballast"

def p2pfl(*arguments):
    return subprocess.Popen([sys.executable, "-m", "launcher.cli", *map(str, arguments)], stderr=subprocess.PIPE,
                            stdout=subprocess.PIPE, text=True)

def rounds():
    try:
        return [len(metrics.read(files.metrics)) for files in RunFolder(root).peers()] or [0]
    except Exception:
        return [0]

launch = p2pfl("launch", file, "--run-dir", root)
while min(rounds()) < 3:
    assert launch.poll() is None, launch.communicate()
    time.sleep(0.01)
with ballast.open("wb", buffering=0) as full:  # whole pages first, so that not even an empty file fits
    for size in (1 << 16, 1):
        try:
            while True:
                full.write(bytes(size))
        except OSError:
            pass
output = ""
while "cannot be written" not in output:
    assert (line := launch.stdout.readline()), output
    output += line
launch.send_signal(signal.SIGINT)  # the others wait for this peer; some have the room that it has left
output = [output + launch.stdout.read(), launch.stderr.read()]
code = launch.wait()
left = [str(path) for path in files.rglob("*.tmp")]
ballast.unlink()
run_file = RunFolder(root).run_file
enough = max(rounds()) + 3
run_file.write_text(re.sub("(?m)^rounds: .*", f"rounds: {enough}", run_file.read_text()))
info = RunFolder(root).info  # as if the run had begun with so many rounds
RunFolder(root).write_info({**info, "config_hash": load(run_file).config_hash()})
again = p2pfl("resume", root)
said_again = again.communicate()
print(json.dumps({
    "rounds": enough,
    "launch": [code, *output], "left": left, "resume": [again.returncode, *said_again],
    "digests": [files.result().digest for files in RunFolder(root).peers()],
    "missing": [files.result().missing for files in RunFolder(root).peers()],
}))
"""


def in_a_namespace(*command: str) -> list[str]:
    return ["unshare", "--user", "--map-root-user", "--mount", *command]


@pytest.fixture
def private_mounts() -> None:
    """Skip where users may not create user namespaces."""
    if not shutil.which("unshare") or subprocess.run(in_a_namespace("true"), capture_output=True).returncode:
        pytest.skip("needs user namespaces")


@pytest.mark.slow
@pytest.mark.usefixtures("private_mounts")
def test_run_on_a_full_disk_fails_and_resumes_when_there_is_room(make_run: Any, tmp_path: Path) -> None:
    """The launcher on a file system of 64 MB that fills up in mid-run. The number of rounds is chosen afterwards."""
    transport = {"give_up": 1000}  # otherwise they may declare each other dead, and go on without
    run = make_run(rounds=ENDLESS, checkpoint_every=4, graph="ring", chaos=SLOW, transport=transport)
    (tmp_path / "disk").mkdir()
    (tmp_path / "run.yaml").write_text(run.to_yaml())
    script = textwrap.dedent(IN_A_SMALL_FILE_SYSTEM)
    command = [sys.executable, "-c", script, str(tmp_path / "disk"), str(tmp_path / "run.yaml")]
    repository = str(Path(__file__).parents[2])
    outcome = subprocess.run(
        in_a_namespace(*command), capture_output=True, text=True, env={**os.environ, "PYTHONPATH": repository}
    )
    assert outcome.returncode == 0, outcome.stderr
    found = json.loads(outcome.stdout)
    code, output, errors = found["launch"]
    assert code == 1
    assert re.search(rf"peer \d: failed: {tmp_path}/disk/run/peers/\d\d/", output)
    assert ": cannot be written: No space left on device; " in output
    assert f"make room, then `p2pfl resume {tmp_path}/disk/run`" in output
    assert "starting it again" not in output
    assert "Traceback" not in output + errors
    assert found["left"] == []
    assert found["resume"][0] == 0, found["resume"]
    assert "already running" not in found["resume"][1]
    assert found["missing"] == [0] * 4
    whole = make_run(**{**run.resolved(), "rounds": found["rounds"]})
    assert found["digests"] == [result.digest for result in simulate(whole)]
