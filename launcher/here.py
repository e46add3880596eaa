"""Which peers are looked for on other hosts, where starting them on this one would only make everybody wait."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from ipaddress import ip_address

import psutil

from p2pfl.addresses import AddressBook, split
from p2pfl.runfolder import PeerId


def elsewhere(book: AddressBook, peers: Iterable[PeerId]) -> Iterator[tuple[PeerId, str]]:
    """Those of ``peers`` that the run file says to be at an address of another host, or of one that nobody knows."""
    ours = {address.address.partition("%")[0] for group in psutil.net_if_addrs().values() for address in group}
    known: dict[str, bool] = {}
    for peer in peers:
        address = book.address_of(peer)
        if address is None:
            continue
        host, _ = split(address)
        if host not in known:
            known[host] = any(_is_ours(number, ours) for number in _numbers(host))
        if not known[host]:
            yield peer, address


def _numbers(host: str) -> Iterator[str]:
    try:
        yield from {str(address[0]).partition("%")[0] for *_, address in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return


def _is_ours(number: str, ours: set[str]) -> bool:
    address = ip_address(number)
    return address.is_loopback or address.is_unspecified or number in ours
