"""Networks of one family that differ in width, and the slices of the widest one that the others are.

For HeteroFL and FedRolex: a narrower network corresponds to some channels of each layer of the widest one. Channels
are found by comparing shapes: a dimension in which two networks differ is one of channels.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from p2pfl import PeerId
from p2pfl.aggregation.aggregator import Aggregator
from p2pfl.errors import ModelError
from p2pfl.messaging.schema import Body
from p2pfl.models import Model
from p2pfl.models.dfml import HEAD, LocalSelfAttention
from p2pfl.tensors import Tensors

Shapes = Mapping[str, tuple[int, ...]]

_STACKED = (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
"""Modules with several matrices in one tensor, e.g. an LSTM's four gates: its first rows are all of one gate."""


@dataclass(frozen=True)
class Width:
    """An architecture by the sizes of its tensors."""

    name: str
    shapes: Shapes
    """Of the tensors, by name."""
    channels: Shapes
    """The same shapes, but with the attention heads as a dimension of their own: only whole heads are sliced."""
    stacked: Collection[str] = ()
    """Names of tensors that cannot be sliced."""
    pooled: bool = False
    """Whether the features are averages over channels, so that no feature belongs to some channels."""

    @classmethod
    def of(cls, model: Model, tensors: Tensors) -> Width:
        """Return the width of a model, for the given ones of its tensors."""
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        channels, stacked = dict(shapes), set[str]()
        for name, module in model.named_modules():
            if isinstance(module, _STACKED):
                stacked |= {f"{name}.{parameter}" for parameter, _ in module.named_parameters(recurse=False)}
            if isinstance(module, LocalSelfAttention):
                qkv, out = f"{name}.qkv.weight", f"{name}.out.0.weight"
                channels[qkv] = (3, module.heads, HEAD, *shapes[qkv][1:])
                channels[out] = (shapes[out][0], module.heads, HEAD)
        pooled = isinstance(model.backbone, nn.Sequential) and isinstance(model.backbone[-1], nn.AdaptiveAvgPool1d)
        return cls(model.name, shapes, channels, stacked, pooled)

    @property
    def entries(self) -> int:
        return sum(map(math.prod, self.shapes.values()))

    def misfit(self, wider: Width) -> str | None:
        """Return why this network is not a slice of ``wider``; None if it is."""
        if surplus := sorted(self.channels.keys() ^ wider.channels.keys()):
            owner = self if surplus[0] in self.channels else wider
            return f"only {owner.name} has a tensor {surplus[0]}"
        for name, shape in self.channels.items():
            other = wider.channels[name]
            if len(shape) != len(other) or any(n > size for n, size in zip(shape, other, strict=True)):
                return f"{name} is {_text(shape)} in {self.name}, but {_text(other)} in {wider.name}"
            if shape != other and name in wider.stacked:
                return f"{name} of {wider.name} is a stack of several matrices and cannot be sliced"
        for width in (self, wider):
            if width.pooled and self.shapes != wider.shapes:
                return f"the features of {width.name} are averages over channels, as models.features makes them"
        return None


def _text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "one number"


def by_width(widths: Sequence[Width]) -> list[Width]:
    """Return the networks, narrowest first, each a slice of the next.

    Raises:
        ModelError: one is not, so they are not width-scaled versions of one network.
    """
    ordered = sorted(widths, key=lambda width: (width.entries, width.name))
    for narrower, wider in pairwise(ordered):
        if (misfit := narrower.misfit(wider)) is not None:
            raise ModelError(misfit)
    return ordered


@dataclass(frozen=True)
class Slice:
    """The channels of the widest network that a network of this width corresponds to.

    As many of each layer as it has, from the ``first`` step on, starting over after the last one.
    """

    width: Width
    first: int = 0


