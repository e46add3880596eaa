"""A map: methods x rules x attacks x fraction of attackers, on Fashion-MNIST, 20 peers in two clusters.

Peers 0-9 have only the classes 0-4, peers 10-19 only 5-9, as in topologies/mesh20.yaml, and each is tested on its
classes. Half of the attackers are in each cluster. Runs are small: 50 training images a peer, one hidden layer, and
as many epochs as D-PSGD needs to level off without attackers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from benchmarks.hostile.runs import Results, Settings

PEERS, EPOCHS = 20, 20
FRACTIONS = (0, 10, 20, 30, 40)
"""Attackers in percent of the peers."""
BY_INTEREST = (20, 0, 40, 10, 30)
"""The order in which fractions are measured, so that the first results already tell something."""
NO_ATTACK, MEAN = "none", "mean"
ATTACKS: dict[str, Settings] = {
    "sign-flip": {"name": "sign-flip", "scale": 4.0},
    "alie": {"name": "alie"},
    "label-flip": {"name": "label-flip"},
    "prototype-swap": {"name": "prototype-swap"},
}
ON_MODELS = ("sign-flip", "alie", "label-flip")
ON_ROWS = tuple(ATTACKS)
"""Attacks on methods that send a row for each class."""


@dataclass(frozen=True)
class Method:
    """How a method is run. ``rule``: the robust one that fits; None if the method combines nothing."""

    algorithm: Settings
    attacks: tuple[str, ...] = ON_MODELS
    rule: str | list[str] | None = None
    rounds: int = EPOCHS
    validation: float = 0.0


SGD = {"lr": 0.1, "batch": 20}
MAPL = {"lr": 0.003, "batch": 25, "warmup": 8, "projector_hidden": 64}
PROTOTYPES = {"lr": 0.03, "batch": 10, "alignment": 1.0}
METHODS: dict[str, Method] = {
    "local": Method({**SGD, "local_epochs": 1}, attacks=()),
    "dpsgd": Method({**SGD, "local_steps": 1}, rule="monna", rounds=3 * EPOCHS),  # an epoch has 3 batches
    "fedavg": Method({**SGD, "local_epochs": 1}, rule="monna"),
    "mapl": Method(MAPL, ON_ROWS, rule="norm-clip"),
    "mapl+": Method(MAPL, ON_ROWS, rule="norm-clip"),
    "fedproto": Method(PROTOTYPES, ON_ROWS, rule="monna"),
    "fedtgp": Method({**PROTOTYPES, "prototype_epochs": 30}, ON_ROWS, rule="monna"),
    "l2c": Method({**SGD, "local_epochs": 1}, rule="norm-clip", validation=0.2),
    "meta-l2c": Method({**SGD, "local_epochs": 1}, rule="norm-clip", validation=0.2),
    "dfml": Method(
        {"lr": 0.03, "batch": 20, "local_epochs": 1, "mutual_epochs": 5, "period": 5, "period_increment": 0},
        attacks=("sign-flip", "label-flip"),
    ),
    "feddistill": Method(SGD, ON_ROWS, rule="monna"),
    "lg-fedavg": Method(SGD, rule="monna"),
}


@dataclass(frozen=True)
class Cell:
    """A run of the map, or several of them that differ in their seed."""

    method: str
    rule: str
    attack: str
    fraction: int

    def key(self, seed: int) -> str:
        return f"map: {self.method}, {self.rule}, {self.attack}, {self.fraction} %, seed {seed}"


def chosen(names: Sequence[str], attacks: Sequence[str], rule: list[str] | None) -> dict[str, Method]:
    """Return methods of these names with these attacks, all without any, and another robust rule where one fits."""

    def changed(method: Method) -> Method:
        fits = tuple(attack for attack in method.attacks if attack in (attacks or ATTACKS))
        return replace(method, attacks=fits, rule=rule if rule and method.rule else method.rule)

    return {name: changed(METHODS[name]) for name in names or METHODS}


def attackers(fraction: int) -> list[int]:
    """Return who attacks: the last peers of both clusters in turn, so that larger fractions contain smaller ones."""
    half = PEERS // 2
    in_turn = [cluster + half - 1 - rank for rank in range(half) for cluster in (0, half)]
    return sorted(in_turn[: PEERS * fraction // 100])


def label(rule: str | list[str]) -> str:
    """Return the name of a rule, or those of a list of rules."""
    return " → ".join(rule) if isinstance(rule, list) else rule


def cells(methods: Mapping[str, Method], fractions: Iterable[int] = BY_INTEREST) -> Iterator[Cell]:
    """Yield the runs of one seed in the order in which they are measured."""
    for fraction in sorted(fractions, key=BY_INTEREST.index):
        for name, method in methods.items():
            for rule in rules(method):
                for attack in method.attacks if fraction else (NO_ATTACK,):
                    yield Cell(name, rule, attack, fraction)


def rules(method: Method) -> list[str]:
    """Return the rules by which a method is measured."""
    return [MEAN] if method.rule is None else [MEAN, label(method.rule)]


def settings(cell: Cell, method: Method, seed: int) -> Settings:
    hostile = {"adversaries": [{"peers": attackers(cell.fraction), **ATTACKS[cell.attack]}]} if cell.fraction else {}
    return {
        "name": "map",
        "seed": seed,
        "rounds": method.rounds,
        "peers": PEERS,
        "graph": "complete",
        "data": {
            "dataset": "fashion-mnist",
            "augment": "none",
            "partition": {
                "name": "clusters",
                "clusters": 2,
                "per_class": 10,
                "test_per_class": 100,
                "validation": method.validation,
            },
        },
        "models": "mlp-64",
        "algorithm": {"name": cell.method, **method.algorithm},
        "aggregation": MEAN if cell.rule == MEAN else method.rule,
        "eval_every": method.rounds,
        "device": "cpu",
        **hostile,
    }


def measure(
    results: Results, methods: Mapping[str, Method], fractions: Sequence[int], seeds: int, seconds: float
) -> None:
    """Simulate what is missing, the most telling runs first, until the CPU seconds are spent."""
    for seed in range(seeds):
        for cell in cells(methods, fractions):
            if not results.has(cell.key(seed)):
                if seconds <= 0:
                    return
                seconds -= results.of(cell.key(seed), settings(cell, methods[cell.method], seed))["cpu_s"]


@dataclass(frozen=True)
class Score:
    """Accuracies of honest peers, averaged over seeds: of all of them, and of the worst."""

    mean: float
    worst: float
    seeds: int


def score(results: Results, cell: Cell) -> Score | None:
    """Return what the peers reach that are honest at a fraction of attackers; None if nothing is measured.

    Without an attack, these are peers of the run without attackers.
    """
    run = cell if cell.attack != NO_ATTACK else Cell(cell.method, cell.rule, NO_ATTACK, 0)
    hostile = set(attackers(cell.fraction))
    found: list[list[float]] = []
    while results.has(key := run.key(len(found))):
        peers = results.of(key, {})["peers"]
        found.append([accuracy for peer, accuracy in peers.items() if int(peer) not in hostile])
    return Score(fmean(map(fmean, found)), fmean(map(min, found)), len(found)) if found else None


def table(results: Results, methods: Mapping[str, Method], fraction: int) -> str:
    """Return the accuracies at one fraction of attackers in percent, those of the worst honest peer in brackets.

    Rows without a measured attack are left out, but for those without attackers.
    """
    attacks = (NO_ATTACK, *(ATTACKS if fraction else ()))
    lines = [f"| method | rule | {' | '.join(attacks)} | seeds |", f"|---|---|{'---:|' * len(attacks)}---:|"]
    for name, method in methods.items():
        for rule in rules(method):
            scores = {attack: score(results, Cell(name, rule, attack, fraction)) for attack in attacks}
            if any(scores[attack] for attack in attacks[-len(ATTACKS) :]):
                found = [each.seeds for each in scores.values() if each]
                shown = [_text(method, attack, scores[attack]) for attack in attacks]
                seeds = f"{min(found)}" if min(found) == max(found) else f"{min(found)} to {max(found)}"
                lines.append(f"| {name} | {rule} | {' | '.join(shown)} | {seeds} |")
    return "\n".join(lines)


def _text(method: Method, attack: str, found: Score | None) -> str:
    if found is not None:
        return f"{100 * found.mean:.0f} ({100 * found.worst:.0f})"
    return "…" if attack in (NO_ATTACK, *method.attacks) else "–"


def spent(results: Results) -> float:
    """Return the CPU hours of all runs of the map."""
    return sum(float(result["cpu_s"]) for key, result in results.items() if key.startswith("map: ")) / 3600
