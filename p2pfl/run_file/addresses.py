"""The peers' addresses, as far as the run file and the environment give them before any peer is up.

    transport:
      host: 0.0.0.0                         # the address that each peer binds
      port: 5700                            # peer i binds port 5700 + i
      address: tcp://peer-{id}:{port}       # the address that neighbors connect to
      hosts:                                # overrides it for these peers
        0-9: alpha.example.org              # tcp://alpha.example.org:{port}
        10: "fd00::2"
        11: tcp://203.0.113.7:9000          # behind a router that forwards this port

A template may contain ``{id}``, ``{port}`` (the port bound) and ``{hostname}`` (of the peer's host). An address that
only the peer itself can determine, because it depends on its port or host, is published in the run folder.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from string import Formatter

from p2pfl import PeerId

IN_USE = "stop the process that listens there (`ss -ltnp` shows it), or change transport.port"
"""What to do if an address is in use."""
LAST_PORT = 65535
FIELDS = ("id", "port", "hostname")
FORM = "tcp://host:port, e.g. tcp://peer-{id}:{port}"
_ADDRESS = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.]+(%\w+)?\]|[^\s:/\[\]]+):(?P<port>\d{1,5})")


@dataclass(frozen=True)
class AddressBook:
    """The address templates of all peers.

    Args:
        templates: by peer; a peer without one advertises the address that it binds.
        port: peer i binds ``port`` + i; None: a port that the system chooses.
    """

    templates: Mapping[PeerId, str]
    port: int | None = None

    def bound_port(self, peer: PeerId) -> int | None:
        return None if self.port is None else self.port + peer

    def address_of(self, peer: PeerId) -> str | None:
        """The address to connect to; None if only the peer itself can determine it."""
        template = self.templates.get(peer)
        if template is None or "hostname" in _fields(template):
            return None
        port = self.bound_port(peer)
        return None if port is None and "port" in _fields(template) else template.format(id=peer, port=port)

    def advertised(self, me: PeerId, bound: str) -> str:
        """The address that peer ``me`` publishes after binding ``bound`` (``tcp://…:port``)."""
        port = bound.rpartition(":")[2]
        template = self.templates.get(me)
        return bound if template is None else template.format(id=me, port=port, hostname=socket.gethostname())


def book(peers: int, port: int | None, address: str | None, hosts: Mapping[str, str]) -> AddressBook:
    """The address book of a run file for which ``problems`` is empty."""
    templates = {} if address is None else dict.fromkeys(range(peers), address)
    for entry in sorted(hosts, key=lambda entry: "-" not in entry):  # entries of single peers override ranges
        templates.update(dict.fromkeys(_peers_of(entry), _template(hosts[entry])))
    return AddressBook(templates, port)


def split(address: str) -> tuple[str, int]:
    """Split ``tcp://host:port`` into host (IPv6 without brackets) and port. Raises ValueError."""
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match["port"]) <= LAST_PORT:
        raise ValueError(f"{address!r} is not of the form tcp://host:port")
    return _without_brackets(match["host"]), int(match["port"])


def join(host: str, port: int | str) -> str:
    return f"tcp://{f'[{_without_brackets(host)}]' if is_ipv6(host) else host}:{port}"


def is_ipv6(host: str) -> bool:
    """Whether ``host`` is an IPv6 address, with or without brackets."""
    try:
        return isinstance(ip_address(_without_brackets(host)), IPv6Address)
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Whether a socket bound to ``host`` is reachable from this host only. Only known names count, e.g. localhost."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host in ("localhost", "lo")


def leads_here(host: str) -> bool:
    """Whether a connection to ``host``, a numeric address, ends on this host wherever it is made."""
    address = ip_address(_without_brackets(host).partition("%")[0])
    return address.is_loopback or address.is_unspecified


