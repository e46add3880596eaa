"""Drive the sessions of a run in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from p2pfl.run_file.run import Run
from p2pfl.run_folder.folder import RunFolder
from p2pfl.session.build import load_data
from p2pfl.session.determinism import deterministic
from p2pfl.session.session import Session
from p2pfl.simulation.local_link import LocalHub


def in_process(
    run: Run, folder: RunFolder | None, life: Callable[[list[Session]], Awaitable[Any]], **options: Any
) -> Any:
    """Run ``life`` with the connected sessions of all peers."""

    async def main() -> Any:
        data, hub, sessions = load_data(run), LocalHub(), []
        for me in range(run.peers):
            peer_folder = folder.peer(me) if folder else None
            session = Session(run, me, folder.info["id"] if folder else "0" * 16, data, folder=peer_folder, **options)
            hub.join(session.endpoint)
            sessions.append(session)
        with deterministic():
            return await life(sessions)

    return asyncio.run(main())
