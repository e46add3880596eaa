"""Models with frozen parameters: these are not exchanged, and peers end as if they were."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from p2pfl import config_hash
from p2pfl.errors import ModelError, RunFileError
from p2pfl.learning.losses import proximal
from p2pfl.models import Model
from p2pfl.models.cost import cost
from p2pfl.rng import Streams
from p2pfl.run_file.load import load
from p2pfl.run_file.run import Run
from p2pfl.session.build import load_data, make_algorithm
from p2pfl.simulation.simulate import simulate
from p2pfl.tensors import buffers_of, frozen_of, note_frozen, parameters_of
from tests.conftest import tree
from tests.golden.runs import RUNS

NETWORK = """\
import os

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, num_classes, in_features, frozen="base", seed_of=None):
        super().__init__()
        self.base = nn.Linear(in_features, 400)
        self.body = nn.Sequential(nn.Linear(400, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.fc = nn.Linear(16, num_classes)
        self.get_submodule(frozen).requires_grad_(False)
        if seed_of == "anything":
            self.base.weight.data.copy_(torch.tensor(list(os.urandom(self.base.weight.numel()))).view(400, -1) / 9e4)

    def forward(self, x):
        return self.fc(self.body(self.base(x.flatten(1))))
"""
FROZEN = 4 * (400 * 64 + 400)
"""Bytes of the frozen layer."""
WITH_FROZEN = {"heterofl": {"Trained", "Averaged"}, "fedrolex": {"TrainedSlice", "AveragedSlice"}, "dfml": {"Pupil"}}
"""Kinds of messages that hold frozen parameters, by method: slices, and models that start from different values."""
ELSEWHERE = ("flt", "fml", "fedkd")
"""Methods that need an extra, or send another network than the peer's."""
EXCHANGING = (
    "dpsgd, steps",
    "ditto, some take part",
    "pfedsim, one joins late",
    "apfl-ssl",
    "cga",
    "dfml",
    "fedavg-dec",
    "def-kt",
    "fedrolex",
    "mapl+",
    "meta-l2c, one joins late",
    "fedfomo",
)
"""Runs that exchange models in different ways."""
EQUALLY_WEIGHTED: dict[str, dict[str, Any]] = {
    "fedavg": {"name": "fedavg"},
    "ditto": {"name": "ditto", "momentum": 0.9},
    "dpsgd, steps": {"name": "dpsgd", "local_steps": 2},
    "dpsgd, epochs": {"name": "dpsgd", "local_epochs": 1},
    "dfedavgm": {"name": "dfedavgm"},
    "cga": {"name": "cga"},
    "mapl+": {"name": "mapl+", "warmup": 9, "projector_hidden": 16},
    "fedprox-dec": {"name": "fedprox-dec", "participation": 0.25},
    "dfml": {"name": "dfml", "mutual_epochs": 1},
    "def-kt": {"name": "def-kt"},
}
"""Methods that average equal numbers exactly here: with weights of 1/4 or 1/2, or not at all."""


@pytest.fixture
def partly_frozen(tmp_path: Path) -> Callable[..., Run]:
    """``partly_frozen(args={"frozen": "fc"}, rounds=2)``: a run with the network above."""

    def make(args: Any = None, **changes: Any) -> Run:
        (tmp_path / "frozen_nets.py").write_text(NETWORK)
        models = {"module": "frozen_nets.Net", "args": args or {}}
        (tmp_path / "run.yaml").write_text(json.dumps(tree(**{**changes, "models": models})))
        return load(tmp_path / "run.yaml")

    return make


def peer_of(run: Run, me: int = 0) -> Any:
    """Return the algorithm of a peer before round 0."""
    return make_algorithm(run, me, load_data(run), torch.device("cpu"), Streams(run.seed, me))


def largest_payloads(sent: Any) -> dict[str, float]:
    """Return the bytes of a message of each kind, the mean over some messages at a time."""
    found: dict[str, float] = {}
    for kinds in sent:
        for kind, (messages, payload, _) in kinds.items():
            found[kind] = max(found.get(kind, 0.0), payload / messages)
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in EXCHANGING else pytest.mark.slow)
        for name in RUNS
        if not name.startswith(ELSEWHERE)
    ],
)
def test_messages_hold_no_frozen_parameters(name: str, partly_frozen: Any) -> None:
    run = partly_frozen(**RUNS[name])
    results = simulate(run)
    found = largest_payloads(kinds for result in results for kinds in result.sent.values())
    larger = {kind for kind, size in found.items() if size >= FROZEN}
    assert larger == WITH_FROZEN.get(run.file.algorithm.name, set()) & found.keys()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", EQUALLY_WEIGHTED)