def problems(
    peers: int, port: int | None, address: str | None, hosts: Mapping[str, str]
) -> Iterator[tuple[tuple[str, ...], str]]:
    """The problems of these keys of ``transport``, as (path of the key, message)."""
    if port is not None and port + peers - 1 > LAST_PORT:
        yield ("port",), f"peer {peers - 1} would bind port {port + peers - 1}; the highest port is {LAST_PORT}"
        return
    templates: dict[tuple[str, ...], str] = {} if address is None else {("address",): address}
    templates |= {("hosts", entry): _template(host) for entry, host in hosts.items()}
    found = {key: problem for key, template in templates.items() if (problem := _template_problem(template))}
    found |= {("hosts", entry): problem for entry, problem in _entry_problems(list(hosts), peers)}
    addresses = None if found else book(peers, port, address, hosts)
    if addresses is not None:
        found = dict(_invalid_addresses(addresses, hosts))
    yield from found.items()
    if not found and addresses is not None and (duplicate := _duplicate_address(addresses)):
        first, second, shared = duplicate
        key = "hosts" if hosts else "address"
        yield (key,), f"peers {first} and {second} would have the same address {shared}; use {{port}} or {{id}} in it"


def _entry_problems(entries: list[str], peers: int) -> Iterator[tuple[str, str]]:
    ranges: list[str] = []
    for entry in entries:
        if not re.fullmatch(r"\d{1,9}(-\d{1,9})?", entry):
            yield entry, "should be a peer, e.g. 3, or a range of peers, e.g. 0-9"
        elif not (named := _peers_of(entry)):
            yield entry, "the end of the range is below its start"
        elif named[-1] >= peers:
            yield entry, f"no peer {named[-1]}; the {peers} peers are 0 to {peers - 1}"
        elif "-" in entry:
            overlapping = [other for other in ranges if set(named) & set(_peers_of(other))]
            if overlapping:
                yield entry, f"overlaps {overlapping[0]}"
            ranges.append(entry)


def _invalid_addresses(addresses: AddressBook, hosts: Mapping[str, str]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the first peer's problem of each template: with the peer's id, its address is none."""
    of_peer: dict[PeerId, tuple[str, ...]] = dict.fromkeys(addresses.templates, ("address",))
    for entry in sorted(hosts, key=lambda entry: "-" not in entry):
        of_peer |= dict.fromkeys(_peers_of(entry), ("hosts", entry))
    seen = set()
    for peer, template in sorted(addresses.templates.items()):
        port = addresses.bound_port(peer)
        possible = (1, LAST_PORT) if port is None else (port,)
        if of_peer[peer] in seen or any(_is_address(template, peer, each) for each in possible):
            continue
        seen.add(of_peer[peer])
        example = template.format(id=peer, port=LAST_PORT if port is None else port, hostname="host")
        form = f"{FORM}, with a port from 1 to {LAST_PORT}"
        yield of_peer[peer], f"{template!r} is not an address of peer {peer}: {example!r} is not of the form {form}"


def _is_address(template: str, peer: PeerId, port: int) -> bool:
    try:
        split(template.format(id=peer, port=port, hostname="host"))
    except ValueError:
        return False
    return True


def _duplicate_address(addresses: AddressBook) -> tuple[PeerId, PeerId, str] | None:
    owners: dict[str, PeerId] = {}
    for peer in sorted(addresses.templates):
        address = addresses.address_of(peer)
        if address is not None and owners.setdefault(address, peer) != peer:
            return owners[address], peer, address
    return None


def _template_problem(template: str) -> str | None:
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        return f"{template!r}: {error}"
    for _, name, spec, conversion in parts:
        if name is not None and (name not in FIELDS or spec or conversion):
            return f"unknown {{{name}}} in {template!r}; known: {', '.join(f'{{{field}}}' for field in FIELDS)}"
    if not any(_is_address(template, number, port) for number in (0, 1) for port in (1, LAST_PORT)):
        return f"{template!r} is not of the form {FORM}"
    return None


def _template(host: str) -> str:
    return host if "://" in host else join(host, "{port}")


def _without_brackets(host: str) -> str:
    return host.removeprefix("[").removesuffix("]")


def _peers_of(entry: str) -> range:
    first, _, last = entry.partition("-")
    return range(int(first), int(last or first) + 1)


def _fields(template: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(template) if name}
