"""Network namespaces of this machine as hosts, connected by a simulated network or by a bridge of the kernel.

The host's own network is not touched. What an interrupted check leaves is removed by the next one.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import click

from benchmarks.switch import LinkConditions, Switch, tap

NETNS_FOLDERS = Path("/etc/netns")
"""`ip netns exec` mounts files of a namespace from here: its hosts file."""


class Unavailable(click.ClickException):
    """Network namespaces are not available on this host, or to this user."""

    exit_code = 77


def ip(*arguments: str) -> str:
    """Run `ip`; raise Unavailable if it fails."""
    try:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    except FileNotFoundError:
        raise Unavailable("command `ip` not found; install iproute2") from None
    if done.returncode:
        raise Unavailable(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def require() -> None:
    """Raise Unavailable unless this user can create network namespaces here."""
    if os.geteuid():
        raise Unavailable("only root can create network namespaces")
    with ExitStack() as stack:
        _namespace("trial", stack)


@contextmanager
def network(
    count: int, addresses: Callable[[int], list[str]], conditions: LinkConditions | None, seed: int = 0
) -> Iterator[tuple[list[str], Switch | None]]:
    """Create so many namespaces with a device ``eth0`` each, and connect them.

    Args:
        addresses: of the namespace with that number, with the lengths of their prefixes.
        conditions: of the switch; None: a bridge of the kernel, which neither delays nor loses frames.

    Yields:
        The names of the namespaces, and the switch.
    """
    remove_leftovers()
    with ExitStack() as stack:
        bridge = _namespace("bridge", stack) if conditions is None else ""
        if bridge:
            ip("-n", bridge, "link", "add", "bridge", "up", "type", "bridge")
        names, ports = [], []
        for number in range(count):
            name = _namespace(str(number), stack)
            if bridge:
                plug_into_bridge(name, bridge, f"port{number}")
            else:
                ports.append(_switch_port(name, stack))
            set_up(name, addresses(number))
            names.append(name)
        yield names, None if conditions is None else stack.enter_context(Switch(ports, conditions, seed))


def _namespace(suffix: str, stack: ExitStack) -> str:
    name = f"p2pfl-{os.getpid()}-{suffix}"
    ip("netns", "add", name)
    stack.callback(remove, name)
    return name


def plug_into_bridge(name: str, bridge: str, port: str) -> None:
    """Connect a namespace with the bridge in another one. The devices disappear with either of them."""
    ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", bridge)
    ip("-n", bridge, "link", "set", port, "up", "master", "bridge")


def _switch_port(name: str, stack: ExitStack) -> int:
    """Give the namespace a device; return the descriptor at its other end."""
    try:
        device, port = tap()
    except OSError as error:
        raise Unavailable(f"no TAP device: /dev/net/tun: {error.strerror}") from None
    stack.callback(os.close, port)
    ip("link", "set", device, "netns", name, "name", "eth0")
    return port


def set_up(name: str, addresses: list[str]) -> None:
    """Give the device of a namespace its addresses, and turn it on."""
    ip("-n", name, "link", "set", "lo", "up")
    for address in addresses:
        ip("-n", name, "addr", "add", address, "dev", "eth0", *(["nodad"] if ":" in address else []))
    ip("-n", name, "link", "set", "eth0", "up")


def processes(name: str) -> list[int]:
    """Return the ids of all processes in a namespace."""
    return [int(pid) for pid in ip("netns", "pids", name).split()]


def remove(name: str) -> None:
    """Remove a namespace and kill the processes in it."""
    for pid in processes(name):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    ip("netns", "del", name)
    shutil.rmtree(NETNS_FOLDERS / name, ignore_errors=True)
    with suppress(OSError):  # not empty: other runs use it
        NETNS_FOLDERS.rmdir()


def remove_leftovers() -> None:
    """Remove the namespaces of checks that were killed."""
    for line in ip("netns", "list").splitlines():
        ours = re.match(r"p2pfl-(\d+)-\w+", line)
        if ours and not Path("/proc", ours[1]).exists():
            remove(ours[0])
