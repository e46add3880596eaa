"""Host name resolution in the background.

libzmq would resolve names on the thread that handles all of this peer's traffic: one slow lookup, e.g. of a host that
is not up yet, would delay all connections. It would also try only the first address. A restarted container has a new
address, so names are resolved again while a neighbor is disconnected.
"""

from __future__ import annotations

import logging
import random
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address

from p2pfl.run_file.addresses import is_ipv6, join, split

REFRESH = 2.0
"""Seconds after which a name is looked up again if it is still requested."""
ADDRESS_PERIOD = 5.0
"""Seconds for which each address of a host is tried, if it has several: up to twice as long, drawn each time. Peers
connect only while both try an address that works; with equal periods two might never do so at the same time."""
IDLE = 10.0
"""Seconds without a request after which the first address is tried first again."""
MAX_LOOKUPS = 8
"""Maximum concurrent lookups."""


@dataclass
class _Name:
    addresses: list[str] = field(default_factory=list)
    looked_up: float = float("-inf")
    turn: int = 0
    """Index of the address to try, modulo their number."""
    next_turn: float = 0.0
    last_asked: float = float("-inf")
    error: str = ""


class Resolver:
    """Resolves names without blocking: each lookup runs on its own thread. Called by one thread.

    Args:
        now: the clock, in seconds.
        log: receives a line when a name cannot be resolved.
        look_up: (host, port) -> numeric addresses; raises OSError.
        ipv4_first: try the IPv4 addresses of a name before the others.
    """

    def __init__(
        self,
        now: Callable[[], float],
        log: logging.Logger,
        look_up: Callable[[str, int], list[str]] | None = None,
        *,
        ipv4_first: bool = False,
    ) -> None:
        self._now = now
        self._log = log
        self._look_up = look_up or look_up_host
        self._ipv4_first = ipv4_first
        self._names: dict[str, _Name] = {}
        self._busy: set[str] = set()
        """Names that are being looked up. Several threads change it, by atomic operations."""

    def numeric(self, address: str) -> str | None:
        """Return ``tcp://10.0.0.7:5703`` for ``tcp://peer-3:5703``; None if not resolved yet.

        Call it again until there is a connection: the address may change, and a host may have several.
        """
        host, port = split(address)
        with suppress(ValueError):
            ip_address(host)
            return address
        name = self._names.setdefault(host, _Name())
        now = self._now()
        is_new = now - name.last_asked > IDLE
        if is_new or now >= name.next_turn:
            name.turn = 0 if is_new else name.turn + 1
            name.next_turn = now + ADDRESS_PERIOD * random.uniform(1.0, 2.0)
        name.last_asked = now
        if now - name.looked_up > REFRESH and host not in self._busy and len(self._busy) < MAX_LOOKUPS:
            self._busy.add(host)
            threading.Thread(
                target=self._resolve, args=[name, host, port], name=f"p2pfl-resolve {host}", daemon=True
            ).start()
        addresses = name.addresses
        if not addresses:
            return None
        return join(addresses[name.turn % len(addresses)], port)

    def _resolve(self, name: _Name, host: str, port: int) -> None:
        try:
            # Keep known addresses while the name server is unreachable.
            found = self._look_up(host, port)
            name.addresses = (sorted(found, key=is_ipv6) if self._ipv4_first else found) or name.addresses
            name.error = ""
        except OSError as error:
            reason = error.strerror or str(error)
            if not name.error and not name.addresses:
                self._log.info("host name not resolved yet name=%s: %s", host, reason)
            name.error = reason
        finally:
            name.looked_up = self._now()
            self._busy.discard(host)


def look_up_host(host: str, port: int) -> list[str]:
    """Return the distinct numeric addresses of a host in the system's order of preference. Raises OSError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # not a valid name
        raise OSError(str(error)) from None
    return list(dict.fromkeys(str(address[0]) for *_, address in found))
