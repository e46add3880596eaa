"""A finished peer waits until its neighbors have its messages in a checkpoint. SIGTERM ends the wait."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest

from p2pfl.simulation.simulate import simulate

PRELUDE = """
import time
from p2pfl.session import checkpoint

save = checkpoint.save

def save_later(path, state):
    while (path.parent / "hold").exists():
        time.sleep(0.005)
    save(path, state)

checkpoint.save = save_later
"""
"""Peers whose folder has a file ``hold`` do not save their checkpoint until it is removed."""

ENDLESS = 1_000_000


@dataclass
class Stopped:
    """Peer 0 has finished and was stopped by SIGTERM, while peer 1 runs and does not save its checkpoint."""

    run: Any
    folder: Any
    result: Any
    pids: dict[int, int]
    """Of peer 1."""

    def check(self) -> None:
        expected = [result.digest for result in simulate(self.run)]
        assert [files.result().digest for files in self.folder.peers()] == expected


@pytest.fixture
def stopped(make_run: Any, prepare: Any, altered_warm: Any, until: Any, tmp_path: Any) -> Stopped:
    run = make_run(peers=2, checkpoint_every=ENDLESS, transport={"deadline": ENDLESS, "give_up": ENDLESS})
    folder = prepare(tmp_path / "run", run)
    (folder.peer(1).root / "hold").touch()
    pids = altered_warm.start(folder)
    result = until(folder.peer(0).result)
    os.kill(pids[0], signal.SIGTERM)
    with suppress(ProcessLookupError):  # it has ended already
        os.kill(pids[0], signal.SIGTERM)
    assert altered_warm.wait({0: pids.pop(0)}) == {0: 0}
    return Stopped(run, folder, result, pids)


def test_sigterm_ends_the_wait_of_a_finished_peer_for_its_neighbors(stopped: Stopped, altered_warm: Any) -> None:
    """Its neighbor, which dies without a checkpoint, gets the messages of all rounds when both are started again."""
    folder = stopped.folder
    assert (stopped.result.phase, folder.peer(0).status().phase) == ("finished", "finished")
    assert folder.peer(0).result() == stopped.result
    assert "stopped before all neighbors had the last messages" in folder.peer(0).log.read_text()
    assert (folder.addresses / "00").exists()  # so neighbors wait for it

    os.kill(stopped.pids[1], signal.SIGKILL)
    assert altered_warm.wait(stopped.pids) == {1: -signal.SIGKILL}
    (folder.peer(1).root / "hold").unlink()
    assert altered_warm.run(folder) == {0: 0, 1: 0}
    stopped.check()
    assert folder.peer(1).result().missing == 0
    assert not list(folder.addresses.iterdir())


def test_a_stopped_finished_peer_lets_its_neighbor_finish_when_it_is_started_again(
    stopped: Stopped, altered_warm: Any, until: Any
) -> None:
    """Its neighbor, which keeps running, needs nothing more than the end of the edge."""
    (stopped.folder.peer(1).root / "hold").unlink()
    until(stopped.folder.peer(1).result)
    stopped.pids.update(altered_warm.start(stopped.folder, [0]))
    assert altered_warm.wait(stopped.pids) == {0: 0, 1: 0}
    stopped.check()
