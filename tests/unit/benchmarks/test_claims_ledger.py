"""The ledger of the papers' claims: completeness, rows, prices, pictures, and the command."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from benchmarks.claims import compare, curves, fedstyle, ledger, mapl_paper_size, plan, prices, probes
from benchmarks.claims.__main__ import PAPERS, PROJECT, main, selected
from benchmarks.claims.claim import Left
from benchmarks.claims.paper_size import TOPOLOGIES, tree_of
from benchmarks.claims.statistics import Interval
from benchmarks.claims.store import Store, identity
from benchmarks.claims.summary import run_of
from p2pfl.algorithms.dfml import DFML
from tests.claims_fixtures import ALL, ONE, OTHER, TREE, claim, record


@cache
def published() -> Store:
    """Return the runs of the project: half a second of JSON and more each time that it is read."""
    return Store(PROJECT / "benchmarks/results/claims")


# ---- the ledger --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.key)
def test_every_table_and_figure_has_a_row(paper: Any) -> None:
    covered = {re.sub(r"[a-c]$", "", line.where) for line in [*paper.claims, *paper.left]}
    assert covered >= set(paper.contents)
    assert all(left.reason for left in paper.left)
    assert all(one.paper and one.scale for one in paper.claims)


@pytest.mark.exhaustive
def test_rows_of_learning_rates_tell_variants_apart() -> None:
    rows = list(ledger.rates_chosen(PAPERS, published()))
    methods = [tuple(row.split(" | ")[:2]) for row in rows]
    assert len(set(methods)) == len(methods) > 80
    assert ("| fedtgp", "fedtgp on fashion-mnist, 10 peers, 100 rounds, features=512, margin=fixed") in methods
    assert not any("lr=" in method for _, method in methods)
    assert not any("330 rounds" in method for _, method in methods)  # longer runs take the learning rate of 105


@pytest.mark.exhaustive
def test_runs_of_all_claims_are_valid_and_named_once() -> None:
    names = [(one.where, one.name) for one in ALL]
    for paper in PAPERS:
        lines = [(one.where, one.name) for one in paper.claims]
        assert len(set(lines)) == len(lines)
    assert len(names) > 100
    for one in ALL:
        for run in one.runs.values():
            assert (run.seconds > 0) != one.dear
            assert identity(run.with_rate(None), run.probe).key
            assert run.probe in ("", *probes.PROBES)


@pytest.mark.exhaustive
def test_runs_of_one_claim_train_equally_long_or_the_row_says_so(tmp_path: Path) -> None:
    told = set()
    for one in ALL:
        epochs = [prices.local_epochs(run.with_rate(None)) for run in one.runs.values()]
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
        assert prices.samples(tree) == pytest.approx(samples, rel=0.02 if "part of CIFAR-10" in one.name else 0.01)


@pytest.mark.exhaustive
@pytest.mark.parametrize("one", DEAR)
def test_methods_at_the_papers_size_train_alike(one: Any) -> None:
    hypers = [run_of({**run.with_rate(None), "seed": 0}).hyper.to_dict() for run in one.runs.values()]

    def agree(*names: str) -> bool:
        return all([hyper[name] for name in names] == [hypers[0][name] for name in names] for hyper in hypers)

    assert agree("batch", "local_epochs", "weight_decay")
    # MAPL+ has Adam, DFedAvgM does not.
    assert agree("lr", "momentum", "betas") or not agree("optimizer")


def test_epochs_count_participation_and_steps() -> None:
    from benchmarks.claims import l2c_runs

    assert {round(prices.local_epochs(run.with_rate(None))) for run in l2c_runs.TABLE_2.values()} == {100}
    assert prices.local_epochs({**TREE, "peers": 10, "algorithm": {"name": "dfml"}}) == pytest.approx(1.2)
    steps = {"name": "dpsgd", "local_epochs": None, "local_steps": 1, "batch": 5}
    assert prices.local_epochs({**TREE, "rounds": 3, "algorithm": steps}) == pytest.approx(1.0)


def test_cells_of_mapls_tables_have_the_noise_of_their_test_images() -> None:
    papers = {one.name: one.paper for one in PAPERS[0].claims}
    assert papers["above local training, Sc. 1"] == "+6.67 ± 3.1 (77.27 against 70.60)"
    assert papers["above local training, Sc. 2"] == "+6.76 ± 2.9 (65.43 against 58.67)"
    assert papers["the graph becomes block-diagonal"] == "almost zero across"


def test_settings_of_the_paper_stay_as_decided() -> None:
    from benchmarks.claims import dfml_runs as dfml
    from benchmarks.claims import l2c_runs
    from benchmarks.claims.dfml_figures import MAXIMA

    assert not any(run.tree.get("masked_test") for one in ALL for run in one.runs.values())
    ring = run_of({**l2c_runs.TABLE_2["dpsgd"].with_rate(None), "seed": 0}).topology
    assert {ring.degree(peer) for peer in range(20)} == {10}  # a self weight of 1/11
    hyper = run_of({**dfml.DFML.with_rate(None), "seed": 0}).hyper
    assert isinstance(hyper, DFML.Hyper)
    periods = [hyper.period + number * hyper.period_increment for number in range(len(MAXIMA))]
    assert tuple(accumulate(periods)) == MAXIMA  # the last of which is the end of a cycle
    assert MAXIMA[-1] == dfml.DFML.tree["rounds"]


def test_row_shows_verdict_interval_threshold_and_size(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for seed in range(5):
        record(store, ONE, seed, 72.0 + seed * 0.1)
        record(store, OTHER, seed, 70.0)
    one = claim(threshold=1.0, whose="ours", curves="accuracy")
    found = ledger.entry(one, store)
    text = ledger.row_of_claim(found, {})
    assert "| **reproduced** | +2.20 ± 0.20 points; > 1.00 (ours) | +1 |" in text
    assert "2 peers, 2 rounds, 30 samples; many | 5 | 0.01 core h |" in text
    assert f"[one above other](claims/{ledger.file_name(one)})" in text


def test_row_names_a_margin_on_both_sides_and_each_runs_samples(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for seed in range(5):
        record(store, ONE, seed, 72.0 + seed * 0.1)
        record(store, OTHER, seed, 70.0)
    found = ledger.entry(claim(relation="≈", threshold=3.0, whose="ours"), store)
    for run in found.summaries["other"].values():
        run.samples = 15.0
    text = ledger.row_of_claim(found, {})
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


@pytest.mark.exhaustive
def test_rows_at_the_papers_size_show_a_price(tmp_path: Path) -> None:
    dear = next(one for one in ALL if one.dear and one.where == "Table 1")
    text = ledger.row_of_claim(ledger.entry(dear, Store(tmp_path)), {"cpu": prices.Speed(2e10, 0.0)})
    runs = [run.with_rate(None) for run in dear.runs.values()]
    speeds = (prices.ASSUMED_GPU, prices.Speed(2e10, 0.0))
    gpu, core = (5 * sum(prices.hours(run, speed) for run in runs) for speed in speeds)
    assert f"{gpu:,.0f} GPU h, {core:,.0f} core h |" in text


LEFT = [left for paper in PAPERS for left in paper.left]


def test_rows_without_runs_cost_what_claims_with_these_runs_do(tmp_path: Path) -> None:
    speeds = {"cpu": prices.Speed(2e10, 0.0)}
    names = [f"mapl against fedclassavg, CIFAR-10, Sc. {scenario}, the paper's size" for scenario in (3, 4)]
    dear = [next(one for one in ALL if one.name == name and one.where == "Table 1") for name in names]
    cells = mapl_paper_size.cells(("mapl", "fedclassavg"), scenarios=(3, 4))
    left = Left("above FedClassAvg", "Table 1", "+2.00 and +2.23", "only at the paper's size", cells)
    assert list(left.cells) == [one.runs for one in dear]
    single = replace(left, cells=left.cells[:1])
    cost = ledger.price_cell(ledger.entry(dear[0], Store(tmp_path)), speeds)
    assert ledger.row_of_left(single, speeds).endswith(f"| – | – | about {cost} |")
    assert ledger.row_of_left(left, speeds).endswith(f"| about {ledger.price(left.cells, speeds)} for 2 cells |")
    assert ledger.row_of_left(replace(left, cells=()), speeds).endswith("| – | – | – |")


@pytest.mark.exhaustive
def test_rows_without_runs_can_be_priced_and_refer_to_no_other_price() -> None:
    priced = [left for left in LEFT if left.cells]
    assert len(priced) >= 45
    for left in priced:
        assert all(prices.hours(run.with_rate(None)) > 0 for cell in left.cells for run in cell.values()), left
    assert not any("price as" in left.reason for left in LEFT)
    with_price = {left.where for left in PAPERS[-1].left if left.cells}
    assert with_price >= {"Table 1", "Table 2", "Table 3"}


@pytest.mark.exhaustive
def test_priced_runs_of_rows_without_runs_are_valid() -> None:
    runs = [run.with_rate(None) for left in LEFT for cell in left.cells for run in cell.values()]
    for tree in runs:
        if tree["algorithm"].get("train_encoder", True):  # else it needs the folder of another run
            assert identity(tree).key


def test_samples_of_styles_are_those_of_the_paper() -> None:
    expected = {
        "digits-1": fedstyle.PAPER,
        "digits-10": fedstyle.PAPER_30,
        "office-home-1": fedstyle.PAPER_OFFICE,
        "adaptiope-1": fedstyle.PAPER_ADAPTIOPE,
    }
    for file, scale in expected.items():
        tree = tree_of(TOPOLOGIES / "paper" / f"fedstyle-{file}.yaml")
        peers, samples = (int(number.replace(",", "")) for number in re.findall(r"[\d,]+(?= [ps])", scale))
        assert tree["peers"] == peers
        assert prices.samples(tree) == pytest.approx(samples, rel=0.001)


def test_passes_count_epochs_views_and_mutual_learning() -> None:
    base = {**TREE, "peers": 10, "rounds": 3, "data": {**TREE["data"], "dataset": "digits"}}
    assert prices.samples(base) == 15
    assert prices.passes(base) == 450
    assert prices.passes({**base, "algorithm": {"name": "mapl"}}) == 900
    assert prices.passes({**base, "algorithm": {"name": "ditto-ssl", "local_epochs": 1}}) == 1800
    dfml = {**base, "algorithm": {"name": "dfml", "mutual_epochs": 5, "batch": 10}}
    assert prices.passes(dfml) == 3 * 6 * 15 * 6
    assert prices.steps(dfml) == pytest.approx(3 * 6 * 15 * 6 / 10)
    one_step = {"local_epochs": None, "batch": 10}
    cga = {**base, "graph": {"name": "ring", "degree": 4}, "algorithm": {"name": "cga", **one_step}}
    assert prices.steps(cga) == pytest.approx(3 * 10 * 5)  # a gradient for each neighbor too
    assert prices.passes(cga) == pytest.approx(3 * 10 * 5 * 10)
    for name, models in (("fedclassavg", 1), ("ditto", 2)):
        assert prices.steps({**base, "algorithm": {"name": name, "batch": 10}}) == pytest.approx(45 * models)
    assert prices.hours(dfml, prices.Speed(math.inf, 2.0)) == pytest.approx(2 * prices.steps(dfml) / 3600)
    assert prices.hours(dfml, prices.Speed(1.0, 0.0)) == prices.floating_point_operations(dfml) / 3600


def test_page_keeps_the_prose_and_drops_old_pictures(tmp_path: Path) -> None:
    paper = replace(PAPERS[0], claims=[claim()], left=())
    page, store = tmp_path / "claims.md", Store(tmp_path / "store")
    for seed in range(5):
        record(store, ONE, seed, 80.0 + seed)
        record(store, OTHER, seed, 70.0)
    page.write_text(f"# Mine\n\n{ledger.BEGIN}\nold\n{ledger.END}\n\n## Failed\n")
    (tmp_path / "claims").mkdir()
    (tmp_path / "claims" / "old.svg").touch()
    ledger.write([paper], store, page)
    text = page.read_text()
    assert text.startswith(f"# Mine\n\n{ledger.BEGIN}\n\n1 reproduced, 0 refuted")
    assert text.endswith(f"{ledger.END}\n\n## Failed\n")
    assert [file.name for file in (tmp_path / "claims").iterdir()] == [ledger.file_name(claim())]
    page.write_text("nothing")
    with pytest.raises(ValueError, match="should have the lines"):
        ledger.write([paper], store, page)


def test_comparison_says_which_algorithms_are_above_local_training(tmp_path: Path) -> None:
    store, levels = Store(tmp_path), {"local": 70.0, "l2c": 80.0, "mapl": 60.0}
    for name, level in levels.items():
        method = compare.METHODS[name]
        for rate, tree in plan.tuning(method, method.rates).items():
            tried = 90.0 if rate == method.rates[1] else 50.0
            record(store, replace(method, tree=tree, rates=()), plan.TUNING_SEED, tried)
        for seed in range(5):
            record(store, method, seed, level + seed, rate=method.rates[1])
    lines = {text.split("|")[1].strip(): text for text in ledger.comparison(store)}
    assert "| 72.0 ± 2.0 | 72.0 | 72.0 | – | – | 2.00 |" in lines["local"]
    assert "| 10.0 ± 0 | above |" in lines["l2c"]
    assert "| −10.0 ± 0 | below |" in lines["mapl"]
    assert lines["fedtgp"].count("not tried") == 1


@pytest.mark.parametrize("name", compare.METHODS)
def test_compared_run_files_have_the_chosen_learning_rate(name: str) -> None:
    settings = compare.METHODS[name]
    assert settings.tree["algorithm"]["lr"] == plan.chosen(settings, published())


def test_page_of_the_project_has_a_row_for_every_claim() -> None:
    page = (PROJECT / "docs" / "claims.md").read_text(encoding="utf-8")
    lines = [text for text in page.splitlines() if text.startswith("| ")]
    for paper in PAPERS:
        names = [(one.where, one.name) for one in paper.claims] + [(left.where, left.name) for left in paper.left]
        for where, name in names:
            escaped = name.replace("|", "\\|")
            assert any(text.startswith(f"| {where} |") and escaped in text for text in lines), name


def test_selected_claims_are_those_of_the_paper_with_the_words() -> None:
    assert {one.where for one in selected(("l2c",), "table 3")} == {"Table 3"}
    assert len(selected((), "")) == len(ALL)
    assert selected(("compare",), "") == list(compare.CLAIMS)


@pytest.mark.slow
def test_command_lists_what_it_would_run_and_writes_the_page(tmp_path: Path) -> None:
    page = tmp_path / "claims.md"
    page.write_text(f"{ledger.BEGIN}\n{ledger.END}\n")
    given = ["--store", str(tmp_path), "--page", str(page), "--only", "mapl", "--claim", "numbers sent"]
    listed = CliRunner().invoke(main, [*given, "--list"])
    assert listed.exit_code == 0
    assert listed.output.split(maxsplit=2)[:2] == ["0.4", "minutes,"]
    assert "1 runs: Table 7, numbers sent are 2·N_e·(d·K + |φ|) per round" in listed.output
    assert CliRunner().invoke(main, [*given, "--minutes", "0"]).exit_code == 0
    assert "| Table 7 | numbers sent are 2·N_e·(d·K + \\|φ\\|) per round | not tried |" in page.read_text()
    assert Store(tmp_path).files() == []


@pytest.mark.exhaustive
def test_list_names_the_data_that_left_out_claims_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P2PFL_DATA", str(tmp_path))
    listed = CliRunner().invoke(main, ["--only", "mapl", "--claim", "above FLT", "--list"])
    assert (listed.exit_code, listed.stdout) == (0, "")
    assert listed.stderr.startswith("claims are left out that need cifar10-part/")


@pytest.mark.exhaustive
def test_speed_of_training_is_measured_and_kept(tmp_path: Path) -> None:
    speed = prices.measure_speed(torch.device("cpu"), seconds=0.01)
    assert 1e8 < speed.flops < 1e13
    prices.write_speed(tmp_path, "cpu", speed)
    prices.write_speed(tmp_path, "cuda", prices.Speed(2.0, 0.1))
    assert prices.speeds(tmp_path) == {"cpu": speed, "cuda": prices.Speed(2.0, 0.1)}


# ---- pictures ----------------------------------------------------------------------------------------------


def test_band_has_the_interval_of_common_rounds() -> None:
    found = curves.band([[(1, 1.0), (2, 1.0)], [(2, 3.0), (3, 9.0)]])
    assert [(t, mean) for t, mean, _, _ in found] == [(2, 2.0)]
    assert found[0][3] - found[0][1] == pytest.approx(12.7062, rel=1e-4)  # t(0.975, 1) * 1
    assert curves.band([]) == []


def test_picture_has_a_line_and_a_band_per_label_within_the_frame() -> None:
    drawn = curves.draw({"a<b": [(1, 1.0, 0.5, 1.5), (9, 2.0, 2.0, 2.0)], "c": [(1, 0.0, 0.0, 0.0)]}, "accuracy")
    assert drawn.count("<polyline") == drawn.count("<polygon") == 2
    assert "a&lt;b" in drawn
    coordinates = [float(n) for pair in re.findall(r'points="([^"]*)"', drawn) for n in re.split("[ ,]", pair)]
    assert min(coordinates) >= 0
    assert max(coordinates) <= curves.WIDTH
    assert curves.ticks(0, 100) == [0, 20, 40, 60, 80, 100]
    with pytest.raises(ValueError, match="no points"):
        curves.draw({}, "accuracy")
