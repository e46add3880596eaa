"""Models on disk: the same bits, the same places again, and an error with a remedy."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from p2pfl.errors import RunFolderError
from p2pfl.spool import Spool
from p2pfl.wire import DTYPES


def model(number: int) -> dict[str, Tensor]:
    return {"weight": torch.full((3, 5), float(number)), "bias": torch.full((3,), number + 0.5)}


def equal(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return list(left) == list(right) and all(torch.equal(left[name], right[name]) for name in left)


def test_models_come_back_as_they_were() -> None:
    spool = Spool()
    spooled = [spool.put(model(number)) for number in range(5)]
    for number in (3, 0, 4, 1, 2, 3):
        assert equal(spooled[number], model(number))
    assert len(spooled[0]) == 2
    assert "weight" in spooled[0]
    assert "other" not in spooled[0]


@settings(deadline=None, max_examples=50)
@given(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 4), max_size=3), st.integers(0, 2**32 - 1))
def test_every_bit_of_every_kind_of_tensor_that_can_travel(dtype: str, shape: list[int], seed: int) -> None:
    size = DTYPES[dtype].itemsize
    shape = shape if shape else [1]
    count = size * int(torch.tensor(shape).prod())
    raw = torch.randint(0, 2 if dtype == "bool" else 256, (count,), generator=torch.Generator().manual_seed(seed))
    tensor = raw.to(torch.uint8).view(DTYPES[dtype]).reshape(shape)
    found = Spool().put({"x": tensor})["x"]
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert found.reshape(-1).view(torch.uint8).tolist() == tensor.reshape(-1).view(torch.uint8).tolist()


def test_scalars_and_tensors_with_strides() -> None:
    tensors = {"scalar": torch.tensor(2.5), "turned": torch.arange(6.0).reshape(2, 3).T}
    assert equal(Spool().put(tensors), tensors)


def test_what_is_read_may_be_changed() -> None:
    spooled = Spool().put(model(1))
    spooled["weight"].zero_()
    assert equal(spooled, model(1))


def test_places_of_forgotten_models_are_used_again() -> None:
    spool = Spool()
    size = 4 * (15 + 3)
    spooled = [spool.put(model(number)) for number in range(4)]
    assert spool.size == 4 * size
    del spooled[1:3]
    gc.collect()
    spooled += [spool.put(model(number)) for number in (7, 8)]
    assert spool.size == 4 * size
    assert [equal(one, model(number)) for one, number in zip(spooled, (0, 3, 7, 8), strict=True)] == [True] * 4


def test_a_spooled_model_outlives_its_spool() -> None:
    spooled = Spool().put(model(3))
    gc.collect()
    assert equal(spooled, model(3))


def test_one_thread_may_put_while_another_reads_and_forgets() -> None:
    spool, ready = Spool(), threading.Semaphore(0)
    waiting: list[tuple[int, Any]] = []

    def put() -> None:
        for number in range(200):
            waiting.append((number, spool.put(model(number))))
            ready.release()

    thread = threading.Thread(target=put)
    thread.start()
    for _ in range(200):
        ready.acquire()
        number, spooled = waiting.pop()
        assert equal(spooled, model(number))
        del spooled
    thread.join()


def test_the_file_has_no_name_and_is_closed_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def held() -> int:
        """Open files that lie, or lay, in this folder: other tests may leave some to the garbage collector."""
        count = 0
        for descriptor in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                count += os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(tmp_path))
        return count

    spool = Spool()
    spooled = spool.put(model(1))
    assert held() == 1
    assert os.listdir(tmp_path) == []
    del spool, spooled
    gc.collect()
    assert held() == 0


def test_no_room_is_an_error_that_says_where_and_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(RunFolderError, match=r"missing: No such file.*set TMPDIR to a folder with more room"):
        Spool().put(model(1))
