"""What the benchmarks tell from CPU seconds, with runs whose costs are made up."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest

from benchmarks.bench import gpu, measuring, messages, raw_zmq, runs, work
from benchmarks.bench.measuring import Measurement, RunTree
from benchmarks.bench.messages import Complete
from benchmarks.bench.report import Report
from benchmarks.bench.settings import Settings
from p2pfl.models.cost import cost
from p2pfl.run_file.load import from_dict

Device = namedtuple("Device", ["name"])
START, ROUND, MESSAGE = 2.0, 0.003, 0.0004
"""CPU seconds of a run without its rounds, of a peer's round without messages, and of a message."""


def made_up(tree: RunTree, timeout: float = 600.0) -> Measurement:
    """Measure a run that sends one message to each neighbor in a round of 0.5 s."""
    peers, graph = tree["peers"], tree.get("graph", "complete")
    messages = peers * (peers - 1) if graph == "complete" else 2 * len(graph["edges"])
    seconds = [0.5 * (t + 1) for t in range(tree["rounds"])]
    each = peers * ROUND + messages * MESSAGE
    return Measurement(seconds=seconds[-1], cpu=START + tree["rounds"] * each, rounds=[seconds] * peers)


@pytest.fixture(autouse=True)
def _made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "launch", made_up)
    monkeypatch.setattr(measuring, "simulate", made_up)
    monkeypatch.setattr(measuring, "is_accepted", lambda tree: True)


def rows(report: Report) -> dict[str, dict[str, Any]]:
    (table,) = report.tables
    return {str(row[1]): dict(zip(table.columns, row, strict=True)) for row in table.rows}


def test_a_message_is_what_a_round_takes_beyond_one_without_neighbors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw_zmq, "exchange", lambda *args, curve: raw_zmq.Cost(0.001, 7 * 0.00002))
    monkeypatch.setattr(messages, "GRAPHS", [Complete(8, 10, 60, ["in-process", "same-host mapping", "CURVE"])])
    report = messages.messages(Settings(turns=2))
    found = rows(report)
    assert found["plain pyzmq, TCP"]["CPU ms a message"] == pytest.approx([0.02, 0.02])
    assert found["without neighbors"]["CPU ms a peer's round"] == pytest.approx([3, 3])
    assert found["CURVE"]["CPU ms a peer's round"] == pytest.approx([3 + 7 * 0.4] * 2)
    assert found["CURVE"]["of it messages"] == pytest.approx([7 * 0.4] * 2)
    assert found["CURVE"]["CPU ms a message"] == pytest.approx([0.4, 0.4])
    assert found["CURVE"]["of plain pyzmq"] == pytest.approx([20, 20])
    assert found["CURVE"]["ms a round"] == pytest.approx([500, 500])
    (goal,) = report.goals
    assert (goal.what, goal.limit, goal.met) == ("complete 8: CPU of a message of 2.4 kB", 0.35, False)
    assert goal.value == pytest.approx(0.4)


def test_a_message_of_decentralizepy_is_what_its_complete_graph_takes_beyond_a_regular_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Rival:
        def slope(self, work: runs.Work, edges: list[list[int]], short: int) -> measuring.Slope:
            tree = {"peers": work.peers, "rounds": work.rounds, "graph": {"edges": edges}}
            return measuring.slope(made_up, tree, short)

    monkeypatch.setattr(raw_zmq, "exchange", lambda *args, curve: raw_zmq.Cost(0.001, 7 * 0.00002))
    monkeypatch.setattr(messages, "GRAPHS", [Complete(8, 10, 60, ["same-host mapping"], rival=True)])
    found = rows(messages.messages(Settings(rival=Rival())))  # type: ignore[arg-type]
    assert found["decentralizepy, 4-regular"]["CPU ms a peer's round"] == pytest.approx([3 + 4 * 0.4])
    assert found["decentralizepy"]["CPU ms a message"] == pytest.approx([0.4])
    assert found["decentralizepy"]["of it messages"] == pytest.approx([7 * 0.4])


def test_the_overhead_is_the_cpu_and_the_time_of_a_round_over_those_of_bare_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def bare(tree: RunTree) -> Measurement:
        ended = [0.25 * (t + 1) for t in range(tree["rounds"])]
        return Measurement(cpu=START + tree["rounds"] * tree["peers"] * 0.002, rounds=[ended, ended])

    monkeypatch.setattr(work, "measure_bare", bare)
    report = work.overhead(Settings())
    values = {goal.what: goal.value for goal in report.goals}
    assert values["W1: CPU of a round, of bare training"] == pytest.approx((3 + 4 * 0.4) / 2)
    assert values["W1: a round, of bare training"] == pytest.approx(2)


def test_peers_of_one_gpu_are_compared_with_one_process_and_captured_passes_with_eager_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def launched(tree: RunTree, timeout: float) -> Measurement:
        assert tree["device"] == "cuda"
        faster = {1: 1, 4: 2, 20: 4}.get(tree["gpu"].get("peers_per_gpu"), 1) * (1 + tree["gpu"].get("mps", False))
        return Measurement(rounds=[[0.5 / faster * (t + 1) for t in range(tree["rounds"])]])

    monkeypatch.setattr(gpu, "find_gpus", lambda: [Device("NVIDIA H200")])
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/nvidia-cuda-mps-control")
    monkeypatch.setattr(measuring, "launch", launched)
    for quick in (True, False):
        peers, passes = gpu.gpu(Settings(quick=quick)).tables
        assert {row[0]: row[2] for row in peers.rows} == {
            "one process, peers in turn": pytest.approx([1.0]),
            "1 at once": pytest.approx([1.0]),
            "4 at once": pytest.approx([0.5]),
            "20 at once": pytest.approx([0.25]),
            "4 at once, MPS": pytest.approx([0.25]),
            "20 at once, MPS": pytest.approx([0.125]),
        }
        assert [row[0] for row in passes.rows] == ["eager", "CUDA graphs"]


def test_small_messages_are_valid_runs_with_bodies_of_their_size() -> None:
    for graph in [*messages.GRAPHS, *messages.QUICK]:
        tree = runs.light(graph.peers, "complete", graph.long, runs.SMALL)
        assert from_dict(tree).peers == graph.peers > messages.DEGREE
        assert graph.short < graph.long
    assert cost(runs.SMALL, 1, (8, 8), 10).model_bytes == messages.SIZE == 2440
