"""Models: every backbone of every group, at every size that its datasets have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from p2pfl.data import DATASETS, Split, open_dataset
from p2pfl.errors import ModelError
from p2pfl.models import BACKBONES, GROUPS, HEADS, MODELS, Model, architecture, build, has_linear_head, unknown_model
from p2pfl.models.cost import cost
from p2pfl.models.dfml import LocalSelfAttention, ShiftedPatches
from p2pfl.models.parts import Own
from p2pfl.options import OptionErrors
from p2pfl.wire import Body, Layout, Vocabulary, decode, encode

SMALL = [(1, (8, 8)), (1, (28, 28)), (3, (32, 32))]
TINY = GROUPS["tiny4"].members
MEMBERS = sorted({member for group in MODELS.values() for member in group.members})

SETTINGS = {
    # Channels, size and classes of the datasets that the papers train these families on.
    "tiny": [(1, (8, 8), 10), (1, (28, 28), 10), (3, (32, 32), 10)],
    "mapl": [(3, (32, 32), 10), (1, (28, 28), 10)],
    "htfe": [(3, (32, 32), 100)],
    "htcnn": [(1, (28, 28), 10)],
    "dfml": [(3, (32, 32), 10), (1, (28, 28), 10)],
    "dfml-resnet": [(3, (32, 32), 100), (3, (64, 64), 101)],
    "dfml-efficientnet": [(3, (224, 224), 37)],
    "l2c-cnn": [(3, (32, 32), 10)],
    "l2c-conv4": [(3, (84, 84), 100)],
}


def family(member: str) -> str:
    return next((name for name in sorted(SETTINGS, key=len, reverse=True) if member.startswith(name)), "mapl")


@dataclass(frozen=True)
class Whole(Body):
    state: dict[str, torch.Tensor]


def learn(model: Model, x: torch.Tensor) -> None:
    """One backward pass; every parameter gets a finite gradient."""
    logits = model(x)
    assert logits.shape == (len(x), model.classes)
    F.cross_entropy(logits, torch.arange(len(x)) % model.classes).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name


@pytest.mark.parametrize(("channels", "size"), SMALL)
@pytest.mark.parametrize("name", [*TINY, *GROUPS["mapl4"].members])
def test_the_default_models_learn_from_images_of_every_size(name: str, channels: int, size: tuple[int, int]) -> None:
    learn(build(name, 0, channels, size, classes=7), torch.rand(4, channels, *size))


@pytest.mark.parametrize("name", MEMBERS)
def test_every_model_learns_at_its_dataset_s_size_and_survives_the_wire(name: str) -> None:
    """d, K, a backward pass, and parameters and buffers as a message, bit for bit."""
    for channels, size, classes in SETTINGS[family(name)]:
        model = build(name, 0, channels, size, classes)
        assert (model.name, model.classes) == (name, classes)
        assert isinstance(model.head, nn.Linear) == has_linear_head(name)
        x = torch.rand(2, channels, *size)
        assert model.backbone(x).shape == (2, model.features)
        learn(model, x)
        state = dict(model.state_dict())
        sent = encode(Whole(state))
        got = decode(sent.to("run", 3, 1, 0), "run", Vocabulary([Layout.of(Whole(state))])).body
        assert isinstance(got, Whole)
        assert got.state.keys() == state.keys()
        assert all(torch.equal(got.state[key], value) for key, value in state.items())
        assert {got.state[key].dtype for key in state} <= {torch.float32, torch.int64}


@pytest.mark.parametrize(("group", "peer"), [(name, m) for name in GROUPS for m in range(len(GROUPS[name].members))])
def test_every_group_gives_each_peer_its_member(group: str, peer: int) -> None:
    members = GROUPS[group].members
    channels, size, classes = SETTINGS[family(members[peer])][0]
    with torch.device("meta"):
        model = build(group, peer + len(members), channels, size, classes)
    assert model.name == architecture(group, peer) == members[peer]
    assert GROUPS[group].features in (None, model.features)
    assert model(torch.rand(2, channels, *size, device="meta")).shape == (2, classes)


@pytest.mark.parametrize("name", list(BACKBONES))
def test_the_number_of_features_can_be_chosen(name: str) -> None:
    channels, size, _ = SETTINGS[family(name)][0]
    with torch.device("meta"):
        model = build(name, 3, channels, size, classes=5, features=24)
    x = torch.rand(2, channels, *size, device="meta")
    assert model.name == name
    assert model.backbone(x).shape == (2, 24)
    assert model(x).shape == (2, 5)


def test_other_numbers_of_features_are_means_of_a_backbone_s_own() -> None:
    torch.manual_seed(0)
    own = build("l2c-cnn", 0, 1, (28, 28), 10).eval()
    torch.manual_seed(0)
    pooled = build("l2c-cnn", 0, 1, (28, 28), 10, features=128).eval()
    x = torch.rand(3, 1, 28, 28)
    torch.testing.assert_close(pooled.backbone(x), own.backbone(x).reshape(3, 128, 4).mean(dim=2))


@pytest.mark.parametrize(("name", "size"), [("htfe-cnn", 15), ("l2c-conv4", 15), ("dfml-cnn-32-64", 3)])
def test_images_that_are_too_small_are_refused(name: str, size: int) -> None:
    with pytest.raises(ModelError, match=f"leave nothing of images of {size}x{size}; take"):
        build(name, 0, 3, (size, size), 10)
    learn(build(name, 0, 3, (size + 1, size + 1), 10), torch.rand(2, 3, size + 1, size + 1))


def test_heads_of_several_layers() -> None:
    model = build("htc4", 2, 3, (32, 32), 100)
    assert isinstance(model.head, nn.Sequential)
    assert [tuple(model.head[n].weight.shape) for n in (0, 2)] == [(256, 512), (100, 256)]
    with pytest.raises(ModelError, match=r"'htfe-resnet34\+fc256' has a head of several layers"):
        _ = model.linear_head
    one = build("htc4", 0, 3, (32, 32), 100)
    assert one.linear_head is one.head


PUBLISHED = {
    # Parameters in millions with a 1000-way last layer, from torchvision's pages of these models.
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
def test_stock_networks_have_their_published_size(name: str) -> None:
    make = BACKBONES[name]
    assert isinstance(make, Own)
    with torch.device("meta"):
        network, own = make.layers(3, (224, 224))
        model = Model(name, network, own, 1000)
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6, 2) == PUBLISHED[name]


def test_the_papers_own_networks_have_the_sizes_that_follow_from_their_text() -> None:
    def size(name: str, channels: int, side: int, classes: int = 10) -> int:
        with torch.device("meta"):
            return sum(p.numel() for p in build(name, 0, channels, (side, side), classes).parameters())

    fedavg = 3 * 25 * 32 + 32 + 32 * 25 * 64 + 64 + 1600 * 512 + 512 + 512 * 10 + 10
    assert size("l2c-cnn", 3, 32) == size("htfe-cnn", 3, 32) == fedavg
    assert size("htcnn-1", 1, 28) == 25 * 32 + 32 + 4608 * 512 + 512 + 512 * 10 + 10
    assert size("htcnn-8", 1, 28) == 832 + 51264 + (1024 + 1) * 1024 + 1025 * 512 + 513 * 512 + 513 * 10
    maml = 3 * 9 * 32 + 3 * 32 * 9 * 32 + 4 * 32 + 4 * 64
    assert size("l2c-conv4", 3, 84, 5) == maml + 801 * 5 == 32_901  # MAML's, with batch normalisation
    assert size("dfml-resnet-64", 3, 32) == 11_171_146 + 2 * 512  # the usual count, and a last normalisation


def test_small_resnets_are_shorter() -> None:
    for depth, features in ((4, 64), (6, 128), (8, 256), (10, 512)):
        make = BACKBONES[f"htfe-resnet{depth}"]
        assert isinstance(make, Own)
        network, own = make.layers(3, (32, 32))
        assert own == features == network(torch.rand(2, 3, 32, 32)).shape[1]
        main = [layer for layer in network.modules() if isinstance(layer, nn.Conv2d) and layer.kernel_size != (1, 1)]
        assert len(main) + 1 == depth  # and the head


def test_shifted_patches_hold_the_image_and_its_neighbourhood() -> None:
    """A token is its patch and the same places of the four shifted images, which are zero beyond the border."""
    patches = ShiftedPatches(1, (8, 8), dim=3)
    patches.embed = nn.Identity()
    x = torch.arange(64.0).reshape(1, 1, 8, 8)
    tokens = patches(x)
    assert tokens.shape == (1, 4, 5 * 16)
    own, *shifted = tokens[0, 0].reshape(5, 4, 4)
    assert torch.equal(own, x[0, 0, :4, :4])
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
def test_tiny_models_take_odd_sizes(name: str, size: tuple[int, int]) -> None:
    assert build(name, 0, 1, size, classes=10)(torch.rand(2, 1, *size)).shape == (2, 10)


@pytest.mark.parametrize("name", TINY)
def test_tiny_models_learn_digits_from_seventy_samples(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        for batch in torch.randperm(len(x)).split(32):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    x, y = first_five_classes(dataset.test, 30)
    assert (model.eval()(x).argmax(dim=1) == y).float().mean() > 0.85


def test_mapl_models_have_the_sizes_of_the_stock_networks() -> None:
    """With three channels and a 1000-way last layer they are torchvision's own, parameter for parameter."""
    import torchvision.models

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
    layers = [layer for layer in alexnet if isinstance(layer, nn.Conv2d | nn.Linear)]
    assert [tuple(layer.weight.shape[:2]) for layer in layers] == [
        (64, 3),
        (128, 64),
        (256, 128),
        (512, 2304),
        (512, 512),
    ]


