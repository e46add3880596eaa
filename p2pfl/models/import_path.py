"""Models by import path: any ``torch.nn.Module``, split into a backbone and a head.

Their name is the import path with the arguments and the head, as Python would write the call:

    my_nets.Net                                my_nets.Net(width=32)
    torchvision.models.resnet18                my_nets.Net(width=32):classifier.2

The head is the attribute after ``:``, by default the last linear layer. Parameters called ``classes`` or
``num_classes``, ``channels`` or ``in_channels``, ``size`` (height, width), ``in_features`` and, for tokens,
``vocabulary`` or ``vocab_size`` are filled in from the dataset unless they are given.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import math
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from p2pfl.errors import ModelError, P2pflError, PluginError
from p2pfl.inputs import Size, describe, kind_of, shape_of, zeros
from p2pfl.models.backbone import evaluated, keep_evaluation_modes, plugin_line
from p2pfl.models.splitting import Layout, called, find_layout

_PATH = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+"


@dataclass(frozen=True)
class ImportPath:
    """A parsed name.

    Attributes:
        path: of the class or function, e.g. ``my_nets.Net``.
        arguments: keyword arguments.
        head: path of the head in the module, e.g. ``fc``; None for the last linear layer.
    """

    path: str
    arguments: Mapping[str, Any]
    head: str | None = None

    @property
    def name(self) -> str:
        """The name in its normal form."""
        given = ",".join(f"{key}={value!r}" for key, value in self.arguments.items())
        return f"{self.path}{f'({given})' if given else ''}{f':{self.head}' if self.head else ''}"

    @property
    def module(self) -> str:
        """The module to import: all but the last part of the path."""
        return self.path.rpartition(".")[0]


def parse(name: str) -> ImportPath | None:
    """Parse a name; None if it is not an import path."""
    call, colon, head = name.partition(":") if ")" not in name else _after_call(name)
    found = re.fullmatch(rf"({_PATH})(\(.*\))?", call.strip(), re.DOTALL)
    if found is None or (colon and not re.fullmatch(r"\w+(\.\w+)*", head)):
        return None
    arguments: dict[str, Any] = {}
    if found[3]:
        try:
            node = ast.parse(f"f{found[3]}", mode="eval").body
        except SyntaxError:
            return None
        if not isinstance(node, ast.Call) or node.args or not all(keyword.arg for keyword in node.keywords):
            return None
        try:
            arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
        except ValueError:
            return None
    return ImportPath(found[1], arguments, head or None)


def portable_name(name: str) -> str:
    """Return the name with the last parts of absolute paths in its arguments, which are the same on all hosts."""
    found = parse(name)
    return name if found is None else replace(found, arguments=_last_parts(found.arguments)).name


def _last_parts(value: Any) -> Any:
    if isinstance(value, str):
        return os.path.basename(value) if os.path.isabs(value) else value
    if isinstance(value, list | tuple):
        return type(value)(map(_last_parts, value))
    return {key: _last_parts(item) for key, item in value.items()} if isinstance(value, dict) else value


def _after_call(name: str) -> tuple[str, str, str]:
    end = name.rindex(")") + 1
    return name[:end], name[end : end + 1], name[end + 1 :]


def build_parts(name: str, channels: int, size: Size, classes: int) -> tuple[nn.Module, int, nn.Module, str]:
    """Import and build a model, and split it.

    Returns:
        The backbone, its number of features, the head, and its path in the network. Both parts return float32.

    Raises:
        ModelError: there is no such class, it cannot be built or run on such inputs, its output is not float
            [B, classes], in training too, or it is not the head's output.
    """
    spec = parse(name)
    assert spec is not None
    make = _import(spec)
    layout = _layout(name, make, channels, size, classes, meta=torch.empty(0).is_meta)
    backbone, head = layout.split(_build(spec, make, channels, size, classes))
    return backbone, layout.features, head, layout.head


@lru_cache(maxsize=64, typed=True)  # typed: sizes of series and of tokens are equal
def _layout(name: str, make: Callable[..., Any], channels: int, size: Size, classes: int, *, meta: bool) -> Layout:
    spec = parse(name)
    assert spec is not None
    return find_layout(name, lambda: _build(spec, make, channels, size, classes), channels, size, classes, spec.head)


def _build(spec: ImportPath, make: Callable[..., Any], channels: int, size: Size, classes: int) -> nn.Module:
    try:
        network = make(**{**_filled(spec, make, channels, size, classes), **spec.arguments})
    except P2pflError:
        raise
    except Exception as error:
        text = f"{spec.name!r} cannot be built: {type(error).__name__}: {' '.join(str(error).split())}"
        line = plugin_line(error)
        raise (ModelError if line is None else partial(PluginError, *line))(text + _hint(spec, error)) from error
    if not isinstance(network, nn.Module):
        raise ModelError(f"{spec.name!r} makes {type(network).__name__}, not a torch.nn.Module")
    if any(map(is_lazy, (*network.parameters(), *network.buffers()))):  # they get their shapes from a batch
        called(spec.name, partial(evaluated, network), zeros(2, channels, size), f"for {describe(channels, size)}")
    keep_evaluation_modes(network)
    return network


def _filled(spec: ImportPath, make: Callable[..., Any], channels: int, size: Size, classes: int) -> dict[str, Any]:
    """Return the values of the parameters that the dataset determines.

    A parameter with a default may mean something else, such as a width: see ``_means_inputs``.
    """
    try:
        parameters = dict(inspect.signature(make).parameters)
    except (TypeError, ValueError):
        parameters = {}
    tokens = kind_of(size) == "tokens"
    known: tuple[tuple[tuple[str, ...], Any], ...] = (
        (("num_classes", "classes"), classes),
        (("vocab_size", "vocabulary") if tokens else ("in_channels", "channels"), channels),
        (("size",), size),
        (("in_features",), math.prod(shape_of(channels, size))),
    )
    filled: dict[str, Any] = {}
    for names, value in known:
        for name in names:
            if name in parameters and _means_inputs(parameters[name], parameters):
                filled[name] = value
    if spec.path.startswith("torchvision.models."):
        filled["num_classes"] = classes  # among the **kwargs of its functions
    return filled


_CLEARER = {
    "classes": ("num_classes",),
    "channels": ("in_channels",),
    "vocabulary": ("vocab_size",),
    "in_features": ("in_channels", "channels"),
}
"""For a name that may have another meaning, the names beside which it has."""
_MOST_CHANNELS = 4
"""Of usual images; a larger default of ``channels`` is a width."""


def _means_inputs(parameter: inspect.Parameter, beside: Collection[str]) -> bool:
    """Return whether a parameter of a known name means the dataset's value: always if it has no default."""
    name, default = parameter.name, parameter.default
    if default is inspect.Parameter.empty:
        return True
    if set(_CLEARER.get(name, ())) & set(beside):
        return False
    if name == "size":
        return default is None or isinstance(default, tuple | list)
    return name != "channels" or default is None or (isinstance(default, int) and default <= _MOST_CHANNELS)


def _hint(spec: ImportPath, error: Exception) -> str:
    if spec.path.startswith("torchvision.") and {"weights", "pretrained"} & set(spec.arguments):
        return (
            "; weights of torchvision fit the 1000 classes of ImageNet: load them in a module of yours that replaces "
            "the last layer (docs/guide/own-model.md, Pretrained weights)"
        )
    if isinstance(error, FileNotFoundError):
        return "; a path in `args` starts from the folder of the run file"
    return "; see `args`" if isinstance(error, TypeError) else ""


def _import(spec: ImportPath) -> Callable[..., Any]:
    try:
        module = importlib.import_module(spec.module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{spec.module}.".startswith(f"{error.name}."):
            raise  # a module that it imports is missing
        raise ModelError(f"no module {error.name!r} beside the run file, and none is installed") from None
    attribute = spec.path.rpartition(".")[2]
    made = getattr(module, attribute, None)
    if not callable(made):
        there = sorted(
            key for key, value in vars(module).items() if inspect.isclass(value) and issubclass(value, nn.Module)
        )
        raise ModelError(f"module {spec.module!r} has no class {attribute!r}; it has {', '.join(there) or 'none'}")
    return made  # type: ignore[no-any-return]
