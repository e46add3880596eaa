"""Decorators that add models to the tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from p2pfl.models import BACKBONES, HEADS, MODELS, BuildHead, Group
from p2pfl.models.backbone import Build, Checked, FixedFeatures
from p2pfl.registry import check_call, check_name, location, mistake, register

F = TypeVar("F", bound=Callable[..., Any])


def backbone(name: str, features: int | None = None) -> Callable[[F], F]:
    """Register a function, or a module class, that builds a backbone.

    Args:
        features: the default number of features, if the function takes (channels, size, features) and returns a
            module from float [B, C, H, W] to float [B, features]. None: it takes (channels, size) and returns the
            module and its number of features, which is pooled to another number if the run file asks for one.
    """
    check_name(name, "backbone")
    if "+" in name:
        raise mistake(f"{name!r}: the name of a backbone cannot contain '+', which precedes the head's")

    def register_build(build: F) -> F:
        if features is None:
            check_call(build, "channels, size", "or give the decorator a number of features")
            made: Build = FixedFeatures(Checked(name, build, location(build)).layers)
        else:
            check_call(build, "channels, size, features", "or leave out the decorator's number of features")
            made = Checked(name, build, location(build)).module
        register(MODELS, name, Group((name,), features), build)
        register(BACKBONES, name, made, build)
        return build

    return register_build


def head(name: str) -> Callable[[F], F]:
    """Register a function, or a module class, of (features, classes), which builds a head.

    A run file appends its name to that of a backbone: ``models: tiny-cnn+my-head``.
    """
    check_name(name, "head")

    def register_build(build: F) -> F:
        check_call(build, "features, classes")
        made: BuildHead = Checked(name, build, location(build)).head
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
    if unknown := [member for member in members if member not in MODELS]:
        raise mistake(f"group {name!r}: no model is called {unknown[0]!r}; `p2pfl models` lists them")
    register(MODELS, name, Group(tuple(members), features))  # of whatever module calls this
