"""Checkpoints: atomic saves, recovery from damage, and loading without executing anything."""

from __future__ import annotations

import errno
import hashlib
import io
import logging
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from p2pfl.algorithms.mapl import MAPL, Hyper
from p2pfl.errors import CheckpointError, RunFolderError, WriteError
from p2pfl.rng import Streams
from p2pfl.session import checkpoint
from p2pfl.tensors import digest
from tests.checkpoints import RUN, loaded, state
from tests.support import linear_model, peer_data, random_dataset, setting
from tests.system_calls import calls_of


def save_two(path: Path) -> dict[str, bytes]:
    """Save checkpoints of 2 and of 4 rounds."""
    for rounds in (2, 4):
        checkpoint.save(path, state(rounds_done=rounds))
    return contents(path)


def test_rejects_another_format_and_leaves_the_files(path: Path) -> None:
    for rounds in (2, 4):
        checkpoint.save(path, state(rounds_done=rounds, format=1))
    before = contents(path)
    with pytest.raises(CheckpointError, match=r"checkpoint.pt: has format 1, but .* reads format 6: resume the run"):
        checkpoint.load(path, RUN, 3)
    assert contents(path) == before


# ---- saving and loading ------------------------------------------------------------------------------------


def test_loads_the_saved_state(path: Path) -> None:
    checkpoint.save(path, state(streams={"numpy": {"a": 2**127}}))
    found = checkpoint.load(path, RUN, 3)
    assert found is not None
    assert digest(found) == digest(state(streams={"numpy": {"a": 2**127}}))


def test_training_after_loading_is_bit_identical(path: Path) -> None:
    def make(seed: int) -> MAPL:
        return MAPL(
            Hyper(projector_hidden=4), setting(0, 2, linear_model(4, 5, 3, seed), peer_data(random_dataset(8)))
        )

    first, second = make(1), make(2)
    first.train(epochs=1, batch=4)
    first.spent = 7
    parts = {"algorithm": first.state_dict(), "streams": first.streams.state_dict()}
    checkpoint.save(path, state(**parts))
    found = checkpoint.load(path, RUN, 3)
    assert found is not None
    second.load_state_dict(found["algorithm"])
    second.streams.load_state_dict(found["streams"])
    for algorithm in (first, second):
        algorithm.train(epochs=2, batch=4)
    assert digest(second.state_dict()) == digest(first.state_dict())
    assert second.spent == 7


def test_load_returns_none_without_a_file(path: Path) -> None:
    assert checkpoint.load(path, RUN, 3) is None


def test_save_keeps_only_the_previous_checkpoint(path: Path) -> None:
    for rounds in (2, 5, 9):
        checkpoint.save(path, state(rounds_done=rounds))
    assert loaded(path)["rounds_done"] == 9
    assert checkpoint.read(checkpoint.previous(path))["rounds_done"] == 5
    assert sorted(os.listdir(path.parent)) == ["checkpoint-previous.pt", "checkpoint.pt"]


def test_failed_save_leaves_both_checkpoints(path: Path) -> None:
    before = save_two(path)
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        checkpoint.save(path, state(unsaveable=lambda: None))
    assert contents(path) == before


def contents(path: Path) -> dict[str, bytes]:
    return {name: (path.parent / name).read_bytes() for name in os.listdir(path.parent)}


def test_new_checkpoint_is_on_disk_before_it_replaces_the_old_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_two(path)
    calls = calls_of(lambda: checkpoint.save(path, state(rounds_done=7)), monkeypatch)
    while calls[1] == "write":
        del calls[1]
    assert calls == ["write", "fsync", "rename", "rename", "fsync"]


