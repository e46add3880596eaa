"""Random streams are independent of one another and of the order of use, and can be saved and restored."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from contextlib import nullcontext
from itertools import combinations

import numpy as np
import pytest
import torch

from p2pfl import rng
from p2pfl.rng import Streams

DRAWS = 8


def numbers(stream: np.random.Generator, count: int = DRAWS) -> list[int]:
    return [int(number) for number in stream.integers(2**62, size=count)]


def torch_numbers(streams: Streams, name: str, count: int = DRAWS) -> list[float]:
    with streams.torch(name):
        return [float(number) for number in torch.rand(count, dtype=torch.float64)]


@pytest.fixture
def global_state() -> torch.Tensor:
    torch.manual_seed(5)
    return torch.get_rng_state()


# ---- equal and different streams -------------------------------------------------------------------------------


def test_streams_with_equal_seed_peer_and_name_are_equal() -> None:
    assert numbers(Streams(1, 2).numpy("batches")) == numbers(Streams(1, 2).numpy("batches"))
    assert torch_numbers(Streams(1, 2), "model") == torch_numbers(Streams(1, 2), "model")


def test_streams_differ_by_seed_peer_and_name_and_from_shared_ones() -> None:
    drawn = [
        numbers(Streams(seed, peer).numpy(name))
        for seed in (0, 1, 2)
        for peer in (0, 1, 2)
        for name in ("a", "b", "")
    ]
    drawn += [numbers(rng.shared(seed, name, t)) for seed in (0, 1, 2) for name in ("a", "b", "") for t in (0, 1, 2)]
    assert all(set(left).isdisjoint(right) for left, right in combinations(drawn, 2))


def test_torch_streams_differ_by_seed_peer_and_name_and_from_shared_ones() -> None:
    drawn = [torch_numbers(Streams(seed, peer), name) for seed in (0, 1) for peer in (0, 1, 2) for name in ("a", "b")]
    for seed in (0, 1):
        for name in ("a", "b"):
            with rng.torch_seeded(seed, name):
                drawn.append([float(number) for number in torch.rand(DRAWS, dtype=torch.float64)])
    assert all(set(left).isdisjoint(right) for left, right in combinations(drawn, 2))


def test_a_shared_stream_depends_on_the_round() -> None:
    assert numbers(rng.shared(3, "roles", 7)) == numbers(rng.shared(3, "roles", 7))
    assert numbers(rng.shared(3, "roles", 7)) != numbers(rng.shared(3, "roles", 8))
    assert numbers(rng.shared(3, "roles")) == numbers(rng.shared(3, "roles", 0))


def test_initial_values_from_torch_seeded_are_equal_on_every_peer() -> None:
    weights = []
    for peer in range(2):
        torch_numbers(Streams(1, peer), "an earlier stream")
        with rng.torch_seeded(1, "model"):
            weights.append(torch.nn.Linear(3, 2).weight.detach())
    assert torch.equal(*weights)


# ---- order of use ----------------------------------------------------------------------


def test_drawing_from_one_stream_does_not_affect_others() -> None:
    alone, mixed = Streams(1, 2), Streams(1, 2)
    numbers(mixed.numpy("augmentation"), 100)
    torch_numbers(mixed, "dropout", 100)
    expected = numbers(alone.numpy("batches")) + numbers(alone.numpy("batches"))
    found = numbers(mixed.numpy("batches"))
    numbers(mixed.numpy("augmentation"), 3)
    torch_numbers(mixed, "batches", 3)  # a torch stream of the same name is another stream
    assert found + numbers(mixed.numpy("batches")) == expected


def test_a_stream_continues_between_uses() -> None:
    streams, reference = Streams(1, 2), Streams(1, 2)
    assert numbers(streams.numpy("a"), 3) + numbers(streams.numpy("a"), 5) == numbers(reference.numpy("a"), 8)
    assert torch_numbers(streams, "a", 3) + torch_numbers(streams, "a", 5) == torch_numbers(reference, "a", 8)


def test_a_fresh_stream_starts_over_and_is_not_saved() -> None:
    streams = Streams(1, 2)
    assert numbers(streams.fresh("a")) == numbers(streams.fresh("a")) == numbers(Streams(1, 2).numpy("a"))
    assert streams.state_dict()["numpy"] == {}


def test_torch_streams_can_be_nested() -> None:
    streams, reference = Streams(1, 2), Streams(1, 2)
    with streams.torch("outer"):
        first = torch.rand(1).item()
        inner = torch_numbers(streams, "inner")
        second = torch.rand(1).item()
    assert inner == torch_numbers(reference, "inner")
    with reference.torch("outer"):
        assert [first, second] == [torch.rand(1).item(), torch.rand(1).item()]


# ---- torch's global generator ------------------------------------------------------------------------------


def test_peers_with_a_gpu_draw_the_same_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Initial weights and augmentations must not depend on the devices of a run."""

    def draw() -> list[list[float]]:
        streams = Streams(3, 1)
        drawn = []
        for name in ("a", "b", "a"):
            with streams.torch(name):
                drawn.append(torch.rand(3).tolist())
        return drawn

    expected = draw()
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "manual_seed", seeds.append)
    monkeypatch.setattr(torch.random, "fork_rng", lambda **_: nullcontext())
    assert draw() == expected
    assert len(set(seeds)) == 3
    streams = Streams(3, 1)
    for _ in range(3):
        with streams.torch("dropout"):
            pass  # drawn on the GPU
    assert len(set(seeds[3:])) == 3