def test_peers_end_as_if_all_parameters_were_exchanged(
    name: str, partly_frozen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {"dataset": "digits", "partition": {"name": "iid", "per_peer": 30}}
    run = partly_frozen(algorithm={**EQUALLY_WEIGHTED[name], "batch": 16, "lr": 0.05}, rounds=4, data=data)
    without = simulate(run)
    monkeypatch.setattr("p2pfl.models.model.note_frozen", lambda model: None)
    whole = simulate(run)
    assert [result.digest for result in without] == [result.digest for result in whole]
    assert [result.accuracy for result in without] == [result.accuracy for result in whole]
    sizes = [
        sum(entry[1] for result in results for kinds in result.sent.values() for entry in kinds.values())
        for results in (without, whole)
    ]
    assert sizes[0] < 0.8 * sizes[1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("algorithm", ["fedavg", "dfml", "l2c", "heterofl", "mapl+"])
def test_messages_without_training_leave_frozen_parameters_out(algorithm: str, partly_frozen: Any) -> None:
    data = {"dataset": "digits", "partition": {"name": "iid", "per_peer": 30, "validation": 0.2}}
    changes = {"algorithm": algorithm, "data": data, "rounds": 2}
    untrained = simulate(partly_frozen(**changes, time={"train": False}), clock=True)
    assert [result.sent for result in untrained] == [result.sent for result in simulate(partly_frozen(**changes))]


def test_frozen_parameters_stay_in_state_and_checkpoint(partly_frozen: Any) -> None:
    peer = peer_of(partly_frozen(algorithm="fedavg"))
    assert "backbone.base.weight" in peer.state_dict()["model"]
    assert "backbone.base.weight" not in peer.shared_part()


# ---- what is frozen ----------------------------------------------------------------------------------------


def partly(layers: int = 3) -> Model:
    backbone = nn.Sequential(nn.Flatten(), *(nn.Linear(4, 4) for _ in range(layers)))
    backbone[1].requires_grad_(False)
    backbone[2].bias.requires_grad_(False)
    return Model("partly", backbone, 4, 3)


def test_parameters_and_frozen_ones_are_all() -> None:
    model = partly()
    assert set(frozen_of(model)) == {"backbone.1.weight", "backbone.1.bias", "backbone.2.bias"}
    assert {*parameters_of(model), *frozen_of(model)} == {name for name, _ in model.named_parameters()}
    assert not parameters_of(model).keys() & frozen_of(model)
    assert set(parameters_of(model.backbone)) == {"2.weight", "3.weight", "3.bias"}
    assert not frozen_of(model.head)


def test_what_is_frozen_later_is_still_exchanged() -> None:
    model = partly()
    before = set(parameters_of(model))
    model.requires_grad_(False)
    assert set(parameters_of(model)) == before


def test_a_frozen_parameter_that_trains_later_is_an_error() -> None:
    model = partly()
    model.get_parameter("backbone.1.bias").requires_grad_(True)
    with pytest.raises(ModelError, match=r"'backbone\.1\.bias' was frozen when the model was built, but trains now"):
        parameters_of(model)
    with pytest.raises(ModelError, match=r"'1\.bias' was frozen"):
        parameters_of(model.backbone)
    assert set(parameters_of(model.head)) == {"weight", "bias"}


def test_a_model_built_around_other_parts_notes_what_is_frozen_then() -> None:
    backbone = partly().backbone.requires_grad_(True)
    assert not frozen_of(Model("whole", backbone, 4, 3))
    note_frozen(backbone.requires_grad_(False))
    assert not parameters_of(backbone)


def test_a_tied_parameter_is_frozen_once() -> None:
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.Linear(4, 4))
    backbone[2].weight = backbone[1].weight
    backbone[1].weight.requires_grad_(False)
    model = Model("tied", backbone, 4, 3)
    assert list(frozen_of(model)) == ["backbone.1.weight"]
    assert set(parameters_of(model)) == {"backbone.1.bias", "backbone.2.bias", "head.weight", "head.bias"}


def test_proximal_terms_are_over_what_trains() -> None:
    model = partly()
    center = {name: tensor + 1.0 for name, tensor in parameters_of(model).items()}
    expected = sum(tensor.numel() for tensor in center.values()) / 2
    assert proximal(model, center, 1.0).item() == pytest.approx(expected, rel=1e-5)


def test_costs_leave_frozen_parameters_out(partly_frozen: Any) -> None:
    run = partly_frozen()
    found = cost(run.file.models.group.members[0], 1, (8, 8), 10)
    model = peer_of(run).model
    assert found.parameters == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert found.model_bytes == 4 * found.parameters + sum(buffer.nbytes for buffer in buffers_of(model).values())


# ---- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["lg-fedavg", "mapl", "pfedsim", "fedclassavg"])
def test_methods_that_exchange_heads_refuse_frozen_ones(algorithm: str, partly_frozen: Any) -> None:
    run = partly_frozen({"frozen": "fc"}, algorithm=algorithm)
    with pytest.raises(RunFileError, match=r"models.*has a frozen head, but the method needs one that trains"):
        load_data(run)


@pytest.mark.exhaustive
def test_peers_whose_frozen_parameters_differ_are_refused(partly_frozen: Any) -> None:
    run = partly_frozen({"seed_of": "anything"}, algorithm="fedavg", rounds=1)
    with pytest.raises(RunFileError, match=r"models.*frozen parameters differ between peers, which do not exchange"):
        simulate(run)
    simulate(partly_frozen({"seed_of": "anything"}, algorithm="dfml", rounds=1))  # its models may differ


def test_hash_of_a_run_names_frozen_parameters(partly_frozen: Any) -> None:
    run = partly_frozen(algorithm="fedavg")
    ours, theirs = run.config_hash("a" * 64), run.config_hash("b" * 64)
    text = config_hash.mismatch(3, theirs, 0, ours)
    assert text.startswith("frozen parameters differ between peers")
    assert text.endswith("their hash is bbbbbbbbbbbb… at peer 3, aaaaaaaaaaaa… at peer 0")
    assert config_hash.settings_of(ours) == config_hash.settings_of(run.config_hash())
    assert "(none)… at peer 3" in config_hash.mismatch(3, run.config_hash(), 0, ours)
