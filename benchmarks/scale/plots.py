"""The pictures of docs/scale.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import pictures
from benchmarks.scale.model import QUANTITIES, Model, Record, Size
from benchmarks.scale.page import SHOWN, compared

FITTED, HELD_OUT, LINE = "#3b6fb5", "#c8501e", "#8a8a8a"


def write(model: Model, records: Sequence[Record], folder: Path) -> None:
    """Write scale-growth.svg and scale-errors.svg."""
    plt = pictures.pyplot("scale")
    figure, axes = plt.subplots(2, 2, figsize=(8, 5.6), layout="constrained")
    growth(axes.flat, model, records)
    pictures.save(figure, folder / "scale-growth.svg")
    figure, axis = plt.subplots(figsize=(8, 3.2), layout="constrained")
    errors(axis, model, records)
    pictures.save(figure, folder / "scale-errors.svg")


def growth(axes: Any, model: Model, records: Sequence[Record]) -> None:
    """Draw what grows with peers, and with neighbors, as lines of the model and points of measurements."""
    small = [record for record in records if record["model"] == "tiny-cnn" and not record["delay"]]
    one = [record for record in small if record["hosts"] == 1]
    by_peers = [record for record in one if record["degree"] == 4]
    by_degree = [record for record in one if record["peers"] == 32]

    def host(name: str, scale: float) -> Callable[[float], float]:
        return lambda peers: scale * model.host(replace(Size(2), peers=int(peers)))[name]

    def peer(name: str, scale: float) -> Callable[[float], float]:
        def predict(degree: float) -> float:
            launch = Size(32, int(degree), remote=0.0).record()
            return scale * model(name, {**launch, "seconds": model.times(launch, 32, 2)})[0]

        return predict

    draws: tuple[tuple[str, list[Record], str, Callable[[Record], Any], Callable[[float], float]], ...] = (
        ("s a round of all peers, 4 neighbors", by_peers, "peers", lambda r: r["seconds"]["round"], host("round", 1)),
        ("GB of a host, 4 neighbors", by_peers, "peers", lambda r: r["host"][0]["pss"] / 1e9, host("memory", 1e-9)),
        ("CPU ms of a round, 32 peers", by_degree, "degree", lambda r: 1e3 * r["cpu"]["round"], peer("cpu", 1e3)),
        (
            "descriptors of a peer, 32 peers",
            by_degree,
            "degree",
            QUANTITIES["descriptors"].value,
            peer("descriptors", 1),
        ),
    )
    for axis, (title, shown, along, value, predict) in zip(axes, draws, strict=True):
        places = range(2, max(record[along] for record in shown) + 1)
        axis.plot(places, [predict(place) for place in places], color=LINE, label="model", zorder=1)
        for use, color, marker in (("fit", FITTED, "o"), ("held out", HELD_OUT, "s")):
            points = [(record[along], value(record)) for record in shown if record["use"] == use]
            if points:
                axis.scatter(
                    *zip(*points, strict=True), color=color, marker=marker, s=22, label=f"measured, {use}", zorder=2
                )
        axis.set(title=title, xlabel="peers" if along == "peers" else "neighbors", ylim=(0, None), xlim=(0, None))
        pictures.tidy(axis)
        axis.legend(frameon=False)


def errors(axis: Any, model: Model, records: Sequence[Record]) -> None:
    """Draw predicted divided by measured, of the launches that the fit has not seen."""
    names = [name for name in SHOWN if name != "connections"]
    for at, name in enumerate(names):
        for record in records:
            for found, predicted, _, value in compared(model, record):
                if found == name and record["use"] != "fit":
                    several = record["hosts"] > 1
                    axis.scatter(
                        predicted / value,
                        at,
                        s=26,
                        color=FITTED if several else HELD_OUT,
                        marker="D" if several else "s",
                    )
    for several, marker in ((False, "s"), (True, "D")):
        label = "several hosts" if several else "one host"
        axis.scatter([], [], s=26, color=FITTED if several else HELD_OUT, marker=marker, label=label)
    axis.axvline(1, color=LINE, linewidth=1)
    axis.set_xscale("log")
    axis.set_xticks([0.25, 0.5, 0.8, 1, 1.25, 2, 4], ["1/4", "1/2", "0.8", "1", "1.25", "2", "4"])
    axis.minorticks_off()
    axis.set_yticks(range(len(names)), [SHOWN[name][0] for name in names])
    axis.invert_yaxis()
    axis.set(xlabel="predicted / measured, held-out launches")
    pictures.tidy(axis, axis="x")
    axis.legend(frameon=False)
