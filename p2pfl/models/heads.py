"""Heads: the four of FedTGP's HtC4, and ``relu``, as in later code of L2C's authors."""

from __future__ import annotations

from torch import nn

from p2pfl.models.registration import BuildHead, head

head("linear")(nn.Linear)


def fully_connected(hidden: int) -> BuildHead:
    """Two linear layers with a ReLU between them."""
    return lambda features, classes: nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, classes))


for width in (512, 256, 128):
    head(f"fc{width}")(fully_connected(width))


@head("relu")
def clipped(features: int, classes: int) -> nn.Module:
    """A linear layer whose scores are clipped at 0."""
    return nn.Sequential(nn.Linear(features, classes), nn.ReLU())
