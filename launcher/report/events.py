"""Faults, warnings and restarts of a run, from the peers' logs."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from launcher.facts.logs import open_logs, read_all
from p2pfl.errors import RunFolderError
from p2pfl.run_folder.folder import RunFolder

SHOWN = re.compile(r"^\S+ +(WARNING|ERROR|CRITICAL) |^\S+ +INFO +(resumed|stopped|neighbor declared dead|fault) ")
MAX_EVENTS = 300
"""Events that a page lists: the first ones; those that several peers log alike count once."""
LONGEST = 240
"""Characters of an event."""


@dataclass
class Events:
    """Attributes:
    shown: the first events, each with ``at``, ``peers``, ``level`` and ``text``; equal ones of several peers
        are one, with the time of the first.
    count: number of all events.
    """

    shown: list[dict[str, Any]] = field(default_factory=list)
    count: int = 0


def read(folder: RunFolder) -> Events:
    """Read the logs of all peers, merged by time; without any, there are no events."""
    events = Events()
    equal: dict[tuple[str, str], dict[str, Any]] = {}
    with suppress(RunFolderError):  # no peer has started yet
        entries = read_all(open_logs(folder, ()), lambda text: True)
        for entry in entries:
            found = SHOWN.match(entry.text)
            if found is None:
                continue
            events.count += 1
            at, level, text = (*entry.text.split("\n")[0].split(None, 2), "", "")[:3]
            shortened = text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
            same = equal.get((level, shortened))
            if same is not None and entry.peer not in same["peers"]:
                same["peers"].append(entry.peer)
            elif len(events.shown) < MAX_EVENTS:
                event = equal[level, shortened] = {"at": at, "peers": [entry.peer], "level": level, "text": shortened}
                events.shown.append(event)
    return events
