"""The picture of the map: a panel for each method, accuracy by fraction of attackers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks import pictures
from benchmarks.hostile.robustness_map import ATTACKS, FRACTIONS, MEAN, NO_ATTACK, Cell, Method, rules, score
from benchmarks.hostile.runs import Results

COLUMNS = 4
COLORS = dict(zip((NO_ATTACK, *ATTACKS), ("#8a8a8a", "#3b6fb5", "#c8501e", "#2a8f4f", "#8a4fb0"), strict=True))
LOCAL = "local"


def draw(results: Results, methods: Mapping[str, Method], file: Path) -> None:
    """Draw a line for each attack, solid for the mean and dashed for the robust rule, and local training dotted."""
    plt = pictures.pyplot("hostile")
    shown = [name for name in methods if name != LOCAL]
    rows = -(-(len(shown) + 1) // COLUMNS)
    figure, axes = plt.subplots(
        rows, COLUMNS, figsize=(8.6, 2.1 * rows), sharex=True, sharey=True, layout="constrained", squeeze=False
    )
    alone = line(results, Cell(LOCAL, MEAN, NO_ATTACK, 0))
    for axis, name in zip(axes.flat, shown, strict=False):
        axis.plot(*alone, color="black", linestyle=":", linewidth=1)
        for rule in rules(methods[name]):
            for attack in (NO_ATTACK, *methods[name].attacks):
                style = {"linestyle": "-" if rule == MEAN else "--", "linewidth": 1.3, "marker": ".", "markersize": 4}
                axis.plot(*line(results, Cell(name, rule, attack, 0)), color=COLORS[attack], **style)
        axis.set(title=name, xticks=FRACTIONS, ylim=(0, 90))
        pictures.tidy(axis)
    for number, axis in enumerate(axes.flat):
        if number >= len(shown):
            axis.axis("off")
        if number + COLUMNS >= len(shown):
            axis.tick_params(labelbottom=True)
    legend(axes.flat[len(shown)])
    figure.supxlabel("attackers, % of the peers")
    figure.supylabel("accuracy of honest peers, %")
    pictures.save(figure, file)


def line(results: Results, cell: Cell) -> tuple[list[int], list[float]]:
    """Return what is measured of an attack by fraction; all begin without attackers."""
    found = {}
    for fraction in FRACTIONS:
        attack = cell.attack if fraction else NO_ATTACK
        one = score(results, Cell(cell.method, cell.rule, attack, fraction))
        if one is not None:
            found[fraction] = 100 * one.mean
    return list(found), list(found.values())


def legend(axis: object) -> None:
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], color=color, label=attack) for attack, color in COLORS.items()]
    lines += [
        Line2D([], [], color="black", label="mean"),
        Line2D([], [], color="black", linestyle="--", label="robust rule"),
        Line2D([], [], color="black", linestyle=":", label="local training"),
    ]
    axis.legend(handles=lines, loc="center", frameon=False)  # type: ignore[attr-defined]
