"""The encoder of meta-L2C: codes of model changes, attention between them, and the encoder's gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from p2pfl import PeerId
from p2pfl.tensors import Tensors


class Encoder(nn.Module):
    """E, Eqs. 7 and 8: one two-layer network per parameter tensor, applied to each of the tensor's channels.

    Args:
        parameters: of a model like the models to encode.
        hidden: outputs of the first layer.
        width: d, outputs of the second layer: length of the code of one channel.
        mean: scale the codes so that the inner product of two is a mean over channels and layers, not a sum.
    """

    def __init__(self, parameters: Tensors, hidden: int, width: int, mean: bool = False) -> None:
        super().__init__()
        self.mean = mean
        self.names = list(parameters)
        self.layers = nn.ModuleDict()
        self.length = 0
        for name, parameter in parameters.items():
            channels, inputs = channels_of(parameter).shape
            layers = [nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, width), nn.Tanh()]
            self.layers[_key(name)] = nn.Sequential(*layers)
            self.length += channels * width

    def forward(self, change: Tensors) -> Tensor:
        """Return the code of a model's change, float32 [length]. The inner product of two codes is f (Eq. 5)."""
        device = next(self.parameters()).device
        codes = []
        for name in self.names:  # one tensor at a time, as they may lie on disk
            channels = channels_of(change[name]).to(device, torch.float32)
            scale = 1.0 / math.sqrt(len(channels) * len(self.names)) if self.mean else 1.0
            codes.append(scale * self.layers[_key(name)](channels).flatten())
        return torch.cat(codes)


def channels_of(tensor: Tensor) -> Tensor:
    """Reshape a parameter to [output channels, rest]; a vector has one value per channel."""
    return tensor.reshape(len(tensor) if tensor.dim() else 1, -1)


def _key(name: str) -> str:
    """Replace the dots of a parameter's name, which names of submodules must not contain."""
    return name.replace(".", "/")


def attention(codes: Mapping[PeerId, Tensor], me: PeerId) -> Tensor:
    """Line 14, Eq. 4: w_ij, float64 [n], over the peers in ``codes``, ascending. Differentiable."""
    query = codes[me].double()
    return torch.stack([query @ codes[j].double() for j in sorted(codes)]).softmax(0)


def backward(
    encoder: Encoder,
    changes: Mapping[PeerId, Tensors],
    codes: Mapping[PeerId, Tensor],
    me: PeerId,
    derivatives: Mapping[PeerId, float],
) -> None:
    """Add ∂L_val/∂E to ``.grad`` of the encoder's parameters, by the chain rule through w (∂L_val/∂w_ij = −d_j).

    Goes back to the codes first, and then through one code after the other: each change is encoded again, so that
    no graph holds more than one of them.
    """
    leaves = {j: codes[j].detach().requires_grad_() for j in sorted(codes)}
    w = attention(leaves, me)
    w.backward(torch.tensor([-derivatives[j] for j in leaves], dtype=w.dtype, device=w.device))  # type: ignore[no-untyped-call]
    for j, leaf in leaves.items():
        encoder(changes[j]).backward(leaf.grad)
