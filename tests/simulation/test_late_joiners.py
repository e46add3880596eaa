"""Methods that prune, when a peer joins after they have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from p2pfl.session import metrics
from p2pfl.simulation.simulate import simulate

JOINER, ROUND = 4, 4
PRUNING = {"local_epochs": 1, "momentum": 0.9, "prune_to": 1}
DATA = {"partition": {"name": "clusters", "clusters": 2, "per_class": 8, "test_per_class": 5, "validation": 0.25}}


@pytest.mark.parametrize(
    ("algorithm", "sources", "of_the_joiner"),
    [
        # Those that stay and those that join learn about each other for as many rounds as all do at first.
        ({"name": "l2c", "prune_round": 2}, [3, 3, 3, 1, 2, 2, 2, 1], [4, 4, 4, 1]),
        # The weight of a neighbor is known in its first round, but a joiner gets the encoder only in that round.
        ({"name": "meta-l2c", "prune_round": 2}, [3, 3, 3, 1, 2, 1, 1, 1], [4, 4, 1, 1]),
    ],
    ids=["l2c", "meta-l2c"],
)
def test_late_joiner_competes_with_the_neighbors_that_were_kept(
    algorithm: dict[str, Any],
    sources: list[int],
    of_the_joiner: list[int],
    make_run: Any,
    prepare: Any,
    tmp_path: Path,
) -> None:
    run = make_run(peers=5, rounds=8, algorithm={**algorithm, **PRUNING}, data=DATA, joins_at={JOINER: ROUND})
    folder = prepare(tmp_path / "run", run)
    simulate(run, folder)
    for files in folder.peers():
        records = metrics.read(files.metrics)
        expected = of_the_joiner if files.peer == JOINER else sources
        assert [record["sources"] for record in records] == expected
        for record in records:
            # What arrives is used: a weight for each, besides the peer's own.
            assert len(record["weights"]) == 1 + record["sources"]
            joined = record["t"] == ROUND and files.peer != JOINER
            assert not joined or str(JOINER) in map(str, record["weights"])
