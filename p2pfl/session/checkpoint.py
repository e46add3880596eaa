"""Checkpoints: the complete state of a peer after a round.

A checkpoint is one file, replaced atomically and durably: a SHA-256 checksum, then the output of ``torch.save``
(torch does not verify its own checksums). It is loaded with ``weights_only``: tensors and plain containers, and
nothing is executed. It contains the run and the peer that it belongs to, and its format.

The previous checkpoint is kept and replaces a damaged one. So neighbors may discard a message to this peer only once
the *previous* checkpoint contains it.
"""

from __future__ import annotations

import copy
import hashlib
import io
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from p2pfl import PeerId
from p2pfl.errors import CheckpointError
from p2pfl.session.files import write_atomically

State = dict[str, Any]

FORMAT = 4
"""Version of the state's layout. A format mismatch is not corruption: both files are left in place."""

_CHECKSUM_BYTES = hashlib.sha256().digest_size


def previous(path: Path) -> Path:
    """The path of the previous checkpoint."""
    return path.with_stem(f"{path.stem}-previous")


def damaged(path: Path) -> Path:
    """The path that an unusable checkpoint is moved to, for inspection."""
    return path.with_stem(f"{path.stem}-damaged")


def snapshot(state: Any) -> Any:
    """Copy the state deeply to the CPU; later training does not modify the copy."""
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {key: snapshot(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(snapshot(value) for value in state)
    return copy.deepcopy(state)


def save(path: Path, state: State) -> None:
    """Write ``state`` to ``path``, and keep the old file as the previous checkpoint. Raises RunFolderError.

    After a crash at any point, at least one of the two is intact and not older than the old file.
    """
    buffer = io.BytesIO()
    buffer.write(bytes(_CHECKSUM_BYTES))
    torch.save(state, buffer)
    with buffer.getbuffer() as content:
        content[:_CHECKSUM_BYTES] = hashlib.sha256(content[_CHECKSUM_BYTES:]).digest()
        write_atomically(path, content, durable=True, keep=previous(path))


def load(
    path: Path,
    run_id: str,
    me: PeerId,
    log: logging.Logger | None = None,
    damage: Callable[[State], str] = lambda state: "",
) -> State | None:
    """Load the newest usable state; None if there is no checkpoint yet.

    ``damage`` names what a state refers to and is damaged, if anything is; such a state is not usable.

    An unusable newest checkpoint is moved aside and logged, and the previous one is loaded. Raises CheckpointError if
    neither is usable, or if another version of p2pfl wrote one of them.
    """
    newest, error = _load_usable(path, run_id, me, damage)
    if newest is not None:
        return newest
    older, older_error = _load_usable(previous(path), run_id, me, damage)
    if older_error is not None:
        raise CheckpointError(
            f"{error or f'{path}: not found'}; {older_error}; restore a copy of one of them, or remove both to start "
            "from round 0 without the messages that the neighbors have already discarded"
        )
    if error is not None:
        moved = path.replace(damaged(path))
        if log is not None:
            state = "round 0" if older is None else f"the previous checkpoint, after round {older['rounds_done'] - 1}"
            log.warning("checkpoint unusable moved_to=%s: %s; resuming from %s", moved.name, error, state)
    return older


def read(path: Path) -> State:
    """Read a checkpoint of any run and peer. Raises CheckpointError if it is missing or damaged."""
    try:
        content = memoryview(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if hashlib.sha256(content[_CHECKSUM_BYTES:]).digest() != content[:_CHECKSUM_BYTES]:
        raise CheckpointError(f"{path}: damaged: checksum mismatch")
    try:
        state = torch.load(io.BytesIO(content[_CHECKSUM_BYTES:]), map_location="cpu", weights_only=True)  # noqa: TID251  # weights only
    except MemoryError:
        raise
    except Exception as error:  # torch.load interprets the bytes and may raise anything
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise CheckpointError(f"{path}: damaged: {reason}") from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: damaged: not a mapping")
    return state


def _load_usable(
    path: Path, run_id: str, me: PeerId, damage: Callable[[State], str]
) -> tuple[State | None, CheckpointError | None]:
    """The state in ``path``, or why it is unusable; neither if there is no such file."""
    try:
        state = read(path)
    except CheckpointError as error:
        return None, None if isinstance(error.__cause__, FileNotFoundError) else error
    if (state.get("run"), state.get("peer")) != (run_id, me):
        return None, CheckpointError(f"{path}: belongs to another run or peer")
    if (found := state.get("format")) != FORMAT:
        raise CheckpointError(
            f"{path}: has format {found or 1}, but this version of p2pfl reads format {FORMAT}: resume the run with "
            "the version that started it, or launch it again"
        )
    if damaged := damage(state):
        return None, CheckpointError(f"{path}: {damaged}")
    return state, None
