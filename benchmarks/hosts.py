"""A mesh whose peers have nothing in common but the run file and a network, and that may be bad.

    sudo python -m benchmarks.hosts                          # or scripts/check-hosts
    sudo python -m benchmarks.hosts faulty --seed 3 --keep /tmp/faulty

Eight peers, each in a network namespace with addresses of its own, with a folder of its own, started one after
another in an order that is drawn, with `--apart` seconds between the first and the last; CURVE keys that each host
has made for itself. The namespaces are joined by a switch (benchmarks.switch), which sees to delay, loss and outages.
Then `p2pfl collect` gathers what they have written, and is compared with `p2pfl simulate`. Prints a Markdown table.
Exit code 1: a peer failed, missed a message or ended with other bits; 77: no such networks can be made here.

Nothing of the host's own network is touched; what an interrupted run has left is removed by the next one.
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

from benchmarks.switch import Switch, Weather, tap
from launcher.digests import compare
from p2pfl.runfolder import PeerId, Result, RunFolder

NOT_POSSIBLE = 77
PEERS = 8
PORT = 5700
IPV4, IPV6 = "192.0.2.{}", "2001:db8::{}"
"""Of peer i: IPV4.format(FIRST + i). These networks are reserved for documentation."""
FIRST, MOVED = 10, 100
FOLDERS_OF_NAMES = Path("/etc/netns")
"""Where `ip netns exec` looks for the /etc/hosts of a namespace."""
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
    """The cable of a peer's host is out for a while, from when the peer has done so many rounds."""

    peer: PeerId
    after: int
    seconds: float

    def __str__(self) -> str:
        return f"peer {self.peer} cut off for {self.seconds:.0f} s"


@dataclass(frozen=True)
class Crash:
    """A peer is killed (SIGKILL) when it has done so many rounds, and started again; at another address, maybe, which
    only the names' table says."""

    peer: PeerId
    after: int
    moves: bool = False

    def __str__(self) -> str:
        return f"peer {self.peer} killed" + (", comes back with another address" if self.moves else "")


@dataclass(frozen=True)
class Scenario:
    addresses: str
    transport: dict[str, Any]
    weather: Weather = Weather()
    troubles: Sequence[Outage | Crash] = ()

    def __str__(self) -> str:
        weather, parts = self.weather, list[str]()
        if weather.delay:
            upper = f" to {1000 * (weather.delay + weather.jitter):.0f}" if weather.jitter else ""
            parts.append(f"{1000 * weather.delay:.0f}{upper} ms")
        if weather.loss:
            parts.append(f"{weather.loss:.0%} lost")
        return ", ".join([*parts, *map(str, self.troubles)]) or "undisturbed"


def table(addresses: str) -> dict[str, Any]:
    return {"hosts": {peer: addresses.format(FIRST + peer) for peer in range(PEERS)}}


BAD = Weather(delay=0.03, jitter=0.02, loss=0.01)
TROUBLES = (Outage(2, 6, 10), Crash(6, 10), Outage(5, 14, 45))
SCENARIOS = {
    "calm": Scenario("table, IPv4", {"host": "0.0.0.0", **table(IPV4)}),
    "faulty": Scenario("table, IPv4", {"host": "0.0.0.0", **table(IPV4)}, BAD, TROUBLES),
    "ipv6": Scenario("table, IPv6", {"host": "::", **table(IPV6)}, BAD, TROUBLES[:1]),
    "names": Scenario(
        "names", {"host": "0.0.0.0", "address": "tcp://peer-{id}:{port}"}, Weather(0.01), [Crash(6, 10, moves=True)]
    ),
}


class NotPossible(click.ClickException):
    """Something about network namespaces that this host, or this user, cannot do."""


def ip(*arguments: str) -> str:
    """Run `ip`. Raises NotPossible."""
    try:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    except FileNotFoundError:
        raise NotPossible("there is no `ip` (package iproute2)") from None
    if done.returncode:
        raise NotPossible(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


# ---- hosts ---------------------------------------------------------------------------------------------------


@dataclass
class Host:
    """A network namespace with one device, the folder in which its peer lives, and the peer's process."""

    peer: PeerId
    namespace: str
    cable: int
    """The switch's end."""
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
        """The peer, as its user would by hand."""
        peer = [sys.executable, "-P", "-m", "peers", "--file", "mesh.yaml", "--run", "run", "--me", str(self.peer)]
        with (self.root / "output").open("ab") as output:
            self.process = subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, *peer],
                cwd=self.root, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip

    def move(self) -> None:
        """To another IPv4 address."""
        ip("-n", self.namespace, "addr", "del", f"{IPV4.format(self.number)}/24", "dev", "eth0")
        self.number += MOVED
        ip("-n", self.namespace, "addr", "add", f"{IPV4.format(self.number)}/24", "dev", "eth0")

    def know(self, hosts: Sequence[Host]) -> None:
        """Their names, from now on; of the same file, which processes in the namespace have mounted."""
        lines = [f"{IPV4.format(host.number)} peer-{host.peer}\n" for host in hosts]
        (FOLDERS_OF_NAMES / self.namespace / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))

    def segments(self) -> tuple[int, int]:
        """Of TCP, that the namespace has sent, and how many of them again."""
        lines = ip("netns", "exec", self.namespace, "cat", "/proc/net/snmp").splitlines()
        names, values = (line.split() for line in lines if line.startswith("Tcp:"))
        tcp = dict(zip(names, values, strict=True))
        return int(tcp["OutSegs"]), int(tcp["RetransSegs"])