@dataclass(frozen=True)
class Whole:
    """W_g, the tensors of the widest network, and how many models hold each entry, in the shapes of its channels."""

    widest: Width
    units: int
    """Steps in which slices move over the channels: the same number of steps for each layer."""
    means: Tensors
    """Of types narrower than float32, in float32."""
    holders: Tensors
    dtypes: Mapping[str, torch.dtype]
    """Of the networks' tensors."""

    @classmethod
    def mean(cls, widest: Width, units: int, models: Sequence[tuple[Slice, Tensors]]) -> Whole:
        """Average each entry over the models that hold it, in the order given; 0 where none does."""
        dtypes = {name: tensor.dtype for name, tensor in models[0][1].items()} if models else {}
        wide = {name: torch.promote_types(dtype, torch.float32) for name, dtype in dtypes.items()}
        totals = {name: torch.zeros(shape, dtype=wide.get(name)) for name, shape in widest.channels.items()}
        holders = {name: torch.zeros(shape) for name, shape in widest.channels.items()}
        whole = cls(widest, units, totals, holders, dtypes)
        for slice_, values in models:
            for name, shape in slice_.width.channels.items():
                at = whole.positions(slice_, name)
                totals[name][at] += values[name].to("cpu").reshape(shape)
                holders[name][at] += 1
        for name, total in totals.items():
            total /= holders[name].clamp(min=1)
        return whole

    def combined(
        self, kind: type[Body], models: Mapping[PeerId, tuple[Slice, Tensors]], aggregation: Aggregator
    ) -> Whole:
        """Return the same by other rules than the mean: all entries that the same models hold are combined at once.

        Takes as much memory again as all models.

        Args:
            models: of which this is the mean.
        """
        held: dict[PeerId, dict[str, Tensor]] = {}
        spread: dict[PeerId, dict[str, Tensor]] = {}
        for j, (slice_, values) in models.items():
            spread[j] = {name: torch.zeros_like(mean) for name, mean in self.means.items()}
            held[j] = {name: torch.zeros_like(mean, dtype=torch.bool) for name, mean in self.means.items()}
            for name, shape in slice_.width.channels.items():
                at = self.positions(slice_, name)
                spread[j][name][at] = values[name].to(self.means[name]).reshape(shape)
                held[j][name][at] = True
        regions: dict[tuple[PeerId, ...], dict[str, Tensor]] = {
            (): {name: torch.ones_like(mean, dtype=torch.bool) for name, mean in self.means.items()}
        }
        for j, masks in held.items():
            split: dict[tuple[PeerId, ...], dict[str, Tensor]] = {}
            for ids, region in regions.items():
                split[*ids, j] = {name: mask & masks[name] for name, mask in region.items()}
                split[ids] = {name: mask & ~masks[name] for name, mask in region.items()}
            regions = {ids: region for ids, region in split.items() if any(mask.any() for mask in region.values())}
        means = dict(self.means)
        for ids, region in regions.items():
            if ids:
                parts = {j: {name: spread[j][name][mask] for name, mask in region.items()} for j in ids}
                found = aggregation.combine_tensors(kind, parts, of=f"entries of {ids}")
                means = {name: mean.masked_scatter(region[name], found[name]) for name, mean in means.items()}
        return replace(self, means=means)

    def positions(self, slice_: Slice, name: str) -> tuple[Tensor, ...]:
        """Return X_{n,i}, the indices of a slice's entries of one tensor, for each dimension, ready to index it.

        A dimension that is as wide as the widest network's stays as it is.
        """
        shape, sizes = slice_.width.channels[name], self.widest.channels[name]
        indices = [
            torch.arange(n) if n == size else (slice_.first * (size // self.units) + torch.arange(n)) % size
            for n, size in zip(shape, sizes, strict=True)
        ]
        return tuple(each.view(-1, *[1] * (len(shape) - axis - 1)) for axis, each in enumerate(indices))

    def holds(self, slice_: Slice) -> bool:
        """Return whether every entry of a slice was held by a model."""
        return all(bool(self.holders[name][self.positions(slice_, name)].all()) for name in self.widest.channels)

    def take(self, slice_: Slice) -> dict[str, Tensor]:
        """Return the tensors of a slice, in the shapes of a network's tensors."""
        return {
            name: mean[self.positions(slice_, name)].reshape(slice_.width.shapes[name]).to(self.dtypes[name])
            for name, mean in self.means.items()
        }


def common_steps(widest: Width, narrowest: Width) -> int:
    """Return the largest number of steps of equal length that lead over the channels of every layer whose width
    varies.

    So one step moves the outputs of a layer and the inputs of the next one by the same channels.
    """
    varying = [
        size
        for name, shape in widest.channels.items()
        for size, least in zip(shape, narrowest.channels[name], strict=True)
        if size > least
    ]
    return math.gcd(*varying) or 1
