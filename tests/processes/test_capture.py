"""Recorded traffic is readable without keys, and unreadable with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.capture import capture


@pytest.mark.parametrize("keyed", [False, True])
def test_traffic_is_readable_only_without_keys(tmp_path: Path, keyed: bool) -> None:
    try:
        found = capture(tmp_path, keyed)
    except PermissionError:
        pytest.skip("only root may record the loopback device")
    assert found.tensors_sent >= 10
    assert found.sent < found.size
    if keyed:
        assert (found.kinds, found.run_id, found.digest, found.tensors) == (0, 0, 0, 0)
    else:
        assert found.tensors == found.tensors_sent
        assert min(found.kinds, found.run_id, found.digest) >= 6  # on each of the six edges
