"""DFML's options: mutual_batch_models bounds memory and changes no bit; all others change the outcome."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from p2pfl.algorithms.dfml import DFML, Hyper
from p2pfl.algorithms.mutual_learning import Participant
from p2pfl.models import MODELS, build
from p2pfl.tensors import buffers_of, digest
from tests.bodies import complete
from tests.dfml_reference import CLASSES, hyper, make, model
from tests.support import peer_data, random_dataset, run_rounds, setting

# ---- memory at the aggregator --------------------------------------------------------------------------------

MIXED = ("normalized", "flat", "normalized", "linear", "normalized")


def outcome(h: Hyper, rounds: int = 2) -> list[str]:
    peers = make(h, names=MIXED, samples=9)
    run_rounds(peers, complete(len(MIXED)), rounds)
    return [digest(peer.state_dict()) for peer in peers]


@pytest.mark.exhaustive
def test_mutual_batch_models_is_bit_identical() -> None:
    unbounded = outcome(hyper(batch=4, participation=1.0))
    for bound in (1, 3, 99):
        assert outcome(hyper(batch=4, participation=1.0, mutual_batch_models=bound)) == unbounded


@pytest.mark.exhaustive
@pytest.mark.parametrize("bound", [1, 3, None])
def test_mutual_batch_models_bounds_held_activations(bound: int | None, monkeypatch: Any) -> None:
    held, most, learned = 0, 0, 0
    logits, minimize = Participant.logits, DFML.minimize

    def counted_logits(self: Participant, x: Tensor, draws: int) -> Tensor:
        nonlocal held, most
        held += torch.is_grad_enabled()
        most = max(most, held)
        return logits(self, x, draws)

    def counted_step(self: DFML, optimizer: torch.optim.Optimizer, loss: Tensor, **batch: Tensor) -> None:
        nonlocal held, learned
        minimize(self, optimizer, loss, **batch)
        assert all(parameter.grad is None for group in optimizer.param_groups for parameter in group["params"])
        held -= 1
        learned += 1

    monkeypatch.setattr(Participant, "logits", counted_logits)
    monkeypatch.setattr(DFML, "minimize", counted_step)
    outcome(hyper(participation=1.0, mutual_batch_models=bound), rounds=1)
    assert (held, most, learned) == (0, bound or len(MIXED), 3 * len(MIXED))


ARCHITECTURES = (*MODELS["tiny4"].members, "dfml-resnet-4", "dfml-vit-32", "shufflenet")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_detached_logits_equal_logits(name: str) -> None:
    """Bit-identical with batch normalization and dropout, and without side effects."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = build(name, 0, 3, (32, 32), CLASSES).train()
        x = torch.randn(3, 3, 32, 32)
        one = Participant(network, torch.optim.SGD(network.parameters()), torch.zeros(1))
        before = digest(network.state_dict())
        detached = one.detached_logits(x, 5)
        assert digest(network.state_dict()) == before
        again = copy.deepcopy(network)
        assert torch.equal(detached, one.logits(x, 5))
        assert torch.equal(detached, Participant(again, one.optimizer, one.phi).logits(x, 5))
        assert digest(network.state_dict()) == digest(again.state_dict())
        # Logits update the statistics, if any, and dropout depends on the seed.
        assert (digest(network.state_dict()) != before) == bool(buffers_of(network))
        drops = any(isinstance(module, nn.Dropout) and module.p > 0 for module in network.modules())
        assert torch.equal(detached, one.detached_logits(x, 6)) != drops or bool(buffers_of(network))


# ---- switches ------------------------------------------------------------------------------------------------


def make_with_absent_classes(h: Hyper) -> list[DFML]:
    """Each peer lacks one of the classes."""
    names = ("flat", "linear", "flat", "linear")
    peers = []
    for me, name in enumerate(names):
        dataset = random_dataset(9 + me, classes=CLASSES, seed=me)
        mine = [n for n in range(9 + me) if n % CLASSES != me % CLASSES]
        given = setting(me, 4, model(name, seed=me), peer_data(dataset, mine))
        peers.append(DFML(h, replace(given, architectures=names, build=lambda peer: model(names[peer], seed=peer))))
    return peers


@cache
def option_outcome(**given: Any) -> list[str]:
    peers = make_with_absent_classes(hyper(**given))
    run_rounds(peers, complete(4), 5)
    return [digest(peer.state_dict()) for peer in peers]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "given",
    [
        {"supervision": "ce"},
        {"supervision": "ace"},
        {"supervision": "masked"},
        {"mutual_epochs": 2},
        {"mutual": False},
        {"teachers": "equal"},
        {"alpha_max": 0.5},
        {"shape": "full"},
        {"shape": "fixed"},
        {"shape": "linear"},
        {"wsl": True},
        {"period": 4},
        {"period_increment": 0},
        {"scheduled": "supervision"},
        {"scheduled": "distillation"},
        {"scheduled": "common"},
        {"peak_updates": 3},
        {"participation": 0.25},
        {"fixed_aggregator": True},
        {"local_epochs": 2},
        {"momentum": 0.5},
        {"weight_decay": 0.1},
        {"batch": 3},
        {"optimizer": "adam"},
    ],
    ids=lambda given: ", ".join(f"{key} {value}" for key, value in given.items()),
)
def test_every_option_changes_the_outcome(given: dict[str, Any]) -> None:
    assert option_outcome(**given) != option_outcome()


def test_without_mutual_only_the_aggregators_model_learns() -> None:
    h = hyper(mutual=False, participation=1.0, shape="fixed")
    peers = make(h, names=("flat", "linear", "normalized"))
    trained = make(h, names=("flat", "linear", "normalized"))
    for peer in trained:
        peer.local_training()
    run_rounds(peers, complete(3), 1)
    assert digest(peers[0].model.state_dict()) != digest(trained[0].model.state_dict())
    for me in (1, 2):
        assert digest(peers[me].model.state_dict()) == digest(trained[me].model.state_dict())


@pytest.mark.exhaustive
def test_fixed_alpha_makes_peak_and_regular_model_equal() -> None:
    peers = make(hyper(shape="fixed", participation=1.0))
    run_rounds(peers, complete(4), 3)
    for peer in peers:
        assert digest(peer.peak.state_dict()) == digest(peer.model.state_dict())
