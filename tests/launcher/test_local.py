"""The local backend against a stand-in for the warm process: who ended how, and what Ctrl-C does."""

from __future__ import annotations

import io
import json
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from click.testing import Result as Outcome
from rich.console import Console

from launcher.errors import LaunchError
from launcher.local import ATTEMPTS, OUT_OF_MEMORY, Crew, Policy, Restart, farewell, follow, resume
from launcher.mps import CONTROL, multi_process_service
from launcher.prepare import Order
from launcher.progress import LineProgress
from launcher.summary import failures, summarize
from launcher.warm import WarmProcess
from p2pfl.errors import Unwritable
from p2pfl.runfolder import RunFolder


@dataclass
class Run:
    peers: int
    rounds: int = 3


@pytest.fixture
def play(make_folder, fake_peers) -> Callable[..., tuple[RunFolder, Crew, str]]:
    """Follow peers that play the given roles to the end; returns what the launcher knows and said."""

    def run(
        *roles: str, meanwhile: Callable[[RunFolder], None] | None = None, restart: Restart = "never"
    ) -> tuple[RunFolder, Crew, str]:
        folder = make_folder(peers=len(roles), results=dict.fromkeys(range(len(roles))))
        console = Console(file=io.StringIO())
        other = threading.Thread(target=meanwhile, args=(folder,)) if meanwhile else None
        with WarmProcess(fake_peers(roles)) as warm:
            if other:
                other.start()
            crew = follow(folder, range(len(roles)), Run(len(roles)), warm, console, restart)
        if other:
            other.join()
        # How many lines of progress come in between depends on the machine's load.
        said = [line for line in console.file.getvalue().splitlines(True) if not line.startswith("rounds ")]
        return folder, crew, "".join(said)

    return run


def test_the_exit_of_every_peer_is_known(play):
    folder, crew, _ = play("finishes", "crashes", "exits with 3", "finishes")
    assert crew.codes == {0: 0, 1: -signal.SIGSEGV, 2: 3, 3: 0}
    assert [line.partition(";")[0] for line in failures(summarize(folder, crew.codes))] == [
        "peer 1: killed by SIGSEGV", "peer 2: exit code 3"
    ]  # fmt: skip


@pytest.mark.parametrize("restart", ["never", "on-failure", "always"])
def test_peers_that_crash_are_started_again(play, restart):
    folder, crew, said = play("crashes, finishes", "exits with 3, exits with 3, finishes", restart=restart)
    if restart == "never":
        assert crew.codes == {0: -signal.SIGSEGV, 1: 3}
        assert said == ""
    else:
        assert crew.codes == {0: 0, 1: 0}
        assert summarize(folder, crew.codes).finished
        assert "peer 0: killed by SIGSEGV; starting it again" in said
        assert said.count("peer 1: exit code 3; starting it again") == 2


def test_a_peer_that_gets_no_further_is_given_up(play):
    _, crew, said = play("crashes", "finishes", restart="on-failure")
    assert crew.codes == {0: -signal.SIGSEGV, 1: 0}
    assert said.count("starting it again") == ATTEMPTS - 1


@pytest.mark.parametrize(("role", "hint"), [("crashes", ""), ("is killed", OUT_OF_MEMORY)])
def test_who_is_given_up_is_named_and_if_it_was_killed_so_is_the_likely_reason(play, role, hint):
    _, crew, said = play(role, restart="on-failure")
    ended = f"killed by {signal.Signals(-crew.codes[0]).name}"
    times = f"; given up after {ATTEMPTS} times without a completed round in between"
    assert said.splitlines()[ATTEMPTS - 1] == f"peer 0: {ended}{times}{hint}"


@pytest.mark.parametrize("restart", ["never", "on-failure"])
def test_a_peer_that_cannot_write_is_quoted_and_not_started_again(play, restart):
    _, crew, said = play("cannot write", "finishes", restart=restart)
    assert crew.codes == {0: Unwritable.exit_code, 1: 0}
    assert said.splitlines()[0] == "peer 0: failed: metrics.jsonl: no room"
    assert "starting it again" not in said


def test_a_peer_that_cannot_write_is_started_again_if_always(play):
    _, crew, said = play("cannot write, finishes", restart="always")
    assert crew.codes == {0: 0}
    assert said.splitlines()[0] == "peer 0: failed: metrics.jsonl: no room; starting it again"


