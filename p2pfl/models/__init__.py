"""Models: a backbone that makes features of images, and a linear head that makes classes of features.

A run file names either a group, of which peer m gets the m-th backbone (counting round), or one backbone for
all. Backbones of a group differ in architecture and agree in the number of features, so that peers can
exchange heads and prototypes. Everything random in a new model is drawn from torch's global RNG.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from p2pfl.models import mapl, tiny
from p2pfl.options import Table

Build = Callable[[int, tuple[int, int], int], nn.Module]
"""(channels, (height, width), features) to a module from float [B, C, H, W] to float [B, features]."""


class Model(nn.Module):
    """A backbone and its head.

    Attributes:
        name: of the backbone, as in BACKBONES.
        backbone: float [B, C, H, W] to features, float [B, features].
        head: features to logits, float [B, classes].
    """

    def __init__(self, name: str, backbone: nn.Module, features: int, classes: int) -> None:
        super().__init__()
        self.name = name
        self.features = features
        self.classes = classes
        self.backbone = backbone
        self.head = nn.Linear(features, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.backbone(x))
        return logits


@dataclass(frozen=True)
class Group:
    """Backbones for the peers to take in turn, and their number of features unless the run file sets it."""

    backbones: tuple[str, ...]
    features: int


BACKBONES: Table[Build] = Table(
    "backbone",
    {
        "tiny-cnn": tiny.cnn,
        "tiny-wide": tiny.wide,
        "tiny-residual": tiny.residual,
        "tiny-mixer": tiny.mixer,
        "resnet18": mapl.resnet18,
        "shufflenet": mapl.shufflenet,
        "googlenet": mapl.googlenet,
        "alexnet-small": mapl.alexnet_small,
    },
)

GROUPS: Table[Group] = Table(
    "group of models",
    {
        "tiny4": Group(("tiny-cnn", "tiny-wide", "tiny-residual", "tiny-mixer"), features=64),
        "mapl4": Group(("resnet18", "shufflenet", "googlenet", "alexnet-small"), features=512),
    },
)


def _alone(backbone: str) -> Group:
    """One backbone for all peers, with as many features as in the first group that it belongs to."""
    features = next(group.features for group in GROUPS.values() if backbone in group.backbones)
    return Group((backbone,), features)


MODELS: Table[Group] = Table("model", {**GROUPS, **{backbone: _alone(backbone) for backbone in BACKBONES}})
"""Every name that a run file may use: the groups, and each backbone as a group of one."""


def architecture(name: str, peer: int) -> str:
    """The backbone that ``peer`` gets from the group ``name``. Raises OptionErrors if there is none."""
    backbones = MODELS.find(name).backbones
    return backbones[peer % len(backbones)]


def build(
    name: str, peer: int, channels: int, size: tuple[int, int], classes: int, features: int | None = None
) -> Model:
    """A new model for ``peer`` with random weights.

    Args:
        name: a group or a backbone; raises OptionErrors if it is unknown.
        channels, size: of the images; size is (height, width).
        classes: number of logits.
        features: between backbone and head; by default the group's.
    """
    width = features or MODELS.find(name).features
    backbone = architecture(name, peer)
    return Model(backbone, BACKBONES[backbone](channels, size, width), width, classes)
