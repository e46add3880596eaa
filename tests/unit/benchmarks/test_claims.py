"""Verdicts, learning rates, the store, the time budget, and the ledger of the papers' claims."""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from benchmarks.claims import compare, curves, ledger, plan, prices, probes
from benchmarks.claims import store as store_module
from benchmarks.claims.__main__ import PAPERS, PROJECT, main, selected
from benchmarks.claims.claim import MOST_SEEDS, Claim, Settings, difference
from benchmarks.claims.scheduler import Budget, Scheduler
from benchmarks.claims.statistics import LEAST_SEEDS, Interval, interval, verdict
from benchmarks.claims.store import Store, identity
from benchmarks.claims.summary import Summary, run_of, simulated
from p2pfl.errors import DataError

ALL = [*(claim for paper in PAPERS for claim in paper.claims), *compare.CLAIMS]

TREE: Mapping[str, Any] = {
    "rounds": 2,
    "peers": 2,
    "data": {
        "dataset": "digits",
        "partition": {"name": "clusters", "clusters": 2, "per_class": 3, "test_per_class": 2},
    },
    "models": "tiny-cnn",
    "algorithm": {"name": "local", "lr": 0.01},
}


def summary(accuracy: float) -> Summary:
    """A run of four evaluated rounds that is constantly this good."""
    points = [(t, accuracy) for t in range(1, 5)]
    return Summary(
        [accuracy], accuracy, {"accuracy": points, "masked": points, "worst": points}, [[0]], [{}], {}, 30.0, 2.0
    )


def settings(name: str = "local", **hyper: Any) -> Settings:
    return Settings({**TREE, "algorithm": {"name": name, "lr": 0.01, **hyper}}, seconds=10.0)


ONE, OTHER = settings(), settings("fedavg")


def claim(one: Settings = ONE, other: Settings = OTHER, **given: Any) -> Claim:
    read = difference("one", "other", lambda run: run.last())
    return Claim("one above other", "Table 1", {"one": one, "other": other}, read, "+1", "many", **given)


def record(store: Store, run: Settings, seed: int, accuracy: float, rate: float | None = None) -> None:
    key = identity(run.with_rate(rate), run.probe).key
    content = {
        "key": key,
        "seed": seed,
        "seconds": 4.0,
        "cpu_seconds": 3.0,
        "device": "cpu",
        "code": "abc, torch 2",
        "about": "",
    }
    store.add({**content, "summary": summary(accuracy).to_dict()})
    store.reload()


# ---- verdicts ----------------------------------------------------------------------------------------------


def test_interval_is_students_of_the_mean() -> None:
    found = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found is not None
    assert found.mean == 3.0
    assert found.half == pytest.approx(2.776445 * math.sqrt(2.5 / 5), rel=1e-6)  # t(0.975, 4)
    assert interval([]) is None
    assert interval([1.0]).half == math.inf  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("figures", "relation", "threshold", "expected"),
    [
        ([1.0, 1.1, 0.9, 1.0, 1.2], ">", 0.0, "reproduced"),
        ([1.0, 1.1, 0.9, 1.0, 1.2], ">", 2.0, "refuted"),
        ([1.0, 1.1, 0.9, 1.0, 1.2], "<", 2.0, "reproduced"),
        ([1.0, 1.1, 0.9, 1.0, 1.2], "<", 0.0, "refuted"),
        ([1.0, 2.0, 3.0, 0.1, -4.0], ">", 0.0, "undecided"),
        ([1.0, 1.0, 1.0, 1.0], ">", 0.0, "undecided"),
        ([1.0] * 5, ">", 1.0, "undecided"),
        ([1.0], "=", 1.0, "reproduced"),
        ([1.0, 1.0, 2.0], "=", 1.0, "refuted"),
        ([], ">", 0.0, "not tried"),
    ],
)
def test_verdict_is_decided_by_the_interval(
    figures: list[float], relation: Any, threshold: float, expected: str
) -> None:
    assert verdict(figures, relation, threshold) == expected


def test_figures_that_are_no_numbers_are_rejected() -> None:
    with pytest.raises(ValueError, match="must be numbers"):
        verdict([math.nan] * 5, ">", 0.0)


