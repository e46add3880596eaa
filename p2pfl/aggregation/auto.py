"""The rule that a run file leaves open: ``aggregation: auto``."""

from __future__ import annotations

from p2pfl.aggregation.rule import Rule, aggregation


@aggregation("auto")
class Auto(Rule):
    """Stand for the rule that is recommended for the method where neighbors may attack; see docs/rules/auto.md.

    It is replaced when the run file is loaded: no peer combines anything by it.
    """

    @staticmethod
    def recommended(*, learns_weights: bool) -> str:
        """Return the name of the rule, whose parameters keep their defaults.

        By the measurements in docs/hostile.md. MoNNA ignores weights, so methods that learn them cannot use it.
        """
        return "norm-clip" if learns_weights else "monna"