@pytest.mark.parametrize("name", [*TINY, "htfe-resnet8", "htfe-mobilenet+fc256", "dfml-vit-32"])
def test_costs_are_what_is_built_and_sent(name: str) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    found = cost(name, 3, (32, 32), 10)
    assert torch.equal(torch.get_rng_state(), before)
    model = build(name, 0, 3, (32, 32), 10)
    assert (found.name, found.features) == (name, model.features)
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert found.model_bytes == encode(Whole(dict(model.state_dict()))).payload
    assert found.head_bytes == encode(Whole(dict(model.head.state_dict()))).payload
    assert found.prototype_bytes == encode(Whole({"p": torch.zeros(10, model.features)})).payload


def test_flops_count_multiplications_and_additions() -> None:
    convolution, hidden, head = 24 * 24 * 32 * 25, 4608 * 512, 512 * 10
    assert cost("htcnn-1", 1, (28, 28), 10).flops == 2 * (convolution + hidden + head)
    # The stock networks at 224x224 have their published billions of multiplications with additions.
    for name, billions in (("htfe-resnet18", 1.81), ("htfe-resnet50", 4.09), ("htfe-mobilenet", 0.30)):
        assert round(cost(name, 3, (224, 224), 1000).flops / 2e9, 2) == billions


def test_peers_take_the_backbones_in_turn() -> None:
    assert [architecture("tiny4", peer) for peer in range(5)] == [*TINY, TINY[0]]
    assert {architecture("resnet18", peer) for peer in range(5)} == {"resnet18"}


