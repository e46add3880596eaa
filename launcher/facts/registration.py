"""How other commands find the launcher of a run, and what they ask it to do.

A launcher has the run folder in its process title, and its process id is in ``run.json``. Requests are lines of the
file ``.request`` in the run folder, which the launcher reads again and again: a signal would not tell a request from
Ctrl-C or the end of a session, and reaches no launcher on another host.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Literal

import psutil

from p2pfl import PeerId
from p2pfl.errors import WriteError
from p2pfl.process_title import has_title, set_title
from p2pfl.run_folder.files import write_errors
from p2pfl.run_folder.folder import RunFolder

REQUESTS = ".request"

Request = Literal["answer", "stop", "kill"]


def launcher_title(root: Path) -> str:
    """Return the process title of the launcher of a run."""
    return f"p2pfl launch {root}"


def peer_title(folder: RunFolder, peer: PeerId) -> str:
    """Return the process title of a peer, as shown by ps and htop."""
    return f"p2pfl peer {peer} {folder.root}"


def simulation_title(folder: RunFolder) -> str:
    """Return the process title of ``p2pfl simulate``."""
    return f"p2pfl simulate {folder.root}"


def process_with(pid: int, titles: Iterable[str]) -> psutil.Process | None:
    """Return the process with this id if it has one of these titles: ids are used again."""
    with suppress(psutil.Error, TypeError, ValueError, OverflowError):  # no such process, or a damaged file
        process = psutil.Process(pid)
        found = " ".join(process.cmdline())
        if any(has_title(found, title) for title in titles):
            return process
    return None


def find_launcher(folder: RunFolder) -> psutil.Process | None:
    """Return the launcher of a run on this host if it is alive, and not this process.

    It may also be the simulation, or the peer that created the run folder, if that was started by hand.
    """
    pid = folder.info.get("launcher_pid", 0)
    peers = (peer_title(folder, files.peer) for files in folder.peers())
    titles = chain((launcher_title(folder.root), simulation_title(folder)), peers)
    return None if pid == os.getpid() else process_with(pid, titles)


def register(folder: RunFolder, *, fresh: bool = True) -> Requests:
    """Let other commands find this launcher, unless another one that they know follows the run.

    Return their requests, with ``fresh`` as Requests has it. Where these begin is noted before the launcher can be
    found: a command may send a request as soon as it finds it.
    """
    requests = Requests(folder.root, fresh=fresh)
    set_title(launcher_title(folder.root))
    if find_launcher(folder) is None:
        with suppress(WriteError):
            folder.write_info({**folder.info, "launcher_pid": os.getpid()})
    return requests


def request(root: Path, what: Request) -> int:
    """Send a request to the launchers of a run. Return its end in the file. Raises WriteError."""
    path = root / REQUESTS
    with write_errors(path), path.open("ab") as file:
        file.write(f"{what}\n".encode())
        return file.tell()


class Requests:
    """The launcher's side of ``request``.

    Args:
        root: the run folder.
        fresh: begin an empty file; otherwise skip what is in it, because another launcher may be reading it.
    """

    def __init__(self, root: Path, *, fresh: bool = True) -> None:
        self._path = root / REQUESTS
        self.answered = 0
        """Bytes of the file that have been read."""
        if fresh:
            with write_errors(self._path):
                self._path.write_bytes(b"")
        else:
            with suppress(OSError):
                self.answered = self._path.stat().st_size

    def new(self) -> list[str]:
        """Return the requests since the last call."""
        with suppress(OSError), self._path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > self.answered:
                file.seek(self.answered)
                lines, _, _ = file.read(size - self.answered).rpartition(b"\n")
                self.answered += len(lines) + 1 if lines else 0
                return lines.decode(errors="replace").split("\n") if lines else []
        return []
