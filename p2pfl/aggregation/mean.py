"""The default rule: the weighted mean."""

from __future__ import annotations

from p2pfl.aggregation.rule import Rule, aggregation


@aggregation("mean")
class Mean(Rule):
    """Σ_j w_j x_j, summed in ascending order of the senders and rounded once."""