def test_a_peer_that_gets_further_in_between_is_not(play):
    roles = [*["crashes"] * (ATTEMPTS - 1), "crashes in round 1", *["crashes"] * (ATTEMPTS - 2), "finishes"]
    _, crew, said = play(", ".join(roles), restart="on-failure")
    assert crew.codes == {0: 0}
    assert said.count("starting it again") == len(roles) - 1


def injected(folder: RunFolder, peer: int, *restart: bool) -> None:
    lines = [json.dumps({"name": f"kill 0.{n}", "what": "kill", "restart": again}) for n, again in enumerate(restart)]
    folder.peer(peer).chaos.write_text("".join(f"{line}\n" for line in lines))


def test_what_chaos_kills_is_started_again_however_often_unless_for_good(make_folder):
    folder = make_folder(peers=2, results={})
    policy = Policy(folder, "on-failure")
    for count in range(1, 3 * ATTEMPTS):
        injected(folder, 0, *[True] * count)
        assert policy.wants(0, -signal.SIGKILL)
    injected(folder, 1, True, False)
    assert not policy.wants(1, -signal.SIGKILL)
    assert not Policy(folder, "always").wants(1, -signal.SIGKILL)


@pytest.mark.parametrize(("restart", "phase"), [("on-failure", "stopped"), ("always", "finished")])
def test_a_peer_that_was_stopped_is_started_again_only_if_always(play, restart, phase):
    folder, _, _ = play("stops, finishes", restart=restart)
    assert folder.peer(0).result().phase == phase


def test_peers_that_outlive_the_warm_process_are_followed_to_the_end(play):
    folder, crew, _ = play("outlives the warm process", "outlives the warm process")
    assert crew.codes == {}
    assert summarize(folder, crew.codes).finished


@pytest.fixture
def listening(until) -> Callable[[], None]:
    """Waits until Ctrl-C no longer ends the tests, but is the launcher's to handle."""
    before = signal.getsignal(signal.SIGINT)
    return lambda: until(lambda: signal.getsignal(signal.SIGINT) != before)


def test_ctrl_c_stops_and_a_second_one_kills(play, until, listening):
    def press_twice(folder: RunFolder) -> None:
        listening()
        until(lambda: all(place.status() for place in folder.peers()))
        os.kill(os.getpid(), signal.SIGINT)
        until(lambda: folder.peer(0).result())
        os.kill(os.getpid(), signal.SIGINT)

    folder, crew, said = play("waits", "stubborn", meanwhile=press_twice)
    assert crew.codes == {0: 0, 1: -signal.SIGKILL}
    assert [line.partition(";")[0] for line in failures(summarize(folder, crew.codes))] == [
        "peer 0: stopped", "peer 1: killed by SIGKILL"
    ]  # fmt: skip
    assert "stopping: " in said
    assert "killing" in said


def test_sigterm_ends_the_launcher_which_says_that_the_peers_go_on(make_folder, monkeypatch):
    folder, out = make_folder(peers=1), io.StringIO()
    killed = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append((pid, number, signal.getsignal(number))))
    with farewell(folder, LineProgress(Console(file=out))):
        signal.raise_signal(signal.SIGTERM)
    assert killed == [(os.getpid(), signal.SIGTERM, signal.SIG_DFL)]
    assert f"the peers go on: `p2pfl stop {folder.root}` stops them" in out.getvalue().replace("\n", " ")


def test_ctrl_c_before_any_peer_is_up_leaves_nothing_behind(make_folder, fake_peers, listening):
    folder = make_folder(peers=1, results={0: None})

    def press() -> None:
        listening()
        os.kill(os.getpid(), signal.SIGINT)

    with WarmProcess(fake_peers(["waits"])) as warm:
        # The stand-in is stopped before it can fork, as a real one is that still imports.
        os.kill(warm._process.pid, signal.SIGSTOP)
        other = threading.Thread(target=press)
        other.start()
        crew = follow(folder, [0], Run(1), warm, Console(file=io.StringIO()), "on-failure")
        other.join()
    assert crew.started == set()
    assert warm._process.returncode == -signal.SIGKILL
    assert failures(summarize(folder, crew.codes)) == ["peer 0: never started"]


