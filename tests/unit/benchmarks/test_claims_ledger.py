"""The ledger of the papers' claims: completeness, rows, prices, pictures, and the command."""

from __future__ import annotations

import math
import re
import shutil
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.claims import compare, ledger, pages, plan, probes, sheets, sizes
from benchmarks.claims.__main__ import PROJECT, main, selected
from benchmarks.claims.declared import PAPERS, TOPOLOGIES, tree_of
from benchmarks.claims.figures import MAXIMA
from benchmarks.claims.statistics import Interval
from benchmarks.claims.store import Store, identity
from benchmarks.claims.summary import planned
from tests.claims_fixtures import ALL, ONE, OTHER, TREE, claim, project_store, record

# ---- the ledger --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.key)
def test_every_table_and_figure_has_a_row(paper: Any) -> None:
    covered = {re.sub(r"[a-c]$", "", line.where) for line in [*paper.claims, *paper.left]}
    assert covered >= set(paper.contents)
    assert all(left.reason for left in paper.left)
    assert all(one.paper and one.scale for one in paper.claims)


@pytest.mark.exhaustive
def test_rows_of_learning_rates_tell_variants_apart() -> None:
    store, methods = project_store(), []
    for paper in PAPERS:
        runs = [run for one in paper.claims for run in one.runs.values()]
        found = [row.split(" | ")[0].removeprefix("| ") for row in pages.rates_chosen(runs, store)]
        assert len(set(found)) == len(found)
        methods += found
    assert len(methods) > 80
    assert "fedtgp on fashion-mnist, 10 peers, 100 rounds, features=512, margin=fixed" in methods
    assert not any("lr=" in method for method in methods)
    assert not any("330 rounds" in method for method in methods)  # longer runs take the learning rate of 105


@pytest.mark.exhaustive
def test_runs_of_all_claims_are_valid_and_named_once() -> None:
    names = [(one.where, one.name) for one in ALL]
    for paper in PAPERS:
        lines = [(one.where, one.name) for one in paper.claims]
        assert len(set(lines)) == len(lines)
    assert len(names) > 100
    for one in ALL:
        for run in one.runs.values():
            assert identity(run.with_rate(None), run.probe).key
            assert run.probe in ("", *probes.PROBES)


@pytest.mark.exhaustive
def test_runs_of_one_claim_train_equally_long_or_the_row_says_so(tmp_path: Path) -> None:
    told = set()
    for one in ALL:
        epochs = [sizes.local_epochs(run.with_rate(None)) for run in one.runs.values()]
        size = ledger.size_cell(ledger.entry(one, Store(tmp_path)))
        assert ("local epochs" in size) == (max(epochs) >= 1.1 * min(epochs)), one.name
        told |= {one.where} if "local epochs" in size and not one.dear else set()
    assert told == {"Table 2", "Table 6", "§ Evaluations", "Fig. 19"}


DEAR = [pytest.param(one, id=f"{one.where}, {one.name}") for one in ALL if one.dear]


@pytest.mark.exhaustive
@pytest.mark.parametrize("one", DEAR)
def test_runs_at_the_papers_size_have_that_size(one: Any) -> None:
    peers, rounds, samples = (int(number.replace(",", "")) for number in re.findall(r"[\d,]+(?= [prs])", one.scale))
    for run in one.runs.values():
        tree = run.with_rate(None)
        assert (tree["peers"], tree["rounds"]) == (peers, rounds)
        assert sizes.samples(tree) == pytest.approx(samples, rel=0.02 if "part of CIFAR-10" in one.name else 0.01)


@pytest.mark.exhaustive
@pytest.mark.parametrize("one", DEAR)
def test_methods_at_the_papers_size_train_alike(one: Any) -> None:
    hypers = [planned(run.with_rate(None)).settings["algorithm"] for run in one.runs.values()]

    def agree(*names: str) -> bool:
        return all([hyper[name] for name in names] == [hypers[0][name] for name in names] for hyper in hypers)

    assert agree("batch", "local_epochs", "weight_decay")
    # MAPL+ has Adam, DFedAvgM does not.
    assert agree("lr", "momentum", "betas") or not agree("optimizer")


