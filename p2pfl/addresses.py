"""Where peers are reached, as far as the run file and the environment say it before any of them is up.

    transport:
      host: 0.0.0.0                         # what each peer binds
      port: 5700                            # peer i binds port 5700 + i
      address: tcp://peer-{id}:{port}       # where the others connect
      hosts:                                # for these peers instead
        0-9: alpha.example.org              # tcp://alpha.example.org:{port}
        10: "fd00::2"
        11: tcp://203.0.113.7:9000          # behind a router that forwards this port

A template may name ``{id}``, ``{port}`` (that the peer has bound) and ``{hostname}`` (of the host that it runs on).
What others cannot work out, because only the peer itself knows its port or its host, it writes into the run folder.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from string import Formatter

from p2pfl.runfolder import PeerId

LAST_PORT = 65535
FIELDS = ("id", "port", "hostname")
_ADDRESS = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.]+(%\w+)?\]|[^\s:/\[\]]+):(?P<port>\d{1,5})")


@dataclass(frozen=True)
class AddressBook:
    """The address templates of all peers.

    Args:
        templates: by peer; those that are not in it are reached where they bind.
        port: peer i binds ``port`` + i; None: whatever the system gives it.
    """

    templates: Mapping[PeerId, str]
    port: int | None = None

    def bound_port(self, peer: PeerId) -> int | None:
        return None if self.port is None else self.port + peer

    def address_of(self, peer: PeerId) -> str | None:
        """Where to connect to a peer; None if only the peer itself knows."""
        template = self.templates.get(peer)
        if template is None or "hostname" in _fields(template):
            return None
        port = self.bound_port(peer)
        return None if port is None and "port" in _fields(template) else template.format(id=peer, port=port)

    def advertised(self, me: PeerId, bound: str) -> str:
        """What peer ``me``, which has bound ``tcp://…:port``, tells the others."""
        port = bound.rpartition(":")[2]
        template = self.templates.get(me)
        return bound if template is None else template.format(id=me, port=port, hostname=socket.gethostname())


def book(peers: int, port: int | None, address: str | None, hosts: Mapping[str, str]) -> AddressBook:
    """The book of a run file in which ``problems`` has found nothing."""
    templates = {} if address is None else dict.fromkeys(range(peers), address)
    for entry in sorted(hosts, key=lambda entry: "-" not in entry):  # one peer's own entry goes before a range
        templates.update(dict.fromkeys(_peers_of(entry), _template(hosts[entry])))
    return AddressBook(templates, port)


def split(address: str) -> tuple[str, int]:
    """Host, without the brackets of IPv6, and port of ``tcp://host:port``. Raises ValueError."""
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match["port"]) <= LAST_PORT:
        raise ValueError(f"{address!r} is not of the form tcp://host:port")
    return _bare(match["host"]), int(match["port"])


def join(host: str, port: int | str) -> str:
    return f"tcp://{f'[{_bare(host)}]' if is_ipv6(host) else host}:{port}"


def is_ipv6(host: str) -> bool:
    """Whether it is a number of IPv6, with its brackets or without."""
    try:
        return isinstance(ip_address(_bare(host)), IPv6Address)
    except ValueError:
        return False


def problems(
    peers: int, port: int | None, address: str | None, hosts: Mapping[str, str]
) -> Iterator[tuple[tuple[str, ...], str]]:
    """What is wrong with these keys of ``transport``: the key, and the problem."""
    if port is not None and port + peers - 1 > LAST_PORT:
        yield ("port",), f"peer {peers - 1} would bind port {port + peers - 1}; ports end at {LAST_PORT}"
        return
    templates: dict[tuple[str, ...], str] = {} if address is None else {("address",): address}
    templates |= {("hosts", entry): _template(host) for entry, host in hosts.items()}
    wrong = {key: problem for key, template in templates.items() if (problem := _problem_with(template))}
    wrong |= {("hosts", entry): problem for entry, problem in _wrong_entries(list(hosts), peers)}
    yield from wrong.items()
    if not wrong and (twice := _address_given_twice(book(peers, port, address, hosts))):
        one, other, shared = twice
        key = "hosts" if hosts else "address"
        yield (key,), f"peers {one} and {other} would both be at {shared}; name {{port}} or {{id}} in it"


def _wrong_entries(entries: list[str], peers: int) -> Iterator[tuple[str, str]]:
    ranges: list[str] = []
    for entry in entries:
        if not re.fullmatch(r"\d{1,9}(-\d{1,9})?", entry):
            yield entry, "should be a peer, e.g. 3, or a range of peers, e.g. 0-9"
        elif not (named := _peers_of(entry)):
            yield entry, "the range ends before it begins"
        elif named[-1] >= peers:
            yield entry, f"no peer {named[-1]}; the {peers} peers are 0 to {peers - 1}"
        elif "-" in entry:
            overlapping = [other for other in ranges if set(named) & set(_peers_of(other))]
            if overlapping:
                yield entry, f"overlaps {overlapping[0]}"
            ranges.append(entry)


def _address_given_twice(known: AddressBook) -> tuple[PeerId, PeerId, str] | None:
    owners: dict[str, PeerId] = {}
    for peer in sorted(known.templates):
        address = known.address_of(peer)
        if address is not None and owners.setdefault(address, peer) != peer:
            return owners[address], peer, address
    return None


def _problem_with(template: str) -> str | None:
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        return f"{template!r}: {error}"
    for _, name, spec, conversion in parts:
        if name is not None and (name not in FIELDS or spec or conversion):
            return f"{{{name}}} in {template!r} is not known; known: {', '.join(f'{{{one}}}' for one in FIELDS)}"
    try:
        split(template.format(id=0, port=LAST_PORT, hostname="host"))
    except ValueError:
        return f"{template!r} is not of the form tcp://host:port, e.g. tcp://peer-{{id}}:{{port}}"
    return None


def _template(host: str) -> str:
    return host if "://" in host else join(host, "{port}")


def _bare(host: str) -> str:
    return host.removeprefix("[").removesuffix("]")


def _peers_of(entry: str) -> range:
    first, _, last = entry.partition("-")
    return range(int(first), int(last or first) + 1)


def _fields(template: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(template) if name}


__all__ = ["LAST_PORT", "AddressBook", "book", "is_ipv6", "join", "problems", "split"]
