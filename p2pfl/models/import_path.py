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
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from p2pfl.errors import ModelError, P2pflError, PluginError
from p2pfl.inputs import Size, describe, kind_of, shape_of, varied, zeros
from p2pfl.models.backbone import evaluated, output_shape, plugin_line, shape_text

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
    """Parse a name; None if it is no import path."""
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


def _after_call(name: str) -> tuple[str, str, str]:
    end = name.rindex(")") + 1
    return name[:end], name[end : end + 1], name[end + 1 :]


def build_parts(name: str, channels: int, size: Size, classes: int) -> tuple[nn.Module, int, nn.Module]:
    """Import and build a model, and split it.

    Returns:
        The backbone, its number of features, and the head.

    Raises:
        ModelError: there is no such class, it cannot be built or run on such inputs, its output is not float
            [B, classes], or it is not that of the head.
    """
    spec = parse(name)
    assert spec is not None
    network = _build(spec, channels, size, classes)
    where = spec.head or _last_linear(name, network)
    try:
        head = network.get_submodule(where)
    except AttributeError:
        near = ", ".join(child for child, _ in network.named_children())
        raise ModelError(f"{name!r} has no part {where!r} to be its head; its parts are {near}") from None
    if not list(head.parameters()):
        raise ModelError(f"{name!r}: its part {where!r} has nothing to train; name its last layer as `head`")
    inputs = describe(channels, size)
    found = _run(name, network, zeros(2, channels, size), inputs)
    if found != (2, classes):
        remedy = _remedy(spec, found)
        raise ModelError(f"{name!r} maps 2 {inputs} to {shape_text(found)} instead of [2, {classes}]{remedy}")
    probe = varied(2, channels, size)
    whole = evaluated(network, probe)
    network.set_submodule(where, nn.Identity())
    features = _run(name, network, zeros(2, channels, size), f"{inputs}, without its head {where!r}")
    if features is None or len(features) != 2:
        raise ModelError(
            f"{name!r} passes {shape_text(features)} to its head {where!r} instead of [2, features]; name another "
            "part as `head`"
        )
    if not probe.is_meta and not torch.allclose(evaluated(head, evaluated(network, probe)), whole, equal_nan=True):
        raise ModelError(
            f"{name!r}: the output is not that of its head {where!r}; name the last part as `head`, and return its "
            "output (logits) unchanged"
        )
    return network, features[1], head


def _build(spec: ImportPath, channels: int, size: Size, classes: int) -> nn.Module:
    make = _import(spec)
    known = {
        "classes": classes,
        "num_classes": classes,
        "size": size,
        "in_features": math.prod(shape_of(channels, size)),
    }
    names = ("vocabulary", "vocab_size") if kind_of(size) == "tokens" else ("channels", "in_channels")
    known |= dict.fromkeys(names, channels)
    try:
        accepted = set(inspect.signature(make).parameters)
    except (TypeError, ValueError):
        accepted = set()
    if spec.path.startswith("torchvision.models."):
        accepted |= {"num_classes"}  # among the **kwargs of its functions
    filled = {key: value for key, value in known.items() if key in accepted}
    try:
        network = make(**{**filled, **spec.arguments})
    except P2pflError:
        raise
    except Exception as error:
        text = f"{spec.name!r} cannot be built: {type(error).__name__}: {' '.join(str(error).split())}"
        line = plugin_line(error)
        hint = "; see `args`" if isinstance(error, TypeError) else ""
        raise (ModelError(text + hint) if line is None else PluginError(*line, text)) from error
    if not isinstance(network, nn.Module):
        raise ModelError(f"{spec.name!r} makes {type(network).__name__}, not a torch.nn.Module")
    return network


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


def _last_linear(name: str, network: nn.Module) -> str:
    linear: list[str] = [path for path, module in network.named_modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise ModelError(f"{name!r} has no linear layer; name its head: `head: classifier`")
    return linear[-1]


def _remedy(spec: ImportPath, found: tuple[int, ...] | None) -> str:
    if found is None or len(found) != 2 or {"classes", "num_classes"} & set(spec.arguments):
        return ""
    return "; give it a parameter `num_classes`, or set the number of outputs in `args`"


def _run(name: str, network: nn.Module, batch: Tensor, what: str) -> tuple[int, ...] | None:
    try:
        return output_shape(network, batch)
    except Exception as error:
        text = f"{name!r} fails for {what}: {type(error).__name__}: {' '.join(str(error).split())}"
        line = plugin_line(error)
        raise (ModelError(text) if line is None else PluginError(*line, text)) from error
