"""How old the messages were that rounds took: in records, status, result and summary."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from launcher.facts.status import RunStatus, _age_range
from launcher.facts.summary import summarize
from launcher.formatting.console import make_console
from launcher.views.print_summary import print_summary
from launcher.views.status import render
from p2pfl.run_folder.ages import AgeRange
from p2pfl.run_folder.records import parse
from p2pfl.session.metrics import RoundRecord, Totals
from tests.launcher_fixtures import Invoke, MakeFolder


def record(t: int, ages: dict[str, dict[int, int]]) -> RoundRecord:
    return RoundRecord(0, t, {}, {}, 0.0, {}, {}, {}, {}, 2, 2, ages=ages)


@pytest.mark.parametrize(
    ("counts", "expected", "text"),
    [
        ({3: 1}, (3, 3, 3), "3 (3 to 3)"),
        ({-1: 1, 4: 1}, (1.5, -1, 4), "1.5 (-1 to 4)"),
        ({5: 1, 0: 7, -2: 1}, (0, -2, 5), "0 (-2 to 5)"),
        ({0: 2, 1: 1, 9: 3}, (5, 0, 9), "5 (0 to 9)"),
    ],
)
def test_a_range_has_the_median_of_all_messages(counts: dict[int, int], expected: Any, text: str) -> None:
    found = AgeRange.of(counts)
    assert found == expected
    assert str(found) == text


def test_totals_count_messages_by_age_and_survive_a_checkpoint() -> None:
    totals = Totals()
    totals.add(record(0, {"Parameters": {1: 0, 2: 0}}))
    totals.add(record(1, {"Parameters": {1: 1, 2: -3}, "Head": {1: 1}}))
    totals.add(record(2, {}))
    assert totals.ages == {"Parameters": {0: 2, 1: 1, -3: 1}, "Head": {1: 1}}
    assert totals.last_ages is None
    assert Totals.from_state_dict(totals.state_dict()).ages == totals.ages


def test_a_record_has_the_ages_of_all_kinds_and_a_row_their_ranges() -> None:
    made = record(4, {"Parameters": {1: 2, 2: -3}, "Head": {1: 1}})
    assert made.age_range() == [1, -3, 2]
    assert record(0, {}).age_range() is None
    (read,) = parse([json.loads(made.to_json())])
    assert read.ages == {"Parameters": {2: 1, -3: 1}, "Head": {1: 1}}
    row = read.row()
    assert [row[f"ages.Parameters.{name}"] for name in ("median", "lowest", "highest")] == [-0.5, -3, 2]
    assert not any(name.startswith("ages.Parameters.2") for name in row)


@pytest.mark.parametrize("ages", ["x", {"Parameters": 3}, {"Parameters": {"1": "x", "2": None}}, {"Parameters": {}}])
def test_ages_of_wrong_types_count_as_absent(ages: Any) -> None:
    (read,) = parse([{"peer": 0, "t": 0, "ages": ages}])
    assert read.ages == {}
    assert "ages" not in "".join(read.row())


def test_the_status_has_a_column_only_if_rounds_do_not_wait(make_folder: MakeFolder, invoke: Invoke) -> None:
    folder = make_folder()
    shown, console = make_console(), make_console()
    with console.capture() as before:
        console.print(render(RunStatus.take(folder)))
    assert "ages" not in before.get()
    status = folder.peer(1).status()
    assert status is not None
    folder.peer(1).write_status(replace(status, ages=[0.5, -2, 13]))
    with shown.capture() as after:
        shown.print(render(RunStatus.take(folder)))
    head, _, second = after.get().splitlines()[1:4]
    assert head.split()[-1] == "ages"
    assert second.endswith("0.5 (-2 to 13)")
    honest, aged = json.loads(invoke("status", folder.root, "--json").stdout)["peers"]
    assert "ages" not in honest
    assert aged["ages"] == {"median": 0.5, "lowest": -2, "highest": 13}


def test_the_summary_has_the_ages_of_all_peers(make_folder: MakeFolder) -> None:
    ages = [{"Parameters": {"0": 5, "2": 1}}, {"Parameters": {"-4": 2, "9": 9}}]
    summary = summarize(make_folder(results={peer: {"ages": found} for peer, found in enumerate(ages)}))
    assert summary.to_dict()["ages"] == {"Parameters": {"median": 9, "lowest": -4, "highest": 9}}
    console = make_console()
    with console.capture() as shown:
        print_summary(summary, console)
    assert "ages of Parameters in rounds: median 9, from -4 to 9" in shown.get()
    assert "ages" not in summarize(make_folder("waiting")).to_dict()


def test_ages_that_are_no_numbers_are_ignored() -> None:
    assert _age_range([math.nan, 0.0, 1.0]) is None
    assert _age_range([1.0, 0.0, 2.0]) == AgeRange(1.0, 0, 2)
