"""The search finds no violation in some dozens of schedules, and finds bugs that were planted."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.simulation.planted_bugs import PLANTED_BUGS
from tests.simulation.run_schedule import run_schedule
from tests.simulation.search import outcomes

ROOT = Path(__file__).parents[2]
CHUNK = 30


@pytest.mark.parametrize(
    "first_seed", [100_000, *(pytest.param(n, marks=pytest.mark.slow) for n in (200_000, 300_000))]
)
def test_finds_no_violation(first_seed: int) -> None:
    found = list(outcomes(CHUNK, first_seed))
    assert [(outcome.seed, outcome.violations) for outcome in found if outcome.violations] == []
    assert {outcome.schedule.waits_forever for outcome in found} == {True, False}
    counts = sum((outcome.counts for outcome in found), Counter[str]())
    assert counts.keys() >= {"crashes", "connections broken", "messages lost in transit", "stops"}
    assert counts["checkpoints corrupted"] > 0


def test_finds_no_violation_in_graphs_that_change() -> None:
    found = list(outcomes(CHUNK, 400_000, time_varying=True))
    assert [(outcome.seed, outcome.violations) for outcome in found if outcome.violations] == []
    graphs = [outcome.schedule.rounds_graphs for outcome in found]
    assert {at is not None and any(at(t).directed for t in range(5)) for at in graphs} == {True, False}
    assert sum((outcome.counts for outcome in found), Counter[str]())["crashes"] > 0


def test_finds_no_violation_where_rounds_do_not_wait() -> None:
    """What a run has computed is what a replay of its order computes."""
    found = list(outcomes(CHUNK, 500_000, without_waits=True))
    assert [(outcome.seed, outcome.violations) for outcome in found if outcome.violations] == []
    bounds = {outcome.schedule.synchrony.bound for outcome in found}
    assert bounds >= {0, 1, math.inf}
    operations = {operation for outcome in found for operation in outcome.schedule.operations[0]}
    assert operations == {"exchange", "gossip", "every", "ask"}
    assert sum((outcome.counts for outcome in found), Counter[str]())["crashes"] > 0


@pytest.mark.parametrize(
    ("bug", "first_seed"),
    # None of the first 120 schedules finds the last one.
    [
        *(("gaps", 0), ("replay-late", 0), ("durable-early", 0), ("window-leak", 0), ("leave-early", 120)),
        *(("record-late", 0), ("order-forgotten", 0), ("needs-early", 30)),
        *(("counted-twice", 28), ("counted-dropped", 72)),
    ],
)
def test_finds_planted_bug_and_replays_it(bug: str, first_seed: int) -> None:
    variant = {"without_waits": PLANTED_BUGS[bug].without_waits}
    seed = next(outcome.seed for outcome in outcomes(200, first_seed, bug, **variant) if outcome.violations)
    with PLANTED_BUGS[bug].planted():
        first, second = run_schedule(seed, **variant), run_schedule(seed, **variant)
    assert first.violations == second.violations != []
    assert first.trace_digest == second.trace_digest
    assert run_schedule(seed, **variant).violations == []


def test_replays_a_seed_in_another_process() -> None:
    """Hashes of strings, addresses and ids differ there."""
    outcome = run_schedule(7)
    command = [sys.executable, "-m", "tests.simulation", "--replay", "7"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "12345"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"seed 7, trace {outcome.trace_digest[:16]}" in done.stdout
    assert "same trace" in done.stdout