def test_undecided_claims_get_a_second_look_and_no_third() -> None:
    noisy, exact = [1.0, 2.0, 3.0, 0.1, -4.0], replace(claim(), relation="=")
    assert claim().seeds_wanted([]) == LEAST_SEEDS
    assert claim().seeds_wanted([1.0] * 5) == LEAST_SEEDS
    assert claim().seeds_wanted(noisy) == MOST_SEEDS
    assert claim().seeds_wanted(noisy * 2) == MOST_SEEDS
    convinced = [*noisy, 9.0, 9.1]
    assert verdict([*noisy, 9.0, 9.1, 9.2, 9.3], ">", 0.0) == "reproduced"
    assert claim().judge([*noisy, 9.0, 9.1, 9.2, 9.3]) == "undecided"  # nine seeds are no look
    assert claim().seeds_wanted(convinced) == MOST_SEEDS
    assert claim().judge([*noisy, *[9.0, 9.1, 9.2, 9.3, 9.4]]) == "reproduced"
    assert claim().judge([*[1.0, 1.1, 0.9, 1.0, 1.2], *[-99.0] * 5]) == "reproduced"  # the first look was decisive
    assert exact.seeds_wanted([]) == 1


# ---- runs and their identity -------------------------------------------------------------------------------


def test_key_depends_on_settings_and_defaults_alone() -> None:
    key = identity(TREE).key
    assert identity({**TREE, "seed": 7, "device": "cuda", "name": "other"}).key == key
    assert identity({**TREE, "algorithm": {"name": "local", "lr": 0.01, "momentum": 0.0}}).key == key
    assert identity({**TREE, "algorithm": {"name": "local", "lr": 0.02}}).key != key
    assert identity({**TREE, "eval_every": 2}).key != key
    assert identity(TREE, "heads").key != key


def test_key_survives_a_later_option_that_is_off() -> None:
    resolved = run_of({**TREE, "name": "x"}).resolved()
    later = {**resolved, "new": None, "algorithm": {**resolved["algorithm"], "newer": False, "newest": {}}}
    assert store_module._essential(later) == store_module._essential(resolved)
    on = {**resolved, "algorithm": {**resolved["algorithm"], "newer": True}}
    assert store_module._essential(on) != store_module._essential(resolved)
    zero, null = ({**resolved, "algorithm": {"prune_round": value}} for value in (0, None))
    assert store_module._essential(zero) != store_module._essential(null)


def test_missing_files_of_a_dataset_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("P2PFL_DATA", str(tmp_path))
    data = {"dataset": "cifar10-part", "partition": "iid"}
    found = identity({**TREE, "data": data, "peers": 3}).missing
    assert found[0] == "cifar10-part/train0.webp"


def test_store_continues_after_an_incomplete_line_and_sees_what_others_append(tmp_path: Path) -> None:
    store, other = Store(tmp_path), Store(tmp_path)
    record(store, ONE, 0, 80.0)
    with store.file.open("ab") as file:
        file.write(b'{"key": "half')
    other.reload()
    key = identity(ONE.with_rate(None)).key
    assert other.summary(key, 0) == Summary(**json.loads(json.dumps(vars(summary(80.0)))))
    assert (other.seconds(key), other.seconds(key, "cpu_seconds")) == (4.0, 3.0)
    assert other.summary(key, 1) is None


def test_a_run_is_reserved_by_one_process(tmp_path: Path) -> None:
    store, other = Store(tmp_path), Store(tmp_path)
    lock = store.reserve("k", 0)
    assert lock is not None
    assert other.reserve("k", 0) is None
    store.release(lock)
    again = other.reserve("k", 0)
    assert again is not None
    other.release(again)


def test_ablation_keeps_the_rate_that_was_chosen_for_the_method() -> None:
    tuned = replace(settings("fedtgp"), rates=(0.01, 0.1))
    changed = tuned.but(transform=False)
    assert plan.tuning(changed) == plan.tuning(tuned)
    assert changed.with_rate(0.1)["algorithm"] == {"name": "fedtgp", "lr": 0.1, "transform": False}
    assert tuned.with_rate(0.1)["algorithm"] == {"name": "fedtgp", "lr": 0.1}


def test_summary_has_both_accuracies_and_the_epochs_of_a_run() -> None:
    found = simulated({**TREE, "seed": 0, "algorithm": {"name": "local", "lr": 0.01, "local_epochs": 3}})
    assert found.epochs == 6.0
    assert found.samples == 15.0
    assert [t for t, _ in found.curves["accuracy"]] == [1, 2]
    pairs = zip(found.curves["accuracy"], found.curves["masked"], strict=True)
    assert all(masked >= accuracy for (_, accuracy), (_, masked) in pairs)
    assert found.classes == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert json.loads(json.dumps(found.to_dict()))["epochs"] == 6.0


