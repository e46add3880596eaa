"""Arithmetic on models as ``dict[str, Tensor]``. Sums keep the given order, so that results are bit-identical."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from p2pfl.errors import ModelError

Tensors = Mapping[str, Tensor]

LIMIT = 1e6
"""Parameters, features and statistics of models that train are orders of magnitude below it. A model that diverges
passes it one or two rounds before infinity."""

GROWTH = 1e3
"""A tensor that begins with entries above LIMIT / GROWTH has diverged where it exceeds GROWTH times the largest."""

PART = 1 << 16
"""Numbers in a part of a tensor: it stays in the processor's cache while others are added to it."""


_FROZEN = "_frozen_parameters"
"""Attribute of each module with parameters that are frozen: their names. It is copied with the module."""


def note_frozen(model: nn.Module) -> None:
    """Remember which parameters are frozen (``requires_grad=False``) in a model that has just been built."""
    for module in model.modules():
        names = frozenset(name for name, p in module.named_parameters(recurse=False) if not p.requires_grad)
        if names or _FROZEN in module.__dict__:
            module.__dict__[_FROZEN] = names


def _frozen_names(module: nn.Module) -> frozenset[str]:
    found = ((prefix, part.__dict__[_FROZEN]) for prefix, part in module.named_modules() if _FROZEN in part.__dict__)
    return frozenset(f"{prefix}.{name}" if prefix else name for prefix, names in found for name in names)


def parameters_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that train, which peers exchange, detached and without a copy; no buffers.

    Parameters that were frozen when the model was built are left out, and parameters that were frozen later are not:
    so peers exchange the same ones in all rounds.

    Raises:
        ModelError: a parameter that was frozen trains now.
    """
    frozen, found = _frozen_names(module), {}
    for name, parameter in module.named_parameters():
        if name not in frozen:
            found[name] = parameter.detach()
        elif parameter.requires_grad:
            raise ModelError(
                f"parameter {name!r} was frozen when the model was built, but trains now; frozen parameters are not "
                "exchanged, so peers would differ in it: keep it frozen, or do not freeze it in the constructor"
            )
    return found


def frozen_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that were frozen when the model was built, detached and without a copy."""
    frozen = _frozen_names(module)
    return {name: parameter.detach() for name, parameter in module.named_parameters() if name in frozen}


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the module's persistent buffers (batch normalization statistics), without a copy.

    The extra state of a module is not among them (``get_extra_state``): it may be anything, and cannot be assigned.
    """
    state = module.state_dict(keep_vars=True)
    return {
        name: tensor.detach()
        for name, tensor in state.items()
        if not (isinstance(tensor, nn.Parameter) or name.rpartition(".")[2] == "_extra_state")
    }


def constants_of(module: nn.Module) -> set[str]:
    """Return the names of the persistent buffers that are not running statistics: masks, tables, counters."""
    return {name for name in buffers_of(module) if not is_statistic(name)}


def is_statistic(buffer: str) -> bool:
    """Return whether a buffer of this name holds the running mean or variance of a normalization."""
    return buffer.rpartition(".")[2] in ("running_mean", "running_var")


def statistics_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the running means and variances of batch normalization, without a copy.

    The number of batches that they are of, ``num_batches_tracked``, is not among them.
    """
    return {
        f"{prefix}.{name}" if prefix else name: tensor
        for prefix, part in module.named_modules()
        if isinstance(part, nn.modules.batchnorm._NormBase)  # instance normalization too
        for name, tensor in (("running_mean", part.running_mean), ("running_var", part.running_var))
        if tensor is not None
    }


@torch.no_grad()
def assign(target: Tensors, values: Tensors) -> None:
    """Copy ``values`` into ``target`` in place."""
    for name, tensor in target.items():
        tensor.copy_(values[name])


def widened(tensor: Tensor) -> Tensor:
    """Return the tensor in float32 if its floating-point type is narrower, so that what is computed rounds once."""
    return tensor.float() if tensor.is_floating_point() and tensor.dtype.itemsize < 4 else tensor


