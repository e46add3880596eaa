"""Transfers over links that share the interfaces of hosts, on a simulated clock.

Max-min fairness: no transfer can get a higher rate without lowering that of another one that is not faster. The rates
follow from progressive filling: all rates rise together until a link or an interface is full, those that use it keep
their rate, and the others rise on. They are computed again when a transfer begins or ends, once for all that do so at
the same moment.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from p2pfl import PeerId

DONE = 1e-9
"""A transfer with less than this fraction of a second left has ended: the clock has that resolution."""


@dataclass(eq=False)
class Transfer:
    """Bytes on their way from one host to another.

    Attributes:
        left: bytes, when rates were last computed.
        rate: bytes per second.
    """

    sender: PeerId
    receiver: PeerId
    left: float
    done: Callable[[], None]
    rate: float = 0.0


def fair_rates(
    senders: Sequence[int], receivers: Sequence[int], hosts: int, bandwidth: float, interface: float
) -> np.ndarray:
    """Return the max-min fair rate of each transfer, float64 [n].

    Args:
        senders, receivers: hosts of each transfer. Each has a separate link.
        bandwidth: of each link.
        interface: of each host, for all that it sends, and again for all that it receives.
    """
    ends = np.stack([np.array(senders), hosts + np.array(receivers)])  # each host has two interfaces
    rates = np.full(ends.shape[1], bandwidth)
    free = np.full(2 * hosts, interface)
    rising = np.ones(ends.shape[1], bool)
    while rising.any():
        users = np.bincount(ends[:, rising].ravel(), minlength=2 * hosts)
        share = np.divide(free, users, out=np.full(2 * hosts, math.inf), where=users > 0)
        level = share.min()
        if level >= bandwidth:
            break
        full = share <= level * (1 + 1e-12)
        stops = rising & full[ends].any(0)
        rates[stops] = level
        free -= level * np.bincount(ends[:, stops].ravel(), minlength=2 * hosts)
        rising &= ~stops
    return rates


class Transfers:
    """All transfers in progress.

    Args:
        loop: with the simulated clock.
        hosts: number of hosts.
        bandwidth: bytes per second of each link.
        interface: bytes per second of each host, in each direction; None: no limit.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, hosts: int, bandwidth: float, interface: float | None
    ) -> None:
        self._loop = loop
        self._hosts = hosts
        self._bandwidth = bandwidth
        self._interface = interface
        self._active: dict[Transfer, None] = {}
        """In the order in which they began."""
        self._counted_at = 0.0
        """When ``left`` was right."""
        self._next: asyncio.Handle | None = None
        """The next end, or computation of rates."""
        self._stale = False

    def begin(self, sender: PeerId, receiver: PeerId, size: int, done: Callable[[], None]) -> Transfer:
        """Begin to send ``size`` bytes over the free link from one host to another; call ``done`` at the end."""
        transfer = Transfer(sender, receiver, float(size), done)
        self._active[transfer] = None
        if self._interface is None:
            self._loop.call_later(size / self._bandwidth, self._end_alone, transfer)
        else:
            self._changed()
        return transfer

    def cancel(self, transfer: Transfer) -> None:
        """Break a transfer off."""
        del self._active[transfer]
        if self._interface is not None:
            self._changed()

    def _end_alone(self, transfer: Transfer) -> None:
        if transfer in self._active:
            del self._active[transfer]
            transfer.done()

    def _changed(self) -> None:
        if not self._stale:
            self._stale = True
            self._schedule(self._loop.time())

    def _schedule(self, when: float) -> None:
        if self._next is not None:
            self._next.cancel()
        self._next = self._loop.call_at(when, self._advance)

    def _advance(self) -> None:
        """End the transfers that are done, compute the rates of the others, and schedule the next end."""
        now, self._stale = self._loop.time(), False
        for transfer in self._active:
            transfer.left -= transfer.rate * (now - self._counted_at)
        self._counted_at = now
        ended = [transfer for transfer in self._active if transfer.rate and transfer.left <= DONE * transfer.rate]
        for transfer in ended:
            del self._active[transfer]
        self._stale = True  # what ``done`` begins is counted below
        for transfer in ended:
            transfer.done()
        self._stale, self._next = False, None
        if self._active:
            assert self._interface is not None
            senders, receivers = zip(*((each.sender, each.receiver) for each in self._active), strict=True)
            rates = fair_rates(senders, receivers, self._hosts, self._bandwidth, self._interface)
            for transfer, rate in zip(self._active, rates.tolist(), strict=True):
                transfer.rate = rate
            self._schedule(now + min(each.left / each.rate for each in self._active))
