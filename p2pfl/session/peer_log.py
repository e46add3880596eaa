"""A peer's log: one line per event, for people."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from p2pfl import PeerId
from p2pfl.session.files import write_errors
from p2pfl.terminal import printable


def peer_logger(me: PeerId, path: Path | None, echo: TextIO | None = None) -> logging.Logger:
    """Create the logger of one peer: one line per event, with timestamps in milliseconds.

    Args:
        path: of the log file. A line that cannot be written is dropped.
        echo: stream for a terminal; gets the same events without the date and the ``details``.

    Raises:
        WriteError: the file cannot be opened.
    """
    logger = logging.Logger(f"peer {me}", logging.INFO)
    brief = "%(asctime)s.%(msecs)03d %(levelname)-7s %(message)s"
    if path is not None:
        with write_errors(path):
            file = _LogFile(path, encoding="utf-8")
        file.setFormatter(_Formatter(f"{brief}%(details)s", "%Y-%m-%dT%H:%M:%S", defaults={"details": ""}))
        logger.addHandler(file)
    if echo is not None:
        terminal = _Echo(echo)
        terminal.setFormatter(_Formatter(brief, "%H:%M:%S"))
        logger.addHandler(terminal)
    return logger


def details(*parts: str) -> dict[str, str]:
    """The ``extra`` of a log call: parts of the line that go to the log file but not to a terminal."""
    return {"details": "".join(f" | {part}" for part in parts)}


class _Formatter(logging.Formatter):
    """Escapes control characters: texts of other hosts, such as addresses, must not reach a terminal as they are."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class _Lossy(logging.Handler):
    """Drops lines that cannot be written."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


class _LogFile(_Lossy, logging.FileHandler):
    pass


class _Echo(_Lossy, logging.StreamHandler):  # type: ignore[type-arg]
    pass


def close_logger(logger: logging.Logger) -> None:
    for handler in logger.handlers:
        with suppress(OSError):
            handler.close()
