"""Run eight peers that share only the run file and a simulated, possibly bad, network.

    sudo python -m benchmarks.hosts                          # or scripts/check-hosts
    sudo python -m benchmarks.hosts faulty --seed 3 --keep /tmp/faulty

Each peer has its own network namespace, addresses, run folder and CURVE keys. The peers start in a random order, the
last one `--apart` seconds after the first. A switch (benchmarks.switch) connects the namespaces and causes delay,
loss and outages. Then `p2pfl collect` gathers the folders, and the result is compared with `p2pfl simulate`. Prints a
Markdown table. Exit code 1: a peer failed, missed a message or differs from the simulation; 77: no network namespaces
here.

The host's own network is not touched. Leftovers of an interrupted run are removed by the next one.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import click
import yaml

from benchmarks.switch import LinkConditions, Switch, tap
from launcher.facts.digests import compare
from p2pfl import PeerId
from p2pfl.run_folder.folder import Result, RunFolder

UNAVAILABLE = 77
PEERS = 8
PORT = 5700
IPV4, IPV6 = "192.0.2.{}", "2001:db8::{}"
"""Addresses of peer i: IPV4.format(FIRST + i), from networks reserved for documentation."""
FIRST, MOVED = 10, 100
NETNS_FOLDERS = Path("/etc/netns")
"""`ip netns exec` mounts the hosts file of a namespace from here."""
TICK = 0.05

RUN: dict[str, Any] = {
    "name": "hosts8",
    "seed": 0,
    "rounds": 30,
    "peers": PEERS,
    "data": {
        "dataset": "digits",
        "partition": {"name": "clusters", "clusters": 2, "per_class": 14, "test_per_class": 15},
        "augment": "mapl",
    },
    "models": "tiny4",
    "algorithm": {"name": "mapl", "warmup": 10, "lr": 0.001, "batch": 32, "projector_hidden": 128},
    "device": "cpu",
    "checkpoint_every": 5,
}


@dataclass(frozen=True)
class Outage:
    """A peer's host is unplugged for some seconds when the peer has done ``after`` rounds."""

    peer: PeerId
    after: int
    seconds: float

    def __str__(self) -> str:
        return f"peer {self.peer} cut off for {self.seconds:.0f} s"


@dataclass(frozen=True)
class Crash:
    """A peer is killed (SIGKILL) when it has done ``after`` rounds and restarted at once.

    ``moves``: its host gets a new address first, which is known only to name resolution.
    """

    peer: PeerId
    after: int
    moves: bool = False

    def __str__(self) -> str:
        return f"peer {self.peer} killed" + (", comes back with another address" if self.moves else "")


@dataclass(frozen=True)
class Scenario:
    addresses: str
    transport: dict[str, Any]
    conditions: LinkConditions = LinkConditions()
    faults: Sequence[Outage | Crash] = ()

    def __str__(self) -> str:
        conditions, parts = self.conditions, list[str]()
        if conditions.delay:
            upper = f" to {1000 * (conditions.delay + conditions.jitter):.0f}" if conditions.jitter else ""
            parts.append(f"{1000 * conditions.delay:.0f}{upper} ms")
        if conditions.loss:
            parts.append(f"{conditions.loss:.0%} lost")
        return ", ".join([*parts, *map(str, self.faults)]) or "undisturbed"


def table(addresses: str) -> dict[str, Any]:
    return {"hosts": {peer: addresses.format(FIRST + peer) for peer in range(PEERS)}}


BAD = LinkConditions(delay=0.03, jitter=0.02, loss=0.01)
FAULTS = (Outage(2, 6, 10), Crash(6, 10), Outage(5, 14, 45))
SCENARIOS = {
    "calm": Scenario("table, IPv4", {"host": "0.0.0.0", **table(IPV4)}),
    "faulty": Scenario("table, IPv4", {"host": "0.0.0.0", **table(IPV4)}, BAD, FAULTS),
    "ipv6": Scenario("table, IPv6", {"host": "::", **table(IPV6)}, BAD, FAULTS[:1]),
    "names": Scenario(
        "names",
        {"host": "0.0.0.0", "address": "tcp://peer-{id}:{port}"},
        LinkConditions(0.01),
        [Crash(6, 10, moves=True)],
    ),
}


