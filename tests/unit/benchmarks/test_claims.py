"""Verdicts of the papers' claims, their runs and learning rates, and the store."""

from __future__ import annotations

import json
import lzma
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from benchmarks.claims import figures, plan
from benchmarks.claims import store as store_module
from benchmarks.claims.claim import MOST_SEEDS
from benchmarks.claims.declared import merged
from benchmarks.claims.statistics import LEAST_SEEDS, interval, verdict
from benchmarks.claims.store import Store, identity
from benchmarks.claims.summary import Summary, executed, planned
from p2pfl.errors import RunFileError
from tests.claims_fixtures import ONE, OTHER, TREE, claim, project_store, record, settings, summary

# ---- figures -----------------------------------------------------------------------------------------------


def test_dfmls_figures_read_the_rounds_and_networks_that_they_name() -> None:
    run = summary(0.0)
    run.accuracies = [10.0, 20.0, 30.0, 40.0, 60.0]
    assert figures.by_network(run, 2) == pytest.approx([100 / 3, 30.0])
    other = replace(run, accuracies=[0.0, 10.0, 0.0, 0.0, 0.0])
    assert figures.least_gain({"one": run, "other": other}) == pytest.approx(10.0)
    run.curves = {
        "alpha": [(t, 1.0 if t % 20 == 0 else 0.5 if t % 10 == 0 else 0.0) for t in range(1, 106)],
        "accuracy": [(t, 80.0 if t % 20 == 0 else 70.0 if t % 10 == 0 else 50.0) for t in range(5, 106, 5)],
    }
    assert figures.swing({"full cycles": run}) == pytest.approx(30.0)
    assert figures.area(run) == pytest.approx(75.0)
    run.curves["peak"] = [(t, float(t)) for t in range(5, 106, 5)]
    assert figures.area(run) == pytest.approx(55.0)
    assert figures.final(run) == 105.0


def test_rounds_of_a_method_that_never_gets_there_count_against_it() -> None:
    def peaks(slope: float) -> Summary:
        run = summary(0.0)
        run.curves = {"peak": [(t, slope * t) for t in range(5, 106, 5)]}
        return run

    assert figures.times_as_fast({"dfml": peaks(3.0), "α = 0": peaks(1.0)}) == pytest.approx(105 / 35)
    assert figures.times_as_fast({"dfml": peaks(1.0), "α = 0": peaks(3.0)}) == pytest.approx(35 / 105)
    assert figures.rounds_saved({"dfml": peaks(1.0), "fedavg-dec": summary(50.0)}) == 50.0
    assert figures.rounds_saved({"dfml": peaks(0.1), "fedavg-dec": summary(50.0)}) == 200.0


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
        ([0.1, -0.2, 0.3, -0.1, 0.0], "≈", 1.0, "reproduced"),
        ([3.0, -3.0, 3.0, -3.0, 0.0], "≈", 1.0, "undecided"),
        ([0.9, 1.0, 1.1, 0.9, 1.1], "≈", 1.0, "undecided"),
        ([2.0, 2.1, 1.9, 2.0, 2.0], "≈", 1.0, "refuted"),
        ([-2.0, -2.1, -1.9, -2.0, -2.0], "≈", 1.0, "refuted"),
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
    resolved = planned({**TREE, "name": "x"}).settings
    later = {**resolved, "new": None, "algorithm": {**resolved["algorithm"], "newer": False, "newest": {}}}
    assert store_module._essential(later) == store_module._essential(resolved)
    on = {**resolved, "algorithm": {**resolved["algorithm"], "newer": True}}
    assert store_module._essential(on) != store_module._essential(resolved)
    zero, null = ({**resolved, "algorithm": {"prune_round": value}} for value in (0, None))
    assert store_module._essential(zero) != store_module._essential(null)


def test_files_of_a_dataset_are_named() -> None:
    data = {"dataset": "cifar10-part", "partition": "iid"}
    assert identity({**TREE, "data": data, "peers": 3}).files[0] == "cifar10-part/train0.webp"


def test_runs_are_other_runs_with_changes() -> None:
    base = {"data": {"dataset": "digits", "partition": {"name": "iid", "validation": 0.1}}, "graph": {"name": "ring"}}
    found = merged(base, {"data": {"partition": {"validation": 0.2}}, "graph": {"name": "small-world"}})
    assert found == {
        "data": {"dataset": "digits", "partition": {"name": "iid", "validation": 0.2}},
        "graph": {"name": "small-world"},
    }
    algorithm = merged({"algorithm": {"name": "local", "batch": 8}}, {"algorithm": {"name": "fedavg"}})["algorithm"]
    assert algorithm == {"name": "fedavg", "batch": 8}


