"""Augmentations: per sample, repeatable, within range, and never against the label."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from p2pfl.data import AUGMENTATIONS

SHAPES = [(1, 8, 8), (1, 28, 28), (3, 32, 32)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def images(shape: tuple[int, int, int], batch: int = 32) -> torch.Tensor:
    return torch.rand(batch, *shape, generator=torch.Generator().manual_seed(0))


def augment(name: str, batch: torch.Tensor, seed: int = 0, mirror: bool = True) -> torch.Tensor:
    _, channels, height, width = batch.shape
    apply = AUGMENTATIONS[name]().build(channels, (height, width), mirror)
    torch.manual_seed(seed)
    return apply(batch)


@pytest.mark.parametrize("name", list(AUGMENTATIONS))
@pytest.mark.parametrize("shape", SHAPES)
def test_images_stay_images(name: str, shape: tuple[int, int, int]) -> None:
    batch = images(shape)
    before = batch.clone()
    result = augment(name, batch)
    assert (result.shape, result.dtype) == (batch.shape, batch.dtype)
    assert result.min() >= 0
    assert result.max() <= 1 + 1e-6
    assert torch.equal(batch, before)
    assert not result.requires_grad


@pytest.mark.parametrize("name", list(AUGMENTATIONS))
@pytest.mark.parametrize("shape", SHAPES)
def test_the_global_rng_decides_every_bit(name: str, shape: tuple[int, int, int]) -> None:
    batch = images(shape)
    first, again = augment(name, batch, seed=1), augment(name, batch, seed=1)
    assert torch.equal(first, again)
    if name != "none":
        assert not torch.equal(first, augment(name, batch, seed=2))


def test_a_recipe_keeps_no_state_of_its_own() -> None:
    """The second of two calls depends on the state of the RNG before it, not on the first call."""
    apply = AUGMENTATIONS["mapl"]().build(3, (16, 16), True)
    batch = images((3, 16, 16))
    torch.manual_seed(0)
    apply(batch)
    position = torch.get_rng_state()
    second = apply(batch[:5])
    torch.set_rng_state(position)
    assert torch.equal(second, AUGMENTATIONS["mapl"]().build(3, (16, 16), True)(batch[:5]))


@pytest.mark.parametrize("shape", SHAPES)
def test_equal_samples_get_different_views(shape: tuple[int, int, int]) -> None:
    twins = images(shape, batch=1).repeat(16, 1, 1, 1)
    different = len({view.numpy().tobytes() for view in augment("mapl", twins)})
    assert different >= 12  # crops are of whole pixels, so at 8x8 two may coincide


def test_without_mirror_nothing_is_flipped() -> None:
    """Brightness that grows to the right still does so after any crop and blur, but not after a flip."""
    ramp = torch.linspace(0, 1, 16).expand(64, 1, 16, 16)
    for mirror in (False, True):
        views = augment("mapl", ramp, mirror=mirror)
        falling = (views[..., -1] < views[..., 0]).all(dim=(1, 2))
        assert falling.any() == mirror


def test_grey_images_keep_their_brightness() -> None:
    flat = torch.full((64, 1, 16, 16), 0.6)
    torch.testing.assert_close(augment("mapl", flat), flat)


def test_colours_change_and_sometimes_go() -> None:
    flat = torch.tensor([0.8, 0.4, 0.2]).reshape(1, 3, 1, 1).expand(64, 3, 16, 16)
    pixels = augment("mapl", flat)[:, :, 8, 8]
    grey = (pixels - pixels[:, :1]).abs().amax(dim=1) < 1e-5
    assert 0 < grey.sum() < 64
    assert len(set(map(tuple, pixels.tolist()))) > 32
