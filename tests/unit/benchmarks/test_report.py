"""Goals, tables, and the page and files that are written from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.bench import runs, sizes, transports
from benchmarks.bench.__main__ import BENCHMARKS, PROJECT
from benchmarks.bench.flame import file_name
from benchmarks.bench.report import (
    BEGIN,
    END,
    Goal,
    Report,
    Table,
    cell,
    goals_table,
    markdown_table,
    median_of,
    ratio,
    replace_between_markers,
    write,
)
from benchmarks.bench.work import ratios
from p2pfl.models.cost import cost
from p2pfl.run_file.load import from_dict

MACHINE = {
    "cores": 2,
    "memory_gib": 24,
    "python": "3.11",
    "torch": "2.15",
    "pyzmq": "27",
    "load": 0.1,
    "commit": "abc",
    "turns": 3,
}


def example(name: str = "launch", value: float | None = 12.0) -> Report:
    table = Table({"peers": "d", "graph": "", "seconds": ".1f"})
    table.add(20, "complete", [1.04, 3.0, 2.0])
    table.add(100, "complete", None)
    report = Report(name, "Launch", "What it is.", [table], machine=MACHINE)
    report.goal(Goal("100 peers: all in round 1", value, 10, "s"), {"name": "launch"})
    return report


# ---- goals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "better", "met"),
    [(9.9, "lower", True), (10, "lower", True), (10.1, "lower", False), (10, "higher", True), (9.9, "higher", False)],
)
def test_goal_is_met_at_its_limit_and_on_the_better_side(value: float, better: str, met: bool) -> None:
    assert Goal("x", value, 10, "s", better).met == met  # type: ignore[arg-type]


def test_goal_that_was_not_measured_is_not_met() -> None:
    assert not Goal("x", None, 10).met
    assert "| x | – | at most 10 | not measured |" in goals_table([Report("a", "A", "", [], [Goal("x", None, 10)])])


def test_goals_show_figure_limit_and_outcome() -> None:
    shown = goals_table([example(value=12.04), example(value=9.0)]).splitlines()
    assert shown[2:] == [
        "| 100 peers: all in round 1 | 12 s | at most 10 s | **no** |",
        "| 100 peers: all in round 1 | 9 s | at most 10 s | yes |",
    ]
    assert [goal.what for goal in example(value=12.0).missed] == ["100 peers: all in round 1"]
    assert example(value=9.0).missed == []


def test_flame_graph_is_named_after_the_goal() -> None:
    assert file_name("W1: a round, of bare training") == "w1-a-round-of-bare-training.svg"


# ---- tables ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [
        (None, ".1f", "–"),
        ([], ".1f", "–"),
        (1.25, ".1f", "1.2"),
        ([1.26], ".1f", "1.3"),
        ([3.0, 1.0, 2.0], ".1f", "2.0 (1.0 to 3.0)"),
        (12345, ",d", "12,345"),
        ("ring", "", "ring"),
    ],
)
def test_cell_shows_a_number_or_median_and_range(value: float, form: str, text: str) -> None:
    assert cell(value, form) == text


def test_table_in_markdown() -> None:
    assert (
        markdown_table({"peers": "d", "graph": ""}, [[20, "ring"]])
        == "| peers | graph |\n| ---: | --- |\n| 20 | ring |"
    )


def test_table_rejects_a_row_of_another_length() -> None:
    with pytest.raises(AssertionError):
        Table({"a": ""}).add("b", "c")


def test_ratios_and_medians_leave_out_what_was_not_measured() -> None:
    assert ratios([2.0, None, 9.0, 3.0], [1.0, 1.0, None, 0.0]) == [2.0]
    assert ratio(None, 1.0) is None
    assert median_of([None, 3.0, 1.0, 2.0]) == 2.0
    assert median_of([None]) is None


# ---- files -------------------------------------------------------------------------------------------------


def test_report_survives_json() -> None:
    report = example()
    read = Report.from_json(report.to_json())
    assert (read.tables, read.goals, read.machine) == (report.tables, report.goals, report.machine)
    assert "runs" not in json.loads(report.to_json())


def test_page_keeps_what_is_outside_the_markers() -> None:
    page = f"# Mine\n\n{BEGIN}\nold\n{END}\n\n## Also mine\n"
    assert replace_between_markers(page, "new") == f"# Mine\n\n{BEGIN}\n\nnew\n\n{END}\n\n## Also mine\n"


@pytest.mark.parametrize("page", ["", BEGIN, END, f"{END}{BEGIN}", f"{BEGIN}{END}{BEGIN}{END}"])
def test_page_without_both_markers_is_rejected(page: str) -> None:
    with pytest.raises(ValueError, match="should have the line"):
        replace_between_markers(page, "new")


def test_one_benchmark_replaces_its_part_of_the_page_and_keeps_the_others(tmp_path: Path) -> None:
    page, results = tmp_path / "page.md", tmp_path / "results"
    page.write_text(f"{BEGIN}\n{END}\n")
    write(example("scale"), ["launch", "scale"], results, page)
    write(example("launch", 99.0), ["launch", "scale"], results, page)
    text = page.read_text()
    assert text.index("--only launch") < text.index("--only scale")
    assert "| 20 | complete | 2.0 (1.0 to 3.0) |" in text
    assert "| 100 peers: all in round 1 | 99 s |" in text
    write(example("launch", 5.0), ["launch", "scale"], results, page)
    assert "99 s" not in page.read_text()
    assert {file.name for file in results.iterdir()} == {"launch.json", "scale.json"}


def test_page_of_the_project_has_the_markers_and_is_written_from_the_results() -> None:
    page = (PROJECT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    generated = page.partition(BEGIN)[2].partition(END)[0]
    assert replace_between_markers(page, "") != ""
    for name in BENCHMARKS:
        file = PROJECT / "benchmarks" / "results" / f"{name}.json"
        assert file.exists() == (f"--only {name}\n" in generated)
        if file.exists():
            report = Report.from_json(file.read_text(encoding="utf-8"))
            assert all(markdown_table(table.columns, table.rows) in generated for table in report.tables)


# ---- runs --------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _without_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("P2PFL_DATA", raising=False)


@pytest.mark.parametrize("work", runs.WORK)
def test_works_are_valid_runs_with_and_without_messages(work: str) -> None:
    tree = runs.work(work, runs.WORK[work])
    run = from_dict(tree)
    assert {run.topology.degree(peer) for peer in range(run.peers)} == {4}
    alone = from_dict(runs.without_messages(tree))
    assert (alone.peers, alone.rounds, len(alone.topology.edges)) == (run.peers, run.rounds, 0)


def test_light_and_checkpointed_runs_are_valid() -> None:
    for peers, graph in [*sizes.LAUNCHES.items(), *sizes.GRAPHS]:
        assert from_dict(runs.light(peers, graph, 1)).peers == peers
    for method in runs.CHECKPOINTED:
        assert from_dict(runs.checkpointed(method, 10, 3, 1)).file.checkpoint_every == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("exchange", [*transports.EXCHANGES.values(), *transports.QUICK.values()])
def test_bodies_have_the_size_of_the_model_that_is_sent(exchange: transports.Exchange) -> None:
    assert cost(exchange.tree()["models"], 1, (8, 8), 10).model_bytes == exchange.size


def test_sizes_of_bodies_are_as_named() -> None:
    assert [round(exchange.size / 1e3, 1) for exchange in transports.EXCHANGES.values()] == [2.4, 2327.8, 45958.5]
    assert cost("tiny-cnn", 1, (8, 8), 10).parameters * 4 == sizes.TINY_CNN
