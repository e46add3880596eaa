"""Models: a backbone that makes features of images, and a head that makes classes of features.

A run file names either a group, of which peer m gets the m-th member (counting round), or one member for all:
``resnet18``, or with a head that is not one linear layer, ``htfe-resnet34+fc256``. Members of a group differ in
architecture; in most they agree in the number of features, so that peers can exchange heads and prototypes.
Everything random in a new model is drawn from torch's global RNG.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from p2pfl.errors import ModelError
from p2pfl.models import dfml, fedtgp, l2c, mapl, tiny
from p2pfl.models.parts import Build, Own, Size
from p2pfl.options import Table

BuildHead = Callable[[int, int], nn.Module]
"""(features, classes) to a module from float [B, features] to float [B, classes]."""


class Model(nn.Module):
    """A backbone and its head.

    Attributes:
        name: of the architecture, e.g. ``tiny-cnn`` or ``htfe-cnn+fc512``.
        backbone: float [B, C, H, W] to features, float [B, features].
        head: features to logits, float [B, classes]; one linear layer unless given.
    """

    def __init__(
        self, name: str, backbone: nn.Module, features: int, classes: int, head: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.name = name
        self.features = features
        self.classes = classes
        self.backbone = backbone
        self.head = nn.Linear(features, classes) if head is None else head

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.backbone(x))
        return logits

    @property
    def linear_head(self) -> nn.Linear:
        """The head of a method that compares or mixes its weights, [K, d]; raises ModelError if it has several
        layers. Such a method sets ``Algorithm.linear_heads``, so that the run file is refused in the first place.
        """
        if not isinstance(self.head, nn.Linear):
            raise ModelError(f"{self.name!r} has a head of several layers where the method needs a single linear one")
        return self.head


@dataclass(frozen=True)
class Group:
    """Members for the peers to take in turn, and their number of features unless the run file sets it.

    Attributes:
        members: backbones, each with ``+`` and a head where that is not linear.
        features: d; None leaves each backbone its own number.
    """

    members: tuple[str, ...]
    features: int | None


def _fc(hidden: int) -> BuildHead:
    return lambda features, classes: nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, classes))


HEADS: Table[BuildHead] = Table(
    "head", {"linear": nn.Linear, "fc512": _fc(512), "fc256": _fc(256), "fc128": _fc(128)}
)
"""``linear``, and the other three of FedTGP's HtC4."""

DFML_CNN = {
    "-".join(["dfml-cnn", *map(str, widths)]): widths
    for widths in (
        *((128, 256), (64, 128), (32, 64), (16, 32), (8, 16)),
        *((32, 64, 128, 256), (32, 64, 128), (16, 32, 64), (8, 16, 32, 64)),
    )
}
"""Widths of DFML's CNNs by name."""

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
        "htfe-cnn": Own(fedtgp.cnn),
        "htfe-googlenet": Own(fedtgp.googlenet),
        "htfe-mobilenet": Own(fedtgp.mobilenet),
        **{f"htfe-resnet{depth}": Own(fedtgp.resnet(depth)) for depth in (4, 6, 8, 10, 18, 34, 50, 101, 152)},
        **{f"htcnn-{number}": Own(fedtgp.htcnn(number)) for number in range(1, 9)},
        **{name: Own(dfml.cnn(widths)) for name, widths in DFML_CNN.items()},
        **{f"dfml-resnet-{width}": Own(dfml.resnet(width)) for width in (64, 32, 16, 8, 4)},
        **{f"dfml-vit-{dim}": Own(dfml.vit(dim)) for dim in (512, 256, 128, 64, 32)},
        **{f"dfml-efficientnet-b{number}": Own(dfml.efficientnet(number)) for number in dfml.EFFICIENTNET},
        "l2c-cnn": Own(l2c.cnn),
        "l2c-conv4": Own(l2c.conv4),
    },
)

_HTFE8 = (
    *("htfe-cnn", "htfe-googlenet", "htfe-mobilenet"),
    *("htfe-resnet18", "htfe-resnet34", "htfe-resnet50", "htfe-resnet101", "htfe-resnet152"),
)
_HTC4 = ("", "+fc512", "+fc256", "+fc128")

