"""Gradients from CUDA graphs (``gpu.cuda_graphs``): one launch for the hundreds of a forward and backward pass.

A graph repeats the kernels of the pass from which it was captured, at the same addresses. So it stands for passes of
the same shapes, modes of modules, parameters and buffers, whose loss is a function of the model, the input and the
labels alone, and which draw no random numbers. All others stay eager.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from p2pfl.learning.gradients import Batch, GradientRule

WARM_UP = 3
"""Batches of the same shapes before a capture, in which libraries choose kernels and allocate what they need."""

Gradients = Sequence[Tensor | None]
Pass = Callable[[], tuple[Mapping[str, Tensor], Gradients]]
"""A forward and backward pass; returns the terms of the loss, and the gradients of the parameters."""
Replayed = tuple[Callable[[], None], Mapping[str, Tensor], Gradients]
"""A captured pass: a function that runs its kernels, and the tensors that these fill."""


def capture(run: Pass) -> Replayed:
    """Capture the kernels of a pass without running them.

    The pass does run once before, on the stream of the capture, as torch asks for.

    Raises:
        RuntimeError: a graph cannot hold the pass, e.g. since it waits for the GPU to branch on a result.
    """
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # torch.cuda.graph leaves its stream the current one if a capture fails
        run()
        with torch.cuda.graph(graph, stream=stream):
            terms, gradients = run()
    torch.cuda.current_stream().wait_stream(stream)
    return graph.replay, terms, gradients


@dataclass(frozen=True)
class _Captured:
    """A captured pass: what it stands for, the batch that it reads, what runs it, and the tensors that this fills."""

    key: Hashable
    batch: Batch
    replay: Callable[[], None]
    terms: Mapping[str, Tensor]
    gradients: Gradients

    def run(self, batch: Batch) -> Mapping[str, Tensor]:
        """Set the gradients of the parameters; return the terms of the loss."""
        self.batch.x.copy_(batch.x)
        self.batch.labels.copy_(batch.labels)
        self.replay()
        _set_gradients(batch, self.gradients)
        return {name: value.clone() for name, value in self.terms.items()}


class CapturedGradients:
    """Makes gradients by a captured pass if that has the bits of the eager one, or else eagerly.

    Args:
        log: is told what is captured, and why something is not.
        capture: captures a pass.
    """

    def __init__(self, log: logging.Logger, capture: Callable[[Pass], Replayed] = capture) -> None:
        self._log = log
        self._capture = capture
        self._captured: _Captured | None = None
        self._last: Hashable = None
        self._repeated = 0
        self._rejected: set[Hashable] = set()

    def backward(self, model: nn.Module, rule: GradientRule, batch: Batch) -> Mapping[str, Tensor]:
        """Set ``grad`` of the parameters, which is None; return the terms of the loss. As ``rule.backward``.

        Args:
            model: the only module of the pass.
        """
        key = _key(model, batch)
        if self._captured is not None and self._captured.key == key:
            return self._captured.run(batch)
        self._repeated = self._repeated + 1 if key == self._last else 1  # a smaller last batch is rarely repeated
        self._last = key
        if self._repeated <= WARM_UP or key in self._rejected:
            return rule.backward(batch)
        return self._try_to_capture(key, model, rule, batch)

    def _try_to_capture(
        self, key: Hashable, model: nn.Module, rule: GradientRule, batch: Batch
    ) -> Mapping[str, Tensor]:
        """Make the gradients eagerly, and keep a captured pass if it makes the same."""
        buffers = [buffer.detach() for buffer in model.buffers()]
        before, generators = [buffer.clone() for buffer in buffers], _generators()
        terms, gradients = _run(rule, batch)
        after = [buffer.clone() for buffer in buffers]
        why = "it draws random numbers" if _generators() != generators else ""
        if not why:
            static = replace(batch, x=batch.x.clone(), labels=batch.labels.clone())
            try:
                captured = _Captured(key, static, *self._capture(lambda: _run(rule, static)))
                _assign(buffers, before)
                found = captured.run(batch)
                if not _same([*found.values(), *captured.gradients, *buffers], [*terms.values(), *gradients, *after]):
                    why = "its bits differ from the eager pass"
            except RuntimeError as error:
                why = str(error).partition("\n")[0]
        if why:
            self._rejected.add(key)
            self._log.info("no CUDA graph shape=%s reason=%s", tuple(batch.x.shape), why)
        else:
            self._captured = captured
            self._log.debug("CUDA graph captured shape=%s", tuple(batch.x.shape))
        _assign(buffers, after)
        _set_gradients(batch, gradients)
        return terms


def _key(model: nn.Module, batch: Batch) -> Hashable:
    """Return what must be the same in all passes that a graph stands for."""
    tensors = (*model.parameters(), *model.buffers(), *batch.parameters)
    return (
        (batch.x.shape, batch.x.stride(), batch.x.dtype, batch.labels.shape, batch.views),
        tuple((tensor.data_ptr(), tensor.requires_grad) for tensor in tensors),
        tuple(module.training for module in model.modules()),
    )


def _run(rule: GradientRule, batch: Batch) -> tuple[Mapping[str, Tensor], Gradients]:
    _set_gradients(batch, [None] * len(batch.parameters))
    terms = rule.backward(batch)
    return {name: value.detach() for name, value in terms.items()}, [each.grad for each in batch.parameters]


def _set_gradients(batch: Batch, gradients: Gradients) -> None:
    for parameter, gradient in zip(batch.parameters, gradients, strict=True):
        parameter.grad = gradient


def _assign(buffers: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for buffer, value in zip(buffers, values, strict=True):
        buffer.copy_(value)


def _same(one: Gradients, other: Gradients) -> bool:
    """Whether two passes made the same bits; NaN differs from itself."""
    return len(one) == len(other) and all(
        a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )


def _generators() -> tuple[object, ...]:
    """Return the states of all global generators, to be compared."""
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    numpy: Any = np.random.get_state(legacy=False)
    words = numpy["state"]
    states = [state.numpy().tobytes() for state in (torch.get_rng_state(), *on_gpus)]
    return (*states, words["key"].tobytes(), words["pos"], random.getstate())
