"""Recorded traffic is readable without keys, and unreadable with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.capture import Capture, capture


def capture_all(root: Path, keyed: bool) -> Capture:
    """Capture a run, and another one whenever packets of tests beside this one left no room for some of it."""
    for attempt in range(5):
        folder = root / f"{attempt}"
        folder.mkdir()
        try:
            return capture(folder, keyed)
        except RuntimeError as error:
            if "packets were dropped" not in str(error):
                raise
    pytest.fail("packets were dropped in each of five captures")


@pytest.mark.parametrize("keyed", [False, True])
def test_traffic_is_readable_only_without_keys(tmp_path: Path, keyed: bool) -> None:
    try:
        found = capture_all(tmp_path, keyed)
    except PermissionError:
        pytest.skip("only root may record the loopback device")
    assert found.tensors_sent >= 10
    assert found.sent < found.size
    if keyed:
        assert (found.kinds, found.run_id, found.digest, found.tensors) == (0, 0, 0, 0)
    else:
        assert found.tensors == found.tensors_sent
        assert min(found.kinds, found.run_id, found.digest) >= 6  # on each of the six edges
