"""Local training as the base class of all algorithms does it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from p2pfl.algorithms.base import Algorithm
from p2pfl.algorithms.local import Local
from p2pfl.learning.evaluation import evaluate
from p2pfl.learning.optimizers import LocalTraining as Hyper
from p2pfl.messaging.net import Net
from p2pfl.messaging.schema import Layout
from p2pfl.models import Model
from p2pfl.options import Options
from p2pfl.tensors import clone, digest, parameters_of
from tests.support import peer_data, random_dataset, setting, softmax_regression


class Recording(Algorithm[Options]):
    """Records the arguments of its loss; the model has dropout and batch normalization."""

    name = "recording"
    Hyper = Options
    views = 2

    def setup(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.seen: list[tuple[Tensor, Tensor]] = []
        self.modes: list[bool] = []

    async def round(self, t: int, net: Net) -> None:
        raise NotImplementedError

    def loss(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.seen.append((x, labels))
        self.modes.append(self.model.training)
        logits = self.model(x)
        return {"ce": nn.functional.cross_entropy(logits, labels), "size": logits.square().mean()}

    def layouts(self) -> Sequence[Layout]:
        return ()


def recording(me: int = 0, samples: int = 10) -> Recording:
    backbone = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4), nn.Dropout(0.5))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Model("normalized", backbone, 4, 3)

    def noise(x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    return Recording(Options(), setting(me, 1, model, peer_data(random_dataset(samples), augment=noise)))


def test_batch_holds_all_first_views_then_all_second_views() -> None:
    algorithm = recording()
    calls = iter([0.0, 10.0])
    algorithm.data.augment = lambda x: x + next(calls)
    algorithm.train(epochs=1, batch=10)
    ((x, labels),) = algorithm.seen
    assert len(x) == 20
    torch.testing.assert_close(x[10:], x[:10] + 10.0)
    assert torch.equal(labels[:10], labels[10:])


@pytest.mark.parametrize(("steps", "sizes"), [(1, [4]), (3, [4, 4, 2]), (5, [4, 4, 2, 4, 4])])
def test_steps_may_span_several_epochs(steps: int, sizes: list[int]) -> None:
    algorithm = recording()
    algorithm.train(steps=steps, batch=4)
    assert [len(labels) // 2 for _, labels in algorithm.seen] == sizes


def test_phase_with_another_step_and_order_leaves_other_phases_unchanged() -> None:
    algorithm, plain = recording(), recording()
    images: list[Tensor] = []

    def step(batch: Tensor, labels: Tensor) -> None:
        assert algorithm.model.training
        images.append(batch)

    algorithm.train(epochs=1, batch=4, step=step, order="first phase")
    assert [len(batch) for batch in images] == [4, 4, 2]
    assert algorithm.seen == []
    for other in (algorithm, plain):
        other.train(epochs=1, batch=4)
    assert digest(algorithm.state_dict()) == digest(plain.state_dict())
    assert not torch.equal(torch.cat(images) / 255.0, torch.cat([x[: len(x) // 2] for x, _ in plain.seen]))


@pytest.mark.parametrize("amount", [{"steps": 3}, {"epochs": 2}])
def test_training_without_samples_does_nothing(amount: dict[str, Any]) -> None:
    algorithm = recording(samples=0)
    algorithm.train(batch=4, **amount)
    assert algorithm.seen == []
    assert algorithm.meter.drain() == {}


def test_model_is_in_training_mode_only_while_training() -> None:
    algorithm = recording()
    assert not algorithm.model.training  # a peer that resumes evaluates before it trains
    algorithm.train(epochs=1, batch=4)
    assert algorithm.modes == [True] * 3
    assert not any(module.training for module in algorithm.model.modules())


def test_evaluation_before_training_changes_no_state() -> None:
    algorithm = recording()
    data = peer_data(random_dataset(10), [], range(4))
    torch.manual_seed(0)
    before, generator = digest(algorithm.state_dict()), torch.get_rng_state()
    first = evaluate(algorithm.predict, data, data.test)
    assert evaluate(algorithm.predict, data, data.test) == first
    assert digest(algorithm.state_dict()) == before
    assert torch.equal(torch.get_rng_state(), generator)


def test_interrupted_training_leaves_the_model_in_evaluation_mode() -> None:
    algorithm = recording()

    def stop() -> None:
        raise KeyboardInterrupt

    algorithm.after_batch = stop
    with pytest.raises(KeyboardInterrupt):
        algorithm.train(epochs=3, batch=4)
    assert len(algorithm.seen) == 1
    assert not algorithm.model.training


def test_training_is_determined_by_the_streams_and_keeps_the_global_generator() -> None:
    digests = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        algorithm = recording()
        algorithm.train(epochs=2, batch=4)
        assert torch.equal(torch.get_rng_state(), before)
        digests.append(digest(algorithm.state_dict()))
    assert digests[0] == digests[1]
    other = recording(me=1)
    other.train(epochs=2, batch=4)
    assert digest(other.state_dict()) != digests[0]


def test_step_minimizes_the_sum_of_the_terms_and_meters_each() -> None:
    trained, reference = recording(), recording()
    trained.train(steps=1, batch=10)
    ((x, labels),) = trained.seen
    reference.model.train()
    with reference.streams.torch("dropout"):
        terms = reference.loss(x, labels)
    reference.optimizer.zero_grad()
    (terms["ce"] + terms["size"]).backward()  # type: ignore[no-untyped-call]
    reference.optimizer.step()
    assert torch.equal(trained.model.linear_head.weight, reference.model.linear_head.weight)
    assert trained.meter.drain() == {name: pytest.approx(value.item()) for name, value in terms.items()}


def test_state_restores_into_another_instance() -> None:
    trained, fresh = Local(Hyper(), local_setting(seed=1)), Local(Hyper(), local_setting(seed=2))
    trained.train(epochs=2, batch=4)
    state: Any = trained.state_dict()
    assert set(state) == {"model", "optimizer"}
    fresh.load_state_dict(copy.deepcopy(state))
    assert digest(fresh.state_dict()) == digest(trained.state_dict())
    fresh.streams.load_state_dict(trained.streams.state_dict())
    for algorithm in (trained, fresh):
        algorithm.train(epochs=1, batch=4)
    assert digest(fresh.state_dict()) == digest(trained.state_dict())


def local_setting(seed: int) -> Any:
    return setting(0, 1, softmax_regression(4, 3, seed), peer_data(random_dataset(10)))


# ---- divergence: of what is trained, told from how it began ---------------------------------------------------


class Masked(nn.Flatten):
    """Sets a mask when it is first used, counts in a buffer, and replaces another one in each pass."""

    mask: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.zeros(2, 2))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("last", torch.full((2,), -torch.inf))
        self.table = nn.Parameter(torch.tensor([-torch.inf, 1e7]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.mask.fill_(-torch.inf).triu_(1)
        self.seen += 1e6 * len(x)
        self.last = torch.full((2,), 1e9)
        return super().forward(x)


def masked() -> Recording:
    model = Model("masked", nn.Sequential(Masked(), nn.BatchNorm1d(4)), 4, 3)
    return Recording(Options(), setting(0, 1, model, peer_data(random_dataset(10))))


def test_training_that_sets_constants_is_not_rolled_back() -> None:
    peer = masked()
    before = clone(parameters_of(peer.model))
    peer.train_or_roll_back(epochs=1, batch=5)
    assert peer.outcomes.skipped == {}
    assert not torch.equal(peer.model.linear_head.weight, before["head.weight"])


@pytest.mark.parametrize(
    ("name", "value", "diverged"),
    [
        ("head.bias", 1e6, "model.head.bias holds 1e+06"),
        ("backbone.1.running_var", torch.inf, "model.backbone.1.running_var holds inf"),
        ("backbone.1.running_mean", -2e6, "model.backbone.1.running_mean holds -2e+06"),
        ("backbone.0.table", 1e10, "model.backbone.0.table holds 1e+10"),
        ("backbone.0.table", 1e9, ""),
        ("backbone.0.table", -torch.inf, "model.backbone.0.table holds -inf"),
        ("backbone.0.mask", torch.inf, ""),
        ("backbone.0.seen", 1e30, ""),
        ("backbone.0.seen", torch.nan, "model.backbone.0.seen holds nan"),
    ],
)
def test_what_has_diverged_is_named_wherever_it_lies(name: str, value: float, diverged: str) -> None:
    peer = masked()
    state = peer.model.state_dict()
    wrong = {name: state[name].masked_fill(state[name].isfinite(), value)}
    assert peer.what_diverged({name: state[name]}, wrong) == diverged  # what it would become
    assert peer.what_diverged(state) == ""
    state[name].copy_(wrong[name])
    assert peer.what_diverged(state) == diverged
    backbone = {name.removeprefix("backbone."): state[name]}  # under another name, in the same memory
    assert peer.what_diverged(backbone) == diverged


def test_values_that_are_in_no_module_diverge_at_the_limit() -> None:
    peer = masked()
    assert peer.what_diverged({"w": torch.tensor([9e5])}) == ""
    assert peer.what_diverged({"v": torch.ones(1), "w": torch.tensor([1.0, torch.nan])}) == "w holds nan"


def test_what_was_not_assigned_is_counted() -> None:
    peer = masked()
    head = parameters_of(peer.model.linear_head)
    assert peer.assign_unless_diverged(head, {name: torch.ones_like(x) for name, x in head.items()})
    assert not peer.assign_unless_diverged(head, {name: torch.full_like(x, 1e7) for name, x in head.items()})
    assert head["bias"].tolist() == [1.0] * 3
    assert (peer.outcomes.tried, peer.outcomes.skipped) == ({"averages": 2}, {"averages": 1})
