"""How a peer does, asked of the peer itself: a Unix socket in its folder, answered by the link's I/O thread.

    {"peer": 3, "phase": "training", "t": 12, …, "links_up": 6, "links": 7}

So it answers while its event loop trains for minutes, and does not when it is dead, stopped, or its sockets are
stuck, whatever its status file says. Who may write to the socket connects and is told; nothing is read of who asks.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import zmq

from p2pfl.runfolder import FINAL, PeerFolder, Status

NAME = "health"
PATIENCE = 3.0
"""Seconds that an answer may take. The thread that gives it never waits for anything for so long."""
MOST_AT_ONCE = 16
"""Questions that wait, or are answered in one turn of the I/O loop."""
LONGEST = 1 << 16
"""Bytes of an answer."""


# ---- the peer's side -----------------------------------------------------------------------------------------


class Health:
    """Answers whoever asks. All methods are called by the I/O thread.

    Args:
        folder: the peer's.
        tell: what to answer.
        log: learns if nobody can be answered; the peer goes on without.
    """

    def __init__(self, folder: Path, tell: Callable[[], Mapping[str, Any]], log: logging.Logger) -> None:
        self.folder = folder
        self.tell = tell
        self.log = log
        self._socket: socket.socket | None = None

    def open(self, poller: zmq.Poller) -> None:
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _opened(self.folder) as folder:
                hidden = folder / f".{NAME}.{os.getpid()}.tmp"
                listening.bind(str(hidden))
                listening.listen(MOST_AT_ONCE)
                listening.setblocking(False)
                hidden.replace(folder / NAME)  # there may be one of a process of this peer that was killed
        except OSError as error:
            listening.close()
            self.log.warning("cannot be asked how it does: %s: %s", self.folder / NAME, error.strerror)
            return
        self._socket = listening
        poller.register(listening, zmq.POLLIN)

    def look(self, stirred: Collection[object], poller: zmq.Poller) -> None:
        """Answer, if the poller says that somebody asks."""
        if self._socket is None or self._socket.fileno() not in stirred:
            return
        try:
            for _ in range(MOST_AT_ONCE):
                asking, _ = self._socket.accept()
                with asking, suppress(OSError):  # it has not waited for the answer
                    # So little, and the first thing that is sent: there is room for it.
                    asking.send(json.dumps(self.tell()).encode(), socket.MSG_DONTWAIT)
        except BlockingIOError:  # nobody else asks
            pass
        except OSError as error:  # e.g. no more open files: it would stir for ever
            self.log.warning("can no longer be asked how it does: %s", error.strerror)
            self.close(poller)

    def close(self, poller: zmq.Poller) -> None:
        if self._socket is None:
            return
        poller.unregister(self._socket)
        self._socket.close()
        self._socket = None
        with suppress(OSError):
            (self.folder / NAME).unlink()


# ---- who asks ------------------------------------------------------------------------------------------------


def examine(place: PeerFolder, patience: float = PATIENCE) -> tuple[bool, str]:
    """Whether a peer on this host does well, and a line that says how it does. ``patience`` in seconds."""
    try:
        told = _ask(place.root, patience)
        status = Status(**{key: told[key] for key in asdict(Status(place.peer, 0))})
        links = f"{told['links_up']} of {told['links']} neighbours connected"
    except BlockingIOError:
        return False, f"peer {place.peer} has not answered within {patience:g} s: {_last_known(place)}"
    except OSError:
        return False, f"peer {place.peer} does not answer: {_last_known(place)}"
    except (ValueError, KeyError, TypeError):
        return False, f"peer {place.peer} answers something else; is it of another version?"
    return True, f"peer {place.peer} is {_doing(status)} | {links}"


def _ask(folder: Path, patience: float) -> dict[str, Any]:
    """What the peer tells. Raises OSError if nobody answers, of which BlockingIOError if not in
    time, and ValueError for nonsense."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking, _opened(folder) as path:
        # Not settimeout: with that, connecting fails at once where many ask, instead of waiting for its turn.
        whole, part_of_second = divmod(int(patience * 1_000_000), 1_000_000)
        for direction in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            asking.setsockopt(socket.SOL_SOCKET, direction, struct.pack("@ll", whole, part_of_second))
        asking.connect(str(path / NAME))
        answer = b""
        while (part := asking.recv(LONGEST)) and len(answer) <= LONGEST:
            answer += part
    if not answer:
        raise ConnectionResetError  # it ended when we asked
    told = json.loads(answer)
    if not isinstance(told, dict):
        raise ValueError("no JSON object")
    return told


def _last_known(place: PeerFolder) -> str:
    status = place.status()
    return "it has not started yet" if status is None else f"last seen {_doing(status)}"


def _doing(status: Status) -> str:
    text: str = status.phase
    if text not in (*FINAL, "starting"):
        text += f" in round {status.t}"
    return f"{text}: {status.error}" if status.error else text


@contextmanager
def _opened(folder: Path) -> Iterator[Path]:
    """A path of ``folder`` that is short, as those of Unix sockets must be: 107 bytes."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


__all__ = ["NAME", "Health", "examine"]
