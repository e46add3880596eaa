"""``p2pfl sweep``: many runs of one run file with other values and seeds."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from launcher.commands.group import JSON, SECONDS_TO, SETS, open_run, require_file
from launcher.formatting.console import echo, make_console

if TYPE_CHECKING:
    from launcher.facts.sweep_folder import SweepFolder
    from launcher.sweep.runner import SweepProgress

ONLY_NEW = ("grid", "seeds", "simulate", "clock", "backend", "out", "sets", "rounds", "space")
"""Options that say what a new sweep is; an existing one has them in its folder."""

MOST_SEEDS = 10_000
"""Every run has a folder and is checked before the first one starts."""


@click.command()
@click.argument("file", metavar="FILE|FOLDER", type=click.Path(path_type=Path), callback=require_file)
@click.option(
    "--grid",
    multiple=True,
    metavar="KEY=V1,V2,…",
    help="Values of a key, e.g. algorithm.lr=0.01,0.1 or algorithm=a.yaml,b.yaml; repeatable: all combinations.",
)
@click.option("--seeds", type=click.IntRange(1, MOST_SEEDS), help="Number of seeds, from the seed of FILE on.")
@click.option(
    "--optuna", "space", type=click.Path(path_type=Path), help="Search the space in this YAML file instead."
)
@click.option("--trials", type=click.IntRange(min=1), help="Number of trials of --optuna; default: as in its file.")
@SETS
@click.option("--rounds", type=click.IntRange(min=1), help="Short for --set rounds=N.")
@click.option("--simulate", is_flag=True, help="Simulate the runs instead of launching one process per peer.")
@click.option(
    "--clock",
    is_flag=True,
    help="Simulate them on a simulated clock, as `p2pfl simulate --clock` does; all seconds are simulated.",
)
@click.option(
    "--backend",
    type=click.Choice(["local", "slurm"]),
    help="What starts the peers of each run: this host (default), or the nodes of a Slurm allocation.",
)
@click.option("--sbatch", is_flag=True, help="Print a batch script with a task of a Slurm job array for each run.")
@click.option("--task", type=click.IntRange(min=0), metavar="N", help="Only run number N of FOLDER, from 0 on.")
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    help="Maximum number of simultaneous runs; default: 1, with --simulate one per core.",
)
@click.option("--out", type=click.Path(path_type=Path), help="The sweep's folder; default: a new one in sweeps.")
@SECONDS_TO
@JSON
def sweep(
    file: Path,
    jobs: int | None,
    trials: int | None,
    as_json: bool,
    sbatch: bool,
    task: int | None,
    seconds_to: float | None,
    **wanted: Any,
) -> None:
    """Run FILE with many values and seeds.

    Run every combination of the values with every seed, or what --optuna asks for; or continue the sweep in FOLDER.
    The folder has one run folder for each. The same command again, or `p2pfl sweep FOLDER`, keeps the runs that have
    finished and resumes those that were interrupted, also after kill -9 or a reboot. A run starts only if it fits
    into memory, as measured of earlier ones. Ctrl-C, or closing the terminal, stops the runs; a second Ctrl-C kills
    them. On a simulated clock there are no checkpoints: what was interrupted starts again. At the end, compare the
    runs; `p2pfl compare FOLDER` has more options for that. Exit with 1 if a run did not finish.
    """
    from launcher.lossy_output import outliving_readers

    if wanted["backend"] and (simulated := [name for name in ("simulate", "clock") if wanted[name]]):
        raise click.UsageError(f"--{simulated[0]} starts no peers: leave out --backend")
    if sbatch and task is not None:
        raise click.UsageError("--sbatch prints a script for all tasks: leave out --task")
    of_table = [name for name, given in (("--json", as_json), ("--seconds-to", seconds_to is not None)) if given]
    if (sbatch or task is not None) and of_table:
        raise click.UsageError(f"{of_table[0]} is not for {'--sbatch' if sbatch else '--task'}")
    if task is not None and jobs is not None:
        raise click.UsageError("--task runs one run: leave out --jobs")
    folder = _find(file, trials, wanted)
    if sbatch or task is not None:
        if folder.sweep.search is not None:
            raise click.UsageError("trials depend on the earlier ones: a search cannot be a job array")
        _print_array_script(folder, jobs) if sbatch else _run_task(folder, task or 0)
        return
    with outliving_readers():
        code = _run_all(folder, jobs, seconds_to, as_json=as_json)
    sys.exit(code)


def _run_all(folder: SweepFolder, jobs: int | None, seconds_to: float | None, *, as_json: bool) -> int:
    """Run what has not finished, and report. Return the exit status."""
    from launcher.lossy_output import dropping
    from launcher.sweep.display import SweepDisplay
    from launcher.sweep.runner import Queue, Runner, RunSource, default_jobs

    for _, run in folder.runs():
        open_run(run.root)
    with folder.locked():
        console = make_console(err=as_json)
        console.print(f"sweep: {folder.root}", soft_wrap=True)
        source: RunSource
        if folder.sweep.search is not None:
            from launcher.sweep.search import Search

            source = search = Search(folder)
            finished, failed = search.finished, search.failed
        else:
            source = queue = Queue(folder)
            finished, failed = len(queue.finished), []
        if ended := finished + len(failed):
            what = "runs have finished" if folder.sweep.search is None else "trials have ended"
            console.print(f"{ended} of {source.total} {what} before")
        _check_ports(folder, jobs)
        with dropping(console), SweepDisplay(console) as display:
            most = jobs or default_jobs(folder)
            runner = Runner(folder, source, display, most, finished)
            runner.progress.failures.update(dict.fromkeys(failed, "failed before; a trial is not repeated"))
            progress = runner.run()
        best = search.best() if folder.sweep.search is not None else []
        retries = folder.sweep.search is None or search.halted
        everything = _report(folder, progress, best, seconds_to, as_json=as_json, retries=retries)
        if folder.sweep.search is not None:
            for line in search.report():
                echo(line, err=True)
    return 128 + signal.SIGINT if progress.stopping else 0 if everything else 1


def _print_array_script(folder: SweepFolder, jobs: int | None) -> None:
    """Print a script for sbatch that runs what has not finished. ``jobs``: most tasks at the same time."""
    from launcher.backends.hosts import batch_system
    from launcher.errors import SweepError
    from p2pfl.run_folder.files import write_errors

    names = [point.name for point in folder.sweep.points]
    left = [number for number, name in enumerate(names) if folder.state(name) != "finished"]
    if not left:
        raise SweepError(f"{folder.root}: all runs have finished; `p2pfl compare {folder.root}` shows their table")
    with write_errors(logs := folder.log("").parent):
        logs.mkdir(exist_ok=True)
    echo(batch_system("slurm").array_script(folder.root, left, jobs), nl=False)
    echo(f"runs: {len(left)}; at the end: p2pfl compare {shlex.quote(str(folder.root))}", err=True)


def _run_task(folder: SweepFolder, task: int) -> None:
    """Run one run, while other tasks of a job array run the others on any hosts."""
    from launcher.errors import SweepError
    from launcher.lossy_output import dropping, outliving_readers
    from launcher.sweep.display import SweepDisplay
    from launcher.sweep.runner import Queue, Runner

    points = folder.sweep.points
    if task >= len(points):
        raise SweepError(f"{folder.root}: no run number {task}: the {len(points)} runs are 0 to {len(points) - 1}")
    name = points[task].name
    if folder.run(name).run_file.is_file():
        open_run(folder.run(name).root)
    queue = Queue(folder, only=name)
    console = make_console()
    with outliving_readers(), dropping(console), SweepDisplay(console) as display:
        progress = Runner(folder, queue, display, 1, len(queue.finished)).run()
    if queue.finished:
        echo(f"{name}: has finished before")
    sys.exit(128 + signal.SIGINT if progress.stopping else 1 if progress.failures else 0)


def _find(file: Path, trials: int | None, wanted: dict[str, Any]) -> SweepFolder:
    """Return the folder of the sweep, which is created if it is new."""
    from launcher.child import in_child
    from launcher.facts.sweep_folder import SweepFolder

    if file.is_dir():
        given = [name for name in ONLY_NEW if wanted[name]]
        if given:
            names = {"sets": "set", "space": "optuna"}
            options = ", ".join(f"--{names.get(name, name)}" for name in given)
            raise click.UsageError(
                f"{file} is a sweep, which {options} cannot change; start a new one from a run file"
            )
        folder = SweepFolder.open(file)
        if trials is not None:
            from launcher.sweep.space import more_trials

            more_trials(folder, trials)
        return folder
    if not wanted["grid"] and wanted["seeds"] is None and wanted["space"] is None:
        raise click.UsageError("nothing to vary: give --grid, --seeds or --optuna")
    from launcher.sweep.grid import parse_axes
    from launcher.sweep.plan import SweepRequest, prepare

    search = None
    if wanted["space"] is not None:
        if wanted["grid"] or wanted["seeds"] is not None:
            raise click.UsageError("--optuna chooses values by itself, with one seed: leave out --grid and --seeds")
        from launcher.sweep.space import read_space

        search = read_space(wanted["space"], trials)
    elif trials is not None:
        raise click.UsageError("--trials is for --optuna")
    request = SweepRequest(
        file,
        axes=parse_axes(wanted["grid"]),
        seeds=wanted["seeds"],
        sets=wanted["sets"],
        rounds=wanted["rounds"],
        simulate=wanted["simulate"] or wanted["clock"],
        clock=wanted["clock"],
        out=wanted["out"],
        backend=wanted["backend"] or "local",
        search=search,
    )
    return in_child(lambda: prepare(request))


def _check_ports(folder: SweepFolder, jobs: int | None) -> None:
    """Refuse launched runs at the same time on the same ports."""
    from launcher.errors import SweepError
    from p2pfl.run_folder.folder import RunFolder

    if folder.sweep.simulate or (jobs or 1) == 1:
        return
    for point in folder.sweep.points:
        port = RunFolder(folder.plan(point.name).parent).settings["transport"]["port"]
        if port is not None:
            raise SweepError(
                f"transport.port is {port}: runs at the same time would need the same ports; use --jobs 1, "
                "--simulate, or --set transport.port=null"
            )


def _report(
    folder: SweepFolder,
    progress: SweepProgress,
    best: Sequence[str],
    seconds_to: float | None,
    *,
    as_json: bool,
    retries: bool,
) -> bool:
    """Print the table of the finished runs, and the failures. Return whether all runs have finished.

    Args:
        best: the trials of a search, the best first.
        seconds_to: accuracy; count the seconds until each run reaches it.
        retries: whether continuing the sweep starts failed runs again.
    """
    from launcher.commands.compare import show
    from launcher.comparison.results import CompareOptions
    from launcher.errors import CompareError

    done = [(run, point) for point, run in folder.runs() if folder.state(point.name) == "finished"]
    columns = None
    if best:
        done.sort(key=lambda member: best.index(member[1].name) if member[1].name in best else len(best))
        columns = ("accuracy", "worst", "seconds", "sent", "time")
    failures = [
        {"run": name, "error": error, "log": str(folder.log(name))} for name, error in progress.failures.items()
    ]
    state = {"sweep": str(folder.root), "finished": progress.finished, "total": progress.total, "failures": failures}
    shown = False
    if done:
        try:
            show(
                done,
                None,
                CompareOptions(seconds_to=seconds_to),
                "json" if as_json else "table",
                grouped=True,
                columns=columns,
                more=state,
            )
            shown = True
        except CompareError as error:  # the runs are there nevertheless
            echo(f"no table: {error}", err=True)
    if as_json and not shown:
        import json

        echo(json.dumps({**state, "runs": [], "different": {}, "groups": []}))
    for failure in failures:
        log = f"; log: {failure['log']}" if Path(failure["log"]).exists() else ""  # none if it was not started
        echo(f"failed: {failure['run']}: {failure['error']}{log}", err=True)
    left = progress.total - progress.ended
    if left or (failures and retries):
        text = f"{left} of {progress.total} runs are not finished; " if left else ""
        echo(f"{text}continue with: p2pfl sweep {shlex.quote(str(folder.root))}", err=True)
    return not left and not failures
