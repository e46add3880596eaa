"""p2pfl show and p2pfl status."""

from __future__ import annotations

import io
import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import psutil
import pytest
from rich.console import Console

from launcher.facts.host_state import HostState
from launcher.facts.status import Hold, PeerLine, RunStatus, holds
from launcher.views.status import render
from p2pfl.run_folder.folder import Origin, Status
from tests.launcher_fixtures import Invoke, MakeFolder

LINE = PeerLine(0, True, "training", 3, 3, None, [], 12.0, 0, 0, None, 0, 0)


def lines(waits: Mapping[int, tuple[int, ...]], rounds: Mapping[int, int] | None = None) -> list[PeerLine]:
    """Peers in round 3, or in those of ``rounds``; peers without an entry in ``waits`` train."""
    return [
        replace(
            LINE,
            peer=peer,
            state="waiting" if peer in waits else "training",
            waiting_for=list(waits.get(peer, ())),
            t=(rounds or {}).get(peer, 3),
        )
        for peer in range(5)
    ]


def test_the_peer_that_computes_holds_up_those_that_wait_for_it_through_others() -> None:
    found = holds(lines({0: (1,), 1: (2,), 3: (2,)}))
    assert found == [Hold(2, [(2, 1), (2, 3)], [0, 1, 3], "training in round 3 for 0:12")]


def test_whoever_holds_up_most_peers_comes_first() -> None:
    found = holds(lines({0: (4,), 1: (3, 4), 2: (3,)}, {}))
    assert [(hold.source, hold.peers) for hold in found] == [(3, [1, 2]), (4, [0, 1])]
    found = holds(lines({0: (4,), 1: (4,), 2: (3,)}))
    assert [(hold.source, hold.peers) for hold in found] == [(4, [0, 1]), (3, [2])]


def test_a_message_of_a_peer_that_is_ahead_is_on_its_way() -> None:
    found = holds(lines({0: (1,), 1: (2,)}, {1: 4}))
    assert [(hold.source, hold.peers) for hold in found] == [(1, [0]), (2, [1])]
    ahead = found[0]
    assert ahead.edges == [(1, 0)]
    assert ahead.why == "already in round 4: its message is on its way, or the connection is lost"


def test_peers_that_wait_for_each_other_are_named() -> None:
    found = holds(lines({0: (1,), 1: (0,), 2: (0,)}))
    assert {edge for hold in found for edge in hold.edges} >= {(0, 1), (1, 0)}
    assert all(hold.why.startswith("they wait for each other") for hold in found)


def test_following_the_waits_ends_in_a_ring_of_them() -> None:
    found = holds(lines({peer: ((peer + 1) % 5,) for peer in range(5)}))
    assert {peer for hold in found for peer in hold.peers} == set(range(5))


def test_shows_how_a_peer_ended_and_who_waits_for_it(
    make_folder: MakeFolder, invoke: Invoke, make_process: Callable[..., subprocess.Popen[bytes]]
) -> None:
    folder = make_folder(peers=4, results={1: None, 2: {"phase": "failed", "error": "no \x1b[2Jroom"}, 3: None})
    process = make_process(folder, 3)
    since = time.monotonic() - 75.0
    folder.peer(3).write_status(
        Status(3, process.pid, "waiting", 2, 2, [2], 0.5, 1500, 2500, since=since, unread=4, undelivered=5)
    )
    outcome = invoke("status", folder.root)
    assert outcome.exit_code == 0
    head, _, zero, one, two, three, *rest = outcome.stdout.splitlines()
    alive, _, _, states = head.split(" | ")
    assert alive == "toy: 1 of 4 peers alive"
    assert states == "1 finished, 1 never started, 1 failed, 1 waiting"
    assert zero.split()[:4] == ["0", "finished", "2", "3/3"]
    assert one.split()[:4] == ["1", "never", "started", "0"]
    assert two.split()[:2] == ["2", "failed"]
    assert three.split()[:10] == ["3", "waiting", "2", "2/3", "50.0", "2", three.split()[6], "1.5", "kB", "2.5"]
    assert three.split()[6] in {f"1:{seconds}" for seconds in range(15, 60)}  # more on a busy machine
    assert three.split("MB  ")[-1].strip() == "4 in, 5 out"
    assert rest == [
        r"peer 2 (failed: no \x1b[2Jroom) holds up peer 3: edge 2 → 3",
        r"peer 2: failed: no \x1b[2Jroom",
    ]


