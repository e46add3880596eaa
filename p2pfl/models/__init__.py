"""Models: a backbone maps inputs to features, a head maps features to logits.

A run file names a group, whose member m modulo its length goes to peer m, or one member for all peers: ``resnet18``,
``htfe-resnet34+fc256`` for a backbone with one of ``HEADS``, ``mlp-64-32`` for layers of these widths, or
``my_nets.Net(width=32)`` for a module to import. Most groups have members with equally many features, so that peers
can exchange heads and prototypes. Initial weights are drawn from torch's global RNG.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from p2pfl.errors import ModelError
from p2pfl.inputs import Kind, Size, describe, kind_of
from p2pfl.models import dfml, fedtgp, import_path, l2c, mapl, mlp, sequences, tiny
from p2pfl.models.backbone import Build, FixedFeatures, plain_cnn
from p2pfl.registry import Table
from p2pfl.tensors import frozen_of, note_frozen

BuildHead = Callable[[int, int], nn.Module]
"""Maps (features, classes) to a module from float [B, features] to float [B, classes]."""


class Model(nn.Module):
    """A backbone and its head.

    Attributes:
        name: of the architecture, e.g. ``tiny-cnn`` or ``htfe-cnn+fc512``.
        backbone: maps inputs such as float [B, C, H, W] to features, float [B, features].
        head: maps features to logits, float [B, classes]; one linear layer by default.
        head_path: where the head is in the network of a user that was split; None if none was, or if its number of
            features was changed.
    """

    def __init__(
        self,
        name: str,
        backbone: nn.Module,
        features: int,
        classes: int,
        head: nn.Module | None = None,
        head_path: str | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self.head_path = head_path
        self.features = features
        self.classes = classes
        self.backbone = backbone
        self.head = nn.Linear(features, classes) if head is None else head
        note_frozen(self)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.backbone(x))
        return logits

    def plain_name(self, name: str) -> str:
        """Return the name of a parameter, buffer or attribute in the network of the user that was split."""
        part, _, rest = name.partition(".")
        if self.head_path is None or part not in ("backbone", "head"):
            return name
        return ".".join(filter(None, (self.head_path if part == "head" else "", rest)))

    def plain_state_dict(self) -> dict[str, Any]:
        """Return the state under the names of the user's class, which can load it; else under ours."""
        return {self.plain_name(name): value for name, value in self.state_dict().items()}

    @property
    def linear_head(self) -> nn.Linear:
        """The head, if it is a single linear layer with weights [K, d].

        A method that needs it sets ``Algorithm.linear_heads``, so that other models are rejected with the run file.

        Raises:
            ModelError: the head has several layers, or is frozen.
        """
        if not isinstance(self.head, nn.Linear):
            raise ModelError(f"{self.name!r} has a head of several layers, but the method needs a linear head")
        if "weight" in frozen_of(self.head):
            raise ModelError(f"{self.name!r} has a frozen head, but the method needs one that trains")
        return self.head

    def reset_linear_head(self) -> nn.Linear:
        """Draw the head's initial values anew, and return it. Raises ModelError as ``linear_head`` does.

        They are drawn on the CPU: from equal seeds, the generator of a GPU draws other values.
        """
        head = self.linear_head
        drawn = deepcopy(head).cpu()
        drawn.reset_parameters()
        head.load_state_dict(drawn.state_dict())
        return head


@dataclass(frozen=True)
class Group:
    """Architectures that are assigned to peers in turn.

    Attributes:
        members: names of backbones, followed by ``+`` and the head if that is not linear.
        features: d, unless the run file sets it; None keeps the number of each ``FixedFeatures`` backbone.
    """

    members: tuple[str, ...]
    features: int | None


def _fc(hidden: int) -> BuildHead:
    return lambda features, classes: nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, classes))


def _clipped(features: int, classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(features, classes), nn.ReLU())


HEADS: Table[BuildHead] = Table(
    "head", {"linear": nn.Linear, "fc512": _fc(512), "fc256": _fc(256), "fc128": _fc(128), "relu": _clipped}
)
"""The four heads of FedTGP's HtC4; and ``relu``, whose scores are clipped at 0, as in later code of L2C's authors."""

