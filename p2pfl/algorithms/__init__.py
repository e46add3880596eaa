"""The algorithms that a run file can name, one file per paper: every module of this package registers its names."""

from p2pfl.algorithms.registration import ALGORITHMS as ALGORITHMS
from p2pfl.algorithms.registration import algorithm as algorithm
from p2pfl.registry import discover

discover(__name__, ALGORITHMS)
