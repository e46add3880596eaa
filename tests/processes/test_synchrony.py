"""Rounds that do not wait for one another: over sockets, and replayed with the same bits."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

import p2pfl
from p2pfl.testing import check_parity
from tests.conftest import tree

METHODS: dict[str, dict[str, Any]] = {
    "dpsgd": {"algorithm": {"name": "dpsgd", "order": "atc"}},
    "mapl": {"algorithm": {"name": "mapl", "warmup": 2}},
    "fedproto": {"algorithm": "fedproto"},
    "gossip": {"algorithm": "gossip"},
    "ad-psgd": {"algorithm": "ad-psgd", "graph": "ring"},
    "sgp": {"algorithm": "sgp", "graph": "one-peer-exponential"},
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


@pytest.mark.slow
def test_no_push_sum_weight_is_lost_when_peers_are_killed(tmp_path: Path) -> None:
    rounds, peers = 8, 4
    changes = {**METHODS["sgp"], "rounds": rounds, "peers": peers, "synchrony": "none", "checkpoint_every": 3}
    chaos = {"kill": [{"round": 2}, {"round": 5}], "link": {"jitter": 0.02}}
    with p2pfl.load(tree(**changes, chaos=chaos, device="cpu")).launch(tmp_path / "run") as running:
        run = running.wait()
    # What a peer has before a round; it keeps half of that, and sends the other half to peer i + 1 or i + 2.
    before = {(peer, 0): 1.0 for peer in range(peers)}
    before |= {(each["peer"], each["t"] + 1): each["diagnostics"]["push_sum_weight"] for each in run.records()}
    taken: dict[tuple[int, int], list[int]] = defaultdict(list)
    for peer in range(peers):
        lines = map(json.loads, (run.folder / f"peers/{peer:02d}/order.jsonl").read_text().splitlines())
        for take in (line for line in lines if "t" in line):
            found = {int(j): each for j, each in take["rounds"].items()}
            expected = before[peer, take["t"]] / 2 + sum(before[j, r] / 2 for j, each in found.items() for r in each)
            assert before[peer, take["t"] + 1] == pytest.approx(expected, abs=1e-5)
            for j, each in found.items():
                taken[j, peer] += each
    assert sum(map(len, taken.values())) > peers
    for (j, peer), each in taken.items():  # all that have been sent until then, in order, once
        assert each == [r for r in range(rounds) if (j + 2 ** (r % 2)) % peers == peer][: len(each)]
