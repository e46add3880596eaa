"""Building blocks that several families of backbones share."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from p2pfl.errors import ModelError, P2pflError, PluginError
from p2pfl.inputs import Size, describe, zeros

Build = Callable[[int, Size, int], nn.Module]
"""Maps (channels, size, features) to a module from inputs such as float [B, C, H, W] to float [B, features].

p2pfl/inputs.py defines channels and size."""

Layers = Callable[[int, Size], tuple[nn.Module, int]]
"""Maps (channels, size) to a module from inputs such as float [B, C, H, W] to float [B, n], and n."""


@dataclass(frozen=True)
class FixedFeatures:
    """A backbone whose architecture determines its number of features, n.

    Adaptive average pooling converts it to any other number, as in FedTGP ("we add an average pooling layer after
    each feature extractor"); a number above n repeats features.
    """

    layers: Layers

    def __call__(self, channels: int, size: Size, features: int) -> nn.Module:
        network, width = self.layers(channels, size)
        return network if width == features else nn.Sequential(network, nn.AdaptiveAvgPool1d(features))


def with_input_channels(channels: int, network: nn.Module, first: str) -> nn.Module:
    """Replace the convolution ``first`` of ``network`` by one with ``channels`` inputs, if they differ."""
    convolution: Any = network.get_submodule(first)
    if convolution.in_channels != channels:
        parent, _, name = first.rpartition(".")
        replacement = nn.Conv2d(
            channels,
            convolution.out_channels,
            convolution.kernel_size,
            convolution.stride,
            convolution.padding,
            bias=False,
        )
        setattr(network.get_submodule(parent), name, replacement)
    return network


def torchvision_network(name: str, channels: int, first: str, **arguments: Any) -> Any:
    """Build a network of torchvision without pretrained weights, for images with ``channels``.

    Args:
        first: the path of its first convolution.
        arguments: as of torchvision's function.
    """
    import torchvision.models  # takes a second

    network = getattr(torchvision.models, name)(weights=None, **arguments)
    return with_input_channels(channels, network, first)


def googlenet(channels: int, size: Size, outputs: int = 1000) -> Any:
    """GoogLeNet (arXiv 1409.4842) without its auxiliary classifiers.

    Images smaller than 15x15 skip the third pooling: they are a single pixel by then.
    """
    # init_weights=True is the stock initialization; torchvision warns if the argument is missing.
    network = torchvision_network(
        "googlenet", channels, "conv1.conv", num_classes=outputs, aux_logits=False, init_weights=True
    )
    if min(size) < 15:
        network.maxpool3 = nn.Identity()
    return network


def plain_cnn(
    channels: int, size: Size, widths: Sequence[int] = (32, 64), hidden: Sequence[int] = (512,)
) -> tuple[nn.Module, int]:
    """Build a CNN like FedAvg's (arXiv 1602.05629), which the defaults give.

    Convolutions are 5x5 without padding, each followed by ReLU and 2x2 max pooling; then come fully connected layers
    with ReLU.

    Args:
        channels, size: of the images.
        widths: output channels of the convolutions.
        hidden: outputs of the fully connected layers.

    Raises:
        ModelError: images are too small for the convolutions.
    """
    layers: list[nn.Module] = []
    height, width, inputs = *size, channels
    for outputs in widths:
        layers += [nn.Conv2d(inputs, outputs, 5), nn.ReLU(), nn.MaxPool2d(2)]
        height, width, inputs = (height - 4) // 2, (width - 4) // 2, outputs
    if min(height, width) < 1:
        text = f"images of {size[0]}x{size[1]} are too small for {len(widths)} unpadded 5x5 convolutions with pooling"
        raise ModelError(f"{text}; use larger images or another model")
    layers.append(nn.Flatten())
    inputs *= height * width
    for outputs in hidden:
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        inputs = outputs
    return nn.Sequential(*layers), inputs


@dataclass(frozen=True)
class Checked:
    """A function of a plug-in that builds a backbone or a head, whose results are checked.

    Attributes:
        name: as in the run file.
        build: the function.
        location: its file and line.

    All methods raise PluginError if it fails, or does not return what it should.
    """

    name: str
    build: Callable[..., Any]
    location: tuple[str, int]

    def module(self, channels: int, size: Size, features: int) -> nn.Module:
        """Build a backbone with this number of features."""
        network: nn.Module = self._call(channels, size, features)
        self._check(network, zeros(2, channels, size), features, describe(channels, size))
        return network

    def layers(self, channels: int, size: Size) -> tuple[nn.Module, int]:
        """Build a backbone that determines its number of features."""
        with self._blaming("fails"):
            made = self.build(channels, size)
        if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], int)):
            raise PluginError(*self.location, f"{self.name!r} must return a module and its number of features")
        network, features = made
        self._check(network, zeros(2, channels, size), features, describe(channels, size))
        return network, features

    def head(self, features: int, classes: int) -> nn.Module:
        network: nn.Module = self._call(features, classes)
        self._check(network, torch.zeros(2, features), classes, f"{features} features")
        return network

    def _call(self, *arguments: Any) -> Any:
        with self._blaming("fails"):
            return self.build(*arguments)

    def _check(self, network: Any, batch: Tensor, width: int, given: str) -> None:
        """Check that the module maps a batch of two to float [2, width]."""
        if not isinstance(network, nn.Module):
            kind = type(network).__name__
            raise PluginError(*self.location, f"{self.name!r} must return a torch.nn.Module, not {kind}")
        keep_evaluation_modes(network)
        with self._blaming(f"fails for {given}"):
            output = evaluated(copied(network) or network, batch)
        found = list(output.shape) if isinstance(output, Tensor) else "no tensor"
        if found != [2, width]:
            text = f"{self.name!r} maps a batch of 2 ({given}) to {found} instead of [2, {width}]"
            raise PluginError(*self.location, text)

    @contextmanager
    def _blaming(self, what: str) -> Iterator[None]:
        """Raise errors at the last line of the plug-in's file that they passed."""
        try:
            yield
        except P2pflError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split())
            text = f"{self.name!r} {what}: {type(error).__name__}: {reason}"
            raise PluginError(*(plugin_line(error) or self.location), text) from error


