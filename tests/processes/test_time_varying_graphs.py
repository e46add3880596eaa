"""Time-varying graphs, over sockets: the bits of `simulate`; records of every round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from p2pfl.session import metrics
from p2pfl.simulation.simulate import simulate

DPSGD = {"name": "dpsgd", "batch": 16}
FEDPROTO = {"name": "fedproto", "batch": 16}
EL_LOCAL = {"name": "el-local", "receivers": 2}
TRACE = {
    "name": "trace",
    "directed": True,
    "repeat": True,
    "edges": [[0, 0, 1, 0.5], [0, 1, 2, 0.25], [1, 2, 3, 0.5], [1, 3, 4, 1.0], [3, 4, 0, 0.5]],
}


def outcome(results: Any) -> list[tuple[Any, ...]]:
    return [(r.phase, r.rounds_done, r.digest, r.sent, r.received, r.weights, r.missing) for r in results]


@pytest.mark.parametrize(
    ("graph", "changes"),
    [
        pytest.param(
            "one-peer-exponential", {"algorithm": {"name": "dfedavgm", "batch": 16}}, marks=pytest.mark.slow
        ),
        pytest.param({"name": "base-k", "degree": 2}, {"algorithm": FEDPROTO}, marks=pytest.mark.slow),
        ({"name": "el-oracle", "degree": 2}, {"algorithm": DPSGD, "joins_at": {"4": 2}}),
        (EL_LOCAL, {"algorithm": {"name": "fedavg", "batch": 16, "participation": 0.7}}),
        pytest.param("matchings", {"algorithm": {"name": "fedavg-dec", "batch": 16}}, marks=pytest.mark.slow),
        ({"name": "list", "graphs": ["ring", "star"]}, {"algorithm": FEDPROTO}),
        (TRACE, {"algorithm": DPSGD}),
    ],
    ids=lambda value: value if isinstance(value, str) else value.get("name", ""),
)
def test_sockets_match_simulate_in_bits_and_byte_counts(
    graph: Any, changes: dict[str, Any], make_run: Any, prepare: Any, warm: Any, tmp_path: Path
) -> None:
    run = make_run(peers=5, rounds=6, graph=graph, models="tiny-cnn", **changes, chaos={"link": {"jitter": 0.02}})
    folder = prepare(tmp_path / "run", run)
    assert set(warm.run(folder).values()) == {0}
    assert outcome(files.result() for files in folder.peers()) == outcome(simulate(run))


def test_records_hold_the_sources_receivers_and_weights_of_each_round(
    make_run: Any, prepare: Any, tmp_path: Path
) -> None:
    run = make_run(peers=5, rounds=6, graph=EL_LOCAL, algorithm=DPSGD)
    folder = prepare(tmp_path / "run", run)
    simulate(run, folder)
    for files in folder.peers():
        for record in metrics.read(files.metrics):
            graph = run.schedule(record["t"])
            sources, receivers = graph.sources[files.peer], graph.receivers[files.peer]
            assert (record["sources"], record["receivers"]) == (len(sources), len(receivers))
            assert sorted(map(int, record["sent"])) == list(receivers)
            assert sorted(map(int, record["received"])) == list(sources)
            row = dict(graph.row(files.peer))
            assert {int(j): weight for j, weight in record["weights"].items() if int(j) != files.peer} == row