class Unavailable(click.ClickException):
    """Network namespaces are not available on this host, or to this user."""

    exit_code = UNAVAILABLE


def ip(*arguments: str) -> str:
    """Run `ip`; raise Unavailable if it fails."""
    try:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    except FileNotFoundError:
        raise Unavailable("command `ip` not found; install iproute2") from None
    if done.returncode:
        raise Unavailable(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


# ---- hosts ---------------------------------------------------------------------------------------------------


@dataclass
class Host:
    """A network namespace with one device, and the peer in it: its folder and its process."""

    peer: PeerId
    namespace: str
    port: int
    """File descriptor of its switch port."""
    root: Path
    process: subprocess.Popen[bytes] | None = None
    number: int = field(init=False)
    """The last part of its addresses."""

    def __post_init__(self) -> None:
        self.number = FIRST + self.peer

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.root / "run")

    @property
    def rounds_done(self) -> int:
        status = self.folder.peer(self.peer).status()
        return 0 if status is None else status.rounds_done

    @property
    def ready(self) -> bool:
        status = self.folder.peer(self.peer).status()
        return status is not None and status.phase != "starting"

    def start(self) -> None:
        """Start the peer as a user would by hand."""
        peer = [sys.executable, "-P", "-m", "peers", "--file", "mesh.yaml", "--run", "run", "--me", str(self.peer)]
        with (self.root / "output").open("ab") as output:
            self.process = subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, *peer],
                cwd=self.root, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip

    def move(self) -> None:
        """Give the host another IPv4 address."""
        ip("-n", self.namespace, "addr", "del", f"{IPV4.format(self.number)}/24", "dev", "eth0")
        self.number += MOVED
        ip("-n", self.namespace, "addr", "add", f"{IPV4.format(self.number)}/24", "dev", "eth0")

    def write_host_names(self, hosts: Sequence[Host]) -> None:
        """Update the hosts file in place, because processes in the namespace have it mounted."""
        lines = [f"{IPV4.format(host.number)} peer-{host.peer}\n" for host in hosts]
        (NETNS_FOLDERS / self.namespace / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))

    def segments(self) -> tuple[int, int]:
        """Return the TCP segments sent by the namespace, and how many were retransmissions."""
        lines = ip("netns", "exec", self.namespace, "cat", "/proc/net/snmp").splitlines()
        names, values = (line.split() for line in lines if line.startswith("Tcp:"))
        tcp = dict(zip(names, values, strict=True))
        return int(tcp["OutSegs"]), int(tcp["RetransSegs"])


@contextmanager
def network(root: Path) -> Iterator[list[Host]]:
    """Create a host for each peer, not yet connected by a switch."""
    remove_leftovers()
    with ExitStack() as stack:
        hosts: list[Host] = []
        for peer in range(PEERS):
            namespace = f"p2pfl-{os.getpid()}-{peer}"
            ip("netns", "add", namespace)
            stack.callback(remove, namespace)
            try:
                device, port = tap()
            except OSError as error:
                raise Unavailable(f"no TAP device: /dev/net/tun: {error.strerror}") from None
            stack.callback(os.close, port)
            ip("link", "set", device, "netns", namespace, "name", "eth0")
            ip("-n", namespace, "link", "set", "lo", "up")
            host = Host(peer, namespace, port, root / f"host-{peer}")
            ip("-n", namespace, "addr", "add", f"{IPV4.format(host.number)}/24", "dev", "eth0")
            ip("-n", namespace, "addr", "add", f"{IPV6.format(host.number)}/64", "dev", "eth0", "nodad")
            ip("-n", namespace, "link", "set", "eth0", "up")
            (NETNS_FOLDERS / namespace).mkdir(parents=True)
            hosts.append(host)
        for host in hosts:
            host.write_host_names(hosts)
        yield hosts


