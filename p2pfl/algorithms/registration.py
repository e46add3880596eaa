"""The table of algorithms, and the decorator that adds to it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from p2pfl.algorithms.base import Algorithm
from p2pfl.options import Options
from p2pfl.registry import Table, by_plugin, check_class, check_name, check_options, mistake, register

C = TypeVar("C", bound=type[Any])

ALGORITHMS: Table[type[Algorithm[Any]]] = Table("algorithm")

PAPER = ("authors", "venue", "url")


def algorithm(name: str) -> Callable[[C], C]:
    """Register a subclass of ``Algorithm``; see docs/guide/own-method.md.

    Its ``title``, ``authors``, ``venue`` and ``url`` are optional; ``summary`` is by default the first line of its
    docstring.
    """
    check_name(name, "algorithm")

    def register_class(cls: C) -> C:
        if by_plugin():
            check_algorithm(cls)
        cls.name = name
        summary = (cls.__doc__ or "").strip().partition("\n")[0]
        defaults = {"title": cls.__name__, "summary": summary, **dict.fromkeys(PAPER, "—")}
        for attribute, default in defaults.items():
            if not hasattr(cls, attribute):
                setattr(cls, attribute, default)
        register(ALGORITHMS, name, cls, cls)
        return cls

    return register_class


def check_algorithm(cls: Any) -> None:
    """Raise PluginError if a class cannot be an algorithm."""
    check_class(cls, Algorithm)
    hyper = getattr(cls, "Hyper", None)
    if not (inspect.isclass(hyper) and issubclass(hyper, Options)):
        raise mistake(f"{cls.__name__}.Hyper must be a dataclass derived from Options, e.g. LocalTraining")
    check_options(hyper)
    if not inspect.iscoroutinefunction(cls.round):
        raise mistake(f"{cls.__name__}.round must be `async def`", cls.round)
