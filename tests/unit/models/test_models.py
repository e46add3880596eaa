"""Models: every architecture, at the image sizes of its datasets."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from p2pfl.data import DATASETS, Split, open_dataset
from p2pfl.errors import ModelError
from p2pfl.messaging.schema import Body, Layout
from p2pfl.messaging.wire import encode
from p2pfl.models import BACKBONES, HEADS, MODELS, Model, architecture, build, groups, has_linear_head, unknown_model
from p2pfl.models.backbone import FixedFeatures
from p2pfl.models.cost import cost
from p2pfl.models.dfml import LocalSelfAttention, ShiftedPatches
from p2pfl.options import OptionErrors
from tests.bodies import arrive

pytestmark = pytest.mark.exhaustive

SMALL = [(1, (8, 8)), (1, (28, 28)), (3, (32, 32))]
GROUPS = groups()
TINY = GROUPS["tiny4"].members
MEMBERS = sorted({member for group in MODELS.values() for member in group.members})

SETTINGS = {
    # Channels, size and classes of the datasets that the papers train these families on.
    "tiny": [(1, (8, 8), 10), (1, (28, 28), 10), (3, (32, 32), 10)],
    "mapl": [(3, (32, 32), 10), (1, (28, 28), 10), (1, (8, 8), 10)],
    "htfe": [(3, (32, 32), 100)],
    "htcnn": [(1, (28, 28), 10)],
    "dfml": [(3, (32, 32), 10), (1, (28, 28), 10)],
    "dfml-resnet": [(3, (32, 32), 100), (3, (64, 64), 101)],
    "dfml-efficientnet": [(3, (224, 224), 37)],
    "l2c-cnn": [(3, (32, 32), 10)],
    "l2c-conv4": [(3, (84, 84), 100)],
    "mlp": [(1, (28, 28), 10)],
}


def family(member: str) -> str:
    return next((name for name in sorted(SETTINGS, key=len, reverse=True) if member.startswith(name)), "mapl")


@dataclass(frozen=True)
class Whole(Body):
    state: dict[str, torch.Tensor]


# One architecture for each way of building a backbone: the others differ in depth and width only.
REPRESENTATIVES = [
    *TINY,
    *GROUPS["mapl4"].members,
    *("htfe-cnn", "htfe-mobilenet+fc256", "htfe-resnet4", "htcnn-8"),
    *("dfml-cnn-8-16", "dfml-resnet-4", "dfml-vit-32", "l2c-cnn", "l2c-conv4", "mlp-64-32"),
]


def backward(model: Model, x: torch.Tensor) -> None:
    """Run one backward pass on ``x``; every parameter must get a finite gradient."""
    logits = model(x)
    assert logits.shape == (len(x), model.classes)
    F.cross_entropy(logits, torch.arange(len(x), device=x.device) % model.classes).backward()  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.is_meta or torch.isfinite(parameter.grad).all(), name


@cache
def on_meta(name: str, channels: int, size: tuple[int, int], classes: int) -> Model:
    """A model with shapes but no values; nothing is computed on the meta device."""
    with torch.device("meta"):
        return build(name, 0, channels, size, classes)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name", [name if name in REPRESENTATIVES else pytest.param(name, marks=pytest.mark.slow) for name in BACKBONES]
)
def test_every_backbone_propagates_gradients_at_its_datasets_sizes(name: str) -> None:
    for channels, size, classes in SETTINGS[family(name)]:
        model = on_meta(name, channels, size, classes)
        x = torch.rand(2, channels, *size, device="meta")
        assert (model.name, model.classes) == (name, classes)
        assert isinstance(model.head, nn.Linear)
        backward(model, x)
        assert {tensor.dtype for tensor in model.state_dict().values()} <= {torch.float32, torch.int64}


@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_model_trains_and_survives_encoding(name: str) -> None:
    channels, size, classes = SETTINGS[family(name)][0]
    assert_trains_and_survives_encoding(build(name, 0, channels, size, classes), torch.rand(2, channels, *size))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MEMBERS if name not in REPRESENTATIVES])
def test_every_other_model_trains_and_survives_encoding(name: str) -> None:
    for channels, size, classes in SETTINGS[family(name)]:
        assert_trains_and_survives_encoding(build(name, 0, channels, size, classes), torch.rand(2, channels, *size))


def assert_trains_and_survives_encoding(model: Model, x: torch.Tensor) -> None:
    """Gradients are finite; parameters and buffers sent as a message arrive bit-identical."""
    backward(model, x)
    state = dict(model.state_dict())
    received = arrive(Whole(state), [Layout.of(Whole(state))])
    assert isinstance(received, Whole)
    assert received.state.keys() == state.keys()
    assert all(torch.equal(received.state[key], value) for key, value in state.items())


@pytest.mark.parametrize(("channels", "size"), SMALL)
@pytest.mark.parametrize("name", TINY)
def test_tiny_models_train_on_images_of_every_size(name: str, channels: int, size: tuple[int, int]) -> None:
    backward(build(name, 0, channels, size, classes=7), torch.rand(4, channels, *size))


@pytest.mark.parametrize("group", GROUPS)
def test_peers_get_the_members_of_a_group_in_turn(group: str) -> None:
    members = GROUPS[group].members
    for peer, member in enumerate(members):
        assert architecture(group, peer) == architecture(group, peer + len(members)) == member
        model = on_meta(member, *SETTINGS[family(member)][0])
        assert isinstance(model.head, nn.Linear) == has_linear_head(member)
        assert model.head(torch.rand(2, model.features, device="meta")).shape == (2, model.classes)
        assert GROUPS[group].features in (None, model.features)
    peer, (channels, size, classes) = len(members) - 1, SETTINGS[family(members[-1])][0]
    with torch.device("meta"):
        model = build(group, peer, channels, size, classes)
    assert (model.name, model.features) == (members[-1], on_meta(members[-1], channels, size, classes).features)


@pytest.mark.parametrize("name", [name for name in REPRESENTATIVES if name in BACKBONES])
def test_number_of_features_can_be_set(name: str) -> None:
    channels, size, _ = SETTINGS[family(name)][0]
    with torch.device("meta"):
        model = build(name, 3, channels, size, classes=5, features=24)
    x = torch.rand(2, channels, *size, device="meta")
    assert model.name == name
    assert model.backbone(x).shape == (2, 24)
    assert model(x).shape == (2, 5)


def test_other_numbers_of_features_are_means_of_adjacent_features() -> None:
    torch.manual_seed(0)
    full = build("l2c-cnn", 0, 1, (28, 28), 10).eval()
    torch.manual_seed(0)
    pooled = build("l2c-cnn", 0, 1, (28, 28), 10, features=128).eval()
    x = torch.rand(3, 1, 28, 28)
    torch.testing.assert_close(pooled.backbone(x), full.backbone(x).reshape(3, 128, 4).mean(dim=2))


@pytest.mark.parametrize(("name", "size"), [("htfe-cnn", 15), ("l2c-conv4", 15), ("dfml-cnn-32-64", 3)])
def test_too_small_images_are_rejected(name: str, size: int) -> None:
    with pytest.raises(ModelError, match=f"images of {size}x{size} are too small for .*; use"):
        build(name, 0, 3, (size, size), 10)
    backward(build(name, 0, 3, (size + 1, size + 1), 10), torch.rand(2, 3, size + 1, size + 1))


def test_models_of_htc4_have_heads_of_several_layers() -> None:
    with torch.device("meta"):
        model, linear = (build("htc4", peer, 3, (32, 32), 100) for peer in (2, 0))
    assert isinstance(model.head, nn.Sequential)
    weights = [parameter for parameter in model.head.parameters() if parameter.ndim == 2]
    assert [tuple(weight.shape) for weight in weights] == [(256, 512), (100, 256)]
    with pytest.raises(ModelError, match=r"'htfe-resnet34\+fc256' has a head of several layers"):
        _ = model.linear_head
    assert linear.linear_head is linear.head


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(
                    not torch.cuda.is_available(), reason="needs a CUDA device; scripts/check-gpu runs it"
                ),
            ],
        ),
    ],
)
def test_initial_values_of_a_head_do_not_depend_on_its_device(device: str) -> None:
    model = build("tiny-cnn", 0, 1, (8, 8), 10).to(device)
    torch.manual_seed(7)
    expected = nn.Linear(model.features, 10)
    torch.manual_seed(7)
    head = model.reset_linear_head()
    assert head is model.head
    assert (head.weight.device.type, head.weight.requires_grad) == (device, True)
    torch.testing.assert_close(head.weight.cpu(), expected.weight, rtol=0, atol=0)
    torch.testing.assert_close(head.bias.cpu(), expected.bias, rtol=0, atol=0)


PUBLISHED = {
    # Millions of parameters with 1000 classes, from torchvision's documentation.
    "htfe-resnet18": 11.69,
    "htfe-resnet34": 21.80,
    "htfe-resnet50": 25.56,
    "htfe-resnet101": 44.55,
    "htfe-resnet152": 60.19,
    "htfe-googlenet": 6.62,
    "htfe-mobilenet": 3.50,
    "dfml-efficientnet-b0": 5.29,
    "dfml-efficientnet-b1": 7.79,
    "dfml-efficientnet-b2": 9.11,
    "dfml-efficientnet-b3": 12.23,
    "dfml-efficientnet-b4": 19.34,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_torchvision_networks_have_their_published_size(name: str) -> None:
    make = BACKBONES[name]
    assert isinstance(make, FixedFeatures)
    with torch.device("meta"):
        network, features = make.layers(3, (224, 224))
        model = Model(name, network, features, 1000)
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6, 2) == PUBLISHED[name]


def test_networks_of_the_papers_have_the_sizes_their_text_implies() -> None:
    def size(name: str, channels: int, side: int, classes: int = 10) -> int:
        with torch.device("meta"):
            return sum(p.numel() for p in build(name, 0, channels, (side, side), classes).parameters())

    fedavg = 3 * 25 * 32 + 32 + 32 * 25 * 64 + 64 + 1600 * 512 + 512 + 512 * 10 + 10
    assert size("l2c-cnn", 3, 32) == size("htfe-cnn", 3, 32) == fedavg
    assert size("htcnn-1", 1, 28) == 25 * 32 + 32 + 4608 * 512 + 512 + 512 * 10 + 10
    assert size("htcnn-8", 1, 28) == 832 + 51264 + (1024 + 1) * 1024 + 1025 * 512 + 513 * 512 + 513 * 10
    maml = 3 * 9 * 32 + 3 * 32 * 9 * 32 + 4 * 32 + 4 * 64
    assert size("l2c-conv4", 3, 84, 5) == maml + 801 * 5 == 32_901  # as MAML's with batch normalization
    assert size("dfml-resnet-64", 3, 32) == 11_171_146 + 2 * 512  # the usual count, and a final normalization


def test_small_resnets_have_the_layers_in_their_name() -> None:
    for depth, features in ((4, 64), (6, 128), (8, 256), (10, 512)):
        make = BACKBONES[f"htfe-resnet{depth}"]
        assert isinstance(make, FixedFeatures)
        network, width = make.layers(3, (32, 32))
        assert width == features == network(torch.rand(2, 3, 32, 32)).shape[1]
        main = [layer for layer in network.modules() if isinstance(layer, nn.Conv2d) and layer.kernel_size != (1, 1)]
        assert len(main) + 1 == depth  # and the head


def test_shifted_patches_contain_the_patch_and_its_neighborhood() -> None:
    """A token is its patch in the image and in four shifted copies, which are zero beyond the border."""
    patches = ShiftedPatches(1, (8, 8), dim=3)
    patches.embed = nn.Sequential()
    x = torch.arange(64.0).reshape(1, 1, 8, 8)
    tokens = patches(x)
    assert tokens.shape == (1, 4, 5 * 16)
    patch, *shifted = tokens[0, 0].reshape(5, 4, 4)
    assert torch.equal(patch, x[0, 0, :4, :4])
    around = F.pad(x[0, 0], (2, 2, 2, 2))
    expected = {around[r : r + 4, c : c + 4].numpy().tobytes() for r in (0, 4) for c in (0, 4)}
    assert {part.numpy().tobytes() for part in shifted} == expected


def test_no_token_attends_to_itself() -> None:
    attention = LocalSelfAttention(64, tokens=3, dropout=0.0)
    x = torch.randn(1, 3, 64, requires_grad=True)
    with torch.no_grad():
        attention.qkv.weight[:128] = 0.0  # queries and keys: all scores are equal
    attention(x)[0, 0].sum().backward()
    assert x.grad is not None
    assert not x.grad[0, 0].any()
    assert x.grad[0, 1:].any()
    assert float(attention.temperature.detach()) == 8.0


@pytest.mark.parametrize(("channels", "size"), SMALL)
@pytest.mark.parametrize("name", TINY)
def test_tiny_models_are_tiny(name: str, channels: int, size: tuple[int, int]) -> None:
    model = build(name, 0, channels, size, classes=10)
    assert 20_000 <= sum(parameter.numel() for parameter in model.parameters()) <= 200_000


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("size", [(9, 11), (16, 12), (30, 30)])
def test_tiny_models_accept_odd_sizes(name: str, size: tuple[int, int]) -> None:
    assert build(name, 0, 1, size, classes=10)(torch.rand(2, 1, *size)).shape == (2, 10)


@pytest.mark.parametrize("name", TINY)
def test_tiny_models_learn_digits_from_70_samples(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P2PFL_CACHE", str(tmp_path))
    dataset = open_dataset("digits", DATASETS["digits"]())
    torch.manual_seed(0)

    def first_five_classes(split: Split, per_class: int) -> tuple[torch.Tensor, torch.Tensor]:
        indices = torch.cat([torch.tensor(split.labels == k).nonzero()[:per_class, 0] for k in range(5)])
        images, labels = split.take(indices.numpy())
        return (images.float() / 255 - dataset.mean[0]) / dataset.std[0], labels

    x, y = first_five_classes(dataset.train, 14)
    model = build(name, 0, 1, (8, 8), classes=10)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(20):
        for batch in torch.split(torch.randperm(len(x)), 32):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    x, y = first_five_classes(dataset.test, 30)
    assert (model.eval()(x).argmax(dim=1) == y).float().mean() > 0.85


def test_mapl_models_have_the_shapes_of_torchvisions_networks() -> None:
    """With three channels and 1000 classes, every parameter has the same name and shape."""
    import torchvision.models

    with torch.device("meta"):
        for name, stock in (
            ("resnet18", torchvision.models.resnet18()),
            ("shufflenet", torchvision.models.shufflenet_v2_x1_0()),
            ("googlenet", torchvision.models.googlenet(aux_logits=False, init_weights=False)),
        ):
            ours = BACKBONES[name](3, (32, 32), 1000).state_dict()
            assert {key: value.shape for key, value in ours.items()} == {
                key: value.shape for key, value in stock.state_dict().items()
            }
    alexnet = BACKBONES["alexnet-small"](3, (32, 32), 512)
    layers = [layer for layer in alexnet.children() if isinstance(layer, nn.Conv2d | nn.Linear)]
    assert [tuple(layer.weight.shape[:2]) for layer in layers] == [
        (64, 3),
        (128, 64),
        (256, 128),
        (512, 2304),
        (512, 512),
    ]


@pytest.mark.parametrize("name", [*TINY, "htfe-resnet8", "htfe-mobilenet+fc256", "dfml-vit-32"])
def test_costs_equal_what_is_built_and_sent(name: str) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    counted = cost(name, 3, (32, 32), 10)
    assert torch.equal(torch.get_rng_state(), before)
    model = build(name, 0, 3, (32, 32), 10)
    assert (counted.name, counted.features) == (name, model.features)
    assert counted.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert counted.model_bytes == encode(Whole(dict(model.state_dict()))).payload
    assert counted.head_bytes == encode(Whole(dict(model.head.state_dict()))).payload
    assert counted.prototype_bytes == encode(Whole({"p": torch.zeros(10, model.features)})).payload


def test_flops_count_a_multiply_add_as_two() -> None:
    convolution, hidden, head = 24 * 24 * 32 * 25, 4608 * 512, 512 * 10
    assert cost("htcnn-1", 1, (28, 28), 10).flops == 2 * (convolution + hidden + head)
    # Published billions of multiply-adds at 224x224.
    for name, billions in (("htfe-resnet18", 1.81), ("htfe-resnet50", 4.09), ("htfe-mobilenet", 0.30)):
        assert round(cost(name, 3, (224, 224), 1000).flops / 2e9, 2) == billions


def test_architectures_are_assigned_in_turn() -> None:
    assert [architecture("tiny4", peer) for peer in range(5)] == [*TINY, TINY[0]]
    assert {architecture("resnet18", peer) for peer in range(5)} == {"resnet18"}


def test_global_rng_determines_the_weights() -> None:
    def weights(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        return list(build("tiny4", 2, 1, (8, 8), 10).state_dict().values())

    first, again, other = weights(0), weights(0), weights(1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_mlp_has_the_widths_in_its_name() -> None:
    with torch.device("meta"):
        model = build("mlp-3072-2944", 0, 1, (28, 28), 10)
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    assert [(layer.in_features, layer.out_features) for layer in layers] == [(784, 3072), (3072, 2944), (2944, 10)]
    assert sum(parameter.numel() for parameter in model.parameters()) == 11_487_882
    assert cost("mlp-16", 3, (8, 8), 10).parameters == 192 * 16 + 16 + 16 * 10 + 10


@pytest.mark.parametrize(
    "name", ["mlp", "mlp-", "mlp-0", "mlp-064", "mlp--64", "mlp-64-", "mlp-100000", "mlp-64+fc256"]
)
def test_other_names_are_no_mlp(name: str) -> None:
    assert name not in MODELS
    assert ", mlp-WIDTH-…, conv1d-WIDTH-…" in unknown_model(name)


def test_scores_of_a_relu_head_are_clipped_at_0() -> None:
    model = build("tiny-cnn+relu", 0, 1, (8, 8), 10)
    x = torch.randn(20, 1, 8, 8)
    linear = model.head[0]  # type: ignore[index]
    assert torch.equal(model(x), linear(model.backbone(x)).clamp(min=0))
    assert float(linear(model.backbone(x)).detach().min()) < 0
    assert not has_linear_head("tiny-cnn+relu")


def test_unknown_name_lists_the_known_ones() -> None:
    for call in (lambda: architecture("tiny5", 0), lambda: build("tiny5", 0, 1, (8, 8), 10)):
        with pytest.raises(OptionErrors, match=r"unknown 'tiny5'; known: alexnet-small, .*, tiny4; did you mean"):
            call()
    assert unknown_model("htfe-resnet19").startswith("unknown 'htfe-resnet19'; known: dfml-h0, dfml-h1-cnn, ")
    assert unknown_model("htfe-resnet19").endswith("; did you mean 'htfe-resnet18'?")


def test_tables_of_models_are_consistent() -> None:
    assert {member.partition("+")[0] for member in MEMBERS} == set(BACKBONES)
    assert {member.partition("+")[2] or "linear" for member in MEMBERS} == set(HEADS) - {"relu"}  # in no group
    assert not set(GROUPS) & set(MEMBERS)
    assert set(MODELS) == {*GROUPS, *BACKBONES}
    assert all(member in MODELS for member in MEMBERS)
    for group in MODELS.values():
        assert group.features or all(isinstance(BACKBONES[member], FixedFeatures) for member in group.members)
