"""FedStyle's style extraction against its paper: Sobel's edges, the style loss, style net and generator."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import ndimage
from torch import Tensor

from p2pfl.algorithms.fedstyle_extraction import sobel, style_loss
from p2pfl.tensors import digest
from tests.fedstyle_reference import ALONE, FEATURES, hyper, make
from tests.support import run_rounds

property_of = settings(deadline=None, max_examples=15)

# ---- Sobel ---------------------------------------------------------------------------------------------------


def bytes_of(rows: Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.uint8)[None, None]


def test_sobel_of_a_step_marks_both_sides() -> None:
    step = bytes_of([[10, 10, 90, 90]] * 4)
    # G_x is 4·80 in both columns beside the step and 0 elsewhere; the range stays 10 … 90.
    assert sobel(step)[0, 0].tolist() == [[10, 90, 90, 10]] * 4
    assert sobel(step.mT)[0, 0].tolist() == [[10] * 4, [90] * 4, [90] * 4, [10] * 4]


def test_sobel_of_a_dot_is_a_ring() -> None:
    found = sobel(bytes_of([[0] * 5, [0] * 5, [0, 0, 100, 0, 0], [0] * 5, [0] * 5]))[0, 0]
    # Around the dot: √(2² + 0²) above, below and beside it, √(1² + 1²) at its corners, in units of 100; 0 on it.
    corner = round(100 * math.sqrt(2) / 2)
    assert found.tolist() == [
        [0, 0, 0, 0, 0],
        [0, corner, 100, corner, 0],
        [0, 100, 0, 100, 0],
        [0, corner, 100, corner, 0],
        [0, 0, 0, 0, 0],
    ]


def test_sobel_of_a_constant_image_is_constant() -> None:
    assert sobel(bytes_of([[77] * 3] * 3)).flatten().tolist() == [77] * 9


images = st.tuples(
    st.integers(1, 3), st.sampled_from([1, 3]), st.integers(2, 7), st.integers(2, 7), st.integers(0, 999)
)


def random_images(shape: tuple[int, int, int, int, int]) -> Tensor:
    *size, seed = shape
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, size=size, dtype=np.uint8))


@property_of
@given(images)
def test_sobel_matches_scipy_in_the_range_of_the_image(shape: tuple[int, int, int, int, int]) -> None:
    batch = random_images(shape)
    for image, found in zip(batch.double().numpy(), sobel(batch).numpy(), strict=True):
        strength = np.stack(
            [np.hypot(*(ndimage.sobel(channel, axis, mode="nearest") for axis in (0, 1))) for channel in image]
        )
        expected = image.min() + np.ptp(image) * strength / max(strength.max(), 1.0)
        assert found.dtype == np.uint8
        np.testing.assert_allclose(found, expected, atol=0.501)


@property_of
@given(images)
def test_sobel_commutes_with_rotation_brightness_and_negation(shape: tuple[int, int, int, int, int]) -> None:
    batch = random_images(shape) // 2
    edges = sobel(batch).int()
    darkest, brightest = (extreme((1, 2, 3), keepdim=True).int() for extreme in (batch.amin, batch.amax))
    for found, expected in (
        (sobel(batch.rot90(dims=(2, 3))), edges.rot90(dims=(2, 3))),
        (sobel(batch + 100), edges + 100),
        (sobel(255 - batch), 255 - brightest + edges - darkest),
    ):
        torch.testing.assert_close(found.int(), expected, atol=1, rtol=0)  # halves round to even numbers


# ---- losses --------------------------------------------------------------------------------------------------

projections = st.tuples(st.integers(2, 6), st.integers(2, 5), st.integers(0, 2**32 - 1), st.sampled_from([0.07, 0.5]))


def random_projections(size: int, width: int, seed: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(2 * size, width)))


def probability(z: NDArray[np.float64], i: int, j: int, temperature: float) -> float:
    """exp(cos(z_i, z_j)/τ) / Σ_{n≠i} exp(cos(z_i, z_n)/τ)."""
    z = z / np.linalg.norm(z, axis=1, keepdims=True)
    scores = [math.exp(float(z[i] @ z[n]) / temperature) for n in range(len(z)) if n != i]
    return math.exp(float(z[i] @ z[j]) / temperature) / sum(scores)


@property_of
@given(projections)
def test_style_loss_is_equation_2_up_to_a_constant(drawn: tuple[int, int, int, float]) -> None:
    size, width, seed, temperature = drawn
    z = random_projections(size, width, seed)
    style = [0] * size + [1] * size
    equation = sum(
        -math.log(probability(z.numpy(), i, j, temperature)) / (2 * size - 1)
        for i in range(2 * size)
        for j in range(2 * size)
        if i != j and style[i] == style[j]
    )
    constant = 2 * size * (size - 1) / (2 * size - 1)
    assert constant * float(style_loss(z, temperature)) == pytest.approx(equation, rel=1e-9)


# ---- style net and generator ---------------------------------------------------------------------------------


def test_style_net_is_trained_in_round_0_and_then_frozen() -> None:
    (peer,) = make(hyper(), 1, kind="normalised")
    network, seen = peer.infusion.style_net, [digest(peer.infusion.style_net.state_dict())]
    modes: list[bool] = []
    network.register_forward_hook(lambda module, *_: modes.append(module.training))
    run_rounds([peer], ALONE, 3, after=lambda *_: seen.append(digest(network.state_dict())))
    assert seen[0] != seen[1] == seen[2] == seen[3]
    assert modes == [True] * 2 + [False] * 2 * 3  # epochs of one batch
    assert not any(parameter.requires_grad for parameter in network.parameters())


@pytest.mark.parametrize("trained", [False, True])
def test_generator_is_trained_only_with_train_generator(trained: bool) -> None:
    (peer,) = make(hyper(train_generator=trained), 1)
    before = digest(peer.infusion.generator.state_dict())
    run_rounds([peer], ALONE, 1)
    assert (digest(peer.infusion.generator.state_dict()) != before) == trained


def test_style_net_gets_images_and_edges_and_content_net_gets_views() -> None:
    (peer,) = make(hyper(), 1)
    images, _ = peer.data.train.take(np.arange(4))
    x = peer.inputs(images)
    plain = images / 255.0
    torch.testing.assert_close(x, torch.cat([plain, plain * 0.6, plain, sobel(images) / 255.0]))
    seen: dict[str, Tensor] = {}
    for name, module in (("content", peer.content.backbone), ("style", peer.infusion.style_net)):
        module.register_forward_hook(lambda module, given, out, name=name: seen.update({name: given[0]}))
    peer.loss(x, torch.zeros(16))
    assert torch.equal(seen["content"], x[:8])
    assert torch.equal(seen["style"], x[8:])


def test_infusion_pairs_content_and_style_features() -> None:
    (peer,) = make(hyper(), 1)
    content, style = torch.randn(4, FEATURES), torch.randn(4, FEATURES)
    infused = peer.infusion(content, style)
    torch.testing.assert_close(infused[3], peer.infusion.generator(torch.cat([content[3], style[3]])))