DFML_CNN = {
    "-".join(["dfml-cnn", *map(str, widths)]): widths
    for widths in (
        *((128, 256), (64, 128), (32, 64), (16, 32), (8, 16)),
        *((32, 64, 128, 256), (32, 64, 128), (16, 32, 64), (8, 16, 32, 64)),
    )
}
"""Channels of the convolutions of DFML's CNNs."""


_FAMILIES: dict[str, Callable[[Sequence[int]], Callable[[int, Size], tuple[nn.Module, int]]]] = {
    "mlp": mlp.mlp,
    "conv1d": sequences.conv1d,
    "embedding": sequences.embedding,
}

FOR_KIND: dict[Kind, str] = {
    "images": "tiny4",
    "series": f"{sequences.CONV1D} or {mlp.MLP}",
    "vectors": mlp.MLP,
    "tokens": sequences.EMBEDDING,
}
"""Models of this project for each kind of inputs."""


def _family(name: str) -> FixedFeatures | None:
    """The backbone of a name like ``mlp-64-32``: each width has one to five digits, without leading 0."""
    found = re.fullmatch(r"(\w+)((-[1-9][0-9]{0,4})+)", name)
    if found is None or found[1] not in _FAMILIES:
        return None
    return FixedFeatures(_FAMILIES[found[1]]([int(width) for width in found[2].split("-")[1:]]))


_RESNET_DEPTHS = (4, 6, 8, 10, 18, 34, 50, 101, 152)

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
        "htfe-cnn": FixedFeatures(plain_cnn),
        "htfe-googlenet": FixedFeatures(fedtgp.googlenet),
        "htfe-mobilenet": FixedFeatures(fedtgp.mobilenet),
        **{f"htfe-resnet{depth}": FixedFeatures(fedtgp.resnet(depth)) for depth in _RESNET_DEPTHS},
        **{f"htcnn-{number}": FixedFeatures(fedtgp.htcnn(number)) for number in range(1, 9)},
        **{name: FixedFeatures(dfml.cnn(widths)) for name, widths in DFML_CNN.items()},
        **{f"dfml-resnet-{width}": FixedFeatures(dfml.resnet(width)) for width in (64, 32, 16, 8, 4)},
        **{f"dfml-vit-{dim}": FixedFeatures(dfml.vit(dim)) for dim in (512, 256, 128, 64, 32)},
        **{f"dfml-efficientnet-b{number}": FixedFeatures(dfml.efficientnet(number)) for number in dfml.EFFICIENTNET},
        "l2c-cnn": FixedFeatures(plain_cnn),
        "l2c-conv4": FixedFeatures(l2c.conv4),
    },
    family=_family,
)

_HTFE8 = (
    *("htfe-cnn", "htfe-googlenet", "htfe-mobilenet"),
    *("htfe-resnet18", "htfe-resnet34", "htfe-resnet50", "htfe-resnet101", "htfe-resnet152"),
)
_HTC4 = ("", "+fc512", "+fc256", "+fc128")

