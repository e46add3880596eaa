"""``p2pfl evaluate``: what the final models of a finished run achieve.

As JSON:

    {"run": "<folder>", "masked_test": false,
     "peers": [{"peer": 3, "model": "…", "personal": {…} | null, "global": {…} | null, "metrics": {…},
                "extra_metrics": {"peak": {…}, …}}, …],
     "accuracy": {"mean": …, "std": …, "worst_tenth": …, "worst_fifth": …} | null,
     "global_accuracy": …, "metrics": …, "nonfinite_metrics": …, "extra_metrics": …, "masked_accuracies": …,
     "unmasked_accuracies": …, "attackers": …}

Evaluations are as in a round record (p2pfl/session/metrics.py), the rest is as in summary.json (facts/summary.py).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from launcher.facts.spreads import MetricSpread, Spread, metric_spreads, nonfinite_metrics, spreads
from launcher.facts.summary import Attackers
from launcher.formatting import percent
from launcher.formatting.console import make_table
from p2pfl import PeerId
from p2pfl.attackers import attacks
from p2pfl.run_folder.folder import RunFolder


@dataclass(frozen=True)
class RunEvaluation:
    """The evaluations of all peers of a run; see the module docstring.

    Attributes:
        peers: as plain values.
        best: always None: only the run itself knows its best round.
    """

    run: str
    masked_test: bool
    peers: list[dict[str, Any]]
    accuracy: Spread | None
    global_accuracy: Spread | None
    metrics: dict[str, MetricSpread]
    nonfinite_metrics: dict[str, list[PeerId]]
    extra_metrics: dict[str, Spread]
    masked_accuracies: dict[str, Spread]
    unmasked_accuracies: dict[str, Spread]
    attackers: Attackers | None = None
    best: None = None

    def to_dict(self) -> dict[str, Any]:
        plain = asdict(self)
        del plain["best"]
        if self.attackers is None:
            del plain["attackers"]
        return plain


def evaluate_run(folder: RunFolder, masked: bool | None, device: str) -> RunEvaluation:
    """Evaluate the final models; see ``p2pfl.session.scoring.evaluate_run``, also for errors."""
    from p2pfl.run_file import load as run_files
    from p2pfl.session import scoring
    from p2pfl.session.metrics import number, plain

    run = run_files.load(folder.run_file)
    found = list(scoring.evaluate_run(run, folder, masked=masked, device=scoring.device_named(device)))
    attackers = attacks(folder.settings)
    honest = [peer for peer in found if peer.peer not in attackers]
    evaluations = [peer.evaluations for peer in honest]
    accuracies = {peer.peer: one.accuracy for peer in found if (one := peer.evaluations.personal)}
    scored = [one.personal_and_extra() for one in evaluations]
    return RunEvaluation(
        run=str(folder.root),
        masked_test=run.file.masked_test if masked is None else masked,
        peers=[
            {
                "peer": peer.peer,
                "model": peer.model,
                "personal": plain(peer.evaluations.personal),
                "global": plain(peer.evaluations.whole),
                "metrics": {name: number(value) for name, value in peer.evaluations.metrics.items()},
                "extra_metrics": {name: plain(extra) for name, extra in peer.evaluations.extra.items()},
            }
            for peer in found
        ],
        accuracy=Spread.of(one.personal.accuracy for one in evaluations if one.personal),
        global_accuracy=Spread.of(one.whole.accuracy for one in evaluations if one.whole),
        metrics=metric_spreads(one.metrics for one in evaluations),
        nonfinite_metrics=nonfinite_metrics({peer.peer: peer.evaluations.metrics for peer in honest}),
        extra_metrics=spreads({name: extra.accuracy for name, extra in one.extra.items()} for one in evaluations),
        masked_accuracies=spreads({name: one.masked_accuracy for name, one in each.items()} for each in scored),
        unmasked_accuracies=spreads({name: one.unmasked_accuracy for name, one in each.items()} for each in scored),
        attackers=Attackers.of(attackers, accuracies),
    )


def table(evaluation: RunEvaluation) -> Table:
    """Return a table with one peer per row."""
    head = ["peer", "model", "samples", "unmasked %", "masked %"]
    if evaluation.global_accuracy is not None:
        head.append("global %")
    rows = []
    for peer in evaluation.peers:
        personal, whole = peer["personal"] or {}, peer["global"] or {}
        accuracies = (*map(personal.get, ("unmasked_accuracy", "masked_accuracy")), whole.get("accuracy"))
        row = [str(peer["peer"]), peer["model"], str(personal.get("samples", 0)), *map(percent, accuracies)]
        rows.append(row[: len(head)])
    return make_table(head, rows, left=["model"])
