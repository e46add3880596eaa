"""In the launcher: the live view as a display of progress."""

from __future__ import annotations

import os
import subprocess
import sys
import termios
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, Self

from rich.console import Console

from launcher.facts.snapshot import Snapshot
from launcher.views.progress import Progress, progress_on
from p2pfl.errors import MissingExtra
from p2pfl.run_folder.folder import RunFolder

EXIT_TIMEOUT = 5.0
"""Seconds that the view may take to restore the terminal."""
RESTORE = "\x1b[?1049l\x1b[?25h\x1b[?2004l\x1b[0m"
"""Leave the alternate screen, show the cursor, end bracketed paste, reset colors."""


def require_ui() -> None:
    """Raise MissingExtra if textual is not installed."""
    if find_spec("textual") is None:
        raise MissingExtra("textual", "ui", "the live view")


def has_terminal() -> bool:
    """Return whether the view can be shown: it reads keys from stdin and draws on stderr."""
    return sys.stdin.isatty() and sys.stderr.isatty()


class UiProgress(Progress):
    """The live view in a separate process; after its end, the usual display."""

    def __init__(self, console: Console, folder: RunFolder) -> None:
        self._console, self._folder = console, folder
        self._lines: list[str] = []
        """Lines that only the view has shown."""
        self._after: Progress | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe = -1
        self._terminal: list[Any] = []

    def __enter__(self) -> Self:
        with suppress(termios.error):
            self._terminal = termios.tcgetattr(0)
        reads, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        command = [sys.executable, "-P", "-m", "launcher.ui", str(self._folder.root), str(reads), str(os.getpid())]
        self._process = subprocess.Popen(command, pass_fds=(reads,))
        os.close(reads)
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        if self._after is not None:
            self._after.__exit__()
            self._after = None

    def _close(self) -> None:
        """End the view, and print what it has shown of the launcher's lines."""
        if self._process is None:
            return
        process, self._process = self._process, None
        os.close(self._pipe)
        with suppress(subprocess.TimeoutExpired):
            process.wait(EXIT_TIMEOUT)
        if process.poll() is None:
            process.kill()
            process.wait()
        if process.returncode:
            sys.stderr.write(RESTORE)
            sys.stderr.flush()
            if self._terminal:
                with suppress(termios.error):
                    termios.tcsetattr(0, termios.TCSADRAIN, self._terminal)
            self._lines.append(f"the live view failed with exit code {process.returncode}; the run is not affected")
        for line in self._lines:
            self._console.print(line, soft_wrap=True)

    def update(self, snapshot: Snapshot) -> None:
        """Do nothing while the view is open: it reads the files itself."""
        if self._process is not None and self._process.poll() is not None:
            self._close()
            self._after = progress_on(self._console)
            self._after.__enter__()
        if self._after is not None:
            self._after.update(snapshot)

    def print(self, line: str) -> None:
        if self._process is None:
            (self._after or self._console).print(line)
            return
        self._lines.append(line)
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(self._pipe, f"{line}\n".encode(errors="replace"))
