"""When and how a session's checkpoints are written: on a thread, one at a time, while training continues."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any, Literal, TypeVar

from p2pfl import PeerId
from p2pfl.algorithms.base import Algorithm
from p2pfl.errors import CheckpointError, P2pflError, PluginError
from p2pfl.messaging.endpoint import Endpoint
from p2pfl.plugins.loading import definition
from p2pfl.run_folder.files import sync
from p2pfl.run_folder.folder import PeerFolder
from p2pfl.session import checkpoint
from p2pfl.session.checkpoint_copies import CheckpointCopies
from p2pfl.session.order import repeat_order

T = TypeVar("T")

MAX_INTERVAL = 30.0
"""Seconds between two checkpoints, at most, with ``checkpoint_every: auto``: work that a crash repeats."""
MAX_AGE = 5.0
"""Seconds, at most, between two states that are kept with ``auto``: work that a stop repeats. To keep one takes a
fortieth of a small model's round."""
MAX_TAKEN = 1 << 26
"""Bytes received after which ``auto`` brings the next checkpoint forward: the senders keep them on their disks."""
COST, COST_FORWARD = 50.0, 3.0
"""With ``auto``, the next checkpoint follows after this many times the seconds that the last one took; the second
number is the minimum if it is brought forward."""


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
        copies: where to copy each checkpoint, if the run file asks for it.
    """

    def __init__(
        self,
        folder: PeerFolder,
        endpoint: Endpoint,
        every: int | Literal["auto"],
        me: PeerId,
        log: logging.Logger,
        copies: CheckpointCopies | None = None,
    ) -> None:
        self.saved = -1
        """Rounds in the last checkpoint; -1 before the first."""
        self._folder = folder
        self._endpoint = endpoint
        self._every = every
        self._log = log
        self._copies = copies
        self.kept = -1
        """Rounds in the last state that was kept; -1 before the first."""
        self._kept_at = 0.0
        self._last: checkpoint.KeptState | None = None
        """Holds the last state that was kept."""
        self._spare: checkpoint.KeptState | None = None
        self._in_use: checkpoint.KeptState | None = None
        """The one of the two that is being written to a checkpoint, if any is."""
        self._writing: asyncio.Task[None] | None = None
        self._due_at = perf_counter() + MAX_INTERVAL * (me * 0.618034 % 1.0)
        self._earliest = 0.0
        self._taken = 0

    def is_due(self, rounds_done: int) -> bool:
        """Return whether to write a checkpoint after ``rounds_done`` rounds."""
        if isinstance(self._every, int):
            return rounds_done % self._every == 0
        taken = self._endpoint.taken_bytes - self._taken
        busy = self._writing is not None and not self._writing.done()
        due_at = self._earliest if taken > MAX_TAKEN else self._due_at
        return not busy and perf_counter() >= due_at

    def is_stale(self) -> bool:
        """Return whether to keep the state after this round, although no checkpoint is due."""
        return isinstance(self._every, int) or perf_counter() - self._kept_at >= MAX_AGE

    def keep(self, state: checkpoint.PeerState) -> None:
        """Keep ``state``, between two rounds, for the next checkpoint. Raises WriteError."""
        if self._last is None or self._last is self._in_use:
            self._last, self._spare = self._spare or checkpoint.KeptState(self._folder.root), self._last
        self._last.write(state)
        self.kept, self._kept_at = state["rounds_done"], perf_counter()

    def read(self) -> checkpoint.PeerState:
        """Return the last state that was kept, valid until the next one is."""
        assert self._last is not None
        return self._last.read()

    async def begin(self) -> None:
        """Make a checkpoint of the last state in the background, once the last one is written.

        Raises WriteError if the last one could not be written.
        """
        await self.wait()
        if self.kept > self.saved:
            self._taken = self._endpoint.taken_bytes
            self._in_use = self._last
            self._writing = asyncio.create_task(self._write(self.read()))

    async def wait(self) -> None:
        """Wait until the checkpoint in progress is written. Raises WriteError if it cannot be."""
        if self._writing is not None:
            await asyncio.wait((self._writing,))  # a cancelled wait leaves it running: its thread cannot be stopped
            writing, self._writing = self._writing, None
            writing.result()

    async def finish(self, *, final: bool) -> None:
        """Write the last checkpoint of this process.

        Args:
            final: none will follow, and the neighbors will disconnect: write both files.
        """
        await self.wait()
        while self.saved < self.kept or (final and self._endpoint.durable < self.kept):
            self._writing = asyncio.create_task(self._write(self.read(), final=final, last=True))
            await self.wait()

    def close(self) -> None:
        """Delete what was kept."""
        for state in (self._last, self._spare):
            if state is not None:
                state.close()

    async def _write(self, state: checkpoint.PeerState, *, final: bool = False, last: bool = False) -> None:
        began = perf_counter()
        done = state["rounds_done"]
        copied = -1 if self._copies is None else self._copies.rounds_done

        def write() -> bool:
            sync(self._folder.metrics)  # a peer that resumes from this checkpoint does not write these records again
            journal = self._endpoint.journal.state_dict(before=done)
            checkpoint.save(self._folder.checkpoint, {**state, "journal": journal})
            self._endpoint.journal.saved(before=done)
            return self._copies is None or self._copies.save(done, _segments(journal), last=last)

        complete = await on_thread(write)
        self._in_use = None
        # If this checkpoint is damaged, messages since the previous one are needed again. The same holds for copies,
        # if the host does not come back. At its end, a run does not wait for them.
        before = self.saved if self._copies is None or final else min(self.saved, copied)
        self.saved = done
        if complete or final:
            self._endpoint.durable = max(0, before)
            self._endpoint.link.checkpointed(self._endpoint.mailbox.needed_after(self._endpoint.durable))
        now = perf_counter()
        self._due_at = now + min(MAX_INTERVAL, COST * (now - began))
        self._earliest = now + min(MAX_INTERVAL, COST_FORWARD * (now - began))
        self._log.debug("checkpoint written t=%d", done - 1)


def _segments(journal: dict[str, Any]) -> dict[int, int]:
    """Return the bytes of each segment that the journal's index refers to."""
    found: dict[int, int] = {}
    for _, _, _, size, place, *_ in journal["entries"]:
        if place is not None:
            segment, at = place
            found[segment] = max(found.get(segment, 0), at + size)
    return found