@torch.no_grad()
def weighted_sum(terms: Sequence[tuple[float, Tensors]], out: Tensors | None = None) -> Tensors:
    """Return Σ w · x over the terms (w, x), in the given order, in the dtype of the first x.

    Types narrower than float32 are summed in float32 and rounded once: an average of equal models equals them.
    Works tensor by tensor and reads each once, which matters if that reads a file (``Spool``). Of tensors in memory,
    it adds part by part, so that no temporary one is larger than ``PART``. Where all x hold the same infinity, or all
    NaN, so does the sum, whatever the weights.

    Args:
        terms: all x have the same names.
        out: receives the sums, and may be one of the x; default: new tensors.
    """
    weights = [weight for weight, _ in terms]
    in_memory = all(isinstance(tensors, dict) for _, tensors in terms)
    sums: dict[str, Tensor] = {}
    for name, tensor in terms[0][1].items():
        rest = (tensors[name].to(tensor.device) for _, tensors in terms[1:])
        dtype = tensor.dtype if tensor.is_floating_point() else torch.result_type(tensor, 1.0)
        if not in_memory:
            total = _sum(weights, tensor, rest)
            sums[name] = total.to(dtype) if out is None else out[name].copy_(total)
            continue
        target = torch.empty_like(tensor, dtype=dtype) if out is None else out[name]
        for part, first, *others in zip(*_parts([target, tensor, *rest]), strict=True):
            part.copy_(_sum(weights, first, others))
        sums[name] = target
    return sums if out is None else out


def _sum(weights: Sequence[float], first: Tensor, others: Iterable[Tensor]) -> Tensor:
    total = widened(first) * weights[0]
    # With positive weights, a common infinity stays by itself; 0 · −∞ is NaN.
    ordinary = all(weight > 0.0 for weight in weights) or is_finite(first)
    constant = None if ordinary else ~widened(first).isfinite()
    for weight, tensor in zip(weights[1:], others, strict=True):
        # Not ``total += weight * x``, which rounds twice where this rounds once.
        total.add_(tensor.to(total), alpha=weight)
        if constant is not None:
            constant &= _same(tensor.to(first), first) | (tensor == 0)  # 0: a step that leaves it as it is
    return total if constant is None else torch.where(constant, first, total)  # 0 · −∞ is NaN


def _same(left: Tensor, right: Tensor) -> Tensor:
    """Return where two tensors have equal entries, or both NaN, bool."""
    return (left == right) | (left.isnan() & right.isnan())


def _parts(tensors: Sequence[Tensor]) -> Sequence[Sequence[Tensor]]:
    """Divide all of the tensors alike into parts, if they are contiguous."""
    if all(tensor.is_contiguous() for tensor in tensors):
        return [torch.split(tensor.view(-1), PART) if tensor.numel() > PART else [tensor] for tensor in tensors]
    return [[tensor] for tensor in tensors]


def flat_parts(tensors: Sequence[Tensor], numbers: int = PART) -> Iterator[tuple[Tensor, ...]]:
    """Yield the entries of tensors of equal shape in order, flattened, on the CPU in parts.

    Args:
        numbers: of all tensors together in a part.
    """
    size = numbers // len(tensors) if tensors[0].device.type == "cpu" else tensors[0].numel()
    yield from zip(*(torch.split(tensor.reshape(-1), max(1, size)) for tensor in tensors), strict=True)


def fractions(counts: Mapping[int, float]) -> dict[int, float]:
    """Return n_j / Σ_j n_j, ascending by id. Raises ValueError if Σ_j n_j is 0."""
    total = sum(counts[j] for j in sorted(counts))
    if total == 0:
        raise ValueError("cannot average: the weights sum to 0")
    return {j: counts[j] / total for j in sorted(counts)}


def equal(ids: Iterable[int]) -> dict[int, float]:
    """Return equal weights that sum to 1, ascending by id."""
    return fractions(dict.fromkeys(ids, 1.0))


def average(models: Mapping[int, Tensors], weights: Mapping[int, float], out: Tensors | None = None) -> Tensors:
    """Return Σ_j w_j x_j / Σ_j w_j over the ids in ``models``, ascending, for code outside of an algorithm.

    An algorithm calls ``self.aggregation.combine``, which obeys the run file's ``aggregation``.

    Args:
        out: as in ``weighted_sum``.

    Raises:
        ValueError: Σ_j w_j is 0.
    """
    return weighted_sum([(w, models[j]) for j, w in fractions({j: weights[j] for j in models}).items()], out)


def subtract(left: Tensors, right: Tensors) -> dict[str, Tensor]:
    """Return left − right by the names of ``left``; of types narrower than float32, in float32.

    It is 0 where both hold the same infinity, or NaN, as entries do that nothing changes.
    """
    return {name: difference(x, right[name]) for name, x in left.items()}


def displacement(now: Tensors, before: Tensors) -> Tensors:
    """Return now − before, as ``subtract``; in the memory of ``now``, except for types narrower than float32."""
    return {name: difference(x, before[name], x if widened(x) is x else None) for name, x in now.items()}


def distance(left: Tensors, right: Tensors) -> float:
    """Return ‖left − right‖ over all tensors, summed in float64, on the device of ``right``."""
    squares = (
        float(difference(x.to(right[name].device), right[name]).double().square().sum()) for name, x in left.items()
    )
    return math.sqrt(sum(squares))


