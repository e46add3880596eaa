"""Augmentations: drawn per sample, reproducible, within range."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.v2 import functional as F

from p2pfl.data import AUGMENTATIONS, colors, transforms
from p2pfl.options import OptionErrors

Adjust = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
AdjustOne = Callable[[torch.Tensor, float], torch.Tensor]

VARYING = [name for name in AUGMENTATIONS if name != "none"]
COLORED = [name for name in VARYING if name != "crop-flip"]
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
def test_output_has_the_shape_and_range_of_images(name: str, shape: tuple[int, int, int]) -> None:
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
def test_global_rng_determines_the_output(name: str, shape: tuple[int, int, int]) -> None:
    batch = images(shape)
    first, again = augment(name, batch, seed=1), augment(name, batch, seed=1)
    assert torch.equal(first, again)
    if name != "none":
        assert not torch.equal(first, augment(name, batch, seed=2))


@pytest.mark.parametrize("name", VARYING)
def test_augmentation_keeps_no_state(name: str) -> None:
    """The second of two calls depends on the state of the RNG only, not on the first call."""
    apply = AUGMENTATIONS[name]().build(3, (16, 16), True)
    batch = images((3, 16, 16))
    torch.manual_seed(0)
    apply(batch)
    position = torch.get_rng_state()
    second = apply(batch[:5])
    torch.set_rng_state(position)
    assert torch.equal(second, AUGMENTATIONS[name]().build(3, (16, 16), True)(batch[:5]))


@pytest.mark.parametrize("name", VARYING)
@pytest.mark.parametrize("shape", SHAPES)
def test_equal_samples_get_different_views(name: str, shape: tuple[int, int, int]) -> None:
    twins = images(shape, batch=1).repeat(16, 1, 1, 1)
    different = len({view.numpy().tobytes() for view in augment(name, twins)})
    assert different >= 12  # crops are whole pixels, so two may coincide at 8x8


@pytest.mark.parametrize("name", COLORED)
def test_images_are_flipped_only_if_mirror_is_set(name: str) -> None:
    """A brightness that increases to the right still does after crops and blur, but not after a flip."""
    ramp = torch.linspace(0, 1, 16).expand(64, 1, 16, 16)
    for mirror in (False, True):
        views = augment(name, ramp, mirror=mirror)
        falling = (views[..., -1] < views[..., 0]).all(dim=(1, 2))
        assert falling.any() == mirror


@pytest.mark.parametrize("name", COLORED)
def test_brightness_of_most_grayscale_images_changes(name: str) -> None:
    flat = torch.full((256, 1, 16, 16), 0.6)
    views = augment(name, flat)
    torch.testing.assert_close(views, views[..., :1, :1].expand_as(views))  # contrast has no effect on them
    brightness = views[:, 0, 0, 0] / 0.6
    changed = (brightness - 1).abs() > 1e-5
    assert 180 < changed.sum() < 230  # four fifths
    assert 0.6 - 1e-5 < brightness.min() < 0.65 < 1.35 < brightness.max() < 1.4 + 1e-5


@pytest.mark.parametrize("name", COLORED)
def test_colors_change_and_some_images_become_gray(name: str) -> None:
    flat = torch.tensor([0.8, 0.4, 0.2]).reshape(1, 3, 1, 1).expand(64, 3, 16, 16)
    pixels = augment(name, flat)[:, :, 8, 8]
    gray = (pixels - pixels[:, :1]).abs().amax(dim=1) < 1e-5
    assert 0 < gray.sum() < 64
    assert len(set(map(tuple, pixels.tolist()))) > 32


@pytest.mark.parametrize("mirror", [False, True])
def test_crops_are_windows_of_the_padded_image_and_half_are_flipped(mirror: bool) -> None:
    batch = images((3, 8, 9), batch=64) + 0.1
    views = AUGMENTATIONS["crop-flip"].parse({"margin": 2}).build(3, (8, 9), mirror)(batch)
    padded = torch.nn.functional.pad(batch, [2, 2, 2, 2])
    shifts, flips = set(), 0
    for view, image in zip(views, padded, strict=True):
        windows = {(y, x): image[:, y : y + 8, x : x + 9] for y in range(5) for x in range(5)}
        found = [
            (at, flip)
            for at, crop in windows.items()
            for flip in (0, 1)
            if view.equal(crop.flip(2) if flip else crop)
        ]
        ((shift, flipped),) = found
        shifts.add(shift)
        flips += flipped
    assert len(shifts) > 15
    assert 20 < flips < 44 if mirror else flips == 0


def steps(name: str, channels: int, mirror: bool, **options: object) -> list[nn.Module]:
    recipe = AUGMENTATIONS[name].parse(options).build(channels, (64, 96), mirror)
    assert isinstance(recipe, nn.Sequential)
    return list(recipe)


def test_recipes_have_the_steps_of_their_papers() -> None:
    crop, jitter, gray, blur, flip = (
        transforms.RandomResizedCrop,
        colors.ColorJitter,
        colors.RandomGrayscale,
        transforms.RandomBlur,
        transforms.RandomFlip,
    )
    mapl, simclr = steps("mapl", 3, True), steps("simclr", 3, True, blur=True, strength=1.0)
    assert [type(step) for step in mapl] == [type(step) for step in simclr] == [crop, jitter, gray, blur, flip]
    assert isinstance(mapl[0], crop)
    assert isinstance(simclr[0], crop)
    assert (mapl[0].smallest, simclr[0].smallest) == (0.2, 0.08)
    assert isinstance(mapl[1], jitter)
    assert isinstance(simclr[1], jitter)
    torch.testing.assert_close(mapl[1].ranges, torch.tensor([0.4, 0.4, 0.4, 0.1]))
    torch.testing.assert_close(simclr[1].ranges, torch.tensor([0.8, 0.8, 0.8, 0.2]))
    assert mapl[1].p == simclr[1].p == 0.8
    assert isinstance(mapl[3], blur)
    assert mapl[3].size == 7  # the odd number nearest to a tenth of 64
    assert [type(step) for step in steps("mapl", 3, True, no_blur=True)] == [crop, jitter, gray, flip]
    assert [type(step) for step in steps("mapl", 1, False)] == [crop, jitter, blur]
    assert [type(step) for step in steps("simclr", 1, False)] == [crop, jitter]


def test_simclr_crops_smaller_than_mapl() -> None:
    """Smaller crops of a ramp have a smaller difference between their ends."""
    ramp = torch.linspace(0, 1, 32).expand(256, 1, 32, 32)

    def narrowest(name: str) -> float:
        views = augment(name, ramp)
        return float((views[..., -1] - views[..., 0]).abs().mean(dim=(1, 2)).min())

    assert narrowest("simclr") < narrowest("mapl") - 0.05


def test_strength_is_at_most_1() -> None:
    with pytest.raises(OptionErrors, match="strength: should be less than or equal to 1"):
        AUGMENTATIONS["simclr"].parse({"strength": 1.5})


@pytest.mark.parametrize("name", list(AUGMENTATIONS))
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 1, 7), (3, 2, 2)])
def test_single_images_get_views(name: str, shape: tuple[int, int, int]) -> None:
    """Often no image of the batch is chosen for a change."""
    for seed in range(30):
        view = augment(name, images(shape, batch=1), seed)
        assert view.shape[1:] == shape
        assert view.isfinite().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; scripts/check-gpu runs it")
@pytest.mark.parametrize("name", list(AUGMENTATIONS))
@pytest.mark.parametrize("batch", [1, 32])
def test_views_do_not_depend_on_the_device(name: str, batch: int) -> None:
    for shape in SHAPES:
        for seed in range(5):
            pictures = images(shape, batch)
            on_gpu = augment(name, pictures.cuda(), seed)
            assert on_gpu.is_cuda
            torch.testing.assert_close(on_gpu.cpu(), augment(name, pictures, seed), atol=1e-5, rtol=0)


# ---- transforms ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [*SHAPES, (3, 5, 9)])
def test_crops_are_torchvisions(shape: tuple[int, int, int]) -> None:
    size = shape[1:]
    batch = images(shape, batch=64)
    torch.manual_seed(0)
    boxes = transforms.RandomResizedCrop(0.08).draw(64, size)
    boxes[0] = torch.tensor([0, 0, *size])
    boxes[1] = torch.tensor([size[0] - 1, size[1] - 1, 1, 1])
    expected = [F.resized_crop(image, *box.tolist(), list(size)) for image, box in zip(batch, boxes, strict=True)]
    resized = transforms.resize_crops(batch, boxes)
    torch.testing.assert_close(resized, torch.stack(expected), atol=1e-5, rtol=0)
    torch.testing.assert_close(resized[0], batch[0], atol=1e-5, rtol=0)


@pytest.mark.exhaustive
def test_boxes_are_distributed_as_torchvisions() -> None:
    size = (24, 16)
    image, scale, ratio = torch.zeros(1, *size), [0.2, 1.0], [3 / 4, 4 / 3]
    torch.manual_seed(0)
    drawn = [RandomResizedCrop.get_params(image, scale, ratio) for _ in range(4000)]
    expected = torch.tensor(drawn).double()
    found = transforms.RandomResizedCrop(0.2).draw(4000, size).double()
    assert ((found.mean(0) - expected.mean(0)).abs() < 0.1 * expected.std(0)).all()
    assert ((found.std(0) / expected.std(0) - 1).abs() < 0.05).all()
    torch.testing.assert_close(found.T.corrcoef(), expected.T.corrcoef(), atol=0.08, rtol=0)
    for column, side in ((2, 24), (3, 16)):
        assert abs((found[:, column] == side).double().mean() - (expected[:, column] == side).double().mean()) < 0.02
    assert (found[:, :2] >= 0).all()
    assert (found[:, :2] + found[:, 2:] <= torch.tensor(size)).all()


@pytest.mark.parametrize(
    ("size", "box"), [((4, 40), (0, 17, 4, 5)), ((40, 6), (16, 0, 8, 6)), ((9, 9), (0, 0, 9, 9))]
)
def test_where_no_box_fits_the_largest_in_the_middle_is_taken(
    size: tuple[int, int], box: tuple[int, int, int, int]
) -> None:
    boxes = transforms.RandomResizedCrop(0.9999).draw(200, size)
    assert set(map(tuple, boxes.tolist())) == {box}


@pytest.mark.parametrize(("shape", "kernel"), [((1, 28, 28), 3), ((3, 32, 32), 3), ((3, 9, 12), 5)])
def test_blur_is_torchvisions(shape: tuple[int, int, int], kernel: int) -> None:
    batch = images(shape, batch=16)
    sigmas = torch.linspace(0.1, 2.0, 16)
    expected = [
        F.gaussian_blur(image, [kernel, kernel], [sigma, sigma])
        for image, sigma in zip(batch, sigmas.tolist(), strict=True)
    ]
    torch.testing.assert_close(transforms.blur(batch, sigmas, kernel), torch.stack(expected), atol=1e-5, rtol=0)


def test_half_of_the_images_are_blurred_each_with_its_sigma(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = images((3, 8, 8), batch=256)
    called: list[tuple[torch.Tensor, torch.Tensor, int]] = []

    def spy(chosen: torch.Tensor, sigmas: torch.Tensor, size: int) -> torch.Tensor:
        called.append((chosen, sigmas, size))
        return chosen + 1.0

    monkeypatch.setattr(transforms, "blur", spy)
    torch.manual_seed(0)
    changed = transforms.RandomBlur(5)(batch)
    ((chosen, sigmas, size),) = called
    assert 96 < len(chosen) == len(sigmas) < 160
    assert size == 5
    assert 0.1 <= sigmas.min() < 0.2
    assert 1.9 < sigmas.max() <= 2.0
    blurred = (changed != batch).any(dim=(1, 2, 3))
    assert chosen.equal(batch[blurred])
    assert changed[blurred].equal(batch[blurred] + 1.0)


def test_half_of_the_images_are_flipped() -> None:
    batch = images((3, 8, 8), batch=256)
    torch.manual_seed(0)
    changed = transforms.RandomFlip()(batch)
    same = (changed == batch).all(dim=(1, 2, 3))
    assert 96 < same.sum() < 160
    assert changed[~same].equal(batch[~same].flip(3))


def test_a_fifth_of_the_images_become_gray() -> None:
    batch = images((3, 8, 8), batch=256)
    torch.manual_seed(0)
    changed = colors.RandomGrayscale()(batch)
    same = (changed == batch).all(dim=(1, 2, 3))
    assert 30 < (~same).sum() < 75
    expected = F.rgb_to_grayscale(batch[~same], num_output_channels=3)
    torch.testing.assert_close(changed[~same], expected, atol=1e-3, rtol=0)


# ---- colors ----------------------------------------------------------------------------------------------------


def colorful() -> torch.Tensor:
    """Noise; the first four images have saturated colors only, the next two are black and gray."""
    batch = images((3, 8, 8), batch=32)
    batch[:4] = batch[:4].round()
    batch[4] = 0.0
    batch[5] = 0.5
    return batch


def factors(low: float, high: float) -> torch.Tensor:
    return low + (high - low) * torch.rand(32, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("ours", "reference"),
    [
        (colors.scale_brightness, F.adjust_brightness),
        (colors.scale_contrast, F.adjust_contrast),
        (colors.scale_saturation, F.adjust_saturation),
    ],
)
def test_brightness_contrast_and_saturation_are_torchvisions(
    ours: Adjust, reference: AdjustOne, channels: int
) -> None:
    amount, batch = factors(0.2, 1.8), colorful()[:, :channels]
    changed = ours(batch, amount.reshape(-1, 1, 1, 1))
    expected = [reference(image, float(factor)) for image, factor in zip(batch, amount, strict=True)]
    torch.testing.assert_close(changed, torch.stack(expected), atol=1e-3, rtol=0)


def test_hue_is_torchvisions() -> None:
    turn, batch = factors(-0.5, 0.5), colorful()
    turned = colors.turn_hue(batch, turn.reshape(-1, 1, 1, 1))
    expected = [F.adjust_hue(image, float(part)) for image, part in zip(batch, turn, strict=True)]
    torch.testing.assert_close(turned, torch.stack(expected), atol=1e-5, rtol=0)


def test_third_of_a_turn_changes_red_to_green() -> None:
    red = torch.tensor([1.0, 0.0, 0.0]).reshape(1, 3, 1, 1)
    green = colors.turn_hue(red, torch.full((1, 1, 1, 1), 1 / 3))
    torch.testing.assert_close(green, red.roll(1, dims=1), atol=1e-6, rtol=0)


def test_jitter_leaves_unselected_samples_unchanged() -> None:
    torch.manual_seed(0)
    batch = colorful().repeat(8, 1, 1, 1)
    same = (colors.ColorJitter(0.4, 0.4, 0.4, 0.1, p=0.8)(batch) == batch).all(dim=(1, 2, 3))
    assert 20 < same[torch.arange(256) % 32 > 5].sum() < 70  # a fifth of 208
    assert torch.equal(colors.ColorJitter(0.4, 0.4, 0.4, 0.1, p=0.0)(batch), batch)


def test_jitter_changes_each_chosen_sample_by_the_amounts_drawn_for_it() -> None:
    """Brightness of flat images: the drawn factor, if the saturation and the contrast stay 1."""
    levels = torch.linspace(0.3, 0.6, 64).reshape(64, 1, 1, 1)
    torch.manual_seed(3)
    changed = colors.ColorJitter(0.4, 0.0, 0.0, 0.0, p=0.5)(levels.expand(64, 1, 4, 4))[:, 0, 0, 0]
    torch.manual_seed(3)
    chosen = torch.rand(64) < 0.5
    factor = 1.0 + 0.4 * (2.0 * torch.rand(64, 4) - 1.0)[:, 0]
    torch.testing.assert_close(changed, torch.where(chosen, factor, 1.0) * levels.flatten())


def test_order_of_color_changes_varies_between_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("scale_brightness", "scale_contrast", "scale_saturation", "turn_hue")
    called: list[str] = []
    for name in names:

        def record(x: torch.Tensor, amount: torch.Tensor, name: str = name) -> torch.Tensor:
            called.append(name)
            return x

        monkeypatch.setattr(colors, name, record)
    orders = set()
    for seed in range(60):
        called.clear()
        torch.manual_seed(seed)
        colors.ColorJitter(0.4, 0.4, 0.4, 0.1, p=0.8)(images((3, 4, 4)))
        assert sorted(called) == sorted(names)
        orders.add(tuple(called))
    assert len(orders) > 15
