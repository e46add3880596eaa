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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import click
import yaml

from benchmarks.containers import uninterrupted
from benchmarks.hosts import Unavailable, ip
from benchmarks.scenarios import COMMAND, NotInstalled, command, compared, rounds_done, wait
from p2pfl.run_folder.folder import RunFolder

NODES, PEERS, ROUNDS = 3, 20, 24
BRIDGE, NETWORK, PORT = "p2pflray", "198.51.100.{}", 6379
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
    """A node of the cluster in namespaces of its own."""

    number: int
    root: Path
    process: subprocess.Popen[bytes] | None = None
    namespace: str = field(init=False)

    def __post_init__(self) -> None:
        self.namespace = f"p2pflray-{os.getpid()}-{self.number}"

    @property
    def address(self) -> str:
        return NETWORK.format(10 + self.number)

    @property
    def device(self) -> str:
        """The end of its network device that is outside."""
        return f"pr{os.getpid()}-{self.number}"  # 15 characters at most

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
        with (self.root / f"node-{self.number}.log").open("wb") as log:
            self.process = subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, *command, f"{self.root}/disk", *ray],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=environment,
            )  # fmt: skip

    def inside(self, *command: str) -> list[str]:
        """Return a command that runs as on this node."""
        assert self.process is not None
        return ["nsenter", f"--target={self.process.pid}", "--mount", "--net", "--uts", "--", *command]

    def processes(self) -> list[int]:
        return [int(pid) for pid in ip("netns", "pids", self.namespace).split()]

    def kill(self) -> None:
        """Kill everything on the node, and lose its disk, which was in memory."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.process is not None:
            self.process.wait()


class Cluster:
    """A Ray cluster on this machine."""

    def __init__(self, root: Path) -> None:
        self.root = root
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

    def add(self) -> Node:
        """Start another node, and wait until it is part of the cluster."""
        node = Node(len(self.nodes), self.root)
        self.nodes.append(node)
        ip("netns", "add", node.namespace)
        ip("link", "add", node.device, "type", "veth", "peer", "name", "eth0", "netns", node.namespace)
        ip("link", "set", node.device, "master", BRIDGE, "up")
        ip("-n", node.namespace, "addr", "add", f"{node.address}/24", "dev", "eth0")
        for name in ("lo", "eth0"):
            ip("-n", node.namespace, "link", "set", name, "up")
        node.start(self.environment)
        log = self.root / f"node-{node.number}.log"
        wait(f"Ray on node {node.number}: {log}", lambda: self._has_started(node, log), START_LIMIT)
        return node

    def _has_started(self, node: Node, log: Path) -> bool:
        assert node.process is not None
        if node.process.poll() is not None:
            raise click.ClickException(f"Ray ended on node {node.number}:\n{log.read_text()[-2000:]}")
        return "--block" in log.read_text()

    def launcher(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a `p2pfl` command on the head node."""
        return subprocess.Popen(
            self.nodes[0].inside(*COMMAND, *arguments),
            cwd=self.root, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True, env=self.environment,
        )  # fmt: skip

    def reserved(self) -> float:
        """Return how many CPUs are in use or reserved."""
        done = subprocess.run(
            self.nodes[0].inside(sys.executable, "-c", RESERVED, f"{NETWORK.format(10)}:{PORT}"),
            capture_output=True, text=True, env=self.environment,
        )  # fmt: skip
        if done.returncode:
            raise click.ClickException(done.stderr[-2000:])
        return float(done.stdout.split()[-1])


@contextmanager
def cluster(root: Path, nodes: int) -> Iterator[Cluster]:
    """Start a cluster with its files in a new folder, and end all of it afterwards."""
    root.mkdir()
    with ExitStack() as stack:
        stack.enter_context(_bridge())
        started = Cluster(root)
        stack.callback(_remove, started)
        for _ in range(nodes):
            started.add()
        yield started


@contextmanager
def _bridge() -> Iterator[None]:
    with suppress(Unavailable):
        ip("link", "del", BRIDGE)  # of a run that was killed
    ip("link", "add", BRIDGE, "type", "bridge")
    try:
        ip("link", "set", BRIDGE, "up")
        yield
    finally:
        ip("link", "del", BRIDGE)


def _remove(started: Cluster) -> None:
    with uninterrupted():
        for node in reversed(started.nodes):
            with suppress(Unavailable):
                node.kill()
            with suppress(Unavailable):  # with the namespace, it would disappear only later
                ip("link", "del", node.device)
            with suppress(Unavailable):
                ip("netns", "del", node.namespace)


# ---- scenarios --------------------------------------------------------------------------------------------------


