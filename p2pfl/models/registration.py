"""The tables of models, and the decorators that add to them, for built-ins and plug-ins."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from p2pfl.models import import_path
from p2pfl.models.backbone import Build, Checked, FixedFeatures, Layers
from p2pfl.registry import Table, by_plugin, check_call, check_name, location, mistake, register

F = TypeVar("F", bound=Callable[..., Any])

BuildHead = Callable[[int, int], nn.Module]
"""Maps (features, classes) to a module from float [B, features] to float [B, classes]."""


@dataclass(frozen=True)
class Group:
    """Architectures that are assigned to peers in turn.

    Attributes:
        members: names of backbones, followed by ``+`` and the head if that is not linear.
        features: d, unless the run file sets it; None keeps the number of each ``FixedFeatures`` backbone.
    """

    members: tuple[str, ...]
    features: int | None


FAMILIES: dict[str, Callable[[Sequence[int]], Layers]] = {}
"""Backbones of any widths, by the first part of their names, such as ``mlp`` of ``mlp-64-32``."""


def of_family(name: str) -> FixedFeatures | None:
    """Return the backbone of a name like ``mlp-64-32``: each width has one to five digits, without leading 0."""
    found = re.fullmatch(r"(\w+)((-[1-9][0-9]{0,4})+)", name)
    if found is None or found[1] not in FAMILIES:
        return None
    return FixedFeatures(FAMILIES[found[1]]([int(width) for width in found[2].split("-")[1:]]))


def _single(name: str) -> Group | None:
    """Return a group of one: an import path, a member of a family, or a backbone with another head."""
    if import_path.parse(name) is not None:
        return Group((name,), None)
    if of_family(name) is not None:
        return Group((name,), int(name.rpartition("-")[2]))
    backbone, _, head = name.partition("+")
    known = head in HEADS and backbone in BACKBONES and not of_family(backbone)
    return Group((name,), MODELS[backbone].features) if known else None


BACKBONES: Table[Build] = Table("backbone", family=of_family)
HEADS: Table[BuildHead] = Table("head")
MODELS: Table[Group] = Table("model", family=_single)
"""Every name that a run file may use: the groups, and each backbone as a group of one."""


def groups() -> dict[str, Group]:
    """Return the groups that are not just a backbone."""
    return {name: group for name, group in MODELS.items() if group.members != (name,)}


def backbone(name: str, features: int | None = None, *, pooled: bool = False) -> Callable[[F], F]:
    """Register a function, or a module class, that builds a backbone.

    Args:
        features: the default number of features, if the function takes (channels, size, features) and returns a
            module from float [B, C, H, W] to float [B, features]. None: it takes (channels, size) and returns the
            module and its number of features, which is pooled to another number if the run file asks for one.
        pooled: it takes (channels, size) and returns both, and ``features`` is the number to which they are pooled.
    """
    check_name(name, "backbone")
    if "+" in name:
        raise mistake(f"{name!r}: the name of a backbone cannot contain '+', which precedes the head's")
    fixed = features is None or pooled

    def register_build(build: F) -> F:
        made: Callable[..., Any] = build
        if by_plugin():
            if fixed:
                check_call(build, "channels, size", "or give the decorator a number of features")
            else:
                check_call(build, "channels, size, features", "or leave out the decorator's number of features")
            checked = Checked(name, build, location(build))
            made = checked.layers if fixed else checked.module
        register(MODELS, name, Group((name,), features), build)
        register(BACKBONES, name, FixedFeatures(made) if fixed else made, build)
        return build

    return register_build


def head(name: str) -> Callable[[F], F]:
    """Register a function, or a module class, of (features, classes), which builds a head.

    A run file appends its name to a backbone's: ``models: tiny-cnn+my-head``.
    """
    check_name(name, "head")

    def register_build(build: F) -> F:
        made: BuildHead = build
        if by_plugin():
            check_call(build, "features, classes")
            made = Checked(name, build, location(build)).head
        register(HEADS, name, made, build)
        return build

    return register_build


def group(name: str, members: Sequence[str], features: int | None) -> None:
    """Register a mixture: peer m gets member m modulo their number.

    Args:
        members: names of backbones, with ``+`` and the head's if it is not linear.
        features: number of features of all members; None keeps the number of each.
    """
    check_name(name, "group")
    if by_plugin() and (unknown := [member for member in members if member not in MODELS]):
        raise mistake(f"group {name!r}: no model is called {unknown[0]!r}; `p2pfl models` lists them")
    register(MODELS, name, Group(tuple(members), features))  # of whatever module calls this


def family(name: str) -> Callable[[F], F]:
    """Register backbones of any widths, as ``name-64-32``: a function from their widths to a function of (channels,
    size), which returns the module and its number of features."""

    def register_widths(build: F) -> F:
        FAMILIES[name] = build
        return build

    return register_widths


def pattern(family: str) -> str:
    """Return how errors and lists show the names of a family."""
    return f"{family}-WIDTH-…"
