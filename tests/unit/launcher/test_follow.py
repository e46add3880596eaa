"""What the launcher knows of the peers that it follows."""

from __future__ import annotations

import os

from launcher.backends.follow import MAX_FAILURES, PeerProcesses, Recoveries, RestartPolicy
from launcher.backends.group import Event
from launcher.backends.local import ThisHost
from p2pfl.run_folder.folder import Status
from tests.launcher_fixtures import MakeFolder


def started(peer: int) -> Event:
    return Event("started", peer, os.getpid())


def following(peers: list[int]) -> PeerProcesses:
    processes = PeerProcesses(ThisHost())
    processes.expect(peers)
    return processes


def test_the_status_of_an_earlier_process_is_stale_until_the_new_one_has_written() -> None:
    processes = following([0])
    mine, earlier = Status(0, os.getpid(), "stopped"), Status(0, 1, "stopped")
    assert processes.is_stale(mine)  # nothing has started yet
    processes.update([started(0)])
    assert processes.is_stale(earlier)
    assert not processes.is_stale(mine)
    assert not processes.is_stale(Status(1, 1, "training"))  # this launcher does not start it


def test_a_restarted_peer_starts_anew() -> None:
    processes = following([0])
    processes.update([started(0)])
    processes.expect([0])
    assert processes.is_stale(Status(0, os.getpid(), "training"))
    processes.update([started(0)])
    assert not processes.is_stale(Status(0, os.getpid(), "training"))


def test_restart_always_has_no_limit(make_folder: MakeFolder) -> None:
    folder = make_folder(peers=1, results={0: None})
    always, on_failure = RestartPolicy(folder, "always"), RestartPolicy(folder, "on-failure")
    assert all(always.restarts(0, -9) for _ in range(3 * MAX_FAILURES))
    assert [on_failure.restarts(0, -9) for _ in range(MAX_FAILURES)] == [True] * (MAX_FAILURES - 1) + [False]


def test_a_peer_has_recovered_when_it_has_completed_a_round_since(make_folder: MakeFolder) -> None:
    folder, processes = make_folder(peers=2), following([0, 1])
    recoveries = Recoveries(folder, processes)
    processes.update([started(0), started(1)])
    recoveries.expect([1])
    for phase, done, expected in (
        ("starting", 7, []),
        ("training", 4, []),  # its checkpoint is older
        ("waiting", 4, []),
        ("training", 5, [(1, 4)]),
        ("training", 6, []),
    ):
        folder.peer(1).write_status(Status(1, os.getpid(), phase, done, done))  # type: ignore[arg-type]
        assert recoveries.new() == expected
