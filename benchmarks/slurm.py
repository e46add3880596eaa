"""Run twenty peers in a real Slurm on this machine: a controller and three node daemons.

    sudo python -m benchmarks.slurm                     # or scripts/check-slurm
    sudo python -m benchmarks.slurm calm node-killed --keep /tmp/slurm

    calm          in an allocation (salloc) of three nodes, which share no folder
    node-killed   all processes of the step on one node are killed in mid-run
    time-limit    a batch job (--sbatch) that is longer than its time limit; it must requeue itself and go on
    gpu           a run file that asks for a GPU, in a job without one: must be answered by an error

Each run must end with the digests of `p2pfl simulate`. Prints a Markdown table. Exit code 1: a scenario failed; 3:
Slurm, munge or the right to start them (root) is absent, nothing was checked.
"""

from __future__ import annotations

import math
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import click
import psutil
import yaml

from benchmarks.scenarios import (
    COMMAND,
    RUN,
    SLOW,
    NotInstalled,
    command,
    compared,
    finish,
    rounds_done,
    run,
    start,
    wait,
)
from p2pfl.run_folder.folder import RunFolder

NODES = 3
PROGRAMS = ("slurmctld", "slurmd", "munged", "salloc", "srun", "sbatch", "scontrol", "runuser")
LIMIT = 300.0
"""Seconds that a scenario may take."""

CONFIGURATION = """\
ClusterName=p2pfl
SlurmctldHost={hostname}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge/socket
CredType=cred/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
KillWait=5
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = "NodeName=node{number} NodeHostname={hostname} NodeAddr=127.0.0.1 Port={port} CPUs=4\n"


@dataclass(frozen=True)
class Cluster:
    """A running Slurm, and where its files and the runs are."""

    root: Path

    @property
    def environment(self) -> dict[str, str]:
        mine = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        return {**mine, "SLURM_CONF": str(self.root / "slurm.conf")}

    @property
    def log(self) -> Path:
        return self.root / "runs" / "output"

    def start(self, *command: object) -> subprocess.Popen[bytes]:
        """Start a command in the folder of the runs; its output goes to ``log``."""
        self.log.unlink(missing_ok=True)
        return start(command, self.log, self.root / "runs", self.environment)

    def finish(self, process: subprocess.Popen[bytes], code: int = 0) -> str:
        return finish(process, self.log, LIMIT, code)

    def run(self, *command: object) -> str:
        """Run a command to its end and return its output. Raises click.ClickException."""
        return run(*command, cwd=self.root / "runs", env=self.environment)

    def folder(self, name: str) -> RunFolder:
        return RunFolder(self.root / "runs" / name)


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(closing(socket.socket())) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextmanager
def cluster(root: Path) -> Iterator[Cluster]:
    """Start munge, the controller and the node daemons; end them afterwards. Raises NotInstalled."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing or os.geteuid() != 0:
        raise NotInstalled(", ".join(missing) or "the right to start Slurm; run this as root")
    root.chmod(0o755)
    for name in ("state", "runs", "munge"):
        (root / name).mkdir(mode=0o755)
    munge, key = root / "munge", root / "munge" / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    for path in (munge, key):
        shutil.chown(path, "munge")
    hostname, (port, *ports) = socket.gethostname(), free_ports(1 + NODES)
    nodes = "".join(NODE.format(number=i + 1, hostname=hostname, port=each) for i, each in enumerate(ports))
    (root / "slurm.conf").write_text(nodes + CONFIGURATION.format(root=root, hostname=hostname, port=port))
    found = Cluster(root)
    daemons: list[subprocess.Popen[bytes]] = []

    def daemon(*command: str) -> None:
        daemons.append(start(command, root / "daemons.log", root, found.environment))

    try:
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{name}={munge / file}" for name, file in files.items()]
        daemon("runuser", "-u", "munge", "--", "munged", "--foreground", *options)
        wait("munge", lambda: (munge / "socket").exists())
        daemon("slurmctld", "-D", "-c")
        for number in range(NODES):
            daemon("slurmd", "-D", "-N", f"node{number + 1}")
        wait("the nodes", lambda: found_nodes(found) == NODES)
        yield found
    finally:
        with suppress(click.ClickException):
            found.run("scancel", "--user", "root")
            wait("the jobs to end", lambda: not found.run("squeue", "--noheader").strip())
        for process in reversed(daemons):
            process.terminate()
            process.wait()


def found_nodes(found: Cluster) -> int:
    """Return how many nodes are idle."""
    with suppress(click.ClickException):
        return len(found.run("sinfo", "--noheader", "--Node", "--states=idle", "--format=%N").split())
    return 0


# ---- scenarios ---------------------------------------------------------------------------------------------------


