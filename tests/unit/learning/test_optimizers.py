"""Optimizers made of a method's settings."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from p2pfl.algorithms import ALGORITHMS
from p2pfl.learning.optimizers import SGD, Adam, AdamW, LocalTraining
from p2pfl.options import OptionErrors
from p2pfl.tensors import digest


def test_optimizer_has_the_given_settings() -> None:
    parameter = nn.Parameter(torch.ones(1))
    sgd = LocalTraining(optimizer="sgd", lr=0.5, momentum=0.9, weight_decay=0.1).make_optimizer([parameter])
    adam = LocalTraining(optimizer="adam", lr=0.25, betas=(0.5, 0.75), weight_decay=0.2).make_optimizer([parameter])
    assert isinstance(sgd, torch.optim.SGD)
    assert isinstance(adam, torch.optim.Adam)
    assert [sgd.defaults[name] for name in ("lr", "momentum", "weight_decay")] == [0.5, 0.9, 0.1]
    assert [adam.defaults[name] for name in ("lr", "betas", "weight_decay")] == [0.25, (0.5, 0.75), 0.2]


@pytest.mark.parametrize("settings", [{"momentum": 0.9}, {"optimizer": "adam"}], ids=["sgd", "adam"])
def test_infinite_entries_do_not_decay_to_nan(settings: dict[str, Any]) -> None:
    disabled, other = nn.Parameter(torch.tensor([-torch.inf, 1.0, torch.inf])), nn.Parameter(torch.ones(1))
    optimizer = LocalTraining(weight_decay=0.1, **settings).make_optimizer([disabled, other])
    for _ in range(3):
        optimizer.zero_grad()
        (disabled[1] + other.sum()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert disabled.tolist() == [-torch.inf, other.item(), torch.inf]
    assert other.item() < 1.0


KINDS = [
    (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    (Adam, torch.optim.Adam, {"lr": 0.1, "betas": (0.5, 0.75)}),
    (AdamW, torch.optim.AdamW, {"lr": 0.1}),
]


@pytest.mark.parametrize(("kind", "stock", "settings"), KINDS, ids=lambda value: getattr(value, "__name__", ""))
def test_optimizer_takes_the_steps_of_torch(kind: Any, stock: Any, settings: dict[str, Any]) -> None:
    def trained(make: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        parameter = nn.Parameter(torch.linspace(-1, 1, 7))
        optimizer = make([parameter], **settings)
        for step in range(4):
            if step == 2:
                saved = optimizer.state_dict()
                optimizer = make([parameter], **settings)
                optimizer.load_state_dict(saved)
            optimizer.zero_grad(set_to_none=True)
            parameter.square().sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        assert parameter.requires_grad
        return parameter.detach(), optimizer.state_dict()

    assert digest(trained(kind)) == digest(trained(stock))


@pytest.mark.exhaustive
@pytest.mark.exhaustive
def test_optimizers_do_not_import_the_compiler() -> None:
    code = """
import sys, torch
from p2pfl.learning.optimizers import SGD, Adam, AdamW
from p2pfl.session.determinism import deterministic
with deterministic():
    for kind in (SGD, Adam, AdamW):
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer = kind([parameter], lr=0.1)
        parameter.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.load_state_dict(optimizer.state_dict())
print([name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("given", "unused"),
    [({"momentum": 0.5, "optimizer": "adam"}, "momentum"), ({"betas": [0.5, 0.9]}, "betas")],
)
def test_setting_without_effect_is_rejected(given: dict[str, Any], unused: str) -> None:
    with pytest.raises(OptionErrors, match=rf"{unused} has no effect with optimizer (sgd|adam); remove it"):
        LocalTraining.parse(given)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_resolved_settings_are_accepted(optimizer: str) -> None:
    settings = LocalTraining.parse({"optimizer": optimizer, "lr": 0.5})
    assert LocalTraining.parse(settings.to_dict()) == settings


UNSUPERVISED: dict[str, Any] = {"local_epochs": 5, "lr": 0.1, "loss": "simclr"}
DICTATED: dict[str, dict[str, Any]] = {
    "dfedavgm": {"momentum": 0.9},
    "fedclassavg": {"optimizer": "adam", "lr": 1e-4},
    "mapl": {"optimizer": "adam", "lr": 1e-4},
    "mapl+": {"optimizer": "adam", "lr": 1e-4},
    "l2c": {"local_epochs": 5, "batch": 10, "weight_decay": 5e-4},
    "meta-l2c": {"local_epochs": 5, "batch": 10, "weight_decay": 5e-4},
    "fedproto": {"batch": 10},
    "fedtgp": {"batch": 10},
    "dfml": {"momentum": 0.9, "weight_decay": 5e-4},
    "fedavg-dec": {"momentum": 0.9, "weight_decay": 5e-4},
    "fedprox-dec": {"momentum": 0.9, "weight_decay": 5e-4},
    "fml-dec": {"momentum": 0.9, "weight_decay": 5e-4},
    "heterofl": {"momentum": 0.9, "weight_decay": 5e-4},
    "fedrolex": {"momentum": 0.9, "weight_decay": 5e-4},
    "fedstyle": UNSUPERVISED,
    "fedavg-ssl": UNSUPERVISED,
    "fedper-ssl": UNSUPERVISED,
    "fedrep-ssl": UNSUPERVISED,
    "fedprox-ssl": UNSUPERVISED,
    "apfl-ssl": UNSUPERVISED,
    "ditto-ssl": UNSUPERVISED,
    "dpsgd": {"local_epochs": None},
    "ad-psgd": {"local_epochs": None},
    "swift": {"local_epochs": None},
    "sgp": {"local_epochs": None},
    "cga": {"local_epochs": None, "drop_last": None},  # a round is one step
}
"""What the papers ask for, by algorithm; the page of each says so."""


@pytest.mark.parametrize("name", ALGORITHMS)
def test_defaults_differ_only_where_a_paper_asks_for_it(name: str) -> None:
    defaults = ALGORITHMS[name].Hyper()
    common = {field.name: getattr(LocalTraining, field.name) for field in dataclasses.fields(LocalTraining)}
    found = {key: getattr(defaults, key) for key in common}
    assert found == {**common, **DICTATED.get(name, {})}


def test_hooks_run_before_and_after_each_step() -> None:
    parameter, seen = nn.Parameter(torch.ones(1)), []
    optimizer = LocalTraining(lr=0.5).make_optimizer([parameter])
    optimizer.register_step_pre_hook(lambda *_: seen.append(parameter.item()))
    optimizer.register_step_post_hook(lambda *_: seen.append(parameter.item()))
    parameter.grad = torch.ones(1)
    optimizer.step()
    assert seen == [1.0, 0.5]