@contextmanager
def network(root: Path) -> Iterator[list[Host]]:
    """A host for each peer, not yet joined by a switch."""
    remove_left_over()
    with ExitStack() as stack:
        hosts: list[Host] = []
        for peer in range(PEERS):
            namespace = f"p2pfl-{os.getpid()}-{peer}"
            ip("netns", "add", namespace)
            stack.callback(remove, namespace)
            try:
                device, cable = tap()
            except OSError as error:
                raise NotPossible(f"no TAP device: /dev/net/tun: {error.strerror}") from None
            stack.callback(os.close, cable)
            ip("link", "set", device, "netns", namespace, "name", "eth0")
            ip("-n", namespace, "link", "set", "lo", "up")
            host = Host(peer, namespace, cable, root / f"host-{peer}")
            ip("-n", namespace, "addr", "add", f"{IPV4.format(host.number)}/24", "dev", "eth0")
            ip("-n", namespace, "addr", "add", f"{IPV6.format(host.number)}/64", "dev", "eth0", "nodad")
            ip("-n", namespace, "link", "set", "eth0", "up")
            (FOLDERS_OF_NAMES / namespace).mkdir(parents=True)
            hosts.append(host)
        for host in hosts:
            host.know(hosts)
        yield hosts


def remove(namespace: str) -> None:
    """A namespace, and the processes in it."""
    for pid in ip("netns", "pids", namespace).split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    ip("netns", "del", namespace)
    shutil.rmtree(FOLDERS_OF_NAMES / namespace, ignore_errors=True)
    with suppress(OSError):  # unless there are others'
        FOLDERS_OF_NAMES.rmdir()


def remove_left_over() -> None:
    """The namespaces of runs like this one that were killed."""
    for line in ip("netns", "list").splitlines():
        ours = re.match(r"p2pfl-(\d+)-\d+\b", line)
        if ours and not Path("/proc", ours[1]).exists():
            remove(ours[0])


# ---- a run ---------------------------------------------------------------------------------------------------


def p2pfl(*arguments: object, cwd: Path | None = None) -> None:
    words = [str(argument) for argument in arguments]
    command = [sys.executable, "-P", "-m", "launcher.cli", *words]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise click.ClickException(f"p2pfl {' '.join(words)}: exit code {done.returncode}\n{done.stderr}")


def furnish(hosts: Sequence[Host], scenario: Scenario) -> None:
    """Give each host the run file, its peer's private key and all public keys, and nothing else."""
    for host in hosts:
        host.root.mkdir(parents=True)
        transport = {"port": PORT, "keys": "keys", **scenario.transport}
        (host.root / "mesh.yaml").write_text(yaml.safe_dump({**RUN, "transport": transport}, sort_keys=False))
        p2pfl("keys", "new", PEERS, "--peer", host.peer, cwd=host.root)
    public = "".join((host.root / "keys" / "public.yaml").read_text() for host in hosts)
    for host in hosts:
        (host.root / "keys" / "public.yaml").write_text(public)


def start(hosts: Sequence[Host], apart: float, chance: random.Random) -> None:
    """One after another, in any order, the last ``apart`` seconds after the first."""
    order = chance.sample(list(hosts), len(hosts))
    times = [0.0, *sorted(chance.uniform(0, apart) for _ in hosts[2:]), apart]
    begun = monotonic()
    for host, at in zip(order, times, strict=True):
        time.sleep(max(0.0, begun + at - monotonic()))
        host.start()


