"""When and how a session's checkpoints are written: on a thread, one at a time, while training goes on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from time import perf_counter
from typing import Any, Literal, TypeVar

from p2pfl import PeerId
from p2pfl.messaging.endpoint import Endpoint
from p2pfl.session import checkpoint
from p2pfl.session.files import sync
from p2pfl.session.run_folder import PeerFolder

T = TypeVar("T")

MAX_INTERVAL = 30.0
"""Seconds between two checkpoints, at most, with ``checkpoint_every: auto``: work that a crash repeats."""
MAX_TAKEN = 1 << 26
"""Bytes received since the last checkpoint, at most, with ``auto``: the senders keep them on their disks."""
COST = 50.0
"""With ``auto``, the next checkpoint follows after this many times the seconds that the last one took."""


async def on_thread(function: Callable[[], T]) -> T:
    return await asyncio.to_thread(function)


class Saver:
    """Writes the checkpoints of one peer.

    Args:
        folder: the peer's files.
        endpoint: its journal is part of a checkpoint; its neighbors are told what they need not keep.
        every: after every n-th round, or as often as is cheap.
        me: this peer. Peers of a host write at different times.
        log: the peer's log.
    """

    def __init__(
        self, folder: PeerFolder, endpoint: Endpoint, every: int | Literal["auto"], me: PeerId, log: logging.Logger
    ) -> None:
        self.saved = -1
        """Rounds in the last checkpoint; -1 before the first."""
        self._folder = folder
        self._endpoint = endpoint
        self._every = every
        self._log = log
        self._draft: checkpoint.Draft | None = None
        """The state after the last round; None if it became a checkpoint."""
        self.kept = -1
        """Rounds in the last state that was kept; -1 before the first."""
        self._writing: asyncio.Task[None] | None = None
        self._due_at = perf_counter() + MAX_INTERVAL * (me * 0.618034 % 1.0)
        self._taken = 0

    def is_due(self, rounds_done: int) -> bool:
        """Return whether to write a checkpoint after ``rounds_done`` rounds."""
        if isinstance(self._every, int):
            return rounds_done % self._every == 0
        taken = self._endpoint.taken_bytes - self._taken
        busy = self._writing is not None and not self._writing.done()
        return not busy and (perf_counter() >= self._due_at or taken > MAX_TAKEN)

    def keep(self, state: checkpoint.State) -> None:
        """Keep ``state``, between two rounds, for the next checkpoint. Raises WriteError."""
        if self._draft is None:
            self._draft = checkpoint.Draft(self._folder.checkpoint)
        self._draft.write(state)
        self.kept = state["rounds_done"]

    async def begin(self) -> None:
        """Make a checkpoint of the last state in the background, once the last one is written.

        Raises what writing that one raised.
        """
        await self.wait()
        if self.kept > self.saved:
            self._taken = self._endpoint.taken_bytes
            self._writing = asyncio.create_task(self._write())

    async def wait(self) -> None:
        """Wait until the checkpoint in progress is written. Raises WriteError if it cannot be."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            await writing

    async def finish(self, keep: Callable[[], None] | None) -> None:
        """Write the last checkpoint of this process.

        Args:
            keep: keeps the present state again. Given if no process of this peer will follow and the neighbors will
                disconnect: then both files are written.
        """
        await self.wait()
        while self.saved < self.kept or (keep is not None and self._endpoint.durable < self.kept):
            if self._draft is None and keep is not None:
                keep()
            await self._write()

    def read(self) -> checkpoint.State:
        """Return the last state that was kept."""
        return checkpoint.read(self._folder.checkpoint) if self._draft is None else self._draft.read()

    def close(self) -> None:
        """Delete the state that was not saved."""
        if self._draft is not None:
            self._draft.close()

    async def _write(self) -> None:
        began = perf_counter()
        done = self.kept
        draft, self._draft = self._draft, None
        assert draft is not None

        def write() -> None:
            try:
                sync(self._folder.metrics)  # a peer that resumes from this checkpoint does not write them again
                draft.publish({"journal": self._endpoint.journal.state_dict(before=done)})
            finally:
                draft.close()
            self._endpoint.journal.saved(before=done)

        await on_thread(write)
        # If this checkpoint is damaged, messages since the previous one are needed again.
        self._endpoint.durable = max(0, self.saved)
        self.saved = done
        self._endpoint.link.checkpointed(self._endpoint.durable)
        now = perf_counter()
        self._due_at = now + min(MAX_INTERVAL, COST * (now - began))
        self._log.debug("checkpoint written t=%d", done - 1)


def load(folder: PeerFolder, endpoint: Endpoint, run_id: str, log: logging.Logger) -> dict[str, Any] | None:
    """Load the last usable checkpoint whose messages are intact, and restore the endpoint from it."""
    saved = checkpoint.load(
        folder.checkpoint, run_id, folder.peer, log, lambda state: endpoint.journal.damaged(state["journal"])
    )
    if saved is not None:
        endpoint.load_state_dict(saved["endpoint"], saved["journal"], saved["rounds_done"])
    return saved
