"""``p2pfl algorithms``, ``models`` and ``graph``: describe algorithms, costs of models, and graphs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import cache
from statistics import fmean
from typing import TYPE_CHECKING, Any

from launcher import formatting
from p2pfl import PeerId
from p2pfl.aggregation import Mean
from p2pfl.attackers import attacks
from p2pfl.errors import ModelError
from p2pfl.messaging.topology import Topology, averaging_gap

if TYPE_CHECKING:
    from p2pfl.graphs import Schedule
    from p2pfl.run_file.run import Run

WINDOW = 10
"""Rounds of whose product the spectral gap is shown, if the graphs of a run do not repeat."""


def describe_algorithm(name: str) -> dict[str, Any]:
    """Return summary, paper and hyper-parameters of an algorithm. Raises OptionErrors for an unknown name."""
    from p2pfl.algorithms import ALGORITHMS
    from p2pfl.learning.named_losses import DEFAULT
    from p2pfl.options import notes
    from p2pfl.run_file.checks import has_loss_of_its_own

    algorithm = ALGORITHMS.find(name)
    paper = {key: getattr(algorithm, key) for key in ("name", "summary", "title", "authors", "venue", "url")}
    hyper = [asdict(note) for note in notes(algorithm.Hyper)]
    if has_loss_of_its_own(algorithm):  # the option is refused, unless it is one of the method's
        hyper = [note for note in hyper if (note["name"], note["default"]) != ("loss", DEFAULT)]
    return {**paper, "hyper": hyper}


def describe_models(
    names: Iterable[str], channels: int, size: tuple[int, ...], classes: int, features: int | None = None
) -> list[dict[str, Any]]:
    """Return the costs of model groups: ``{"name", "members": [{"name", "parameters", …}, …]}`` for each.

    A member that does not support such inputs has ``{"name", "error"}``. Raises OptionErrors for an unknown name.
    """
    from p2pfl.models import MODELS
    from p2pfl.models.cost import cost

    @cache
    def member(name: str, features: int | None) -> dict[str, Any]:
        try:
            return asdict(cost(name, channels, size, classes, features))
        except ModelError as error:
            return {"name": name, "error": str(error)}

    found = []
    for name in names:
        group = MODELS.find(name)
        costs = [member(model, features or group.features) for model in group.members]
        found.append({"name": name, "members": costs})
    return found


def describe_graph(topology: Topology) -> dict[str, Any]:
    """Return the figures that determine how fast information spreads on a graph, and at what cost."""
    degrees = [topology.degree(peer) for peer in range(topology.peers)]
    return {
        "peers": topology.peers,
        "edges": len(topology.edges),
        "degree": {"min": min(degrees), "mean": fmean(degrees), "max": max(degrees)},
        "components": len(topology.components),
        "diameter": topology.diameter,
        "spectral_gap": topology.spectral_gap,
    }


def describe_over_time(schedule: Schedule, rounds: int, window: int | None) -> dict[str, Any]:
    """Return what a round of a time-varying graph costs, and how fast information spreads.

    Args:
        rounds: of the run.
        window: rounds of whose product the spectral gap is computed; None: the period, or else ``WINDOW``.

    Returns:
        ``sent``: messages that a peer sends in a round, minimum, mean and maximum over peers and rounds; ``edges``:
        pairs of neighbors in a round; ``gap``: of each single round; ``window_gap``: of each window, whose first
        round is in ``starts``.
    """
    window = min(rounds, window or schedule.period or WINDOW)
    graphs = [schedule(t) for t in range(rounds)]
    sent = [len(receivers) for graph in graphs for receivers in graph.receivers]
    starts = list(range(0, rounds - window + 1, window))
    return {
        "rounds": rounds,
        "period": schedule.period,
        "sent": {"min": min(sent), "mean": fmean(sent), "max": max(sent)},
        "edges": {
            "min": min(len(graph.edges) for graph in graphs),
            "mean": fmean(len(graph.edges) for graph in graphs),
            "max": max(len(graph.edges) for graph in graphs),
        },
        "gap": [averaging_gap([graph]) for graph in graphs],
        "window": window,
        "starts": starts,
        "window_gap": [averaging_gap(graphs[start : start + window]) for start in starts],
    }


def describe_attackers(run: Run) -> dict[str, Any]:
    """Return how many attackers each honest peer has among its neighbors, and how many the aggregation withstands.

    Of a time-varying graph, the round counts that is worst for the peer.

    Returns:
        ``attacks``: the attack of each attacker; ``aggregation``: name of the rule; ``peers``: for each honest peer
        ``neighbors`` that send to it, ``attackers`` among them, ``withstands``: how many the rule withstands as it is
        set, ``tolerates``: how many it can be set to. Empty if nobody attacks and the rule is the mean.
    """
    found = attacks(run.file.model_dump(include={"peers", "seed", "adversaries"}))
    if not found and type(run.aggregation) is Mean:
        return {}
    rule = run.aggregation
    period = 1 if run.schedule is None else min(run.schedule.period or run.rounds, run.rounds)
    graphs = [run.topology] if run.schedule is None else map(run.schedule, range(period))
    worst: dict[PeerId, dict[str, Any]] = {}
    for graph in graphs:
        for peer, sources in enumerate(graph.sources):
            n = 1 + len(sources)
            counts = {
                "neighbors": len(sources),
                "attackers": sum(j in found for j in sources),
                "withstands": rule.withstands(n),
                "tolerates": rule.tolerates(n),
            }
            if peer not in found and (peer not in worst or _margin(counts) < _margin(worst[peer])):
                worst[peer] = {"peer": peer, **counts}
    names = ", ".join(run.rules) + (" (auto)" if run.recommended else "")
    return {"attacks": found, "aggregation": names, "peers": [worst[peer] for peer in sorted(worst)]}


def _margin(counts: Mapping[str, int]) -> int:
    """Return how many more attackers the rule would withstand."""
    return counts["withstands"] - counts["attackers"]


def attackers_rows(described: Mapping[str, Any]) -> list[list[str]]:
    """Return the rows of a table: peers with equal counts share one, and more than a rule withstands is marked."""
    columns = ("neighbors", "attackers", "withstands", "tolerates")
    alike: dict[tuple[int, ...], list[PeerId]] = {}
    for counts in described["peers"]:
        alike.setdefault(tuple(counts[column] for column in columns), []).append(counts["peer"])
    return [
        [formatting.ids(peers), *map(str, counts), "too many" if counts[1] > counts[2] else ""]
        for counts, peers in sorted(alike.items())
    ]
