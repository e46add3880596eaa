"""Checkpoints: the complete state of a peer after a round.

A checkpoint is one file, replaced atomically and durably: a SHA-256 checksum, then the output of ``torch.save``
(torch does not verify its own checksums). It is loaded with ``weights_only``: tensors and plain containers, and
nothing is executed. It contains the run and the peer that it belongs to, and its format.

The previous checkpoint is kept and replaces a damaged one. So neighbors may discard a message to this peer only when
the *previous* checkpoint contains it.
"""

from __future__ import annotations

import copy
import hashlib
import io
import logging
import mmap
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

import torch
from torch import Tensor

from p2pfl import PeerId
from p2pfl.errors import CheckpointError, first_line
from p2pfl.run_folder.files import NewFile, write_all, write_errors
from p2pfl.tensors import raw

PeerState = dict[str, Any]

FORMAT = 6
"""Version of the state's layout. A format mismatch is not corruption: both files are left in place."""

START = "round 0"
"""What a peer without a checkpoint starts from."""
_CHECKSUM_BYTES = hashlib.sha256().digest_size
_ALIGNMENT = 64
"""Bytes; at least the size of every dtype, and a divisor of the page size."""


def previous(path: Path) -> Path:
    """Return the path of the previous checkpoint."""
    return path.with_stem(f"{path.stem}-previous")


def damaged(path: Path) -> Path:
    """Return the path that an unusable checkpoint is moved to, for inspection."""
    return path.with_stem(f"{path.stem}-damaged")


_IMMUTABLE = (int, float, bool, str, type(None))
_ATOMS = (bytes, bytearray, complex, torch.dtype, torch.device)
_COLLECTIONS = (list, tuple, torch.Size)
_MAPPINGS = (dict, OrderedDict, Counter)


class Unstorable(TypeError):
    """A value of a type that is not read back ``weights_only``, or only as another type, or without a fixed order."""

    def __init__(self, value: object) -> None:
        kind = type(value)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        hint = "; convert it by `.item()` or `torch.from_numpy`" if type(value).__module__ == "numpy" else ""
        super().__init__(
            f"of type {name}, which a checkpoint cannot contain: use tensors, numbers, strings, None, and lists, "
            f"tuples and dicts of these{hint}"
        )
        self.value = value

    def place(self, within: Any, name: str) -> str | None:
        """Return the expression for the value's place in ``within``, which is called ``name``; None if not there."""
        if within is self.value:
            return name
        if isinstance(within, Mapping):
            items: Iterable[tuple[Any, Any]] = within.items()
            if any(self.place(key, "key") for key in within):
                return f"a key of {name}"
        else:
            items = enumerate(within) if isinstance(within, list | tuple) else ()
        return next(filter(None, (self.place(item, f"{name}[{key!r}]") for key, item in items)), None)


class _KeptTensor(NamedTuple):
    """Where a tensor of a kept state lies in the file."""

    at: int
    dtype: torch.dtype
    shape: torch.Size


def _checked(key: Any) -> Any:
    """Return a key of a mapping. Raises Unstorable."""
    if type(key) is tuple:
        for part in key:
            _checked(part)
    elif type(key) not in _IMMUTABLE and type(key) not in _ATOMS:
        raise Unstorable(key)
    return key


def check_storable(value: object) -> None:
    """Check that a value can be read back from a checkpoint. Raises Unstorable."""
    if isinstance(value, Mapping) and type(value) in _MAPPINGS:
        for key, item in value.items():
            _checked(key)
            check_storable(item)
    elif isinstance(value, Iterable) and type(value) in _COLLECTIONS:
        for item in value:
            check_storable(item)
    elif not isinstance(value, Tensor) and type(value) not in (*_IMMUTABLE, *_ATOMS):
        raise Unstorable(value)


