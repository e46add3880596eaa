"""Admission control: which connections a listening peer accepts, and how many.

    connection ── ZMTP greeting ── CURVE: proves its key ── ZAP: is the key a neighbor's? ── the ROUTER
                       │                    │                          │
                       └────────────────────┴── refused: a log line, see LimitedLog

With keys, libzmq sends a ZAP request (ZeroMQ RFC 27) for every client that has proved possession of a private key.
The handler accepts the public keys of the neighbors in the graph. It runs in the I/O loop; until it replies, libzmq
accepts no connection. It returns the neighbor's id as the connection's User-Id. libzmq attaches it to every message,
and it overrides any sender that the message claims.

The ROUTER's monitor counts connections. libzmq does not limit them, and each uses a file descriptor, which
checkpoints and logs need too. At the limit, the kernel drops new connections until some have closed; a stalled
handshake is closed after HANDSHAKE_TIMEOUT. Neighbors keep retrying; established connections are unaffected.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from p2pfl import PeerId
from p2pfl.public_keys import short
from p2pfl.run_folder.key_files import Keys
from peers.limited_log import LimitedLog

HANDSHAKE_TIMEOUT = 10.0
"""Maximum seconds of a handshake."""
STOP_TIMEOUT = 10
"""Maximum seconds for libzmq to close the listening socket."""
DOMAIN = b"p2pfl"
COUNT_INTERVAL = 1.0
"""Seconds between two checks of how many bytes each connection has received."""
THOROUGH_INTERVAL = 15.0
"""Seconds between two checks of which connections still exist, which take several times as long."""
_MIN_FRAMING = 2
"""Minimum overhead of a frame on the wire, in bytes."""
_BYTES_RECEIVED = 128
"""Offset of tcpi_bytes_received in struct tcp_info of <linux/tcp.h>."""
_EVENTS_PER_TURN = 64
"""Maximum ZAP requests and monitor events handled in one turn of the I/O loop."""
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
"""From <asm-generic/socket.h>; Python's socket module lacks them."""