def follow(hosts: Sequence[Host], troubles: Sequence[Outage | Crash], switch: Switch, limit: float) -> float:
    """Until all peers have ended, with their troubles at the right time. Returns the seconds from when the last one
    was ready. Raises click.ClickException if one fails, or after ``limit`` seconds."""
    pending, cut = list(troubles), dict[PeerId, float]()
    begun, ready = monotonic(), None
    while True:
        now = monotonic()
        if ready is None and all(host.ready for host in hosts):
            ready = now
        for trouble in [one for one in pending if hosts[one.peer].rounds_done >= one.after]:
            pending.remove(trouble)
            if isinstance(trouble, Outage):
                switch.unplug(trouble.peer)
                cut[trouble.peer] = now + trouble.seconds
            else:
                crash(hosts[trouble.peer], hosts, trouble.moves)
        for peer in [peer for peer, until in cut.items() if now >= until]:
            del cut[peer]
            switch.plug(peer)
        codes = {host.peer: host.process.poll() for host in hosts if host.process}
        failed = [peer for peer, code in codes.items() if code]
        if failed or now - begun > limit:
            which = failed or [peer for peer, code in codes.items() if code is None]
            last = "\n".join(f"{hosts[peer].root}/output:\n{tail(hosts[peer].root / 'output')}" for peer in which)
            raise click.ClickException(f"peers {which} {'failed' if failed else 'do not finish'}\n{last}")
        if all(code == 0 for code in codes.values()):
            if pending or ready is None:
                raise click.ClickException(f"the run was over too soon for: {', '.join(map(str, pending))}")
            return now - ready
        time.sleep(TICK)


def crash(host: Host, hosts: Sequence[Host], moves: bool) -> None:
    assert host.process is not None
    host.process.kill()
    host.process.wait()
    if moves:
        host.move()
        for other in hosts:
            other.know(hosts)
    host.start()


def tail(path: Path, lines: int = 5) -> str:
    return "\n".join(path.read_text(encoding="utf-8").splitlines()[-lines:])


def results(folder: RunFolder) -> list[Result]:
    return [result for place in folder.peers() if (result := place.result()) is not None]


def counts(folder: RunFolder) -> list[Any]:
    """How many messages of what kind and size each peer has sent to whom."""
    return [(result.out, result.inn) for result in results(folder)]


def run(name: str, root: Path, apart: float, seed: int, limit: float, expected: RunFolder) -> bool:
    """One scenario; prints its row. Returns whether all is well."""
    scenario, chance = SCENARIOS[name], random.Random(f"{seed} {name}")
    with network(root) as hosts, Switch([host.cable for host in hosts], scenario.weather, seed) as switch:
        furnish(hosts, scenario)
        start(hosts, apart, chance)
        seconds = follow(hosts, scenario.troubles, switch, limit)
        segments, again = map(sum, zip(*(host.segments() for host in hosts), strict=True))
    p2pfl("collect", root / "all", *(host.folder.root for host in hosts))
    folder = RunFolder.open(root / "all")
    missing = sum(result.missing + result.left_out for result in results(folder))
    lost = sum(place.log.read_text(encoding="utf-8").count(": connection lost") for place in folder.peers())
    kinds = [kind for out, _ in counts(folder) for to_one in out.values() for kind in to_one.values()]
    said, carried = sum(body + header for _, body, header in kinds), switch.count.bytes
    same = compare(folder, expected).same and counts(folder) == counts(expected)
    row = [name, scenario.addresses, scenario, f"{seconds:.0f}", f"{said / 1e6:.1f}", f"{carried / 1e6:.1f}"]
    row += [segments, again, lost, missing, "yes" if same else "NO"]
    click.echo(f"| {' | '.join(map(str, row))} |")
    return same and not missing


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("names", nargs=-1, metavar=f"[{'|'.join(SCENARIOS)}]...", type=click.Choice(list(SCENARIOS)))
@click.option("--seed", default=0, show_default=True, help="Of the network and of the order of starts.")
@click.option("--apart", default=30.0, show_default=True, help="Seconds from the first start to the last.")
@click.option("--limit", default=600.0, show_default=True, help="Seconds that one run may last.")
@click.option("--keep", type=click.Path(path_type=Path), help="New folder for all that the peers write.")
def main(names: tuple[str, ...], seed: int, apart: float, limit: float, keep: Path | None) -> None:
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    with ExitStack() as stack:
        root = keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        root.mkdir(parents=True, exist_ok=keep is None)
        try:
            if os.geteuid():
                raise NotPossible("only root can make them")
            with network(root):
                pass
        except NotPossible as reason:
            click.echo(f"no network namespaces here: {reason.message}", err=True)
            sys.exit(NOT_POSSIBLE)
        (root / "mesh.yaml").write_text(yaml.safe_dump(RUN))
        p2pfl("simulate", root / "mesh.yaml", "--run-dir", root / "simulated")
        expected = RunFolder.open(root / "simulated")
        heads = ["run", "addresses", "network", "s", "MB said", "MB on the wire", "segments", "sent again"]
        heads += ["connections lost", "messages missing", "same bits"]
        click.echo(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
        well = [run(name, root / name, apart, seed, limit, expected) for name in names or SCENARIOS]
    sys.exit(0 if all(well) else 1)


if __name__ == "__main__":
    main()
