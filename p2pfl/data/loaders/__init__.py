"""Dataset loaders: one class per dataset, and the table of their names.

A loader lists its files, can download them, and reads them into plain arrays. ``p2pfl.data.datasets`` reads once per
host and caches the result, so heavy imports are inside the methods: peers that find the cache never pay for them.
Files lie under the root where torchvision's datasets put them.
"""

from p2pfl.data.loaders.base import DATASETS, DatasetArrays, Images, Inputs, Labels, Loader, dataset
from p2pfl.data.loaders.cifar import Cifar10, Cifar100
from p2pfl.data.loaders.digits import Digits, Svhn, Usps
from p2pfl.data.loaders.huggingface import HuggingFace
from p2pfl.data.loaders.image_files import Caltech101, Flowers102, Folder, OxfordPets, StanfordCars
from p2pfl.data.loaders.mnist import Emnist, FashionMnist, Mnist
from p2pfl.data.loaders.multi_style import Styled, Styles
from p2pfl.data.loaders.npz import Npz
from p2pfl.data.loaders.synthetic import Synthetic
from p2pfl.data.loaders.table import TableFile
from p2pfl.data.loaders.torchvision_class import Torchvision

for _name, _class in {
    "digits": Digits,
    "mnist": Mnist,
    "fashion-mnist": FashionMnist,
    "emnist": Emnist,
    "usps": Usps,
    "svhn": Svhn,
    "cifar10": Cifar10,
    "cifar100": Cifar100,
    "flowers102": Flowers102,
    "caltech101": Caltech101,
    "oxford-pets": OxfordPets,
    "stanford-cars": StanfordCars,
    "folder": Folder,
    "torchvision": Torchvision,
    "huggingface": HuggingFace,
    "npz": Npz,
    "table": TableFile,
    "synthetic": Synthetic,
    "styled": Styled,
    "styles": Styles,
}.items():
    dataset(_name)(_class)

__all__ = ["DATASETS", "DatasetArrays", "Images", "Inputs", "Labels", "Loader", "dataset"]
