"""The process of one tracker: `python -m launcher.tracking RUN ENTRY`, with an entry of ``track`` as JSON.

End of file on its stdin says that the launcher has ended, and then it ends with the last peer. Its output is in
RUN/tracking/NAME.log.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from launcher.facts.logs import has_ended
from launcher.formatting.flat import flatten
from launcher.tracking.follow import Means
from launcher.tracking.processes import TRACKED
from launcher.tracking.tracker import Tracked, Tracker
from p2pfl import PeerId
from p2pfl.attackers import attacks
from p2pfl.errors import P2pflError
from p2pfl.file_locks import lock
from p2pfl.installed import TRACKERS, load
from p2pfl.process_title import set_title
from p2pfl.run_folder.files import read_json, write_json
from p2pfl.run_folder.folder import RunFolder
from p2pfl.run_folder.records import RecordFile
from p2pfl.terminal import encode_as_utf8, printable

POLL_INTERVAL = 2.0
"""Seconds between two looks at the records."""
NICE = 10
"""Peers come first."""


def main(root: Path, entry: Mapping[str, Any]) -> None:
    """Pass the records of a run on until it ends."""
    folder = RunFolder.open(root)
    run = folder.settings
    set_title(f"p2pfl tracker {entry['name']} {folder.root}")
    os.nice(NICE)
    peers = [files.peer for files in folder.peers()]

    path = folder.root / "tracking" / f"{entry['name']}.lock"
    path.parent.mkdir(exist_ok=True)
    held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)  # held until this process ends
    if not lock(held, path):
        sys.exit(TRACKED)  # by the launcher that `p2pfl join` has not replaced, or by `p2pfl track`

    def ended() -> bool:
        """Wait for an interval or for the launcher's end; then return whether nothing else is to be expected."""
        if select.select([0], [], [], POLL_INTERVAL)[0]:  # end of file: nothing is ever written to it
            if none_runs(folder, peers):
                return True
            time.sleep(POLL_INTERVAL)  # the launcher has died, and peers run on
        return False

    track(folder, run, entry, load(TRACKERS, entry["name"]), ended)


def none_runs(folder: RunFolder, peers: Iterable[PeerId]) -> bool:
    """Return whether nothing is to be expected of ``peers``, once the launcher starts no more."""
    files = [folder.peer(peer) for peer in peers]
    return all(one.status() is None or has_ended(folder, one) for one in files)


def track(
    folder: RunFolder,
    run: Mapping[str, Any],
    entry: Mapping[str, Any],
    tracker: type[Tracker],
    ended: Callable[[], bool],
) -> None:
    """Pass records on until ``ended``, which waits between two looks.

    Args:
        run: the settings of the run.
        entry: of ``track``.
    """
    path = folder.root / "tracking" / f"{entry['name']}.json"
    state = read_json(path) or {}
    tracked = Tracked(folder.root, folder.info["id"], entry.get("project") or run["name"], dict(flatten(run)), state)
    logged: dict[str, int] = state.setdefault("last", {})
    """The last round of each stream: a resumed peer records rounds again."""
    files = {peers.peer: RecordFile(peers.metrics) for peers in folder.peers()}
    attackers = attacks(run)
    means = Means(len(files.keys() - attackers.keys()))
    to: Tracker | None = None

    def write(stream: str, t: int, values: Mapping[str, float]) -> None:
        nonlocal to
        if t <= logged.get(stream, -1):
            return
        to = to or tracker(tracked)
        if entry.get("pooled"):
            to.write("all", t, {f"{name}/{stream}": value for name, value in values.items()})
        else:
            to.write(stream, t, values)
        logged[stream] = t

    last = False
    while not last:
        last = ended()  # and look once more
        for peer, file in files.items():
            for record in file.read():
                values = record.scalars()
                write(f"peer-{peer:02d}", record.t, values)
                if peer not in attackers:
                    means.add(peer, record.t, values)
        stopped = last and any(
            status is not None and status.phase == "stopped" for status in (f.status() for f in folder.peers())
        )
        for t, values in means.complete(end=last and not stopped):  # a resumed run completes its last rounds
            write("mean", t, values)
        if to is not None:
            to.flush()
            write_json(path, state)
    if to is not None:
        statuses = [files.status() for files in folder.peers()]
        to.close(all(status is not None and status.phase == "finished" for status in statuses))
        write_json(path, state)


if __name__ == "__main__":
    encode_as_utf8()
    try:
        main(Path(sys.argv[1]), json.loads(sys.argv[2]))
    except P2pflError as error:
        sys.exit(printable(" ".join(str(error).split())))
    except Exception as error:
        import traceback

        traceback.print_exc()
        text = " ".join(str(error).split()) or "no reason given"
        print(
            printable(f"{type(error).__name__}: {text}"), file=sys.stderr
        )  # the last line, which the launcher shows
        sys.exit(1)
