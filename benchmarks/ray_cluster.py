"""Run twenty peers on a Ray cluster of three nodes on this machine, with faults and without.

    sudo python -m benchmarks.ray_cluster               # or scripts/check-ray
    sudo python -m benchmarks.ray_cluster died --keep /tmp/ray

    calm          no fault
    died          a node is killed in the middle of the run, with all its files; a fourth takes its place
    crowded       the same without a fourth: the peers share the reserved CPUs of the nodes that are left
    orphaned      the launcher is killed, and the run followed by `p2pfl resume`
    refused       more is asked for than there is: GPUs, memory, CPUs, a cluster that does not exist

Each node has its own network namespace, address, host name and disk; the nodes share nothing but a folder for copies
of checkpoints. Each run must end with the digests of `p2pfl simulate`. Prints a Markdown table. Exit code 1: a
scenario failed; 3: Ray is not installed; 77: network namespaces are not available, nothing was checked.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import click
import yaml

from benchmarks import namespaces
from benchmarks.scenarios import (
    COMMAND,
    NotInstalled,
    check_messages,
    command,
    compared,
    finish,
    rounds_done,
    run,
    start,
    tail,
    uninterrupted,
    wait,
)
from p2pfl.run_folder.folder import RunFolder

NODES, PEERS, ROUNDS = 3, 20, 24
NETWORK, PORT = "198.51.100.{}", 6379
"""From a network reserved for documentation."""
CPUS = 2
"""Of each node, as Ray counts them."""
OBJECTS = 80_000_000
"""Bytes of a node's object store; the least that Ray accepts is 78,643,200."""
RESERVED = """
import sys, ray
ray.init(sys.argv[1], logging_level="error")
print(ray.cluster_resources()["CPU"] - ray.available_resources().get("CPU", 0.0))
"""
START_LIMIT, RUN_LIMIT = 240.0, 900.0

RUN: dict[str, Any] = {
    "name": "ray20",
    "seed": 0,
    "rounds": ROUNDS,
    "peers": PEERS,
    "graph": {"name": "regular", "degree": 4},
    "data": {
        "dataset": "digits",
        "partition": {"name": "clusters", "clusters": 2, "per_class": 5, "test_per_class": 10},
    },
    "models": "tiny4",
    "algorithm": {"name": "mapl", "warmup": 4, "lr": 0.001, "projector_hidden": 64},
    "device": "cpu",
    "eval_every": 4,
    "checkpoint_every": 2,
    "transport": {"give_up": 600, "deadline": 900},
    "chaos": {"link": {"delay": 0.5}},  # at least a second for each round, to have time for a fault
}


@dataclass
class Node:
    """A node of the cluster in namespaces of its own. ``namespace``: its network namespace."""

    number: int
    root: Path
    namespace: str
    process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return NETWORK.format(10 + self.number)

    @property
    def log(self) -> Path:
        return self.root / f"node-{self.number}.log"

    def start(self, environment: dict[str, str]) -> None:
        """Start Ray, on a disk of the node's own at ``root/disk``."""
        join = ["--head", "--port", str(PORT), "--include-dashboard=false", f"--temp-dir={self.root}/disk"]
        if self.number:
            join = [f"--address={NETWORK.format(10)}:{PORT}"]
        ray = [
            str(Path(sys.executable).with_name("ray")), "start", *join, f"--node-ip-address={self.address}",
            f"--num-cpus={CPUS}", f"--object-store-memory={OBJECTS}", "--disable-usage-stats", "--block",
        ]  # fmt: skip
        script = 'hostname "$1"; mount -t tmpfs -o size=2g tmpfs "$2"; shift 2; exec "$@"'
        command = ["unshare", "--mount", "--uts", "sh", "-ec", script, "node", f"node-{self.number}"]
        everything = ["ip", "netns", "exec", self.namespace, *command, f"{self.root}/disk", *ray]
        self.process = start(everything, self.log, self.root, environment)

    def inside(self, *command: str) -> list[str]:
        """Return a command that runs as on this node."""
        assert self.process is not None
        return ["nsenter", f"--target={self.process.pid}", "--mount", "--net", "--uts", "--", *command]

    def kill(self) -> None:
        """Kill everything on the node, and lose its disk, which was in memory."""
        for pid in namespaces.processes(self.namespace):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.process is not None:
            self.process.wait()