def test_store_reads_packed_and_added_runs_but_no_incomplete_line(tmp_path: Path) -> None:
    store = Store(tmp_path)
    record(store, ONE, 0, 80.0)
    store.pack()
    record(store, ONE, 1, 81.0)
    with store.added.open("ab") as file:
        file.write(b'{"key": "half')
    key, again = identity(ONE.with_rate(None)).key, Store(tmp_path)
    assert again.records == store.records
    assert again.summary(key, 1) == Summary(**json.loads(json.dumps(vars(summary(81.0)))))
    assert (again.seconds(key), again.seconds(key, "cpu_seconds")) == (4.0, 3.0)
    assert again.summary(key, 2) is None
    with again.locked():
        record(again, ONE, 2, 82.0)
    assert Store(tmp_path).records == again.records


def test_packed_runs_are_the_same_bytes_whatever_their_order(tmp_path: Path) -> None:
    stores = [Store(tmp_path / "one"), Store(tmp_path / "other")]
    for store, seeds in zip(stores, ((0, 1, 2), (2, 0, 1)), strict=True):
        for seed in seeds:
            record(store, ONE, seed, 80.0 + seed)
        store.pack()
    assert stores[0].packed.read_bytes() == stores[1].packed.read_bytes()
    assert not stores[0].added.exists()


@pytest.mark.exhaustive
def test_packed_results_of_the_project_are_those_that_pack_would_write() -> None:
    store = project_store()
    lines = lzma.decompress(store.packed.read_bytes()).splitlines()
    found = [record for _, record in sorted(store.records.items())]
    assert lines == [json.dumps(record, separators=(",", ":")).encode() for record in found]
    assert store.packed.stat().st_size < 4e6


def test_one_process_at_a_time_adds_runs(tmp_path: Path) -> None:
    store, other = Store(tmp_path), Store(tmp_path)
    with store.locked(), pytest.raises(BlockingIOError), other.locked():
        pass
    with other.locked():
        pass


def test_ablation_keeps_the_rate_that_was_chosen_for_the_method() -> None:
    tuned = replace(settings("fedtgp"), rates=(0.01, 0.1))
    changed = replace(tuned, changes={"transform": False})
    assert plan.tuning(changed, tuned.rates) == plan.tuning(tuned, tuned.rates)
    assert changed.with_rate(0.1)["algorithm"] == {"name": "fedtgp", "lr": 0.1, "transform": False}
    assert tuned.with_rate(0.1)["algorithm"] == {"name": "fedtgp", "lr": 0.1}


def test_longer_runs_have_the_rate_that_was_chosen_for_the_shorter_ones() -> None:
    tuned = replace(settings("fedtgp"), rates=(0.01, 0.1))
    longer = replace(tuned, changes={"transform": False}, length={"rounds": 60, "eval_every": 20})
    assert plan.tuning(longer, tuned.rates) == plan.tuning(tuned, tuned.rates)
    expected = {"rounds": 60, "eval_every": 20, "algorithm": {"name": "fedtgp", "lr": 0.1, "transform": False}}
    assert longer.with_rate(0.1) == {**tuned.with_rate(0.1), **expected}


@pytest.mark.exhaustive
def test_summary_has_both_accuracies_and_the_epochs_of_a_run() -> None:
    found = executed({**TREE, "seed": 0, "algorithm": {"name": "local", "lr": 0.01, "local_epochs": 3}})
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
    tasks = plan.tasks_of(tuned, [0], store, "cpu")
    assert [task.seed for task in tasks] == [plan.TUNING_SEED] * 3
    assert tasks[0].tree["data"]["dataset"] == {"name": "held-out", "of": "digits"}
    for rate, accuracy in ((0.01, 50.0), (0.02, 70.0)):
        record(
            store, replace(tuned, tree=plan.tuning(tuned, tuned.rates)[rate], rates=()), plan.TUNING_SEED, accuracy
        )
    assert plan.chosen(tuned, store) is None
    record(store, replace(tuned, tree=plan.tuning(tuned, tuned.rates)[0.05], rates=()), plan.TUNING_SEED, 70.0)
    assert plan.chosen(tuned, store) == 0.02  # the smaller of equal ones
    (task,) = plan.tasks_of(tuned, [0], store, "cpu")
    assert task.tree["algorithm"]["lr"] == 0.02


