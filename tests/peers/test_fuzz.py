"""Some seconds of what `make fuzz` does for minutes."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import fuzz


def test_damaged_messages_are_refused_or_come_back_bit_for_bit() -> None:
    chance = random.Random(1)
    taken = 0
    for _ in range(5_000):
        taken += fuzz.tried(fuzz.mutated(fuzz.encoded(chance.choice(fuzz.VALID)), chance))
    assert 0 < taken < 2_500
    assert all(fuzz.tried(fuzz.encoded(body)) for body in fuzz.VALID)


def test_the_decoder_guided_by_coverage() -> None:
    pytest.importorskip("atheris", reason="pip install '.[fuzz]'")
    command = [sys.executable, "-m", "benchmarks.fuzz", "decoder", "--frames", "20000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    (reached, before) = re.findall(r"reached: (\d+), by the valid messages alone (\d+)", done.stdout)[0]
    assert int(reached) > int(before) > 50


def test_peers_under_attack_end_with_the_bits_of_the_simulation(tmp_path: Path) -> None:
    run = fuzz.live_run(rounds=3)
    expected = fuzz.expected_of(run, tmp_path / "simulated")
    outcome = fuzz.attacked(run, tmp_path / "attacked", expected, seed=1)
    assert outcome.codes == [0] * fuzz.PEERS
    assert outcome.differing == []
    assert min(outcome.frames[name] for name in fuzz.ATTACKS) > 0
    assert outcome.refused > 0
