"""Launch twenty peers on three hosts by ssh, over a simulated bad network.

    sudo python -m benchmarks.ssh                       # or scripts/check-ssh
    sudo python -m benchmarks.ssh calm killed --keep /tmp/ssh

The hosts and the launcher's host are network namespaces, connected by a switch that delays and loses frames
(benchmarks.switch). Each host has an sshd. They share no folder.

    calm          20 ms of delay, up to 10 ms more, 1 % of the frames lost
    killed        the same; a peer is killed, then a host process, then everything on a host with its sshd
    orphaned      the launcher is killed; `p2pfl status`, then `p2pfl stop` and `p2pfl resume`
    errors        a host that does not answer, one without that Python, one with another p2pfl, one that is blocked

Each run must end with the digests of `p2pfl simulate`. Prints a Markdown table. Exit code 1: a scenario failed; 77:
network namespaces or sshd are not available, nothing was checked.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import click
import psutil
import yaml

from benchmarks import namespaces
from benchmarks.namespaces import Unavailable, ip
from benchmarks.scenarios import COMMAND, RUN, SLOW, command, compared, finish, rounds_done, run, start, wait
from benchmarks.switch import LinkConditions
from p2pfl.run_folder.folder import RunFolder

ADDRESS = "192.0.2.{}"
HOSTS = ("alpha", "beta", "gamma")
"""Names of the first hosts, in ``Lab.write``."""
BAD = LinkConditions(delay=0.02, jitter=0.01, loss=0.01)
LIMIT = 200.0
"""Seconds that a run may take."""
PROJECT = str(Path(__file__).parents[1])


@dataclass
class Place:
    """A namespace: the launcher's (number 0) or a host's, with its sshd."""

    number: int
    namespace: str
    root: Path
    sshd: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        return HOSTS[self.number - 1] if 0 < self.number <= len(HOSTS) else f"host-{self.number}"

    @property
    def address(self) -> str:
        return ADDRESS.format(10 + self.number)

    def execute(self, *command: object) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *map(str, command)]

    def start_sshd(self, keys: Path) -> None:
        """Start the sshd of a host; all have the same key, and let in the launcher's."""
        text = (
            f"Port 22\nListenAddress {self.address}\nHostKey {keys}/host\nAuthorizedKeysFile {keys}/user.pub\n"
            "StrictModes no\nPidFile none\nPermitRootLogin yes\nUsePAM no\nMaxStartups 100\n"
        )
        (self.root / "sshd_config").write_text(text)
        sshd = self.execute(shutil.which("sshd") or "/usr/sbin/sshd", "-D", "-e", "-f", self.root / "sshd_config")
        self.sshd = start(sshd, self.root / "sshd.log", self.root)

    def processes(self) -> list[psutil.Process]:
        """Return all processes in the namespace."""
        found = []
        for pid in namespaces.processes(self.namespace):
            with suppress(psutil.Error):
                found.append(psutil.Process(pid))
        return found


@contextmanager
def network(root: Path, hosts: int = len(HOSTS), conditions: LinkConditions | None = BAD) -> Iterator[list[Place]]:
    """Create the namespaces of the launcher and of the hosts, what connects them, and the sshds.

    Args:
        conditions: as in ``namespaces.network``.
    """
    keys = root / "ssh"
    keys.mkdir()
    for name in ("host", "user"):
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", keys / name)
    Path("/run/sshd").mkdir(exist_ok=True)

    def addresses(number: int) -> list[str]:
        return [f"{ADDRESS.format(10 + number)}/24"]

    with namespaces.network(1 + hosts, addresses, conditions) as (names, _):
        places = [Place(number, name, root / f"host-{number}") for number, name in enumerate(names)]
        for place in places:
            place.root.mkdir()
        for place in places[1:]:
            place.start_sshd(keys)
        yield places


