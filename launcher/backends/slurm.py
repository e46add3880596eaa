"""``p2pfl launch FILE --backend slurm``: the nodes of one Slurm allocation, one step (``srun``) each.

Inside ``salloc`` or a batch job, the nodes are those of the allocation; peers are spread by the CPUs granted on each.
``--sbatch`` prints a batch script instead. Only the GPUs that Slurm has granted are used: each step sees those in its
CUDA_VISIBLE_DEVICES, and none if the job has none.

A node whose step dies gets a new one, and its peers resume from their checkpoints there. Before the time limit, Slurm
signals the batch script, and that this launcher, which stops the peers; they write checkpoints, and then the
script requeues the job, and the next start resumes the run. If that gets other nodes, they need the run folder on a
file system that they share.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher import formatting
from launcher.backends.hosts import BackendOptions, Host, HostStream, stream_of
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
SIGNAL_SECONDS = 60
"""Seconds before the time limit at which the peers are stopped. Slurm may send the signal up to a minute earlier."""
NO_GPU = "Slurm has granted this job no GPU: ask for one, e.g. by --gres=gpu:1 or --gres=shard:1"
CONTROL_TIMEOUT = 60.0
"""Seconds that scontrol may take."""


class Slurm:
    """Starts a host process on each node of the allocation ``job``.

    ``hosts``, of a new or resumed run, moves it to the allocation that this process runs in, if there is one.
    """

    name = "slurm"

    def __init__(self, job: str) -> None:
        self._job = job

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


def make(options: BackendOptions) -> Slurm:
    """Find the allocation that this process runs in. Raises LaunchError."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        raise LaunchError(NOT_INSIDE)
    return Slurm(job)


def restore(saved: Mapping[str, Any]) -> Slurm:
    """Use the allocation of the run."""
    return Slurm(saved["job"])


def cpus_per_node(text: str, nodes: int, total: str) -> list[int]:
    """Return the CPUs of each node.

    Args:
        text: SLURM_JOB_CPUS_PER_NODE, e.g. ``4(x2),8``; empty outside of the job.
        total: NumCPUs of the job, which is divided evenly if ``text`` does not tell.
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


# ---- the batch script --------------------------------------------------------------------------------------------

SCRIPT = """\
#!/bin/bash
# Submit with `sbatch FILE [RUN]`. Options of sbatch take precedence, e.g. --nodes 3 --time 4:00:00 --gres gpu:1.
# RUN, the folder of a run that was stopped, is resumed.
#SBATCH --job-name={name}
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=01:00:00
#SBATCH --signal=B:TERM@{seconds}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={name}-%j.out
cd {folder} || exit 1
if [ -n "$1" ] && [ ! -e "$1/run.yaml" ]; then
    echo "$1: not a run folder (no run.yaml in it)" >&2
    exit 1
fi
run=${{1:-{out}/{name}-$SLURM_JOB_ID}}    # on a file system that all nodes share, to resume on other nodes
if [ -e "$run/run.yaml" ]; then
    {p2pfl} resume "$run"{resume} &
else
    {p2pfl} launch {arguments} --run-dir "$run" &
fi
"""
REQUEUE = """\
launcher=$!
ending=
trap 'ending=yes; kill -TERM $launcher' TERM    # the time limit is near: the peers write checkpoints
wait $launcher; code=$?
while kill -0 $launcher 2> /dev/null; do wait $launcher; code=$?; done    # the signal has interrupted wait
if [ -n "$ending" ] && [ $code -ne 0 ]; then
    scontrol requeue incomplete "$SLURM_JOB_ID"    # the next start resumes the run; not after scancel
fi
exit $code
"""


ARRAY = """\
#!/bin/bash
# Submit with `sbatch FILE`; again to continue what has not finished. Each task of the array is a run of the sweep.
# Options of sbatch take precedence, e.g. --time 4:00:00 --cpus-per-task 8 --gres gpu:1 --array 0-5%2
#SBATCH --job-name={name}
#SBATCH --array={tasks}
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --time=01:00:00
#SBATCH --signal=B:TERM@{seconds}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={output}
{p2pfl} sweep {folder} --task "$SLURM_ARRAY_TASK_ID" &
"""


def array_script(folder: Path, tasks: Sequence[int], most: int | None) -> str:
    """Return a batch script for the runs of a sweep.

    Args:
        folder: of the sweep.
        tasks: numbers of the runs.
        most: maximum number of tasks at the same time; None: as many as Slurm allows.
    """
    numbers = formatting.ids(tasks, most=len(tasks)).replace(" ", ",")
    return (
        ARRAY.format(
            name=shlex.quote(folder.name),
            tasks=numbers if most is None else f"{numbers}%{most}",
            seconds=SIGNAL_SECONDS,
            output=shlex.quote(f"{folder / 'logs'}".replace("%", "%%") + "/slurm-%A_%a.out"),
            p2pfl=shlex.join([sys.executable, "-P", "-m", "launcher.cli"]),
            folder=shlex.quote(str(folder)),
        )
        + REQUEUE
    )


def batch_script(name: str, out: Path, arguments: Sequence[str], resume: Sequence[str] = ()) -> str:
    """Return a batch script for a run.

    Args:
        name: of the run.
        out: folder of its run folder.
        arguments: those of `p2pfl launch`.
        resume: options of `p2pfl resume`, which the next starts use.
    """
    script = SCRIPT.format(
        name=name,
        seconds=SIGNAL_SECONDS,
        folder=shlex.quote(str(Path.cwd())),
        out=shlex.quote(str(out)),
        p2pfl=shlex.join([sys.executable, "-P", "-m", "launcher.cli"]),
        arguments=shlex.join(arguments),
        resume="".join(f" {shlex.quote(option)}" for option in resume),
    )
    return script + REQUEUE
