"""How a peer combines what it receives with its own: the rules that ``aggregation`` in a run file can name."""

from __future__ import annotations

from p2pfl.aggregation.mean import Mean
from p2pfl.aggregation.rule import Contributions, PerTensor, Rule
from p2pfl.options import Table

AGGREGATIONS: Table[type[Rule]] = Table({"mean": Mean})

__all__ = ["AGGREGATIONS", "Contributions", "Mean", "PerTensor", "Rule"]