def remove(namespace: str) -> None:
    """Remove a namespace and kill the processes in it."""
    for pid in ip("netns", "pids", namespace).split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    ip("netns", "del", namespace)
    shutil.rmtree(NETNS_FOLDERS / namespace, ignore_errors=True)
    with suppress(OSError):  # not empty: other runs use it
        NETNS_FOLDERS.rmdir()


def remove_leftovers() -> None:
    """Remove the namespaces of runs that were killed."""
    for line in ip("netns", "list").splitlines():
        ours = re.match(r"p2pfl-(\d+)-\d+\b", line)
        if ours and not Path("/proc", ours[1]).exists():
            remove(ours[0])


# ---- a run ---------------------------------------------------------------------------------------------------


def p2pfl(*arguments: object, cwd: Path | None = None) -> None:
    texts = [str(argument) for argument in arguments]
    command = [sys.executable, "-P", "-m", "launcher.cli", *texts]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise click.ClickException(f"p2pfl {' '.join(texts)}: exit code {done.returncode}\n{done.stderr}")


def write_files(hosts: Sequence[Host], scenario: Scenario) -> None:
    """Write the run file, the peer's private key and all public keys to each host."""
    for host in hosts:
        host.root.mkdir(parents=True)
        transport = {"port": PORT, "keys": "keys", **scenario.transport}
        (host.root / "mesh.yaml").write_text(yaml.safe_dump({**RUN, "transport": transport}, sort_keys=False))
        p2pfl("keys", "new", PEERS, "--peer", host.peer, cwd=host.root)
    public = "".join((host.root / "keys" / "public.yaml").read_text() for host in hosts)
    for host in hosts:
        (host.root / "keys" / "public.yaml").write_text(public)


def start(hosts: Sequence[Host], apart: float, chance: random.Random) -> None:
    """Start the peers in a random order, the last one ``apart`` seconds after the first."""
    order = chance.sample(list(hosts), len(hosts))
    times = [0.0, *sorted(chance.uniform(0, apart) for _ in hosts[2:]), apart]
    begun = monotonic()
    for host, at in zip(order, times, strict=True):
        time.sleep(max(0.0, begun + at - monotonic()))
        host.start()


def follow(hosts: Sequence[Host], faults: Sequence[Outage | Crash], switch: Switch, limit: float) -> float:
    """Inject the faults and wait until all peers have ended.

    Returns:
        Seconds from when the last peer was ready.

    Raises:
        click.ClickException: a peer failed, or the run took longer than ``limit`` seconds.
    """
    pending, plug_at = list(faults), dict[PeerId, float]()
    begun, ready = monotonic(), None
    while True:
        now = monotonic()
        if ready is None and all(host.ready for host in hosts):
            ready = now
        for fault in [fault for fault in pending if hosts[fault.peer].rounds_done >= fault.after]:
            pending.remove(fault)
            if isinstance(fault, Outage):
                switch.unplug(fault.peer)
                plug_at[fault.peer] = now + fault.seconds
            else:
                crash(hosts[fault.peer], hosts, fault.moves)
        for peer in [peer for peer, until in plug_at.items() if now >= until]:
            del plug_at[peer]
            switch.plug(peer)
        codes = {host.peer: host.process.poll() for host in hosts if host.process}
        failed = [peer for peer, code in codes.items() if code]
        if failed or now - begun > limit:
            named = failed or [peer for peer, code in codes.items() if code is None]
            last = "\n".join(f"{hosts[peer].root}/output:\n{tail(hosts[peer].root / 'output')}" for peer in named)
            raise click.ClickException(f"peers {named} {'failed' if failed else 'did not finish in time'}\n{last}")
        if all(code == 0 for code in codes.values()):
            if pending or ready is None:
                raise click.ClickException(f"the run ended before these faults: {', '.join(map(str, pending))}")
            return now - ready
        time.sleep(TICK)


