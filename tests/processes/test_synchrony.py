"""Rounds that do not wait for one another: over sockets, and replayed with the same bits."""

from __future__ import annotations

from typing import Any

import pytest

from p2pfl.testing import check_parity
from tests.conftest import tree

METHODS: dict[str, dict[str, Any]] = {
    "dpsgd": {"algorithm": {"name": "dpsgd", "order": "atc"}},
    "mapl": {"algorithm": {"name": "mapl", "warmup": 2}},
    "fedproto": {"algorithm": "fedproto"},
    "swift": {"algorithm": {"name": "swift", "average_every": 2}},
    "divshare": {"algorithm": {"name": "divshare", "receivers": 2}},
}
SYNCHRONIES: dict[str, Any] = {"0": {"staleness": 0}, "2": {"staleness": 2}, "none": "none"}
QUICK = [("dpsgd", "none"), ("mapl", "2")]


@pytest.mark.parametrize(
    ("method", "synchrony"),
    [
        pytest.param(method, synchrony, marks=[] if (method, synchrony) in QUICK else [pytest.mark.slow])
        for method in METHODS
        for synchrony in SYNCHRONIES
    ],
)
def test_a_run_with_kills_is_replayed_with_the_same_bits(method: str, synchrony: str) -> None:
    changes = METHODS[method] | {"rounds": 6, "peers": 4, "synchrony": SYNCHRONIES[synchrony]}
    check_parity(tree(**changes), crash=True)