def test_the_global_generator_is_restored_after_a_block(global_state: torch.Tensor) -> None:
    torch_numbers(Streams(1, 2), "a")
    with rng.torch_seeded(1, "a"):
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), global_state)


def fail_in_stream() -> None:
    with Streams(1, 2).torch("a"):
        torch.rand(3)
        raise KeyError


def fail_in_seeded() -> None:
    with rng.torch_seeded(1, "a"):
        torch.rand(3)
        raise KeyError


@pytest.mark.parametrize("fail", [fail_in_stream, fail_in_seeded])
def test_the_global_generator_is_restored_after_an_exception(
    fail: Callable[[], None], global_state: torch.Tensor
) -> None:
    with pytest.raises(KeyError):
        fail()
    assert torch.equal(torch.get_rng_state(), global_state)


def test_a_torch_stream_is_rewound_after_an_exception() -> None:
    streams = Streams(1, 2)
    first = torch_numbers(streams, "a", 3)

    def fail() -> None:
        with streams.torch("a"):
            torch.rand(50)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert first + torch_numbers(streams, "a", 5) == torch_numbers(Streams(1, 2), "a", 8)


def test_streams_do_not_depend_on_the_global_generators() -> None:
    drawn = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)
        streams = Streams(1, 2)
        drawn.append((numbers(streams.numpy("a")), torch_numbers(streams, "a")))
    assert drawn[0] == drawn[1]


# ---- saving ------------------------------------------------------------------------------------------------


def test_streams_are_restored_from_a_saved_state() -> None:
    streams = Streams(1, 2)
    numbers(streams.numpy("a"), 5)
    torch_numbers(streams, "b", 5)
    file = io.BytesIO()
    torch.save(streams.state_dict(), file)
    file.seek(0)
    restored = Streams(1, 2)
    restored.load_state_dict(torch.load(file, weights_only=True))
    assert numbers(restored.numpy("a")) == numbers(streams.numpy("a"))
    assert torch_numbers(restored, "b") == torch_numbers(streams, "b")
    assert numbers(restored.numpy("not used before")) == numbers(Streams(1, 2).numpy("not used before"))


def test_restoring_streams_rewinds_generators_already_handed_out() -> None:
    streams = Streams(1, 2)
    handed_out = streams.numpy("a")
    state = streams.state_dict()
    expected = numbers(handed_out)
    streams.load_state_dict(state)
    assert numbers(handed_out) == expected
    assert streams.numpy("a") is handed_out


def test_streams_missing_from_the_saved_state_start_over() -> None:
    streams = Streams(1, 2)
    numbers(streams.numpy("a"))
    torch_numbers(streams, "b")
    streams.load_state_dict(Streams(1, 2).state_dict())
    assert numbers(streams.numpy("a")) == numbers(Streams(1, 2).numpy("a"))
    assert torch_numbers(streams, "b") == torch_numbers(Streams(1, 2), "b")


def test_later_draws_do_not_change_a_saved_state() -> None:
    streams = Streams(1, 2)
    first = numbers(streams.numpy("a"), 2), torch_numbers(streams, "b", 2)
    state = streams.state_dict()
    expected = numbers(streams.numpy("a")), torch_numbers(streams, "b")
    streams.load_state_dict(state)
    assert (numbers(streams.numpy("a")), torch_numbers(streams, "b")) == expected
    assert first != expected


# ---- evaluation --------------------------------------------------------------------------------------------


def drawn() -> tuple[float, ...]:
    return random.random(), float(np.random.rand()), float(np.random.normal()), float(torch.rand(()))


def test_each_evaluation_draws_the_same_from_all_global_generators() -> None:
    streams, found = Streams(1, 2), []
    for seed in (1, 2):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        with streams.evaluation():
            found.append(drawn())
        numbers(streams.numpy("a"))
        torch_numbers(streams, "b")
    with Streams(1, 2).evaluation():
        found.append(drawn())
    assert len(set(found)) == 1
    with Streams(1, 3).evaluation():
        assert not set(drawn()) & set(found[0])
    with Streams(1, 2).restarted("another"):
        assert not set(drawn()) & set(found[0])


def test_evaluations_do_not_change_other_streams_or_the_global_generators() -> None:
    streams = Streams(1, 2)
    first = torch_numbers(streams, "a", 3)
    for generator in (random.seed, np.random.seed, torch.manual_seed):
        generator(9)
    expected = random.random(), float(np.random.rand()), float(torch.rand(()))
    for generator in (random.seed, np.random.seed, torch.manual_seed):
        generator(9)
    with streams.evaluation():
        drawn()
        np.random.seed(0)  # as a library may do
    assert (random.random(), float(np.random.rand()), float(torch.rand(()))) == expected
    assert first + torch_numbers(streams, "a", 5) == torch_numbers(Streams(1, 2), "a", 8)
    assert streams.state_dict().keys() == {"numpy", "torch"}
    assert set(streams.state_dict()["torch"]) == {"a"}


def test_evaluation_within_another_starts_anew_and_lets_that_go_on() -> None:
    def uniform() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    streams = Streams(1, 2)
    with streams.evaluation():
        alone = uniform(), uniform()
    with streams.evaluation():
        first = uniform()
        with streams.evaluation():
            assert uniform() == first
        assert (first, uniform()) == alone


def test_an_error_in_an_evaluation_restores_the_generators() -> None:
    random.seed(4)
    np.random.seed(4)
    expected = random.random(), np.random.rand()
    random.seed(4)
    np.random.seed(4)
    with pytest.raises(KeyError), Streams(1, 2).evaluation():
        raise KeyError
    assert (random.random(), np.random.rand()) == expected
