"""Named arithmetic on models as ``dict[str, Tensor]``. Sums run over the given order and never reorder."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Tensors = Mapping[str, Tensor]


def parameters_of(module: nn.Module) -> dict[str, Tensor]:
    """The module's parameters, detached and shared with it (no copy); buffers are left out."""
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """The module's buffers (batch-normalisation statistics), shared with it; no constants, which a module leaves out
    of its state too."""
    held = module.state_dict(keep_vars=True)
    return {name: tensor.detach() for name, tensor in held.items() if not isinstance(tensor, nn.Parameter)}


@torch.no_grad()
def assign(target: Tensors, values: Tensors) -> None:
    """Copy ``values`` into ``target`` in place."""
    for name, tensor in target.items():
        tensor.copy_(values[name])


def weighted_sum(terms: Iterable[tuple[float, Tensors]]) -> dict[str, Tensor]:
    """Σ w · x over (w, x), in the given order, in the dtype of the first x."""
    total: dict[str, Tensor] = {}
    for weight, tensors in terms:
        for name, tensor in tensors.items():
            if name in total:
                total[name] = total[name].add(tensor.to(total[name]), alpha=weight)
            else:
                total[name] = tensor * weight
    return total


def average(models: Mapping[int, Tensors], weights: Mapping[int, float]) -> dict[str, Tensor]:
    """Σ_j w_j x_j / Σ_j w_j over the ids in ``models``, in their ascending order. Raises ValueError if Σ w_j is 0."""
    total = sum(weights[j] for j in sorted(models))
    if total == 0:
        raise ValueError("an average with weights that sum to 0")
    return weighted_sum((weights[j] / total, models[j]) for j in sorted(models))


def subtract(left: Tensors, right: Tensors) -> dict[str, Tensor]:
    return {name: tensor - right[name] for name, tensor in left.items()}


def clone(tensors: Tensors) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def is_finite(tensor: Tensor) -> bool:
    """Whether no entry is NaN or infinite."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    if tensor.dtype.itemsize == 1:  # torch does not sum these
        tensor = tensor.float()
    # One infinite or NaN entry makes the sum so: the quick answer, unless the sum itself overflows.
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def digest(state: Any) -> str:
    """SHA-256 over a state of nested dicts, lists, tensors and plain values, in a fixed order.

    Equal exactly when every key, dtype, shape and bit is equal.
    """
    sha = hashlib.sha256()
    _feed(sha, state)
    return sha.hexdigest()


def _feed(sha: hashlib._Hash, value: Any) -> None:
    if isinstance(value, Tensor):
        tensor = value.detach().to("cpu").clone(memory_format=torch.contiguous_format)
        sha.update(f"tensor {tensor.dtype} {tuple(tensor.shape)} ".encode())
        if tensor.numel():
            sha.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(value, Mapping):
        sha.update(f"map {len(value)} ".encode())
        for key in sorted(value, key=str):
            sha.update(f"key {key!r} ".encode())
            _feed(sha, value[key])
    elif isinstance(value, list | tuple):
        sha.update(f"list {len(value)} ".encode())
        for item in value:
            _feed(sha, item)
    else:
        sha.update(f"{type(value).__name__} {value!r} ".encode())
