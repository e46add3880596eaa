"""Schedules of time-varying graphs, and runs with such graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from p2pfl.errors import P2pflError
from p2pfl.graphs import GRAPHS, Schedule
from p2pfl.messaging.topology import Topology
from p2pfl.run_file.load import from_dict
from p2pfl.run_file.run import Run
from tests.conftest import tree


def plan(name: str, peers: int = 10, seed: int = 5, rounds: int = 10, **given: Any) -> tuple[Topology, Schedule]:
    union, schedule = GRAPHS.find(name).parse(given).plan(peers, seed, Path(), rounds)
    assert schedule is not None
    return union, schedule


def run_of(**changes: Any) -> Run:
    return from_dict(tree(**{"algorithm": "dpsgd", **changes}))


def problem(**changes: Any) -> str:
    with pytest.raises(P2pflError) as caught:
        run_of(**changes)
    return str(caught.value)
