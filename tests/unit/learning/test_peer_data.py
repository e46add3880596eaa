"""Batches, selections of samples, styles, and their conversion to network input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pfl.data import Dataset, Split, Subset
from p2pfl.errors import RunFileError
from p2pfl.learning.peer_data import PeerData, Samples
from p2pfl.run_file.run import Run
from p2pfl.session.build import load_data
from tests.support import CPU, no_augmentation, numbered_dataset, peer_data, random_dataset, sample_numbers


def stream(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@settings(deadline=None, max_examples=50)
@given(samples=st.integers(0, 400), size=st.integers(2, 64), seed=st.integers(0, 2**32 - 1))
def test_epoch_visits_each_sample_once_except_a_final_batch_of_one(samples: int, size: int, seed: int) -> None:
    local = np.arange(1, 1 + 2 * samples, 2)
    data = peer_data(numbered_dataset(1 + 2 * samples), local)
    batches = list(data.batches(size, stream(seed)))
    visited = [number for images, _ in batches for number in sample_numbers(images)]
    dropped = samples % size == 1 and samples > 1
    assert len(visited) == samples - dropped
    assert len(set(visited)) == len(visited)
    assert set(visited) <= set(local.tolist())
    assert all(len(images) == size for images, _ in batches[:-1])
    assert [int(label) for _, labels in batches for label in labels] == [number % 3 for number in visited]
    if samples > 1:
        assert all(len(images) > 1 for images, _ in batches)


@pytest.mark.parametrize("drop_last", [False, True])
def test_epoch_in_batches_of_one_visits_each_sample_once(drop_last: bool) -> None:
    batches = peer_data(numbered_dataset(5)).batches(1, stream(), drop_last=drop_last)
    assert sorted(number for images, _ in batches for number in sample_numbers(images)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("samples", "kept", "whole"),
    [(0, [], []), (1, [1], [1]), (3, [3], [3]), (4, [4], [4]), (5, [4], [4]), (6, [4, 2], [4]), (8, [4, 4], [4, 4])],
)
def test_drop_last_leaves_batches_of_equal_size_or_a_single_one(
    samples: int, kept: list[int], whole: list[int]
) -> None:
    data = peer_data(numbered_dataset(8), range(samples))
    for drop_last, expected in ((False, kept), (True, whole)):
        batches = data.batches(4, stream(), drop_last=drop_last)
        assert [len(images) for images, _ in batches] == expected
        assert data.batch_count(4, drop_last=drop_last) == len(expected)


def test_single_sample_is_trained_on() -> None:
    ((images, labels),) = peer_data(numbered_dataset(5), [4]).batches(64, stream())
    assert (sample_numbers(images), labels.tolist()) == ([4], [1])


def test_order_of_batches_is_random_and_determined_by_the_stream() -> None:
    data = peer_data(numbered_dataset(50))
    order = stream()
    first, second = ([sample_numbers(images) for images, _ in data.batches(8, order)] for _ in range(2))
    assert first != second
    assert first == [sample_numbers(images) for images, _ in data.batches(8, stream())]
    assert [number for batch in first for number in batch] != list(range(50))


def test_batches_are_uint8_images_and_int64_labels() -> None:
    images, labels = next(iter(peer_data(numbered_dataset(5)).batches(4, stream())))
    assert (images.dtype, images.shape) == (torch.uint8, (4, 1, 1, 2))
    assert (labels.dtype, labels.shape) == (torch.int64, (4,))


def test_input_is_normalized_by_channel_and_augmented_on_request() -> None:
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


def test_peer_has_its_subset_of_each_split_and_the_classes_in_it() -> None:
    dataset = random_dataset(9, classes=5, tests=6)
    data = peer_data(dataset, [0, 5, 3], test=[1, 2])
    assert data.local_classes == (0, 3)
    assert data.classes == 5
    assert data.train.labels.tolist() == [0, 0, 3]
    assert (len(data.train), len(data.validation), len(data.test), len(data.global_test)) == (3, 0, 2, 6)
    assert peer_data(dataset, []).local_classes == ()


def test_merged_subset_selects_samples_of_both_splits() -> None:
    dataset = random_dataset(9, classes=5, tests=6)
    subset = Subset(np.array([0, 8, 9, 14]), np.array([3, 10]), np.array([1, 11]), merged=True)
    data = PeerData(dataset, subset, no_augmentation, CPU)
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


def test_global_test_is_rejected_where_peers_train_on_the_test_set(make_run: Callable[..., Run]) -> None:
    partition = {"name": "dirichlet"}
    load_data(make_run(data={"partition": partition}))
    with pytest.raises(RunFileError, match=r"dirichlet.*global_test"):
        load_data(make_run(data={"partition": partition}, global_test=True))


def test_samples_are_taken_by_position_within_the_selection() -> None:
    samples = Samples(numbered_dataset(300).train, np.array([7, 256, 299]))
    images, labels = samples.take(np.array([2, 0]))
    assert sample_numbers(images) == [299, 7]
    assert labels.tolist() == [299 % 3, 7 % 3]
    assert samples.labels.tolist() == [1, 1, 2]


def test_style_holds_all_its_samples_over_all_peers() -> None:
    dataset = numbered_dataset(12)
    split = Split(dataset.train.images, dataset.train.labels, np.arange(12) % 2)
    data = peer_data(replace(dataset, train=split, test=split), [0], [1])
    assert [style.train.indices.tolist() for style in data.styles] == [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11]]
    for style in data.styles:
        assert sample_numbers(style.test.take(np.arange(6))[0]) == style.train.indices.tolist()


def test_dataset_without_styles_counts_as_one_style() -> None:
    (style,) = peer_data(numbered_dataset(5), [1], [2]).styles
    assert (len(style.train), len(style.test)) == (5, 5)


def test_merged_subset_has_no_styles_to_evaluate() -> None:
    subset = Subset(np.array([0]), np.array([], np.int64), np.array([7]), merged=True)
    assert PeerData(numbered_dataset(5), subset, no_augmentation, CPU).styles == ()


def test_a_test_set_is_known_by_its_content_not_by_its_place() -> None:
    dataset = random_dataset(40, classes=4, tests=20)
    moved = replace(dataset, name="elsewhere", test=Split(dataset.test.images[10:], dataset.test.labels[10:]))
    relabeled = replace(dataset, test=Split(dataset.test.images, (dataset.test.labels + 1) % 4))

    def tested(data: Dataset, test: range, train: range = range(40)) -> tuple[str, str]:
        subset = Subset(np.array(train), np.array([], np.int64), np.array(test))
        found = PeerData(data, subset, no_augmentation, CPU).tested_on
        return found.samples, found.classes

    assert tested(dataset, range(10, 14)) == tested(moved, range(4))
    assert tested(dataset, range(10, 14))[0] != tested(moved, range(1, 5))[0]
    assert tested(dataset, range(10, 14))[0] != tested(relabeled, range(10, 14))[0]
    one = range(int(np.flatnonzero(dataset.train.labels != dataset.test.labels[0])[0]), 40, 40)
    assert tested(dataset, range(1), one)[0] == tested(dataset, range(1))[0]
    assert tested(dataset, range(1), one)[1] != tested(dataset, range(1))[1]  # the classes that it knows
    assert tested(dataset, range(0)) == ("", "")
