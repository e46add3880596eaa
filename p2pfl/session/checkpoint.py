"""Checkpoints: the complete state of a peer after a round.

A checkpoint is one file, replaced atomically and durably: a SHA-256 checksum of the rest (torch does not verify its
own), ``_MAGIC``, the offset of the second part, and two outputs of ``torch.save``, which are loaded as one mapping.
They are loaded with ``weights_only``: tensors and plain containers, and nothing is executed. They contain the run and
the peer that the checkpoint belongs to, and its format.

The previous checkpoint is kept and replaces a damaged one. So neighbors may discard a message to this peer only once
the *previous* checkpoint contains it.
"""

from __future__ import annotations

import hashlib
import io
import logging
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from p2pfl import PeerId
from p2pfl.errors import CheckpointError, WriteError
from p2pfl.session.files import NewFile, write_errors

State = dict[str, Any]

FORMAT = 5
"""Version of the state's layout. A format mismatch is not corruption: both files are left in place."""

_CHECKSUM_BYTES = hashlib.sha256().digest_size
_MAGIC = b"p2pfl\x00\x00\x05"
_START = _CHECKSUM_BYTES + len(_MAGIC) + 8
"""Offset of the first part."""


def previous(path: Path) -> Path:
    """The path of the previous checkpoint."""
    return path.with_stem(f"{path.stem}-previous")


def damaged(path: Path) -> Path:
    """The path that an unusable checkpoint is moved to, for inspection."""
    return path.with_stem(f"{path.stem}-damaged")


class Draft:
    """A state in a file that is not the checkpoint yet: later states may replace it, and one may become it.

    To write a state there takes no memory for a copy of it, and less time than to copy it. Nothing waits for the disk
    until ``publish``.

    Args:
        path: of the checkpoint.

    Raises:
        WriteError: from any method, if the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._size = self._divide = 0
        with write_errors(path):
            self._file = NewFile(path)

    def write(self, state: State) -> None:
        """Replace the content by ``state``; later training does not modify it."""
        self._size = _START
        self._save(state)
        self._divide = self._size

    def read(self) -> State:
        """Return the state that was written."""
        content = memoryview(b"".join(self._file.parts(_START)))
        state: State = _load(content[: self._divide - _START])
        return state

    def publish(self, more: State) -> None:
        """Make a checkpoint of the state together with ``more``, and keep the old one as the previous checkpoint.

        After a crash at any point, at least one of the two is intact and not older than the old file.
        """
        self._save(more)
        with write_errors(self.path):
            self._file.truncate(self._size)
            self._file.write(_MAGIC + self._divide.to_bytes(8, "little"), _CHECKSUM_BYTES)
            sha = hashlib.sha256()
            for part in self._file.parts(_CHECKSUM_BYTES):
                sha.update(part)
            self._file.write(sha.digest(), 0)
            self._file.replace(keep=previous(self.path))

    def close(self) -> None:
        """Close the file, and delete it if it is not the checkpoint."""
        self._file.close()

    def _save(self, state: State) -> None:
        sink = _Sink(self._file, self._size)
        with _without_crc32():
            torch.save(_dense(state), sink)  # type: ignore[arg-type]  # it only writes and flushes
        self._size = sink.end
        if sink.error is not None:
            raise WriteError(self.path, sink.error) from sink.error


class _Sink:
    """Writes to a file from an offset on. Keeps an error to itself: torch's C++ code may abort on one."""

    def __init__(self, file: NewFile, at: int) -> None:
        self._file = file
        self.end = at
        self.error: OSError | None = None

    def write(self, data: memoryview | bytes) -> int:
        size = memoryview(data).nbytes
        try:
            if self.error is None:
                self._file.write(data, self.end)
        except OSError as error:
            self.error = error
        self.end += size
        return size

    def flush(self) -> None:
        pass


@contextmanager
def _without_crc32() -> Iterator[None]:
    """Have torch leave out its checksums, which take twice as long as all the rest: the file has a better one."""
    setter = getattr(torch.serialization, "set_crc32_options", None)  # since torch 2.6
    if setter is None:
        yield
        return
    before = torch.serialization.get_crc32_options()
    setter(False)
    try:
        yield
    finally:
        setter(before)


def _dense(state: Any) -> Any:
    """Return the state without gradients, and with tensors that have no other numbers in their memory."""
    if isinstance(state, torch.Tensor):
        tensor = state.detach()
        return tensor if tensor.nbytes == tensor.untyped_storage().nbytes() else tensor.clone()
    if isinstance(state, dict):
        return {key: _dense(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_dense(value) for value in state)
    return state


def save(path: Path, state: State) -> None:
    """Write ``state`` to ``path``, as ``Draft`` does."""
    with closing(Draft(path)) as draft:
        draft.write(state)
        draft.publish({})


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
        parts = [_load(part) for part in _parts(content)]
    except MemoryError:
        raise
    except Exception as error:  # torch.load interprets the bytes and may raise anything
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise CheckpointError(f"{path}: damaged: {reason}") from None
    if not all(isinstance(part, dict) for part in parts):
        raise CheckpointError(f"{path}: damaged: not a mapping")
    return {key: value for part in parts for key, value in part.items()}


def _parts(content: memoryview) -> list[memoryview]:
    head, rest = content[_CHECKSUM_BYTES:_START], content[_CHECKSUM_BYTES:]
    if head[: len(_MAGIC)] != _MAGIC:
        return [rest]  # an older format, which says so
    divide = int.from_bytes(head[len(_MAGIC) :], "little")
    return [content[_START:divide], content[divide:]]


def _load(part: memoryview) -> Any:
    return torch.load(io.BytesIO(part), map_location="cpu", weights_only=True)  # noqa: TID251  # weights only


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
