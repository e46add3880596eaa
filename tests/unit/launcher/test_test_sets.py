"""Runs with other test samples: how they are found, and that nothing ranks them against each other."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from launcher.comparison.groups import ComparedRun, group
from launcher.comparison.test_sets import WasTested, differing, names
from launcher.sweep.search import Search
from p2pfl.run_folder.folder import RunFolder
from tests.launcher_fixtures import Invoke, MakeFolder
from tests.records import record, record_tests, write_records


class Run:
    """A run with these test samples of its peers, by letter; none if no peer has started."""

    def __init__(
        self, samples: str = "", seed: int = 0, classes: str = "", dataset: str = "", **divided: Any
    ) -> None:
        known = dict(enumerate(samples))
        values = {f"data.{key.replace('__', '.')}": value for key, value in divided.items()}
        values |= {"dataset.sha256": dataset} if dataset else {}
        self.tested = WasTested(seed, known, dict.fromkeys(known, classes), values)


def sets(*runs: Run | list[Run], masked: bool = False) -> str:
    return " ".join(names([run if isinstance(run, list) else [run] for run in runs], masked))


def test_equal_samples_are_one_test_set_whatever_the_run_files_say() -> None:
    assert sets(Run("abc", partition__beta=1), Run("abc", partition__beta=2)) == "A A"
    assert sets(Run("abc", dataset__path="here"), Run("abd", dataset__path="here"), Run("abc")) == "A B A"


def test_a_mean_over_peers_weights_test_samples_by_their_peers() -> None:
    assert sets(Run("aaa"), Run("aaaaa"), Run("a")) == "A A A"  # all peers on the whole test set
    assert sets(Run("abc"), Run("cab")) == "A A"
    assert sets(Run("aab"), Run("abb")) == "A B"


def test_a_masked_test_depends_on_the_classes_too() -> None:
    runs = Run("aa", classes="few"), Run("aa", classes="many")
    assert sets(*runs) == "A A"
    assert sets(*runs, masked=True) == "A B"


def test_groups_are_compared_seed_by_seed() -> None:
    one = [Run("ab", 0), Run("cd", 1), Run("ef", 2)]
    assert sets(one, [Run("cd", 1), Run("ab", 0)]) == "A A"
    assert sets(one, [Run("ab", 0), Run("cc", 1)]) == "A B"


def test_other_seeds_of_one_division_are_compared_as_means_only() -> None:
    one = [Run("ab", 0, partition__beta=1), Run("cd", 1, partition__beta=1)]
    assert sets(one, Run("ef", 2, partition__beta=1)) == "A A"
    assert sets(one, Run("ef", 2, partition__beta=2)) == "A B"
    assert sets(one[0], one[1]) == "A B"
    assert sets(Run("aa", 0, partition__beta=1), Run("aa", 1, partition__beta=2)) == "A A"


def test_runs_that_have_not_started_are_compared_by_their_run_files() -> None:
    assert sets(Run(partition__beta=1), Run(partition__beta=1), Run(partition__beta=2)) == "A A B"
    assert sets(Run("ab", partition__beta=1), Run(partition__beta=1)) == "A A"
    assert sets(Run(partition__beta=1), Run("ab", partition__beta=1, dataset="1c0f"), Run("cd")) == "A A B"
    assert sets(Run(seed=0), Run(seed=1)) == "A B"


def test_a_peer_that_died_early_is_no_difference() -> None:
    half, whole = Run("ab"), Run("ab")
    del half.tested.samples[1]  # type: ignore[attr-defined]
    assert sets(whole, half) == "A A"
    assert sets(Run("cb"), half) == "A B"


def test_reasons_name_what_differs_and_no_parameter_of_what_differs_by_name() -> None:
    assert differing([Run("a", partition__name="iid", partition__per_peer=3), Run("b", partition__name="mapl")]) == [
        "data.partition.name"
    ]
    assert differing([Run("a", dataset="1c0f", peers=3), Run("b", dataset="99aa", peers=3)]) == [
        "the content of the dataset"
    ]
    assert differing([Run("a", dataset="1c", dataset__path="x"), Run("b", dataset="99", dataset__path="y")]) == [
        "data.dataset.path"
    ]
    assert differing([Run("a", dataset="1c0f"), Run("")]) == ["the recorded test samples"]
    assert differing([Run("a", 0), Run("b", 1)]) == ["seed"]


# ---- commands ----------------------------------------------------------------------------------------------


@pytest.fixture
def made(make_folder: MakeFolder) -> Callable[..., RunFolder]:
    """Make a run of two peers with these test samples, one letter each."""

    def make(algorithm: str, seed: int, accuracy: float, samples: str, dataset: str = "", **keys: Any) -> RunFolder:
        result = {
            "accuracy": accuracy,
            "unmasked_accuracies": {"personal": accuracy},
            "masked_accuracies": {"personal": accuracy},
        }
        folder = make_folder(f"{algorithm}-{seed}-{samples}{dataset[:1]}", results=dict.fromkeys(range(2), result))
        plain = {**yaml.safe_load(folder.run_file.read_text()), **keys}
        folder.run_file.write_text(yaml.safe_dump({**plain, "seed": seed, "algorithm": {"name": algorithm}}))
        write_records(folder, [record(peer, 1, accuracy) for peer in range(2)])
        record_tests(folder, dict(enumerate(samples)), dataset)
        return folder

    return make


def test_rows_of_other_test_samples_are_marked(made: Callable[..., RunFolder], invoke: Invoke) -> None:
    one, two, other = made("local", 0, 0.5, "ab"), made("mapl", 0, 0.6, "ab"), made("fedavg", 0, 0.7, "cd")
    alone = invoke("compare", one.root, two.root).stdout
    assert "test set" not in alone
    text = invoke("compare", one.root, two.root, other.root).stdout
    assert [line.split()[2] for line in text.splitlines()[1:4]] == ["A", "A", "B"]
    assert "Different test sets (the recorded test samples): rows were tested on different samples" in text


def test_groups_of_other_test_samples_are_not_tested_against_each_other(
    made: Callable[..., RunFolder], invoke: Invoke
) -> None:
    runs = [
        made(name, seed, accuracy + seed / 100, f"{samples}{seed}")
        for name, accuracy, samples in (("local", 0.5, "a"), ("mapl", 0.6, "a"), ("fedavg", 0.9, "c"))
        for seed in range(2)
    ]
    found = json.loads(invoke("compare", *[run.root for run in runs], "--json").stdout)
    assert [line["test_set"] for line in found["groups"]] == ["A", "A", "B"]
    assert [line["versus"] is None for line in found["groups"]] == [True, False, True]
    assert found["comparison"]["other_tests"] == ["the recorded test samples"]
    text = invoke("compare", *[run.root for run in runs], "--format", "markdown").stdout
    assert "**" not in text  # nothing is the best
    assert "Δ: percentage points against local, of the groups with its test set" in text
    rows = list(csv.DictReader(io.StringIO(invoke("compare", *[run.root for run in runs], "--format", "csv").stdout)))
    assert [row["test set"] for row in rows] == ["A", "A", "B"]
    assert [row["p"] for row in rows][2] == ""
    both = invoke("compare", *[run.root for run in runs[:4]], "--format", "markdown").stdout
    assert "**60.5" in both
    assert "test set" not in both


def test_seeds_of_a_dataset_that_has_changed_are_no_group(made: Callable[..., RunFolder], invoke: Invoke) -> None:
    old = [made("local", seed, 0.5, f"a{seed}", "1c0ffee5" * 8) for seed in range(2)]
    new = made("local", 2, 0.9, "a2", "99aa" * 16)
    unknown = made("local", 3, 0.5, "a3")
    parts = group([ComparedRun.of(run, None) for run in (*old, new, unknown)])
    assert [len(part.members) for part in parts] == [3, 1]
    assert [part.labels["dataset.sha256"] for part in parts] == ["1c0ffee51c0f", "99aa99aa99aa"]
    text = invoke("compare", *[run.root for run in (*old, new)]).stdout
    assert "Different test sets (the content of the dataset)" in text


def test_no_trial_on_other_test_samples_is_called_the_best(
    made: Callable[..., RunFolder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [made("local", 0, 0.5, samples) for samples in ("ab", "ba", "cd")]
    trials = [
        SimpleNamespace(value=0.5, params={"data.partition.beta": 1}, user_attrs={"run": run.root.name})
        for run in runs
    ]
    found = Search.__new__(Search)
    folder = SimpleNamespace(run=lambda run: RunFolder(tmp_path / run))
    monkeypatch.setattr(found, "_folder", folder, raising=False)
    monkeypatch.setattr(found, "_settings", SimpleNamespace(objective="accuracy"), raising=False)
    for count, report in (
        (2, "best of 2 finished trials: local-0-ab"),
        (3, "no trial is called the best."),
    ):
        monkeypatch.setattr(found, "_done", lambda count=count: trials[:count])
        assert found.report()[0].startswith(report)
