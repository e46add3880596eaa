"""Checkpoints: everything a peer needs to go on after a round as if nothing had happened.

A checkpoint is one file, replaced atomically and durably: the SHA-256 of what follows, then what ``torch.save``
writes (whose own checksums torch does not look at). It is loaded with ``weights_only`` (tensors and plain
containers; nothing in it is executed). It names the run and the peer that it belongs to, and its format.

The one before is kept beside it, and stands in for it if it is damaged. So what a peer was sent may be forgotten
only when the checkpoint *before* the newest one holds it.
"""

from __future__ import annotations

import copy
import hashlib
import io
import logging
from pathlib import Path
from typing import Any

import torch

from p2pfl.errors import CheckpointError
from p2pfl.runfolder import PeerId, write_atomically

State = dict[str, Any]

FORMAT = 2
"""Of what a peer keeps in its state. One that was written in another is no damaged one: nothing is touched."""

_SUM = hashlib.sha256().digest_size


def previous(path: Path) -> Path:
    """Where the checkpoint is that was at ``path`` before."""
    return path.with_stem(f"{path.stem}-previous")


def damaged(path: Path) -> Path:
    """Where a checkpoint that cannot be used is moved to, for whoever wants to know why."""
    return path.with_stem(f"{path.stem}-damaged")


def snapshot(state: Any) -> Any:
    """A deep copy on the CPU that later training does not touch."""
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {key: snapshot(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(snapshot(value) for value in state)
    return copy.deepcopy(state)


def save(path: Path, state: State) -> None:
    """Write ``state`` to ``path``, and keep what was there as the one before. Raises RunFolderError.

    Whatever happens meanwhile, one of the two is whole afterwards, and it is not older than what ``path`` held.
    """
    buffer = io.BytesIO()
    buffer.write(bytes(_SUM))
    torch.save(state, buffer)
    with buffer.getbuffer() as content:
        content[:_SUM] = hashlib.sha256(content[_SUM:]).digest()
        write_atomically(path, content, durable=True, keep=previous(path))


def load(path: Path, run_id: str, me: PeerId, log: logging.Logger | None = None) -> State | None:
    """The last state that can be used; None if this peer begins at round 0.

    If that is not the newest one, ``log`` is told which file was damaged, or another's, and from where the peer goes
    on. Raises CheckpointError if none can be used, or if another version of p2pfl has written one of them.
    """
    before = previous(path)
    newest, error = _usable(path, run_id, me)
    if newest is not None:
        return newest
    older, another = _usable(before, run_id, me)
    if another is not None:
        raise CheckpointError(
            f"{error or f'{path}: is not there'}; {another}; put back a copy of one of them, or remove both: then "
            "this peer starts from round 0, without what its neighbours no longer have"
        )
    if error is not None:
        aside = path.replace(damaged(path))
        since = "the beginning: there was none before" if older is None else f"the one after round {_last(older)}"
        if log is not None:
            log.warning("%s; set aside as %s; going on from %s", error, aside.name, since)
    return older


def read(path: Path) -> State:
    """The state in a checkpoint of any run and peer. Raises CheckpointError, also if there is none."""
    try:
        content = memoryview(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if hashlib.sha256(content[_SUM:]).digest() != content[:_SUM]:
        raise CheckpointError(f"{path}: damaged: its checksum is wrong")
    try:
        state = torch.load(io.BytesIO(content[_SUM:]), map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # torch.load reads bytes as a program, which may fail in any way
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise CheckpointError(f"{path}: damaged: {reason}") from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: damaged: no mapping of names to values")
    return state


def _usable(path: Path, run_id: str, me: PeerId) -> tuple[State | None, CheckpointError | None]:
    """The state in ``path``, or why it cannot be used; neither if there is no such file."""
    try:
        state = read(path)
    except CheckpointError as error:
        return None, None if isinstance(error.__cause__, FileNotFoundError) else error
    if (state.get("run"), state.get("peer")) != (run_id, me):
        return None, CheckpointError(f"{path}: belongs to another run or peer")
    if (found := state.get("format")) != FORMAT:
        raise CheckpointError(
            f"{path}: of format {found or 1}, and this version of p2pfl goes on from format {FORMAT}: resume the run "
            "with the version that began it, or launch it anew"
        )
    return state, None


def _last(state: State) -> int:
    """The last round that is in it."""
    return int(state["rounds_done"]) - 1
