"""The local loop: batches, input, evaluation, meters, and the steps that every algorithm takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from p2pfl.algorithms.base import Algorithm
from p2pfl.algorithms.local import Hyper, Local
from p2pfl.checkpoint import snapshot
from p2pfl.config import Run
from p2pfl.data import Dataset, Share, Split
from p2pfl.errors import RunFileError
from p2pfl.models import Model
from p2pfl.net import Net
from p2pfl.options import Options
from p2pfl.session import load_data
from p2pfl.tensors import digest
from p2pfl.training import (
    EVALUATION_BATCH,
    Evaluation,
    Meter,
    PeerData,
    Samples,
    evaluate,
    make_optimizer,
    mean_of,
)
from p2pfl.wire import Layout
from tests.p2pfl.support import CPU, peer_data, random_dataset, setting, share, softmax_regression

property_of = settings(deadline=None, max_examples=50)


def numbered(samples: int, classes: int = 3) -> Dataset:
    """Sample n consists of n (two bytes), so that each can be recognised."""
    numbers = np.arange(samples)
    images = np.stack([numbers % 256, numbers // 256], axis=1).astype(np.uint8).reshape(samples, 1, 1, 2)
    split = Split(images, numbers % classes)
    return Dataset("numbered", split, split, classes, mean=(0.0,), std=(1.0,), mirror=False)


def ids(images: Tensor) -> list[int]:
    return [int(low) + 256 * int(high) for low, high in images.reshape(-1, 2).tolist()]


def stream(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


# ---- batches -----------------------------------------------------------------------------------------------


@property_of
@given(samples=st.integers(0, 400), size=st.integers(2, 64), seed=st.integers(0, 2**32 - 1))
def test_an_epoch_takes_each_sample_once_but_for_a_lone_last_one(samples: int, size: int, seed: int) -> None:
    chosen = np.arange(1, 1 + 2 * samples, 2)
    data = peer_data(numbered(1 + 2 * samples), chosen)
    batches = list(data.batches(size, stream(seed)))
    taken = [number for images, _ in batches for number in ids(images)]
    lone = samples % size == 1 and samples > 1
    assert len(taken) == samples - lone
    assert len(set(taken)) == len(taken)
    assert set(taken) <= set(chosen.tolist())
    assert all(len(images) == size for images, _ in batches[:-1])
    assert [int(label) for _, labels in batches for label in labels] == [number % 3 for number in taken]
    if samples > 1:
        assert all(len(images) > 1 for images, _ in batches)


def test_an_epoch_in_batches_of_one_takes_each_sample_once() -> None:
    taken = [number for images, _ in peer_data(numbered(5)).batches(1, stream()) for number in ids(images)]
    assert sorted(taken) == [0, 1, 2, 3, 4]


def test_a_peer_with_a_single_sample_still_trains_on_it() -> None:
    ((images, labels),) = peer_data(numbered(5), [4]).batches(64, stream())
    assert (ids(images), labels.tolist()) == ([4], [1])


def test_epochs_are_in_random_order_and_follow_from_the_stream() -> None:
    data = peer_data(numbered(50))
    order = stream()
    first, second = ([ids(images) for images, _ in data.batches(8, order)] for _ in range(2))
    assert first != second
    assert first == [ids(images) for images, _ in data.batches(8, stream())]
    assert [number for batch in first for number in batch] != list(range(50))


def test_batches_are_bytes_and_long_labels() -> None:
    images, labels = next(iter(peer_data(numbered(5)).batches(4, stream())))
    assert (images.dtype, images.shape) == (torch.uint8, (4, 1, 1, 2))
    assert (labels.dtype, labels.shape) == (torch.int64, (4,))


def test_input_is_normalised_by_channel_and_augmented_only_when_asked() -> None:
    split = Split(np.array([[[[0, 255]], [[51, 102]]]], np.uint8), np.array([0]))
    dataset = Dataset("two", split, split, 1, mean=(0.5, 0.2), std=(0.25, 0.1), mirror=False)
    data = peer_data(dataset, augment=lambda x: 1 - x)
    images = torch.from_numpy(split.images)
    torch.testing.assert_close(
        data.input(images, augmented=False), torch.tensor([[[[-2.0, 2.0]], [[0.0, 2.0]]]]), rtol=0, atol=1e-6
    )
    torch.testing.assert_close(
        data.input(images, augmented=True), torch.tensor([[[[2.0, -2.0]], [[6.0, 4.0]]]]), rtol=0, atol=1e-6
    )


def test_a_peer_knows_its_classes_and_its_part_of_each_split() -> None:
    dataset = random_dataset(9, classes=5, tests=6)
    data = PeerData(dataset, share([0, 5, 3], test=[1, 2]), lambda x: x, CPU)
    assert data.own_classes == (0, 3)
    assert data.classes == 5
    assert data.train.labels.tolist() == [0, 0, 3]
    assert (len(data.train), len(data.validation), len(data.test), len(data.everything)) == (3, 0, 2, 6)
    assert peer_data(dataset, []).own_classes == ()


def test_a_share_of_the_merged_pool_has_samples_of_both_splits() -> None:
    dataset = random_dataset(9, classes=5, tests=6)
    parts = [np.array(part) for part in ([0, 8, 9, 14], [3, 10], [1, 11])]
    data = PeerData(dataset, Share(*parts, merged=True), lambda x: x, CPU)
    assert data.train.labels.tolist() == [0, 3, 0, 0]  # 8 mod 5, then the test samples 0 and 5
    assert data.validation.labels.tolist() == [3, 1]
    assert data.test.labels.tolist() == [1, 2]
    images, labels = data.train.take(np.array([3, 1, 2]))
    assert (images.dtype, labels.dtype) == (torch.uint8, torch.int64)
    assert labels.tolist() == [0, 3, 0]
    for image, (split, index) in zip(images, [(dataset.test, 5), (dataset.train, 8), (dataset.test, 0)], strict=True):
        np.testing.assert_array_equal(image.numpy(), split.images[index])
    images, labels = data.train.take(np.array([], np.int64))
    assert (images.shape, labels.shape) == ((0, 1, 2, 2), (0,))
    with pytest.raises(IndexError):
        dataset.pool.take(np.array([15]))
    assert len(dataset.pool) == 15


def test_no_test_on_samples_that_others_train_on(make_run: Callable[..., Run]) -> None:
    partition = {"name": "dirichlet"}
    load_data(make_run(data={"partition": partition}))
    with pytest.raises(RunFileError, match=r"dirichlet deals out the test set too, .* nothing left for global_test"):
        load_data(make_run(data={"partition": partition}, global_test=True))


# ---- optimisers --------------------------------------------------------------------------------------------


def test_optimisers_take_their_parameters() -> None:
    parameter = nn.Parameter(torch.ones(1))
    sgd = make_optimizer("sgd", [parameter], lr=0.5, momentum=0.9, weight_decay=0.1)
    adam = make_optimizer("adam", [parameter], lr=0.25, betas=(0.5, 0.75), weight_decay=0.2)
    assert isinstance(sgd, torch.optim.SGD)
    assert isinstance(adam, torch.optim.Adam)
    assert [sgd.defaults[name] for name in ("lr", "momentum", "weight_decay")] == [0.5, 0.9, 0.1]
    assert [adam.defaults[name] for name in ("lr", "betas", "weight_decay")] == [0.25, (0.5, 0.75), 0.2]


# ---- evaluation and meters ---------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [1, 5, EVALUATION_BATCH, EVALUATION_BATCH + 1, 2 * EVALUATION_BATCH + 3])
def test_evaluation_counts_every_sample_once(samples: int) -> None:
    data = PeerData(numbered(samples), share([], range(samples)), lambda x: 1 / 0 * x, CPU)
    asked: list[int] = []

    def predict(x: Tensor) -> Tensor:
        """Always for class 1, with a lead of 2."""
        assert not torch.is_grad_enabled()
        asked.extend(ids((x * 255).round()))
        return torch.tensor([[0.0, 2.0, 0.0]]).repeat(len(x), 1)

    found = evaluate(predict, data, data.test)
    correct = len(range(1, samples, 3))
    right, wrong = np.log(1 + 2 * np.exp(-2)), np.log(1 + 2 * np.exp(-2)) + 2
    assert found is not None
    assert asked == list(range(samples))
    assert (found.correct, found.samples, found.accuracy) == (correct, samples, correct / samples)
    assert found.loss == pytest.approx((correct * right + (samples - correct) * wrong) / samples, rel=1e-5)


def test_masked_evaluation_is_among_the_own_classes() -> None:
    """Sample n has class n mod 3; the peer trains on classes 0 and 1 and is tested on them."""
    data = PeerData(numbered(6), share([0, 3, 4], [0, 1, 3]), lambda x: x, CPU)
    scores = torch.tensor([[1.0, 0.0, 5.0]])

    def predict(x: Tensor) -> Tensor:
        return scores.repeat(len(x), 1)

    plain, masked = (evaluate(predict, data, data.test, masked=masked) for masked in (False, True))
    assert plain is not None
    assert masked is not None
    assert (plain.correct, masked.correct) == (0, 2)
    surprise = float(np.log(1 + np.exp(-1.0)))
    assert masked.loss == pytest.approx((2 * surprise + surprise + 1) / 3, rel=1e-5)
    assert torch.equal(scores, torch.tensor([[1.0, 0.0, 5.0]]))  # the method's own tensor is left alone


def test_a_class_that_is_tested_but_not_trained_on_is_not_masked() -> None:
    data = PeerData(numbered(6), share([0, 3], [2]), lambda x: x, CPU)
    found = evaluate(lambda x: torch.tensor([[0.0, 9.0, 1.0]]), data, data.test, masked=True)
    assert found is not None
    assert found.correct == 1
    assert np.isfinite(found.loss)


def test_a_mean_of_evaluations_gives_each_the_same_weight() -> None:
    found = mean_of([Evaluation(1.0, 0.5, 10, 10), Evaluation(0.0, 1.5, 0, 90)])
    assert found == Evaluation(0.5, 1.0, 10, 100)


# ---- styles ------------------------------------------------------------------------------------------------


def test_styles_hold_all_samples_of_a_style_whoever_has_them() -> None:
    plain = numbered(12)
    styled = Split(plain.train.images, plain.train.labels, np.arange(12) % 2)
    data = PeerData(replace(plain, train=styled, test=styled), share([0], [1]), lambda x: x, CPU)
    assert [style.train.indices.tolist() for style in data.styles] == [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11]]
    assert all(ids(style.test.take(np.arange(6))[0]) == style.train.indices.tolist() for style in data.styles)


def test_a_dataset_without_styles_is_one_style() -> None:
    ((train, test),) = ((style.train, style.test) for style in peer_data(numbered(5), [1], [2]).styles)
    assert (len(train), len(test)) == (5, 5)


def test_where_the_test_set_is_trained_on_there_is_no_style_to_evaluate() -> None:
    indices = [np.array(part) for part in ([0], [], [7])]
    assert PeerData(numbered(5), Share(*indices, merged=True), lambda x: x, CPU).styles == ()


def test_without_samples_there_is_no_evaluation() -> None:
    data = peer_data(numbered(3), test=[])
    assert evaluate(lambda x: x, data, data.test) is None


def test_a_meter_gives_means_weighted_by_samples_and_starts_again() -> None:
    meter = Meter()
    meter.add({"ce": torch.tensor(1.0, requires_grad=True), "reg": torch.tensor(4.0)}, samples=3)
    meter.add({"ce": torch.tensor(5.0), "reg": torch.tensor(0.0)}, samples=1)
    assert meter.drain() == {"ce": 2.0, "reg": 3.0}
    assert meter.drain() == {}
    meter.add({"ce": torch.tensor(7.0)}, samples=2)
    assert meter.drain() == {"ce": 7.0}


def test_terms_of_different_phases_do_not_thin_one_another() -> None:
    meter = Meter()
    meter.add({"first": torch.tensor(1.0)}, samples=3)
    meter.add({"second": torch.tensor(5.0)}, samples=7)
    assert meter.drain() == {"first": 1.0, "second": 5.0}


# ---- what every algorithm does -----------------------------------------------------------------------------


class Noted(Algorithm[Options]):
    """Keeps what its loss was handed; a model with dropout and batch normalisation."""

    name = "noted"
    Hyper = Options
    views = 2

    def setup(self) -> None:
        self.optimizer = make_optimizer("sgd", self.model.parameters(), lr=0.1)
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


def noted(me: int = 0, samples: int = 10) -> Noted:
    backbone = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4), nn.Dropout(0.5))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Model("normalised", backbone, 4, 3)

    def noise(x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    return Noted(Options(), setting(me, 1, model, peer_data(random_dataset(samples), augment=noise)))


def test_a_batch_holds_all_first_views_then_all_second_ones() -> None:
    algorithm = noted()
    calls = iter([0.0, 10.0])
    algorithm.data.augment = lambda x: x + next(calls)
    algorithm.train(epochs=1, batch=10)
    ((x, labels),) = algorithm.seen
    assert len(x) == 20
    torch.testing.assert_close(x[10:], x[:10] + 10.0)
    assert torch.equal(labels[:10], labels[10:])


@pytest.mark.parametrize(("steps", "sizes"), [(1, [4]), (3, [4, 4, 2]), (5, [4, 4, 2, 4, 4])])
def test_training_for_steps_takes_so_many_batches_over_as_many_epochs_as_needed(steps: int, sizes: list[int]) -> None:
    algorithm = noted()
    algorithm.train(steps=steps, batch=4)
    assert [len(labels) // 2 for _, labels in algorithm.seen] == sizes


def test_a_phase_has_its_own_step_and_order_and_changes_those_of_others_in_nothing() -> None:
    algorithm, plain = noted(), noted()
    images: list[Tensor] = []

    def step(batch: Tensor, labels: Tensor) -> None:
        assert algorithm.model.training
        images.append(batch)

    algorithm.train(epochs=1, batch=4, step=step, order="first phase")
    assert [len(batch) for batch in images] == [4, 4, 2]
    assert algorithm.seen == []
    for one in (algorithm, plain):
        one.train(epochs=1, batch=4)
    assert digest(algorithm.state_dict()) == digest(plain.state_dict())
    assert not torch.equal(torch.cat(images) / 255.0, torch.cat([x[: len(x) // 2] for x, _ in plain.seen]))


@pytest.mark.parametrize("amount", [{"steps": 3}, {"epochs": 2}])
def test_training_without_samples_ends_at_once(amount: dict[str, int]) -> None:
    algorithm = noted(samples=0)
    algorithm.train(batch=4, **amount)
    assert algorithm.seen == []
    assert algorithm.meter.drain() == {}


def test_the_model_is_in_training_mode_while_it_trains_and_in_evaluation_mode_otherwise() -> None:
    algorithm = noted()
    assert not algorithm.model.training  # a peer that resumes evaluates before it trains
    algorithm.train(epochs=1, batch=4)
    assert algorithm.modes == [True] * 3
    assert not any(module.training for module in algorithm.model.modules())


def test_evaluating_changes_nothing_also_before_any_training() -> None:
    algorithm = noted()
    data = PeerData(random_dataset(10), share([], range(4)), lambda x: x, CPU)
    torch.manual_seed(0)
    before, generator = digest(algorithm.state_dict()), torch.get_rng_state()
    first = evaluate(algorithm.predict, data, data.test)
    assert evaluate(algorithm.predict, data, data.test) == first
    assert digest(algorithm.state_dict()) == before
    assert torch.equal(torch.get_rng_state(), generator)


def test_the_model_leaves_training_mode_when_a_stop_interrupts_the_batch() -> None:
    algorithm = noted()

    def stop() -> None:
        raise KeyboardInterrupt

    algorithm.after_batch = stop
    with pytest.raises(KeyboardInterrupt):
        algorithm.train(epochs=3, batch=4)
    assert len(algorithm.seen) == 1
    assert not algorithm.model.training


def test_training_follows_from_the_streams_and_leaves_the_global_generator_alone() -> None:
    digests = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        algorithm = noted()
        algorithm.train(epochs=2, batch=4)
        assert torch.equal(torch.get_rng_state(), before)
        digests.append(digest(algorithm.state_dict()))
    assert digests[0] == digests[1]
    other = noted(me=1)
    other.train(epochs=2, batch=4)
    assert digest(other.state_dict()) != digests[0]


def test_the_sum_of_the_terms_is_minimised_and_each_is_metered() -> None:
    one, two = noted(), noted()
    one.train(steps=1, batch=10)
    ((x, labels),) = one.seen
    two.model.train()
    with two.streams.torch("dropout"):
        terms = Noted.loss(two, x, labels)
    two.optimizer.zero_grad()
    (terms["ce"] + terms["size"]).backward()  # type: ignore[no-untyped-call]
    two.optimizer.step()
    assert torch.equal(one.model.head.weight, two.model.head.weight)
    assert one.meter.drain() == {name: pytest.approx(value.item()) for name, value in terms.items()}


def test_the_state_comes_back_into_another_instance() -> None:
    trained, fresh = Local(Hyper(), local_setting(seed=1)), Local(Hyper(), local_setting(seed=2))
    trained.train(epochs=2, batch=4)
    state: Any = trained.state_dict()
    assert set(state) == {"model", "optimizer"}
    fresh.load_state_dict(snapshot(state))
    assert digest(fresh.state_dict()) == digest(trained.state_dict())
    fresh.streams.load_state_dict(trained.streams.state_dict())
    for algorithm in (trained, fresh):
        algorithm.train(epochs=1, batch=4)
    assert digest(fresh.state_dict()) == digest(trained.state_dict())


def local_setting(seed: int) -> Any:
    return setting(0, 1, softmax_regression(4, 3, seed), peer_data(random_dataset(10)))


def test_samples_are_taken_by_position_among_the_own_ones() -> None:
    samples = Samples(numbered(300).train, np.array([7, 256, 299]))
    images, labels = samples.take(np.array([2, 0]))
    assert ids(images) == [299, 7]
    assert labels.tolist() == [299 % 3, 7 % 3]
    assert samples.labels.tolist() == [1, 1, 2]
