"""All peers in one process, over LocalLinks: the same bits as a run over sockets, and the same files."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from p2pfl.config import Run
from p2pfl.net import LocalHub
from p2pfl.peerlog import close_logger, peer_logger
from p2pfl.runfolder import PeerId, Result, RunFolder
from p2pfl.session import Session, load_data


def simulate(
    run: Run,
    folder: RunFolder | None = None,
    on_round: Callable[[PeerId, int], None] = lambda peer, t: None,
) -> list[Result]:
    """Drive all peers of ``run`` to the end; results by peer id.

    With a folder, every peer writes the files that it would write as a process. The calculation is always on
    the CPU, with the run's number of threads. Raises what the first peer to fail raised; Deadlock if none can go on.
    """
    return asyncio.run(_simulate(run, folder, on_round))


async def _simulate(run: Run, folder: RunFolder | None, on_round: Callable[[PeerId, int], None]) -> list[Result]:
    torch.set_num_threads(run.file.threads)
    data = load_data(run)
    run_id = folder.about["id"] if folder else "0" * 16
    hub = LocalHub()
    sessions = []
    for me in range(run.peers):
        place = folder.peer(me) if folder else None
        session = Session(
            run,
            me,
            run_id,
            data,
            folder=place,
            log=peer_logger(me, place.log if place else None),
            pid=os.getpid(),
            on_round=on_round,
        )
        hub.join(session.endpoint)
        sessions.append(session)

    async def one(session: Session) -> Result:
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
                tasks = [group.create_task(one(session)) for session in sessions]
        except BaseExceptionGroup:
            raise failures[0] from None  # the others failed because of that one
    return [task.result() for task in tasks]


@contextmanager
def deterministic(*, strictly: bool = True) -> Iterator[None]:
    """Torch uses kernels whose results do not vary from run to run, inside.

    Where it has none it refuses, or if not ``strictly``, warns: equal bits are promised on the CPU only.
    """
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=not strictly)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
