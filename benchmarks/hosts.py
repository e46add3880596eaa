"""Run eight peers that share only the run file and a simulated, possibly bad, network.

    sudo python -m benchmarks.hosts                          # or scripts/check-hosts
    sudo python -m benchmarks.hosts faulty --seed 3 --keep /tmp/faulty

Each peer has its own network namespace, addresses, run folder and CURVE keys. The peers start in a random order, the
last one `--apart` seconds after the first. A switch (benchmarks.switch) connects the namespaces and causes delay,
loss and outages. Then `p2pfl collect` gathers the folders, and the result is compared with `p2pfl simulate`. Prints a
Markdown table. Exit code 1: a peer failed, missed a message or differs from the simulation; 77: no network namespaces
here.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import click
import yaml

from benchmarks import namespaces
from benchmarks.namespaces import NETNS_FOLDERS, ip
from benchmarks.scenarios import check_messages, command, p2pfl, simulate, start, tail, waits
from benchmarks.switch import LinkConditions, Switch
from launcher.facts.digests import compare
from p2pfl import PeerId
from p2pfl.run_folder.folder import RunFolder

PEERS = 8
PORT = 5700
IPV4, IPV6 = "192.0.2.{}", "2001:db8::{}"
"""Addresses of peer i: IPV4.format(FIRST + i), from networks reserved for documentation."""
FIRST, MOVED = 10, 100
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
    settings: dict[str, Any] = field(default_factory=dict)
    """Further keys of the run file."""

    def __str__(self) -> str:
        conditions, parts = self.conditions, list[str]()
        if conditions.delay:
            upper = f" to {1000 * (conditions.delay + conditions.jitter):.0f}" if conditions.jitter else ""
            parts.append(f"{1000 * conditions.delay:.0f}{upper} ms")
        if conditions.loss:
            parts.append(f"{conditions.loss:.0%} lost")
        parts += [f"{key}: {value}" for key, value in self.settings.items()]
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
    "waitless": Scenario(
        "table, IPv4",
        {"host": "0.0.0.0", **table(IPV4)},
        BAD,
        (Outage(2, 6, 10), Crash(6, 10), Crash(6, 25)),
        {"rounds": 120, "synchrony": "none"},
    ),
}


# ---- hosts ---------------------------------------------------------------------------------------------------


@dataclass
class Host:
    """A network namespace with one device, and the peer in it: its folder and its process."""

    peer: PeerId
    namespace: str
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
        self.process = start(["ip", "netns", "exec", self.namespace, *peer], self.root / "output", self.root)

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
def network(root: Path, conditions: LinkConditions, seed: int) -> Iterator[tuple[list[Host], Switch]]:
    """Create a host for each peer, and the switch that connects them."""

    def addresses(peer: int) -> list[str]:
        return [f"{IPV4.format(FIRST + peer)}/24", f"{IPV6.format(FIRST + peer)}/64"]

    with namespaces.network(PEERS, addresses, conditions, seed) as (names, switch):
        assert switch is not None
        hosts = [Host(peer, name, root / f"host-{peer}") for peer, name in enumerate(names)]
        for host in hosts:
            (NETNS_FOLDERS / host.namespace).mkdir(parents=True)
            host.write_host_names(hosts)
        yield hosts, switch


# ---- a run ---------------------------------------------------------------------------------------------------


def write_files(hosts: Sequence[Host], scenario: Scenario) -> None:
    """Write the run file, the peer's private key and all public keys to each host."""
    for host in hosts:
        host.root.mkdir(parents=True)
        transport = {"port": PORT, "keys": "keys", **scenario.transport}
        settings = {**RUN, **scenario.settings, "transport": transport}
        (host.root / "mesh.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
        p2pfl("keys", "new", PEERS, "--peer", host.peer, cwd=host.root)
    public = "".join((host.root / "keys" / "public.yaml").read_text() for host in hosts)
    for host in hosts:
        (host.root / "keys" / "public.yaml").write_text(public)


def start_all(hosts: Sequence[Host], apart: float, chance: random.Random) -> None:
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


@dataclass(frozen=True)
class Check:
    """Where the files are, and the options of the command."""

    root: Path
    seed: int
    apart: float
    limit: float


@contextmanager
def requirements(root: Path, **options: Any) -> Iterator[Check]:
    """Raise Unavailable if network namespaces are not available."""
    namespaces.require()
    (root / "mesh.yaml").write_text(yaml.safe_dump(RUN))
    yield Check(root, **options)


def run(name: str, check: Check) -> str:
    """Run one scenario and describe it."""
    scenario, chance, root = SCENARIOS[name], random.Random(f"{check.seed} {name}"), check.root / name
    with network(root, scenario.conditions, check.seed) as (hosts, switch):
        write_files(hosts, scenario)
        start_all(hosts, check.apart, chance)
        seconds = follow(hosts, scenario.faults, switch, check.limit)
        segments, retransmitted = map(sum, zip(*(host.segments() for host in hosts), strict=True))
    p2pfl("collect", root / "all", *(host.folder.root for host in hosts))
    folder = RunFolder.open(root / "all")
    check_messages(folder, expected(check, name))
    lost = sum(files.log.read_text(encoding="utf-8").count("connection lost peer=") for files in folder.peers())
    results = [result for files in folder.peers() if (result := files.result()) is not None]
    kinds = [kind for result in results for to_one in result.sent.values() for kind in to_one.values()]
    sent = sum(body + header for _, body, header in kinds)
    return (
        f"{scenario.addresses}; {scenario}: {seconds:.0f} s of rounds, {sent / 1e6:.1f} MB sent, "
        f"{switch.traffic.bytes / 1e6:.1f} on the wire, {retransmitted} of {segments} segments retransmitted, "
        f"{lost} connections lost"
    )


def expected(check: Check, name: str) -> RunFolder:
    """Return the same run, simulated: in the order of this one if its rounds did not wait for one another."""
    ran = RunFolder.open(check.root / name / "all")
    return simulate(check.root / "mesh.yaml") if waits(ran) else simulate(ran.root / "run.yaml", "--replay", ran.root)


def same(check: Check, name: str) -> bool:
    return compare(RunFolder(check.root / name / "all"), expected(check, name)).same


OPTIONS = (
    click.Option(["--seed"], default=0, show_default=True, help="Seed of the network and of the start order."),
    click.Option(["--apart"], default=30.0, show_default=True, help="Seconds from the first start to the last."),
    click.Option(["--limit"], default=600.0, show_default=True, help="Maximum seconds of one run."),
)
main = command({name: partial(run, name) for name in SCENARIOS}, requirements, same, __doc__, "p2pfl-hosts-", OPTIONS)

if __name__ == "__main__":
    main()