def launch(started: Cluster, *options: str) -> tuple[subprocess.Popen[str], RunFolder]:
    """Launch the run on the cluster; the run folder is on the head node's disk."""
    process = started.launcher(
        "launch", str(started.run_file), "--backend", "ray", "--run-dir", str(started.folder), *options
    )
    assert started.nodes[0].process is not None
    return process, RunFolder(Path(f"/proc/{started.nodes[0].process.pid}/root{started.folder}"))


def progress(folder: RunFolder) -> list[int]:
    """Return the completed rounds of each peer, as the launcher knows them."""
    statuses = [folder.peer(peer).status() for peer in range(PEERS)]
    return [0 if status is None else status.rounds_done for status in statuses]


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for a command; return its output. Raises Failed."""
    try:
        output, _ = process.communicate(timeout=RUN_LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        raise click.ClickException(f"not finished within {RUN_LIMIT:g} s:\n{output[-4000:]}") from None
    if process.returncode:
        raise click.ClickException(f"exit code {process.returncode}:\n{output[-4000:]}")
    return output


def collect(started: Cluster) -> None:
    """Copy the results from the head node's disk; raise click.ClickException if messages are missing."""
    folder = started.root / "collected"
    finish(started.launcher("collect", str(folder), str(started.folder)))
    found = [RunFolder(folder).peer(peer).result() for peer in range(PEERS)]
    incomplete = [
        peer for peer, result in enumerate(found) if result is None or result.missing or result.skipped_rounds
    ]
    if incomplete:
        raise click.ClickException(f"messages or results are missing: peers {incomplete}")


def middle(process: subprocess.Popen[str], folder: RunFolder) -> None:
    """Wait until every peer has done a third of its rounds."""

    def reached() -> bool:
        if process.poll() is not None:
            raise click.ClickException(f"ended early:\n{finish(process)[-4000:]}")
        return rounds_done(folder) >= ROUNDS // 3

    wait("a third of the rounds", reached, RUN_LIMIT)


def calm(started: Cluster) -> str:
    process, _ = launch(started)
    finish(process)
    return "no fault"


def died(started: Cluster) -> str:
    process, folder = launch(started, "--option", f"hosts={NODES}")
    middle(process, folder)
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
        if process.poll() is not None:
            raise click.ClickException(f"ended early:\n{finish(process)[-4000:]}")
        now = progress(folder)
        return all(now[peer] > at[peer] or now[peer] == ROUNDS for peer in peers)

    took = wait("the peers of the node are further than before", back, RUN_LIMIT)
    output = finish(process)
    if "has died; starting it again" not in output:
        raise click.ClickException(f"the launcher did not report the death of the node:\n{output[-4000:]}")
    rounds = sorted(at[peer] for peer in peers)
    return f"{len(peers)} peers killed after {rounds[0]} to {rounds[-1]} rounds, ahead again after {took:.0f} s"


def orphaned(started: Cluster) -> str:
    process, folder = launch(started)
    middle(process, folder)
    at = rounds_done(folder)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    finish(started.launcher("resume", str(started.folder)))
    wait("all CPUs are free again", lambda: started.reserved() == 0)
    return f"launcher killed after {at} rounds, resumed; nothing is reserved any more"


def refused(started: Cluster) -> str:
    longest = 0.0
    for options in (["gpus=0.5"], ["memory=500GB"], ["cpus=1"], ["hosts=9"], ["address=198.51.100.99:6379"]):
        began = monotonic()
        given = [part for option in options for part in ("--option", option)]
        device = ["--set", "device=auto"] if options[0].startswith("gpus") else []
        process, _ = launch(started, *given, *device)
        output, _ = process.communicate(timeout=RUN_LIMIT)
        if process.returncode == 0 or "Traceback" in output or "Ray cluster" not in output:
            raise click.ClickException(f"--option {options[0]}: exit code {process.returncode}:\n{output}")
        longest = max(longest, monotonic() - began)
        click.echo(f"--option {options[0]}: {output.strip().splitlines()[-1]}", err=True)
    return f"five requests refused, each within {longest:.0f} s"


def on_cluster(scenario: Callable[[Cluster], str], name: str, nodes: int, root: Path) -> str:
    """Run a scenario on a cluster of its own."""
    with cluster(root / name, nodes) as started:
        did = scenario(started)
        if name != "refused":
            collect(started)
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
    if os.geteuid():
        raise Unavailable("only root can create network namespaces")
    trial = f"p2pfl-trial-{os.getpid()}"
    ip("netns", "add", trial)
    ip("netns", "del", trial)
    (root / "ray20.yaml").write_text(yaml.safe_dump(RUN))
    yield root


def same(root: Path, name: str) -> bool | None:
    return None if name == "refused" else compared(root / "ray20.yaml", RunFolder(root / name / "collected"))


main = command(SCENARIOS, requirements, same, __doc__, "p2pfl-ray-")

if __name__ == "__main__":
    main()
