"""What somebody who records the network can read of a run of processes: everything without keys, nothing with."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.capture import overhear


@pytest.mark.parametrize("keyed", [False, True])
def test_what_can_be_read_of_a_run(tmp_path: Path, keyed: bool) -> None:
    try:
        heard = overhear(tmp_path, keyed)
    except PermissionError:
        pytest.skip("only root may record what goes over the loopback device")
    assert heard.of >= 10
    assert heard.said < heard.size
    if keyed:
        assert (heard.kinds, heard.run_id, heard.digest, heard.tensors) == (0, 0, 0, 0)
    else:
        assert heard.tensors == heard.of
        assert min(heard.kinds, heard.run_id, heard.digest) >= 6  # each of three peers to each