def test_weights_come_from_the_global_rng_alone() -> None:
    def weights(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        return list(build("tiny4", 2, 1, (8, 8), 10).state_dict().values())

    first, again, other = weights(0), weights(0), weights(1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_an_unknown_name_lists_the_known_ones() -> None:
    for ask in (lambda: architecture("tiny5", 0), lambda: build("tiny5", 0, 1, (8, 8), 10)):
        with pytest.raises(OptionErrors, match=r"unknown 'tiny5'; known: tiny4, mapl4, .* did you mean"):
            ask()
    assert unknown_model("htfe-resnet19").startswith("unknown 'htfe-resnet19'; known: tiny4, mapl4, htfe2, ")
    assert unknown_model("htfe-resnet19").endswith("; did you mean 'htfe-resnet18'?")


def test_every_name_in_the_tables_leads_somewhere() -> None:
    assert {member.partition("+")[0] for member in MEMBERS} == set(BACKBONES)
    assert {member.partition("+")[2] or "linear" for member in MEMBERS} == set(HEADS)
    assert not set(GROUPS) & set(MEMBERS)
    assert set(MODELS) == {*GROUPS, *MEMBERS}
    for group in MODELS.values():
        assert group.features or all(isinstance(BACKBONES[member], Own) for member in group.members)