def unstorable(
    error: checkpoint.Unstorable, state: Mapping[str, Any], algorithm: Algorithm[Any], rounds_done: int
) -> P2pflError:
    """Return the error that names the attribute of a method, and its line, that no checkpoint can hold."""
    places = (error.place(value, f"self.{name}") for name, value in state.items())
    place = next(filter(None, places), "the state")
    defined = definition(type(algorithm).round if rounds_done else type(algorithm).setup)
    text = f"{place} is {error}"
    return PluginError(*defined, text) if defined else P2pflError(text)


def load(
    folder: PeerFolder,
    endpoint: Endpoint,
    run_id: str,
    log: logging.Logger,
    copies: CheckpointCopies | None = None,
) -> dict[str, Any] | None:
    """Load the last usable checkpoint whose messages are intact, and restore the endpoint from it.

    Args:
        copies: of this peer's checkpoints. The newest copy is restored first if it is newer than the folder's
            checkpoint, and also if the folder's only checkpoint is damaged.

    Rounds that do not wait for one another then repeat what an earlier process has taken.

    Raises CheckpointError if both checkpoints are damaged, or the newest copy is.
    """

    def newest(otherwise: str) -> checkpoint.PeerState | None:
        return checkpoint.load(
            folder.checkpoint,
            run_id,
            folder.peer,
            log,
            lambda state: endpoint.journal.damaged(state["journal"]),
            otherwise=otherwise,
        )

    restored = copies is not None and copies.restore()
    if copies is None or not copies.newest:
        saved = newest(checkpoint.START)
    else:
        saved = newest("" if restored else "the newest copy")
        if saved is None and not restored:
            # A restored checkpoint has no previous one. It has been damaged since, and was moved aside above.
            copies.restore()
            saved = newest("")
        if saved is None:
            raise CheckpointError(
                f"checkpoint_copies {copies.url}: the copy {copies.newest} of peer {folder.peer} is damaged; delete "
                "this list to restore the copy before it, then resume the run"
            )
    if saved is not None:
        endpoint.load_state_dict(saved["endpoint"], saved["journal"], saved["rounds_done"])
    else:
        endpoint.journal.clear()  # an earlier process may have been killed before its first checkpoint
    repeat_order(endpoint.mailbox, folder, 0 if saved is None else saved["rounds_done"], log)
    return saved
