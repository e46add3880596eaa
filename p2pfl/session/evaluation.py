"""Evaluate an algorithm on all test splits that a run asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from p2pfl.algorithms.base import Algorithm
from p2pfl.learning.evaluation import Evaluation, evaluate, mean_of
from p2pfl.session.method_results import extra_metrics_of


@dataclass(frozen=True)
class Evaluations:
    """The last evaluations: on the local test split, on the whole test set, and the algorithm's additional ones."""

    personal: Evaluation | None = None
    whole: Evaluation | None = None
    extra: Mapping[str, Evaluation] = field(default_factory=dict)

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics of the local test split that the run file names."""
        return self.personal.metrics if self.personal else {}

    def personal_and_extra(self) -> dict[str, Evaluation]:
        """Return the evaluations that a mask may change, by name: ``personal`` and the algorithm's."""
        return ({"personal": self.personal} if self.personal else {}) | dict(self.extra)

    def state_dict(self) -> dict[str, Any]:
        """Return the evaluations as plain containers, for ``from_state_dict``."""
        return asdict(self)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Evaluations:
        def restored(fields: Mapping[str, Any] | None) -> Evaluation | None:
            return None if fields is None else Evaluation(**fields)

        extra = {name: Evaluation(**fields) for name, fields in state["extra"].items()}
        return cls(restored(state["personal"]), restored(state["whole"]), extra)


def evaluate_algorithm(
    algorithm: Algorithm[Any], *, masked: bool, whole: bool, metrics: Sequence[str] = ()
) -> Evaluations:
    """Evaluate the model as it is now, unless nothing is trained.

    Each evaluation draws from the start of the peer's stream for evaluations.

    Args:
        masked: on the local test split, count only the scores of the peer's local classes (``masked_test``).
        whole: also evaluate on the whole test set.
        metrics: names of metrics of the local test split.
    """
    if not algorithm.trains:
        return Evaluations()
    data, seeded = algorithm.data, algorithm.streams.evaluation
    with seeded():
        personal = evaluate(algorithm.predict, data, data.test, masked=masked, metrics=metrics)
    on_whole = None
    if whole:
        with seeded():
            on_whole = evaluate(algorithm.predict, data, data.global_test)
    extra: dict[str, Evaluation] = {}
    parts: dict[str, list[Evaluation]] = {}
    with seeded():  # a method may train classifiers while it lists its metrics
        for metric in extra_metrics_of(algorithm, whole):
            # The whole test set is never masked.
            masked_metric = masked and metric.samples is not data.global_test
            with seeded():
                evaluation = evaluate(metric.predict, data, metric.samples, masked=masked_metric)
            if evaluation is not None:
                extra[metric.name] = evaluation
                if metric.part_of:
                    parts.setdefault(metric.part_of, []).append(evaluation)
    extra |= {name: mean_of(evaluations) for name, evaluations in parts.items()}
    return Evaluations(personal, on_whole, extra)