def difference(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """Return left − right, as ``subtract`` does."""
    left, right = widened(left), widened(right)
    constant = None if is_finite(right) else ~right.isfinite() & _same(left, right)
    result = torch.sub(left, right, out=out)
    return result if constant is None else result.masked_fill_(constant, 0.0)


def clone(tensors: Tensors) -> dict[str, Tensor]:
    """Copy the tensors, detached. The extra state of modules, which may be anything, is copied too."""
    return {
        name: tensor.detach().clone() if isinstance(tensor, Tensor) else deepcopy(tensor)
        for name, tensor in tensors.items()
    }


def raw(tensor: Tensor) -> Tensor:
    """Return the elements in C order, on the CPU, uint8 [bytes]; without a copy if they lie there in this way."""
    dense = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    # Not ``reshape``: a single element counts as contiguous with any stride.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def is_finite(tensor: Tensor) -> bool:
    """Return whether no entry is NaN or infinite."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    if tensor.dtype.itemsize == 1:  # torch cannot sum float8
        tensor = tensor.float()
    # Fast path: the sum is finite only if every entry is. Otherwise the sum itself may have overflowed.
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


@dataclass(frozen=True)
class InitialValues:
    """What a tensor was before it was trained, as far as its divergence is told from that.

    Attributes:
        limit: a finite entry of this magnitude or more has diverged.
        nonfinite: how many entries were NaN, ∞ and −∞: a mask, a disabled bias. So many have not diverged.
    """

    limit: float = LIMIT
    nonfinite: tuple[float, float, float] = (0, 0, 0)

    @classmethod
    def of(cls, tensor: Tensor, *, constant: bool = False) -> InitialValues:
        """Return what a tensor is before it is trained.

        Args:
            constant: it is not trained: a method that sets it may set it to anything but NaN.
        """
        if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
            return ORDINARY
        tensor = _comparable(tensor)
        largest = float(torch.linalg.vector_norm(tensor, math.inf))
        nonfinite: tuple[float, float, float] = (0, 0, 0)
        if not math.isfinite(largest):
            finite = tensor[tensor.isfinite()]
            largest = float(torch.linalg.vector_norm(finite, math.inf)) if len(finite) else 0.0
            nonfinite = _nonfinite(tensor)
        if constant:
            return cls(math.inf, (nonfinite[0], math.inf, math.inf))
        return cls(max(LIMIT, GROWTH * largest), nonfinite)


ORDINARY = InitialValues()


def has_diverged(tensor: object, start: InitialValues = ORDINARY) -> bool:
    """Return whether more entries are NaN or infinite than at the start, or one is too large.

    In a float64 or complex tensor none is: it may hold sums, which can be large. The extra state of a module, which
    need not be a tensor, never diverges.
    """
    return diverged_entry(tensor, start) is not None


def diverged_entry(tensor: object, start: InitialValues = ORDINARY) -> float | None:
    """Return an entry that has diverged, as ``has_diverged`` defines it; None if none has."""
    if not isinstance(tensor, Tensor) or not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    limit = start.limit if tensor.is_floating_point() and tensor.dtype.itemsize <= 4 else math.inf
    tensor = _comparable(tensor)
    # Fast path: no entry exceeds the Euclidean norm.
    if float(torch.linalg.vector_norm(tensor)) < limit:
        return None
    large = tensor[~((tensor if limit == math.inf else tensor.float()).abs() < limit)]  # NaN is below no limit
    for value, count, before in zip((math.nan, math.inf, -math.inf), _nonfinite(large), start.nonfinite, strict=True):
        if count > before:
            return value
    finite = large[large.isfinite()].float()
    return float(finite[finite.abs().argmax()]) if len(finite) else None


def _comparable(tensor: Tensor) -> Tensor:
    """Return the real numbers that a tensor consists of, in a dtype that torch can compute with."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.detach().resolve_conj())
    return tensor.float() if tensor.dtype.itemsize == 1 else tensor.detach()  # torch has no norm of float8


def _nonfinite(tensor: Tensor) -> tuple[int, int, int]:
    """Return how many entries are NaN, ∞ and −∞."""
    return int(tensor.isnan().sum()), int((tensor == math.inf).sum()), int((tensor == -math.inf).sum())


def digest(state: Any) -> str:
    """Return the SHA-256 of nested dicts, lists, tensors and plain values, as hex.

    Two digests are equal if and only if every key, dtype, shape and bit is equal; the order of keys does not matter.
    """
    sha = hashlib.sha256()
    _feed(sha, state)
    return sha.hexdigest()


def _feed(sha: hashlib._Hash, value: Any) -> None:
    if isinstance(value, Tensor):
        sha.update(f"tensor {value.dtype} {tuple(value.shape)} ".encode())
        if value.numel():
            sha.update(raw(value).numpy().data)
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
