"""Named metrics and losses: their values, their checks, and where a run shows them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from sklearn.metrics import f1_score
from torch import Tensor
from torch.nn.functional import cross_entropy

from launcher.comparison.groups import ComparedRun
from launcher.comparison.lines import lines, metrics_table
from launcher.facts.summary import summarize
from launcher.views.print_summary import accuracy_lines
from p2pfl import plugins
from p2pfl.algorithms import ALGORITHMS
from p2pfl.errors import PluginError, RunFileError
from p2pfl.learning.metrics import METRICS, calibration_error, class_accuracy, macro_f1, measure
from p2pfl.learning.named_losses import LOSSES
from p2pfl.learning.trainer import Trainer
from p2pfl.run_file.load import from_dict
from p2pfl.run_folder.new_run import create
from p2pfl.session import metrics
from p2pfl.session.scoring import evaluate_run
from p2pfl.simulation.simulate import simulate
from tests.conftest import tree

SCORES = torch.tensor([[3.0, 1.0, 0.0], [0.0, 2.0, 1.0], [2.0, 0.0, 0.0], [0.0, 0.0, 5.0], [1.0, 3.0, -torch.inf]])
LABELS = torch.tensor([0, 1, 1, 2, 1])


@pytest.fixture(autouse=True)
def _names() -> Iterator[None]:
    yield
    for table in (METRICS, LOSSES):
        for name in table.registered:
            table.unregister(name)


# ---- values ----------------------------------------------------------------------------------------------------


def test_macro_f1_is_that_of_scikit_learn() -> None:
    labels = torch.randint(5, (200,), generator=torch.Generator().manual_seed(1))
    scores = torch.randn(200, 7, generator=torch.Generator().manual_seed(2))
    expected = f1_score(labels.numpy(), scores.argmax(1).numpy(), average="macro", zero_division=0)
    assert macro_f1(scores, labels) == pytest.approx(expected)


def test_calibration_error_is_the_gap_between_confidence_and_accuracy() -> None:
    assert calibration_error(torch.eye(3) * 50, torch.arange(3)) == pytest.approx(0, abs=1e-9)
    assert calibration_error(torch.eye(2) * 50, torch.tensor([1, 0])) == pytest.approx(1)
    half = torch.log(torch.tensor([[0.75, 0.25]] * 4))  # three of four are right, as it says
    assert calibration_error(half, torch.tensor([0, 0, 0, 1])) == pytest.approx(0, abs=1e-6)


def test_a_metric_of_several_numbers_has_a_name_for_each() -> None:
    assert class_accuracy(SCORES, LABELS) == {"0": 1.0, "1": pytest.approx(2 / 3), "2": 1.0}
    found = measure(["class-accuracy", "macro-f1"], SCORES, LABELS)
    assert list(found) == ["class-accuracy.0", "class-accuracy.1", "class-accuracy.2", "macro-f1"]


def test_accuracies_of_classes_have_their_names() -> None:
    found = measure(["class-accuracy"], SCORES, LABELS, ["cat", "10", "a.b c"])
    assert list(found) == ["class-accuracy.cat", "class-accuracy.10", "class-accuracy.a.b c"]
    assert list(found.values()) == list(class_accuracy(SCORES, LABELS).values())
    nothing = measure(["class-accuracy"], SCORES * torch.nan, LABELS, ["cat", "10", "a.b c"])
    assert list(nothing) == ["class-accuracy"]


def test_metrics_of_a_diverged_model_are_nan() -> None:
    assert math.isnan(measure(["macro-f1"], SCORES * torch.nan, LABELS)["macro-f1"])


def test_losses_are_their_formulas() -> None:
    logits = SCORES[:4]
    labels = LABELS[:4]
    p = logits.softmax(1)[range(4), labels]
    assert LOSSES["focal"](logits, labels) == pytest.approx(float(-((1 - p) ** 2 * p.log()).mean()))
    smooth = LOSSES["label-smoothing"](logits, labels)
    assert smooth == pytest.approx(float(0.9 * -p.log().mean() - 0.1 * logits.log_softmax(1).mean()))
    assert torch.equal(LOSSES["ce"](logits, labels), cross_entropy(logits, labels))


# ---- mistakes --------------------------------------------------------------------------------------------------


def too_few(scores: Tensor) -> float:
    return 0.0


def text(scores: Tensor, labels: Tensor) -> str:
    return "good"


def each(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits, labels, reduction="none")


def number(logits: Tensor, labels: Tensor) -> float:
    return 1.0


def constant(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.zeros(())


def fails(logits: Tensor, labels: Tensor) -> Tensor:
    return logits @ labels


@pytest.mark.parametrize(
    ("kind", "function", "message"),
    [
        ("metric", too_few, r"too_few\(scores: 'Tensor'\) -> 'float' should take \(scores, labels\)"),
        ("metric", text, "metric 'mine' must return a number, or a dict of numbers, not str"),
        ("metric", fails, "metric 'mine' fails for four samples of four classes: RuntimeError: "),
        ("loss", each, r"loss 'mine' must return a tensor without dimensions, not one of shape \[4\]"),
        ("loss", number, "loss 'mine' must return a tensor, not float"),
        ("loss", constant, "loss 'mine' must return a tensor without dimensions, not one without a gradient"),
        ("loss", fails, "loss 'mine' fails for four samples of four classes: RuntimeError: "),
    ],
)
def test_mistake_is_reported_at_the_line_of_the_function(kind: str, function: Any, message: str) -> None:
    with pytest.raises(PluginError, match=f":{function.__code__.co_firstlineno}: {message}"):
        getattr(plugins, kind)("mine")(function)
    assert "mine" not in METRICS
    assert "mine" not in LOSSES


def test_a_name_can_be_taken_only_once() -> None:
    with pytest.raises(PluginError, match="the name 'ece' is taken: it is built in; choose another"):
        plugins.metric("ece")(macro_f1)
    plugins.loss("mine")(LOSSES["focal"])
    with pytest.raises(PluginError, match=r"taken: it is registered by .*named_losses\.focal; choose another"):
        plugins.loss("mine")(LOSSES["label-smoothing"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metrics": ["ece", "macro-f2"]}, "metrics.1: unknown 'macro-f2'; known: .*; did you mean 'macro-f1'?"),
        ({"algorithm": {"name": "local", "loss": "vocal"}}, "algorithm.loss: unknown 'vocal'; .* mean 'focal'?"),
        (
            {"algorithm": {"name": "dfml", "loss": "focal"}},
            "algorithm.loss: 'focal' has no effect: dfml has its own loss; remove it, or choose another algorithm",
        ),
        (
            {"algorithm": {"name": "fedstyle", "loss": "focal"}},
            "algorithm.loss: unknown 'focal'; known: simclr, simsiam",
        ),
    ],
)
def test_mistake_in_a_run_file_is_reported_at_its_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RunFileError, match=message.replace("?", r"\?").replace(".", r"\.").replace(r"\.*", ".*")):
        from_dict(tree(**changes))


def test_every_method_either_uses_the_named_loss_or_refuses_it() -> None:
    refuse = {n for n, method in ALGORITHMS.items() if not (method.named_loss or method.loss is Trainer.loss)}
    unsupervised = {"fedstyle", *(name for name in ALGORITHMS if name.endswith("-ssl"))}
    assert refuse == {"dfml", "fedavg-dec", "fedprox-dec", "fml-dec", "def-kt", "heterofl", "fedrolex"} | unsupervised


# ---- runs ------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_a_run_records_and_shows_its_metrics(tmp_path: Path) -> None:
    @plugins.metric("largest")
    def largest(scores: Tensor, labels: Tensor) -> Tensor:
        return scores.max()

    changes: dict[str, Any] = {"rounds": 2, "data": {"partition": {"name": "iid", "per_peer": 20}}}
    run = from_dict(tree(metrics=["macro-f1", "largest"], **changes))
    folder = create(run, tmp_path / "run", simulated=True)
    results = simulate(run, folder)
    for result in results:
        last = metrics.read(folder.peer(result.peer).metrics)[-1]
        assert last["metrics"] == {name: value and round(value, 6) for name, value in result.metrics.items()}
        assert set(last["metrics"]) == {"macro-f1", "largest"}
        assert "metrics" not in last["personal"]
    again = {one.peer: dict(one.evaluations.metrics) for one in evaluate_run(run, folder)}
    assert again == {result.peer: result.metrics for result in results}
    summary = summarize(folder)
    assert summary.metrics["macro-f1"].mean == pytest.approx(fmean(r.metrics["macro-f1"] or 0 for r in results))
    assert f"macro-f1: {summary.metrics['macro-f1']}" in accuracy_lines(summary)
    (line,) = lines([ComparedRun.of(folder, None)])
    assert json.loads(json.dumps(asdict(line)))["metrics"]["largest"]["highest"] >= line.metrics["largest"].lowest
    table = metrics_table([line])
    assert table is not None
    assert [column.header for column in table.columns] == ["metric", "run"]
    assert run.config_hash() == from_dict(tree(**changes)).config_hash()


@pytest.mark.exhaustive
def test_metrics_do_not_change_the_bits_and_records_without_them_are_as_before(make_run: Any, tmp_path: Path) -> None:
    plain, measured = make_run(rounds=1), make_run(rounds=1, metrics=["ece"])
    folder = create(plain, tmp_path / "run", simulated=True)
    assert [r.digest for r in simulate(plain, folder)] == [r.digest for r in simulate(measured)]
    assert "metrics" not in metrics.read(folder.peer(0).metrics)[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("algorithm", ["local", "dpsgd", "l2c", "mapl", "fedproto"])
def test_a_named_loss_replaces_the_cross_entropy(make_run: Any, tmp_path: Path, algorithm: str) -> None:
    @plugins.loss("mine")
    def mine(logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits, labels)

    data = {"partition": {"name": "iid", "per_peer": 20, "validation": 0.3}}
    digests = {}
    for loss in ("ce", "mine", "focal"):
        run = make_run(peers=2, rounds=1, data=data, algorithm={"name": algorithm, "loss": loss})
        folder = create(run, tmp_path / loss, simulated=True)
        digests[loss] = [result.digest for result in simulate(run, folder)]
        terms = metrics.read(folder.peer(0).metrics)[0]["loss"]
        assert loss in terms
        assert ("ce" in terms) == (loss == "ce")
    assert digests["ce"] == digests["mine"] != digests["focal"]