class KeyAuthenticator:
    """ZAP handler that accepts the keys of neighbors. Create it before the ROUTER is bound."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Keys, neighbors: tuple[PeerId, ...]) -> None:
        self._neighbors = {keys.public[peer]: peer for peer in neighbors}
        self._others = {key: peer for peer, key in enumerate(keys.public) if peer not in neighbors}
        self.socket = context.socket(zmq.REP)
        self.socket.set(zmq.LINGER, 0)
        self.socket.bind("inproc://zeromq.zap.01")

    def answer(self, log: LimitedLog) -> None:
        """Answer the pending ZAP requests."""
        for _ in range(_EVENTS_PER_TURN):
            try:
                version, request, _, address, _, mechanism, *credentials = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            key = credentials[0] if mechanism == b"CURVE" and credentials else b""
            peer = self._neighbors.get(key)
            if peer is None:
                log.warning("connections with unaccepted keys", self._describe(key, address.decode()))
                verdict = [b"400", b"Not a neighbor's key", b""]
            else:
                verdict = [b"200", b"", b"%d" % peer]
            self.socket.send_multipart([version, request, *verdict, b""])

    def _describe(self, key: bytes, address: str) -> str:
        if key in self._others:
            return f"connection refused from={address}: peer {self._others[key]} is not a neighbor"
        return f"connection refused from={address}: key {short(key)} belongs to no peer of this run"


@dataclass
class _Connection:
    bytes_read: int = 0
    """Bytes of the messages read from it."""
    unannounced: bool = False
    """A message was read before the monitor announced the connection."""


class ConnectionGuard:
    """Limits the number of the ROUTER's connections, and the size of an incomplete message on each.

    Create it before the ROUTER is bound.

    Args:
        router: the socket.
        max_connections: maximum number of open connections.
        max_unread: maximum number of bytes received on a connection that do not belong to a message read from it.
        has_keys: whether the router has keys.
        now: the clock.
    """

    def __init__(
        self,
        router: zmq.Socket[bytes],
        max_connections: int,
        max_unread: int,
        has_keys: bool,
        now: Callable[[], float],
    ) -> None:
        # Do not subscribe to EVENT_HANDSHAKE_FAILED_PROTOCOL: libzmq 4.3.5 also emits it for a tampered encrypted
        # message, and then fails to close the connection. It stays open and unread, and closing it later may abort
        # the process with a failed assertion.
        self.monitor = router.get_monitor_socket(
            zmq.EVENT_LISTENING | zmq.EVENT_CLOSED | zmq.EVENT_ACCEPTED | zmq.EVENT_ACCEPT_FAILED
            | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        )  # fmt: skip
        self._router = router
        self.connections: dict[int, _Connection] = {}
        """By file descriptor."""
        self._max_connections = max_connections
        self._max_unread = max_unread
        self._has_keys = has_keys
        self._now = now
        self._next_count = 0.0
        self._next_thorough = 0.0
        self._ignoring = False
        """Whether the kernel drops new connections."""
        self._explained = False
        """Whether the last event gave the reason for the disconnection that the next event reports."""
        self._listener: socket.socket | None = None

    def message_read(self, identity: zmq.Frame, size: int, frames: int) -> None:
        """Count a message of ``size`` bytes; ``identity`` identifies its connection."""
        descriptor = int(identity.get(zmq.SRCFD))
        if (connection := self.connections.get(descriptor)) is None:
            connection = self.connections[descriptor] = _Connection(unannounced=True)
        connection.bytes_read += size + frames * _MIN_FRAMING

    def check(self, log: LimitedLog, *, events: bool = True) -> None:
        """Handle monitor events, if there may be some, and enforce the limits. Call it periodically."""
        for _ in range(_EVENTS_PER_TURN):
            if not events or not readable(self.monitor):
                break
            message = recv_monitor_message(self.monitor)
            self._handle_event(message["event"], message["value"], log)
        if self._now() >= self._next_count:
            self._next_count = self._now() + COUNT_INTERVAL
            self._close_oversized(log)
        full = len(self.connections) >= self._max_connections
        if full != self._ignoring and self._listener is not None:
            self._ignore_further(self._listener, full, log)

    def _close_oversized(self, log: LimitedLog) -> None:
        """Close connections with an oversized incomplete message.

        libzmq buffers the frames of a message without limit and delivers it only when its last frame has arrived; the
        kernel counts the bytes received.
        """
        thorough = self._now() >= self._next_thorough
        if thorough:
            self._next_thorough = self._now() + THOROUGH_INTERVAL
        for descriptor, known in list(self.connections.items()):
            if not thorough and _bytes_received(descriptor) - known.bytes_read <= self._max_unread:
                continue
            with self._duplicate(descriptor) as connection:
                if connection is None:  # libzmq does not report every disconnection
                    del self.connections[descriptor]
                    continue
                unread = _bytes_received(connection.fileno()) - known.bytes_read
                if unread > self._max_unread:
                    # libzmq then reads end-of-file and closes the socket, which sends a reset.
                    with suppress(OSError):  # the client has closed it at this moment
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        connection.shutdown(socket.SHUT_RD)
                    text = f"connection closed unread={unread}: incomplete message exceeds {self._max_unread} bytes"
                    log.warning("connections with oversized incomplete messages", text)

    @contextmanager
    def _duplicate(self, descriptor: int) -> Iterator[socket.socket | None]:
        """Yield a duplicate of one of the ROUTER's connections.

        Yield None if the connection is closed; its descriptor may have been reused for another file.
        """
        try:
            duplicate = os.dup(descriptor)
        except OSError:
            yield None
            return
        try:
            connection = socket.socket(fileno=duplicate)
        except OSError:  # no socket
            os.close(duplicate)  # left open, it would keep the lock of a compute slot
            yield None
            return
        with connection:
            yield connection if self._is_ours(connection) else None

    def _is_ours(self, connection: socket.socket) -> bool:
        try:
            connection.getpeername()
            return self._listener is not None and connection.getsockname()[1] == self._listener.getsockname()[1]
        except OSError:
            return False

    def _handle_event(self, event: int, value: int, log: LimitedLog) -> None:
        explained, self._explained = self._explained, False
        if event == zmq.EVENT_LISTENING:
            self._listener = socket.socket(fileno=os.dup(value))
        elif event == zmq.EVENT_ACCEPTED:
            known = self.connections.get(value)
            if known is None or not known.unannounced:
                self.connections[value] = _Connection()
            else:
                known.unannounced = False
        elif event == zmq.EVENT_DISCONNECTED:
            known = self.connections.pop(value, None)
            if known and not known.bytes_read and not explained:
                cause = "has no key, expects another public key, or uses" if self._has_keys else "uses keys or"
                text = f"connection refused: the client {cause} another protocol"
                log.warning("connections of unknown clients", text)
        elif event == zmq.EVENT_ACCEPT_FAILED:
            log.warning("failed connections", f"connection failed: {os.strerror(value)}")
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._explained = True  # logged by the ZAP handler
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._explained = True
            log.warning("connections of unknown clients", "connection refused: handshake failed or timed out")

    def _ignore_further(self, listener: socket.socket, ignore: bool, log: LimitedLog) -> None:
        """Have the kernel drop new connections, or stop dropping them. Established ones have their own sockets."""
        self._ignoring = ignore
        try:
            if ignore:
                instruction = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF: return 0, drop
                program = struct.pack("HP", 1, ctypes.addressof(instruction))
                listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
            else:
                listener.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
        except OSError as error:
            log.warning("connection limits", f"connection limit not enforced: {error.strerror}")
            return
        if ignore:
            text = f"connection limit reached connections={self._max_connections}: dropping new ones until some close"
            log.warning("connection limits", text)

    def stop_listening(self, address: str) -> None:
        """Have the ROUTER accept no more connections, and read the monitor until it has closed its listening socket.

        Without this, while clients keep connecting, libzmq waits for room for the next event, for which nobody makes
        room any more, and whoever disables the monitor waits for libzmq.
        """
        self._router.unbind(address)
        while self.monitor.poll(STOP_TIMEOUT * 1000):
            if recv_monitor_message(self.monitor)["event"] == zmq.EVENT_CLOSED:
                return

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        self.monitor.close(0)


def readable(socket: zmq.Socket[bytes]) -> bool:
    """Return whether a message can be read; cheaper than ``Socket.poll`` and than an exception."""
    return bool(int(socket.get(zmq.EVENTS)) & zmq.POLLIN)


_TCP_INFO = ctypes.create_string_buffer(256)
_getsockopt = ctypes.CDLL(None).getsockopt


def _bytes_received(descriptor: int) -> float:
    """Return the bytes that a connection has received; infinity if the descriptor is not a TCP connection."""
    size = ctypes.c_uint(len(_TCP_INFO))
    if _getsockopt(descriptor, socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO, ctypes.byref(size)):
        return float("inf")
    received: int = struct.unpack_from("=Q", _TCP_INFO, _BYTES_RECEIVED)[0]
    return received
