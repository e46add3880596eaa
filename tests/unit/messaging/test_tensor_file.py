"""Models spooled to disk."""

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

from p2pfl.errors import SpoolError, WriteError
from p2pfl.messaging.schema import DTYPES
from p2pfl.messaging.tensor_file import Spool


def model(number: int) -> dict[str, Tensor]:
    return {"weight": torch.full((3, 5), float(number)), "bias": torch.full((3,), number + 0.5)}


def equal(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return list(left) == list(right) and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.exhaustive
def test_spooled_models_are_read_back_unchanged_and_outlive_their_spool() -> None:
    spool = Spool()
    spooled = [spool.put(model(number)) for number in range(5)]
    del spool
    gc.collect()
    spooled[3]["weight"].zero_()  # a copy
    for number in (3, 0, 4, 1, 2, 3):
        assert equal(spooled[number], model(number))
    assert ("weight" in spooled[0], "other" in spooled[0], len(spooled[0])) == (True, False, 2)


@settings(deadline=None, max_examples=50)
@given(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 4), max_size=3), st.integers(0, 2**32 - 1))
def test_spooled_tensors_are_bit_identical_for_every_dtype(dtype: str, shape: list[int], seed: int) -> None:
    size = DTYPES[dtype].itemsize
    shape = shape if shape else [1]
    count = size * int(torch.tensor(shape).prod())
    raw = torch.randint(0, 2 if dtype == "bool" else 256, (count,), generator=torch.Generator().manual_seed(seed))
    tensor = raw.to(torch.uint8).view(DTYPES[dtype]).reshape(shape)
    found = Spool().put({"x": tensor})["x"]
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert found.reshape(-1).view(torch.uint8).tolist() == tensor.reshape(-1).view(torch.uint8).tolist()


def test_scalars_and_strided_tensors_can_be_spooled() -> None:
    tensors = {"scalar": torch.tensor(2.5), "transposed": torch.arange(6.0).reshape(2, 3).T}
    assert equal(Spool().put(tensors), tensors)


@pytest.mark.exhaustive
def test_the_space_of_released_models_is_reused() -> None:
    spool = Spool()
    size = 4 * (15 + 3)
    spooled = [spool.put(model(number)) for number in range(4)]
    assert spool.size == 4 * size
    del spooled[1:3]
    gc.collect()
    spooled += [spool.put(model(number)) for number in (7, 8)]
    assert spool.size == 4 * size
    assert [equal(found, model(number)) for found, number in zip(spooled, (0, 3, 7, 8), strict=True)] == [True] * 4


@pytest.mark.exhaustive
def test_a_model_is_not_written_into_the_space_of_a_smaller_one() -> None:
    spool = Spool()
    small, behind = spool.put({"x": torch.zeros(2)}), spool.put({"x": torch.ones(2)})
    del small
    gc.collect()
    large = spool.put({"x": torch.full((4,), 7.0)})
    assert behind["x"].tolist() == [1.0, 1.0]
    assert large["x"].tolist() == [7.0] * 4
    size = spool.size
    again = spool.put({"y": torch.zeros(2)})
    assert spool.size == size, "the space of the small one is used again"
    assert (again["y"].tolist(), large["x"].tolist()) == ([0.0, 0.0], [7.0] * 4)


def test_one_thread_can_put_while_another_reads_and_releases() -> None:
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


def test_a_single_element_of_a_larger_tensor_is_stored() -> None:
    element = torch.arange(12.0).reshape(3, 4)[1:2, 2]  # counts as contiguous with any stride
    assert Spool().put({"element": element})["element"].tolist() == [6.0]


@pytest.mark.exhaustive
def test_the_file_has_no_name_and_is_closed_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def open_files() -> int:
        """Count open files in this folder, unlinked ones included; garbage of other tests lies elsewhere."""
        count = 0
        for descriptor in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                count += os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(tmp_path))
        return count

    spool = Spool()
    spooled = spool.put(model(1))
    assert open_files() == 1
    assert os.listdir(tmp_path) == []
    del spool, spooled
    gc.collect()
    assert open_files() == 0


def test_an_unwritable_folder_raises_an_error_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(SpoolError, match=r"missing: No such file.*set TMPDIR to a folder with more room"):
        Spool().put(model(1))
    assert SpoolError.exit_code == WriteError.exit_code  # no restart helps
