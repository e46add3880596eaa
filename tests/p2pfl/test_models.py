"""Models: every backbone of every group, at every size that its datasets have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from p2pfl.data import DATASETS, Split, open_dataset
from p2pfl.models import BACKBONES, GROUPS, MODELS, architecture, build
from p2pfl.options import OptionErrors

SHAPES = [(1, (8, 8)), (1, (28, 28)), (3, (32, 32))]
MEMBERS = [(name, peer) for name, group in GROUPS.items() for peer in range(len(group.backbones))]
TINY = GROUPS["tiny4"].backbones


@pytest.mark.parametrize(("channels", "size"), SHAPES)
@pytest.mark.parametrize(("group", "peer"), MEMBERS)
def test_every_model_learns_from_images_of_every_size(
    group: str, peer: int, channels: int, size: tuple[int, int]
) -> None:
    model = build(group, peer, channels, size, classes=7)
    d = GROUPS[group].features
    assert (model.name, model.features, model.classes) == (GROUPS[group].backbones[peer], d, 7)
    assert (model.head.in_features, model.head.out_features) == (d, 7)
    x = torch.rand(4, channels, *size)
    assert model.backbone(x).shape == (4, d)
    logits = model(x)
    assert logits.shape == (4, 7)
    F.cross_entropy(logits, torch.arange(4)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name


@pytest.mark.parametrize("name", list(BACKBONES))
def test_the_number_of_features_can_be_chosen(name: str) -> None:
    model = build(name, 3, 3, (32, 32), classes=5, features=24).eval()
    assert model.name == name
    assert model.backbone(torch.rand(1, 3, 32, 32)).shape == (1, 24)
    assert model(torch.rand(2, 3, 32, 32)).shape == (2, 5)


@pytest.mark.parametrize(("channels", "size"), SHAPES)
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
        with pytest.raises(OptionErrors, match=r"unknown 'tiny5'; known: tiny4, mapl4, tiny-cnn, .* did you mean"):
            ask()


def test_every_name_in_the_tables_leads_somewhere() -> None:
    assert {backbone for group in MODELS.values() for backbone in group.backbones} == set(BACKBONES)
    assert not set(GROUPS) & set(BACKBONES)