def test_a_warm_process_that_dies_at_once_is_quoted(make_folder, fake_peers):
    folder = make_folder(peers=1, results={0: None})
    with (
        WarmProcess(fake_peers("dies at once")) as warm,
        pytest.raises(LaunchError, match="no torch here"),
    ):
        follow(folder, [0], Run(1), warm, Console(file=io.StringIO()), "on-failure")
    assert (folder.root / "warm.log").read_text() == "no torch here\n"


def test_a_warm_process_that_is_not_needed_after_all_is_killed(fake_peers):
    warm = WarmProcess(fake_peers(["waits"]))
    with pytest.raises(KeyboardInterrupt), warm:
        raise KeyboardInterrupt
    assert warm._process.returncode == -signal.SIGKILL


# ---- the command as a whole --------------------------------------------------------------------------------


@pytest.fixture
def launch(tmp_path, fake_peers, monkeypatch, invoke) -> Callable[..., tuple[Outcome, Path]]:
    """``p2pfl launch`` of as many peers as there are roles."""
    file = tmp_path / "toy.yaml"

    def run(roles: list[str], *arguments: str) -> tuple[Outcome, Path]:
        file.write_text(f"name: toy\nrounds: 3\npeers: {len(roles)}\nalgorithm: local\ndata: {{dataset: digits}}\n")
        for key, value in fake_peers(roles).items():
            monkeypatch.setenv(key, value)
        return invoke("launch", file, "--run-dir", tmp_path / "run", *arguments), tmp_path / "run"

    return run


def environment(root: Path) -> dict[str, str | None]:
    return json.loads((root / "environment.json").read_text())


def test_a_launch_that_ends_well(launch):
    outcome, root = launch(["finishes", "finishes"])
    assert outcome.exit_code == 0
    first, *rest = outcome.stdout.splitlines()
    assert first == f"run: {root}"
    assert str(root) not in "".join(rest)
    assert outcome.stderr == ""
    assert (root / "summary.json").exists()
    assert environment(root)["OMP_NUM_THREADS"] == "1"


def test_a_launch_of_which_a_peer_dies(launch):
    outcome, root = launch(["finishes", "crashes"])
    assert outcome.exit_code == 1
    assert outcome.stdout.splitlines()[0] == f"run: {root}"
    assert outcome.stderr == f"peer 1: killed by SIGSEGV; see {root}/peers/01/peer.log\n"


@pytest.mark.parametrize(("here", "typed"), [("", "run"), ("elsewhere", "{root}"), ("run", "{root}")])
def test_whoever_has_stopped_peers_is_told_how_they_go_on(launch, tmp_path, monkeypatch, here, typed):
    (tmp_path / here).mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path / here)
    outcome, root = launch(["finishes", "stops"])
    assert outcome.exit_code == 1
    hint = f"it can go on from its checkpoints: p2pfl resume {typed.format(root=root)}"
    assert outcome.stderr.splitlines() == ["peer 1: stopped", hint]


def test_json_has_stdout_to_itself(launch):
    outcome, root = launch(["finishes", "finishes"], "--json")
    summary = json.loads(outcome.stdout)
    assert summary["finished"] is True
    assert summary["run"] == str(root)
    assert outcome.stderr.splitlines()[0] == f"run: {root}"


def test_peers_get_the_threads_that_the_run_file_says(launch):
    outcome, root = launch(["finishes", "finishes"], "--set", "threads=3")
    assert outcome.exit_code == 0
    assert environment(root)["OMP_NUM_THREADS"] == "3"


def test_peers_are_clients_of_the_service(launch, control):
    outcome, root = launch(["finishes", "finishes"], "--set", "gpu.mps=true")
    assert outcome.exit_code == 0
    pipes = environment(root)["CUDA_MPS_PIPE_DIRECTORY"]
    assert control.read_text().splitlines() == [f"{pipes}|-d|", f"{pipes}||quit"]


def test_a_wrong_run_file_starts_nothing(launch):
    outcome, root = launch(["finishes"], "--set", "algorithm=mapel")
    assert outcome.exit_code == 2
    assert "unknown 'mapel'" in outcome.stderr
    assert not root.exists()


# ---- NVIDIA's Multi-Process Service ---------------------------------------------------------------------------


