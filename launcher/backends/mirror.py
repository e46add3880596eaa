"""The small files of peers on other hosts, written into the launcher's run folder for status, logs and reports."""

from __future__ import annotations

import base64
import json
import os
import re
import time
from collections.abc import Iterable, Mapping
from typing import Any

from launcher.errors import LaunchError
from p2pfl import PeerId
from p2pfl.run_folder.files import write_atomically, write_errors
from p2pfl.run_folder.folder import RunFolder

GROWING = ("peer.log", "metrics.jsonl", "chaos.jsonl", "output.log")
WHOLE = ("status.json", "result.json")
NAMES = re.compile(r"peers/(\d{2,9})/([a-z.]+)")


class Mirror:
    """Writes the events ``file`` of one host into ``folder``. Only files of ``peers`` are accepted."""

    def __init__(self, folder: RunFolder, peers: Iterable[PeerId]) -> None:
        self._folder = folder
        self._peers = frozenset(peers)

    def sizes(self) -> dict[str, int]:
        """Return the sizes of the files that grow, so that the host sends only what follows."""
        found = {}
        for peer in self._peers:
            root = self._folder.peer(peer).root
            for name in GROWING:
                if (root / name).is_file():
                    found[f"peers/{root.name}/{name}"] = (root / name).stat().st_size
        return found

    def write(self, event: Mapping[str, Any]) -> None:
        """Write what an event contains. Raises LaunchError for another file, WriteError."""
        match = NAMES.fullmatch(event["path"])
        if match is None or int(match[1]) not in self._peers or match[2] not in (*GROWING, *WHOLE):
            raise LaunchError(f"sent a file that belongs to none of its peers: {event['path']!r}")
        path = self._folder.peer(int(match[1])).root / match[2]
        with write_errors(path):
            if event["data"] is None:
                path.unlink(missing_ok=True)
                return
            if event.get("rotate"):
                path.replace(path.with_name(f"{path.name}.1"))
                path.touch()
                return
            data = base64.b64decode(event["data"])
            if path.name in GROWING:
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
                with os.fdopen(descriptor, "wb") as file:
                    file.truncate(event["at"])
                    file.seek(event["at"])
                    file.write(data)
                return
        write_atomically(path, _on_this_clock(data, event["clock"]) if path.name == "status.json" else data)


def _on_this_clock(status: bytes, clock: float) -> bytes:
    """Return a status whose ``since`` is a time of this host's monotonic clock. ``clock``: the other host's, now."""
    try:
        fields = json.loads(status)
        if fields.get("since"):
            fields["since"] += time.monotonic() - clock
    except (ValueError, TypeError, AttributeError):
        return status  # damaged, or overwritten during the read; the next status follows
    return (json.dumps(fields) + "\n").encode()