class KeptState:
    """A copy of a state, with the tensors in a file without a name.

    It takes no memory for them, and less time than to copy them: the pages of the file are reused.

    Args:
        folder: on the disk to use.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with write_errors(folder):
            self._file = TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  # ``close`` closes it
        self._size = 0
        self._state: PeerState = {}

    def write(self, state: PeerState) -> None:
        """Copy ``state`` in place of what was kept; later training does not modify the copy.

        Raises:
            Unstorable: a value could not be read back from a checkpoint.
            WriteError: the disk is full.
        """
        self._size = 0
        with write_errors(self._folder):
            self._state = self._put(state)

    def read(self) -> PeerState:
        """Return the state, with dense tensors on the CPU, valid until the next ``write``."""
        file = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY) if self._size else None
        return self._get(self._state, file)  # type: ignore[no-any-return]

    def close(self) -> None:
        self._file.close()

    def _put(self, value: Any) -> Any:
        if type(value) in _IMMUTABLE:
            return value
        if isinstance(value, Tensor):
            if not value.numel():
                return value.detach().cpu()
            place = _KeptTensor(self._size, value.dtype, value.shape)
            end = write_all(self._file.fileno(), raw(value).numpy().data, place.at)
            self._size = -(-end // _ALIGNMENT) * _ALIGNMENT
            return place
        if type(value) in _MAPPINGS:
            return type(value)({_checked(key): self._put(item) for key, item in value.items()})
        if type(value) in _COLLECTIONS:
            return type(value)([self._put(item) for item in value])
        if type(value) in _ATOMS:
            return copy.copy(value)
        raise Unstorable(value)

    def _get(self, value: Any, file: mmap.mmap | None) -> Any:
        if isinstance(value, _KeptTensor):
            assert file is not None
            count = value.shape.numel()
            return torch.frombuffer(file, dtype=value.dtype, count=count, offset=value.at).view(value.shape)
        if type(value) in _MAPPINGS:
            return type(value)({key: self._get(item, file) for key, item in value.items()})
        if type(value) in _COLLECTIONS:
            return type(value)([self._get(item, file) for item in value])
        return value


def save(path: Path, state: PeerState) -> None:
    """Write ``state`` to ``path``, and keep the old file as the previous checkpoint. Raises WriteError.

    After a crash at any point, at least one of the two is intact and not older than the old file.
    """
    with write_errors(path), closing(NewFile(path)) as file:
        sink = _Sink(file)
        with _without_crc32():
            torch.save(state, sink)  # type: ignore[arg-type]  # it only writes and flushes
        if sink.error is not None:
            raise sink.error
        file.write(sink.checksum.digest(), 0)
        file.replace(keep=previous(path))


class _Sink:
    """Writes a file behind its checksum. Keeps an error to itself: torch's C++ code may abort on one."""

    def __init__(self, file: NewFile) -> None:
        self.checksum = hashlib.sha256()
        self.error: OSError | None = None
        self._file = file
        self._end = _CHECKSUM_BYTES

    def write(self, data: memoryview | bytes) -> int:
        size = memoryview(data).nbytes
        self.checksum.update(data)
        try:
            if self.error is None:
                self._file.write(data, self._end)
        except OSError as error:
            self.error = error
        self._end += size
        return size

    def flush(self) -> None:
        pass


@contextmanager
def _without_crc32() -> Iterator[None]:
    """Disable torch's checksums, which take two thirds of the time: the file has a better one."""
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


def load(
    path: Path,
    run_id: str,
    me: PeerId,
    log: logging.Logger | None = None,
    damage: Callable[[PeerState], str] = lambda state: "",
    *,
    repair: bool = True,
    otherwise: str = START,
) -> PeerState | None:
    """Load the newest usable state; None if there is no checkpoint yet, or if the only one is not usable.

    An unusable newest checkpoint is moved aside and logged, and the previous one is loaded.

    Args:
        damage: names something damaged that a state refers to; such a state is not usable.
        repair: move an unusable checkpoint aside.
        otherwise: for messages: what the peer resumes from without a previous checkpoint; empty if from nothing.

    Raises:
        CheckpointError: neither is usable, or another version of p2pfl has written one of them.
    """
    newest, error = _load_usable(path, run_id, me, damage)
    if newest is not None:
        return newest
    older, older_error = _load_usable(previous(path), run_id, me, damage)
    if older_error is not None:
        without = " without the messages that the neighbors have already discarded" if otherwise == START else ""
        raise CheckpointError(
            f"{error or f'{path}: not found'}; {older_error}; restore a copy of one of them, or remove both to start "
            f"from {otherwise}{without}"
        )
    if error is not None and repair:
        moved = path.replace(damaged(path))
        if log is not None:
            state = otherwise if older is None else f"the previous checkpoint, after round {older['rounds_done'] - 1}"
            resuming = f"; resuming from {state}" if state else ""
            log.warning("checkpoint unusable moved_to=%s: %s%s", moved.name, error, resuming)
    return older


def read(path: Path) -> PeerState:
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
        raise CheckpointError(f"{path}: damaged: {first_line(error)}") from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: damaged: not a mapping")
    return state


def is_intact(path: Path) -> bool:
    """Return whether the file has the content of its checksum. Raises OSError."""
    with path.open("rb") as file:
        checksum = file.read(_CHECKSUM_BYTES)
        return hashlib.file_digest(file, "sha256").digest() == checksum  # from here on


def _load_usable(
    path: Path, run_id: str, me: PeerId, damage: Callable[[PeerState], str]
) -> tuple[PeerState | None, CheckpointError | None]:
    """Return the state in ``path``, or why it is unusable; neither if there is no such file."""
    try:
        state = read(path)
    except CheckpointError as error:
        return None, None if isinstance(error.__cause__, FileNotFoundError) else error
    if (state.get("run"), state.get("peer")) != (run_id, me):
        return None, CheckpointError(f"{path}: belongs to another run or peer")
    if (found := state.get("format")) != FORMAT:
        raise CheckpointError(
            f"{path}: has format {found}, but this version of p2pfl reads format {FORMAT}: resume the run with "
            "the version that started it, or launch it again"
        )
    if damaged := damage(state):
        return None, CheckpointError(f"{path}: {damaged}")
    return state, None