def test_first_to_reach_and_settled() -> None:
    found = replace(summary(0.0), curves={"accuracy": [(5, 40.0), (10, 60.0), (15, 70.0), (20, 80.0)]})
    assert found.first_to_reach(60.0, "accuracy") == 10
    assert found.first_to_reach(90.0, "accuracy") == math.inf
    assert found.settled() == 80.0
    assert found.settled(until=15) == 70.0
    assert found.at(10) == 60.0


# ---- learning rates ----------------------------------------------------------------------------------------


def test_rate_is_chosen_on_held_out_training_images_with_another_seed(tmp_path: Path) -> None:
    store, tuned = Store(tmp_path), replace(ONE, rates=(0.01, 0.02, 0.05))
    tasks = list(plan.tasks_of(tuned, [0], store, "cpu"))
    assert [task.seed for task in tasks] == [plan.TUNING_SEED] * 3 + [0]
    assert tasks[0].tree["data"]["dataset"] == {"name": "held-out", "of": "digits"}
    for rate, accuracy in ((0.01, 50.0), (0.02, 70.0)):
        record(store, replace(tuned, tree=plan.tuning(tuned)[rate], rates=()), plan.TUNING_SEED, accuracy)
    assert plan.chosen(tuned, store) is None
    record(store, replace(tuned, tree=plan.tuning(tuned)[0.05], rates=()), plan.TUNING_SEED, 70.0)
    assert plan.chosen(tuned, store) == 0.02  # the smaller of equal ones
    (task,) = plan.tasks_of(tuned, [0], store, "cpu")
    assert task.tree["algorithm"]["lr"] == 0.02


def test_held_out_images_are_training_images_only() -> None:
    from p2pfl.session.build import load_data

    held_out, _ = load_data(run_of({**plan.held_out(TREE), "name": "x"}))
    whole, _ = load_data(run_of({**TREE, "name": "x"}))
    assert len(held_out.train) + len(held_out.test) == len(whole.train)
    images = {image.tobytes() for image in whole.train.images}
    assert all(image.tobytes() in images for image in held_out.test.images)


def test_mosaics_of_cifar10_are_cut_row_by_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P2PFL_DATA", str(tmp_path))
    folder = tmp_path / "cifar10-part"
    folder.mkdir()
    images = np.random.default_rng(0).integers(0, 256, (4, 50, 32, 32, 3), dtype=np.uint8)
    for name, part in zip(("train0", "train1", "train2", "test"), images, strict=True):
        mosaic = part.reshape(2, 25, 32, 32, 3).transpose(0, 2, 1, 3, 4).reshape(64, 800, 3)
        Image.fromarray(mosaic).save(folder / f"{name}.webp", lossless=True)
    np.savez(folder / "labels.npz", y_train=np.arange(150) % 10, y_test=np.arange(50) % 10)
    run = run_of({**TREE, "data": {"dataset": "cifar10-part", "partition": "iid"}, "name": "x"})
    found = run.loader.read(tmp_path)
    assert (found.train_images == images[:3].reshape(150, 32, 32, 3).transpose(0, 3, 1, 2)).all()
    assert (found.test_images == images[3].transpose(0, 3, 1, 2)).all()
    assert (found.classes, found.mirror) == (10, True)
    (folder / "labels.npz").write_bytes(b"no archive")
    with pytest.raises(DataError, match="damaged"):
        run.loader.read(tmp_path)


# ---- what is played ----------------------------------------------------------------------------------------


WORKER = """
import json, sys
from pathlib import Path
for line in sys.stdin:
    request = json.loads(line)
    accuracy = 60.0 + request["seed"] + 5.0 * (request["tree"]["algorithm"]["name"] == "local")
    points = [[1, accuracy]]
    summary = {"accuracies": [accuracy], "best": accuracy, "curves": {"accuracy": points}, "classes": [[0]],
               "weights": [{}], "messages": {}, "samples": 30.0, "epochs": 2.0, "probe": {}}
    record = {name: request[name] for name in ("key", "seed", "code")} | {"seconds": 4.0, "cpu_seconds": 3.0}
    with Path(sys.argv[1], "runs.jsonl").open("a") as file:
        file.write(json.dumps({**record, "summary": summary}) + "\\n")
    print(request["key"], flush=True)
"""
AT_ONCE = (sys.executable, "-c", WORKER)
FAILING = (sys.executable, "-c", "import sys; sys.stdin.readline(); sys.exit(3)")
ENDLESS = (sys.executable, "-c", "import sys; sys.stdin.read()")


