"""Partitions of a dataset among peers: a module per paper, and the table of their names.

A partition is a pure function of the labels, the number of peers, the seed and its parameters: every peer computes
all subsets and uses its own. Random draws that may fail are repeated a bounded number of times.
"""

from p2pfl.data.partitions.base import (
    PARTITIONS,
    DatasetLabels,
    Indices,
    Labels,
    Partition,
    Subset,
    check_subsets,
    partition,
)
from p2pfl.registry import discover

discover(__name__, PARTITIONS)

__all__ = ["PARTITIONS", "DatasetLabels", "Indices", "Labels", "Partition", "Subset", "check_subsets", "partition"]
