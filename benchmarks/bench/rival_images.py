"""Fashion-MNIST, and the networks of the benchmarks, for decentralizepy, which imports this file (see rival.py)."""

from __future__ import annotations

from typing import Any

import torch
import torchvision
from decentralizepy.datasets.Dataset import Dataset
from decentralizepy.datasets.Partitioner import DataPartitioner
from decentralizepy.models.Model import Model
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision import transforms


class FashionMnist(Dataset):  # type: ignore[misc]
    """Equal random parts of the training images; the arguments are those that decentralizepy passes."""

    num_classes = 10

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **{"test_batch_size": 1024, **keywords})
        scale = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5,), (0.5,))])
        images, self.testset = (
            torchvision.datasets.FashionMNIST(self.train_dir, train=train, download=False, transform=scale)
            for train in (True, False)
        )
        parts = [1 / self.num_partitions] * self.num_partitions
        self.trainset = DataPartitioner(images, sizes=parts, seed=self.random_seed).use(self.dataset_id)

    def get_trainset(self, batch_size: int = 1, shuffle: bool = False) -> DataLoader[Any]:
        return DataLoader(self.trainset, batch_size=batch_size, shuffle=shuffle)

    def get_testset(self) -> DataLoader[Any]:
        return DataLoader(self.testset, batch_size=self.test_batch_size)

    def test(self, model: nn.Module, loss: Any) -> tuple[float, float]:
        model.eval()
        correct, total = 0, 0.0
        with torch.no_grad():
            for images, labels in self.get_testset():
                scores = model(images)
                total += float(loss(scores, labels)) * len(labels)
                correct += int((scores.argmax(1) == labels).sum())
        model.train()
        return 100 * correct / len(self.testset), total / len(self.testset)


class Cnn(Model):  # type: ignore[misc]
    """As htcnn-2: 582,026 parameters."""

    def __init__(self) -> None:
        super().__init__()
        convolutions = (
            nn.Conv2d(1, 32, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.layers = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10))

    def forward(self, x: Tensor) -> Any:
        return self.layers(x)


class Mlp(Model):  # type: ignore[misc]
    """As mlp-3072-2944: 11,487,882 parameters."""

    def __init__(self) -> None:
        super().__init__()
        hidden = (nn.Linear(784, 3072), nn.ReLU(), nn.Linear(3072, 2944), nn.ReLU())
        self.layers = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(2944, 10))

    def forward(self, x: Tensor) -> Any:
        return self.layers(x)


class Small(Model):  # type: ignore[misc]
    """As mlp-8 at 1x8x8: 610 parameters. Images are averaged to that size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.AdaptiveAvgPool2d(8), nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10)
        )

    def forward(self, x: Tensor) -> Any:
        return self.layers(x)