def test_cheapest_undecided_claim_comes_first_and_decided_ones_do_not(tmp_path: Path) -> None:
    store = Store(tmp_path)
    cheap, dear = claim(), claim(replace(settings("mapl"), seconds=99.0))
    found = plan.undecided([dear, cheap], store, "cpu")
    assert [(seconds, one) for seconds, one, _ in found] == [(100.0, cheap), (545.0, dear)]
    for seed in range(5):
        record(store, ONE, seed, 80.0 + seed)
        record(store, OTHER, seed, 70.0 + seed)
    found = plan.undecided([dear, cheap], store, "cpu")
    assert [one for _, one, _ in found] == [dear]
    assert len(found[0][2]) == 5  # the other method's runs are shared


def test_figures_end_at_the_first_seed_that_lacks_a_run(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for seed in (0, 1, 3):
        record(store, ONE, seed, 80.0 + seed)
        record(store, OTHER, seed, 70.0)
    assert plan.figures(claim(), store) == {0: 10.0, 1: 11.0}


def test_papers_own_size_is_played_on_a_gpu_only(tmp_path: Path) -> None:
    dear = claim(dear=True)
    assert plan.undecided([dear], Store(tmp_path), "cpu") == []
    ((_, _, tasks),) = plan.undecided([dear], Store(tmp_path), "cuda")
    assert {task.tree["device"] for task in tasks} == {"cuda"}


def test_scheduler_plays_each_run_once_and_resumes(tmp_path: Path) -> None:
    lines: list[str] = []
    store = Store(tmp_path)
    for seed in range(2):
        record(store, ONE, seed, 66.0 + seed)
    Scheduler([claim(), claim()], store, Budget(jobs=2), lines.append, AT_ONCE).run()
    assert len(store.file.read_text().splitlines()) == 10
    assert claim().judge(list(plan.figures(claim(), store).values())) == "reproduced"
    before = store.file.read_bytes()
    Scheduler([claim()], Store(tmp_path), Budget(), lines.append, AT_ONCE).run()
    assert store.file.read_bytes() == before
    assert any("seed 4" in line for line in lines)


def test_runs_that_do_not_fit_the_budget_are_not_started(tmp_path: Path) -> None:
    scheduler = Scheduler([claim()], Store(tmp_path), Budget(minutes=0.1), lambda line: None, AT_ONCE)
    scheduler.run()  # each is expected to take 10 s
    assert not (tmp_path / "runs.jsonl").exists()
    assert scheduler.failed == {}


def test_runs_that_are_late_are_ended_and_leave_nothing(tmp_path: Path) -> None:
    quick = replace(ONE, seconds=0.001)
    began = time.monotonic()
    scheduler = Scheduler([claim(quick, quick)], Store(tmp_path), Budget(minutes=0.05), lambda line: None, ENDLESS)
    scheduler.run()
    assert time.monotonic() - began < 60
    assert scheduler.workers == []
    assert not (tmp_path / "runs.jsonl").exists()
    assert Store(tmp_path).reserve(identity(quick.with_rate(None)).key, 0) is not None


def test_run_that_failed_is_reported_and_the_other_claims_go_on(tmp_path: Path) -> None:
    lines: list[str] = []
    scheduler = Scheduler([claim()], Store(tmp_path), Budget(), lines.append, FAILING)
    scheduler.run()
    assert len(scheduler.failed) == 1
    assert any("exit status 3" in line for line in lines)


# ---- the ledger --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.key)
def test_every_table_and_figure_has_a_line(paper: Any) -> None:
    covered = {re.sub(r"[a-c]$", "", line.where) for line in [*paper.claims, *paper.left]}
    assert covered >= set(paper.contents)
    assert all(left.reason for left in paper.left)
    assert all(one.paper and one.scale for one in paper.claims)


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


def test_runs_of_one_claim_train_equally_long_or_the_line_says_so(tmp_path: Path) -> None:
    told = set()
    for one in ALL:
        epochs = [prices.local_epochs(run.with_rate(None)) for run in one.runs.values()]
        line = ledger.size_cell(ledger.entry(one, Store(tmp_path)))
        assert ("local epochs" in line) == (max(epochs) >= 1.1 * min(epochs)), one.name
        told |= {one.where} if "local epochs" in line and not one.dear else set()
    assert told == {"Table 3", "Table 4", "Table 6", "Table 8", "Table 12", "Fig. 19", "§ Evaluations"}


def test_epochs_count_participation_and_steps() -> None:
    from benchmarks.claims import l2c

    assert {round(prices.local_epochs(run.with_rate(None))) for run in l2c.TABLE_2.values()} == {100}
    assert prices.local_epochs({**TREE, "peers": 10, "algorithm": {"name": "dfml"}}) == pytest.approx(1.2)
    steps = {"name": "dpsgd", "local_epochs": None, "local_steps": 1, "batch": 5}
    assert prices.local_epochs({**TREE, "rounds": 3, "algorithm": steps}) == pytest.approx(1.0)


def test_cells_of_mapls_tables_have_the_noise_of_their_test_images() -> None:
    papers = {one.name: one.paper for one in PAPERS[0].claims}
    assert papers["above local training, Sc. 1"] == "+6.67 ± 3.1 (77.27 against 70.60)"
    assert papers["above local training, Sc. 2"] == "+6.76 ± 2.9 (65.43 against 58.67)"
    assert papers["the graph becomes block-diagonal"] == "almost zero across"


def test_settings_of_the_paper_stay_as_decided() -> None:
    from benchmarks.claims import dfml, l2c

    assert not any(run.tree.get("masked_test") for one in ALL for run in one.runs.values())
    ring = run_of({**l2c.TABLE_2["dpsgd"].with_rate(None), "seed": 0}).topology
    assert {ring.degree(peer) for peer in range(20)} == {10}  # a self weight of 1/11
    ends: list[int] = []
    period = 5
    while sum(ends) < 30:
        ends.append(period)
        period += 5
    assert sum(ends) == dfml.DFML.tree["rounds"]  # the last round is the end of a cycle


def test_line_shows_verdict_interval_threshold_and_size(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for seed in range(5):
        record(store, ONE, seed, 72.0 + seed * 0.1)
        record(store, OTHER, seed, 70.0)
    one = claim(threshold=1.0, whose="ours", curves="accuracy")
    found = ledger.entry(one, store)
    text = ledger.line(found, {})
    assert "| **reproduced** | +2.20 ± 0.20 points; > 1.00 (ours) | +1 |" in text
    assert "2 peers, 2 rounds, 30 samples; many | 5 | 0.01 core h |" in text
    assert f"[one above other](claims/{ledger.file_name(one)})" in text


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
def test_lines_at_the_papers_size_show_a_price(tmp_path: Path) -> None:
    dear = next(one for one in ALL if one.dear and one.where == "Table 1")
    text = ledger.line(ledger.entry(dear, Store(tmp_path)), {"cpu": prices.Speed(2e10, 0.0)})
    runs = [run.with_rate(None) for run in dear.runs.values()]
    speeds = (prices.ASSUMED_GPU, prices.Speed(2e10, 0.0))
    gpu, core = (5 * sum(prices.hours(run, speed) for run in runs) for speed in speeds)
    assert f"{gpu:,.0f} GPU h, {core:,.0f} core h |" in text


def test_passes_count_epochs_views_and_mutual_learning() -> None:
    base = {**TREE, "peers": 10, "rounds": 3, "data": {**TREE["data"], "dataset": "digits"}}
    assert prices.samples(base) == 15
    assert prices.passes(base) == 450
    assert prices.passes({**base, "algorithm": {"name": "mapl"}}) == 900
    dfml = {**base, "algorithm": {"name": "dfml", "mutual_epochs": 5, "batch": 10}}
    assert prices.passes(dfml) == 3 * 6 * 15 * 6
    assert prices.steps(dfml) == pytest.approx(3 * 6 * 15 * 6 / 10)
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


def test_page_of_the_project_has_a_line_for_every_claim() -> None:
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


@pytest.mark.exhaustive
def test_command_lists_what_it_would_play_and_writes_the_page(tmp_path: Path) -> None:
    page = tmp_path / "claims.md"
    page.write_text(f"{ledger.BEGIN}\n{ledger.END}\n")
    given = ["--store", str(tmp_path), "--page", str(page), "--only", "mapl", "--claim", "numbers sent"]
    listed = CliRunner().invoke(main, [*given, "--list"])
    assert listed.exit_code == 0
    assert listed.output.split(maxsplit=2)[:2] == ["0.4", "minutes,"]
    assert "1 runs: Table 7, numbers sent are 2·N_e·(d·K + |φ|) per round" in listed.output
    assert CliRunner().invoke(main, [*given, "--minutes", "0"]).exit_code == 0
    assert "| Table 7 | numbers sent are 2·N_e·(d·K + \\|φ\\|) per round | not tried |" in page.read_text()
    assert not (tmp_path / "runs.jsonl").exists()


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