@pytest.fixture
def control(tmp_path: Path, monkeypatch) -> Path:
    """A stand-in for the control program, which writes down how it was called."""
    calls = tmp_path / "calls"
    program = tmp_path / "bin" / CONTROL
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$CUDA_MPS_PIPE_DIRECTORY|$*|$(cat)" >> {calls}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return calls


def test_mps_runs_as_long_as_the_peers(control, tmp_path):
    with multi_process_service(tmp_path / "mps", peers_per_gpu=3) as environment:
        pipes = environment["CUDA_MPS_PIPE_DIRECTORY"]
        assert control.read_text().splitlines() == [f"{pipes}|-d|"]
        assert Path(pipes).is_dir()
        assert len(pipes) < 60
        assert environment["CUDA_MPS_LOG_DIRECTORY"] == str(tmp_path / "mps")
        assert environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "33"
    assert control.read_text().splitlines()[1:] == [f"{pipes}||quit"]
    assert not Path(pipes).exists()


def test_mps_that_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with (
        pytest.raises(LaunchError, match=f"gpu.mps needs {CONTROL}"),
        multi_process_service(tmp_path / "mps", peers_per_gpu=1),
    ):
        pass


def test_mps_that_does_not_start(control, tmp_path):
    (tmp_path / "bin" / CONTROL).write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(LaunchError, match="failed with exit code 1"), multi_process_service(tmp_path / "mps", 1):
        pass


def test_events_may_come_in_pieces(fake_peers):
    with WarmProcess(fake_peers(["waits"])) as warm:
        warm._pending = json.dumps({"event": "exited", "peer": 4, "code": -9}).encode()[:10]
        rest = json.dumps({"event": "exited", "peer": 4, "code": -9}).encode()[10:]
        read, write = os.pipe()
        os.write(write, rest + b'\n{"event": "ready"}\n{"ev')
        os.close(write)
        real, warm._process.stdout = warm._process.stdout, os.fdopen(read, "rb", buffering=0)
        try:
            events = warm.events(1)
        finally:
            warm._process.stdout.close()
            warm._process.stdout = real
    assert [(event.event, event.peer, event.code) for event in events] == [("exited", 4, -9), ("ready", -1, 0)]


def test_what_was_simulated_is_not_resumed(file):
    order = Order(file, rounds=1)
    folder = order.prepare(order.load(), simulated=True)
    with pytest.raises(LaunchError, match=r"was simulated, and cannot go on: .* p2pfl launch .*run\.yaml"):
        resume(folder, (), Console(file=io.StringIO()))


def test_resume_starts_those_peers_that_have_a_place_here(make_folder, fake_peers, monkeypatch):
    """As on one host of several, where others have the rest; also if others reach it by the address of its router."""
    folder = make_folder(peers=2, results={0: None, 1: None})
    apart = {"peers": 5, "transport": {"port": 5700, "hosts": {"0-4": "192.0.2.1"}}}
    folder.run_file.write_text(yaml.safe_dump(yaml.safe_load(folder.run_file.read_text()) | apart))
    for name, value in fake_peers(["finishes", "finishes", *["crashes"] * 3]).items():
        monkeypatch.setenv(name, value)
    _, summary = resume(folder, (), Console(file=io.StringIO()))
    assert [(peer.peer, peer.ended) for peer in summary.peers] == [(0, "finished"), (1, "finished")]
    with pytest.raises(LaunchError, match="has no peer 4; it has 0-1"):
        resume(folder, [4], Console(file=io.StringIO()))


@pytest.mark.parametrize("written", ['{"seconds": 1000.0}', '{"seconds": null}', "damaged"])
def test_the_time_of_a_resumed_run_is_that_of_all_its_parts(make_folder, fake_peers, monkeypatch, written):
    folder = make_folder(peers=2, results={0: {"seconds": {"total": 700.0}}, 1: {"phase": "stopped"}})
    folder.summary.write_text(written)
    for name, value in fake_peers(["waits", "finishes"]).items():
        monkeypatch.setenv(name, value)
    _, summary = resume(folder, [1], Console(file=io.StringIO()))
    assert summary.finished
    # Where the first part is not known, the slowest peer's own time tells what it was at least.
    least = 1000 if "1000" in written else 700
    assert least <= summary.seconds < least + 200
    assert json.loads(folder.summary.read_text())["seconds"] == summary.seconds
