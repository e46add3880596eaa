"""A small search through simulated faults (benchmarks/torture): it finds what was planted, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.torture.mesh import play
from benchmarks.torture.plants import PLANTS
from benchmarks.torture.search import outcomes

ROOT = Path(__file__).parents[2]


def first_found(plant: str, schedules: int) -> int:
    return next(outcome.seed for outcome in outcomes(schedules, 0, plant) if outcome.violations)


def test_no_promise_is_broken() -> None:
    played = list(outcomes(40, 100_000))
    assert [(outcome.seed, outcome.violations) for outcome in played if outcome.violations] == []
    assert {outcome.schedule.patient for outcome in played} == {True, False}
    befallen = {what for outcome in played for what in outcome.counts}
    assert befallen >= {"crashes", "connections broken", "messages lost under way", "stops", "checkpoints damaged"}


@pytest.mark.parametrize("plant", ["resend-late", "durable-early", "close-early"])
def test_a_planted_bug_is_found_and_its_seed_replays_it(plant: str) -> None:
    seed = first_found(plant, 200)
    with PLANTS[plant].planted():
        first, second = play(seed), play(seed)
    assert first.violations == second.violations != []
    assert first.digest == second.digest
    assert play(seed).violations == []


def test_a_seed_replays_in_another_process() -> None:
    """Whose hashes of strings, addresses and ids are others."""
    outcome = play(7)
    command = [sys.executable, "-m", "benchmarks.torture", "--replay", "7"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "12345"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"seed 7, trace {outcome.digest[:16]}" in done.stdout
    assert "the same trace" in done.stdout
