"""A network that is as bad as wanted: an Ethernet switch, in this process, for the TAP devices of network namespaces.

What is sent through it is real TCP of the real kernel, which sees the delay, loses segments and sends them again. A
port is a descriptor that reads and writes one frame at a time.
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
"""Frames of one port that are taken before it is the others' turn."""


@dataclass(frozen=True)
class Weather:
    """What happens to each frame on its way from one port to another."""

    delay: float = 0.0
    """Seconds that it takes at least."""
    jitter: float = 0.0
    """Up to so many seconds more, drawn for each; so one frame may overtake another."""
    loss: float = 0.0
    """Share of the frames that are lost."""


@dataclass
class Count:
    """What the ports have sent."""

    frames: int = 0
    bytes: int = 0
    lost: int = 0
    """Of the frames, to the weather."""
    cut: int = 0
    """Of the frames, because one of the two ports was unplugged."""


class Switch:
    """Forwards frames between ``ports`` while it is entered, on a thread of its own.

    It learns who is where from what they send, as any switch does. The same seed loses, and holds up for the same
    time, the same ones of the frames from one port to another, counted from the first; what is in them depends on the
    kernel's timing.
    """

    def __init__(self, ports: Sequence[int], weather: Weather, seed: int = 0) -> None:
        self.count = Count()
        self._ports = ports
        self._weather = weather
        self._chance = {
            (one, other): random.Random(f"{seed} {one} {other}")
            for one in range(len(ports))
            for other in range(len(ports))
        }
        self._unplugged: set[int] = set()
        self._where: dict[bytes, int] = {}
        """The ports of Ethernet addresses."""
        self._under_way: list[tuple[float, int, int, bytes]] = []
        """(when it is due, its number, port, frame), a heap."""
        self._asked_to_end, self._end = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="switch")

    def unplug(self, port: int) -> None:
        """From now on nothing gets to or from this port; the device at the other end does not notice."""
        self._unplugged.add(port)

    def plug(self, port: int) -> None:
        self._unplugged.discard(port)

    def __enter__(self) -> Switch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.close()
        self._thread.join()
        self._asked_to_end.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for port, descriptor in enumerate(self._ports):
                selector.register(descriptor, selectors.EVENT_READ, port)
            selector.register(self._asked_to_end, selectors.EVENT_READ)
            while True:
                patience = max(0.0, self._under_way[0][0] - monotonic()) if self._under_way else None
                for ready, _ in selector.select(patience):
                    if ready.data is None:
                        return
                    self._take(ready.data)
                self._deliver()

    def _take(self, source: int) -> None:
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
        self._where[sender] = source
        known = self._where.get(receiver)  # that of no group, since a group sends nothing
        return [known] if known is not None else (port for port in range(len(self._ports)) if port != source)

    def _send(self, source: int, target: int, frame: bytes, now: float) -> None:
        self.count.frames += 1
        self.count.bytes += len(frame)
        chance, weather = self._chance[source, target], self._weather
        lost, more = chance.random() < weather.loss, chance.random() * weather.jitter
        if {source, target} & self._unplugged:
            self.count.cut += 1
        elif lost:
            self.count.lost += 1
        else:
            heapq.heappush(self._under_way, (now + weather.delay + more, self.count.frames, target, frame))

    def _deliver(self) -> None:
        while self._under_way and self._under_way[0][0] <= monotonic():
            _, _, target, frame = heapq.heappop(self._under_way)
            if target in self._unplugged:
                self.count.cut += 1
                continue
            with suppress(OSError):  # its buffer is full or its device is down: a frame may get lost
                os.write(self._ports[target], frame)


def tap() -> tuple[str, int]:
    """A new TAP device of this network namespace, and the descriptor that is the other end of its cable. The device
    is gone when that is closed. Raises OSError."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    try:
        set_device, tap_without_header = 0x400454CA, 0x1002  # TUNSETIFF; IFF_TAP | IFF_NO_PI
        wanted = struct.pack("16sH22x", b"p2pfl%d", tap_without_header)  # the kernel takes the next free number
        name = fcntl.ioctl(descriptor, set_device, wanted)[:16].rstrip(b"\0").decode()
    except OSError:
        os.close(descriptor)
        raise
    return name, descriptor
