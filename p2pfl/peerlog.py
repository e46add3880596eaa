"""A peer's log: one line per event, for people."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from p2pfl.runfolder import PeerId, writing


def peer_logger(me: PeerId, path: Path | None, echo: TextIO | None = None) -> logging.Logger:
    """A logger of its own for one peer: one line per event, with the time to the millisecond.

    ``echo``, which a person watches, gets the same events as the file, without the date and without what is
    ``details``. Raises Unwritable if the file cannot be opened. A line that cannot be written later is lost, and
    nothing else.
    """
    logger = logging.Logger(f"peer {me}", logging.INFO)
    brief = "%(asctime)s.%(msecs)03d %(levelname)-7s %(message)s"
    if path is not None:
        with writing(path):
            file = _LogFile(path, encoding="utf-8")
        file.setFormatter(logging.Formatter(f"{brief}%(details)s", "%Y-%m-%dT%H:%M:%S", defaults={"details": ""}))
        logger.addHandler(file)
    if echo is not None:
        shown = _Echo(echo)
        shown.setFormatter(logging.Formatter(brief, "%H:%M:%S"))
        logger.addHandler(shown)
    return logger


def details(*parts: str) -> dict[str, str]:
    """The ``extra`` of a log call: what is worth keeping, and too much for a line of a terminal."""
    return {"details": "".join(f" | {part}" for part in parts)}


class _Lossy(logging.Handler):
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