def run_status(peers: list[PeerLine]) -> RunStatus:
    return RunStatus("runs/toy", "toy", 9, len(peers), peers, holds(peers))


def shown(status: RunStatus, width: int = 100, height: int | None = None) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as capture:
        console.print(render(status, height))
    return capture.get().splitlines()


def test_if_all_peers_wait_and_nothing_is_queued_an_await_may_be_missing() -> None:
    stuck = lines({peer: ((peer + 1) % 5,) for peer in range(5)})

    def asks(peers: list[PeerLine]) -> bool:
        return any(line.startswith("all peers wait, with nothing to send; ") for line in shown(run_status(peers)))

    assert asks(stuck)
    assert not asks([*stuck[:4], replace(stuck[4], undelivered=1)])
    assert not asks([*stuck[:4], replace(stuck[4], seconds=1.0)])
    assert not asks(stuck[:4]), "peer 4 may be training on another host"
    assert not asks(lines({0: (1,), 1: (0,)}))


def test_peers_that_were_the_last_for_a_moment_share_a_line() -> None:
    waits = {0: (1, 3), 2: (3, 4)}
    peers = [replace(line, seconds=0.5 if line.peer != 3 else 12.0) for line in lines(waits)]
    assert shown(run_status(peers))[-2:] == [
        "peer 3 (training in round 3 for 0:12) holds up peers 0 2: edge 3 → 0, 3 → 2",
        "peers 1 4 hold up others, for less than 2 s",
    ]


def test_a_low_screen_shows_the_peers_that_failed_hold_up_others_or_are_behind() -> None:
    peers = [replace(LINE, peer=peer, rounds_done=9 - (peer == 17), t=4) for peer in range(100)]
    peers[40] = replace(peers[40], alive=False, state="failed: no room")
    peers[60] = replace(peers[60], state="waiting", waiting_for=[70])
    text = shown(run_status(peers), height=9)
    assert len(text) <= 9
    assert [line.split()[0] for line in text[2:-3]] == ["17", "40", "70"]
    assert text[-3] == "… and 97 more peers that are further ahead"
    assert len(shown(run_status(peers), height=200)) == 104
    assert len(shown(run_status(peers))) == 104


def test_says_what_was_skipped_because_it_had_diverged(make_folder: MakeFolder) -> None:
    folder = make_folder(peers=3)
    for peer in (0, 2):
        status = folder.peer(peer).status()
        assert status is not None
        folder.peer(peer).write_status(replace(status, skipped={"trainings": 2}))
    assert shown(RunStatus.take(folder))[-1] == "trainings rolled back because values had diverged: 4, at peers 0 2"


def test_empty_columns_are_shown_in_a_live_view_only() -> None:
    status = run_status([replace(LINE, waiting_for=[], memory=None)])
    assert "waits for" not in shown(status)[1]
    assert "sent" in shown(status)[1]
    assert "waits for" in shown(status, height=20)[1]
    assert "queues" in shown(run_status([replace(LINE, unread=2)]))[1]


@pytest.mark.parametrize("width", [40, 80])
def test_no_line_wraps_on_a_narrow_screen(width: int) -> None:
    peers = [replace(line, peer=k) for k, line in enumerate(8 * lines({0: (1, 2, 3), 4: (1,)}))]
    assert len(shown(run_status(peers), width, height=12)) <= 12


def test_status_as_json_names_its_fields(make_folder: MakeFolder, invoke: Invoke) -> None:
    found = json.loads(invoke("status", make_folder().root, "--json").stdout)
    assert (found["name"], found["rounds"], found["alive"], found["holds"]) == ("toy", 3, 0, [])
    assert found["peers"][1]["alive"] is False
    assert found["peers"][1]["state"] == "finished"


def test_watching_an_ended_run_prints_it_once(make_folder: MakeFolder, invoke: Invoke) -> None:
    folder = make_folder()
    assert invoke("status", folder.root, "--watch").stdout == invoke("status", folder.root).stdout
    assert len(invoke("status", folder.root, "--watch", "--json").stdout.splitlines()) == 1


