from __future__ import annotations

import io
import json
from statistics import pstdev

import pytest
from rich.console import Console

from launcher.picture import draw
from launcher.summary import Collaboration, Spread, failures, show, summarize
from p2pfl.runfolder import Result
from p2pfl.topology import Topology

FOUR = {
    # Two groups, interleaved; everybody gives 0.4 to its own kind, 0.1 to the others, and the rest to itself.
    peer: {
        "group": peer % 2,
        "accuracy": 0.9 - peer / 10,
        "correct": (9 - peer) * (peer + 1),
        "samples": 10 * (peer + 1),
        "weights": {str(j): 0.4 if peer == j or peer % 2 == j % 2 else 0.1 for j in range(4)},
        "out": {str((peer + 1) % 4): {"Head": [1, 100, 10], "Prototypes": [2, 50, 20]}},
        "inn": {str((peer - 1) % 4): {"Head": [1, 100, 10]}},
        "measures": {"peak": 0.9 - peer / 20},
        "seconds": {"training": 2.0, "total": 3.5},
    }
    for peer in range(4)
}


def printed(summary) -> str:
    console = Console(file=io.StringIO(), width=80, markup=False, highlight=False)
    show(summary, console)
    return console.file.getvalue()


def test_a_summary_adds_up_and_lies_in_the_folder(make_folder):
    folder = make_folder(peers=4, results=FOUR)
    summary = summarize(folder, dict.fromkeys(range(4), 0), seconds=12.3)
    assert summary.finished
    assert failures(summary) == []
    assert json.loads(folder.summary.read_text()) == json.loads(json.dumps(summary.to_dict()))
    assert summary.traffic == {
        "Head": {"messages": 4, "payload": 400, "header": 40},
        "Prototypes": {"messages": 8, "payload": 200, "header": 80},
    }
    first = summary.peers[0]
    assert (first.bytes_out, first.bytes_in, first.messages_out, first.seconds) == (180, 110, 3, 3.5)
    assert summary.accuracy is not None
    assert summary.accuracy.mean == pytest.approx(0.75)
    assert summary.accuracy.std == pytest.approx(pstdev([0.9, 0.8, 0.7, 0.6]))
    assert summary.accuracy.worst_tenth == summary.accuracy.worst_fifth == pytest.approx(0.6)
    assert summary.measures["peak"].mean == pytest.approx(0.825)
    assert summary.weighted_accuracy == pytest.approx((9 + 16 + 21 + 24) / 100)
    assert summary.best is None
    text = printed(summary)
    assert "accuracy: 75.0 ± 11.2 %, worst tenth 60.0 %, worst fifth 60.0 %" in text
    assert "peak: 82.5 ± 5.6 %, worst tenth 75.0 %, worst fifth 75.0 %" in text
    assert "accuracy over the test samples of all peers: 70.0 %" in text
    assert "mean weight inside groups 0.4000, across groups 0.1000, 4.0 times as much inside" in text


def test_the_worst_tenth_of_thirty_peers_are_three_and_the_worst_fifth_six():
    spread = Spread.of([peer / 100 for peer in range(30)])
    assert spread is not None
    assert spread.worst_tenth == pytest.approx(0.01)
    assert spread.worst_fifth == pytest.approx(0.025)
    assert Spread.of([None, None]) is None


def test_nobody_tested_nothing_weighed(make_folder):
    assert summarize(make_folder(peers=1, results={0: {"correct": 0, "samples": 0}})).weighted_accuracy is None


def test_the_collaboration_graph_is_ordered_by_group(make_folder):
    graph = summarize(make_folder(peers=4, results=FOUR)).collaboration
    assert graph is not None
    assert graph.peers == [0, 2, 1, 3]
    assert graph.groups == [0, 0, 1, 1]
    assert graph.weights[0] == [0.4, 0.4, 0.1, 0.1]
    assert (graph.inside, graph.across, graph.ratio) == pytest.approx((0.4, 0.1, 4.0))


