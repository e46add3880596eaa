"""Checkpoints: atomic saves, recovery from damage, and loading without executing anything."""

from __future__ import annotations

import errno
import hashlib
import io
import logging
import os
import pickle
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from p2pfl.algorithms.mapl import MAPL, Hyper
from p2pfl.errors import CheckpointError, RunFolderError, WriteError
from p2pfl.rng import Streams
from p2pfl.session import checkpoint
from p2pfl.tensors import digest
from tests.support import linear_model, peer_data, random_dataset, setting
from tests.system_calls import calls_of

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


def save_two(path: Path) -> dict[str, bytes]:
    """Save checkpoints of 2 and of 4 rounds."""
    for rounds in (2, 4):
        checkpoint.save(path, state(rounds_done=rounds))
    return contents(path)


def test_rejects_another_format_and_leaves_the_files(path: Path) -> None:
    for rounds in (2, 4):
        checkpoint.save(path, state(rounds_done=rounds, format=1))
    before = contents(path)
    with pytest.raises(CheckpointError, match=r"checkpoint.pt: has format 1, but .* reads format 4: resume the run"):
        checkpoint.load(path, RUN, 3)
    assert contents(path) == before


# ---- kept states -------------------------------------------------------------------------------------------


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[checkpoint.KeptState]:
    with closing(checkpoint.KeptState(tmp_path)) as kept:
        yield kept
    assert not list(tmp_path.glob(".*"))


def test_a_kept_state_is_independent_of_what_was_written(kept: checkpoint.KeptState) -> None:
    original: dict[str, Any] = {
        "tensor": torch.ones(2),
        "nested": {"list": [torch.ones(2), {"number": 1}], "tuple": (torch.ones(2), "x")},
        "plain": [1, 2],
    }
    before = digest(original)
    kept.write(original)
    original["tensor"].zero_()
    original["nested"]["list"][0].zero_()
    original["nested"]["list"][1]["number"] = 2
    original["plain"].append(3)
    found = kept.read()
    assert digest(found) == before
    assert type(found["nested"]["tuple"]) is tuple


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.0),
        torch.empty(0, 3),
        torch.arange(6).reshape(2, 3).T,
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]).conj(),
        torch.randn(5).to(torch.bfloat16),
        torch.arange(100_000, dtype=torch.uint8),
    ],
    ids=["scalar", "empty", "transposed", "bool", "conjugate", "bfloat16", "large"],
)
def test_keeps_tensors_of_any_kind(kept: checkpoint.KeptState, tensor: torch.Tensor) -> None:
    kept.write({"before": torch.ones(1), "x": tensor, "after": torch.ones(1)})
    found = kept.read()
    assert torch.equal(found["x"], tensor)
    assert (found["x"].dtype, found["x"].shape) == (tensor.dtype, tensor.shape)
    assert found["x"].is_contiguous()
    assert found["before"] == found["after"] == 1.0


def test_values_keep_their_types_in_a_checkpoint(kept: checkpoint.KeptState, path: Path) -> None:
    state = {
        "a": [
            1,
            1.5,
            True,
            None,
            "s",
            b"x",
            bytearray(b"x"),
            1j,
            torch.float32,
            torch.device("cpu"),
            torch.Size([2]),
        ],
        "b": {(0, 1): OrderedDict(x=2), 3: Counter("aab")},
    }
    kept.write(state)
    checkpoint.save(path, kept.read())
    found = checkpoint.read(path)
    assert found == state
    assert [*map(type, found["a"]), *map(type, found["b"].values())] == [*map(type, state["a"]), OrderedDict, Counter]


class Pair(NamedTuple):
    first: int
    second: int


@pytest.mark.parametrize(
    "value",
    [
        object(),
        np.float64(0.5),
        np.zeros(3),
        deque([1]),
        defaultdict(list),
        frozenset([1]),
        {1},
        Pair(1, 2),
        lambda: 0,
    ],
    ids=lambda value: type(value).__name__,
)
def test_names_the_place_of_a_value_that_could_not_be_read_again(kept: checkpoint.KeptState, value: object) -> None:
    state = {"fine": [1], "a": {"b": (0, [value])}}
    with pytest.raises(
        checkpoint.Unstorable, match=rf"^of type (\w+\.)*{type(value).__name__}, which a checkpoint"
    ) as caught:
        kept.write(state)
    assert caught.value.place(state, "state") == "state['a']['b'][1][0]"
    assert ("item" in str(caught.value)) == isinstance(value, np.generic | np.ndarray)


@pytest.mark.parametrize("key", [np.int64(1), np.str_("a"), (1, np.int64(2)), frozenset(), torch.zeros(1)], ids=repr)
def test_names_the_place_of_a_key_that_could_not_be_read_again(kept: checkpoint.KeptState, key: object) -> None:
    for mapping in ({key: 1}, Counter({key: 1})):
        state = {"a": [mapping]}
        with pytest.raises(checkpoint.Unstorable) as caught:
            kept.write(state)
        assert caught.value.place(state, "state") == "a key of state['a'][0]"


def test_keeps_the_last_state_only(kept: checkpoint.KeptState) -> None:
    for size in (1000, 5000, 10):
        kept.write({"x": torch.full((size,), float(size))})
    assert digest(kept.read()) == digest({"x": torch.full((10,), 10.0)})


def test_modifying_what_was_read_does_not_change_what_is_kept(kept: checkpoint.KeptState) -> None:
    kept.write({"x": torch.ones(3)})
    kept.read()["x"].zero_()
    assert kept.read()["x"].tolist() == [1.0, 1.0, 1.0]


def test_training_does_not_change_a_kept_state(kept: checkpoint.KeptState) -> None:
    algorithm = MAPL(Hyper(projector_hidden=4), setting(0, 2, linear_model(4, 5, 3), peer_data(random_dataset(8))))
    algorithm.train(epochs=1, batch=4)
    kept.write(algorithm.state_dict())
    before = digest(algorithm.state_dict())
    algorithm.train(epochs=1, batch=4)
    assert digest(kept.read()) == before != digest(algorithm.state_dict())


def test_keeps_no_gradients_and_only_the_numbers_of_a_view(kept: checkpoint.KeptState, path: Path) -> None:
    large = torch.arange(1_000_000.0)
    kept.write(state(p=torch.nn.Parameter(torch.ones(2)), view=large[10:12]))
    checkpoint.save(path, kept.read())
    found = loaded(path)
    assert type(found["p"]) is torch.Tensor
    assert not found["p"].requires_grad
    assert found["view"].tolist() == [10.0, 11.0]


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