def test_peers_of_a_starting_launcher_are_starting(
    make_folder: MakeFolder, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(results={0: None, 1: None})
    monkeypatch.setattr("launcher.facts.status.find_launcher", lambda folder: psutil.Process())
    found = json.loads(invoke("status", folder.root, "--json").stdout)
    assert [peer["state"] for peer in found["peers"]] == ["starting", "starting"]


def test_peers_of_a_collection_may_live_elsewhere(make_folder: MakeFolder, invoke: Invoke) -> None:
    folder = make_folder(results={0: None})
    folder.peer(0).write_status(Status(0, os.getpid(), "training", 1, 1))
    folder.peer(0).write_origin(Origin("host:/run", "2026-11-21T09:30:00+00:00"))
    found = json.loads(invoke("status", folder.root, "--json").stdout)
    assert found["peers"][0]["alive"] is None
    assert found["peers"][0]["state"] == "unfinished: had not ended when collected"


def test_a_suspended_peer_is_called_so(
    make_folder: MakeFolder, invoke: Invoke, make_process: Callable[..., subprocess.Popen[bytes]]
) -> None:
    folder = make_folder(results={0: None, 1: None})
    process = make_process(folder, 0)
    process.send_signal(19)
    assert os.waitid(os.P_PID, process.pid, os.WSTOPPED) is not None
    found = json.loads(invoke("status", folder.root, "--json").stdout)
    assert found["peers"][0]["state"] == "suspended"
    process.send_signal(18)


def test_a_peer_that_was_suspended_while_it_waited_holds_up_the_one_that_it_waited_for(
    make_folder: MakeFolder, invoke: Invoke, make_process: Callable[..., subprocess.Popen[bytes]]
) -> None:
    folder = make_folder(results={0: None, 1: None})
    processes = [make_process(folder, peer) for peer in range(2)]
    for peer, process in enumerate(processes):
        folder.peer(peer).write_status(Status(peer, process.pid, "waiting", 3, 3, [1 - peer], 0.5))
    processes[1].send_signal(19)
    assert os.waitid(os.P_PID, processes[1].pid, os.WSTOPPED) is not None
    (hold,) = json.loads(invoke("status", folder.root, "--json").stdout)["holds"]
    assert (hold["source"], hold["peers"], hold["why"]) == (1, [0], "suspended in round 3")
    processes[1].send_signal(18)


# ---- show


def test_shows_a_finished_run_whoever_started_its_peers(make_folder: MakeFolder, invoke: Invoke) -> None:
    folder = make_folder(results={0: {"accuracy": 0.75}})
    outcome = invoke("show", folder.root)
    assert outcome.exit_code == 0
    assert "accuracy: 75.0 ± 0.0 %" in outcome.stdout
    assert "total time" not in outcome.stdout
    assert not folder.summary.exists()
    folder.summary.write_text('{"seconds": 75.0}')
    assert "total time: 1:15" in invoke("show", folder.root).stdout
    folder.summary.write_text("damaged")
    assert invoke("show", folder.root).exit_code == 0


def test_shows_which_peers_of_an_unfinished_run_still_run(
    make_folder: MakeFolder, invoke: Invoke, make_process: Callable[..., subprocess.Popen[bytes]]
) -> None:
    folder = make_folder(peers=3, results={1: None, 2: None})
    make_process(folder, 1)
    folder.peer(2).write_status(Status(2, 2**22 + 1, "training", 1, 1))
    outcome = invoke("show", folder.root)
    assert outcome.exit_code == 1
    assert outcome.stderr.splitlines() == ["peer 1: running", f"peer 2: died; see {folder.peer(2).log}"]
    found = json.loads(invoke("show", folder.root, "--json").stdout)
    assert [peer["ended"] for peer in found["peers"]] == ["finished", "running", "died"]


def test_peers_that_run_on_hosts_without_a_launcher_are_alive(make_folder: MakeFolder) -> None:
    folder = make_folder(peers=2, results=dict.fromkeys(range(2)))
    for files in folder.peers():
        files.write_status(Status(files.peer, 1, "training"))
    HostState(0, {0: "alpha", 1: "beta"}).write(folder.root)
    found = RunStatus.take(folder)
    assert found.alive == 2
    assert [peer.state for peer in found.peers] == ["running on host alpha", "running on host beta"]
