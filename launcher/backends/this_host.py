"""Find out which peers belong to other hosts. Starting those here would only make their neighbors wait."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from ipaddress import ip_address

import psutil

from p2pfl import PeerId
from p2pfl.run_file.addresses import AddressBook, split


def remote_peers(book: AddressBook, peers: Iterable[PeerId]) -> Iterator[tuple[PeerId, str]]:
    """Yield those of ``peers`` whose address is not one of this host, or does not resolve, with that address."""
    local = {address.address.partition("%")[0] for group in psutil.net_if_addrs().values() for address in group}
    is_local: dict[str, bool] = {}
    for peer in peers:
        address = book.address_of(peer)
        if address is None:
            continue
        host, _ = split(address)
        if host not in is_local:
            is_local[host] = any(_is_local(number, local) for number in _resolve(host))
        if not is_local[host]:
            yield peer, address


def _resolve(host: str) -> Iterator[str]:
    try:
        yield from {str(address[0]).partition("%")[0] for *_, address in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return


def _is_local(number: str, local: set[str]) -> bool:
    address = ip_address(number)
    return address.is_loopback or address.is_unspecified or number in local
