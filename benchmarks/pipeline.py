"""Compare the input pipeline with a DataLoader of per-image transforms, on one core.

    python benchmarks/pipeline.py                     # 32x32 color, batches of 64, two views
    python benchmarks/pipeline.py --channels 1 --size 28

Ours (`p2pfl.learning.peer_data.PeerData`): slices of a memory-mapped uint8 array become a float tensor, which is
augmented as a batch with the `mapl` recipe, with independent random numbers per sample, and normalized. Theirs: a
torch.utils.data.DataLoader over the same array with torchvision's v2 transforms of the same recipe for each sample,
in the main process (num_workers=0) and in one worker; on uint8 tensors, as torchvision recommends, and on PIL images,
as most code does.

Both make the same batches of two views. They take turns, a part of an epoch each, in one process bound to one core.
Each turn gives a ratio to ours, so that other load on the machine affects both. Prints the median time of a batch,
and median and range of the ratios.
"""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter

import click
import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset
from torchvision.transforms import v2

from p2pfl.data import AUGMENTATIONS, Dataset, Split, Subset
from p2pfl.learning.peer_data import PeerData

GOAL = 6.0
MEAN, STD = 0.5, 0.25


class PerImage(TorchDataset[tuple[Tensor, Tensor, int]]):
    """Two views of each image, made image by image."""

    def __init__(self, split: Split, transform: Callable[[object], Tensor], *, pil: bool) -> None:
        self.split = split
        self.transform = transform
        self.pil = pil

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        array = np.array(self.split.images[index])
        image = Image.fromarray(array.transpose(1, 2, 0).squeeze()) if self.pil else torch.from_numpy(array)
        return self.transform(image), self.transform(image), int(self.split.labels[index])


def per_image_recipe(channels: int, size: int, *, pil: bool) -> v2.Compose:
    """Return the recipe of `p2pfl.data.augmentations.Mapl` as torchvision transforms."""
    kernel = max(3, size // 10 | 1)
    jitter = v2.ColorJitter(0.4, 0.4, 0.4, 0.1) if channels == 3 else v2.ColorJitter(0.4, 0.4)
    return v2.Compose(
        [
            v2.RandomResizedCrop(size, scale=(0.2, 1.0), antialias=True),
            v2.RandomApply([jitter], p=0.8),
            *([v2.RandomGrayscale(p=0.2)] if channels == 3 else []),
            v2.RandomApply([v2.GaussianBlur(kernel, (0.1, 2.0))], p=0.5),
            v2.RandomHorizontalFlip(p=0.5),
            *([v2.ToImage()] if pil else []),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([MEAN] * channels, [STD] * channels),
        ]
    )


def ours(data: PeerData, batch: int, seed: int) -> Iterator[Tensor]:
    torch.manual_seed(seed)
    for images, _ in data.batches(batch, np.random.default_rng(seed)):
        yield torch.cat([data.input(images, augmented=True) for _ in range(2)])


def theirs(loader: DataLoader[tuple[Tensor, Tensor, int]], seed: int) -> Iterator[Tensor]:
    torch.manual_seed(seed)
    for first, second, _ in loader:
        yield torch.cat([first, second])


def seconds_a_batch(batches: Iterator[Tensor], shape: tuple[int, ...]) -> float:
    """Return the mean over all batches but the first, which includes the start-up."""
    assert next(batches).shape == shape
    began = perf_counter()
    count = sum(1 for _ in batches)
    return (perf_counter() - began) / count


@click.command()
@click.option("--channels", type=click.Choice(["1", "3"]), default="3", show_default=True)
@click.option("--size", default=32, show_default=True, help="Height and width of the images.")
@click.option("--batch", default=64, show_default=True)
@click.option("--batches", default=9, show_default=True, help="Batches in one turn; the first is not counted.")
@click.option("--turns", default=7, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(channels: str, size: int, batch: int, batches: int, turns: int, seed: int) -> None:
    warnings.filterwarnings("error")
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    depth, count = int(channels), batch * batches
    with tempfile.TemporaryDirectory() as folder:
        stream = np.random.default_rng(seed)
        file = Path(folder) / "images.npy"
        np.save(file, stream.integers(0, 256, (count, depth, size, size), dtype=np.uint8))
        split = Split(np.load(file, mmap_mode="r"), stream.integers(0, 10, count))  # noqa: TID251  # maps hold no pickles
        dataset = Dataset("noise", split, split, 10, (MEAN,) * depth, (STD,) * depth, mirror=True)
        empty = np.arange(0)
        augment = AUGMENTATIONS["mapl"]().build(depth, (size, size), True)
        data = PeerData(dataset, Subset(np.arange(count), empty, empty), augment, torch.device("cpu"))

        def loader(pil: bool, workers: int) -> DataLoader[tuple[Tensor, Tensor, int]]:
            images = PerImage(split, per_image_recipe(depth, size, pil=pil), pil=pil)
            return DataLoader(images, batch, shuffle=True, num_workers=workers)

        rivals = {
            f"DataLoader, {what}, num_workers={workers}": loader(what == "PIL images", workers)
            for what in ("uint8 tensors", "PIL images")
            for workers in (0, 1)
        }
        shape = (2 * batch, depth, size, size)
        our_times: list[float] = []
        times: dict[str, list[float]] = {name: [] for name in rivals}
        ratios: dict[str, list[float]] = {name: [] for name in rivals}
        for turn in range(turns):
            for name, rival in rivals.items():
                our_time = seconds_a_batch(ours(data, batch, seed + turn), shape)
                their_time = seconds_a_batch(theirs(rival, seed + turn), shape)
                our_times.append(our_time)
                times[name].append(their_time)
                ratios[name].append(their_time / our_time)
    click.echo(f"{platform.machine()}, torch {torch.__version__}, one core, {depth}x{size}x{size}, batch {batch}")
    click.echo(f"{'ours':45} {1000 * statistics.median(our_times):7.1f} ms per batch of two views")
    for name in rivals:
        low, middle, high = min(ratios[name]), statistics.median(ratios[name]), max(ratios[name])
        took = f"{1000 * statistics.median(times[name]):7.1f} ms"
        click.echo(f"{name:45} {took}, {middle:.1f} times ours ({low:.1f} to {high:.1f})")
    slowest = min(statistics.median(found) for found in ratios.values())
    if slowest < GOAL:
        raise click.ClickException(f"ratio {slowest:.1f} is below the goal of {GOAL}")


if __name__ == "__main__":
    main()
