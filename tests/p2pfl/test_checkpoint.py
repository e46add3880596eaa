"""Checkpoints: whole, of this run and peer, loaded without executing anything."""

from __future__ import annotations

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
    return {"run": RUN, "peer": 3, "rounds_done": 2, "w": torch.arange(1000.0), "sources": [1, 2], **more}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint.pt"


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


def test_a_checkpoint_replaces_the_one_before_and_leaves_nothing_else_behind(path: Path) -> None:
    checkpoint.save(path, state())
    checkpoint.save(path, state(rounds_done=9))
    found = checkpoint.load(path, RUN, 3)
    assert found is not None
    assert found["rounds_done"] == 9
    assert os.listdir(path.parent) == ["checkpoint.pt"]


def test_the_old_checkpoint_survives_a_failing_save(path: Path) -> None:
    checkpoint.save(path, state())
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        checkpoint.save(path, state(unsaveable=lambda: None))
    assert checkpoint.load(path, RUN, 3) is not None
    assert os.listdir(path.parent) == ["checkpoint.pt"]


def test_a_folder_that_is_gone_is_a_run_folder_error(path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"gone/checkpoint\.pt: cannot be written: No such file or directory$"):
        checkpoint.save(path.parent / "gone" / "checkpoint.pt", state())


@pytest.mark.parametrize(("run", "peer"), [("fedcba9876543210", 3), (RUN, 4)])
def test_a_checkpoint_of_another_run_or_peer_is_refused(path: Path, run: str, peer: int) -> None:
    checkpoint.save(path, state())
    with pytest.raises(CheckpointError, match="belongs to another run or peer; remove it to start from round 0"):
        checkpoint.load(path, run, peer)


@pytest.mark.parametrize("content", [[1, 2], {}, torch.ones(2)], ids=["list", "empty", "tensor"])
def test_another_content_is_refused(path: Path, content: Any) -> None:
    torch.save(content, path)
    with pytest.raises(CheckpointError):
        checkpoint.load(path, RUN, 3)


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
        checkpoint.load(path, RUN, 3)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        path.write_bytes(pickle.dumps(Trap(trace), protocol))
        with pytest.raises(CheckpointError, match="damaged"):
            checkpoint.load(path, RUN, 3)
    assert not trace.exists()


def saved(path: Path) -> bytes:
    checkpoint.save(path, state(streams=Streams(1, 2).state_dict()))
    return path.read_bytes()


@pytest.mark.parametrize("part", [0.0, 0.001, 0.1, 0.5, 0.9, 0.999])
def test_a_file_that_was_cut_off_is_damaged(path: Path, part: float) -> None:
    whole = saved(path)
    path.write_bytes(whole[: int(part * len(whole))])
    with pytest.raises(
        CheckpointError, match=r"checkpoint\.pt: damaged: .*remove it to start this peer from round 0"
    ):
        checkpoint.load(path, RUN, 3)


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
    with pytest.raises(CheckpointError):
        checkpoint.load(path, RUN, 3)


def test_random_bytes_are_damaged(path: Path) -> None:
    stream = np.random.default_rng(0)
    for _ in range(200):
        path.write_bytes(stream.bytes(int(stream.integers(1, 200))))
        with pytest.raises(CheckpointError):
            checkpoint.load(path, RUN, 3)


def test_a_file_with_a_changed_byte_is_damaged(path: Path) -> None:
    checkpoint.save(path, state())
    whole = path.read_bytes()
    stream = np.random.default_rng(0)
    for _ in range(300):
        changed = bytearray(whole)
        changed[int(stream.integers(len(whole)))] ^= int(stream.integers(1, 256))
        path.write_bytes(changed)
        with pytest.raises(CheckpointError, match=r"damaged"):
            checkpoint.load(path, RUN, 3)


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
