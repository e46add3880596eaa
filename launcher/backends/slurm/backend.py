"""``p2pfl launch FILE --backend slurm``: the nodes of one Slurm allocation, one step (``srun``) each.

Inside ``salloc`` or a batch job, all nodes of the allocation take part; peers are spread by the CPUs granted on each.
``--sbatch`` prints a batch script instead (scripts.py). Only the GPUs that Slurm has granted are used: each step sees
them in its CUDA_VISIBLE_DEVICES, and none if the job has none.

A node whose step dies gets a new one, and its peers resume from their checkpoints there. Before the time limit, Slurm
signals the batch script, and that this launcher, which stops the peers; they write checkpoints, and then the
script requeues the job, and the next start resumes the run. If that gets other nodes, they need the run folder on a
file system that they share.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Self

from launcher.backends.hosts import BackendOptions, Host, HostStream, stream_of
from launcher.backends.slurm import scripts
from launcher.errors import HostsGone, LaunchError

NOT_INSIDE = (
    "not inside a Slurm allocation: get one with `salloc --nodes 3`, or print a batch script with "
    "`p2pfl launch FILE --backend slurm --sbatch`"
)
RESUME = (
    "resume the run in another allocation, `salloc --nodes 3 p2pfl resume RUN`, or by its batch script, "
    "`sbatch SCRIPT RUN`"
)
ALIVE = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT")
"""States of jobs of which processes may run."""
NO_GPU = "Slurm has granted this job no GPU: ask for one, e.g. by --gres=gpu:1 or --gres=shard:1"
CONTROL_TIMEOUT = 60.0
"""Seconds that scontrol may take."""


class Slurm:
    """Starts a host process on each node of the allocation ``job``.

    ``hosts``, of a new or resumed run, moves it to the allocation that this process runs in, if there is one.
    """

    reads = ()
    batch_script = staticmethod(scripts.batch_script)
    array_script = staticmethod(scripts.array_script)

    def __init__(self, job: str) -> None:
        self._job = job

    @classmethod
    def make(cls, options: BackendOptions) -> Self:
        """Find the allocation that this process runs in. Raises LaunchError."""
        job = os.environ.get("SLURM_JOB_ID")
        if job is None:
            raise LaunchError(NOT_INSIDE)
        return cls(job)

    @classmethod
    def restore(cls, saved: Mapping[str, Any]) -> Self:
        """Use the allocation of the run."""
        return cls(saved["job"])

    def hosts(self) -> list[Host]:
        here = os.environ.get("SLURM_JOB_ID", self._job)
        job, before = _job(here), {} if here == self._job else _job(self._job)
        if before.get("JobState") in ALIVE:  # suspended, it may go on
            raise LaunchError(
                f"its peers may run in Slurm job {self._job}, which has not ended, and this is job {here}: resume it "
                f"from a shell outside of job {here}, or end the other one: scancel {self._job}"
            )
        if job.get("JobState") != "RUNNING":
            raise LaunchError(f"Slurm job {here} {_end(job)}: {RESUME}")
        self._job = here
        nodes = _scontrol("show", "hostnames", job["NodeList"]).split()
        inside = "SLURM_JOB_ID" in os.environ
        cpus = cpus_per_node(
            os.environ.get("SLURM_JOB_CPUS_PER_NODE", "") if inside else "", len(nodes), job["NumCPUs"]
        )
        gpus = has_gpu(job)
        return [
            Host(
                name=node,
                address=_fields(_scontrol("show", "node", node, "--oneliner")).get("NodeAddr", node),
                python=sys.executable,
                weight=count,
                cores=None if gpus else count,
                environment={} if gpus else {"CUDA_VISIBLE_DEVICES": ""},
                without_gpu="" if gpus else NO_GPU,
            )
            for node, count in zip(nodes, cpus, strict=True)
        ]

    def start(self, host: Host, command: Sequence[str]) -> HostStream:
        job = _job(self._job)
        if job.get("JobState", "unknown") not in ALIVE:
            raise HostsGone(f"Slurm job {self._job} {_end(job)}: {RESUME}")
        cpus = [f"--cpus-per-task={host.cores}"] if host.cores else []
        step = ["srun", f"--jobid={self._job}", "--nodes=1", "--ntasks=1", f"--nodelist={host.name}", *cpus]
        return stream_of([*step, "--overlap", "--unbuffered", "--quiet", "--job-name=p2pfl", "--", *command])

    def saved(self) -> dict[str, Any]:
        return {"job": self._job}

    def close(self) -> None:
        """Nothing: the steps end with their streams."""


def cpus_per_node(text: str, nodes: int, total: str) -> list[int]:
    """Return the CPUs of each node.

    Args:
        text: SLURM_JOB_CPUS_PER_NODE, e.g. ``4(x2),8``; empty outside of the job.
        total: NumCPUs of the job, which is divided evenly if ``text`` is empty or does not match.
    """
    found: list[int] = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is not None:
            found += [int(match[1])] * int(match[2] or 1)
    return found if len(found) == nodes else [max(1, int(total) // nodes)] * nodes


def has_gpu(job: Mapping[str, str]) -> bool:
    """Return whether Slurm has granted GPUs, or parts of them, to a job, given its fields."""
    granted = " ".join(value for name, value in job.items() if "TRES" in name.upper() and not name.startswith("Req"))
    return re.search(r"\bgres[/:](gpu|shard|mps)\b", granted) is not None


def _scontrol(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["scontrol", *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=CONTROL_TIMEOUT,
            check=False,
        )
    except OSError as error:
        raise LaunchError(f"scontrol: {error.strerror}; is Slurm installed here?") from None
    except subprocess.TimeoutExpired:
        raise LaunchError(f"scontrol {arguments[0]}: no answer within {CONTROL_TIMEOUT:.0f} s") from None
    if done.returncode:
        raise LaunchError(f"scontrol {' '.join(arguments)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _job(number: str) -> dict[str, str]:
    """Return the fields of a job; none if Slurm no longer knows it. Raises LaunchError."""
    try:
        lines = _scontrol("show", "job", number, "--oneliner").splitlines()
    except LaunchError as error:
        if "Invalid job id" in str(error):
            return {}
        raise
    jobs = map(_fields, lines)  # several for the last task of an array: it has the number of the whole
    return next((job for job in jobs if job.get("JobId") == number), {})


def _end(job: Mapping[str, str]) -> str:
    return f"is {job['JobState']}" if "JobState" in job else "has ended"


def _fields(line: str) -> dict[str, str]:
    """Return the fields of a line of `scontrol show … --oneliner`."""
    return dict(part.split("=", 1) for part in line.split() if "=" in part)
