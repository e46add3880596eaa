"""Names of hosts into numbers, beside everything else.

libzmq would ask the name server on the thread that moves all bytes of this peer: one that takes its time for the name
of a host that is not up yet would hold up the connections to all the others. And it would try the first number only.
A container that was started again has another number than before, so names are looked up anew when a link is down.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from ipaddress import ip_address

from p2pfl.addresses import join, split

AGAIN = 2.0
"""Seconds after which a name that somebody still asks for is looked up again."""
EACH = 5.0
"""Seconds for which each of a host's numbers is tried, if it has several."""
FORGOTTEN = 10.0
"""Seconds without a question after which trying begins with the first number again."""
AT_ONCE = 8
"""Names that are looked up at the same time."""


@dataclass
class _Name:
    numbers: list[str] = field(default_factory=list)
    looked_up: float = float("-inf")
    asked_first: float = 0.0
    asked_last: float = float("-inf")
    failed: str = ""


class Resolver:
    """Never blocks. One thread asks; what was found comes from the others.

    Args:
        now: the clock, in seconds.
        log: learns which names are not known, once each time that they cease to be.
        look_up: (host, port) -> numbers; raises OSError.
    """

    def __init__(
        self,
        now: Callable[[], float],
        log: logging.Logger,
        look_up: Callable[[str, int], list[str]] | None = None,
    ) -> None:
        self._now = now
        self._log = log
        self._look_up = look_up or look_up_host
        self._names: dict[str, _Name] = {}
        self._busy: set[str] = set()
        """Names that are being looked up; both sorts of threads change it, which one operation does as a whole."""

    def numeric(self, address: str) -> str | None:
        """``tcp://10.0.0.7:5703`` for ``tcp://peer-3:5703``; None while that is not known, so ask again.

        Ask for as long as there is no connection: the number may change, and there may be several.
        """
        host, port = split(address)
        try:
            ip_address(host)
        except ValueError:
            pass
        else:
            return address
        name = self._names.setdefault(host, _Name())
        now = self._now()
        if now - name.asked_last > FORGOTTEN:
            name.asked_first = now
        name.asked_last = now
        if now - name.looked_up > AGAIN and host not in self._busy and len(self._busy) < AT_ONCE:
            self._busy.add(host)
            threading.Thread(
                target=self._find, args=[name, host, port], name=f"p2pfl-find {host}", daemon=True
            ).start()
        numbers = name.numbers
        if not numbers:
            return None
        turn = int((now - name.asked_first) / EACH)
        return join(numbers[turn % len(numbers)], port)

    def _find(self, name: _Name, host: str, port: int) -> None:
        try:
            # What is found stays when the name server cannot be reached for a while, as the neighbour may be.
            name.numbers = self._look_up(host, port) or name.numbers
            name.failed = ""
        except OSError as error:
            reason = error.strerror or str(error)
            if not name.failed and not name.numbers:
                self._log.info("%s has no address yet: %s", host, reason)
            name.failed = reason
        finally:
            name.looked_up = self._now()
            self._busy.discard(host)


def look_up_host(host: str, port: int) -> list[str]:
    """The numbers of a host, without repetition, in the order in which the system would try them. Raises OSError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # no name that could be asked for
        raise OSError(str(error)) from None
    return list(dict.fromkeys(str(address[0]) for *_, address in found))
