"""The methods that a run file can name, one file per paper."""

from __future__ import annotations

from typing import Any

from p2pfl.algorithms.base import Algorithm
from p2pfl.algorithms.dpsgd import DPSGD
from p2pfl.algorithms.local import Local
from p2pfl.algorithms.mapl import MAPL
from p2pfl.options import Table

ALGORITHMS: Table[type[Algorithm[Any]]] = Table("algorithm", {method.name: method for method in (Local, DPSGD, MAPL)})