def test_epochs_count_participation_and_steps() -> None:
    above = [one for one in PAPERS[1].claims if one.where == "Table 2" and one.name.startswith("l2c above")]
    assert {round(sizes.local_epochs(one.runs["l2c"].with_rate(None))) for one in above if "l2c" in one.runs} == {100}
    assert sizes.local_epochs({**TREE, "peers": 10, "algorithm": {"name": "dfml"}}) == pytest.approx(1.2)
    steps = {"name": "dpsgd", "local_epochs": None, "local_steps": 1, "batch": 5}
    assert sizes.local_epochs({**TREE, "rounds": 3, "algorithm": steps}) == pytest.approx(1.0)


def test_settings_of_the_paper_stay_as_decided() -> None:
    runs = {(one.name, label): run for one in ALL for label, run in one.runs.items()}
    assert not any(run.tree.get("masked_test") for run in runs.values())
    ring = planned(runs["local above dpsgd", "dpsgd"].with_rate(None)).topology
    assert {ring.degree(peer) for peer in range(20)} == {10}  # a self weight of 1/11
    dfml = runs["above decentralized FedAvg, digits, non-IID", "dfml"]
    hyper = planned(dfml.with_rate(None)).settings["algorithm"]
    periods = [hyper["period"] + number * hyper["period_increment"] for number in range(len(MAXIMA))]
    assert tuple(accumulate(periods)) == MAXIMA  # the last of which is the end of a cycle
    assert MAXIMA[-1] == dfml.tree["rounds"]