def allocate(found: Cluster, name: str, *more: object) -> subprocess.Popen[bytes]:
    launch = [*COMMAND, "launch", f"{name}.yaml", "--backend", "slurm", "--run-dir", name]
    return found.start("salloc", "--nodes", NODES, "--cpus-per-task", 4, *launch, *more)


def calm(found: Cluster) -> str:
    write(found, "calm", RUN)
    found.finish(allocate(found, "calm", "--host-dir", found.root / "{host}"))
    apart = [len(list((found.root / f"node{number + 1}" / "calm" / "peers").iterdir())) for number in range(NODES)]
    return f"peers per node {', '.join(map(str, apart))}, no shared folder"


def node_killed(found: Cluster) -> str:
    write(found, "node-killed", {**RUN, **SLOW, "rounds": 30})
    process = allocate(found, "node-killed", "--host-dir", found.root / "{host}")
    folder = found.folder("node-killed")
    wait("round 8", lambda: rounds_done(folder) >= 8, LIMIT)
    killed = kill_step(found, "node2")
    output = found.finish(process)
    if "host node2" not in output or "is back" not in output:
        raise click.ClickException(f"nobody noticed that node2 was killed\n{output}")
    return f"{killed} processes of node2 killed after round {8}"


def kill_step(found: Cluster, node: str) -> int:
    """Kill everything of the step on a node: Slurm's daemon of the step, the host process and its peers."""
    doomed: set[psutil.Process] = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            title = " ".join(process.cmdline())
            if title.startswith("p2pfl ") and f" {found.root / node}/" in title:
                parent = process.parent()
                doomed |= {process, *([parent] if parent is not None and parent.name() == "slurmstepd" else [])}
    for process in doomed:
        with suppress(psutil.Error):
            process.kill()
    return len(doomed)


REQUEUED_WITHIN = 15.0
"""Seconds for which a job that requeues itself may be FAILED."""


def time_limit(found: Cluster) -> str:
    write(found, "time-limit", {**RUN, **SLOW, "rounds": 120, "name": "time-limit"})
    script = found.root / "runs" / "job.sh"
    script.write_text(found.run(*COMMAND, "launch", "time-limit.yaml", "--backend", "slurm", "--sbatch"))
    job = found.run("sbatch", "--parsable", "--nodes", NODES, "--cpus-per-task", 4, "--time", 2, script).strip()
    log = found.root / "runs" / f"time-limit-{job}.out"

    def state() -> str:
        line = found.run("scontrol", "show", "job", job, "--oneliner")
        return dict(part.split("=", 1) for part in line.split() if "=" in part)["JobState"]

    seen, failed_at = 0, math.inf
    end = monotonic() + 2 * LIMIT
    while (now := state()) not in ("COMPLETED", "TIMEOUT", "CANCELLED", "NODE_FAIL"):
        failed_at = min(failed_at, monotonic()) if now == "FAILED" else math.inf
        if monotonic() > failed_at + REQUEUED_WITHIN:
            break
        if now == "PENDING" and log.exists():
            with suppress(click.ClickException):  # it has just started
                found.run("scontrol", "update", f"job={job}", "starttime=now")  # Slurm would wait for two minutes
            seen = max(seen, rounds_done(found.folder(f"runs/time-limit-{job}")))
        if monotonic() > end:
            raise click.ClickException(f"not finished in time\n{log.read_text()}")
        time.sleep(1)
    found.folder(f"runs/time-limit-{job}").root.rename(found.folder("time-limit").root)
    restarts = found.run("scontrol", "show", "job", job, "--oneliner").partition("Restarts=")[2].split()[0]
    if now != "COMPLETED" or int(restarts) < 1:
        raise click.ClickException(f"job {job}: {now}, {restarts} restarts\n{log.read_text()}")
    return f"limit 2 min: requeued {restarts} times, the last time after round {seen} of 120"


def gpu(found: Cluster) -> str:
    write(found, "gpu", {**RUN, "device": "cuda"})
    output = found.finish(allocate(found, "gpu"), 1)
    wanted = "Slurm has granted this job no GPU"
    if wanted not in output:
        raise click.ClickException(output)
    return next(line for line in output.splitlines() if wanted in line)


SCENARIOS = {"calm": calm, "node-killed": node_killed, "time-limit": time_limit, "gpu": gpu}


def write(found: Cluster, name: str, tree: dict[str, Any]) -> None:
    (found.root / "runs" / f"{name}.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))


def same(found: Cluster, name: str) -> bool | None:
    return None if name == "gpu" else compared(found.root / "runs" / f"{name}.yaml", found.folder(name))


main = command(SCENARIOS, cluster, same, __doc__, "p2pfl-slurm-")

if __name__ == "__main__":
    main()
