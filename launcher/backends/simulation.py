"""``p2pfl simulate``: all peers without sockets, with the files and the summary of a launch."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from launcher.backends.checks import check_complete, check_unchanged
from launcher.errors import LaunchError
from launcher.facts.processes import find_process, outcome
from launcher.facts.registration import simulation_title
from launcher.facts.summary import Summary, measured_seconds, summarize
from launcher.prepare import LaunchRequest
from launcher.tracking.processes import check_trackers, tracking
from launcher.views.progress import Display, print_run_path
from launcher.watching import Watching
from p2pfl import PeerId
from p2pfl.errors import RunFolderError
from p2pfl.one_thread import ENVIRONMENT
from p2pfl.process_title import set_title
from p2pfl.run_folder.folder import RunFolder
from p2pfl.run_folder.replay import Replay
from p2pfl.stop_signals import interrupt_by

if TYPE_CHECKING:
    from p2pfl.run_file.run import Run
    from p2pfl.simulation.prediction import Prediction


def simulate(
    request: LaunchRequest,
    console: Console,
    jobs: int = 1,
    watching: Watching = Watching(),
    replay: RunFolder | None = None,
    *,
    clock: bool = False,
) -> tuple[RunFolder, Summary]:
    """Create a run and run all its peers in this process, or in ``jobs`` forks of it.

    Args:
        replay: a finished run, whose rounds take the same messages.
        clock: in the order of a simulated clock, in this process.
    """
    _prepare_forks(jobs)
    run = request.load(clock=clock)
    _check_device(run, jobs)
    check_trackers(run)
    replayed = None if replay is None else Replay(replay, run.config_hash())
    if replayed is None and not clock:
        _check_order(run)
    folder = request.prepare(run, simulated=True, clock=clock)
    folder.write_info({**folder.info, "jobs": jobs})
    if replayed is not None:
        replayed.copy_order(folder)
    return folder, _run(run, folder, console, jobs, watching)


def predict(request: LaunchRequest, machine: Path | None, console: Console) -> Prediction:
    """Run all peers in virtual time (p2pfl/simulation/virtual.py), and show progress on a terminal."""
    with console.status("importing torch and checking the run file") as status:
        from p2pfl.simulation import machine as machines
        from p2pfl.simulation.prediction import predict
        from p2pfl.simulation.virtual import run_virtually

        run = request.check()
        described = machines.Machine() if machine is None else machines.load(machine, run.peers)
        done = 0

        def on_round(peer: PeerId, t: int) -> None:
            nonlocal done
            done += 1
            if done % 1000 == 0:
                status.update(f"{done} of {run.peers * run.rounds} rounds of peers")

        return predict(run_virtually(run, described, on_round))


def resume(folder: RunFolder, console: Console, watching: Watching = Watching()) -> tuple[RunFolder, Summary]:
    """Resume a simulated run, with as many processes as it was started with.

    Raises:
        LaunchError: it is running, all peers have finished, or its clock is simulated.
    """
    peers = list(folder.peers())
    if "clock" in folder.info:
        raise LaunchError(
            f"{folder.root}: its clock is simulated, so there are no checkpoints: what was in transit would not be "
            f"part of them; start it again: p2pfl simulate {folder.run_file} --clock"
        )
    if any(find_process(folder, files.peer) for files in peers):
        raise LaunchError(f"{folder.root}: already running; stop it with `p2pfl stop {folder.root}`")
    if all(outcome(files) == "finished" for files in peers):
        raise LaunchError(f"{folder.root}: nothing to resume: every peer is finished")
    jobs: int = folder.info.get("jobs", 1)
    _prepare_forks(jobs)
    from p2pfl.run_file import load as run_files

    run = run_files.load(folder.run_file)
    check_unchanged(run, folder)
    check_complete(folder, run.peers)
    _check_device(run, jobs)
    check_trackers(run)
    seconds_before = 0.0
    with suppress(RunFolderError):
        seconds_before = measured_seconds(folder) or 0.0
    return folder, _run(run, folder, console, jobs, watching, seconds_before)


def _prepare_forks(jobs: int) -> None:
    """Keep libraries, before they are imported, from starting threads, which a fork would not copy."""
    if jobs > 1:
        os.environ.update(ENVIRONMENT)


def _check_device(run: Run, jobs: int) -> None:
    """Raise RunFileError if the run cannot be simulated here: before there is a folder."""
    from p2pfl.simulation.simulate import simulation_device

    simulation_device(run, jobs)


def _check_order(run: Run) -> None:
    """Raise RunFileError if nothing says in which order messages arrive: before there is a folder."""
    from p2pfl.simulation.simulate import check_order

    check_order(run, None)


def _run(
    run: Run, folder: RunFolder, console: Console, jobs: int, watching: Watching, seconds_before: float = 0.0
) -> Summary:
    from p2pfl.session.child_processes import children_of_plugins
    from p2pfl.simulation.simulate import simulate as run_peers

    print_run_path(folder, console)
    watching.serve(folder, console)
    set_title(simulation_title(folder))
    interrupt_by(signal.SIGTERM, signal.SIGHUP)  # `p2pfl stop`, and a terminal that closes
    began, clock = time.monotonic(), "clock" in folder.info
    with tracking(folder, console.print), watching.progress(console, folder) as progress:
        me = os.getpid()
        display = Display(progress, folder, range(run.peers), run.rounds, lambda status: status.pid != me)
        try:
            with children_of_plugins():
                run_peers(run, folder, lambda peer, t: display.update(), jobs, clock=clock)
        except KeyboardInterrupt:
            progress.print("stopped")
        display.update(now=True)
    return summarize(folder, seconds=seconds_before + time.monotonic() - began)
