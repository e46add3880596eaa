"""All peers in one process, over LocalLinks: bit-identical to a run over sockets, with the same files."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from p2pfl import PeerId
from p2pfl.messaging.local import LocalHub
from p2pfl.run_file.run import Run
from p2pfl.session.build import load_data
from p2pfl.session.peer_log import close_logger, peer_logger
from p2pfl.session.run_folder import Result, RunFolder
from p2pfl.session.session import Session


def simulate(
    run: Run,
    folder: RunFolder | None = None,
    on_round: Callable[[PeerId, int], None] = lambda peer, t: None,
) -> list[Result]:
    """Run all peers to the end, on the CPU.

    Args:
        folder: where each peer writes the files that it would write as a process; None writes none.
        on_round: called after each round with the peer and the round.

    Returns:
        Results by peer id.

    Raises:
        Deadlock: every peer waits for a message and none is in transit.
        Exception: what the first peer to fail raised.
    """
    return asyncio.run(_simulate(run, folder, on_round))


async def _simulate(run: Run, folder: RunFolder | None, on_round: Callable[[PeerId, int], None]) -> list[Result]:
    torch.set_num_threads(run.file.threads)
    data = load_data(run)
    run_id = folder.info["id"] if folder else "0" * 16
    hub = LocalHub()
    sessions = []
    for me in range(run.peers):
        peer_folder = folder.peer(me) if folder else None
        session = Session(
            run,
            me,
            run_id,
            data,
            folder=peer_folder,
            log=peer_logger(me, peer_folder.log if peer_folder else None),
            pid=os.getpid(),
            on_round=on_round,
        )
        hub.join(session.endpoint)
        sessions.append(session)

    async def run_peer(session: Session) -> Result:
        try:
            return await session.run()
        except Exception as error:
            failures.append(error)
            raise
        finally:
            hub.finish(session.me)
            close_logger(session.log)

    failures: list[BaseException] = []

    with deterministic():
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(run_peer(session)) for session in sessions]
        except BaseExceptionGroup:
            raise failures[0] from None  # the others failed as a consequence
    return [task.result() for task in tasks]


@contextmanager
def deterministic(*, strictly: bool = True) -> Iterator[None]:
    """Restrict torch to deterministic kernels inside.

    Args:
        strictly: raise an error where torch has none; otherwise warn (bit-identical results are guaranteed on the CPU
            only).
    """
    before = torch.get_deterministic_debug_mode()
    # Not use_deterministic_algorithms, which does the same but imports torch's compiler.
    torch.set_deterministic_debug_mode("error" if strictly else "warn")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
