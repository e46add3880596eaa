"""An Ethernet switch in this process that delays and loses frames between the TAP devices of network namespaces.

The traffic is real TCP of the real kernel, which retransmits lost segments. A port is a file descriptor that reads
and writes one frame at a time.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import selectors
import socket
import struct
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic

FRAME = 1 << 16
"""Bytes of the largest frame."""
AT_ONCE = 64
"""Frames read from one port before the others get their turn."""


@dataclass(frozen=True)
class LinkConditions:
    """Delay and loss of frames from one port to another."""

    delay: float = 0.0
    """Minimum seconds in transit."""
    jitter: float = 0.0
    """Maximum additional seconds, drawn for each frame, so that frames may overtake each other."""
    loss: float = 0.0
    """Probability that a frame is lost."""


@dataclass
class Traffic:
    """Frames sent by the ports."""

    frames: int = 0
    bytes: int = 0
    lost: int = 0
    """Frames lost at random."""
    cut: int = 0
    """Frames lost because a port was unplugged."""


class Switch:
    """Forward frames between ``ports`` on a background thread, as a context manager.

    It learns addresses from the frames it sees. A seed determines which frames between two ports are lost, and the
    delay of each, by their index; their contents depend on the kernel's timing.
    """

    def __init__(self, ports: Sequence[int], conditions: LinkConditions, seed: int = 0) -> None:
        self.traffic = Traffic()
        self._ports = ports
        self._conditions = conditions
        self._chance = {
            (one, other): random.Random(f"{seed} {one} {other}")
            for one in range(len(ports))
            for other in range(len(ports))
        }
        self._unplugged: set[int] = set()
        self._port_of: dict[bytes, int] = {}
        """By Ethernet address."""
        self._in_transit: list[tuple[float, int, int, bytes]] = []
        """(due time, number, port, frame), a heap."""
        self._stop_reader, self._stop_writer = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="switch")

    def unplug(self, port: int) -> None:
        """Drop all frames to and from this port; the device at the other end does not notice."""
        self._unplugged.add(port)

    def plug(self, port: int) -> None:
        self._unplugged.discard(port)

    def __enter__(self) -> Switch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop_writer.close()
        self._thread.join()
        self._stop_reader.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for port, descriptor in enumerate(self._ports):
                selector.register(descriptor, selectors.EVENT_READ, port)
            selector.register(self._stop_reader, selectors.EVENT_READ)
            while True:
                timeout = max(0.0, self._in_transit[0][0] - monotonic()) if self._in_transit else None
                for ready, _ in selector.select(timeout):
                    if ready.data is None:
                        return
                    self._receive(ready.data)
                self._deliver()

    def _receive(self, source: int) -> None:
        for _ in range(AT_ONCE):
            try:
                frame = os.read(self._ports[source], FRAME)
            except BlockingIOError:
                return
            now = monotonic()
            for target in self._targets(source, frame):
                self._send(source, target, frame, now)

    def _targets(self, source: int, frame: bytes) -> Iterable[int]:
        receiver, sender = frame[:6], frame[6:12]
        self._port_of[sender] = source
        known = self._port_of.get(receiver)  # never a multicast address: those send nothing
        return [known] if known is not None else (port for port in range(len(self._ports)) if port != source)

    def _send(self, source: int, target: int, frame: bytes, now: float) -> None:
        self.traffic.frames += 1
        self.traffic.bytes += len(frame)
        chance, conditions = self._chance[source, target], self._conditions
        lost, jitter = chance.random() < conditions.loss, chance.random() * conditions.jitter
        if {source, target} & self._unplugged:
            self.traffic.cut += 1
        elif lost:
            self.traffic.lost += 1
        else:
            heapq.heappush(self._in_transit, (now + conditions.delay + jitter, self.traffic.frames, target, frame))

    def _deliver(self) -> None:
        while self._in_transit and self._in_transit[0][0] <= monotonic():
            _, _, target, frame = heapq.heappop(self._in_transit)
            if target in self._unplugged:
                self.traffic.cut += 1
                continue
            with suppress(OSError):  # the buffer is full or the device is down: Ethernet may lose frames
                os.write(self._ports[target], frame)


def tap() -> tuple[str, int]:
    """Create a TAP device in this network namespace; return its name and its file descriptor.

    Closing the descriptor removes the device.

    Raises:
        OSError: TAP devices are not available.
    """
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    try:
        set_device, tap_without_header = 0x400454CA, 0x1002  # TUNSETIFF; IFF_TAP | IFF_NO_PI
        request = struct.pack("16sH22x", b"p2pfl%d", tap_without_header)  # the kernel takes the next free number
        name = fcntl.ioctl(descriptor, set_device, request)[:16].rstrip(b"\0").decode()
    except OSError:
        os.close(descriptor)
        raise
    return name, descriptor
