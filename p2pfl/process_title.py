"""The titles of processes, by which other commands find them."""

from __future__ import annotations

from pathlib import Path

from setproctitle import getproctitle, setproctitle, setthreadtitle

getproctitle()  # finds the memory of the title, which it cannot once variables of the environment have changed


def set_title(title: str) -> None:
    """Set what ``ps`` shows as the command line of this process, e.g. ``p2pfl peer 3 /runs/mesh``.

    Its short name becomes ``p2pfl-peer``: with spaces in it, Slurm's proctrack/linuxproc cannot parse
    ``/proc/PID/stat``, does not find the process, and drains the node because it cannot end the job.
    """
    setproctitle(_encodable(title))
    setthreadtitle("-".join(title.split(" ")[:2]))


def has_title(command_line: str, title: str) -> bool:
    """Return whether a process has this title, which ends with a path.

    A long title is cut off within the path: a process has room for its first arguments, and for its environment if
    that was not changed before.
    """
    found = command_line.rstrip("\0 ")
    shown = _encodable(title)
    if found == shown:
        return True
    path = title[: len(found)].partition(" /")[2]
    return bool(path) and shown.startswith(found) and not Path("/", path, "run.yaml").exists()  # that is another run


def _encodable(title: str) -> str:
    """Return a title with ``?`` for surrogates, by which Python represents bytes of a path that are not UTF-8."""
    return title.encode(errors="replace").decode()
