"""The network of ByzFL's benchmark on MNIST."""

from __future__ import annotations

from torch import Tensor, nn


class CnnMnist(nn.Module):
    """Two convolutions 5x5 of 20 and 50 channels, each before a maximum of 2x2, and 500 hidden units.

    431,080 parameters.
    """

    def __init__(self, num_classes: int, in_channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(in_channels, 20, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(50 * 4 * 4, 500), nn.ReLU()),
        )
        self.fc = nn.Linear(500, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.body(x))
        return logits