GROUPS: Table[Group] = Table(
    "group",
    {
        "tiny4": Group(("tiny-cnn", "tiny-wide", "tiny-residual", "tiny-mixer"), features=64),
        "mapl4": Group(("resnet18", "shufflenet", "googlenet", "alexnet-small"), features=512),
        "htfe2": Group(("htfe-cnn", "htfe-resnet18"), features=512),
        "htfe3": Group(("htfe-resnet10", "htfe-resnet18", "htfe-resnet34"), features=512),
        "htfe4": Group(("htfe-cnn", "htfe-googlenet", "htfe-mobilenet", "htfe-resnet18"), features=512),
        "htfe8": Group(_HTFE8, features=512),
        "htfe9": Group(tuple(f"htfe-resnet{depth}" for depth in _RESNET_DEPTHS), features=512),
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


def _single(member: str) -> Group:
    """A group of one member, with the number of features in its name, or of the first group that contains it."""
    if _family(member) is not None:
        return Group((member,), int(member.rpartition("-")[2]))
    features = next((group.features for group in GROUPS.values() if member in group.members), None)
    backbone, plus, _ = member.partition("+")
    if features is None and plus:
        features = MODELS[backbone].features
    return Group((member,), features)


def _is_member(name: str) -> bool:
    """Whether ``name`` is an import path, a backbone, or one with a head, outside of the tables."""
    if import_path.parse(name) is not None:
        return True
    backbone, plus, head = name.partition("+")
    return backbone in BACKBONES and (not plus or (head in HEADS and not _family(backbone)))


_MEMBERS = dict.fromkeys(member for group in GROUPS.values() for member in group.members)

MODELS: Table[Group] = Table(
    "model",
    {**GROUPS, **{member: _single(member) for member in (*BACKBONES, *_MEMBERS)}},
    family=lambda name: _single(name) if _is_member(name) else None,
)
"""Every name that a run file may use: the groups, and each architecture as a group of one."""


def architecture(group: str | Group, peer: int) -> str:
    """Return the member of a group, or of the group of that name, for ``peer``. Raises OptionErrors if unknown."""
    members = (MODELS.find(group) if isinstance(group, str) else group).members
    return members[peer % len(members)]


def unknown_model(name: str) -> str:
    """Describe the error of a name that is not in MODELS: list the groups and suggest the closest name."""
    close = difflib.get_close_matches(name, MODELS, n=1)
    known = ", ".join((*GROUPS, *MODELS.registered))
    patterns = f"{mlp.MLP}, {sequences.CONV1D} and {sequences.EMBEDDING}"
    known += f", the members of each (`p2pfl models` lists them), {patterns}, or an import path such as my_nets.Net"
    text = f"unknown {name!r}; known: {known}"
    return f"{text}; did you mean {close[0]!r}?" if close else text


def has_linear_head(member: str) -> bool:
    """Whether this architecture's head is a single linear layer, as far as its name tells."""
    return "+" not in member


def build(
    group: str | Group, peer: int, channels: int, size: Size, classes: int, features: int | None = None
) -> Model:
    """Create the model of ``peer`` with random weights.

    Args:
        group: a group, or the name of one or of an architecture.
        peer: selects the member of the group.
        channels, size: of the inputs, as in p2pfl/inputs.py: of images, size is (height, width).
        classes: number of logits.
        features: size of the feature vector; by default the group's, or else the backbone's.

    Raises:
        OptionErrors: the name is unknown.
        ModelError: images are too small for the model, or it takes other inputs.
    """
    member = architecture(group, peer)
    if isinstance(group, str):
        group = MODELS.find(group)
    if import_path.parse(member) is not None:
        return _imported(member, channels, size, classes, features or group.features)
    backbone, _, head = member.partition("+")
    if kind_of(size) != "images" and _family(backbone) is None and backbone not in BACKBONES.registered:
        use = FOR_KIND[kind_of(size)]
        raise ModelError(f"{member!r} takes images, but the dataset has {describe(channels, size)}; use {use}")
    make, width = BACKBONES[backbone], features or group.features or MODELS[member].features
    if width is not None:
        network = make(channels, size, width)
    else:
        assert isinstance(make, FixedFeatures), f"{member}: its group must set the number of features"
        network, width = make.layers(channels, size)
    return Model(member, network, width, classes, HEADS[head](width, classes) if head else None)


def _imported(member: str, channels: int, size: Size, classes: int, features: int | None) -> Model:
    network, width, head, path = import_path.build_parts(member, channels, size, classes)
    if features in (None, width):
        return Model(member, network, width, classes, head, path)
    if not isinstance(head, nn.Linear):
        raise ModelError(f"{member!r} has {width} features, and its head cannot be replaced by one for {features}")
    return Model(
        member,
        nn.Sequential(network, nn.AdaptiveAvgPool1d(features)),
        features,
        classes,
        nn.Linear(features, classes),
    )
