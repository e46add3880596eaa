"""Health checks: a Unix socket in the peer's folder, answered by the link's I/O thread.

    {"peer": 3, "phase": "training", "t": 12, …, "links_up": 6, "links": 7}

A peer answers even while training blocks its event loop for minutes. It does not answer if it is dead or stopped, or
if its I/O thread hangs, whatever its status file says. Any process with write permission on the socket can connect
and gets the answer; the peer reads nothing.
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
from typing import TYPE_CHECKING, Any

from p2pfl.run_folder.folder import FINAL, PeerFolder, Status

if TYPE_CHECKING:
    import zmq

NAME = "health"
TIMEOUT = 3.0
"""Maximum seconds until the answer. The I/O thread never blocks for that long."""
MAX_WAITING = 16
"""Maximum pending connections, and connections answered in one turn of the I/O loop."""
MAX_ANSWER = 1 << 16
"""Maximum bytes of an answer."""


class Health:
    """Answers health checks. I/O thread only.

    Args:
        folder: the peer's folder.
        status: returns the answer.
        log: receives a warning if health checks cannot be answered; the peer continues without them.
    """

    def __init__(self, folder: Path, status: Callable[[], Mapping[str, Any]], log: logging.Logger) -> None:
        self._folder = folder
        self._status = status
        self._log = log
        self._socket: socket.socket | None = None

    def open(self, poller: zmq.Poller) -> None:
        from zmq import POLLIN  # not above: each health check would import it

        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _short_path(self._folder) as folder:
                hidden = folder / f".{NAME}.{os.getpid()}.tmp"
                listener.bind(str(hidden))
                listener.listen(MAX_WAITING)
                listener.setblocking(False)
                hidden.replace(folder / NAME)  # replaces the socket of a killed process of this peer
        except OSError as error:
            listener.close()
            self._log.warning("health checks disabled: %s: %s", self._folder / NAME, error.strerror)
            return
        self._socket = listener
        poller.register(listener, POLLIN)

    def answer(self, ready: Collection[object], poller: zmq.Poller) -> None:
        """Answer pending health checks if ``ready`` contains the socket."""
        if self._socket is None or self._socket.fileno() not in ready:
            return
        try:
            for _ in range(MAX_WAITING):
                client, _ = self._socket.accept()
                with client, suppress(OSError):  # the client has disconnected
                    # The answer is short and the first data sent, so the buffer has room for it.
                    client.send(json.dumps(self._status()).encode(), socket.MSG_DONTWAIT)
        except BlockingIOError:  # no further connection
            pass
        except OSError as error:  # e.g. too many open files; the socket would wake the thread continuously
            self._log.warning("health checks disabled: %s", error.strerror)
            self.close(poller)

    def close(self, poller: zmq.Poller) -> None:
        if self._socket is None:
            return
        poller.unregister(self._socket)
        self._socket.close()
        self._socket = None
        with suppress(OSError):
            (self._folder / NAME).unlink()


def check_health(files: PeerFolder, timeout: float = TIMEOUT) -> tuple[bool, str]:
    """Check the health of a peer on this host.

    Returns:
        Whether it answered within ``timeout`` seconds, and one line of text for the user.
    """
    try:
        answer = _ask(files.root, timeout)
        status = Status(**{key: answer[key] for key in asdict(Status(files.peer, 0))})
        links = f"{answer['links_up']} of {answer['links']} neighbors connected"
    except BlockingIOError:
        return False, f"peer {files.peer} did not answer within {timeout:g} s: {_last_known(files)}"
    except OSError:
        return False, f"peer {files.peer} does not answer: {_last_known(files)}"
    except (ValueError, KeyError, TypeError):
        return False, f"peer {files.peer} sent an invalid answer; it may run another version"
    return True, f"peer {files.peer} is {_describe(status)} | {links}"


def _ask(folder: Path, timeout: float) -> dict[str, Any]:
    """Return the peer's answer.

    Raises:
        BlockingIOError: no answer within ``timeout`` seconds.
        OSError: no process listens on the socket.
        ValueError: the answer is not a JSON object.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client, _short_path(folder) as path:
        # Not settimeout: it makes the socket non-blocking, and connect then fails at once if the backlog is full.
        seconds, microseconds = divmod(int(timeout * 1_000_000), 1_000_000)
        for direction in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            client.setsockopt(socket.SOL_SOCKET, direction, struct.pack("@ll", seconds, microseconds))
        client.connect(str(path / NAME))
        answer = b""
        while (part := client.recv(MAX_ANSWER)) and len(answer) <= MAX_ANSWER:
            answer += part
    if not answer:
        raise ConnectionResetError  # the peer exited in between
    decoded = json.loads(answer)
    if not isinstance(decoded, dict):
        raise ValueError("not a JSON object")
    return decoded


def _last_known(files: PeerFolder) -> str:
    status = files.status()
    return "it has not started yet" if status is None else f"last seen {_describe(status)}"


def _describe(status: Status) -> str:
    text: str = status.phase
    if text not in (*FINAL, "starting"):
        text += f" in round {status.t}"
    return f"{text}: {status.error}" if status.error else text


@contextmanager
def _short_path(folder: Path) -> Iterator[Path]:
    """Yield a short path of ``folder``: a Unix socket's path is limited to 107 bytes."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
