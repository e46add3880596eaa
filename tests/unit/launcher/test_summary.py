"""The summary of a run."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from statistics import pstdev

import pytest
import yaml
from rich.console import Console

from launcher.comparison.groups import ComparedRun
from launcher.comparison.lines import lines
from launcher.facts.spreads import Spread
from launcher.facts.summary import Collaboration, Summary, summarize
from launcher.formatting.heat_map import draw
from launcher.views.print_summary import accuracy_lines, failure_lines, print_summary
from p2pfl.messaging.topology import Topology
from p2pfl.run_folder.folder import Result, Status
from tests.launcher_fixtures import MakeFolder

FOUR = {
    # Two interleaved groups: weight 0.4 for each peer of the same group, 0.1 for the others.
    peer: {
        "group": peer % 2,
        "accuracy": 0.9 - peer / 10,
        "correct": (9 - peer) * (peer + 1),
        "samples": 10 * (peer + 1),
        "weights": {str(j): 0.4 if peer == j or peer % 2 == j % 2 else 0.1 for j in range(4)},
        "sent": {str((peer + 1) % 4): {"Head": [1, 100, 10], "Prototypes": [2, 50, 20]}},
        "received": {str((peer - 1) % 4): {"Head": [1, 100, 10]}},
        "extra_metrics": {"peak": 0.9 - peer / 20},
        "unmasked_accuracies": {"personal": 0.9 - peer / 10, "peak": 0.9 - peer / 20},
        "masked_accuracies": {"personal": 0.95 - peer / 10, "peak": 0.9 - peer / 20},
        "seconds": {"training": 2.0, "total": 3.5},
        "cost": {"cpu_seconds": 30.0, "gpu_seconds": 15.0, "cpu_joules": 100.25},
    }
    for peer in range(4)
}


def printed(summary: Summary) -> str:
    console = Console(file=io.StringIO(), width=80, markup=False, highlight=False)
    print_summary(summary, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_prints_what_the_rounds_of_all_peers_cost(make_folder: MakeFolder) -> None:
    summary = summarize(make_folder(peers=4, results=FOUR))
    assert summary.cost == {"cpu_seconds": 120.0, "gpu_seconds": 60.0, "cpu_joules": 401.0}
    assert "cost: 2:00 of CPU time, 1:00 of GPU time, 401 J by RAPL (estimate)\n" in printed(summary)


def test_summarizes_results_and_writes_the_summary(make_folder: MakeFolder) -> None:
    folder = make_folder(peers=4, results=FOUR)
    summary = summarize(folder, dict.fromkeys(range(4), 0), seconds=12.3)
    assert summary.finished
    assert failure_lines(summary) == []
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
    assert summary.extra_metrics["peak"].mean == pytest.approx(0.825)
    assert summary.weighted_accuracy == pytest.approx((9 + 16 + 21 + 24) / 100)
    assert summary.best is None
    text = printed(summary)
    assert "accuracy, unmasked: 75.0 ± 11.2 %, worst tenth 60.0 %, worst fifth 60.0 %\n" in text
    assert "accuracy, masked: 80.0 ± 11.2 %, worst tenth 65.0 %, worst fifth 65.0 %\n" in text
    assert "peak: 82.5 ± 5.6 %, worst tenth 75.0 %, worst fifth 75.0 %" in text
    assert "accuracy weighted by test samples: 70.0 %" in text
    assert "mean weight within groups 0.4000, across groups 0.1000, ratio 4.0" in text


@pytest.mark.parametrize(("masked", "first"), [(False, "unmasked: 75.0"), (True, "masked: 80.0")])
def test_prints_the_accuracy_that_masked_test_asks_for_first(
    make_folder: MakeFolder, masked: bool, first: str
) -> None:
    folder = make_folder(peers=4, results=FOUR)
    plain = yaml.safe_load(folder.run_file.read_text())
    folder.run_file.write_text(yaml.safe_dump({**plain, "masked_test": masked}))
    summary = summarize(folder)
    assert summary.masked_test == masked
    assert accuracy_lines(summary)[0].startswith(f"accuracy, {first}")
    assert accuracy_lines(summary)[2] == f"peak: {summary.extra_metrics['peak']}"


def test_the_last_evaluation_of_a_peer_that_died_counts_as_both_accuracies(make_folder: MakeFolder) -> None:
    recorded = {"masked_accuracies": {"personal": 0.75}, "unmasked_accuracies": {"personal": 0.5}}
    folder = make_folder(peers=2, results={0: {"accuracy": 0.5, **recorded}, 1: None})
    died = Status(1, 1, "training", 2, 2, [], 0.75, 180, 110, messages_out=3)
    folder.peer(1).write_status(replace(died, masked_accuracy=1.0, unmasked_accuracy=0.75))
    summary = summarize(folder)
    assert summary.accuracy is not None
    assert summary.accuracy == summary.unmasked_accuracies["personal"]
    assert (summary.accuracy.mean, summary.masked_accuracies["personal"].mean) == (0.625, 0.875)
    assert (summary.peers[1].bytes_out, summary.peers[1].messages_out) == (180, 3)
    (line,) = lines([ComparedRun.of(folder, None)], masked=True)
    assert line.accuracy is not None
    assert (line.accuracy.mean, line.messages) == (0.875, 3)


def test_summarizes_results_of_earlier_versions(make_folder: MakeFolder) -> None:
    summary = summarize(make_folder(results={peer: {"accuracy": 0.5} for peer in range(2)}))
    assert accuracy_lines(summary) == [f"accuracy: {summary.accuracy}"]
    assert summary.masked_accuracies == {}


@pytest.mark.parametrize(
    ("kept", "shown"),
    [
        ({0: "local", 1: "local", 2: ""}, "batch-normalization statistics: local\n"),  # one model has none
        ({0: "averaged"}, "batch-normalization statistics: averaged\n"),
        ({0: "", 1: ""}, None),
        ({}, None),  # as earlier versions
    ],
)
def test_says_what_became_of_batch_normalization_statistics(
    kept: dict[int, str], shown: str | None, make_folder: MakeFolder
) -> None:
    results = {
        peer: {**fields, **({"statistics": kept[peer]} if peer in kept else {})} for peer, fields in FOUR.items()
    }
    summary = summarize(folder := make_folder(peers=4, results=results))
    text = printed(summary)
    assert ("statistics" in text) == (shown is not None)
    assert (shown or "") in text
    assert json.loads(folder.summary.read_text())["statistics"] == summary.statistics


def test_names_the_peers_whose_messages_were_lost(make_folder: MakeFolder) -> None:
    results = {
        0: {"dropped": {"3": 5, "7": 1}},
        1: {"dropped": {"7": 2}},
        2: {"expired": 2},
    }
    summary = summarize(make_folder(peers=4, results=results))
    assert printed(summary).splitlines()[-2:] == [
        "messages dropped as invalid, from peers 3 7: 8",
        "messages expired before they were used, at peer 2: 2",
    ]
    plain = summary.to_dict()["peers"][0]
    assert (plain["dropped"], plain["expired"]) == ({"3": 5, "7": 1}, 0)
    assert "messages " not in printed(summarize(make_folder("calm")))


def test_says_what_was_skipped_because_it_had_diverged(make_folder: MakeFolder) -> None:
    results = {0: {"skipped": {"trainings": 3}}, 2: {"skipped": {"trainings": 1, "messages": 4, "codes": 2}}}
    summary = summarize(make_folder(peers=3, results={1: {}, **results}))
    table = printed(summary).splitlines()
    assert table[-3:] == [
        "codes skipped because values had diverged: 2, at peer 2",
        "messages dropped because values had diverged: 4, at peer 2",
        "trainings rolled back because values had diverged: 4, at peers 0 2",
    ]
    head = table[0].split()
    at = head.index("skipped")
    assert head[at - 1 : at + 2] == ["missed", "skipped", "time"]
    assert [peer["skipped"] for peer in summary.to_dict()["peers"]] == [
        results[0]["skipped"],
        {},
        results[2]["skipped"],
    ]
    assert "skipped" not in printed(summarize(make_folder("calm")))


def test_a_failed_peer_that_has_completed_all_rounds_leaves_no_gap_in_the_graph(make_folder: MakeFolder) -> None:
    failed = {"phase": "failed", "error": "all 3 trainings were rolled back"}
    line = Topology.from_edges(3, [(0, 1), (1, 2)])
    summary = summarize(make_folder(peers=3, results={1: failed}), topology=line)
    assert (summary.finished, summary.rounds, summary.parts) == (False, 3, None)
    assert failure_lines(summary)[0].startswith("peer 1: failed: all 3 trainings were rolled back; see ")
    summary = summarize(make_folder("early", peers=3, results={1: {**failed, "rounds_done": 2}}), topology=line)
    assert summary.parts == [[0], [2]]


def test_says_that_no_message_has_reached_any_peer(make_folder: MakeFolder) -> None:
    line = "no message has reached any peer, though they waited for 6"
    silent = {"missing": 3, "received": {}}
    assert printed(summarize(make_folder("silent", peers=2, results={0: silent, 1: silent}))).splitlines()[-1] == line
    heard = {**silent, "received": {"0": {"Head": [1, 100, 10]}}}
    assert line not in printed(summarize(make_folder("partly", peers=2, results={0: silent, 1: heard})))


def test_names_the_peers_where_a_metric_is_not_finite(make_folder: MakeFolder) -> None:
    values = {0: {"f1": 0.5, "x": math.nan}, 1: {"f1": math.inf, "x": math.nan}, 2: {"f1": 0.25}}
    folder = make_folder(peers=3, results={peer: {"metrics": named} for peer, named in values.items()})
    text = printed(summarize(folder))
    assert "f1: 0.3750 ± 0.1250, lowest 0.2500, highest 0.5000\n" in text
    assert "f1: NaN or infinite at peer 1\nx: NaN or infinite at peers 0-1\n" in text
    assert json.loads(folder.summary.read_text())["nonfinite_metrics"] == {"f1": [1], "x": [0, 1]}


def test_says_which_peers_were_restarted(make_folder: MakeFolder) -> None:
    def started(**starts: int) -> None:
        for peer, count in starts.items():
            files = folder.peer(int(peer[1:]))
            files.write_status(Status(files.peer, 1, "finished", starts=count))

    folder = make_folder(peers=4)
    started(_0=1, _1=2, _2=2)  # peer 3: by an earlier version
    assert [peer.restarts for peer in summarize(folder).peers] == [0, 1, 1, 0]
    assert printed(summarize(folder)).splitlines()[-1] == "peers 1-2 were restarted, 2 times in all"
    started(_1=1, _2=4)
    assert printed(summarize(folder)).splitlines()[-1] == "peer 2 was restarted 3 times"
    assert summarize(folder).to_dict()["peers"][2]["restarts"] == 3


def test_resuming_a_stopped_peer_does_not_count_as_a_restart(make_folder: MakeFolder) -> None:
    folder = make_folder(peers=2)
    folder.peer(0).write_status(Status(0, 1, "finished", starts=3, resumes=2))
    folder.peer(1).write_status(Status(1, 1, "finished", starts=3, resumes=1))
    assert printed(summarize(folder)).splitlines()[-1] == "peer 1 was restarted once"


def test_the_worst_tenth_of_thirty_peers_are_three() -> None:
    spread = Spread.of([peer / 100 for peer in range(30)])
    assert spread is not None
    assert spread.worst_tenth == pytest.approx(0.01)
    assert spread.worst_fifth == pytest.approx(0.025)
    assert Spread.of([None, None]) is None


def test_without_test_samples_there_is_no_weighted_accuracy(make_folder: MakeFolder) -> None:
    assert summarize(make_folder(peers=1, results={0: {"correct": 0, "samples": 0}})).weighted_accuracy is None


def test_orders_the_collaboration_graph_by_group(make_folder: MakeFolder) -> None:
    graph = summarize(make_folder(peers=4, results=FOUR)).collaboration
    assert graph is not None
    assert graph.peers == [0, 2, 1, 3]
    assert graph.groups == [0, 0, 1, 1]
    assert graph.weights[0] == [0.4, 0.4, 0.1, 0.1]
    assert (graph.inside, graph.across, graph.ratio) == pytest.approx((0.4, 0.1, 4.0))


def result(peer: int, group: int, weights: dict[str, float] | None, rounds_done: int = 1) -> Result:
    return Result(peer, "finished", rounds_done, "", "", group, weights=weights)


def test_excludes_self_weights_from_the_means() -> None:
    graph = Collaboration.of([result(0, 0, {"0": 1.0}), result(1, 1, {"1": 1.0})])
    assert graph is not None
    assert (graph.inside, graph.across, graph.ratio) == (None, 0.0, None)


def test_without_weights_there_is_no_graph() -> None:
    assert Collaboration.of([result(0, 0, None)]) is None
    assert Collaboration.of([result(0, 0, {"0": 1.0}, rounds_done=0)]) is None


def test_failure_lines_have_reason_and_log(make_folder: MakeFolder) -> None:
    failed = {"phase": "failed", "error": "ValueError: loss is nan"}
    results = {0: {"phase": "stopped"}, 1: {"phase": "stopped"}, 3: failed, 4: None}
    folder = make_folder(peers=7, results={**results, 6: None})
    summary = summarize(folder, {5: -9, 6: 73}, errors={6: "no room\nat all"})
    assert not summary.finished
    assert failure_lines(summary) == [
        "peers 0-1: stopped",
        f"peer 3: failed: ValueError: loss is nan; see {folder.peer(3).log}",
        "peer 4: never started",
        f"peer 5: killed by SIGKILL; see {folder.peer(5).log}",
        f"peer 6: failed: no room; see {folder.peer(6).log}",
    ]
    assert "nan" not in printed(summary)  # the table omits reasons


def test_shows_a_summary_that_cannot_be_written(make_folder: MakeFolder) -> None:
    folder = make_folder(peers=1)
    folder.summary.mkdir()
    summary = summarize(folder)
    assert summary.finished
    assert failure_lines(summary) == [summary.unwritten]
    assert f"{folder.summary}: cannot be written: Is a directory" in summary.unwritten


def test_twenty_peers_fit_a_narrow_terminal(make_folder: MakeFolder) -> None:
    changes = {
        "model": "tiny-residual",
        "accuracy": 1.0,
        "best": 1.0,
        "rounds_done": 1000,
        "sent": {"0": {"Prototypes": [1, 10**8 - 1, 0]}},
        "received": {"0": {"Prototypes": [1, 10**8 - 1, 0]}},
        "seconds": {"total": 3599.0},
        "weights": {str(j): 0.05 for j in range(20)},
    }
    text = printed(
        summarize(make_folder(peers=20, results={peer: {**changes, "group": peer % 2} for peer in range(20)}))
    )
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80


# ---- heat map ----------------------------------------------------------------------------------------------


def test_scales_shades_by_the_largest_off_diagonal_weight() -> None:
    rows = [[0.9, 0.0, 0.01, 0.25], [0.1, 0.9, 0.5, 1.0]]
    first, second = draw([0, 10], [0, 1], rows).splitlines()
    assert first == " group 0, peer 0 ███···░░░▒▒▒"
    assert second == "group 1, peer 10 ░░░███▓▓▓███"


def test_draws_a_diagonal_matrix() -> None:
    assert draw([0, 1], [0, 0], [[1.0, 0.0], [0.0, 1.0]]).splitlines()[0].endswith("███···")


def test_sixty_peers_fit_a_narrow_terminal() -> None:
    text = draw(range(60), [10] * 60, [[0.5] * 60] * 60)
    assert max(map(len, text.splitlines())) <= 80


def test_reports_a_disconnected_graph(make_folder: MakeFolder) -> None:
    line = Topology.from_edges(5, [(0, 1), (1, 2), (2, 3), (3, 4)])
    folder = make_folder("middle", peers=5, results={2: None})
    summary = summarize(folder, {2: -9}, topology=line)
    assert summary.parts == [[0, 1], [3, 4]]
    assert failure_lines(summary)[-1] == "without them the graph has 2 components: 0-1; 3-4"
    ends = make_folder("ends", peers=5, results={0: None, 4: None})
    summary = summarize(ends, {0: -9, 4: -9}, topology=line)
    assert summary.parts is None
    assert "components" not in " ".join(failure_lines(summary))
