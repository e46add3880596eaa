"""What a peer learns from: datasets, who gets which samples, and how images are varied.

Three tables name what a run file may ask for: DATASETS, PARTITIONS and AUGMENTATIONS.
"""

from p2pfl.data.augmentations import AUGMENTATIONS, Augment, Augmentation
from p2pfl.data.datasets import Dataset, Pool, Split, open_dataset
from p2pfl.data.partitions import PARTITIONS, Labelled, Partition, Share
from p2pfl.data.sources import DATASETS, Decoded, Source

__all__ = [
    "AUGMENTATIONS",
    "DATASETS",
    "PARTITIONS",
    "Augment",
    "Augmentation",
    "Dataset",
    "Decoded",
    "Labelled",
    "Partition",
    "Pool",
    "Share",
    "Source",
    "Split",
    "open_dataset",
]
