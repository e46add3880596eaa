"""`p2pfl collect` killed at any point."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from launcher.facts.processes import find_process
from p2pfl.run_folder.folder import RunFolder
from tests.launcher_fixtures import Host, gather, hosts_by_peer

CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir"}


def killed_at(change: int, do: Callable[[], object]) -> bool:
    """Run ``do`` in a child process that is killed before that change to a folder. Return whether it got there."""
    child = os.fork()
    if child == 0:
        remaining = change

        def before(event: str, arguments: object) -> None:
            nonlocal remaining
            if event in CHANGES:
                remaining -= 1
                if remaining < 0:
                    os._exit(9)

        try:
            sys.addaudithook(before)
            do()
            os._exit(0)
        finally:
            os._exit(1)  # or pytest would run twice
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9)
    return code == 9


def test_an_update_killed_at_any_point_loses_nothing(host: Host, into: Path) -> None:
    old, new, other = host("old", 0, 1, rounds=1), host("new", 0, 1), host("other", 2)
    gather(into, old.root)
    for change in count():
        shutil.copytree(into, copy := into.with_name(f"copy{change}"))
        if not killed_at(change, partial(gather, copy, new.root)):
            break
        found = hosts_by_peer(RunFolder.open(copy))
        assert len(found) >= 1  # the other may be about to be replaced
        assert found.items() <= {(peer, name) for peer in (0, 1) for name in ("old", "new")}
        folder, _ = gather(copy, other.root)
        assert {peer: name in ("old", "new") for peer, name in hosts_by_peer(folder).items() if peer < 2} == {
            0: True,
            1: True,
        }
        assert hosts_by_peer(folder)[2] == "other"
        assert sorted(path.name for path in copy.iterdir()) == ["peers", "run.json", "run.yaml", "summary.json"]
        assert sorted(path.name for path in (copy / "peers").iterdir()) == ["00", "01", "02", "03"]
    assert change > 20
    assert hosts_by_peer(RunFolder.open(copy)) == {0: "new", 1: "new"}


def test_a_first_collection_killed_at_any_point_can_be_repeated(host: Host, into: Path) -> None:
    one = host("one", 0, 1)
    for change in count():
        copy = into.with_name(f"copy{change}")
        if not killed_at(change, partial(gather, copy, one.root)):
            break
        assert hosts_by_peer(gather(copy, one.root)[0]) == {0: "one", 1: "one"}
    assert change > 10


def test_a_collected_process_id_matches_no_local_process(host: Host, into: Path, make_process: Any) -> None:
    collection, _ = gather(into, host("one", 0, phase="training", rounds=1).root)
    process = make_process(collection, 0)  # with the title of a peer of this very folder
    assert find_process(collection, 0) is None
    process.kill()
