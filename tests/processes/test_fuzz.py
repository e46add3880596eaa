"""Fuzzing that needs processes: a small part of `make fuzz`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.fuzz.attackers import ATTACKS, PEERS
from benchmarks.fuzz.live import attack_run, live_run, simulate_run


@pytest.mark.slow
def test_decoder_withstands_mutations_guided_by_coverage() -> None:
    pytest.importorskip("atheris", reason="pip install '.[fuzz]'")
    command = [sys.executable, "-m", "benchmarks.fuzz", "decoder", "--frames", "20000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    (reached, before) = re.findall(r"control and wire: (\d+), by the valid messages alone (\d+)", done.stdout)[0]
    assert int(reached) > int(before) > 50


def test_attacked_peers_are_bit_identical_to_the_simulation(tmp_path: Path) -> None:
    run = live_run(rounds=2)
    expected = simulate_run(run, tmp_path / "simulated")
    outcome = attack_run(run, tmp_path / "attacked", expected, seed=1)
    assert outcome.codes == [0] * PEERS
    assert outcome.differing == []
    assert min(outcome.frames[name] for name in ATTACKS) > 0
    assert outcome.refused > 0