def evaluated(network: nn.Module, batch: Tensor) -> Any:
    """Return the output for a batch. Random streams, modes and statistics of normalizations stay as they are."""
    modes = {module: module.training for module in network.modules()}
    network.eval()
    with torch.no_grad(), kept_random_states():
        output = network(batch)
    for module, training in modes.items():
        module.training = training
    return output


@contextmanager
def kept_random_states() -> Iterator[None]:
    """Restore the states of the global random generators of torch's CPU, NumPy and Python on exit."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def copied(network: nn.Module) -> nn.Module | None:
    """Return a copy to try out; None if there is none, or if lazy parameters wait for a batch to get their shapes."""
    if any(map(is_lazy, (*network.parameters(), *network.buffers()))):
        return None
    try:
        return deepcopy(network)
    except Exception:  # some modules hold what cannot be copied
        return None


def keep_evaluation_modes(network: nn.Module) -> None:
    """Keep the submodules that were put in evaluation mode, such as a frozen normalization, in it for good.

    A network that is in evaluation mode as a whole trains like any other.
    """
    if network.training:
        for module in network.modules():
            if not module.training:
                module.train = MethodType(_stay_in_evaluation, module)  # type: ignore[method-assign]


def stays_in_evaluation(module: nn.Module) -> bool:
    """Return whether ``keep_evaluation_modes`` keeps a module in evaluation mode: its statistics do not change."""
    return getattr(vars(module).get("train"), "__func__", None) is _stay_in_evaluation


def _stay_in_evaluation(module: nn.Module, mode: bool = True) -> nn.Module:
    return nn.Module.train(module, False)


def plugin_line(error: BaseException) -> tuple[str, int] | None:
    """Return file and line of the last code of a plug-in's file that an error passed; None if it passed none."""
    found, traceback = None, error.__traceback__
    while traceback is not None:
        if getattr(traceback.tb_frame.f_globals.get("__loader__"), "plugin", False):
            found = traceback.tb_frame.f_code.co_filename, traceback.tb_lineno
        traceback = traceback.tb_next
    return found
