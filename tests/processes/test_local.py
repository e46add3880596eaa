"""The local backend with fake peers: outcomes, restarts, Ctrl-C."""

from __future__ import annotations

import io
import json
import os
import signal
import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
from rich.console import Console

from launcher.backends.follow import (
    MAX_FAILURES,
    OUT_OF_MEMORY,
    PeerProcesses,
    Recoveries,
    Restart,
    RestartPolicy,
    follow,
    sigterm_notice,
)
from launcher.backends.group import Event
from launcher.backends.local import ThisHost
from launcher.errors import LaunchError
from launcher.facts.processes import find_process
from launcher.facts.registration import Requests
from launcher.facts.summary import summarize
from launcher.views.print_summary import failure_lines
from launcher.views.progress import LineProgress
from p2pfl.errors import AlreadyRunning, BodyTooLarge, WriteError
from p2pfl.run_folder.folder import RunFolder
from tests.launcher_fixtures import MakeFolder


def output(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


ROUNDS = 3


def follow_here(
    folder: RunFolder,
    environment: dict[str, str],
    console: Console,
    restart: Restart,
    host: type[ThisHost] = ThisHost,
) -> PeerProcesses:
    """Follow all peers of ``folder``, which a warm process with this environment forks, to the end."""
    with host(environment) as group:
        group.start()
        group._folder, group._plan, group._requests = folder, Mock(mps=False), Requests(folder.root)
        with group.following(console.print):
            return follow(folder, [files.peer for files in folder.peers()], ROUNDS, group, console, restart)


@pytest.fixture
def run_peers(make_folder: MakeFolder, fake_peers: Any) -> Callable[..., tuple[RunFolder, PeerProcesses, str]]:
    """Follow fake peers with these behaviors to the end. Return also what the launcher printed, without progress."""

    def run(
        *behaviors: str, meanwhile: Callable[[RunFolder], None] | None = None, restart: Restart = "never"
    ) -> tuple[RunFolder, PeerProcesses, str]:
        folder = make_folder(peers=len(behaviors), results=dict.fromkeys(range(len(behaviors))))
        console = Console(file=io.StringIO(), width=300)
        other = threading.Thread(target=meanwhile, args=(folder,)) if meanwhile else None
        if other:
            other.start()
        processes = follow_here(folder, fake_peers(behaviors), console, restart)
        if other:
            other.join()
        # The number of progress lines depends on the machine's load.
        lines = [line for line in output(console).splitlines(True) if not line.startswith("rounds ")]
        return folder, processes, "".join(lines)

    return run


def test_knows_the_exit_code_of_every_peer(run_peers: Any) -> None:
    folder, processes, _ = run_peers("finishes", "crashes", "exits with 3", "finishes")
    assert processes.exit_codes == {0: 0, 1: -signal.SIGSEGV, 2: 3, 3: 0}
    assert [line.partition(";")[0] for line in failure_lines(summarize(folder, processes.exit_codes))] == [
        "peer 1: killed by SIGSEGV", "peer 2: exit code 3"
    ]  # fmt: skip


@pytest.mark.parametrize("restart", ["never", "on-failure", "always"])
def test_restarts_crashed_peers(run_peers: Any, restart: Restart) -> None:
    folder, processes, printed = run_peers(
        "crashes, finishes", "exits with 3, exits with 3, finishes", restart=restart
    )
    if restart == "never":
        assert processes.exit_codes == {0: -signal.SIGSEGV, 1: 3}
        assert printed == ""
    else:
        assert processes.exit_codes == {0: 0, 1: 0}
        assert summarize(folder, processes.exit_codes).finished
        assert "peer 0: killed by SIGSEGV; restarting" in printed
        assert printed.count("peer 1: exit code 3; restarting") == 2


def test_does_not_restart_a_peer_without_progress_forever(run_peers: Any) -> None:
    _, processes, printed = run_peers("crashes", "finishes", restart="on-failure")
    assert processes.exit_codes == {0: -signal.SIGSEGV, 1: 0}
    assert printed.count("restarting") == MAX_FAILURES - 1


@pytest.mark.parametrize(("behavior", "hint"), [("crashes", ""), ("is killed", OUT_OF_MEMORY)])
def test_reports_a_peer_that_is_no_longer_restarted(run_peers: Any, behavior: str, hint: str) -> None:
    _, processes, printed = run_peers(behavior, restart="on-failure")
    ended = f"killed by {signal.Signals(-processes.exit_codes[0]).name}"
    reason = f"; not restarted: failed {MAX_FAILURES} times without completing a further round"
    assert printed.splitlines()[MAX_FAILURES - 1] == f"peer 0: {ended}{reason}{hint}"


@pytest.mark.parametrize("restart", ["never", "on-failure"])
def test_does_not_restart_a_peer_that_cannot_write(run_peers: Any, restart: Restart) -> None:
    _, processes, printed = run_peers("cannot write", "finishes", restart=restart)
    assert processes.exit_codes == {0: WriteError.exit_code, 1: 0}
    assert printed.splitlines()[0] == "peer 0: failed: metrics.jsonl: no room"
    assert "restarting" not in printed


def test_always_restarts_a_peer_that_cannot_write(run_peers: Any) -> None:
    _, processes, printed = run_peers("cannot write, finishes", restart="always")
    assert processes.exit_codes == {0: 0}
    assert printed.splitlines()[0] == "peer 0: failed: metrics.jsonl: no room; restarting"


def test_does_not_restart_a_peer_whose_message_is_too_large(run_peers: Any) -> None:
    folder, processes, printed = run_peers("sends too much", "finishes", restart="on-failure")
    assert processes.exit_codes == {0: BodyTooLarge.exit_code, 1: 0}
    assert "restart" not in printed
    assert folder.death_notice(0).exists()  # its neighbors continue


def test_a_peer_that_is_not_restarted_has_not_recovered(run_peers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recoveries, "new", lambda self: [(peer, 1) for peer in self._done])
    _, _, printed = run_peers("crashes", restart="on-failure")
    assert "without completing a further round" in printed.splitlines()[-1]


def test_restarts_a_peer_until_its_address_is_free(run_peers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.backends.follow.MAX_PAUSE", 0.1)
    behavior = ", ".join(["address in use"] * 2 * MAX_FAILURES + ["finishes"])
    _, processes, printed = run_peers(behavior, "finishes", restart="on-failure")
    assert processes.exit_codes == {0: 0, 1: 0}
    assert printed.count("restarting") == 2 * MAX_FAILURES


def test_does_not_restart_a_peer_forever_whose_address_is_in_use(
    run_peers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.backends.follow.IN_USE_FOR", 0.0)
    _, processes, printed = run_peers("address in use", restart="on-failure")
    assert processes.exit_codes == {0: os.EX_TEMPFAIL}
    assert f"not restarted: failed {MAX_FAILURES} times" in printed


def test_stop_ends_a_run_whose_peer_waits_for_its_address(
    run_peers: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = threading.Event()

    def pause(self: RestartPolicy, peer: int, code: int | None) -> float:
        assert (peer, code) == (0, os.EX_TEMPFAIL)
        waits.set()
        return 1000.0

    def interrupt(folder: RunFolder) -> None:
        waits.wait()
        until(lambda: folder.peer(1).status())
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(RestartPolicy, "pause", pause)
    _, processes, printed = run_peers("address in use", "waits", meanwhile=interrupt, restart="on-failure")
    assert processes.exit_codes == {0: os.EX_TEMPFAIL, 1: 0}
    assert printed.count("restarting") == 1


def test_follows_peers_although_the_output_cannot_be_written(make_folder: MakeFolder, fake_peers: Any) -> None:
    folder = make_folder(peers=2, results=dict.fromkeys(range(2)))
    with open("/dev/full", "w", buffering=1) as full:
        console = Console(file=full, width=80)
        processes = follow_here(folder, fake_peers(["crashes, finishes", "finishes"]), console, "on-failure")
        with pytest.raises(OSError, match="No space left"):
            console.print("at the end, the error is seen")
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, full.fileno())  # discards what is buffered
        os.close(null)
    assert processes.exit_codes == {0: 0, 1: 0}


def test_keeps_restarting_a_peer_that_makes_progress(run_peers: Any) -> None:
    behaviors = [
        *["crashes"] * (MAX_FAILURES - 1),
        "crashes in round 1",
        *["crashes"] * (MAX_FAILURES - 2),
        "finishes",
    ]
    _, processes, printed = run_peers(", ".join(behaviors), restart="on-failure")
    assert processes.exit_codes == {0: 0}
    assert printed.count("restarting") == len(behaviors) - 1


def injected(folder: RunFolder, peer: int, *restart: bool) -> None:
    lines = [json.dumps({"name": f"kill 0.{n}", "what": "kill", "restart": again}) for n, again in enumerate(restart)]
    folder.peer(peer).chaos.write_text("".join(f"{line}\n" for line in lines))


def test_restarts_peers_killed_by_chaos_unless_permanently(make_folder: MakeFolder) -> None:
    folder = make_folder(peers=2, results={})
    policy, always = RestartPolicy(folder, "on-failure"), RestartPolicy(folder, "always")
    for count in range(1, 3 * MAX_FAILURES):
        injected(folder, 0, *[True] * count)
        assert policy.restarts(0, -signal.SIGKILL)
    injected(folder, 1, True, False)
    assert not policy.restarts(1, -signal.SIGKILL)
    assert not always.restarts(1, -signal.SIGKILL)


def test_restarts_a_peer_that_crashes_although_an_earlier_launch_killed_it(make_folder: MakeFolder) -> None:
    folder = make_folder(peers=1, results={})
    injected(folder, 0, True, False)
    policy = RestartPolicy(folder, "on-failure")
    assert policy.restarts(0, -signal.SIGSEGV)
    assert policy.outcomes == {0: "killed by SIGSEGV"}


def test_does_not_restart_a_peer_that_another_process_runs(make_folder: MakeFolder) -> None:
    policy = RestartPolicy(make_folder(peers=1, results={0: None}), "always")
    assert not policy.restarts(0, os.EX_OSFILE, "already running")
    assert policy.reports == {0: "failed: already running"}


@pytest.mark.parametrize(("restart", "phase"), [("on-failure", "stopped"), ("always", "finished")])
def test_restarts_a_stopped_peer_only_if_always(run_peers: Any, restart: Restart, phase: str) -> None:
    folder, _, _ = run_peers("stops, finishes", restart=restart)
    result = folder.peer(0).result()
    assert result is not None
    assert result.phase == phase


def test_follows_peers_that_outlive_the_warm_process(run_peers: Any) -> None:
    folder, processes, _ = run_peers("outlives the warm process", "outlives the warm process")
    assert processes.exit_codes == {}
    assert summarize(folder, processes.exit_codes).finished


def warm_process() -> psutil.Process:
    (warm,) = (child for child in psutil.Process().children() if "--warm" in child.cmdline())
    return warm


@pytest.mark.parametrize("dies", ["before", "after"])
def test_restarts_a_peer_after_the_death_of_the_warm_process(run_peers: Any, until: Any, dies: str) -> None:
    pids: list[set[int]] = []

    def meanwhile(folder: RunFolder) -> None:
        def running() -> set[int]:
            return {status.pid for files in folder.peers() if (status := files.status())}

        pids.append(until(lambda: len(running()) == 2 and running()))
        peer = folder.peer(1).status()
        assert peer is not None
        warm = warm_process()
        warm.suspend()  # otherwise it might start the peer again before its own death
        for process in (psutil.Process(peer.pid), warm) if dies == "before" else (warm, psutil.Process(peer.pid)):
            process.kill()
        pids.append(until(lambda: (status := folder.peer(1).status()) and status.pid != peer.pid and running()))
        for pid in running():
            os.kill(pid, signal.SIGTERM)

    folder, processes, printed = run_peers("waits", "waits", meanwhile=meanwhile, restart="on-failure")
    assert len(pids[0] & pids[1]) == 1
    assert processes.exit_codes == {1: 0}
    assert summarize(folder, processes.exit_codes).peers[0].ended == "stopped"
    lines = printed.splitlines()
    assert "the warm process, which forks peers, was killed by SIGKILL; the peers keep running" in lines
    assert any(line.startswith("peer 1: ") and line.endswith("; restarting") for line in lines)
    assert lines.count("starting another warm process") == 1


def test_follows_a_peer_that_another_process_runs(
    make_folder: MakeFolder, make_process: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warm process has died between the fork and its report, or a peer found that it was running already."""
    folder = make_folder(peers=2, results=dict.fromkeys(range(2)))
    running = [make_process(folder, peer) for peer in range(2)]
    group = ThisHost()
    group._folder, group._process = folder, Mock()
    group.fork([0, 1])
    group._exited = True
    exited = Event("exited", 1, code=AlreadyRunning.exit_code, error="already running")
    monkeypatch.setattr(group, "_messages", lambda timeout: [exited])
    processes = PeerProcesses(group)
    processes.expect([0, 1])
    assert processes.update(group.events(0.0)) == []
    assert (processes.running, processes.exit_codes, processes.errors) == ({0, 1}, {}, {})
    processes.stop(kill=True)
    assert [process.wait(200) for process in running] == [-signal.SIGKILL] * 2


@pytest.fixture
def interruptible(until: Any) -> Callable[[], None]:
    """Wait until the launcher handles Ctrl-C; before, it would end the tests."""
    before = signal.getsignal(signal.SIGINT)
    return lambda: until(lambda: signal.getsignal(signal.SIGINT) != before)


def test_ctrl_c_stops_and_a_second_ctrl_c_kills(run_peers: Any, until: Any, interruptible: Any) -> None:
    def press_twice(folder: RunFolder) -> None:
        interruptible()
        until(lambda: all(files.status() for files in folder.peers()))
        os.kill(os.getpid(), signal.SIGINT)
        until(lambda: folder.peer(0).result() and find_process(folder, 0) is None)
        os.kill(os.getpid(), signal.SIGINT)

    folder, processes, printed = run_peers("waits", "stubborn", meanwhile=press_twice)
    assert processes.exit_codes == {0: 0, 1: -signal.SIGKILL}
    assert [line.partition(";")[0] for line in failure_lines(summarize(folder, processes.exit_codes))] == [
        "peer 0: stopped", "peer 1: killed by SIGKILL"
    ]  # fmt: skip
    assert "stopping: " in printed
    assert "killing" in printed


def test_sigterm_prints_that_the_peers_keep_running(make_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, out = make_folder(peers=1), io.StringIO()
    killed: list[Any] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append((pid, number, signal.getsignal(number))))
    with sigterm_notice(folder, LineProgress(Console(file=out))):
        signal.raise_signal(signal.SIGTERM)
    assert killed == [(os.getpid(), signal.SIGTERM, signal.SIG_DFL)]
    assert f"the peers keep running: stop them with `p2pfl stop {folder.root}`" in out.getvalue().replace("\n", " ")


def test_ctrl_c_before_any_peer_started_kills_the_warm_process(
    make_folder: MakeFolder, fake_peers: Any, interruptible: Any
) -> None:
    folder = make_folder(peers=1, results={0: None})

    def press() -> None:
        interruptible()
        os.kill(os.getpid(), signal.SIGINT)

    started: list[Any] = []

    class Suspended(ThisHost):
        def start(self) -> None:
            super().start()
            assert self._process is not None
            os.kill(self._process.pid, signal.SIGSTOP)  # like a real one that is still importing
            started.append(self._process)

    other = threading.Thread(target=press)
    other.start()
    processes = follow_here(folder, fake_peers(["waits"]), Console(file=io.StringIO()), "on-failure", Suspended)
    other.join()
    assert processes.started == set()
    assert [process.returncode for process in started] == [-signal.SIGKILL]
    assert failure_lines(summarize(folder, processes.exit_codes)) == ["peer 0: never started"]


def test_reports_the_output_of_a_dead_warm_process(make_folder: MakeFolder, fake_peers: Any) -> None:
    folder = make_folder(peers=1, results={0: None})
    with pytest.raises(LaunchError, match="no torch here"):
        follow_here(folder, fake_peers("dies at once"), Console(file=io.StringIO()), "on-failure")
    assert (folder.root / "warm.log").read_text() == "no torch here\n"


def test_kills_an_unused_warm_process(fake_peers: Any) -> None:
    host = ThisHost(fake_peers(["waits"]))
    host.__enter__()
    host.start()
    host.__exit__(KeyboardInterrupt)
    assert host._process is not None
    assert host._process.returncode == -signal.SIGKILL
