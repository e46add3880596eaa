"""Checkpoints: everything a peer needs to go on after a round as if nothing had happened.

A checkpoint is one file, replaced atomically and durably: the SHA-256 of what follows, then what ``torch.save``
writes. It is loaded with ``weights_only`` (tensors and plain containers; nothing in it is executed). It names
the run and the peer that it belongs to.
"""

from __future__ import annotations

import copy
import hashlib
import io
from pathlib import Path
from typing import Any

import torch

from p2pfl.errors import CheckpointError
from p2pfl.runfolder import PeerId, write_atomically

_SUM = hashlib.sha256().digest_size


def snapshot(state: Any) -> Any:
    """A deep copy on the CPU that later training does not touch."""
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {key: snapshot(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(snapshot(value) for value in state)
    return copy.deepcopy(state)


def save(path: Path, state: dict[str, Any]) -> None:
    """Write ``state`` so that after a crash the old or the new file is there, whole. Raises RunFolderError."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    content = buffer.getvalue()
    write_atomically(path, hashlib.sha256(content).digest() + content, durable=True)


def load(path: Path, run_id: str, me: PeerId) -> dict[str, Any] | None:
    """The state last saved, or None if there is none. Raises CheckpointError."""
    try:
        state = read(path)
    except CheckpointError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise CheckpointError(f"{error}; remove it to start this peer from round 0") from None
    if (state.get("run"), state.get("peer")) != (run_id, me):
        raise CheckpointError(f"{path}: belongs to another run or peer; remove it to start from round 0")
    return state


def read(path: Path) -> dict[str, Any]:
    """The state in a checkpoint of any run and peer. Raises CheckpointError, also if there is none."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if hashlib.sha256(content[_SUM:]).digest() != content[:_SUM]:
        raise CheckpointError(f"{path}: damaged: its checksum is wrong")
    try:
        state = torch.load(io.BytesIO(content[_SUM:]), map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load reads bytes as a program, which may fail in any way
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise CheckpointError(f"{path}: damaged: {reason}") from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: damaged: no mapping of names to values")
    return state