class Cluster:
    """A Ray cluster on this machine."""

    def __init__(self, root: Path, names: Sequence[str]) -> None:
        self.root = root
        self._names = names
        self.nodes: list[Node] = []
        self.folder = root / "disk" / "run"
        """The run folder, on the disk of the head node."""
        self.run_file = root / "ray20.yaml"
        copies = root / "copies"  # outside of the nodes' disks
        self.run_file.write_text(yaml.safe_dump({**RUN, "checkpoint_copies": str(copies)}))
        (root / "disk").mkdir()
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parent.parent),
            "RAY_DISABLE_IMPORT_WARNING": "1",
            "RAY_raylet_start_wait_time_s": str(int(START_LIMIT)),  # on a busy machine
        }

    def add(self) -> None:
        """Start another node, and wait until it is part of the cluster."""
        node = Node(len(self.nodes), self.root, self._names[len(self.nodes)])
        self.nodes.append(node)
        node.start(self.environment)
        wait(f"Ray on node {node.number}: {node.log}", lambda: self._has_started(node), START_LIMIT)

    def _has_started(self, node: Node) -> bool:
        assert node.process is not None
        if node.process.poll() is not None:
            raise click.ClickException(f"Ray ended on node {node.number}:\n{tail(node.log)}")
        return "--block" in node.log.read_text()

    @property
    def log(self) -> Path:
        """The output of the p2pfl commands."""
        return self.root / "p2pfl.log"

    def launcher(self, *arguments: object) -> subprocess.Popen[bytes]:
        """Start a `p2pfl` command on the head node."""
        return start(self.nodes[0].inside(*COMMAND, *map(str, arguments)), self.log, self.root, self.environment)

    def finish(self, process: subprocess.Popen[bytes]) -> str:
        return finish(process, self.log, RUN_LIMIT)

    def reserved(self) -> float:
        """Return how many CPUs are in use or reserved."""
        asked = self.nodes[0].inside(sys.executable, "-c", RESERVED, f"{NETWORK.format(10)}:{PORT}")
        return float(run(*asked, env=self.environment).split()[-1])


@contextmanager
def cluster(root: Path, nodes: int) -> Iterator[Cluster]:
    """Start a cluster with its files in a new folder, and end all of it afterwards."""
    root.mkdir()

    def addresses(number: int) -> list[str]:
        return [f"{NETWORK.format(10 + number)}/24"]

    with namespaces.network(nodes, addresses, None) as (names, _):
        started = Cluster(root, names)
        try:
            for _ in range(nodes):
                started.add()
            yield started
        finally:
            with uninterrupted():
                for node in reversed(started.nodes):
                    node.kill()


# ---- scenarios --------------------------------------------------------------------------------------------------


def launch(started: Cluster, *options: str) -> tuple[subprocess.Popen[bytes], RunFolder]:
    """Launch the run on the cluster; the run folder is on the head node's disk."""
    arguments = ["launch", started.run_file, "--backend", "ray", "--run-dir", started.folder]
    process = started.launcher(*arguments, *options)
    assert started.nodes[0].process is not None
    return process, RunFolder(Path(f"/proc/{started.nodes[0].process.pid}/root{started.folder}"))


def progress(folder: RunFolder) -> list[int]:
    """Return the completed rounds of each peer, as the launcher knows them."""
    statuses = [folder.peer(peer).status() for peer in range(PEERS)]
    return [0 if status is None else status.rounds_done for status in statuses]


def wait_for(started: Cluster, process: subprocess.Popen[bytes], what: str, reached: Callable[[], bool]) -> float:
    """Wait for an event in a run. Raises click.ClickException if the run ends before."""

    def checked() -> bool:
        if process.poll() is not None:
            raise click.ClickException(f"ended early:\n{tail(started.log)}")
        return reached()

    return wait(what, checked, RUN_LIMIT)


