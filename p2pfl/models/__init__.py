"""Models: a backbone maps inputs to features, a head maps features to logits.

A run file names a group, whose member m modulo its length goes to peer m, or one member for all peers: ``resnet18``,
``htfe-resnet34+fc256`` for a backbone with one of ``HEADS``, ``mlp-64-32`` for layers of these widths, or
``my_nets.Net(width=32)`` for a module to import. Most groups have members with equally many features, so that peers
can exchange heads and prototypes. Initial weights are drawn from torch's global RNG.

Every module of this package registers its names (``registration.py``).
"""

from __future__ import annotations

from p2pfl.models.building import architecture, build, has_linear_head, unknown_model
from p2pfl.models.model import Model
from p2pfl.models.registration import BACKBONES, HEADS, MODELS, Group, groups
from p2pfl.registry import discover

discover(__name__, BACKBONES, HEADS, MODELS)

__all__ = [
    "BACKBONES",
    "HEADS",
    "MODELS",
    "Group",
    "Model",
    "architecture",
    "build",
    "groups",
    "has_linear_head",
    "unknown_model",
]
