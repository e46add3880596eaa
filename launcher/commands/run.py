"""Commands that start and stop peers: launch, simulate, resume, join, stop, peer."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Any

import click

from launcher.commands.group import FILE, JSON, RUN, SETS
from launcher.formatting.console import echo, make_console

if TYPE_CHECKING:
    from rich.console import Console

    from launcher.backends.follow import Restart
    from launcher.facts.summary import Summary
    from launcher.prepare import LaunchRequest
    from launcher.watching import Watching
    from p2pfl.run_folder.folder import RunFolder

Command = Callable[..., Any]

RESTART = click.option(
    "--restart",
    type=click.Choice(["on-failure", "always", "never"]),
    default="on-failure",
    show_default=True,
    help="Which unfinished peers to restart from their checkpoints.",
)


UI = click.option(
    "--ui", is_flag=True, help="Show peers, curves, weights and logs in full screen; needs the extra ui."
)


def _address(context: click.Context, option: click.Parameter, text: str | None) -> tuple[str, int] | None:
    """Parse ``[HOST:]PORT``."""
    if text is None:
        return None
    from launcher.tracking.prometheus import parse_address

    try:
        return parse_address(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


METRICS_PORT = click.option(
    "--metrics-port",
    "metrics",
    metavar="[HOST:]PORT",
    callback=_address,
    help="Answer scrapers of Prometheus on this port of 127.0.0.1, or of HOST; 0 for a free one, which is printed.",
)


def _installed_backend(context: click.Context, option: click.Parameter, name: str) -> str:
    if name != "local":
        from p2pfl.installed import BACKENDS, names

        known = ["local", *names(BACKENDS)]
        if name not in known:
            raise click.BadParameter(f"unknown backend {name!r}; installed: {', '.join(known)}")
    return name


def run_options(command: Command) -> Command:
    """Add the options that ``launch`` and ``simulate`` share."""
    for option in (
        JSON,
        click.option("--log-size", type=click.IntRange(min=1), help="MB of a peer's log before it is rotated.  [64]"),
        click.option(
            "--log-level",
            "log_levels",
            multiple=True,
            metavar="[PEER=]LEVEL",
            help="Minimum level to log (debug, info, warning, error), of all peers or one; repeatable.  [info]",
        ),
        click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True),
        click.option("--run-dir", type=click.Path(path_type=Path), help="Run folder; must be new or empty."),
        click.option("--rounds", type=click.IntRange(min=1), help="Short for --set rounds=N."),
        click.option("--seed", type=click.IntRange(min=0), help="Short for --set seed=N."),
        SETS,
        FILE,
    ):
        command = option(command)
    return command


@click.command()
@RESTART
@click.option(
    "--backend",
    metavar="NAME",
    default="local",
    callback=_installed_backend,
    show_default=True,
    help="What starts the peers: this host (local), or several hosts by ssh, in a Slurm allocation (slurm), by Ray "
    "(ray), or by the backend of an installed package.",
)
@click.option("--hosts", type=click.Path(path_type=Path), help="With --backend ssh: YAML list of hosts.")
@click.option(
    "--option",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Setting of the backend; repeatable. Of ray: address, hosts (nodes to use), per peer cpus, gpus (e.g. 0.25) "
    "and memory (e.g. 2GB), wait (seconds), runtime_env (YAML file).",
)
@click.option(
    "--host-dir",
    metavar="FOLDER",
    help="Folder for run folders on other hosts; {host} is replaced by the host's name.  [the same path as here]",
)
@click.option("--sbatch", is_flag=True, help="With --backend slurm: print a batch script and start nothing.")
@UI
@METRICS_PORT
@run_options
def launch(
    as_json: bool,
    restart: Restart,
    backend: str,
    hosts: Path | None,
    settings: tuple[str, ...],
    host_dir: str | None,
    sbatch: bool,
    ui: bool,
    metrics: tuple[str, int] | None,
    **request: Any,
) -> None:
    """Run FILE with one process per peer.

    Show progress until the last peer exits, then print a summary. Ctrl-C, or closing the terminal, stops the peers; a
    second Ctrl-C kills them. Under nohup they run on.
    If this command dies otherwise, the peers keep running: stop them with `p2pfl stop`.
    """
    from launcher.backends.launch import launch as launch_peers
    from launcher.backends.local import ThisHost
    from launcher.prepare import LaunchRequest

    asked = LaunchRequest(**request)
    given = {"--hosts": hosts, "--option": settings, "--host-dir": host_dir, "--sbatch": sbatch}
    if backend == "local" and (wrong := [option for option, value in given.items() if value]):
        raise click.UsageError(f"{wrong[0]} is for runs on other hosts: add --backend")
    if sbatch:
        _print_batch_script(backend, asked, restart, metrics, as_json)
        return

    def run(console: Console, watching: Watching) -> tuple[RunFolder, Summary]:
        if backend == "local":
            return launch_peers(asked, ThisHost(), console, restart, watching)
        from launcher.backends.hosts import BackendOptions
        from launcher.backends.several_hosts import SeveralHosts

        group = SeveralHosts.new(backend, BackendOptions(hosts, settings, asked), restart, host_dir)
        return launch_peers(asked, group, console, restart, watching)

    _run(run, as_json, ui, metrics)


def _print_batch_script(
    backend: str, asked: LaunchRequest, restart: Restart, metrics: tuple[str, int] | None, as_json: bool
) -> None:
    """Print a script for sbatch that gives this command's arguments to a launcher in the job.

    Those about how to follow a run are given to `p2pfl resume` too.
    """
    from launcher.backends.hosts import batch_system
    from launcher.child import in_child
    from p2pfl.run_file import load as run_files

    if asked.run_dir is not None:
        raise click.UsageError("--sbatch chooses the run folder from the job's id; remove --run-dir")
    system = batch_system(backend)

    def name_and_folder() -> tuple[str, Path]:
        run = run_files.load(asked.file, asked.sets)
        return run.name, run.file.out

    name, out = in_child(name_and_folder)
    arguments = [argument for argument in sys.argv[2:] if argument != "--sbatch"]
    resume = [f"--restart={restart}", *(["--json"] if as_json else [])]
    resume += [] if metrics is None else ["--metrics-port={}:{}".format(*metrics)]
    echo(system.batch_script(name, out, arguments, resume), nl=False)


def _refuse(context: click.Context, option: click.Parameter, changes: tuple[str, ...]) -> None:
    """Say what to do instead, rather than that there is no such option. Raises UsageError."""
    if changes:
        raise click.UsageError(
            "a run keeps the settings that it began with, its number of rounds too; launch a new one, e.g. "
            "`p2pfl launch RUN/run.yaml --set rounds=20`. Keys that do not affect results, e.g. transport, can be "
            "changed in RUN/run.yaml",
            context,
        )


NO_CHANGES = click.option(
    "--set", "--rounds", "changes", multiple=True, hidden=True, expose_value=False, callback=_refuse
)


@click.command()
@RESTART
@UI
@METRICS_PORT
@NO_CHANGES
@RUN
@JSON
def resume(run: Path, restart: Restart, as_json: bool, ui: bool, metrics: tuple[str, int] | None) -> None:
    """Resume RUN after a stop, a crash or a reboot.

    Start the peers that are not running, each from its checkpoint. If all have finished, and only the summary is
    missing, write it. A run keeps its settings, its number of rounds too.
    """
    _resume(run, (), restart, as_json, ui, metrics)


@click.command()
@RESTART
@NO_CHANGES
@RUN
@click.option("--peer", "peers", type=int, multiple=True, required=True, metavar="N", help="Peer id; repeatable.")
@JSON
def join(run: Path, peers: tuple[int, ...], restart: Restart, as_json: bool) -> None:
    """Restart peers of RUN while the others keep running.

    Each peer resumes from its checkpoint. If its neighbors have declared it dead, it continues in their round.
    """
    _resume(run, peers, restart, as_json)


def _resume(
    run: Path,
    peers: tuple[int, ...],
    restart: Restart,
    as_json: bool,
    ui: bool = False,
    metrics: tuple[str, int] | None = None,
) -> None:
    from launcher.backends.launch import resume as resume_peers
    from launcher.facts.summary import summarize
    from p2pfl.run_folder.folder import RunFolder

    folder = RunFolder.open(run)

    def backend(console: Console, watching: Watching) -> tuple[RunFolder, Summary]:
        if not peers and _lacks_only_its_summary(folder):
            return folder, summarize(folder)
        return resume_peers(folder, peers, console, restart, watching)

    _run(backend, as_json, ui, metrics)


def _lacks_only_its_summary(folder: RunFolder) -> bool:
    """Whether the launcher was killed when every peer had finished, before it summarized the run."""
    from launcher.facts.processes import find_process, outcome
    from launcher.facts.summary import is_final

    peers = list(folder.peers())
    return (
        not is_final(folder)
        and "collected" not in folder.info
        and all(outcome(files) == "finished" and not find_process(folder, files.peer) for files in peers)
    )


@click.command()
@UI
@run_options
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Processes among which the peers are divided; as many rounds are computed at the same time.",
)
@click.option(
    "--clock",
    is_flag=True,
    help="Follow a simulated clock: training and messages take the seconds that devices and links in the run file's "
    "`time` need for them. All seconds recorded are simulated. Such a run cannot be resumed.",
)
@click.option(
    "--replay",
    type=click.Path(path_type=Path),
    metavar="RUN",
    help="Have each round take the messages that it took in this finished run, whose `synchrony` let rounds not wait "
    "for one another: the results are bit-identical. Give its run.yaml as FILE.",
)
def simulate(
    as_json: bool,
    jobs: int,
    ui: bool,
    clock: bool,
    replay: Path | None,
    **request: Any,
) -> None:
    """Run FILE without sockets, in one process or a few.

    On the CPU, results, files and summary are bit-identical to those of `p2pfl launch`, unless messages miss a
    deadline: by --clock, they do so as over sockets. A GPU is used only if the run
    file, or --set, says `device: cuda`. The run file's `chaos` is ignored: simulate a run to compare it with one that
    had faults.
    """
    from launcher.backends.simulation import simulate as simulate_peers
    from launcher.prepare import LaunchRequest
    from p2pfl.run_folder.folder import RunFolder

    asked = LaunchRequest(**request)
    others = {"--jobs": jobs > 1, "--replay": replay is not None}
    if clock and (given := [option for option, value in others.items() if value]):
        raise click.UsageError(
            f"--clock runs all peers in one process, in the order of a simulated clock; remove {given[0]}"
        )
    replayed = None if replay is None else RunFolder.open(replay)
    _run(lambda console, watching: simulate_peers(asked, console, jobs, watching, replayed, clock=clock), as_json, ui)


def _run(
    backend: Callable[[Console, Watching], tuple[RunFolder, Summary]],
    as_json: bool,
    ui: bool = False,
    metrics: tuple[str, int] | None = None,
) -> None:
    """Run a backend, print its summary and exit."""
    from launcher.lossy_output import outliving_readers
    from launcher.views.print_summary import show_summary
    from launcher.watching import watching

    with outliving_readers():
        console = make_console(err=as_json)
        if console.is_terminal:
            console.print("importing torch and checking the run file", style="dim")  # takes seconds
        with watching(console, ui, metrics) as watched:
            folder, summary = backend(console, watched)
        show_summary(summary, console, as_json=as_json)
        console.print(_report_line(folder), soft_wrap=True)
        if any(peer.ended == "stopped" for peer in summary.peers) and not summary.clock:
            on_slurm = folder.info.get("hosts", {}).get("backend") == "slurm"
            where = ", in an allocation of Slurm," if on_slurm else ""
            echo(f"resume from the checkpoints{where} with: p2pfl resume {_shell_path(folder.root)}", err=True)
    sys.exit(0 if summary.finished else 1)


def _report_line(folder: RunFolder) -> str:
    """Write the run's report if its file asks for it. Return the command that opens the report, or that writes it.

    A report that cannot be written does not make a failure of the run.
    """
    from p2pfl.errors import P2pflError

    make = f"p2pfl report {_shell_path(folder.root)}"
    if folder.settings.get("report") is not True:
        return f"report: {make}"
    from launcher.commands.report import opener
    from launcher.report.command import NAME, write

    try:
        (page,) = write([(folder, None)], folder.root / NAME)
    except P2pflError as error:
        return f"no report: {error}; try again with: {make}"
    return f"report: {opener(page)}"


def _shell_path(path: Path) -> str:
    """Return a path relative to the working directory if it lies there, quoted for a shell."""
    here = Path.cwd()
    return shlex.quote(str(path.relative_to(here) if here in path.parents else path))


@click.command()
@RUN
@click.option("--kill", is_flag=True, help="Kill the peers; they write no checkpoint.")
def stop(run: Path, kill: bool) -> None:
    """Stop the running peers of RUN.

    Each peer ends its batch, rolls back to the last state that it kept, writes a checkpoint and exits.
    """
    from launcher.backends.stop import stop as stop_peers
    from p2pfl.run_folder.folder import RunFolder

    folder = RunFolder.open(run)
    stops = stop_peers(folder, kill=kill)
    if not stops:
        started_on = folder.info.get("host", gethostname())
        elsewhere = f" on this host; it was started on {started_on}" if started_on != gethostname() else ""
        echo(f"no peer of this run is running{elsewhere}")
    for stopped in stops:
        echo(f"peer {stopped.peer}: {stopped.ended or 'still running; kill it with `p2pfl stop --kill`'}")
    sys.exit(1 if any(stopped.ended is None for stopped in stops) else 0)


@click.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def peer(arguments: tuple[str, ...]) -> None:
    """Run a single peer: --run RUN --me N [--file FILE]."""
    # Not `-m peers`, so that its help and errors name the program `p2pfl peer`.
    program = "from peers.__main__ import main; main(prog_name='p2pfl peer')"
    os.execv(sys.executable, [sys.executable, "-P", "-c", program, *arguments])
