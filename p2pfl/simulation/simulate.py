"""All peers on one host without sockets: bit-identical to a run over sockets, with the same files.

They take turns in one process, or in several forked ones (simulation/forked.py). With a run folder, an
interrupted run can be resumed: see simulation/replaying_hub.py.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from itertools import cycle
from typing import TypeVar

import torch

from p2pfl import PeerId
from p2pfl.config_hash import DIFFERENT
from p2pfl.errors import ModelError, P2pflError, RunFolderError
from p2pfl.run_file.run import Run
from p2pfl.run_folder.files import allow_many_files
from p2pfl.run_folder.folder import Result, RunFolder, Status
from p2pfl.run_folder.peer_log import LogSettings, close_logger, lock_log, peer_logger
from p2pfl.run_folder.replay import order_of
from p2pfl.session.body_files import FileStore
from p2pfl.session.build import frozen_digest, load_data
from p2pfl.session.child_processes import children_of_plugins
from p2pfl.session.determinism import deterministic
from p2pfl.session.gpus import NO_GPU
from p2pfl.session.session import Runtime, Session
from p2pfl.simulation.clock_hub import ClockHub
from p2pfl.simulation.forked import ForkedHub, failure_of, run_forked
from p2pfl.simulation.local_link import LocalHub
from p2pfl.simulation.replaying_hub import ReplayingHub
from p2pfl.simulation.simulated_time import SimulatedTime
from p2pfl.simulation.untrained import SharedBodies, SharedMemory, UntrainedHub

T = TypeVar("T")
OnRound = Callable[[PeerId, int], None]


def simulate(
    run: Run,
    folder: RunFolder | None = None,
    on_round: OnRound = lambda peer, t: None,
    jobs: int = 1,
    *,
    clock: bool = False,
) -> list[Result]:
    """Run all peers to the end, on the CPU unless the run file says ``device: cuda``.

    Args:
        folder: where each peer writes the files that it would write as a process. If it has checkpoints, the peers
            resume from them. None: write no files.
        on_round: called after each round with the peer and the round.
        jobs: number of processes that share the peers. More than one needs a folder, and a calling process without
            other threads. Results are bit-identical.
        clock: in the order of a simulated clock, by the run file's section ``time``. It needs one process, and no
            checkpoint is read or written.

    Returns:
        Results by peer id.

    Raises:
        RunFileError: there is no GPU, but the run file requires one; or training is left out without a clock.
        RunFolderError: another process runs a peer of the folder, or the peers' files are too many.
        CheckpointError: the peers' checkpoints do not fit one another.
        Deadlock: every peer waits for a message and none is in transit.
        Exception: what the first peer to fail raised.
    """
    jobs = min(jobs, run.peers)
    if not clock:  # which gives messages an order
        run.check_real_time()
        check_order(run, folder)
    device = simulation_device(run, jobs)
    if jobs > 1 and folder is None:
        raise ValueError("several processes exchange messages by the files of a run folder")
    if jobs > 1 and clock:
        raise ValueError("a simulated clock is the clock of one process")
    torch.set_num_threads(1 if jobs > 1 else run.file.threads)
    with children_of_plugins(kill=False):
        data = load_data(run, folder.root if folder else None, record=True)
    sessions: list[Session] = []
    in_turn = cycle(sessions)
    logs: dict[PeerId, logging.Logger] = {}
    time = SimulatedTime(run, data) if clock else None
    memory = None if run.trains else SharedMemory()

    def after_round(peer: PeerId, t: int) -> None:
        on_round(peer, t)
        if clock:
            next(in_turn).status_file.write()  # nothing else does if that peer waits for long

    frozen: set[str | None] = set()
    with ExitStack() as files, _limit_of_files(folder, run.peers), deterministic(strictly=device.type == "cpu"):
        hub: LocalHub
        if time is not None:
            files.callback(time.loop.close)
            hub = (ClockHub if run.trains else UntrainedHub)(time, run.file.transport, logs)
        else:
            hub = LocalHub() if folder is None else ReplayingHub() if jobs == 1 else ForkedHub(run.peers, jobs)
        for me in range(run.peers):
            peer_folder = folder.peer(me) if folder else None
            settings = LogSettings.of(folder.info, me) if folder else None
            log = peer_logger(me, peer_folder.log if peer_folder else None, settings=settings)
            files.callback(close_logger, log)
            if folder is not None and not lock_log(log):
                raise RunFolderError(f"{folder.root}: already running; stop it with `p2pfl stop {folder.root}`")
            if peer_folder is not None:
                peer_folder.sweep()
            run_id = folder.info["id"] if folder else "0" * 16
            runtime = Runtime(device, log=log, on_round=after_round)
            if time is not None:
                attacks = any(me in run.attackers(number) for number in range(len(run.file.adversaries)))
                store = None if memory is None else SharedBodies(memory, me if attacks else None)
                runtime = replace(runtime, wait_policy=time.wait_policy(me), clock=time.clock, store=store)
            elif peer_folder is not None:
                runtime = replace(runtime, store=files.enter_context(closing(FileStore(peer_folder.journal))))
            logs[me] = log
            session = Session(run, me, run_id, data, peer_folder, runtime)
            if memory is not None:
                memory.share(session.algorithm)
            frozen.add(frozen_digest(session.algorithm))
            hub.join(session.endpoint)
            try:
                session.resume()
            except P2pflError as error:
                if peer_folder is not None:
                    last = peer_folder.status() or Status(me, 0)
                    peer_folder.write_status(replace(last, pid=os.getpid(), phase="failed", error=str(error)))
                raise
            sessions.append(session)
        if len(frozen) > 1:
            raise run.error_at(run.file.models.key, ModelError(f"frozen parameters {DIFFERENT}"))
        if isinstance(hub, ReplayingHub):
            hub.replay({session.me: session.rounds_done for session in sessions})
        if isinstance(hub, ForkedHub):
            results = run_forked(sessions, hub, run.file.threads)
        else:
            loop = asyncio.new_event_loop if time is None else lambda: time.loop
            with children_of_plugins(kill=False), asyncio.Runner(loop_factory=loop) as runner:
                results = runner.run(_in_turns(sessions, hub))
        for session in sessions:
            session.endpoint.journal.clear()  # no peer needs the last messages
    return results


def check_order(run: Run, folder: RunFolder | None) -> None:
    """Raise RunFileError if rounds do not wait for one another, and nothing says in which order messages arrive."""
    if run.file.synchrony.bound is None:
        return
    if folder is None or not all(order_of(folder.peer(peer)).exists() for peer in range(run.peers)):
        text = "nothing orders messages here: use `p2pfl launch`, or `p2pfl simulate` with --clock or --replay RUN"
        raise run.error_at("synchrony", P2pflError(text))


@contextmanager
def _limit_of_files(folder: RunFolder | None, peers: int) -> Iterator[None]:
    """Let this process open as many files as it may. Raises RunFolderError if that is not enough."""
    if folder is not None:
        allow_many_files()
    try:
        yield
    except OSError as error:
        if folder is None or error.errno != errno.EMFILE:
            raise
        raise RunFolderError(
            f"{folder.root}: this process may not open enough files for {peers} peers; raise the limit (`ulimit -n`)"
        ) from error


def simulation_device(run: Run, jobs: int = 1) -> torch.device:
    """Return where simulated peers compute: on the CPU, unless a GPU is required. Raises RunFileError."""
    if run.file.device != "cuda":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise run.error_at("device", P2pflError(f"cuda, but {NO_GPU}"))
    if jobs > 1:
        reason = P2pflError("peers on a GPU are simulated in one process; leave out --jobs, or set device: cpu")
        raise run.error_at("device", reason)
    # cuBLAS is deterministic only with a workspace of fixed size.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.empty(0, device="cuda")  # so that random streams include the GPU's
    return torch.device("cuda", torch.cuda.current_device())


async def _in_turns(sessions: Sequence[Session], hub: LocalHub) -> list[Result]:
    """Run all peers in this process."""
    failures: list[BaseException] = []

    async def run_peer(session: Session) -> Result:
        try:
            return await session.run()
        except Exception as error:
            failures.append(failure_of(session, error))
            raise
        finally:
            hub.finish(session.me)

    hub.start()
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run_peer(session)) for session in sessions]
    except BaseExceptionGroup:
        raise failures[0] from None  # the others failed as a consequence
    if hub.failure is not None:  # which no peer has waited for
        raise hub.failure
    return [task.result() for task in tasks]


def without_event_loop(function: Callable[[], T], interrupted: threading.Event) -> T:
    """Call a function that starts an event loop: in a thread if one is running in this one, as in Jupyter."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return function()
    outcome: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            outcome.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, name="p2pfl simulate")
    thread.start()
    try:
        thread.join()
    except KeyboardInterrupt:
        interrupted.set()  # it ends after its round
        thread.join()
        raise
    if errors:
        raise errors[0]
    return outcome[0]
