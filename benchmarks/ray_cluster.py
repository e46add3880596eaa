"""Run twenty peers on a Ray cluster of three nodes on this machine, with faults and without.

    scripts/check-ray                    # all trials: five to ten minutes
    scripts/check-ray died               # one trial

    calm       no fault
    died       a node is killed in the middle of the run, with all its files; a fourth takes its place
    crowded    the same without a fourth: the peers share the reserved CPUs of the nodes that are left
    orphaned   the launcher is killed, and the run followed by `p2pfl resume`
    refused    more is asked for than there is: GPUs, memory, CPUs, a cluster that does not exist

Each node has its own network namespace, address, host name and disk; the nodes share nothing but a folder for copies
of checkpoints. Final states are compared with those of `p2pfl simulate`. Requires root.

Exit codes: 0 all trials passed, 1 one failed, 3 Ray is not installed, 77 no network namespaces here.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import click
import yaml

from benchmarks.containers import Failed, uninterrupted, wait_until
from benchmarks.hosts import UNAVAILABLE, Unavailable, ip
from p2pfl.session.run_folder import RunFolder

NO_RAY = 3
PEERS, ROUNDS = 20, 16
BRIDGE, NETWORK, PORT = "p2pflray", "198.51.100.{}", 6379
"""From a network reserved for documentation."""
CPUS = 2
"""Of each node, as Ray counts them."""
OBJECTS = 80_000_000
"""Bytes of a node's object store; the least that Ray accepts is 78,643,200."""
START_LIMIT, RUN_LIMIT = 120.0, 900.0

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

    def start(self, environment: dict[str, str]) -> None:
        """Start Ray, on a disk of the node's own at ``root/disk``."""
        join = ["--head", "--port", str(PORT), "--include-dashboard=false", f"--temp-dir={self.root}/disk/ray"]
        if self.number:
            join = [f"--address={NETWORK.format(10)}:{PORT}"]
        ray = [
            str(Path(sys.executable).with_name("ray")), "start", *join, f"--node-ip-address={self.address}",
            f"--num-cpus={CPUS}", f"--object-store-memory={OBJECTS}", "--disable-usage-stats", "--block",
        ]  # fmt: skip
        script = 'hostname "$1"; mount -t tmpfs -o size=2g tmpfs "$2"; mkdir "$2/runs"; shift 2; exec "$@"'
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
        (root / "disk").mkdir()
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parent.parent),
            "RAY_DISABLE_IMPORT_WARNING": "1",
        }

    def add(self) -> Node:
        """Start another node, and wait until it is part of the cluster."""
        node = Node(len(self.nodes), self.root)
        self.nodes.append(node)
        ip("netns", "add", node.namespace)
        device = f"pr{os.getpid()}-{node.number}"  # 15 characters at most
        ip("link", "add", device, "type", "veth", "peer", "name", "eth0", "netns", node.namespace)
        ip("link", "set", device, "master", BRIDGE, "up")
        ip("-n", node.namespace, "addr", "add", f"{node.address}/24", "dev", "eth0")
        for name in ("lo", "eth0"):
            ip("-n", node.namespace, "link", "set", name, "up")
        node.start(self.environment)
        log = self.root / f"node-{node.number}.log"
        wait_until(lambda: self._has_started(node, log), f"Ray on node {node.number}: {log}", START_LIMIT)
        return node

    def _has_started(self, node: Node, log: Path) -> bool:
        assert node.process is not None
        if node.process.poll() is not None:
            raise Failed(f"Ray ended on node {node.number}:\n{log.read_text()[-2000:]}")
        return "--block" in log.read_text()

    def launcher(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a `p2pfl` command on the head node."""
        return subprocess.Popen(
            self.nodes[0].inside(sys.executable, "-m", "launcher.cli", *arguments),
            cwd=self.root, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True, env=self.environment,
        )  # fmt: skip

    def reserved(self) -> str:
        """Return the CPUs in use, as `ray status` counts them."""
        command = [str(Path(sys.executable).with_name("ray")), "status", "--address", f"{NETWORK.format(10)}:{PORT}"]
        status = subprocess.run(
            self.nodes[0].inside(*command), capture_output=True, text=True, env=self.environment, check=True
        )
        found = re.search(r"([\d.]+)/[\d.]+ CPU", status.stdout)
        return found[1] if found else status.stdout


@contextmanager
def cluster(nodes: int) -> Iterator[Cluster]:
    """Start a cluster, and remove all of it afterwards."""
    root = Path(tempfile.mkdtemp(prefix="p2pflray-", dir="/tmp"))  # paths of Ray's sockets have 107 bytes at most
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, root, ignore_errors=True)
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
            with suppress(Unavailable):
                ip("netns", "del", node.namespace)


# ---- trials --------------------------------------------------------------------------------------------------


def run_file(started: Cluster) -> Path:
    copies = started.root / "copies"  # outside of the nodes' disks
    path = started.root / "ray20.yaml"
    path.write_text(yaml.safe_dump({**RUN, "checkpoint_copies": str(copies)}))
    return path


def launch(started: Cluster, *options: str) -> tuple[subprocess.Popen[str], RunFolder]:
    """Launch the run on the cluster; the run folder is on the head node's disk."""
    process = started.launcher(
        "launch",
        str(run_file(started)),
        "--backend",
        "ray",
        "--run-dir",
        str(started.root / "disk/runs/run"),
        *options,
    )
    assert started.nodes[0].process is not None
    seen = Path(f"/proc/{started.nodes[0].process.pid}/root{started.root}/disk/runs/run")
    return process, RunFolder(seen)


def rounds_done(folder: RunFolder) -> list[int]:
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
        raise Failed(f"not finished within {RUN_LIMIT:g} s:\n{output[-4000:]}") from None
    if process.returncode:
        raise Failed(f"exit code {process.returncode}:\n{output[-4000:]}")
    return output


def check(folder: RunFolder, expected: RunFolder) -> None:
    """Compare the final states of all peers."""
    found = [folder.peer(peer).result() for peer in range(PEERS)]
    wanted = [expected.peer(peer).result() for peer in range(PEERS)]
    different = [
        peer
        for peer, (one, other) in enumerate(zip(found, wanted, strict=True))
        if one is None or other is None or one.digest != other.digest or one.missing or one.skipped_rounds
    ]
    if different:
        raise Failed(f"other final states, or missing messages, than simulated: peers {different}")


def middle(process: subprocess.Popen[str], folder: RunFolder) -> None:
    """Wait until every peer has done a third of its rounds."""

    def reached() -> bool:
        if process.poll() is not None:
            raise Failed(f"ended early:\n{finish(process)[-4000:]}")
        return min(rounds_done(folder)) >= ROUNDS // 3

    wait_until(reached, "a third of the rounds", RUN_LIMIT)


def calm(started: Cluster, expected: RunFolder) -> str:
    process, folder = launch(started)
    finish(process)
    check(folder, expected)
    return "equal final states"


def died(started: Cluster, expected: RunFolder, *, spare: bool = True) -> str:
    process, folder = launch(started)
    middle(process, folder)
    if spare:
        started.add()
    hosts = folder.info["hosts"]
    addresses = {node.address: node for node in started.nodes[1:]}  # not the head, where the launcher is
    bundle, victim = next(
        (number, addresses[address])
        for number, address in enumerate(hosts["options"]["nodes"])
        if address in addresses
    )
    peers = hosts["hosts"][bundle]["peers"]
    at, began = rounds_done(folder), monotonic()
    victim.kill()

    def back() -> bool:
        if process.poll() is not None:
            raise Failed(f"ended early:\n{finish(process)[-4000:]}")
        now = rounds_done(folder)
        return all(now[peer] > at[peer] or now[peer] == ROUNDS for peer in peers)

    took = wait_until(back, "the peers of the node are further than before", RUN_LIMIT)
    output = finish(process)
    check(folder, expected)
    if "has died; starting it again" not in output:
        raise Failed(f"the launcher did not report the death of the node:\n{output[-4000:]}")
    return (
        f"{len(peers)} peers of {victim.address} restarted from copies after {min(at[peer] for peer in peers)} to "
        f"{max(at[peer] for peer in peers)} rounds, ahead again after {took:.0f} s of {monotonic() - began:.0f} s; "
        "equal final states"
    )


def crowded(started: Cluster, expected: RunFolder) -> str:
    return died(started, expected, spare=False)


def orphaned(started: Cluster, expected: RunFolder) -> str:
    process, folder = launch(started)
    middle(process, folder)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    follower = started.launcher("resume", str(started.root / "disk/runs/run"))
    output, _ = follower.communicate(timeout=RUN_LIMIT)
    if follower.returncode and "every peer is finished" not in output:  # as the peers may be by now
        raise Failed(f"exit code {follower.returncode}:\n{output[-4000:]}")
    check(folder, expected)
    wait_until(lambda: float(started.reserved()) == 0, "all CPUs are free again")
    return "the peers went on; equal final states, and nothing is reserved any more"


def refused(started: Cluster, expected: RunFolder) -> str:
    lines = []
    for options in (["gpus=0.5"], ["memory=500GB"], ["cpus=1"], ["hosts=9"], ["address=198.51.100.99:6379"]):
        began = monotonic()
        command = [
            "launch",
            str(run_file(started)),
            "--backend",
            "ray",
            "--run-dir",
            f"{started.root}/disk/runs/none",
        ]
        given = [part for option in options for part in ("--ray", option)]
        device = ["--set", "device=auto"] if options[0].startswith("gpus") else []
        process = started.launcher(*command, *given, *device)
        output, _ = process.communicate(timeout=RUN_LIMIT)
        if process.returncode == 0 or "Traceback" in output or "Ray cluster" not in output:
            raise Failed(f"--ray {options[0]}: exit code {process.returncode}:\n{output}")
        lines.append(f"--ray {options[0]} ({monotonic() - began:.0f} s): {output.strip().splitlines()[-1]}")
    return "\n".join(["", *lines])


TRIALS: dict[str, Callable[[Cluster, RunFolder], str]] = {
    "calm": calm,
    "died": died,
    "crowded": crowded,
    "orphaned": orphaned,
    "refused": refused,
}


def simulate(scratch: Path) -> RunFolder:
    """Run the same without a network."""
    path = scratch / "run.yaml"
    path.write_text(yaml.safe_dump(RUN))
    command = [sys.executable, "-m", "launcher.cli", "simulate", str(path), "--run-dir", str(scratch / "simulated")]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise Failed(f"p2pfl simulate failed:\n{done.stdout}{done.stderr}")
    return RunFolder(scratch / "simulated")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("names", nargs=-1, type=click.Choice(list(TRIALS)))
@click.pass_context
def main(context: click.Context, names: Sequence[str]) -> None:
    """Run all trials, or those named. Exit code 3: Ray is not installed; 77: no network namespaces here."""
    if importlib.util.find_spec("ray") is None:
        click.echo("Ray is not installed: pip install 'p2pfl-mesh[ray]'", err=True)
        context.exit(NO_RAY)
    if os.getuid() != 0:
        click.echo("needs root, for network namespaces", err=True)
        context.exit(UNAVAILABLE)
    failed = False
    with tempfile.TemporaryDirectory() as scratch:
        expected = simulate(Path(scratch))
        for name in names or TRIALS:
            began = monotonic()
            try:
                with cluster(3) as started:
                    click.echo(f"{name}: three nodes after {monotonic() - began:.0f} s")
                    outcome = TRIALS[name](started, expected)
            except Unavailable as error:
                click.echo(error.message, err=True)
                context.exit(UNAVAILABLE)
            except click.ClickException as error:
                failed = True
                outcome = f"FAILED: {error.message}"
            click.echo(f"{name}: {outcome} ({monotonic() - began:.0f} s)")
    context.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
