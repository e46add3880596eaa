"""Batch scripts for a run, and for the runs of a sweep as a job array."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from launcher import formatting

SIGNAL_SECONDS = 60
"""Seconds before the time limit at which the peers are stopped. Slurm may send the signal up to a minute earlier."""
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
        arguments: the arguments of `p2pfl launch`.
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
