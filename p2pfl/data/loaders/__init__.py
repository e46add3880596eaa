"""Dataset loaders: one class per dataset, and the table of their names.

A loader lists its files, can download them, and reads them into plain arrays. ``p2pfl.data.datasets`` reads once per
host and caches the result, so heavy imports are inside the methods: peers that find the cache never pay for them.
Files lie under the root where torchvision's datasets put them.
"""

from p2pfl.data.loaders.base import DATASETS, DatasetArrays, Images, Inputs, Labels, Loader, dataset
from p2pfl.registry import discover

discover(__name__, DATASETS)

__all__ = ["DATASETS", "DatasetArrays", "Images", "Inputs", "Labels", "Loader", "dataset"]