def test_row_shows_verdict_interval_threshold_and_size(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for seed in range(5):
        record(store, ONE, seed, 72.0 + seed * 0.1)
        record(store, OTHER, seed, 70.0)
    one = claim(threshold=1.0, whose="ours", curves="accuracy")
    found = ledger.entry(one, store)
    text = ledger.row_of_claim(found, "sheet.svg")
    assert "| **reproduced** | +2.20 ± 0.20 points; > 1.00 (ours) | +1 |" in text
    assert "2 peers, 2 rounds, 30 samples; many | 5 | 0.01 core h |" in text
    assert "[one above other](sheet.svg)" in text


def test_row_names_a_margin_on_both_sides_and_each_runs_samples(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for seed in range(5):
        record(store, ONE, seed, 72.0 + seed * 0.1)
        record(store, OTHER, seed, 70.0)
    found = ledger.entry(claim(relation="≈", threshold=3.0, whose="ours"), store)
    for run in found.summaries["other"].values():
        run.samples = 15.0
    text = ledger.row_of_claim(found)
    assert "| **reproduced** | +2.20 ± 0.20 points; within ±3.00 (ours) | +1 |" in text
    assert "2 peers, 2 rounds, 15 or 30 samples; many |" in text


def test_picture_has_the_seeds_that_the_verdict_is_of(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for seed in range(10):
        record(store, ONE, seed, 72.0 + seed)
    for seed in range(5):
        record(store, OTHER, seed, 60.0)
    assert {label: list(runs) for label, runs in ledger.entry(claim(), store).summaries.items()} == {
        "one": [0, 1, 2, 3, 4],
        "other": [0, 1, 2, 3, 4],
    }


@pytest.mark.parametrize(
    ("paper", "given", "less"),
    [
        ("+0.50 (71 against 70)", {}, True),
        ("+0.15", {}, False),
        ("+0.50 ± 0.2 (71 against 70)", {}, True),
        ("+0.50 ± 0.4 (71 against 70)", {}, False),
        ("−0.50 (70 against 71)", {}, False),
        ("−0.50 (70 against 71)", {"relation": "<"}, True),
        ("+0.50 (71 against 70)", {"relation": "<"}, False),
        ("above", {}, False),
        ("71 against 70", {}, False),
        ("+0.50", {"whose": "ours"}, False),
        ("+0.50", {"threshold": 0.1}, False),
        ("+0.50", {"unit": "rounds"}, False),
    ],
)
def test_undecided_rows_say_whether_they_exclude_the_papers_difference(
    paper: str, given: dict[str, Any], less: bool, tmp_path: Path
) -> None:
    store = Store(tmp_path)
    for seed in range(5):
        record(store, ONE, seed, 70.0 + 0.1 * (seed - 2))  # +0.00 ± 0.20
        record(store, OTHER, seed, 70.0)
    found = ledger.entry(replace(claim(**given), paper=paper), store)
    assert found.verdict == "undecided"
    assert ledger.verdict_cell(found) == ("undecided, less than in the paper" if less else "undecided")


def test_decided_rows_and_those_of_few_seeds_are_not_less_than_in_the_paper(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for seed in range(5):
        record(store, OTHER, seed, 70.0)
        found = ledger.entry(replace(claim(), paper="+5"), store)
        assert not found.excludes_the_papers
        record(store, ONE, seed, 70.1 + 0.1 * (seed - 2))
    decided = ledger.entry(replace(claim(), paper="+5"), store)
    assert (decided.verdict, decided.excludes_the_papers) == ("undecided", True)
    for seed in range(5, 10):
        record(store, OTHER, seed, 70.0)
        record(store, ONE, seed, 70.2)
    decided = ledger.entry(replace(claim(), paper="+5"), store)
    assert (decided.verdict, decided.excludes_the_papers) == ("reproduced", False)


@pytest.mark.parametrize(
    ("mean", "half", "n", "text"),
    [
        (1.23456, 0.0312, 5, "1.235 ± 0.031"),
        (-77.77, 12.3, 5, "−78 ± 12"),
        (0.5, 0.000001, 5, "0.5000 ± 0.0000"),
        (100.0, 0.0, 5, "100.0 ± 0"),
        (7.25, math.inf, 1, "7.25"),
    ],
)
def test_means_are_shown_to_two_digits_of_the_interval(mean: float, half: float, n: int, text: str) -> None:
    assert ledger.mean_and_half(Interval(mean, half, n)) == text


def test_rows_at_the_papers_size_show_a_price(tmp_path: Path) -> None:
    dear = next(one for one in ALL if one.dear and one.where == "Table 1")
    text = ledger.row_of_claim(ledger.entry(dear, Store(tmp_path)))
    assert text.endswith("| 4 GPU h, 380 core h |")


def test_rows_without_runs_show_the_reason_and_what_they_would_cost() -> None:
    rows = [ledger.row_of_left(left) for paper in PAPERS for left in paper.left]
    assert "| about 26 GPU h, 2,317 core h for 6 cells |" in rows[1]
    assert sum(row.endswith("| – | – | – |") for row in rows) < len(rows) / 2
    assert all("| not tried: " in row for row in rows)


def test_samples_of_styles_are_those_of_the_paper() -> None:
    expected = {
        "digits-1": "3 peers, 100 rounds, 46,849 samples",
        "digits-10": "30 peers, 100 rounds, 4,685 samples",
        "office-home-1": "4 peers, 100 rounds, 2,730 samples",
        "adaptiope-1": "3 peers, 100 rounds, 8,610 samples",
    }
    assert {one.scale for one in PAPERS[4].claims} == set(expected.values())
    for file, scale in expected.items():
        tree = tree_of(TOPOLOGIES / "paper" / f"fedstyle-{file}.yaml")
        peers, samples = (int(number.replace(",", "")) for number in re.findall(r"[\d,]+(?= [ps])", scale))
        assert tree["peers"] == peers
        assert sizes.samples(tree) == pytest.approx(samples, rel=0.001)


def empty_pages(folder: Path, *names: str) -> Path:
    """Write pages with nothing between the markers; return the overview."""
    (folder / "claims").mkdir()
    for name in ("claims", "claims/comparison", *(f"claims/{each}" for each in names)):
        (folder / f"{name}.md").write_text(f"# Mine\n\n{pages.BEGIN}\nold\n{pages.END}\n\n## Failed\n")
    return folder / "claims.md"


@pytest.mark.exhaustive
def test_pages_keep_the_prose_and_drop_old_pictures(tmp_path: Path) -> None:
    paper = replace(PAPERS[0], claims=[claim()], left=())
    page, store = empty_pages(tmp_path, "mapl"), Store(tmp_path / "store")
    for seed in range(5):
        record(store, ONE, seed, 80.0 + seed)
        record(store, OTHER, seed, 70.0)
    (tmp_path / "claims" / "old.svg").touch()
    pages.write([paper], store, page)
    assert page.read_text().startswith(f"# Mine\n\n{pages.BEGIN}\n\n1 reproduced, 0 refuted")
    assert "[one above other](mapl-1.svg)" in (tmp_path / "claims" / "mapl.md").read_text()
    for name in ("claims", "claims/comparison", "claims/mapl"):
        assert (tmp_path / f"{name}.md").read_text().endswith(f"{pages.END}\n\n## Failed\n")
    assert [file.name for file in (tmp_path / "claims").glob("*.svg")] == ["mapl-1.svg"]
    page.write_text("nothing")
    with pytest.raises(ValueError, match="should have the lines"):
        pages.write([paper], store, page)


def test_comparison_says_which_algorithms_are_above_local_training(tmp_path: Path) -> None:
    store, levels = Store(tmp_path), {"local": 70.0, "l2c": 80.0, "mapl": 60.0}
    for name, level in levels.items():
        method = compare.METHODS[name]
        for rate, tree in plan.tuning(method, method.rates).items():
            tried = 90.0 if rate == method.rates[1] else 50.0
            record(store, replace(method, tree=tree, rates=()), plan.TUNING_SEED, tried)
        for seed in range(5):
            record(store, method, seed, level + seed, rate=method.rates[1])
    lines = {text.split("|")[1].strip(): text for text in pages.comparison(store)}
    assert "| 72.0 ± 2.0 | 72.0 | 72.0 | – | – | 2.00 |" in lines["local"]
    assert "| 10.0 ± 0 | above |" in lines["l2c"]
    assert "| −10.0 ± 0 | below |" in lines["mapl"]
    assert lines["fedtgp"].count("not tried") == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", compare.METHODS)
def test_compared_run_files_have_the_chosen_learning_rate(name: str) -> None:
    settings = compare.METHODS[name]
    assert settings.tree["algorithm"]["lr"] == plan.chosen(settings, project_store())


@pytest.mark.exhaustive
def test_pages_of_the_project_are_those_of_its_packed_runs(tmp_path: Path) -> None:
    docs = PROJECT / "docs"
    shutil.copytree(docs / "claims", tmp_path / "claims")
    shutil.copy(docs / "claims.md", tmp_path)
    pages.write(PAPERS, project_store(), tmp_path / "claims.md")
    ours = [docs / "claims.md", *(docs / "claims").iterdir()]
    assert {file.name for file in (tmp_path / "claims").iterdir()} == {file.name for file in ours[1:]}
    for file in ours:
        assert (tmp_path / file.relative_to(docs)).read_bytes() == file.read_bytes(), file.name


def test_selected_claims_are_those_of_the_paper_with_the_words() -> None:
    assert {one.where for one in selected(("l2c",), "table 3")} == {"Table 3"}
    assert len(selected((), "")) == len(ALL)
    assert selected(("compare",), "") == list(compare.CLAIMS)


CHOSEN = ["--only", "mapl", "--claim", "numbers sent"]


def test_command_lists_what_it_would_run(tmp_path: Path) -> None:
    listed = CliRunner().invoke(main, ["list", *CHOSEN, "--store", str(tmp_path)])
    assert listed.exit_code == 0
    assert listed.output == "  1 runs: Table 7, numbers sent are 2·N_e·(d·K + |φ|) per round, heads from T_thr on\n"
    assert not Store(tmp_path).records


@pytest.mark.exhaustive
def test_command_executes_what_is_missing_and_prints_the_row(tmp_path: Path) -> None:
    found = CliRunner().invoke(main, ["run", *CHOSEN, "--store", str(tmp_path), "--pack"])
    assert found.exit_code == 0
    assert found.stdout.startswith("| Table 7 | numbers sent are")
    assert "| **reproduced** | 1.00 of" in found.stdout
    assert [seed for _, seed in Store(tmp_path).records] == [0]
    assert [file.name for file in tmp_path.iterdir()] == ["runs.jsonl.xz"]


@pytest.mark.exhaustive
def test_list_names_the_data_that_left_out_claims_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P2PFL_DATA", str(tmp_path))
    listed = CliRunner().invoke(main, ["list", "--only", "mapl", "--claim", "above FLT"])
    assert (listed.exit_code, listed.stdout) == (0, "")
    assert listed.stderr.startswith("claims are left out that need cifar10-part/")


@pytest.mark.exhaustive
def test_command_leaves_a_store_alone_that_another_process_adds_to(tmp_path: Path) -> None:
    with Store(tmp_path).locked():
        found = CliRunner().invoke(main, ["run", *CHOSEN, "--store", str(tmp_path)])
    assert found.exit_code == 1
    assert "another process adds runs" in found.stderr


# ---- pictures ----------------------------------------------------------------------------------------------


def test_band_has_the_interval_of_common_rounds() -> None:
    found = sheets.band([[(1, 1.0), (2, 1.0)], [(2, 3.0), (3, 9.0)]])
    assert [(t, mean) for t, mean, _, _ in found] == [(2, 2.0)]
    assert found[0][3] - found[0][1] == pytest.approx(12.7062, rel=1e-4)  # t(0.975, 1) * 1
    assert sheets.band([]) == []


BANDS = {"a<b": [(1, 1.0, 0.5, 1.5), (9, 2.0, 2.0, 2.0)], "c": [(1, 0.0, 0.0, 0.0), (9, 1.0, 1.0, 1.0)]}


def test_panel_has_a_line_and_a_band_per_label_within_its_frame() -> None:
    drawn = sheets.draw(sheets.Panel("Table 1: this", BANDS, "accuracy"))
    assert drawn.count('class="l"') == drawn.count('class="b"') == 2
    assert "a&lt;b" in drawn
    for path in re.findall(r'd="M([^"HV]*l[^"]*)"', drawn):
        steps = [tuple(map(int, pair.split(","))) for pair in re.split("[ l]", path)]
        for place, most in zip(map(accumulate, zip(*steps, strict=True)), (sheets.WIDTH, sheets.HEIGHT), strict=True):
            assert all(0 <= tenths <= 10 * most for tenths in place)
    assert sheets.ticks(0, 100) == [0, 20, 40, 60, 80, 100]


@pytest.mark.parametrize(
    ("panels", "sizes"), [(0, []), (4, [4]), (33, [33]), (34, [18, 16]), (115, [30, 30, 30, 25])]
)
def test_panels_are_divided_among_few_sheets_of_equal_height(panels: int, sizes: list[int]) -> None:
    assert [len(part) for part in sheets.divided([sheets.Panel("", BANDS, "")] * panels)] == sizes


def test_project_has_at_most_twelve_sheets() -> None:
    assert 1 <= len([*(PROJECT / "docs" / "claims").glob("*.svg")]) <= 12
