"""Datasets, partitions of their samples among peers, and augmentations.

The tables DATASETS, PARTITIONS and AUGMENTATIONS list what a run file may name.
"""

from p2pfl.data.augmentations import AUGMENTATIONS, Augment, Augmentation, augmentation
from p2pfl.data.columns import Column
from p2pfl.data.datasets import Dataset, Pool, Split, open_dataset
from p2pfl.data.loaders import DATASETS, DatasetArrays, Loader, dataset
from p2pfl.data.partitions import PARTITIONS, DatasetLabels, Partition, Subset, partition

__all__ = [
    "AUGMENTATIONS",
    "DATASETS",
    "PARTITIONS",
    "Augment",
    "Augmentation",
    "Column",
    "Dataset",
    "DatasetArrays",
    "DatasetLabels",
    "Loader",
    "Partition",
    "Pool",
    "Split",
    "Subset",
    "augmentation",
    "dataset",
    "open_dataset",
    "partition",
]
