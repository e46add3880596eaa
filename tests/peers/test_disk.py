"""Peers whose disk is full, or whose folder is gone: they end, nothing is damaged, and they go on afterwards."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from p2pfl import metrics
from p2pfl.errors import Unwritable
from p2pfl.simulate import simulate

ENDLESS = 1_000_000
SLOW = {"link": {"jitter": 0.02}}


def rounds_done(folder: Any, peer: int) -> int:
    status = folder.peer(peer).status()
    return 0 if status is None else status.rounds_done


def same_as_calm(folder: Any, run: Any) -> None:
    for place, calm in zip(folder.peers(), simulate(run), strict=True):
        result = place.result()
        assert (result.phase, result.rounds_done, result.missing) == ("finished", run.rounds, 0)
        assert (result.digest, result.out, result.inn) == (calm.digest, calm.out, calm.inn)
        assert [record["t"] for record in metrics.read(place.metrics)] == list(range(run.rounds))


@pytest.mark.parametrize(("room", "file"), [(0, ""), (3000, "metrics.jsonl"), (30_000, "checkpoint.pt")])
def test_a_peer_that_cannot_write_ends_and_goes_on_later_as_if_nothing_had_happened(
    room: int, file: str, make_run: Any, prepare: Any, gated_warm: Any, hold: Any, until: Any, tmp_path: Path
) -> None:
    """From its fifth round on the kernel lets it write nothing beyond so many bytes into any file."""
    run = make_run(rounds=10, checkpoint_every=3, graph="ring", chaos=SLOW)
    folder = prepare(tmp_path / "run", run)
    hold(folder, 4)
    pids = gated_warm.start(folder)
    until(lambda: rounds_done(folder, 2) == 4)
    resource.prlimit(pids[2], resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
    hold(folder, None)
    assert gated_warm.wait({2: pids[2]}) == {2: Unwritable.exit_code}
    place = folder.peer(2)
    if room:  # otherwise there is none for last words either
        said = gated_warm.words[pids[2]]
        assert said.startswith(f"{place.root / file}: cannot be written: File too large; ")
        assert said.endswith(f"then `p2pfl resume {folder.root}`")
        assert (place.result().phase, place.result().error) == ("failed", said)
    assert not list(place.root.glob(".*.tmp"))
    pids.update(gated_warm.start(folder, [2]))
    assert gated_warm.wait(pids) == dict.fromkeys(range(4), 0)
    same_as_calm(folder, run)


def test_peers_whose_folder_is_removed_end_and_say_so(
    make_run: Any, prepare: Any, warm: Any, until: Any, tmp_path: Path
) -> None:
    run = make_run(rounds=ENDLESS, chaos=SLOW, checkpoint_every=ENDLESS, transport={"give_up": 1})
    folder = prepare(tmp_path / "run", run)
    pids = warm.start(folder)
    until(lambda: all(rounds_done(folder, peer) for peer in pids))
    folder.root.rename(tmp_path / "aside")
    shutil.rmtree(tmp_path / "aside")
    assert warm.wait(pids) == dict.fromkeys(range(4), Unwritable.exit_code)
    for peer, pid in pids.items():
        said = warm.words[pid]
        assert said.startswith(f"{folder.peer(peer).metrics}: cannot be written: No such file or directory; ")
        assert said.endswith(f"{folder.root} is gone")
    assert not folder.root.exists()


IN_A_SMALL_FILE_SYSTEM = """
import json, os, re, subprocess, sys, time
from pathlib import Path
from p2pfl import metrics
from p2pfl.runfolder import RunFolder

place, file, runs = Path(sys.argv[1]), sys.argv[2], []
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", place], check=True)
root, ballast = place / "run", place / "ballast"

def p2pfl(*arguments):
    return subprocess.Popen([sys.executable, "-m", "launcher.cli", *map(str, arguments)], stderr=subprocess.PIPE,
                            stdout=subprocess.PIPE, text=True)

def rounds():
    try:
        return [len(metrics.read(place.metrics)) for place in RunFolder(root).peers()] or [0]
    except Exception:
        return [0]

launch = p2pfl("launch", file, "--run-dir", root)
while min(rounds()) < 3:
    assert launch.poll() is None, launch.communicate()
    time.sleep(0.01)
with ballast.open("wb", buffering=0) as full:  # pages first, so that not even an empty file finds room
    for size in (1 << 16, 1):
        try:
            while True:
                full.write(bytes(size))
        except OSError:
            pass
said = launch.communicate()
code = launch.returncode
left = [str(path) for path in place.rglob("*.tmp")]
ballast.unlink()
run_file = RunFolder(root).run_file
enough = max(rounds()) + 3
run_file.write_text(re.sub("(?m)^rounds: .*", f"rounds: {enough}", run_file.read_text()))
again = p2pfl("resume", root)
said_again = again.communicate()
print(json.dumps({
    "rounds": enough,
    "launch": [code, *said], "left": left, "resume": [again.returncode, *said_again],
    "digests": [place.result().digest for place in RunFolder(root).peers()],
    "missing": [place.result().missing for place in RunFolder(root).peers()],
}))
"""


def in_a_namespace(*command: str) -> list[str]:
    return ["unshare", "--user", "--map-root-user", "--mount", *command]


@pytest.fixture
def private_mounts() -> None:
    """Needs user namespaces, which not every host lets its users make."""
    if not shutil.which("unshare") or subprocess.run(in_a_namespace("true"), capture_output=True).returncode:
        pytest.skip("no user namespaces here")


@pytest.mark.usefixtures("private_mounts")
def test_a_run_on_a_full_disk_says_so_and_goes_on_when_there_is_room(make_run: Any, tmp_path: Path) -> None:
    """The whole command on a real file system of 64 MB, which something else fills in mid-run. How many rounds there
    are is decided when it has."""
    transport = {"give_up": 5}  # for so long they wait for each other while there is no room
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
    code, said, errors = found["launch"]
    assert code == 1
    for peer in range(4):
        assert f"peer {peer}: failed: {tmp_path}/disk/run/peers/{peer:02d}/" in said
    assert ": cannot be written: No space left on device; " in said
    assert f"make room, then `p2pfl resume {tmp_path}/disk/run`" in said
    assert "starting it again" not in said
    assert "Traceback" not in said + errors
    assert found["left"] == []
    assert found["resume"][0] == 0, found["resume"]
    whole = make_run(**{**run.resolved(), "rounds": found["rounds"]})
    assert found["digests"] == [result.digest for result in simulate(whole)]
    assert found["missing"] == [0] * 4
