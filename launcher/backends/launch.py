"""Launch or resume a run on a group of hosts: this host, or the hosts of a backend."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from rich.console import Console

from launcher import formatting
from launcher.backends.checks import check_addresses, check_complete, check_start, check_unchanged
from launcher.backends.follow import Restart, follow
from launcher.backends.group import Group, Plan
from launcher.backends.local import ThisHost
from launcher.backends.simulation import resume as resume_simulation
from launcher.errors import LaunchError
from launcher.facts.processes import find_process, outcome
from launcher.facts.summary import Summary, measured_seconds, summarize
from launcher.prepare import LaunchRequest
from launcher.tracking.processes import tracking
from launcher.views.progress import print_run_path
from launcher.watching import Watching
from p2pfl import PeerId
from p2pfl.errors import RunFolderError
from p2pfl.file_locks import require_locks
from p2pfl.run_folder.folder import RunFolder


def launch(
    request: LaunchRequest,
    group: Group,
    console: Console,
    restart: Restart = "on-failure",
    watching: Watching = Watching(),
) -> tuple[RunFolder, Summary]:
    """Create a run and run it, one process per peer."""

    def prepare() -> tuple[RunFolder, Plan, list[str]]:
        run = request.load()
        if group.is_here:
            check_addresses(run, range(run.peers))
        check_start(run, range(run.peers), here=group.is_here)
        folder = request.prepare(run, here=group.is_here)
        if group.is_here:
            return folder, Plan.of(run), []
        from launcher.backends.named_files import copy_named_files

        return folder, Plan.of(run), copy_named_files(folder, run)

    with group:
        group.connect()  # before there is a folder, since most problems appear here
        folder, plan, left_out = group.prepare(prepare)
        for line in left_out:
            console.print(line, soft_wrap=True)
        with group.registered(folder, fresh=True):
            group.open(folder, plan, lambda line: console.print(line, soft_wrap=True))
        return folder, _run(group, folder, plan, range(plan.peers), console, restart, watching)


def resume(
    folder: RunFolder,
    peers: Sequence[PeerId],
    console: Console,
    restart: Restart = "on-failure",
    watching: Watching = Watching(),
) -> tuple[RunFolder, Summary]:
    """Resume a run: start ``peers``, by default all, except the running ones.

    On other hosts, this launcher also follows the peers that run.

    Raises:
        LaunchError: no peer is left to start, another launcher follows the hosts, or these options are not for
            simulated runs.
        RunFolderError: the peers run on another host.
    """
    present = [files.peer for files in folder.peers()]  # only one, if it was started by hand
    group: Group
    if "hosts" in folder.info:
        from launcher.backends.several_hosts import SeveralHosts

        group = SeveralHosts.of(folder, restart)
    else:
        folder.require_local()
        require_locks(folder.root)
        group = ThisHost()

    def prepare() -> tuple[Plan, list[PeerId], list[PeerId]]:
        from p2pfl.run_file import load as run_files

        run = run_files.load(folder.run_file)
        check_unchanged(run, folder)
        if group.is_here:
            check_complete(folder, run.peers)
        known = present if group.is_here else range(run.peers)  # other hosts have their folders
        selected = sorted(set(peers)) or list(known)
        if absent := sorted(set(selected) - set(known)):
            raise LaunchError(f"{folder.root} has no peer {formatting.ids(absent)}; it has {formatting.ids(known)}")
        if not group.is_here:  # the hosts report later which peers run
            check_start(run, range(run.peers), here=False)
            return Plan.of(run), selected, selected
        alive = {peer for peer in present if find_process(folder, peer)}
        if running := [peer for peer in selected if peer in alive]:
            noun = "peer" if len(running) == 1 else "peers"
            console.print(
                f"already running: {noun} {formatting.ids(running)}; if one crashes, only the launcher that started "
                "it restarts it",
                soft_wrap=True,
            )
        ended = [peer for peer in selected if peer not in alive]
        # Running peers may need the last messages of a finished peer whose process was killed.
        if not ended or (not alive and _all_finished(folder, ended)):
            raise LaunchError(f"{folder.root}: nothing to resume: every peer is finished or running")
        # Their addresses need no check: these peers ran here before, maybe behind a router with another address.
        check_start(run, ended, here=True)
        return Plan.of(run), selected, ended

    with group:
        with group.registered(folder, fresh=False):
            if folder.info.get("simulated"):
                if peers or restart != "on-failure":
                    raise LaunchError(f"{folder.root}: simulated peers resume together: p2pfl resume {folder.root}")
                return resume_simulation(folder, console, watching)
            plan, selected, todo = group.prepare(prepare)
            group.connect()
            group.open(folder, plan, lambda line: console.print(line, soft_wrap=True))
            ended = [peer for peer in todo if peer not in group.running]
            if not group.running and not group.is_here and _all_finished(folder, ended):
                raise LaunchError(f"{folder.root}: nothing to resume: every peer is finished")
            seconds_before = 0.0
            if ended == selected or not group.is_here:  # otherwise another launcher may measure the same time
                with suppress(RunFolderError):
                    seconds_before = measured_seconds(folder) or 0.0
        return folder, _run(group, folder, plan, ended, console, restart, watching, seconds_before)


def _all_finished(folder: RunFolder, peers: Sequence[PeerId]) -> bool:
    return all(outcome(folder.peer(peer)) == "finished" for peer in peers)


def _run(
    group: Group,
    folder: RunFolder,
    plan: Plan,
    peers: Sequence[PeerId],
    console: Console,
    restart: Restart,
    watching: Watching,
    seconds_before: float = 0.0,
) -> Summary:
    """Run ``peers`` to the end and summarize. ``seconds_before``: what earlier parts of the run took."""
    print_run_path(folder, console)
    watching.serve(folder, console)
    with group.following(console.print), tracking(folder, console.print) as trackers:
        processes = follow(folder, peers, plan.rounds, group, console, restart, watching, trackers.failures)
    from p2pfl.messaging.topology import Topology  # takes memory that the peers no longer need

    seconds = seconds_before + processes.seconds
    return summarize(folder, processes.exit_codes, seconds, Topology(plan.neighbors), processes.errors)
