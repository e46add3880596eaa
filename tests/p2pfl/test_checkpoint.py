"""Checkpoints: whole, of this run and peer, loaded without executing anything."""

from __future__ import annotations

import contextlib
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

from p2pfl import checkpoint
from p2pfl.algorithms.mapl import MAPL, Hyper
from p2pfl.errors import CheckpointError, RunFolderError
from p2pfl.rng import Streams
from p2pfl.tensors import digest
from tests.p2pfl.support import linear_model, peer_data, random_dataset, setting

RUN = "0123456789abcdef"


def state(**more: Any) -> dict[str, Any]:
    belongs = {"format": checkpoint.FORMAT, "run": RUN, "peer": 3}
    return {**belongs, "rounds_done": 2, "w": torch.arange(1000.0), "sources": [1, 2], **more}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint.pt"


def loaded(path: Path) -> dict[str, Any]:
    found = checkpoint.load(path, RUN, 3)
    assert found is not None
    return found


def two(path: Path) -> dict[str, bytes]:
    """Checkpoints of 2 and of 4 rounds."""
    for rounds in (2, 4):
        checkpoint.save(path, state(rounds_done=rounds))
    return contents(path)


def test_a_checkpoint_of_another_version_is_refused_and_left_alone(path: Path) -> None:
    for rounds in (2, 4):
        checkpoint.save(path, state(rounds_done=rounds, format=1))
    before = contents(path)
    with pytest.raises(CheckpointError, match=r"checkpoint.pt: of format 1, and .* from format 2: resume the run"):
        checkpoint.load(path, RUN, 3)
    assert contents(path) == before


# ---- snapshots ---------------------------------------------------------------------------------------------


def test_a_snapshot_does_not_follow_what_it_was_taken_of() -> None:
    alive: dict[str, Any] = {
        "tensor": torch.ones(2),
        "nested": {"list": [torch.ones(2), {"number": 1}], "tuple": (torch.ones(2), "x")},
        "plain": [1, 2],
    }
    taken = checkpoint.snapshot(alive)
    before = digest(taken)
    alive["tensor"].zero_()
    alive["nested"]["list"][0].zero_()
    alive["nested"]["list"][1]["number"] = 2
    alive["nested"]["tuple"][0].zero_()
    alive["plain"].append(3)
    alive["nested"]["more"] = 1
    assert digest(taken) == before
    assert taken["plain"] == [1, 2]
    assert type(taken["nested"]["tuple"]) is tuple


def test_a_snapshot_of_a_training_algorithm_stays_as_it_was() -> None:
    algorithm = MAPL(Hyper(projector_hidden=4), setting(0, 2, linear_model(4, 5, 3), peer_data(random_dataset(8))))
    algorithm.train(epochs=1, batch=4)
    taken = checkpoint.snapshot(algorithm.state_dict())
    before = digest(taken)
    assert before == digest(algorithm.state_dict())
    algorithm.train(epochs=1, batch=4)
    assert digest(taken) == before
    assert digest(algorithm.state_dict()) != before


def test_a_snapshot_has_no_gradients() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    taken = checkpoint.snapshot({"p": parameter})
    assert not taken["p"].requires_grad
    assert type(taken["p"]) is torch.Tensor


# ---- saving and loading ------------------------------------------------------------------------------------


def test_what_was_saved_is_loaded(path: Path) -> None:
    checkpoint.save(path, state(streams={"numpy": {"a": 2**127}}))
    found = checkpoint.load(path, RUN, 3)
    assert found is not None
    assert digest(found) == digest(state(streams={"numpy": {"a": 2**127}}))


def test_a_whole_algorithm_and_its_streams_go_on_after_loading_as_if_nothing_had_happened(path: Path) -> None:
    def make(seed: int) -> MAPL:
        return MAPL(
            Hyper(projector_hidden=4), setting(0, 2, linear_model(4, 5, 3, seed), peer_data(random_dataset(8)))
        )

    first, second = make(1), make(2)
    first.train(epochs=1, batch=4)
    first.spent = 7
    parts = {"algorithm": first.state_dict(), "streams": first.streams.state_dict()}
    checkpoint.save(path, state(**checkpoint.snapshot(parts)))
    found = checkpoint.load(path, RUN, 3)
    assert found is not None
    second.load_state_dict(found["algorithm"])
    second.streams.load_state_dict(found["streams"])
    for algorithm in (first, second):
        algorithm.train(epochs=2, batch=4)
    assert digest(second.state_dict()) == digest(first.state_dict())
    assert second.spent == 7