GROUPS: Table[Group] = Table(
    "group of models",
    {
        "tiny4": Group(("tiny-cnn", "tiny-wide", "tiny-residual", "tiny-mixer"), features=64),
        "mapl4": Group(("resnet18", "shufflenet", "googlenet", "alexnet-small"), features=512),
        "htfe2": Group(("htfe-cnn", "htfe-resnet18"), features=512),
        "htfe3": Group(("htfe-resnet10", "htfe-resnet18", "htfe-resnet34"), features=512),
        "htfe4": Group(("htfe-cnn", "htfe-googlenet", "htfe-mobilenet", "htfe-resnet18"), features=512),
        "htfe8": Group(_HTFE8, features=512),
        "htfe9": Group(tuple(f"htfe-resnet{depth}" for depth in (4, 6, 8, 10, 18, 34, 50, 101, 152)), features=512),
        "htc4": Group(tuple("htfe-resnet34" + head for head in _HTC4), features=512),
        "htfe8-htc4": Group(tuple(name + _HTC4[m % 4] for m, name in enumerate(_HTFE8)), features=512),
        "htcnn8": Group(tuple(f"htcnn-{number}" for number in range(1, 9)), features=512),
        "dfml-h0": Group(("dfml-cnn-32-64",), features=None),
        "dfml-h1-cnn": Group(
            ("dfml-cnn-128-256", "dfml-cnn-64-128", "dfml-cnn-32-64", "dfml-cnn-16-32", "dfml-cnn-8-16"),
            features=None,
        ),
        "dfml-h1-resnet": Group(tuple(f"dfml-resnet-{width}" for width in (64, 32, 16, 8, 4)), features=None),
        "dfml-h1-vit": Group(tuple(f"dfml-vit-{dim}" for dim in (512, 256, 128, 64, 32)), features=None),
        "dfml-h2-cnn": Group(
            (
                *("dfml-cnn-32-64-128-256", "dfml-cnn-32-64-128", "dfml-cnn-32-64"),
                *("dfml-cnn-16-32-64", "dfml-cnn-8-16-32-64"),
            ),
            features=None,
        ),
        "dfml-h2-efficientnet": Group(
            tuple(f"dfml-efficientnet-b{number}" for number in dfml.EFFICIENTNET), features=None
        ),
    },
)
"""The papers' groups. ``htc4`` is FedTGP's Res34-HtC4, and ``htfe8-htc4`` its HtFE8-HtC4 (Table 2)."""


def _alone(member: str) -> Group:
    """One architecture for all peers, with as many features as in the first group that it belongs to."""
    features = next((group.features for group in GROUPS.values() if member in group.members), None)
    return Group((member,), features)


_MEMBERS = dict.fromkeys(member for group in GROUPS.values() for member in group.members)

MODELS: Table[Group] = Table("model", {**GROUPS, **{member: _alone(member) for member in (*BACKBONES, *_MEMBERS)}})
"""Every name that a run file may use: the groups, and each backbone and member as a group of one."""


def architecture(name: str, peer: int) -> str:
    """The member of the group ``name`` that ``peer`` gets. Raises OptionErrors if there is no such group."""
    members = MODELS.find(name).members
    return members[peer % len(members)]


def unknown_model(name: str) -> str:
    """What to say of a name that is not in MODELS: the groups, which are few, and the nearest name of all."""
    close = difflib.get_close_matches(name, MODELS, n=1)
    text = f"unknown {name!r}; known: {', '.join(GROUPS)}, and the members of each (`p2pfl models` lists them)"
    return f"{text}; did you mean {close[0]!r}?" if close else text


def has_linear_head(member: str) -> bool:
    """Whether this architecture ends in a single linear layer."""
    return "+" not in member


def build(name: str, peer: int, channels: int, size: Size, classes: int, features: int | None = None) -> Model:
    """A new model for ``peer`` with random weights.

    Args:
        name: a group or a member of one; raises OptionErrors if it is unknown.
        channels, size: of the images; size is (height, width). Raises ModelError if they are too small.
        classes: number of logits.
        features: between backbone and head; by default the group's, or the backbone's own.
    """
    group, member = MODELS.find(name), architecture(name, peer)
    backbone, _, head = member.partition("+")
    make, width = BACKBONES[backbone], features or group.features
    if width is not None:
        network = make(channels, size, width)
    else:
        assert isinstance(make, Own), f"{member} has no number of features of its own, and its group gives none"
        network, width = make.layers(channels, size)
    return Model(member, network, width, classes, HEADS[head](width, classes) if head else None)
