"""FedStyle's style extraction (arXiv 2211.06470, Algorithm 2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, pad

from p2pfl.algorithms.base import Algorithm
from p2pfl.learning.losses import supervised_contrastive
from p2pfl.learning.peer_data import PeerData
from p2pfl.tensors import clone, frozen_of

_SOBEL = torch.tensor([[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]])


def sobel(images: Tensor) -> Tensor:
    """Return the edges of each channel, √(G_x² + G_y²) with the 3x3 kernels and repeated borders, as images.

    Edges are rescaled to the value range of their image; an image without edges becomes its darkest value.

    Args:
        images: uint8 [B, C, H, W], like the result.
    """
    x = images.to(torch.float32)
    kernels = torch.stack([_SOBEL, _SOBEL.T]).unsqueeze(1).to(x.device)
    gradients = conv2d(pad(x.flatten(0, 1).unsqueeze(1), (1, 1, 1, 1), mode="replicate"), kernels)
    strength = gradients.square().sum(1).sqrt().reshape(x.shape)
    darkest, brightest = (extreme((1, 2, 3), keepdim=True) for extreme in (x.amin, x.amax))
    strongest = strength.amax((1, 2, 3), keepdim=True).clamp(min=1.0)  # the weakest edge of integers is 1
    return (darkest + (brightest - darkest) * strength / strongest).round().to(torch.uint8)


def style_loss(z: Tensor, temperature: float) -> Tensor:
    """L_style, Eq. 2: supervised InfoNCE with two labels, the peer's style and edges.

    Args:
        z: float [2 B, d], the projections of B images, then of their edges.
    """
    styles = torch.arange(2, device=z.device).repeat_interleave(len(z) // 2)
    return supervised_contrastive(z, styles, temperature)


def with_edges(images: Tensor, data: PeerData) -> Tensor:
    """Return the network input [2 B, C, H, W] of images, uint8 [B, C, H, W], followed by the input of their edges."""
    return data.input(torch.cat([images, sobel(images)]), augmented=False)


def train_style_net(peer: Algorithm[Any], style_net: nn.Module, projector: nn.Module) -> None:
    """Algorithm 2: train f_s and g_s for E_s epochs to distinguish the peer's images from their edges; freeze f_s.

    An f_s that diverges is replaced by the untrained one, since it is trained only once.
    """
    h = peer.hyper
    untrained = clone(style_net.state_dict())
    network = nn.Sequential(style_net, projector)
    optimizer = h.make_optimizer(network.parameters())

    def loss(x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"style": style_loss(network(x), h.temperature)}

    def step(images: Tensor, labels: Tensor) -> None:
        peer.descend(optimizer, loss, with_edges(images, peer.data), labels, views=2)

    style_net.train()
    frozen = frozen_of(style_net)
    for name, parameter in style_net.named_parameters():
        parameter.requires_grad_(name not in frozen)
    try:
        peer.train(epochs=h.style_epochs, batch=h.batch, step=step, order="style batches")
    finally:
        style_net.requires_grad_(False).eval()
    if not peer.outcomes.note("trainings of the style net", peer.what_diverged(style_net.state_dict())):
        style_net.load_state_dict(untrained)
