"""meta-L2C's encoder against its paper: its input, codes and attention in numpy, its gradient by autograd."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from p2pfl.algorithms.l2c import directional_derivative, validation_gradient
from p2pfl.algorithms.meta_l2c import direction
from p2pfl.algorithms.meta_l2c_encoder import Encoder, attention, backward, channels_of
from p2pfl.tensors import assign, clone, parameters_of
from tests.l2c_peers import aggregated
from tests.meta_l2c_peers import (
    CLASSES,
    CODE,
    ENCODER,
    FEATURES,
    HIDDEN,
    INPUTS,
    SHAPES,
    WIDTH,
    data_of,
    random_change,
    random_encoder,
)
from tests.support import linear_model

# ---- the input: line 11 --------------------------------------------------------------------------------------


def test_change_is_scaled_as_a_whole_to_norm_1() -> None:
    generator = torch.Generator().manual_seed(0)
    initial, now = random_change(generator), random_change(generator)
    found = direction(now, initial)
    norm = math.sqrt(sum(float(((now[name] - initial[name]).double() ** 2).sum()) for name in SHAPES))
    for name in SHAPES:
        torch.testing.assert_close(found[name], (now[name] - initial[name]) / norm)
    assert sum(float(tensor.square().sum()) for tensor in found.values()) == pytest.approx(1.0, abs=1e-6)


def test_direction_of_no_change_is_zero() -> None:
    found = direction({"x": torch.ones(3)}, {"x": torch.ones(3)})
    assert found["x"].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_direction_of_tiny_and_huge_changes(scale: float) -> None:
    found = direction({"x": torch.tensor([3.0 * scale, 4.0 * scale])}, {"x": torch.zeros(2)})
    assert found["x"].tolist() == pytest.approx([0.6, 0.8])


# ---- codes and attention: Eqs. 4, 5, 7, 8 --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "expected"), [((6, 3, 5, 5), (6, 75)), ((4, 9), (4, 9)), ((7,), (7, 1)), ((), (1, 1)), ((2, 0), (2, 0))]
)
def test_channels_are_rows_per_output(shape: tuple[int, ...], expected: tuple[int, int]) -> None:
    tensor = torch.arange(float(math.prod(shape))).reshape(shape)
    if 0 in shape:
        assert tensor.numel() == 0
        return
    assert channels_of(tensor).shape == expected
    assert channels_of(tensor).flatten().tolist() == tensor.flatten().tolist()


def expected_code(encoder: Encoder, change: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """E_l(Δ̂), [C_l, width], of each layer l."""
    parameters = {name: tensor.detach().double().numpy() for name, tensor in encoder.named_parameters()}
    codes = {}
    for name, tensor in change.items():
        key = "layers." + name.replace(".", "/")
        x = tensor.double().numpy().reshape(len(tensor), -1)
        hidden = np.tanh(x @ parameters[f"{key}.0.weight"].T + parameters[f"{key}.0.bias"])
        codes[name] = np.tanh(hidden @ parameters[f"{key}.2.weight"].T + parameters[f"{key}.2.bias"])
    return codes


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 2**32 - 1))
def test_inner_product_of_codes_sums_over_layers_and_channels(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    encoder = random_encoder(seed % 1000)
    one, other = random_change(generator), random_change(generator)
    with torch.no_grad():
        codes = encoder(one), encoder(other)
    assert codes[0].shape == (encoder.length,) == (CODE,)
    by_hand = expected_code(encoder, one), expected_code(encoder, other)
    products = {name: float((by_hand[0][name] * by_hand[1][name]).sum()) for name in SHAPES}
    assert float(codes[0] @ codes[1]) == pytest.approx(sum(products.values()), abs=1e-4)
    encoder.mean = True
    with torch.no_grad():
        codes = encoder(one), encoder(other)
    expected = np.mean([products[name] / SHAPES[name][0] for name in SHAPES])
    assert float(codes[0] @ codes[1]) == pytest.approx(expected, abs=1e-5)


def test_code_is_independent_of_tensor_order() -> None:
    change = random_change(torch.Generator().manual_seed(0))
    encoder = random_encoder(0)
    assert torch.equal(encoder(change), encoder(dict(reversed(change.items()))))


def test_encoder_size_is_independent_of_classes_and_channels() -> None:
    encoder = random_encoder(0)
    assert sum(parameter.numel() for parameter in encoder.parameters()) == ENCODER
    more_classes = Encoder(parameters_of(linear_model(INPUTS, FEATURES, 100)), HIDDEN, WIDTH)
    assert {name: tensor.shape for name, tensor in more_classes.state_dict().items()} == {
        name: tensor.shape for name, tensor in encoder.state_dict().items()
    }


@settings(deadline=None, max_examples=15)
@given(st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_attention_is_softmax_of_inner_products(peers: int, seed: int) -> None:
    stream = np.random.default_rng(seed)
    ids = sorted(int(j) for j in stream.permutation(10)[:peers])
    codes = {j: torch.from_numpy(stream.normal(size=8).astype(np.float32)) for j in reversed(ids)}
    me = ids[int(stream.integers(peers))]
    f = np.array([codes[me].double().numpy() @ codes[j].double().numpy() for j in ids])
    expected = np.exp(f - f.max())
    np.testing.assert_allclose(attention(codes, me).numpy(), expected / expected.sum(), atol=1e-12)


# ---- line 18: the gradient of the encoder --------------------------------------------------------------------


@pytest.mark.exhaustive
@settings(deadline=None, max_examples=15)
@given(st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_encoder_gradient_equals_autograd_through_the_round(peers: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    model, data, encoder = linear_model(INPUTS, FEATURES, CLASSES, seed=seed % 100), data_of(seed % 50), None
    encoder = random_encoder(seed % 1000)
    me = int(torch.randint(peers, (), generator=generator))
    before = clone(parameters_of(model))
    updates = {j: random_change(generator) for j in range(peers)}
    changes = {j: direction(random_change(generator), before) for j in range(peers)}

    # Everything in one graph: encoder, attention, aggregate, network, loss.
    codes = {j: encoder(changes[j]) for j in range(peers)}
    f = torch.stack([(codes[me] * codes[j]).sum() for j in range(peers)])
    w = f.softmax(0)
    expected_model = {name: x - sum(w[j] * updates[j][name] for j in updates) for name, x in before.items()}
    (x, labels), *_ = data.sweep(data.validation)
    loss = cross_entropy(functional_call(model, expected_model, x), labels)
    expected = torch.autograd.grad(loss, list(encoder.parameters()))

    # The chain rule.
    with torch.no_grad():
        codes = {j: encoder(changes[j]) for j in range(peers)}
        row = dict(enumerate(attention(codes, me).tolist()))
        assign(parameters_of(model), aggregated(before, updates, row))
    _, g = validation_gradient(model, data)
    backward(encoder, changes, codes, me, {j: directional_derivative(g, updates[j]) for j in range(peers)})
    for parameter, gradient in zip(encoder.parameters(), expected, strict=True):
        assert parameter.grad is not None
        scale = float(gradient.abs().max())
        np.testing.assert_allclose(parameter.grad.numpy(), gradient.numpy(), atol=1e-3 * scale + 2e-7, rtol=2e-3)


def test_single_peer_has_zero_encoder_gradient() -> None:
    encoder, change = random_encoder(0), random_change(torch.Generator().manual_seed(0))
    backward(encoder, {0: change}, {0: encoder(change).detach()}, 0, {0: 5.0})
    assert all(
        float(parameter.grad.abs().max()) == 0.0 for parameter in encoder.parameters() if parameter.grad is not None
    )