def crash(host: Host, hosts: Sequence[Host], moves: bool) -> None:
    assert host.process is not None
    host.process.kill()
    host.process.wait()
    if moves:
        host.move()
        for other in hosts:
            other.write_host_names(hosts)
    host.start()


def tail(path: Path, lines: int = 5) -> str:
    return "\n".join(path.read_text(encoding="utf-8").splitlines()[-lines:])


def results(folder: RunFolder) -> list[Result]:
    return [result for files in folder.peers() if (result := files.result()) is not None]


def counts(folder: RunFolder) -> list[Any]:
    """Return messages and bytes by peer, neighbor and kind."""
    return [(result.sent, result.received) for result in results(folder)]


def run(name: str, root: Path, apart: float, seed: int, limit: float, expected: RunFolder) -> bool:
    """Run one scenario and print its row; return whether it passed."""
    scenario, chance = SCENARIOS[name], random.Random(f"{seed} {name}")
    with network(root) as hosts, Switch([host.port for host in hosts], scenario.conditions, seed) as switch:
        write_files(hosts, scenario)
        start(hosts, apart, chance)
        seconds = follow(hosts, scenario.faults, switch, limit)
        segments, retransmitted = map(sum, zip(*(host.segments() for host in hosts), strict=True))
    p2pfl("collect", root / "all", *(host.folder.root for host in hosts))
    folder = RunFolder.open(root / "all")
    missing = sum(result.missing + result.skipped_rounds for result in results(folder))
    lost = sum(files.log.read_text(encoding="utf-8").count("connection lost peer=") for files in folder.peers())
    kinds = [kind for out, _ in counts(folder) for to_one in out.values() for kind in to_one.values()]
    sent, carried = sum(body + header for _, body, header in kinds), switch.traffic.bytes
    same = compare(folder, expected).same and counts(folder) == counts(expected)
    row = [name, scenario.addresses, scenario, f"{seconds:.0f}", f"{sent / 1e6:.1f}", f"{carried / 1e6:.1f}"]
    row += [segments, retransmitted, lost, missing, "yes" if same else "NO"]
    click.echo(f"| {' | '.join(map(str, row))} |")
    return same and not missing


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("names", nargs=-1, metavar=f"[{'|'.join(SCENARIOS)}]...", type=click.Choice(list(SCENARIOS)))
@click.option("--seed", default=0, show_default=True, help="Seed of the network and of the start order.")
@click.option("--apart", default=30.0, show_default=True, help="Seconds from the first start to the last.")
@click.option("--limit", default=600.0, show_default=True, help="Maximum seconds of one run.")
@click.option("--keep", type=click.Path(path_type=Path), help="New folder for everything that the peers write.")
def main(names: tuple[str, ...], seed: int, apart: float, limit: float, keep: Path | None) -> None:
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    with ExitStack() as stack:
        root = keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        root.mkdir(parents=True, exist_ok=keep is None)
        try:
            if os.geteuid():
                raise Unavailable("only root can create them")
            with network(root):
                pass
        except Unavailable as reason:
            click.echo(f"no network namespaces here: {reason.message}", err=True)
            sys.exit(UNAVAILABLE)
        (root / "mesh.yaml").write_text(yaml.safe_dump(RUN))
        p2pfl("simulate", root / "mesh.yaml", "--run-dir", root / "simulated")
        expected = RunFolder.open(root / "simulated")
        columns = ["run", "addresses", "network", "s", "MB sent", "MB on the wire", "segments", "retransmitted"]
        columns += ["connections lost", "messages missing", "same bits"]
        click.echo(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
        try:
            passed = [run(name, root / name, apart, seed, limit, expected) for name in names or SCENARIOS]
        except Unavailable as error:  # they were available before
            raise click.ClickException(error.message) from None
    sys.exit(0 if all(passed) else 1)


if __name__ == "__main__":
    main()