@dataclass
class Lab:
    """The launcher's place, and the hosts."""

    root: Path
    launcher: Place
    hosts: Sequence[Place]

    def write(self, name: str, tree: dict[str, Any], **changes: dict[str, Any]) -> None:
        """Write run file and hosts file; ``changes`` to the entries of hosts."""
        options = ["-i", str(self.root / "ssh" / "user"), "-o", "StrictHostKeyChecking=no", "-o", "LogLevel=ERROR"]
        entries = [
            {
                "name": place.address,
                "python": sys.executable,
                "environment": {"PYTHONPATH": PROJECT, "P2PFL_DATA": os.environ.get("P2PFL_DATA", "")},
                "ssh": [*options, "-o", "UserKnownHostsFile=/dev/null"],
                "folder": str(place.root / name),
                "slots": 2,
                **changes.get(place.name, {}),
            }
            for place in self.hosts
        ]
        (self.root / f"{name}.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
        (self.root / f"{name}-hosts.yaml").write_text(yaml.safe_dump(entries, sort_keys=False))

    def start(self, name: str, *arguments: object) -> subprocess.Popen[bytes]:
        """Start `p2pfl` in the launcher's namespace; its output is added to a file."""
        return start(self.launcher.execute(*COMMAND, *arguments), self.root / f"{name}.out", self.root)

    def launch(self, name: str) -> subprocess.Popen[bytes]:
        hosts = f"{name}-hosts.yaml"
        return self.start(name, "launch", f"{name}.yaml", "--backend", "ssh", "--hosts", hosts, "--run-dir", name)

    def output(self, name: str) -> str:
        return (self.root / f"{name}.out").read_text(encoding="utf-8")

    def finish(self, name: str, process: subprocess.Popen[bytes], code: int = 0) -> None:
        finish(process, self.root / f"{name}.out", LIMIT, code)

    def folder(self, name: str) -> RunFolder:
        return RunFolder(self.root / name)

    def wait_for_round(self, name: str, t: int) -> None:
        wait(f"round {t}", lambda: rounds_done(self.folder(name)) >= t, LIMIT)


@contextmanager
def laboratory(root: Path) -> Iterator[Lab]:
    """Create the network. Raises Unavailable."""
    namespaces.require()
    if not shutil.which("ssh-keygen") or not (shutil.which("sshd") or Path("/usr/sbin/sshd").exists()):
        raise Unavailable("no sshd; install openssh-server")
    with network(root) as places:
        yield Lab(root, places[0], places[1:])


def calm(lab: Lab) -> str:
    lab.write("calm", RUN)
    lab.finish("calm", lab.launch("calm"))
    return "20 peers, no fault"


def killed(lab: Lab) -> str:
    lab.write("killed", {**RUN, **SLOW, "rounds": 60})
    process = lab.launch("killed")
    lab.wait_for_round("killed", 4)
    status = lab.folder("killed").peer(3).status()
    assert status is not None
    os.kill(status.pid, signal.SIGKILL)
    lab.wait_for_round("killed", 10)
    kill(lab.hosts[1], lambda title: "p2pfl warm" in title)
    wait("beta to come back", lambda: "is back; 6 of its peers still run" in lab.output("killed"), LIMIT)
    lab.wait_for_round("killed", 18)
    kill(lab.hosts[2], lambda title: True)
    lab.hosts[2].start_sshd(lab.root / "ssh")
    lab.finish("killed", process)
    output = lab.output("killed")
    for text in ("peer 3: killed by SIGKILL; restarting", "is back; none of its peers runs"):
        if text not in output:
            raise click.ClickException(f"missing in the output: {text}\n{output}")
    return "a peer, a host process and a whole host killed"


def kill(place: Place, chosen: Callable[[str], bool]) -> None:
    for process in place.processes():
        with suppress(psutil.Error):
            if chosen(" ".join(process.cmdline())):
                process.kill()


def orphaned(lab: Lab) -> str:
    lab.write("orphaned", {**RUN, **SLOW, "rounds": 40})
    process = lab.launch("orphaned")
    lab.wait_for_round("orphaned", 4)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    before = rounds_done(lab.folder("orphaned"))

    def goes_on() -> bool:
        lab.finish("orphaned", lab.start("orphaned", "status", "orphaned"))
        return rounds_done(lab.folder("orphaned")) >= before + 3

    wait("the peers to go on without a launcher", goes_on, LIMIT)
    lab.finish("orphaned", lab.start("orphaned", "stop", "orphaned"))
    stopped = rounds_done(lab.folder("orphaned"))
    lab.finish("orphaned", lab.start("orphaned", "resume", "orphaned"))
    return f"launcher killed in round {before}, stopped in round {stopped}, resumed"


def errors(lab: Lab) -> str:
    other = lab.root / "other"
    shutil.copytree(Path(PROJECT) / "peers", other / "peers")
    shutil.copytree(Path(PROJECT) / "p2pfl", other / "p2pfl")
    (other / "peers" / "device.py").open("a").write("# changed\n")
    cases: dict[str, tuple[dict[str, Any], str]] = {
        "unreachable": ({"name": ADDRESS.format(99)}, "No route to host"),
        "no-python": ({"python": "/opt/none/python"}, "/opt/none/python"),
        "no-p2pfl": ({"environment": {"PYTHONPATH": "/nowhere"}, "python": "/usr/bin/python3"}, "No module named"),
        "other-version": ({"environment": {"PYTHONPATH": str(other)}}, "install the same version on all hosts"),
    }
    longest = 0.0
    for name, (change, text) in cases.items():
        began = monotonic()
        lab.write(name, RUN, beta=change)
        lab.finish(name, lab.launch(name), 1)
        longest = max(longest, monotonic() - began)
        if text not in lab.output(name) or lab.folder(name).root.exists():
            raise click.ClickException(f"{name}: expected {text!r}, and no run folder\n{lab.output(name)}")
    ip("-n", lab.hosts[0].namespace, "route", "add", "unreachable", f"{lab.hosts[1].address}/32")
    try:
        began = monotonic()
        lab.write("blocked", RUN)
        lab.finish("blocked", lab.launch("blocked"), 1)
        longest = max(longest, monotonic() - began)
        if f"cannot connect to host {lab.hosts[1].address}" not in lab.output("blocked"):
            raise click.ClickException(lab.output("blocked"))
    finally:
        ip("-n", lab.hosts[0].namespace, "route", "del", "unreachable", f"{lab.hosts[1].address}/32")
    return f"{len(cases) + 1} errors named, each within {longest:.0f} s"


SCENARIOS = {"calm": calm, "killed": killed, "orphaned": orphaned, "errors": errors}


def same(lab: Lab, name: str) -> bool | None:
    return None if name == "errors" else compared(lab.root / f"{name}.yaml", lab.folder(name))


main = command(SCENARIOS, laboratory, same, __doc__, "p2pfl-ssh-")

if __name__ == "__main__":
    main()
