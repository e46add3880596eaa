"""mesh20 at full size, over sockets and simulated. Takes minutes; run by scripts/check-slow."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MESH20 = Path(__file__).parents[2] / "topologies" / "mesh20.yaml"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
]


def p2pfl(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "launcher.cli", *arguments], check=True)


def results(run: Path) -> list[dict[str, Any]]:
    return [json.loads((run / "peers" / f"{peer:02d}" / "result.json").read_text()) for peer in range(20)]


def test_mesh20_is_bit_identical_over_sockets_and_simulated(tmp_path: Path) -> None:
    sockets, simulated = tmp_path / "sockets", tmp_path / "simulated"
    p2pfl("launch", str(MESH20), "--run-dir", str(sockets))
    p2pfl("simulate", str(MESH20), "--run-dir", str(simulated))
    p2pfl("digest", str(sockets), str(simulated))
    counted = [(r["sent"], r["received"]) for r in results(sockets)]
    assert counted == [(r["sent"], r["received"]) for r in results(simulated)]

    graph = json.loads((sockets / "summary.json").read_text())["collaboration"]
    assert graph["inside"] >= 10 * graph["across"]

    # MAPL, Table 7: 2 N_e (d_p K + |φ|) numbers per round until an edge is pruned; heads from round 30 on.
    rounds = [
        json.loads(line)
        for peer in range(20)
        for line in (sockets / "peers" / f"{peer:02d}" / "metrics.jsonl").read_text().splitlines()
    ]
    edges, features, classes = 20 * 19 // 2, 64, 10
    for t, numbers in ((0, features * classes), (29, features * classes), (30, 2 * features * classes)):
        sent = [e[1] for r in rounds if r["t"] == t for kinds in r["sent"].values() for e in kinds.values()]
        assert sum(sent) == 4 * 2 * edges * numbers