def middle(started: Cluster, process: subprocess.Popen[bytes], folder: RunFolder) -> None:
    """Wait until every peer has done a third of its rounds."""
    wait_for(started, process, "a third of the rounds", lambda: rounds_done(folder) >= ROUNDS // 3)


def calm(started: Cluster) -> str:
    process, _ = launch(started)
    started.finish(process)
    return "no fault"


def died(started: Cluster) -> str:
    process, folder = launch(started, "--option", f"hosts={NODES}")
    middle(started, process, folder)
    hosts = folder.info["hosts"]
    addresses = {node.address: node for node in started.nodes[1:]}  # not the head, where the launcher is
    bundle, victim = next(
        (number, addresses[address])
        for number, address in enumerate(hosts["options"]["nodes"])
        if address in addresses
    )
    peers = hosts["hosts"][bundle]["peers"]
    at = progress(folder)
    victim.kill()

    def back() -> bool:
        now = progress(folder)
        return all(now[peer] > at[peer] or now[peer] == ROUNDS for peer in peers)

    took = wait_for(started, process, "the peers of the node are further than before", back)
    output = started.finish(process)
    if "has died; starting it again" not in output:
        raise click.ClickException(f"the launcher did not report the death of the node:\n{tail(started.log)}")
    rounds = sorted(at[peer] for peer in peers)
    return f"{len(peers)} peers killed after {rounds[0]} to {rounds[-1]} rounds, ahead again after {took:.0f} s"


def orphaned(started: Cluster) -> str:
    process, folder = launch(started)
    middle(started, process, folder)
    at = rounds_done(folder)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    started.finish(started.launcher("resume", started.folder))
    wait("all CPUs are free again", lambda: started.reserved() == 0)
    return f"launcher killed after {at} rounds, resumed; nothing is reserved any more"


def refused(started: Cluster) -> str:
    longest = 0.0
    for option in ("gpus=0.5", "memory=500GB", "cpus=1", "hosts=9", "address=198.51.100.99:6379"):
        began = monotonic()
        started.log.unlink(missing_ok=True)
        device = ["--set", "device=auto"] if option.startswith("gpus") else []
        process, _ = launch(started, "--option", option, *device)
        code, output = process.wait(RUN_LIMIT), started.log.read_text()
        if code == 0 or "Traceback" in output or "Ray cluster" not in output:
            raise click.ClickException(f"--option {option}: exit code {code}:\n{output}")
        longest = max(longest, monotonic() - began)
        click.echo(f"--option {option}: {output.strip().splitlines()[-1]}", err=True)
    return f"five requests refused, each within {longest:.0f} s"


def on_cluster(scenario: Callable[[Cluster], str], name: str, nodes: int, root: Path) -> str:
    """Run a scenario on a cluster of its own."""
    with cluster(root / name, nodes) as started:
        did = scenario(started)
        if name != "refused":
            folder = started.root / "collected"
            started.finish(started.launcher("collect", folder, started.folder))
            check_messages(RunFolder(folder))
    return did


SCENARIOS = {
    "calm": partial(on_cluster, calm, "calm", NODES),
    "died": partial(on_cluster, died, "died", NODES + 1),
    "crowded": partial(on_cluster, died, "crowded", NODES),
    "orphaned": partial(on_cluster, orphaned, "orphaned", NODES),
    "refused": partial(on_cluster, refused, "refused", NODES),
}


@contextmanager
def requirements(root: Path) -> Iterator[Path]:
    """Raise Unavailable if Ray or the right to create network namespaces is absent."""
    if importlib.util.find_spec("ray") is None:
        raise NotInstalled("Ray is not installed: pip install 'p2pfl-mesh[ray]'")
    namespaces.require()
    (root / "ray20.yaml").write_text(yaml.safe_dump(RUN))
    yield root


def same(root: Path, name: str) -> bool | None:
    return None if name == "refused" else compared(root / "ray20.yaml", RunFolder(root / name / "collected"))


main = command(SCENARIOS, requirements, same, __doc__, "p2pfl-ray-")

if __name__ == "__main__":
    main()
