"""Register what a run file can name: algorithms, backbones, datasets, partitions, graphs, metrics, losses, ….

    from p2pfl import plugins

    @plugins.algorithm("best-heads")
    class BestHeads(Algorithm[Hyper]): ...

    @plugins.backbone("my-cnn", features=64)
    def my_cnn(channels, size, features): ...

Put them into a file and list it in the run file: ``plugins: [my_method.py]``. Each decorator returns what it
decorates. A mistake raises PluginError with file and line.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from multiprocessing import active_children  # noqa: TID251  # unpickles nothing
from multiprocessing.process import BaseProcess  # noqa: TID251  # as above
from types import FrameType
from typing import Any, TypeVar, get_type_hints

import torch
from pydantic import TypeAdapter

from p2pfl.algorithms import ALGORITHMS
from p2pfl.algorithms.base import Algorithm
from p2pfl.data import AUGMENTATIONS, DATASETS, PARTITIONS, Augmentation, Loader, Partition
from p2pfl.errors import PluginError
from p2pfl.graphs import GRAPHS, Graph, TimeVaryingGraph
from p2pfl.learning.metrics import METRICS, checked_metric
from p2pfl.learning.named_losses import LOSSES, checked_loss
from p2pfl.models import BACKBONES, HEADS, MODELS, BuildHead, Group
from p2pfl.models.backbone import Build, Checked, FixedFeatures, plugin_line
from p2pfl.options import OptionErrors, Options, Table, notes

__all__ = [
    "algorithm",
    "augmentation",
    "backbone",
    "dataset",
    "graph",
    "group",
    "head",
    "loss",
    "metric",
    "partition",
]

C = TypeVar("C", bound=type[Any])
F = TypeVar("F", bound=Callable[..., Any])

TABLES: Mapping[str, Table[Any]] = {
    "algorithm": ALGORITHMS,
    "model": MODELS,  # before backbones, each of which is a model
    "backbone": BACKBONES,
    "head": HEADS,
    "dataset": DATASETS,
    "partition": PARTITIONS,
    "augmentation": AUGMENTATIONS,
    "graph": GRAPHS,
    "metric": METRICS,
    "loss": LOSSES,
}
"""All tables of names, by the kind of thing."""

METHODS = {
    Algorithm: {
        "__init__": "self, hyper, context",
        "setup": "self",
        "round": "self, t, net",
        "layouts": "self",
        "loss": "self, x, labels",
        "predict": "self, x",
        "weights": "self",
        "diagnostics": "self",
        "extra_metrics": "self, whole",
        "on_receive": "self, body",
        "dry_round": "self, t, net, work",
    },
    Loader: {"read": "self, root", "files": "self, root", "download": "self, root"},
    Partition: {"split": "self, data, peers, seed"},
    Augmentation: {"build": "self, channels, size, mirror"},
    Graph: {"edges_of": "self, peers, seed, base"},
    TimeVaryingGraph: {"edges_at": "self, t, peers, seed, base", "period": "self, peers"},
}
"""The methods that are called, and with what."""

PAPER = ("authors", "venue", "url")


def algorithm(name: str) -> Callable[[C], C]:
    """Register a subclass of ``Algorithm``; see docs/guide/own-method.md.

    Its ``title``, ``authors``, ``venue`` and ``url`` are optional; ``summary`` is by default the first line of its
    docstring.
    """
    _check_name(name, "algorithm")

    def register(cls: C) -> C:
        _check_class(cls, Algorithm)
        hyper = getattr(cls, "Hyper", None)
        if not (inspect.isclass(hyper) and issubclass(hyper, Options)):
            raise _mistake(f"{cls.__name__}.Hyper must be a dataclass derived from Options, e.g. LocalTraining")
        _check_options(hyper)
        if not inspect.iscoroutinefunction(cls.round):
            raise _mistake(f"{cls.__name__}.round must be `async def`", cls.round)
        cls.name = name
        summary = (cls.__doc__ or "").strip().partition("\n")[0]
        defaults = {"title": cls.__name__, "summary": summary, **dict.fromkeys(PAPER, "—")}
        for attribute, default in defaults.items():
            if not hasattr(cls, attribute):
                setattr(cls, attribute, default)
        _register("algorithm", name, cls, cls)
        return cls

    return register


def dataset(name: str) -> Callable[[C], C]:
    """Register a subclass of ``p2pfl.data.Loader``, which reads a dataset into arrays."""

    def prepare(cls: type[Loader]) -> None:
        cls.code = os.urandom(8).hex()  # replaced by the plug-in's hash, if a file is loaded; a cell has none

    return _options_decorator("dataset", name, Loader, prepare)


def partition(name: str) -> Callable[[C], C]:
    """Register a subclass of ``p2pfl.data.Partition``."""
    return _options_decorator("partition", name, Partition)


def augmentation(name: str) -> Callable[[C], C]:
    """Register a subclass of ``p2pfl.data.Augmentation``."""
    return _options_decorator("augmentation", name, Augmentation)


def graph(name: str) -> Callable[[C], C]:
    """Register a subclass of ``p2pfl.graphs.Graph``, or of ``TimeVaryingGraph``: they list edges."""
    return _options_decorator("graph", name, Graph)


def backbone(name: str, features: int | None = None) -> Callable[[F], F]:
    """Register a function, or a module class, that builds a backbone.

    Args:
        features: the default number of features, if the function takes (channels, size, features) and returns a
            module from float [B, C, H, W] to float [B, features]. None: it takes (channels, size) and returns the
            module and its number of features, which is pooled to another number if the run file asks for one.
    """
    _check_name(name, "backbone")
    if "+" in name:
        raise _mistake(f"{name!r}: the name of a backbone cannot contain '+', which precedes the head's")

    def register(build: F) -> F:
        if features is None:
            _check_call(build, "channels, size", "or give the decorator a number of features")
            made: Build = FixedFeatures(Checked(name, build, _location(build)).layers)
        else:
            _check_call(build, "channels, size, features", "or leave out the decorator's number of features")
            made = Checked(name, build, _location(build)).module
        _register("model", name, Group((name,), features), build)
        _register("backbone", name, made, build)
        return build

    return register


def head(name: str) -> Callable[[F], F]:
    """Register a function, or a module class, of (features, classes), which builds a head.

    A run file appends its name to that of a backbone: ``models: tiny-cnn+my-head``.
    """
    _check_name(name, "head")

    def register(build: F) -> F:
        _check_call(build, "features, classes")
        made: BuildHead = Checked(name, build, _location(build)).head
        _register("head", name, made, build)
        return build

    return register


def metric(name: str) -> Callable[[F], F]:
    """Register a function of (scores, labels) that measures predictions on the local test split.

    It is given float [N, K] and int64 [N] on the CPU, and returns a number or a dict of numbers. Run files list it:
    ``metrics: [my-metric]``.
    """
    return _checked_function("metric", name, "scores, labels", checked_metric)


def loss(name: str) -> Callable[[F], F]:
    """Register a function of (logits, labels), float [B, K] and int64 [B], that returns the mean loss, a tensor [].

    Methods that train with the cross-entropy of the labels use it in its place: ``algorithm: {…, loss: my-loss}``.
    """
    return _checked_function("loss", name, "logits, labels", checked_loss)


def group(name: str, members: Sequence[str], features: int | None) -> None:
    """Register a mixture: peer m gets member m modulo their number.

    Args:
        members: names of backbones, with ``+`` and the head's if it is not linear.
        features: number of features of all members; None keeps the number of each.
    """
    _check_name(name, "group")
    if unknown := [member for member in members if member not in MODELS]:
        raise _mistake(f"group {name!r}: no model is called {unknown[0]!r}; `p2pfl models` lists them")
    _register("model", name, Group(tuple(members), features))  # of whatever module calls this


def _checked_function(kind: str, name: str, parameters: str, checked: Callable[..., Any]) -> Callable[[F], F]:
    """Register a function of two tensors, once it has worked for four samples of four classes."""
    _check_name(name, kind)

    def register(function: F) -> F:
        _check_call(function, parameters)
        value = checked(name, function, _location(function))

        def attempt() -> None:
            before = set(active_children())
            try:
                value(torch.eye(4, requires_grad=kind == "loss"), torch.arange(4))
            except PluginError:
                raise
            except Exception as error:
                text = f"{kind} {name!r} fails for four samples of four classes: {type(error).__name__}: {error}"
                raise PluginError(*(plugin_line(error) or _location(function)), " ".join(text.split())) from error
            end_servers()
            if left := set(active_children()) - before:
                raise PluginError(*_location(function), f"{kind} {name!r} {left_running(left)}")

        module = sys.modules.get(function.__module__)
        if getattr(getattr(module, "__spec__", None), "_initializing", False):
            _attempts.append(attempt)
        else:
            attempt()
        _register(kind, name, value, function)
        return function

    return register


_attempts: list[Callable[[], None]] = []
"""Trials of functions whose modules are being imported: their processes would wait for the end of the import."""


def try_functions() -> None:
    """Call the functions that were registered during imports, which have ended. Raises PluginError."""
    while _attempts:
        _attempts.pop(0)()


def end_servers() -> None:
    """End the processes that joblib and the method forkserver keep for later calls: forks cannot use them."""
    if (server := sys.modules.get("multiprocessing.forkserver")) is not None:
        with suppress(AttributeError, ChildProcessError):  # of another version; inherited from another process
            server._forkserver._stop()
    if (loky := sys.modules.get("joblib.externals.loky.reusable_executor")) is not None:
        with suppress(AttributeError):  # of another version
            if loky._executor is not None:
                loky._executor.shutdown(wait=True, kill_workers=True)


def left_running(processes: Collection[BaseProcess]) -> str:
    """Return what an error says about these processes, and kill those for which Python would wait at its exit."""
    for process in processes:
        if not process.daemon:
            process.kill()
    return (
        f"leaves {len(processes)} processes running, which peers cannot use: they are forked from this process. End "
        "them where they were started, e.g. `with multiprocessing.Pool(2) as pool:`"
    )


def _options_decorator(
    kind: str, name: str, base: type[Options], prepare: Callable[[Any], None] = lambda cls: None
) -> Callable[[C], C]:
    _check_name(name, kind)

    def register(cls: C) -> C:
        _check_class(cls, base)
        _check_options(cls)
        prepare(cls)
        _register(kind, name, cls, cls)
        return cls

    return register


# ---- checks --------------------------------------------------------------------------------------------------


def _check_name(name: object, kind: str) -> None:
    if not isinstance(name, str):
        raise _mistake(f'write the name: @plugins.{kind}("my-{kind}")')
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9+_-]*", name):
        raise _mistake(f"{name!r} is no name: it should consist of letters, digits, '-', '_' and '+'")


def _check_class(cls: Any, base: type[Any]) -> None:
    if not (inspect.isclass(cls) and issubclass(cls, base)):
        shown = getattr(cls, "__name__", cls)
        raise _mistake(f"{shown} must be a class derived from {base.__module__}.{base.__name__}")
    if inspect.isclass(cls) and issubclass(cls, TimeVaryingGraph):
        base = TimeVaryingGraph
    for method, parameters in METHODS[base].items():
        if callable(defined := getattr(cls, method, None)) and defined is not getattr(base, method, None):
            _check_call(defined, parameters)
    missing = sorted(getattr(cls, "__abstractmethods__", ()))
    for graph_base, method in ((Graph, "edges_of"), (TimeVaryingGraph, "edges_at")):
        if base is graph_base and getattr(cls, method) is getattr(base, method):
            missing = [method]
    if missing:
        text = ", ".join(f"{method}({METHODS[base].get(method, 'self')})" for method in missing)
        raise _mistake(f"{cls.__name__} must define {text}")


def _check_options(cls: type[Options]) -> None:
    own = [name for name in inspect.get_annotations(cls) if not name.startswith("__")]
    fields = {field.name for field in dataclasses.fields(cls)}
    if "__dataclass_fields__" not in vars(cls) and not fields.issuperset(own):
        raise _mistake(f"{cls.__name__} has fields, so it needs the decorator @dataclass(frozen=True)")
    try:
        notes(cls)  # also builds the schema, while the names in its annotations are those of this module
    except Exception as error:
        raise _mistake(_wrong_type(cls, own, error)) from error
    defaults = {field.name: field.default for field in dataclasses.fields(cls) if field.name in own}
    given = {name: value for name, value in defaults.items() if value is not dataclasses.MISSING}
    try:
        cls.parse({name.removesuffix("_"): value for name, value in given.items()})
    except OptionErrors as errors:
        if wrong := [problem for problem in errors.problems if not problem.missing]:
            key = ".".join(map(str, wrong[0].path))
            raise _mistake(f"{cls.__name__}.{key}: the default {wrong[0].message}") from None


def _wrong_type(cls: type[Options], own: Sequence[str], error: Exception) -> str:
    """Return which field has a type that is unknown, or none of a value in a run file."""
    try:
        types = get_type_hints(cls, include_extras=True)
    except NameError as unknown:
        return f"{cls.__name__}: the type of a field is unknown: {unknown}"
    for name in own:
        try:
            TypeAdapter(types[name])
        except Exception:
            found = getattr(types[name], "__name__", types[name])
            return (
                f"{cls.__name__}.{name}: {found} is no type for a run file; use bool, int, float, str, Literal, "
                "tuple, dict or combinations of them"
            )
    return f"{cls.__name__}: its fields are not understood: {' '.join(str(error).split())[:200]}"


def _check_call(function: Any, parameters: str, otherwise: str = "") -> None:
    """Check that ``function`` can be called with these positional parameters."""
    if not callable(function):
        raise _mistake(f"{function!r} cannot be called; it should be a function of ({parameters})")
    try:
        signature = inspect.signature(function)
        signature.bind(*parameters.split(", "))
    except TypeError:
        kind = getattr(function, "__name__", function)
        text = f"{kind}{signature} should take ({parameters})"
        raise _mistake(f"{text}, {otherwise}" if otherwise else text, function) from None


def _register(kind: str, name: str, value: Any, definition: Any = None) -> None:
    """Register what a class or function defines, or the module that calls this one."""
    if hasattr(definition, "__qualname__"):
        defined = f"{definition.__module__}.{definition.__qualname__}"
    else:
        defined = str(_calling_frame().f_globals.get("__name__"))
    try:
        TABLES[kind].register(name, value, defined)
    except OptionErrors as errors:
        raise _mistake(errors.problems[0].message) from None


def _location(function: Any) -> tuple[str, int]:
    """File and line of a definition; of a class, those of its constructor."""
    code = getattr(function, "__code__", None) or getattr(getattr(function, "__init__", None), "__code__", None)
    return (code.co_filename, code.co_firstlineno) if code is not None else _caller()


def _caller() -> tuple[str, int]:
    """File and line of the code that uses this module."""
    frame = _calling_frame()
    return frame.f_code.co_filename, frame.f_lineno


def _calling_frame() -> FrameType:
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _mistake(message: str, definition: Any = None) -> PluginError:
    """An error at the line of ``definition``, or else of the decorator."""
    code = getattr(definition, "__code__", None)
    file, line = (code.co_filename, code.co_firstlineno) if code is not None else _caller()
    return PluginError(file, line, message)
