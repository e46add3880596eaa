"""Build the model of a peer from the name of a group or of an architecture."""

from __future__ import annotations

import difflib

from torch import nn

from p2pfl.errors import ModelError
from p2pfl.inputs import Kind, Size, describe, kind_of
from p2pfl.models import import_path
from p2pfl.models.backbone import FixedFeatures
from p2pfl.models.model import Model
from p2pfl.models.registration import BACKBONES, FAMILIES, HEADS, MODELS, Group, groups, of_family, pattern

FOR_KIND: dict[Kind, str] = {
    "images": "tiny4",
    "series": f"{pattern('conv1d')} or {pattern('mlp')}",
    "vectors": pattern("mlp"),
    "tokens": pattern("embedding"),
}
"""Models of this project for each kind of inputs."""


def architecture(group: str | Group, peer: int) -> str:
    """Return the member of a group, or of the group of that name, for ``peer``. Raises OptionErrors if unknown."""
    members = (MODELS.find(group) if isinstance(group, str) else group).members
    return members[peer % len(members)]


def unknown_model(name: str) -> str:
    """Describe the error of a name that is not in MODELS: list the groups and suggest the closest name."""
    close = difflib.get_close_matches(name, MODELS, n=1)
    known = ", ".join(dict.fromkeys((*groups(), *MODELS.registered)))
    *others, last = map(pattern, FAMILIES)
    known += f", the members of each (`p2pfl models` lists them), {', '.join(others)} and {last}"
    text = f"unknown {name!r}; known: {known}, or an import path such as my_nets.Net"
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
    if kind_of(size) != "images" and of_family(backbone) is None and backbone not in BACKBONES.registered:
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
