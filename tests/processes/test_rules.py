"""Rules of aggregation over sockets: the bits of `simulate`, also if every peer is killed once."""

from __future__ import annotations

from typing import Any

import pytest

from p2pfl.testing import check_parity
from tests.conftest import tree
from tests.simulation.test_rules import RULES

QUICK = ("several", "screened")
"""One transforms, combines, and keeps a state, one has messages of its own; the others differ in what they compute.
"""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in RULES])
def test_peers_that_are_killed_end_with_the_bits_of_simulate(name: str) -> None:
    rule, settings = RULES[name]
    changes: dict[str, Any] = settings | {"rounds": 3, "aggregation": rule}
    check_parity(tree(**changes), crash=True)