@pytest.mark.parametrize(
    ("accuracies", "tried", "best"),
    [
        ({0.01: 60.0, 0.02: 70.0, 0.05: 50.0}, [0.01, 0.02, 0.05], 0.02),
        ({0.01: 70.0, 0.02: 60.0, 0.05: 50.0}, [0.005, 0.01, 0.02, 0.05], None),
        ({0.005: 65.0, 0.01: 70.0, 0.02: 60.0, 0.05: 50.0}, [0.005, 0.01, 0.02, 0.05], 0.01),
        ({0.01: 50.0, 0.02: 60.0, 0.05: 70.0}, [0.01, 0.02, 0.05, 0.125], None),
        ({0.01: 50.0, 0.02: 60.0, 0.05: 70.0, 0.125: 10.0}, [0.01, 0.02, 0.05, 0.125], 0.05),
        ({0.01: 50.0, 0.02: 60.0, 0.05: 70.0, 0.125: 70.2}, [0.01, 0.02, 0.05, 0.125], 0.05),
        ({0.01: 50.0, 0.02: 60.0, 0.05: 70.0, 0.125: 70.3}, [0.01, 0.02, 0.05, 0.125, 0.312], None),
    ],
)
def test_grid_gets_a_rate_beyond_its_end_while_that_is_the_best(
    accuracies: dict[float, float], tried: list[float], best: float | None, tmp_path: Path
) -> None:
    store, tuned = Store(tmp_path), replace(ONE, rates=(0.01, 0.02, 0.05))
    for rate, tree in plan.tuning(tuned, list(accuracies)).items():
        record(store, replace(tuned, tree=tree, rates=()), plan.TUNING_SEED, accuracies[rate])
    assert plan.grid(tuned, store) == tried
    assert plan.chosen(tuned, store) == best
    (task,) = plan.tasks_of(tuned, [0] if best is not None else [], store, "cpu")
    missing = set(tried) - set(accuracies)
    assert task.seed == (plan.TUNING_SEED if missing else 0)
    assert task.tree["algorithm"]["lr"] == (missing.pop() if missing else best)


def test_grid_grows_three_times_at_most(tmp_path: Path) -> None:
    store, tuned = Store(tmp_path), replace(ONE, rates=(0.01, 0.02, 0.05))
    for accuracy in range(10):
        for rate, tree in plan.tuning(tuned, plan.grid(tuned, store)).items():
            if rate not in plan.scores(tuned, store):
                record(store, replace(tuned, tree=tree, rates=()), plan.TUNING_SEED, 100 * rate + accuracy)
    assert plan.grid(tuned, store) == [0.01, 0.02, 0.05, 0.125, 0.312, 0.779]
    assert plan.chosen(tuned, store) == 0.779


def test_held_out_images_are_training_images_only() -> None:
    held_out, whole = planned(plan.held_out(TREE)).dataset(), planned(TREE).dataset()
    assert len(held_out.train) + len(held_out.test) == len(whole.train)
    images = {image.tobytes() for image in whole.train.images}
    assert all(image.tobytes() in images for image in held_out.test.images)


@pytest.mark.exhaustive
def test_mosaics_of_cifar10_are_cut_row_by_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P2PFL_DATA", str(tmp_path))
    folder = tmp_path / "cifar10-part"
    folder.mkdir()
    images = np.random.default_rng(0).integers(0, 256, (4, 50, 32, 32, 3), dtype=np.uint8)
    for name, part in zip(("train0", "train1", "train2", "test"), images, strict=True):
        mosaic = part.reshape(2, 25, 32, 32, 3).transpose(0, 2, 1, 3, 4).reshape(64, 800, 3)
        Image.fromarray(mosaic).save(folder / f"{name}.webp", lossless=True)
    np.savez(folder / "labels.npz", y_train=np.arange(150) % 10, y_test=np.arange(50) % 10)
    run = planned({**TREE, "data": {"dataset": "cifar10-part", "partition": "iid"}})
    found = run.dataset()
    assert (found.train.images == images[:3].reshape(150, 32, 32, 3).transpose(0, 3, 1, 2)).all()
    assert (found.test.images == images[3].transpose(0, 3, 1, 2)).all()
    assert (found.classes, found.mirror) == (10, True)
    (folder / "labels.npz").write_bytes(b"no archive")
    with pytest.raises(RunFileError, match="damaged"):
        run.dataset()


# ---- what is run ----------------------------------------------------------------------------------------


def test_decided_claims_need_no_runs_and_shared_ones_are_not_repeated(tmp_path: Path) -> None:
    store, other = Store(tmp_path), claim(settings("mapl"))
    assert [task.seed for task in plan.remaining(claim(), store, "cpu")] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    for seed in range(5):
        record(store, ONE, seed, 80.0 + seed)
        record(store, OTHER, seed, 70.0 + seed)
    assert plan.remaining(claim(), store, "cpu") == []
    assert [task.tree["algorithm"]["name"] for task in plan.remaining(other, store, "cuda")] == ["mapl"] * 5


def test_figures_end_at_the_first_seed_that_lacks_a_run(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for seed in (0, 1, 3):
        record(store, ONE, seed, 80.0 + seed)
        record(store, OTHER, seed, 70.0)
    assert plan.figures(claim(), store) == {0: 10.0, 1: 11.0}
