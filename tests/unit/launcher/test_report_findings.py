"""`p2pfl report`: what is read from the records and the logs, and what stands out in it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from launcher.report import history
from launcher.report.findings import find
from launcher.report.learned import Learned
from p2pfl.run_folder.folder import RunFolder, Status
from p2pfl.run_folder.records import parse
from tests.launcher_fixtures import MakeFolder
from tests.records import write_records
from tests.reports import HOSTILE, read, record

# ---- records ------------------------------------------------------------------------------------------------


def test_bytes_are_cumulative_and_seconds_are_those_elapsed() -> None:
    found = history.read(parse([record(0, 0), record(0, 1), record(1, 0, elapsed=7.5), record(1, 1, elapsed=9.0)]))
    assert [(row["peer"], row["bytes"], row["seconds"]) for row in found.rows] == [
        (0, 110.0, 4.0),
        (0, 220.0, 8.0),
        (1, 110.0, 7.5),
        (1, 220.0, 9.0),
    ]
    assert found.kinds == {"Head": [4.0, 400.0, 40.0]}
    assert dict(found.edges) == {(0, 1): 220.0, (1, 0): 220.0}
    assert found.seconds[0] == {
        "training": 2.0,
        "waiting": 4.0,
        "queued": 1.0,
        "sending": 0.5,
        "evaluating": 0.2,
        "other": pytest.approx(0.3),
    }


def test_values_of_wrong_types_in_records_count_as_absent() -> None:
    broken = record(0, 0, loss={HOSTILE: None}, seconds="x", sent={"1": {"Head": "x"}, "y": 3}, weights={"0": "x"})
    broken |= {"personal": {"accuracy": True}, "missing": {"Head": [1, "x"], "Body": 7}, "elapsed": 10**400}
    found = history.read(parse([broken, {"peer": "a"}, {}, record(1, 0)]))
    assert [row["accuracy"] for row in found.rows] == [None, 0.6]
    assert [row["bytes"] for row in found.rows] == [0.0, 110.0]
    assert dict(found.missing) == {(0, 1): 1}
    assert found.diverged == {0: 0}
    assert "\x1b" not in "".join(found.terms)


def test_thinning_keeps_the_first_and_the_last_round_and_the_limit() -> None:
    assert history.thinned(range(5), 9) == [0, 1, 2, 3, 4]
    kept = history.thinned(range(1000), 10)
    assert (len(kept), kept[0], kept[-1]) == (10, 0, 999)


def test_a_long_history_is_thinned_but_keeps_evaluated_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_ROWS", 40)
    records = [record(0, t, **({} if t % 50 == 49 else {"personal": None})) for t in range(400)]
    table = history.columns(history.read(parse(records)), {0: None})
    assert len(table["t"]) <= 40
    assert sum(value is not None for value in table["accuracy"]) == 8
    assert (table["t"][0], table["t"][-1]) == (0, 399)


def test_means_and_deviations_are_over_peers_and_stay_within_accuracies() -> None:
    rows = [record(0, 0, personal={"accuracy": 0.1}), record(1, 0, personal={"accuracy": 0.9})]
    rows += [record(0, 1, personal={"accuracy": 1.0}), record(1, 1, personal={"accuracy": 0.2})]
    first, second = history.means(history.read(parse(rows)))
    assert [first["mean"], first["std"], first["t"]] == pytest.approx([0.5, 0.4, 0])
    assert [second["low"], second["high"]] == pytest.approx([0.2, 1.0])


def test_means_over_time_are_of_the_last_evaluation_of_each_honest_peer() -> None:
    at = [(0, 0, 1.0, 0.2), (0, 1, 2.0, 0.4), (1, 0, 3.0, 0.6), (0, 2, 3.0, 0.8), (1, 1, 9.0, 0.4), (2, 0, 0.5, 0.0)]
    rows = [record(peer, t, elapsed=seconds, personal={"accuracy": value}) for peer, t, seconds, value in at]
    found = history.means_over_time(history.read(parse(rows), attackers=[2]))
    assert [row["seconds"] for row in found] == [3.0, 9.0]
    assert [row["mean"] for row in found] == pytest.approx([0.7, 0.6])
    assert [row["std"] for row in found] == pytest.approx([0.1, 0.2])
    assert history.means_over_time(history.read(parse([record(0, 0, personal=None)]))) == []


def test_ages_are_over_all_peers_by_kind_and_round() -> None:
    rows = [
        record(0, 0, ages={"Head": {"1": 0}}),
        record(0, 1, ages={"Head": {"1": -2}, "Body": {"1": 1}}),
        record(1, 1, ages={"Head": {"0": 1, "2": 6}}),
    ]
    assert history.ages(history.read(parse(rows))) == {
        "kind": ["Body", "Head", "Head"],
        "t": [1, 0, 1],
        "median": [1, 0, 1],
        "low": [1, 0, -2],
        "high": [1, 0, 6],
    }


def test_frames_hold_weights_in_thousandths_by_group_and_mark_unknown_rows() -> None:
    found = history.read(parse([record(0, 0), record(1, 0), record(0, 1)]))
    assert history.frames(found, [1, 0]) == [
        {"t": 0, "cells": [500, 500, 250, 750]},
        {"t": 1, "cells": [-1, -1, 250, 750]},
    ]


# ---- what stands out ----------------------------------------------------------------------------------------


def test_names_the_inaccurate_the_slow_the_dead_and_the_restarted_peer(make_folder: MakeFolder) -> None:
    made = make_folder(peers=6, results={p: {"accuracy": 0.9 if p != 4 else 0.2} for p in range(5)} | {5: None})
    records = [
        record(
            peer,
            t,
            seconds={"training": 9.0 if peer == 2 else 1.0, "waiting": 1.0, "total": 12.0},
            elapsed=12.0 * (t + 1),
        )
        for peer in range(6)
        for t in range(3)
    ]
    write_records(made, records)
    for entry in records:
        entry["missing"] = {"Head": [3, 5]} if entry["peer"] == 0 else {}
    write_records(made, records)
    made.peer(1).write_status(Status(1, 2**22 + 1, "finished", 2, 3, starts=2))
    texts = [finding.text for finding in read(made).findings]
    assert texts[0] == "Peer 5 did not finish: never started, after 0 rounds, 0:36 after the start."
    assert "Peer 4 is far less accurate: 20.0 %, the median is 90.0 %." in texts
    slow = "Peer 2 is slow: it trains 9 s in the median round, 9.0 times as long as the median peer"
    assert any(text.startswith(slow) for text in texts)
    assert "Peer 1 was restarted once." in texts
    assert "3 messages did not arrive in time, all from peer 3." in texts  # that peer 5 stopped is said above


def test_what_was_skipped_because_it_had_diverged_is_bad(make_folder: MakeFolder) -> None:
    made = make_folder(peers=2, results={0: {}, 1: {}})
    skipped = [{"trainings": 1}, {"trainings": 2, "messages": "x"}, {HOSTILE: 10**400}]
    write_records(made, [record(1, t, skipped=counts) for t, counts in enumerate(skipped)])
    found = [finding for finding in read(made).findings if "diverged" in finding.text]
    assert ("bad", "Trainings rolled back because values had diverged: 3, at peer 1.") in [
        (finding.level, finding.text) for finding in found
    ]
    assert "\x1b" not in "".join(finding.text for finding in found)


def test_a_peer_that_stopped_is_compared_in_the_last_round_that_it_has_evaluated(make_folder: MakeFolder) -> None:
    made = make_folder(peers=6, results={p: {"accuracy": 0.9} for p in range(5)} | {5: {"accuracy": 0.5}})
    records = [
        record(peer, t, personal={"accuracy": 0.5 if t == 0 else 0.9})
        for peer in range(6)
        for t in range(3 if peer < 5 else 1)
    ]
    write_records(made, records)
    assert not any("Peer 5 is far less accurate" in finding.text for finding in read(made).findings)
    result = made.peer(5).result()
    assert result is not None
    records[-1]["personal"]["accuracy"] = 0.3
    write_records(made, records)
    made.peer(5).write_result(replace(result, accuracy=0.3))
    texts = [finding.text for finding in read(made).findings]
    assert "Peer 5 is far less accurate: 30.0 % after round 0, the median is 50.0 %." in texts


@pytest.mark.parametrize(
    ("confusion", "said"),
    [
        ([[0, 1, 9], [0, 0, 1], [1, 0, 10], [2, 2, 10]], " It predicts class 0 as 1, 1 as 0: are its labels right?"),
        ([[0, 1, 5], [0, 2, 5], [1, 0, 5], [1, 1, 4], [2, 1, 6]], ""),
        ([[0, 1, 9], [1, 1, 10], [2, 2, 10]], ""),
        ([[0, 0, 10], [1, 1, 10]], ""),
        ([], ""),
    ],
    ids=["renamed", "guessed", "one class for another", "right", "unknown"],
)
def test_labels_are_doubted_if_predictions_would_be_right_under_other_names(
    make_folder: MakeFolder, confusion: list[list[int]], said: str
) -> None:
    made = make_folder(peers=5, results={p: {"accuracy": 0.9 if p != 4 else 0.2} for p in range(5)})
    run = read(made)
    found = find(run.summary, run.history, Learned(confusion={4: confusion}))
    assert f"Peer 4 is far less accurate: 20.0 %, the median is 90.0 %.{said}" in [finding.text for finding in found]


@pytest.mark.parametrize(
    ("accuracies", "said"),
    [
        ([0.2, 0.5, 0.8, *[0.9] * 9], "The mean accuracy has been level at 90.0 % since round 3, after 0:16."),
        ([0.2, 0.5, 0.8, *[0.9] * 4, 0.8, *[0.9] * 4], "The mean accuracy has been level at 90.0 % since round 8, "),
        ([0.2, 0.5, *[0.9] * 7], None),  # too few evaluations
        ([0.2, 0.5, *[0.9] * 8], "The mean accuracy has been level at 90.0 % since round 2, "),
        ([*[0.9] * 9, 0.915, 0.885, 0.9], None),  # within the last fifth it still moves
        (
            [0.1 * t for t in range(10)],
            "The mean accuracy still rises (+20.0 points in the last fifth): train longer.",
        ),
        ([*[0.9] * 9, 0.8], "The mean accuracy fell by 10.0 points since its best round, 0."),
    ],
)
def test_says_since_when_the_mean_accuracy_is_level(
    folder: RunFolder, accuracies: list[float], said: str | None
) -> None:
    records = [
        record(peer, t, personal={"accuracy": accuracy}, elapsed=4.0 * (t + 1))
        for peer in range(sum(1 for _ in folder.peers()))
        for t, accuracy in enumerate(accuracies)
    ]
    write_records(folder, records)
    texts = [finding.text for finding in read(folder).findings if "The mean accuracy" in finding.text]
    assert len(texts) == (said is not None)
    assert said is None or texts[0].startswith(said)


@pytest.mark.parametrize(
    ("ages", "named"),
    [
        (
            (3, 9, 9, 19),
            "Peer 3 had no part in the last rounds with the highest α: the peak model is 19 rounds old, ",
        ),
        (
            (1, 30, 2, 25, 2),
            "Peers 1 3 had no part in the last rounds with the highest α: the peak models are up to 30 ",
        ),
        ((3, 9, 9, 18), ""),
        ((0, 2, 0, 0), ""),
    ],
)
def test_old_peak_models_are_named(make_folder: MakeFolder, ages: tuple[int, ...], named: str) -> None:
    folder = make_folder(peers=len(ages))
    records = [
        record(peer, t, diagnostics={"peak_age": ages[peer] if t else 99})
        for peer in range(len(ages))
        for t in (0, 1)
    ]
    write_records(folder, records)
    texts = [found.text for found in read(folder).findings if "peak" in found.text]
    assert [named in text for text in texts] == [True] * bool(named)


def test_an_even_run_has_nothing_that_stands_out(folder: RunFolder) -> None:
    findings = read(folder).findings
    assert {finding.level for finding in findings} == {"good"}
    assert findings[0].text.startswith("No peer stands out")


def test_events_of_the_logs_are_listed_by_time_and_equal_ones_of_several_peers_once(
    folder: RunFolder,
) -> None:
    dead = "neighbor declared dead peer=1: no connection for 5 s\n"
    folder.peer(0).log.write_text(
        f"2026-11-21T02:41:02.000 WARNING messages missing kind=Head\n2026-11-21T02:41:03.000 INFO    {dead}"
    )
    folder.peer(1).log.write_text(
        "2026-11-21T02:41:00.000 INFO    round done t=0\n2026-11-21T02:41:01.000 INFO    resumed t=1\n"
        + 2 * f"2026-11-21T02:41:04.000 INFO    {dead}"
    )
    events = read(folder).events
    assert events.count == 5
    assert [(event["at"][17:19], event["peers"], event["level"], event["text"]) for event in events.shown] == [
        ("01", [1], "INFO", "resumed t=1"),
        ("02", [0], "WARNING", "messages missing kind=Head"),
        ("03", [0, 1], "INFO", dead.strip()),
        ("04", [1], "INFO", dead.strip()),
    ]


def test_summary_json_stays_as_the_launcher_wrote_it_and_its_cause_of_death_is_shown(folder: RunFolder) -> None:
    folder.peer(1).clear_result()
    status = folder.peer(1).status()
    assert status is not None
    status.phase = "training"
    folder.peer(1).write_status(status)
    written = json.dumps({"peers": [{"peer": 1, "ended": "killed by SIGKILL"}]})
    folder.summary.write_text(written)
    assert [peer.ended for peer in read(folder).summary.peers] == ["finished", "killed by SIGKILL"]
    assert folder.summary.read_text() == written