def result(peer: int, group: int, weights: dict[str, float] | None, rounds_done: int = 1) -> Result:
    return Result(peer, "finished", rounds_done, "", "", group, weights=weights)


def test_weights_to_oneself_count_for_neither_side():
    graph = Collaboration.of([result(0, 0, {"0": 1.0}), result(1, 1, {"1": 1.0})])
    assert graph is not None
    assert (graph.inside, graph.across, graph.ratio) == (None, 0.0, None)


def test_no_weights_no_graph():
    assert Collaboration.of([result(0, 0, None)]) is None
    assert Collaboration.of([result(0, 0, {"0": 1.0}, rounds_done=0)]) is None


def test_failures_are_named_with_their_reason_and_log(make_folder):
    failed = {"phase": "failed", "error": "ValueError: loss is nan"}
    results = {0: {"phase": "stopped"}, 1: {"phase": "stopped"}, 3: failed, 4: None}
    folder = make_folder(peers=7, results={**results, 6: None})
    summary = summarize(folder, {5: -9, 6: 73}, words={6: "no room\nat all"})
    assert not summary.finished
    assert failures(summary) == [
        "peers 0-1: stopped",
        f"peer 3: failed: ValueError: loss is nan; see {folder.peer(3).log}",
        "peer 4: never started",
        f"peer 5: killed by SIGKILL; see {folder.peer(5).log}",
        f"peer 6: failed: no room; see {folder.peer(6).log}",
    ]
    assert "nan" not in printed(summary)  # the table has no room for reasons


def test_a_summary_that_cannot_be_written_is_shown_all_the_same(make_folder):
    folder = make_folder(peers=1)
    folder.summary.mkdir()
    summary = summarize(folder)
    assert summary.finished
    assert failures(summary) == [summary.unwritten]
    assert f"{folder.summary}: cannot be written: Is a directory" in summary.unwritten


def test_twenty_peers_fit_a_narrow_terminal(make_folder):
    changes = {
        "model": "tiny-residual",
        "accuracy": 1.0,
        "best": 1.0,
        "rounds_done": 1000,
        "out": {"0": {"Prototypes": [1, 10**8 - 1, 0]}},
        "inn": {"0": {"Prototypes": [1, 10**8 - 1, 0]}},
        "seconds": {"total": 3599.0},
        "weights": {str(j): 0.05 for j in range(20)},
    }
    text = printed(
        summarize(make_folder(peers=20, results={peer: {**changes, "group": peer % 2} for peer in range(20)}))
    )
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80


# ---- the picture ----------------------------------------------------------------------------------------------


def test_shades_grow_with_the_weight_given_to_others():
    rows = [[0.9, 0.0, 0.01, 0.25], [0.1, 0.9, 0.5, 1.0]]
    first, second = draw([0, 10], [0, 1], rows).splitlines()
    assert first == " group 0, peer 0 ███···░░░▒▒▒"
    assert second == "group 1, peer 10 ░░░███▓▓▓███"


def test_a_picture_of_nothing_but_selves():
    assert draw([0, 1], [0, 0], [[1.0, 0.0], [0.0, 1.0]]).splitlines()[0].endswith("███···")


def test_sixty_peers_fit_a_narrow_terminal():
    text = draw(range(60), [10] * 60, [[0.5] * 60] * 60)
    assert max(map(len, text.splitlines())) <= 80


def test_a_graph_that_has_fallen_apart_is_reported(make_folder):
    line = Topology.from_edges(5, [(0, 1), (1, 2), (2, 3), (3, 4)])
    folder = make_folder("middle", peers=5, results={2: None})
    summary = summarize(folder, {2: -9}, topology=line)
    assert summary.parts == [[0, 1], [3, 4]]
    assert failures(summary)[-1] == "without them the graph falls into 2 parts: 0-1; 3-4"
    ends = make_folder("ends", peers=5, results={0: None, 4: None})
    summary = summarize(ends, {0: -9, 4: -9}, topology=line)
    assert summary.parts is None
    assert "falls into" not in " ".join(failures(summary))
