"""Decorators for functions of two tensors, such as metrics and losses, which are tried before a run begins."""

from __future__ import annotations

import sys
from collections.abc import Callable
from multiprocessing import active_children  # noqa: TID251  # unpickles nothing
from typing import Any, TypeVar

import torch

from p2pfl.errors import PluginError
from p2pfl.leftover_processes import end_servers, left_running
from p2pfl.models.backbone import plugin_line
from p2pfl.registry import Table, by_plugin, check_call, check_name, location, register

F = TypeVar("F", bound=Callable[..., Any])

_attempts: list[Callable[[], None]] = []
"""Trials of functions whose modules are being imported: their processes would wait for the end of the import."""


def function_decorator(
    table: Table[Any], parameters: str, checked: Callable[..., Any], *, gradient: bool = False
) -> Callable[[str], Callable[[F], F]]:
    """Return a decorator ``@metric("my-metric")``. A plug-in's function must work for four samples of four classes.

    Args:
        parameters: what the function is called with.
        checked: maps name, function and location to a function that checks the result of ``function``.
        gradient: try it with scores that need a gradient.
    """

    def decorator(name: str) -> Callable[[F], F]:
        check_name(name, table.kind)

        def register_function(function: F) -> F:
            value = function
            if by_plugin():
                check_call(function, parameters)
                value = checked(name, function, location(function))
                _try(f"{table.kind} {name!r}", value, location(function), gradient)
            register(table, name, value, function)
            return function

        return register_function

    return decorator


def _try(shown: str, function: Callable[..., Any], place: tuple[str, int], gradient: bool) -> None:
    """Call a function, at once or after the import of its module. Raises PluginError."""

    def attempt() -> None:
        before = set(active_children())
        try:
            function(torch.eye(4, requires_grad=gradient), torch.arange(4))
        except PluginError:
            raise
        except Exception as error:
            text = f"{shown} fails for four samples of four classes: {type(error).__name__}: {error}"
            raise PluginError(*(plugin_line(error) or place), " ".join(text.split())) from error
        end_servers()
        if left := set(active_children()) - before:
            raise PluginError(*place, f"{shown} {left_running(left)}")

    module = sys.modules.get(function.__module__)
    if getattr(getattr(module, "__spec__", None), "_initializing", False):
        _attempts.append(attempt)
    else:
        attempt()


def try_functions() -> None:
    """Call the functions that were registered during imports, which have ended. Raises PluginError."""
    while _attempts:
        _attempts.pop(0)()
