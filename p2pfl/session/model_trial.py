"""Try out a user's model before a run: training steps and evaluations as its peers do them.

It happens on networks that are thrown away. What cannot work is an error; what would make a run differ from its
repetition, or from itself after a crash, is a remark.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from p2pfl import PeerId
from p2pfl.errors import ModelError
from p2pfl.models import Model
from p2pfl.models.import_path import parse
from p2pfl.models.splitting import called
from p2pfl.session.checkpoint import Unstorable, check_storable
from p2pfl.tensors import digest

MOST_OPERATIONS = 2e9
"""Multiply-adds of all batches of training, forward, and of all in evaluations: some 0.3 s on a core. Batches above
are not tried, but smaller ones have been."""


@dataclass(frozen=True)
class Trial:
    """What a model is tried out on.

    Attributes:
        name: of the model, for errors.
        build: builds it, from the same random numbers each time.
        batch: returns so many training samples: network input and labels.
        inputs: e.g. ``images of 1x8x8``, for errors.
        trained: {size of a batch in training: the first peer that has one}.
        evaluated: the same of batches in evaluations.
        optimizer: makes the run's optimizer; None if the method has another one.
        seeded: a context that seeds torch's global generator equally each time.
    """

    name: str
    build: Callable[[], Model]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    inputs: str
    trained: Mapping[int, PeerId]
    evaluated: Mapping[int, PeerId]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None
    seeded: Callable[[], AbstractContextManager[None]]

    def remarks(self) -> Sequence[str]:
        """Try the model. Raises ModelError, PluginError."""
        model, copy = self.build(), self.build()
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ModelError(f"{self.name!r} has nothing to train: none of its parameters has requires_grad")
        found = _unexpected_head(self.name, model)
        before = _attributes(model), _class_attributes(model)
        tried = partial(_in_order, most=MOST_OPERATIONS / max(1, self._operations(model)))
        untouched = self._train(model, tried({2, *self.trained}))
        if untouched:
            found.append(f"no gradient reaches {_listed(untouched)}: training does not change these parameters")
        found += self._resumed(model, copy, *before)
        self._evaluate(model, tried({1, *self.evaluated}))
        return [f"{self.name!r}: {text}" for text in found]

    def _operations(self, model: Model) -> int:
        """Return the multiply-adds of linear and convolutional layers for one sample."""
        counts: list[int] = []

        def count(module: nn.Module, inputs: object, output: Tensor) -> None:
            weight: Any = module.weight
            counts.append(output.numel() * (weight.numel() // weight.shape[0]))

        layers = [module for module in model.modules() if isinstance(module, nn.Linear | nn.modules.conv._ConvNd)]
        handles = [layer.register_forward_hook(count) for layer in layers]
        model.eval()
        with torch.no_grad(), self.seeded():
            called(self.name, model, self.batch(2)[0], self._when("evaluation of", 2, {}))
        for handle in handles:
            handle.remove()
        return sum(counts) // 2

    def _train(self, model: Model, sizes: Sequence[int]) -> list[str]:
        """Train on batches of these sizes; return the names of the parameters that got no gradient."""
        parameters = {model.plain_name(name): parameter for name, parameter in model.named_parameters()}
        untouched = [name for name, parameter in parameters.items() if parameter.requires_grad]
        optimizer = None if self.optimizer is None else self.optimizer(model.parameters())
        model.train()
        for size in sizes:
            when = self._when("training on", size, self.trained)
            if size == 1:
                when += " (batch normalization needs two: give peers more samples, and batches of two or more)"
            with self.seeded():
                x, labels = self.batch(size)
                loss = nn.functional.cross_entropy(self._output(model, x, when), labels)
                called(self.name, torch.autograd.backward, loss, when)
            untouched = [name for name in untouched if parameters[name].grad is None]
            if optimizer is not None:
                called(self.name, lambda _: optimizer.step(), x, f"in a step of {type(optimizer).__name__}")
            model.zero_grad(set_to_none=True)
        return untouched

    def _resumed(
        self, model: Model, copy: Model, before: Mapping[str, str], of_classes: Mapping[str, str]
    ) -> Iterator[str]:
        """Compare how a trained model continues with how a copy continues that is restored from its state."""
        state = model.state_dict()
        for key, value in state.items():
            try:
                check_storable(value)
            except Unstorable as error:
                text = (
                    f"get_extra_state of {model.plain_name(key).rpartition('.')[0] or 'the module'} returns a value"
                )
                raise ModelError(f"{self.name!r}: {text} {error}") from None
        state = {key: value if isinstance(value, Tensor) else deepcopy(value) for key, value in state.items()}
        called(self.name, lambda _: copy.load_state_dict(state), torch.empty(0), "to restore its state")
        left, right = (self._again(network) for network in (model, copy))
        now, restored, shared = _attributes(model), _attributes(copy), _class_attributes(model)
        lost = [key for key, value in now.items() if value not in (before.get(key), restored.get(key))]
        lost += sorted(key for key, value in shared.items() if value != of_classes.get(key))
        if lost:
            yield (
                f"attributes that training changes are not in its state ({_listed(lost)}), so a resumed run "
                "continues with other values: make them buffers (register_buffer), or return them in "
                "get_extra_state"
            )
        elif not torch.allclose(left, right, rtol=0, atol=0, equal_nan=True):
            yield (
                "two equal steps of training differ, as if it drew random numbers from NumPy or Python: draw them "
                "from torch's global generator, e.g. by torch.rand, or the run cannot be repeated"
            )

    def _again(self, model: Model) -> Tensor:
        """Return the output in training for two samples, with equal random numbers of torch each time."""
        model.train()
        with self.seeded():
            return self._output(model, self.batch(2)[0], self._when("training on", 2, {}))

    def _evaluate(self, model: Model, sizes: Sequence[int]) -> None:
        model.eval()
        for size in sizes:
            with torch.no_grad(), self.seeded():
                x, _ = self.batch(size)
                if size not in self.evaluated:  # may fail, but not be wrong
                    try:
                        model(x)
                    except Exception:
                        continue
                self._output(model, x, self._when("evaluation of", size, self.evaluated))

    def _when(self, what: str, size: int, peers: Mapping[int, PeerId]) -> str:
        peer = f" (peer {peers[size]})" if size in peers else ""
        return f"in {what} a batch of {size} {self.inputs}{peer}"

    def _output(self, model: Model, x: Tensor, when: str) -> Tensor:
        """Return the logits for ``x``. Raises ModelError."""
        value = x
        for part, width in ((model.backbone, model.features), (model.head, model.classes)):
            before, version, expected = value, value._version, [len(x), width]
            result: Any = called(self.name, part, value, when)
            if not isinstance(result, Tensor) or list(result.shape) != expected:
                found = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
                hint = "; give its squeeze a dimension, e.g. squeeze(1)" if found == expected[1:] else ""
                raise ModelError(f"{self.name!r} returns {found} instead of {expected} {when}{hint}")
            if result.dtype != torch.float32:
                raise ModelError(f"{self.name!r} returns {result.dtype} instead of torch.float32 {when}")
            if before._version != version:
                raise ModelError(f"{self.name!r} changes its input in place {when}; change a copy")
            value = result
        return value


def _in_order(sizes: Collection[int], most: float) -> list[int]:
    """Return sizes of batches, the most important first, up to ``most`` samples in total."""
    small, large = min(sizes), max(sizes)
    left = []
    for size in dict.fromkeys([small, large, *sorted(sizes)]):
        if size <= max(2, most):
            left.append(size)
            most -= size
    return left


def _unexpected_head(name: str, model: Model) -> list[str]:
    """Say that a linear layer which is declared after the head is not the head, unless the run file names that."""
    spec = parse(name)
    if spec is None or spec.head is not None or not model.head_path:
        return []
    paths = [path for path, _ in model.backbone.named_modules()]
    later = paths[paths.index(model.head_path) :] if model.head_path in paths else []
    linear = [path for path in later if isinstance(model.backbone.get_submodule(path), nn.Linear)]
    if not linear:
        return []
    return [f"its head is {model.head_path!r}, whose output it returns, not {linear[-1]!r}; `head` can name another"]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


_OF_MODULES = frozenset({*vars(nn.Module()), "train"})


def _attributes(model: Model) -> dict[str, str]:
    """Return the plain attributes that are not in the state, by name, in a form that can be compared."""
    found = {}
    for path, module in model.named_modules():
        values = {key: value for key, value in vars(module).items() if key not in _OF_MODULES}
        values |= {key: module._buffers[key] for key in module._non_persistent_buffers_set}
        for key, value in values.items():
            if (text := _plain(value)) is not None:
                found[model.plain_name(f"{path}.{key}" if path else key)] = text
    return found


def _class_attributes(model: Model) -> dict[str, str]:
    """Return the plain attributes of the classes of users' modules, which all peers of a process share."""
    classes = {cls for module in model.modules() for cls in type(module).__mro__ if issubclass(cls, nn.Module)}
    return {
        f"{cls.__name__}.{key}": text
        for cls in classes
        if not cls.__module__.startswith(("torch.", "p2pfl."))
        for key, value in vars(cls).items()
        if not key.startswith("__") and (text := _plain(value)) is not None
    }


def _plain(value: object) -> str | None:
    """Describe a value made of numbers, strings, tensors and random generators; None if it is something else."""
    try:
        return _description(value)
    except RecursionError:  # it holds itself
        return None


def _description(value: object) -> str | None:
    match value:
        case None | bool() | int() | float() | complex() | str() | bytes() | np.generic():
            return repr(value)
        case Tensor():
            return digest(value) if value.layout == torch.strided and not value.is_meta else None
        case np.ndarray():
            return f"{value.dtype} {value.shape} {value.tobytes()!r}" if value.dtype != object else None
        case torch.Generator():
            return digest(value.get_state())
        case np.random.Generator():
            return repr(value.bit_generator.state)
        case np.random.RandomState():
            return repr(value.get_state())
        case random.Random():
            return repr(value.getstate())
        case list() | tuple() | deque():
            return repr([_description(item) for item in value])
        case set() | frozenset():
            return repr(sorted(map(repr, value)))
        case Mapping():
            return repr([(repr(key), _description(item)) for key, item in value.items()])
    return None
