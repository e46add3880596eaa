"""Checks before peers are started, for all backends. They find most problems before there is a run folder."""

from __future__ import annotations

import errno
import json
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from ipaddress import ip_address
from reprlib import repr as shortened
from typing import TYPE_CHECKING, Any

import psutil

from launcher.backends.limits import check_limits
from launcher.errors import LaunchError
from launcher.formatting.flat import flatten
from launcher.tracking.processes import check_trackers
from p2pfl import PeerId
from p2pfl.errors import KeysError
from p2pfl.run_file.addresses import IN_USE, AddressBook, is_ipv6, split
from p2pfl.run_folder.folder import RunFolder

if TYPE_CHECKING:
    from p2pfl.run_file.run import Run

MAX_CHANGES = 3
"""Most changed keys to name."""


def check_start(run: Run, peers: Sequence[PeerId], *, here: bool) -> None:
    """Check what starting ``peers`` needs. Raises RunFileError, LaunchError.

    Args:
        here: all of them run on this host, which must have the resources.
    """
    check_keys(run, peers)
    check_trackers(run)
    if here:
        from p2pfl.session.gpus import require_gpu

        check_limits(run, peers)
        require_gpu(run)
        check_ports(run, peers)


def check_addresses(run: Run, peers: Iterable[PeerId]) -> None:
    """Raise RunFileError if the run file assigns an address of another host to one of these peers."""
    transport = run.file.transport
    for peer, address in remote_peers(transport.book(run.peers), peers):
        problem = (
            f"peer {peer} has the address {address}, which is not on this host; start each peer on its own host "
            "with `p2pfl peer`, or run all of them here: --set transport.hosts={} --set transport.address=null"
        )
        raise run.error_at("transport.hosts" if transport.hosts else "transport.address", LaunchError(problem))


def remote_peers(book: AddressBook, peers: Iterable[PeerId]) -> Iterator[tuple[PeerId, str]]:
    """Yield the peers whose address is not an address of this host, or does not resolve, and the address."""
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


def check_unchanged(run: Run, folder: RunFolder) -> None:
    """Raise LaunchError if the run file in a run folder differs from the run file at the start of the run."""
    from p2pfl.run_folder.run_info import describe_run

    info, now = folder.info, describe_run(run, "")
    same_version = info.get("versions", {}).get("p2pfl-mesh") == now["versions"]["p2pfl-mesh"]  # others may add keys
    if same_version and info.get("config_hash", now["config_hash"]) != now["config_hash"]:
        changes = _changes(info.get("settings"), now["settings"])
        raise LaunchError(
            f"{folder.run_file}: changed since the run began{changes}, so its results would be those of two "
            "settings; undo the changes, or launch it as a new run"
        )


def _changes(before: dict[str, Any] | None, now: dict[str, Any]) -> str:
    """Name the first keys whose values differ, and both values; empty if they are unknown, or plug-ins differ."""
    if not before or not now:
        return ""
    old, new = dict(flatten(before)), dict(flatten(now))
    differ = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    named = [f"{key} was {shortened(old.get(key))}, is {shortened(new.get(key))}" for key in differ[:MAX_CHANGES]]
    if len(differ) > MAX_CHANGES:
        named.append(f"{len(differ) - MAX_CHANGES} more keys")
    return f" ({'; '.join(named)})" if named else ""


def check_complete(folder: RunFolder, peers: int) -> None:
    """Raise LaunchError if the folder of a launched run's peer is missing: the other peers would wait for it."""
    if "simulated" not in folder.info:  # of one peer that was started by hand, or of one host of several
        return
    present = {files.peer for files in folder.peers()}
    if missing := [str(folder.peer(peer).root) for peer in range(peers) if peer not in present]:
        anew = (
            "launch the run again" if folder.info["simulated"] else f"start from round 0: mkdir {' '.join(missing)}"
        )
        raise LaunchError(f"{', '.join(missing)}: missing, and the peer's checkpoint with it; restore it, or {anew}")


def check_ports(run: Run, peers: Iterable[PeerId]) -> None:
    """Raise RunFileError if one of these peers could not bind its address, e.g. because its port is in use.

    An interface, e.g. ``eth0``, is not checked.
    """
    transport = run.file.transport
    book = transport.book(run.peers)
    family = socket.AF_INET6 if is_ipv6(transport.host) else socket.AF_INET
    for peer in peers:
        port = book.bound_port(peer)
        try:
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as libzmq does
                probe.bind((transport.host.strip("[]"), port or 0))
        except OSError as error:
            if (problem := _bind_problem(error.errno, peer, port, transport.host)) is not None:
                raise run.error_at(problem[0], LaunchError(problem[1])) from None
        if port is None:  # the host is the same for all
            return


def _bind_problem(number: int | None, peer: PeerId, port: int | None, host: str) -> tuple[str, str] | None:
    """Return which key makes a bind fail with this errno, and why; None if libzmq may bind it."""
    if number == errno.EADDRINUSE:
        return "transport.port", f"port {port} of peer {peer} is in use; {IN_USE}"
    if number == errno.EACCES:
        return "transport.port", (
            f"port {port} of peer {peer} needs a privilege that this process does not have; choose 1024 or higher"
        )
    if number in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
        return "transport.host", f"{host} is not an address of this host; give one, or 0.0.0.0 for all of them"
    return None


def check_keys(run: Run, peers: Iterable[PeerId]) -> None:
    """Raise RunFileError if the keys that these peers need are missing or do not match."""
    from p2pfl.run_folder import key_files

    transport = run.file.transport
    if transport.keys is not None:
        try:
            public = key_files.check(transport.keys, run.peers, peers, transport.public_keys)
            # libzmq checks whether private and public keys match; the launcher does not import it.
            command = [sys.executable, "-P", "-m", "peers.keys", "--check", str(transport.keys), *map(str, peers)]
            stdin = json.dumps([key.hex() for key in public])
            done = subprocess.run(command, input=stdin, capture_output=True, text=True, errors="replace", check=False)
            if done.returncode:
                raise KeysError(done.stderr.strip().removeprefix("error: "))
        except KeysError as error:
            raise run.error_at("transport.keys", error) from None
