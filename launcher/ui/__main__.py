"""The process of the live view: `python -m launcher.ui RUN FD PID`, started by the launcher with process id PID.

FD is a pipe with lines of the launcher; end of file ends the view.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from launcher.ui.app import LiveView, Poll
from launcher.ui.state import RunState
from p2pfl.attackers import attacks
from p2pfl.process_title import set_title
from p2pfl.run_folder.folder import RunFolder
from p2pfl.terminal import make_legible

NICE = 10
"""Peers come first."""


def show(folder: RunFolder, poll: Poll | None = None, launcher: int | None = None) -> None:
    """Show a run until the view is closed.

    Args:
        poll: return lines of the launcher.
        launcher: its process id, for Ctrl-C.
    """

    def interrupt() -> None:
        if launcher == os.getppid():  # otherwise it has ended
            os.kill(os.getppid(), signal.SIGINT)

    os.nice(NICE)
    make_legible(one_column=True)
    set_title(f"p2pfl ui {folder.root}")
    run = folder.settings
    state = RunState(folder, run["rounds"], attacks(run))
    name = f"{run['name']} ({run['algorithm']['name']})"
    LiveView(state, name, poll, None if launcher is None else interrupt).run(mouse=False)


def poll_pipe(descriptor: int) -> Poll:
    """Return a function that returns the lines that have arrived; None at the end of file."""
    os.set_blocking(descriptor, False)
    pending = b""

    def poll() -> list[str] | None:
        nonlocal pending
        with suppress(BlockingIOError):
            while chunk := os.read(descriptor, 1 << 16):
                pending += chunk
            return None
        *lines, pending = pending.split(b"\n")
        return [line.decode(errors="replace") for line in lines]

    return poll


if __name__ == "__main__":
    show(RunFolder.open(Path(sys.argv[1])), poll_pipe(int(sys.argv[2])), int(sys.argv[3]))
