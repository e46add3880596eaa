"""A peer's log: entries for people (``text``) or programs (``json``).

    2026-11-22T21:46:39.289 INFO    round done t=7 accuracy=0.1556 … | loss ce=0.7220 | …
        | further details, if the line would have more than MAX_LINE characters

    {"time": "2026-11-22T21:46:39.289", "level": "INFO", "peer": 3, "message": "round done t=7 …", "details": […]}

A full log becomes peer.log.1, in place of the one before.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, TextIO

from p2pfl import PeerId
from p2pfl.file_locks import lock
from p2pfl.run_folder.files import write_errors
from p2pfl.terminal import printable

LogFormat = Literal["text", "json"]
LEVELS = ("debug", "info", "warning", "error")
MAX_LINE = 160
"""Characters of a line of text with details; only a message that is longer has more."""
MAX_BYTES = 64 << 20
"""Default size in bytes at which a log is rotated."""
TIME = "%Y-%m-%dT%H:%M:%S"


@dataclass(frozen=True)
class LogSettings:
    """How one peer logs to its file: the least level to log, and the bytes after which another file is begun."""

    format: LogFormat = "text"
    level: str = "info"
    max_bytes: int = MAX_BYTES

    @classmethod
    def of(cls, info: Mapping[str, Any], me: PeerId) -> Self:
        """Read ``log`` of run.json: ``{"format", "level", "levels": {"3": …}, "max_bytes"}``, each optional."""
        given = info.get("log", {})
        default = cls()
        return cls(
            given.get("format", default.format),
            given.get("levels", {}).get(str(me), given.get("level", default.level)),
            given.get("max_bytes", default.max_bytes),
        )


def log_info(format: str, levels: Sequence[str], megabytes: int | None, peers: int) -> dict[str, Any]:
    """Return ``log`` of run.json: the settings that differ from the defaults.

    Args:
        levels: each LEVEL or PEER=LEVEL.
        megabytes: of a log before it is rotated.

    Raises:
        ValueError: there is no such level or peer.
    """
    log: dict[str, Any] = {} if format == "text" else {"format": format}
    if megabytes is not None:
        log["max_bytes"] = megabytes << 20
    for given in levels:
        peer, _, level = given.rpartition("=")
        if level not in LEVELS or (peer and not (peer.isdecimal() and int(peer) < peers)):
            raise ValueError(
                f"--log-level {given}: should be LEVEL or PEER=LEVEL, e.g. 3=debug, with one of "
                f"{', '.join(LEVELS)} and a peer from 0 to {peers - 1}"
            )
        if peer:
            log.setdefault("levels", {})[str(int(peer))] = level
        else:
            log["level"] = level
    return log


def peer_logger(
    me: PeerId, path: Path | None, echo: TextIO | None = None, settings: LogSettings | None = None
) -> logging.Logger:
    """Create the logger of one peer: one entry per event, with timestamps in milliseconds.

    Args:
        path: of the log file. An entry that cannot be written is dropped.
        echo: stream for a terminal; gets the same events as text, without the date and the ``details``.

    Raises:
        WriteError: the file cannot be opened.
    """
    settings = settings or LogSettings()
    logger = logging.Logger(f"peer {me}", settings.level.upper())
    if path is not None:
        with write_errors(path):
            file = _LogFile(path, settings.max_bytes)
        file.setFormatter(_JsonFormatter(me) if settings.format == "json" else _TextFormatter())
        logger.addHandler(file)
    if echo is not None:
        terminal = _Echo(echo)
        terminal.setFormatter(_BriefFormatter("%(asctime)s.%(msecs)03d %(levelname)-7s %(message)s", "%H:%M:%S"))
        logger.addHandler(terminal)
    return logger


def lock_log(log: logging.Logger) -> bool:
    """Lock the log file until it is closed. Return False if another process of this peer holds the lock.

    Raises UnsuitableFileSystem if it cannot be locked.
    """
    files = [handler for handler in log.handlers if isinstance(handler, logging.FileHandler)]
    return all(lock(file.stream, Path(file.baseFilename)) for file in files if file.stream is not None)


def details(*parts: str) -> dict[str, tuple[str, ...]]:
    """Return the ``extra`` of a log call: parts of the entry for the log file, not for a terminal."""
    return {"details": parts}


class _BriefFormatter(logging.Formatter):
    """Escapes control characters: texts of other hosts, such as addresses, must not reach a terminal as they are."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class _TextFormatter(_BriefFormatter):
    """Adds the details, on further lines if they are too long for one."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03d %(levelname)-7s %(message)s%(wrapped)s", TIME)

    def format(self, record: logging.LogRecord) -> str:
        length = len(f"2026-11-22T21:46:39.289 INFO    {record.getMessage()}")
        wrapped = ""
        for part in getattr(record, "details", ()):
            fits = length + len(f" | {part}") <= MAX_LINE
            length = (length if fits else 4) + len(f" | {part}")
            wrapped += f" | {part}" if fits else f"\n    | {part}"
        record.__dict__["wrapped"] = wrapped
        return super().format(record)


class _JsonFormatter(logging.Formatter):
    """One JSON object a line, which has no control characters."""

    def __init__(self, me: PeerId) -> None:
        super().__init__()
        self._me = me

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": f"{self.formatTime(record, TIME)}.{int(record.msecs):03d}",
            "level": record.levelname,
            "peer": self._me,
            "message": record.getMessage(),
        }
        if parts := getattr(record, "details", ()):
            entry["details"] = parts
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry)


class _Lossy(logging.Handler):
    """Drops lines that cannot be written."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


class _LogFile(_Lossy, logging.FileHandler):
    """A log file that is replaced when it is full; the new one is locked like the old one (``lock_log``)."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        super().__init__(path, encoding="utf-8")
        self._max_bytes = max_bytes

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        try:
            if self.stream is not None and os.fstat(self.stream.fileno()).st_size >= self._max_bytes:
                self._rotate()
        except OSError:  # e.g. the disk is full: the file grows on
            self.handleError(record)

    def _rotate(self) -> None:
        assert self.stream is not None
        path = Path(self.baseFilename)
        begun = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        new = begun.open("a", encoding="utf-8")
        try:
            fcntl.flock(new, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.replace(rotated(path))
            begun.replace(path)
        except OSError:
            new.close()
            raise
        self.stream.close()
        self.stream = new


def rotated(path: Path) -> Path:
    """Return the path of the log that was begun before this one."""
    return path.with_name(f"{path.name}.1")


class _Echo(_Lossy, logging.StreamHandler):  # type: ignore[type-arg]
    pass


def close_logger(logger: logging.Logger) -> None:
    for handler in logger.handlers:
        with suppress(OSError):
            handler.close()
