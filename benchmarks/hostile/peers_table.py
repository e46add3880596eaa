"""Rules for peers without a server, where ByzFL's were measured with one: γ = 0, one label to each honest peer."""

from __future__ import annotations

from typing import Any

from benchmarks.hostile.byzfl_table import ATTACKS, PUBLISHED, after_clipping, settings
from benchmarks.hostile.runs import Results, mean_and_deviation

GRAPHS: dict[str, Any] = {"complete": "complete", "6-regular": {"name": "regular", "degree": 6}}
RULES = (
    "monna",
    "self-centered-clipping",
    "self-centered-clipping to 0.2",
    "nnm → monna",
    "clip → nnm → trimmed-mean",
)


def rule(name: str, f: int) -> Any:
    """Return a rule's section of the run file: most trust the peer's own contribution, as no server can."""
    match name:
        case "self-centered-clipping to 0.2":
            return {"name": "self-centered-clipping", "radius": 0.2}
        case "nnm → monna":
            return [{"name": "nnm", "f": f}, {"name": "monna", "f": f}]
        case "clip → nnm → trimmed-mean":
            return after_clipping("trimmed-mean", f)
    return {"name": name, "f": f}


def table(results: Results, names: tuple[str, ...], graphs: tuple[str, ...], f: int, seeds: int, rounds: int) -> str:
    """Return the accuracies of honest peers in each attack, and in the worst one beside ByzFL's best."""
    attacks, published = list(ATTACKS), PUBLISHED["trimmed-mean", 0.0][f - 1]
    lines = [
        f"| graph | rule | {' | '.join(attacks)} | worst | ByzFL's server |",
        f"|---|---|{'---:|' * (len(attacks) + 2)}",
    ]
    for graph in graphs:
        for name in names:
            runs = {
                attack: [
                    results.of(
                        f"{name} {graph} γ=0 f={f} {attack} seed {seed} of {rounds} rounds",
                        settings(rule(name, f), 0.0, f, attack, seed, rounds, GRAPHS[graph]),
                    )["accuracy"]
                    for seed in range(seeds)
                ]
                for attack in attacks
            }
            worst = min(runs.values(), key=sum)
            cells = " | ".join(mean_and_deviation(runs[attack]) for attack in attacks)
            lines.append(f"| {graph} | {name} | {cells} | {mean_and_deviation(worst)} | {published:.2f} |")
    return "\n".join(lines)