def test_interrupted_save_leaves_the_old_or_the_new_state(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_two(path)
    steps = len(calls_of(lambda: checkpoint.save(path, state(rounds_done=4)), monkeypatch))
    for step in range(steps):
        calls = calls_of(lambda: checkpoint.save(path, state(rounds_done=7)), monkeypatch, fail_at=step)
        assert len(calls) == step + 1
        assert loaded(path)["rounds_done"] == (4 if step < steps - 1 else 7)
        assert all(name.startswith("checkpoint") for name in os.listdir(path.parent))


def test_save_to_a_missing_folder_is_a_run_folder_error(path: Path) -> None:
    with pytest.raises(
        RunFolderError, match=r"gone/checkpoint\.pt: cannot be written: No such file .*gone does not exist$"
    ):
        checkpoint.save(path.parent / "gone" / "checkpoint.pt", state())


@pytest.mark.parametrize("content", [[1, 2], {}, torch.ones(2)], ids=["list", "empty", "tensor"])
def test_rejects_content_that_is_not_a_checkpoint(path: Path, content: Any) -> None:
    torch.save(content, path)
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.read(path)


@pytest.mark.parametrize("size", [0, 10, 5_000, 50_000])
def test_a_full_disk_is_an_error_that_keeps_the_old_checkpoint(
    path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_two(path)
    before = contents(path)
    written = os.pwrite

    def pwrite(file: int, data: Any, at: int) -> int:
        if at + len(data) > size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return written(file, data, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(WriteError, match="No space left on device"):
        checkpoint.save(path, state(w=torch.zeros(20_000)))
    assert contents(path) == before


def test_out_of_memory_is_not_reported_as_damage(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = save_two(path)

    def load(*arguments: Any, **options: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(MemoryError):
        checkpoint.load(path, RUN, 3)
    assert contents(path) == before


class Trap:
    """Creates the folder ``trace`` when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trace),)


def test_loading_executes_nothing(path: Path) -> None:
    trace = path.parent / "executed"
    torch.save(state(trap=Trap(trace)), path)
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.read(path)
    contents_of = io.BytesIO()
    torch.save(state(trap=Trap(trace)), contents_of)
    signed = hashlib.sha256(contents_of.getvalue()).digest() + contents_of.getvalue()
    path.write_bytes(signed)
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.read(path)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        path.write_bytes(pickle.dumps(Trap(trace), protocol))
        with pytest.raises(CheckpointError, match="damaged"):
            checkpoint.read(path)
    assert not trace.exists()


def saved(path: Path) -> bytes:
    checkpoint.save(path, state(streams=Streams(1, 2).state_dict()))
    return path.read_bytes()


@pytest.mark.parametrize("part", [0.0, 0.001, 0.1, 0.5, 0.9, 0.999])
def test_truncated_file_is_damaged(path: Path, part: float) -> None:
    whole = saved(path)
    path.write_bytes(whole[: int(part * len(whole))])
    with pytest.raises(CheckpointError, match=r"checkpoint\.pt: damaged: checksum mismatch$"):
        checkpoint.read(path)


@pytest.mark.parametrize(
    "content",
    [
        b"x",
        b"hello, world\n",
        bytes(1000),
        b"\x80\x02.",
        b"\x80\x04N.",
        b"PK\x03\x04" + bytes(100),
        b"cos\nsystem\n(S'true'\ntR.",
    ],
    ids=repr,
)
def test_other_file_formats_are_damaged(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.read(path)


def test_random_bytes_are_damaged(path: Path) -> None:
    stream = np.random.default_rng(0)
    for _ in range(200):
        path.write_bytes(stream.bytes(int(stream.integers(1, 200))))
        with pytest.raises(CheckpointError, match="damaged"):
            checkpoint.read(path)


@pytest.mark.exhaustive
def test_changed_byte_is_damage(path: Path) -> None:
    whole = saved(path)
    stream = np.random.default_rng(0)
    for _ in range(300):
        changed = bytearray(whole)
        changed[int(stream.integers(len(whole)))] ^= int(stream.integers(1, 256))
        path.write_bytes(changed)
        with pytest.raises(CheckpointError, match=r"damaged"):
            checkpoint.read(path)


# ---- falling back to the previous one ------------------------------------------------------------------------


def cut(whole: bytes) -> bytes:
    return whole[: len(whole) // 2]


def flipped(whole: bytes) -> bytes:
    return whole[:-100] + bytes([whole[-100] ^ 4]) + whole[-99:]


def of_another_run(whole: bytes) -> bytes:
    buffer = io.BytesIO()
    torch.save(state(run="f" * 16), buffer)
    return hashlib.sha256(buffer.getvalue()).digest() + buffer.getvalue()


DAMAGES = {
    "cut off": (cut, "damaged: checksum mismatch"),
    "a bit flipped": (flipped, "damaged: checksum mismatch"),
    "empty": (lambda whole: b"", "damaged: checksum mismatch"),
    "zeros": (lambda whole: bytes(len(whole)), "damaged: checksum mismatch"),
    "another run's": (of_another_run, "belongs to another run or peer"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_previous_checkpoint_replaces_an_unusable_one(
    damage: str, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_two(path)
    spoil, reason = DAMAGES[damage]
    damaged = spoil(path.read_bytes())
    path.write_bytes(damaged)
    with caplog.at_level(logging.WARNING):
        found = checkpoint.load(path, RUN, 3, logging.getLogger())
    assert found is not None
    assert found["rounds_done"] == 2
    (record,) = caplog.records
    assert record.getMessage() == (
        f"checkpoint unusable moved_to=checkpoint-damaged.pt: {path}: {reason}; "
        "resuming from the previous checkpoint, after round 1"
    )
    assert checkpoint.damaged(path).read_bytes() == damaged
    assert loaded(path)["rounds_done"] == 2, "a second load gives the same state"


def test_save_after_a_fallback_keeps_the_usable_checkpoint(path: Path) -> None:
    save_two(path)
    path.write_bytes(b"torn")
    loaded(path)
    checkpoint.save(path, state(rounds_done=4))
    path.write_bytes(b"torn again")
    assert loaded(path)["rounds_done"] == 2


def test_damaged_first_checkpoint_restarts_from_round_0(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint.save(path, state())
    path.write_bytes(b"torn")
    with caplog.at_level(logging.WARNING):
        assert checkpoint.load(path, RUN, 3, logging.getLogger()) is None
    assert "resuming from round 0" in caplog.text
    assert checkpoint.load(path, RUN, 3) is None


def test_ignores_a_damaged_previous_checkpoint(path: Path) -> None:
    save_two(path)
    checkpoint.previous(path).write_bytes(b"torn")
    assert loaded(path)["rounds_done"] == 4
    checkpoint.save(path, state(rounds_done=6))
    path.write_bytes(b"torn")
    assert loaded(path)["rounds_done"] == 4


@pytest.mark.parametrize("newest", ["torn", None])
def test_error_names_both_unusable_files_and_leaves_them(path: Path, newest: str | None) -> None:
    save_two(path)
    checkpoint.previous(path).write_bytes(b"")
    if newest is None:
        path.unlink()
    else:
        path.write_text(newest)
    before = contents(path)
    with pytest.raises(CheckpointError, match=r"checkpoint\.pt: .*checkpoint-previous\.pt: damaged: .*remove both"):
        checkpoint.load(path, RUN, 3)
    assert contents(path) == before


# ---- checkpoints of other runs -----------------------------------------------------------------------------


def test_read_accepts_any_run_and_peer(path: Path) -> None:
    checkpoint.save(path, state())
    assert digest(checkpoint.read(path)) == digest(state())


def test_read_rejects_missing_and_damaged_files(path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"checkpoint\.pt: cannot be read: No such file"):
        checkpoint.read(path)
    path.write_bytes(b"hello")
    with pytest.raises(CheckpointError, match=r"checkpoint\.pt: damaged: checksum mismatch$"):
        checkpoint.read(path)