def test_without_a_file_there_is_no_checkpoint(path: Path) -> None:
    assert checkpoint.load(path, RUN, 3) is None


def test_a_checkpoint_replaces_the_one_before_which_is_kept_and_nothing_else(path: Path) -> None:
    for rounds in (2, 5, 9):
        checkpoint.save(path, state(rounds_done=rounds))
    assert loaded(path)["rounds_done"] == 9
    assert checkpoint.read(checkpoint.previous(path))["rounds_done"] == 5
    assert sorted(os.listdir(path.parent)) == ["checkpoint-previous.pt", "checkpoint.pt"]


def test_the_old_checkpoints_survive_a_failing_save(path: Path) -> None:
    before = two(path)
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        checkpoint.save(path, state(unsaveable=lambda: None))
    assert contents(path) == before


def contents(path: Path) -> dict[str, bytes]:
    return {name: (path.parent / name).read_bytes() for name in os.listdir(path.parent)}


CALLS = ("write", "fsync", "rename")


def calls_of_a_save(path: Path, monkeypatch: pytest.MonkeyPatch, fail_at: int | None = None) -> list[str]:
    """What a third save asks of the system, one by one; the ``fail_at``-th, and all after it, find the disk gone."""
    made: list[str] = []

    def watched(name: str, function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            made.append(name)
            if fail_at is not None and len(made) > fail_at:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return function(*arguments, **options)

        return call

    class Watched(io.FileIO):
        write = watched("write", io.FileIO.write)

    with monkeypatch.context() as patch:
        opened = Path.open
        patch.setattr(Path, "open", lambda self, mode: Watched(self, mode) if mode == "wb" else opened(self, mode))
        patch.setattr(os, "fsync", watched("fsync", os.fsync))
        patch.setattr(Path, "replace", watched("rename", Path.replace))
        with contextlib.suppress(RunFolderError):
            checkpoint.save(path, state(rounds_done=7))
    return made


def test_a_new_checkpoint_is_on_the_disk_before_it_takes_the_place_of_the_old_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two(path)
    assert calls_of_a_save(path, monkeypatch) == ["write", "fsync", "rename", "rename", "fsync"]


@pytest.mark.parametrize("steps", range(5))
def test_wherever_a_save_ends_the_last_or_the_new_state_is_loaded(
    path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    two(path)
    assert len(calls_of_a_save(path, monkeypatch, fail_at=steps)) == steps + 1
    expected = 4 if steps < 4 else 7
    assert loaded(path)["rounds_done"] == expected
    assert all(name.startswith("checkpoint") for name in os.listdir(path.parent))


def test_a_folder_that_is_gone_is_a_run_folder_error(path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"gone/checkpoint\.pt: cannot be written: No such file .*gone is gone$"):
        checkpoint.save(path.parent / "gone" / "checkpoint.pt", state())


@pytest.mark.parametrize("content", [[1, 2], {}, torch.ones(2)], ids=["list", "empty", "tensor"])
def test_another_content_is_refused(path: Path, content: Any) -> None:
    torch.save(content, path)
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.read(path)


def test_a_state_that_finds_no_memory_is_not_damaged(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = two(path)

    def load(*arguments: Any, **options: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(MemoryError):
        checkpoint.load(path, RUN, 3)
    assert contents(path) == before


class Trap:
    """Leaves a trace when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trace),)


def test_nothing_in_a_checkpoint_is_executed(path: Path) -> None:
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
def test_a_file_that_was_cut_off_is_damaged(path: Path, part: float) -> None:
    whole = saved(path)
    path.write_bytes(whole[: int(part * len(whole))])
    with pytest.raises(CheckpointError, match=r"checkpoint\.pt: damaged: its checksum is wrong$"):
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
def test_what_is_no_checkpoint_at_all_is_damaged(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.read(path)


def test_random_bytes_are_damaged(path: Path) -> None:
    stream = np.random.default_rng(0)
    for _ in range(200):
        path.write_bytes(stream.bytes(int(stream.integers(1, 200))))
        with pytest.raises(CheckpointError, match="damaged"):
            checkpoint.read(path)


def test_a_file_with_a_changed_byte_is_damaged(path: Path) -> None:
    whole = saved(path)
    stream = np.random.default_rng(0)
    for _ in range(300):
        changed = bytearray(whole)
        changed[int(stream.integers(len(whole)))] ^= int(stream.integers(1, 256))
        path.write_bytes(changed)
        with pytest.raises(CheckpointError, match=r"damaged"):
            checkpoint.read(path)


# ---- falling back to the one before ------------------------------------------------------------------------


def cut(whole: bytes) -> bytes:
    return whole[: len(whole) // 2]


def flipped(whole: bytes) -> bytes:
    return whole[:-100] + bytes([whole[-100] ^ 4]) + whole[-99:]


def anothers(whole: bytes) -> bytes:
    buffer = io.BytesIO()
    torch.save(state(run="f" * 16), buffer)
    return hashlib.sha256(buffer.getvalue()).digest() + buffer.getvalue()


DAMAGES = {
    "cut off": (cut, "damaged: its checksum is wrong"),
    "a bit flipped": (flipped, "damaged: its checksum is wrong"),
    "empty": (lambda whole: b"", "damaged: its checksum is wrong"),
    "zeros": (lambda whole: bytes(len(whole)), "damaged: its checksum is wrong"),
    "another run's": (anothers, "belongs to another run or peer"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_one_before_stands_in_for_a_checkpoint_that_cannot_be_used(
    damage: str, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    two(path)
    spoil, reason = DAMAGES[damage]
    spoilt = spoil(path.read_bytes())
    path.write_bytes(spoilt)
    with caplog.at_level(logging.WARNING):
        found = checkpoint.load(path, RUN, 3, logging.getLogger())
    assert found is not None
    assert found["rounds_done"] == 2
    (record,) = caplog.records
    assert record.getMessage() == (
        f"{path}: {reason}; set aside as checkpoint-damaged.pt; going on from the one after round 1"
    )
    assert checkpoint.damaged(path).read_bytes() == spoilt
    assert loaded(path)["rounds_done"] == 2, "and so it is the next time"


def test_what_is_saved_next_does_not_push_out_the_one_that_stood_in(path: Path) -> None:
    two(path)
    path.write_bytes(b"torn")
    loaded(path)
    checkpoint.save(path, state(rounds_done=4))
    path.write_bytes(b"torn again")
    assert loaded(path)["rounds_done"] == 2


def test_the_first_checkpoint_falls_back_to_the_beginning(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint.save(path, state())
    path.write_bytes(b"torn")
    with caplog.at_level(logging.WARNING):
        assert checkpoint.load(path, RUN, 3, logging.getLogger()) is None
    assert "going on from the beginning: there was none before" in caplog.text
    assert checkpoint.load(path, RUN, 3) is None


def test_a_damaged_one_before_does_not_matter_as_long_as_the_last_one_is_whole(path: Path) -> None:
    two(path)
    checkpoint.previous(path).write_bytes(b"torn")
    assert loaded(path)["rounds_done"] == 4
    checkpoint.save(path, state(rounds_done=6))
    path.write_bytes(b"torn")
    assert loaded(path)["rounds_done"] == 4


@pytest.mark.parametrize("newest", ["torn", None])
def test_if_neither_can_be_used_the_error_names_both_and_nothing_is_touched(path: Path, newest: str | None) -> None:
    two(path)
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


def test_a_checkpoint_of_any_run_and_peer_can_be_read(path: Path) -> None:
    checkpoint.save(path, state())
    assert digest(checkpoint.read(path)) == digest(state())


def test_reading_a_checkpoint_that_is_not_there_or_damaged_is_an_error(path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"checkpoint\.pt: cannot be read: No such file"):
        checkpoint.read(path)
    path.write_bytes(b"hello")
    with pytest.raises(CheckpointError, match=r"checkpoint\.pt: damaged: its checksum is wrong$"):
        checkpoint.read(path)
