"""Check what the methods of an algorithm return: they may be a plug-in's.

All raise PluginError with the line of the method and what it should return.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from p2pfl import PeerId
from p2pfl.algorithms.base import Algorithm
from p2pfl.errors import PluginError
from p2pfl.learning.evaluation import ExtraMetric
from p2pfl.messaging.schema import Body, Layout
from p2pfl.models import Model
from p2pfl.plugins.loading import naming_lines
from p2pfl.session.screening import screening_layouts


def check_setup(algorithm: Algorithm[Any]) -> None:
    """Check that the constructor and ``setup`` have set what the session uses."""
    cls = type(algorithm)
    model, state = (getattr(algorithm, name, None) for name in ("model", "state"))
    if model is None:
        raise PluginError.of(cls.__init__, "__init__ should call super().__init__(hyper, context); better use setup")
    if not isinstance(model, Model):
        text = f"self.model should remain the network that the run file names, not {_kind(model)}"
        raise PluginError.of(cls.setup, f"{text}; for another one, register a backbone or set models in the run file")
    if isinstance(state, str):
        raise PluginError.of(cls.setup, f"state should be a tuple of names, ({state!r},), not a string")


@naming_lines()
def layouts_of(algorithm: Algorithm[Any]) -> Sequence[Layout]:
    """Return the layouts, and set them as what the algorithm accepts: it checks what it sends as receivers do."""
    layouts: object = algorithm.layouts()
    expected = "layouts should return a list with a Layout.of(body) for each kind of message"
    if not isinstance(layouts, Iterable):
        raise PluginError.of(algorithm.layouts, f"{expected}, not {_kind(layouts)}")
    found = list(layouts)
    for layout in found:
        if not isinstance(layout, Layout):
            what = f"the body itself, {_kind(layout)}" if isinstance(layout, Body) else _kind(layout)
            raise PluginError.of(algorithm.layouts, f"{expected}, not {what}")
    algorithm.accepted = [*found, *screening_layouts(algorithm)]
    return algorithm.accepted


def weights_of(algorithm: Algorithm[Any]) -> Mapping[PeerId, float] | None:
    weights: object = algorithm.weights()
    if weights is None:
        return None
    found = _numbers(algorithm.weights, weights, "weights by peer, or None")
    for j, weight in found.items():
        if not (isinstance(j, int) and 0 <= j < algorithm.peers):
            known = f"the peers are 0 to {algorithm.peers - 1}"
            raise PluginError.of(algorithm.weights, f"weights should be by peer, but {j!r} is not one: {known}")
        if not math.isfinite(weight):
            text = f"weights should be finite, but the weight of peer {j} is {weight}"
            raise PluginError.of(algorithm.weights, text)
    return found


def diagnostics_of(algorithm: Algorithm[Any]) -> Mapping[str, float]:
    return _numbers(algorithm.diagnostics, algorithm.diagnostics(), "numbers by name")


def extra_metrics_of(algorithm: Algorithm[Any], whole: bool) -> Iterator[ExtraMetric]:
    metrics: object = algorithm.extra_metrics(whole)
    items = metrics if isinstance(metrics, Iterable) else [metrics]
    for item in items:  # perhaps a generator: its models may not fit into memory together
        if not isinstance(item, ExtraMetric):
            text = f"extra_metrics should return a list of ExtraMetric, not {_kind(item)}"
            raise PluginError.of(algorithm.extra_metrics, text)
        yield item


def _numbers(method: Callable[[], object], values: object, expected: str) -> dict[Any, float]:
    """Return the mapping with numbers of NumPy and torch as plain ones."""
    name = getattr(method, "__name__", "the method")
    if not isinstance(values, Mapping):
        raise PluginError.of(method, f"{name} should return a dict of {expected}, not {_kind(values)}")
    found: dict[Any, float] = {}
    for key, value in values.items():
        try:
            if isinstance(value, str | bytes):
                raise TypeError
            plain = value if isinstance(value, int | float) else float(value)
        except (TypeError, ValueError, RuntimeError):
            text = f"{name} should return a dict of {expected}, but {key!r} is {_kind(value)}"
            raise PluginError.of(method, text) from None
        found[key.item() if hasattr(key, "item") else key] = plain
    return found


def _kind(value: object) -> str:
    return "None" if value is None else f"of type {type(value).__name__}"
