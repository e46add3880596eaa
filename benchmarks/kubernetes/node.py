"""A node: Linux namespaces in which all of the cluster runs, so that ending one process ends all of it.

Killing process 1 of the PID namespace kills every process in it, and with the last process the kernel removes the
mounts, network interfaces and firewall rules of the other namespaces. Only control groups are outside: they are
removed by path. The host's /run, logs and kernel parameters stay untouched, because others are mounted over them.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic

import click

from benchmarks.scenarios import start, tail, uninterrupted

ADDRESS, PODS, BRIDGE = "10.244.0.1", "10.244.0.0/24", "cni0"
"""The node's address, which is the gateway of its pods."""
CGROUPS = Path("/sys/fs/cgroup")
CGROUP = "p2pfl-k8s-{}"
"""Parent of all control groups of the pods; with the process id of this check."""
HIDDEN = ("/run", "/var/lib", "/var/log")
"""Folders that the cluster's programs write to; empty ones are mounted over them."""
PARAMETERS = (
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)
"""Kernel parameters that the kubelet sets. They belong to the whole machine: files are mounted over them."""
SET_UP = """
for folder in {hidden}; do mount -t tmpfs tmpfs "$folder"; done
mkdir /run/parameters
for name in {parameters}; do
    [ -e "/proc/sys/$name" ] || continue
    copy="/run/parameters/$(echo "$name" | tr / -)"
    cat "/proc/sys/$name" > "$copy"
    mount --bind "$copy" "/proc/sys/$name"
done
ip link set lo up
ip link add {bridge} type bridge
ip address add {address}/24 dev {bridge}
ip link set {bridge} up
echo 1 > /proc/sys/net/ipv4/ip_forward
touch /run/node-is-ready
exec catatonit -P
"""
ENDS_WITHIN = 30.0
"""Seconds after which killed processes and their control groups must be gone."""


class Node:
    """The namespaces of a node, held by a process 1 that only reaps processes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.cgroup = CGROUP.format(os.getpid())
        self.logs = root / "logs"
        self.logs.mkdir()
        self._holder: subprocess.Popen[bytes] | None = None
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        remove_cgroups_of_killed()
        for hierarchy in hierarchies():
            (hierarchy / self.cgroup).mkdir()
            _give_cpus(hierarchy / self.cgroup)
        script = SET_UP.format(
            hidden=" ".join(HIDDEN), parameters=" ".join(PARAMETERS), bridge=BRIDGE, address=ADDRESS
        )
        # If this check is killed, the kernel kills `unshare`, and then process 1.
        namespaces = ["--mount", "--net", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
        unshare = ["setpriv", "--pdeathsig", "KILL", "unshare", *namespaces, "sh", "-euc", script]
        self._holder = start(unshare, self.logs / "node.log", self.root)

    def is_ready(self) -> bool:
        self.check()
        with suppress(OSError, IndexError):
            return Path(f"/proc/{self._first()}/root/run/node-is-ready").exists()
        return False

    def _first(self) -> int:
        """Return process 1 of the node, as the host numbers it."""
        assert self._holder is not None
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text()
        return int(children.split()[0])

    def inside(self, *command: object) -> list[str]:
        """Return a command that runs as on this node, in its root folder."""
        namespaces = ["--mount", "--net", "--uts", "--ipc", "--pid"]
        return ["nsenter", f"--target={self._first()}", *namespaces, "--", *map(str, command)]

    def daemon(self, name: str, *command: object) -> None:
        """Start a program that runs until the node ends; its output goes to ``logs``."""
        self._daemons[name] = start(self.inside(*command), self.logs / f"{name}.log", self.root)

    def stop(self, name: str) -> None:
        """Ask a daemon to end, and wait for it."""
        process = self._daemons.pop(name)
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            os.kill(int(child), signal.SIGTERM)  # nsenter itself does not forward signals
        process.wait(ENDS_WITHIN)

    def check(self) -> None:
        """Raise click.ClickException if one of the node's programs has ended."""
        for name, process in {"node": self._holder, **self._daemons}.items():
            if process is not None and process.poll() is not None:
                raise click.ClickException(
                    f"{name} ended with exit code {process.returncode}:\n{tail(self.logs / f'{name}.log', 15)}"
                )

    def end(self) -> None:
        """Kill everything on the node and remove its control groups. Raises click.ClickException if some are left."""
        if self._holder is not None:
            with suppress(OSError, IndexError):
                os.kill(self._first(), signal.SIGKILL)
            self._holder.kill()  # if it was still starting
            self._holder.wait(ENDS_WITHIN)
        for process in self._daemons.values():
            process.wait(ENDS_WITHIN)  # nsenter, whose child is dead
        remove_cgroups(self.cgroup)


@contextmanager
def node(root: Path) -> Iterator[Node]:
    """Hold a node, and remove it wholly afterwards."""
    held = Node(root)
    try:
        held.start()
        yield held
    finally:
        with uninterrupted():
            held.end()


# ---- control groups ----------------------------------------------------------------------------------------------


def hierarchies(root: Path = CGROUPS) -> list[Path]:
    """Return the hierarchies of control groups: one in version 2, otherwise one per controller, and `unified`."""
    if (root / "cgroup.controllers").exists():
        return [root]
    return sorted({path.resolve() for path in root.iterdir() if path.is_dir()})


def _give_cpus(group: Path) -> None:
    """Let the group's processes run on all CPUs, with the weight of ten processes instead of one."""
    for name, weight in (("cpu.shares", 10 * 1024), ("cpu.weight", 10 * 100)):
        if (group / name).exists():
            (group / name).write_text(str(weight))
    # Version 1: a new cpuset has no CPU, and accepts no process, until it is given some.
    for name in ("cpuset.cpus", "cpuset.mems"):
        if (group / name).exists():
            (group / name).write_text((group.parent / name).read_text())


def remove_cgroups(name: str, root: Path = CGROUPS) -> None:
    """Remove the control groups below ``name``. Raises click.ClickException if a process holds one."""
    deadline = monotonic() + ENDS_WITHIN
    while left := [path for hierarchy in hierarchies(root) if (path := hierarchy / name).exists()]:
        for top in left:
            for group, _, _ in os.walk(top, topdown=False):
                with suppress(OSError):  # a killed process has not ended yet
                    Path(group).rmdir()
        if monotonic() > deadline:
            raise click.ClickException(f"control groups are left: {', '.join(map(str, left))}")
        time.sleep(0.05)


def remove_cgroups_of_killed(root: Path = CGROUPS) -> None:
    """Remove the control groups of killed checks, whose processes no longer exist."""
    names = {path.name for hierarchy in hierarchies(root) for path in hierarchy.iterdir()}
    for name in names:
        found = re.fullmatch(CGROUP.format("([0-9]+)"), name)
        if found and not Path(f"/proc/{found[1]}").exists():
            remove_cgroups(name, root)
