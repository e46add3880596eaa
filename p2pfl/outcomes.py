"""Counts of a peer's trainings, averages and messages: how many were used, how many skipped as diverged."""

from __future__ import annotations

from dataclasses import dataclass, field

TRAININGS = "trainings"
"""Of a model."""
CONTRIBUTIONS = "contributions"
"""Of the peer to averages: its models or means."""
AVERAGES = "averages"
"""And what else peers compute of models that they have received."""
MESSAGES = "messages"
"""That were received."""

SKIPPED = {
    TRAININGS: "rolled back",
    CONTRIBUTIONS: "left out of averages",
    AVERAGES: "not adopted",
    MESSAGES: "dropped",
}
"""What it means that they were skipped."""

_FAILURES = {
    TRAININGS: "all {} trainings were rolled back",
    CONTRIBUTIONS: "what it had learned was left out of averages all {} times",
    AVERAGES: "none of {} averages was adopted",
    MESSAGES: "all {} messages that it received were dropped",
}
_REMEDY = "lower the learning rate, or check the inputs, the loss and the initial values"
_NEIGHBORS = "the training of its neighbors diverges: see their logs, and lower the learning rate"


@dataclass
class Outcomes:
    """Counts of what was tried, and skipped, by name: a constant of this module, or a name that a plug-in chooses.

    Attributes:
        why: what had diverged when something was skipped for the first time.
    """

    tried: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)

    def note(self, what: str, diverged: str = "") -> bool:
        """Count one more of ``what``, as skipped if something has ``diverged``; return whether it was used."""
        self.tried[what] = self.tried.get(what, 0) + 1
        if diverged:
            self.skipped[what] = self.skipped.get(what, 0) + 1
            self.why.setdefault(what, diverged)
        return not diverged

    def drain(self) -> Outcomes:
        """Return the counts since the last call, and reset them."""
        drained = Outcomes(self.tried, self.skipped, self.why)
        self.tried, self.skipped, self.why = {}, {}, {}
        return drained

    def add(self, other: Outcomes, t: int) -> None:
        """Add the counts of round ``t``."""
        for total, counts in ((self.tried, other.tried), (self.skipped, other.skipped)):
            for what, count in counts.items():
                total[what] = total.get(what, 0) + count
        for what, why in other.why.items():
            self.why.setdefault(what, f"in round {t}, {why}")

    def failure(self) -> str:
        """Return why a whole run had no effect: something was skipped every time. Empty if it had one."""
        failed = [what for what, count in self.skipped.items() if count == self.tried[what]]
        own = [what for what in failed if what != MESSAGES]  # if the peer itself diverges, its neighbors matter less
        texts = []
        for what in own or failed:
            text = _FAILURES.get(what, f"all {{}} {what} were discarded").format(self.skipped[what])
            texts.append(f"{text}, because values had diverged: {self.why[what]}")
        return "; ".join([*texts, _REMEDY if own else _NEIGHBORS]) if failed else ""
