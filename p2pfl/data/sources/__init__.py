"""Where images come from: one class per dataset, and the table of their names.

A source names the files that it is made of, can fetch them, and decodes them into plain arrays. It is asked
to decode once per host; ``p2pfl.data.datasets`` keeps the result. Hence the heavy imports inside the methods:
a peer that finds the dataset decoded never pays for them. Files lie under the root as torchvision's datasets
put them.
"""

from p2pfl.data.sources.base import Decoded, Images, Labels, Source
from p2pfl.data.sources.classic import Cifar10, Cifar100, Digits, Svhn, Usps
from p2pfl.data.sources.idx import Emnist, FashionMnist, Mnist
from p2pfl.data.sources.own import Npz, Synthetic
from p2pfl.data.sources.photos import Caltech101, Flowers102, Folder, OxfordPets, StanfordCars
from p2pfl.data.sources.styles import Styled, Styles
from p2pfl.options import Table

DATASETS: Table[type[Source]] = Table(
    "dataset",
    {
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
        "npz": Npz,
        "synthetic": Synthetic,
        "styled": Styled,
        "styles": Styles,
    },
)

__all__ = ["DATASETS", "Decoded", "FashionMnist", "Images", "Labels", "Mnist", "Source"]
