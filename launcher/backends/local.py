"""The local backend: launch or resume a run with one process per peer on this host."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console

from launcher import formatting
from launcher.backends.checks import check_addresses, check_complete, check_start, check_unchanged
from launcher.backends.follow import Restart, follow
from launcher.backends.mps import multi_process_service
from launcher.backends.simulation import resume as resume_simulation
from launcher.backends.warm import WarmProcess
from launcher.errors import LaunchError
from launcher.facts.processes import find_process, outcome
from launcher.facts.registration import Requests, register
from launcher.facts.summary import Summary, measured_seconds, summarize
from launcher.prepare import LaunchRequest
from launcher.tracking.processes import tracking
from launcher.views.progress import print_run_path
from launcher.watching import Watching
from p2pfl import PeerId
from p2pfl.errors import RunFolderError
from p2pfl.file_locks import require_locks
from p2pfl.run_folder.folder import RunFolder

if TYPE_CHECKING:
    from p2pfl.run_file.run import Run


@dataclass(frozen=True)
class _Settings:
    """What this process keeps of a Run, which refers to torch."""

    peers: int
    rounds: int
    neighbors: tuple[tuple[PeerId, ...], ...]
    mps: bool
    peers_per_gpu: int | None

    @classmethod
    def of(cls, run: Run) -> _Settings:
        gpu = run.file.gpu
        return cls(run.peers, run.rounds, run.topology.neighbors, gpu.mps, gpu.peers_per_gpu)


def launch(
    request: LaunchRequest, console: Console, restart: Restart = "on-failure", watching: Watching = Watching()
) -> tuple[RunFolder, Summary]:
    """Create a run and run it, one process per peer."""

    def prepare() -> tuple[RunFolder, _Settings]:
        run = request.load()
        check_addresses(run, range(run.peers))
        check_start(run, range(run.peers), here=True)
        return request.prepare(run), _Settings.of(run)

    warm, (folder, settings) = WarmProcess.after(prepare)
    requests = register(folder)
    with warm:
        return folder, _run(settings, folder, range(settings.peers), warm, console, restart, watching, requests)


def resume(
    folder: RunFolder,
    peers: Sequence[PeerId],
    console: Console,
    restart: Restart = "on-failure",
    watching: Watching = Watching(),
) -> tuple[RunFolder, Summary]:
    """Resume a run: start those of ``peers`` (by default all) that are not running.

    Raises:
        LaunchError: no peer is left to start, or these options are not for simulated runs.
        RunFolderError: the peers run on another host.
    """
    folder.require_local()
    require_locks(folder.root)
    requests = register(folder, fresh=False)
    if folder.info.get("simulated"):
        if peers or restart != "on-failure":
            raise LaunchError(f"{folder.root}: simulated peers resume together: p2pfl resume {folder.root}")
        return resume_simulation(folder, console, watching)

    def select() -> tuple[_Settings, list[PeerId], list[PeerId]]:
        """Return what to run, and which of the selected peers are running and which are not."""
        from p2pfl.run_file import load as run_files

        run = run_files.load(folder.run_file)
        check_unchanged(run, folder)
        check_complete(folder, run.peers)
        present = [files.peer for files in folder.peers()]  # only one, if that peer was started on its own
        absent = sorted(set(peers) - set(present))
        if absent:
            raise LaunchError(f"{folder.root} has no peer {formatting.ids(absent)}; it has {formatting.ids(present)}")
        selected = sorted(set(peers)) or present
        alive = {peer for peer in present if find_process(folder, peer)}
        if running := [peer for peer in selected if peer in alive]:
            console.print(
                f"already running: {_peers(running)}; if one crashes, only the launcher that started it restarts it",
                soft_wrap=True,
            )
        ended = [peer for peer in selected if peer not in running]
        # Those that run may need the last messages of a finished peer whose process was killed.
        if not ended or (not alive and all(outcome(folder.peer(peer)) == "finished" for peer in ended)):
            raise LaunchError(f"{folder.root}: nothing to resume: every peer is finished or running")
        # Their addresses need no check: these peers ran here before, maybe behind a router with another address.
        check_start(run, ended, here=True)
        return _Settings.of(run), running, ended

    warm, (settings, running, ended) = WarmProcess.after(select)
    with warm:
        seconds_before = 0.0
        if not running:  # otherwise another launcher may still measure, and the time would count twice
            with suppress(RunFolderError):
                seconds_before = measured_seconds(folder) or 0.0
        return folder, _run(settings, folder, ended, warm, console, restart, watching, requests, seconds_before)


def _peers(peers: Sequence[PeerId]) -> str:
    return f"{'peer' if len(peers) == 1 else 'peers'} {formatting.ids(peers)}"


def _run(
    settings: _Settings,
    folder: RunFolder,
    peers: Sequence[PeerId],
    warm: WarmProcess,
    console: Console,
    restart: Restart,
    watching: Watching,
    requests: Requests,
    seconds_before: float = 0.0,
) -> Summary:
    """Run ``peers`` to the end and summarize. ``seconds_before``: what earlier parts of the run took."""
    print_run_path(folder, console)
    watching.serve(folder, console)
    with ExitStack() as services:
        if settings.mps:
            mps = multi_process_service(folder.root / "mps", settings.peers_per_gpu, console.print)
            environment = services.enter_context(mps)
            warm.kill()
            warm = services.enter_context(WarmProcess(environment))
        trackers = services.enter_context(tracking(folder, console.print))
        processes = follow(
            folder, peers, settings.rounds, warm, console, restart, watching, trackers.failures, requests=requests.new
        )
    from p2pfl.messaging.topology import Topology  # takes memory that the peers no longer need

    seconds = seconds_before + processes.seconds
    return summarize(folder, processes.exit_codes, seconds, Topology(settings.neighbors), processes.errors)
