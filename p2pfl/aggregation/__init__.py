"""How a peer combines what it receives with its own: the rules that ``aggregation`` in a run file can name."""

from __future__ import annotations

from p2pfl.aggregation.auto import Auto
from p2pfl.aggregation.mean import Mean
from p2pfl.aggregation.rule import AGGREGATIONS, Contributions, PerTensor, Rule, Screening, aggregation
from p2pfl.aggregation.rule_list import RuleList
from p2pfl.registry import discover

__all__ = [
    "AGGREGATIONS",
    "Auto",
    "Contributions",
    "Mean",
    "PerTensor",
    "Rule",
    "RuleList",
    "Screening",
    "aggregation",
]

discover(__name__, AGGREGATIONS)
