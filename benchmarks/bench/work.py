"""The same work in turns: with decentralizepy, as bare training, with and without messages, with checkpoints."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from benchmarks.bench import measuring, runs
from benchmarks.bench.measuring import Measurement, RunTree, Slope
from benchmarks.bench.report import Goal, Report, Table, known, median_of, ratio
from benchmarks.bench.settings import Settings

MIB = 2**20
OURS, THEIRS = "p2pfl", "decentralizepy"
TIMES_AS_FAST = {"W1": 2.5, "W2": 8.0, "W3": 6.0}
FRACTION_OF_MEMORY = {"W1": 1 / 8, "W2": 1 / 4, "W3": 1 / 6}
SHORT = 10
"""Rounds of the short run from which the CPU of a round of W1 is told."""
OVER_BARE_CPU, OVER_BARE_TIME = 1.4, 1.6
"""CPU and wall time of a round of W1, at most, as multiples of bare training."""

Column = list[float | None]
"""A figure of each turn; None where the run failed."""
Measured = TypeVar("Measured", Measurement, Slope)


def in_turns(systems: Mapping[str, Callable[[], Measured]], settings: Settings) -> dict[str, list[Measured]]:
    """Run each of ``systems`` once per turn, in a rotated order, so that other load affects all of them."""
    names = list(systems)
    found: dict[str, list[Measured]] = defaultdict(list)
    for turn in range(settings.turns):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            settings.progress(name)
            found[name].append(systems[name]())
            if found[name][-1].failure:
                settings.progress(f"{name}: {found[name][-1].failure}")
    return {name: found[name] for name in names}


def ratios(one: Column, other: Column) -> list[float]:
    """The ratios of the turns in which both were measured."""
    return known(ratio(a, b) for a, b in zip(one, other, strict=True))


def column(measurements: Sequence[Measurement], figure: Callable[[Measurement], float | None]) -> Column:
    return [None if measured.failure else figure(measured) for measured in measurements]


def seconds(measurements: Sequence[Measurement]) -> Column:
    return column(measurements, lambda measured: measured.seconds)


def rounds(measurements: Sequence[Measurement]) -> Column:
    return column(measurements, lambda measured: measured.seconds_a_round)


def alone(measurements: Sequence[Measurement]) -> Column:
    """Seconds of a round without neighbors."""
    return column(measurements, lambda measured: measured.seconds_a_round_alone)


def peaks(measurements: Sequence[Measurement]) -> Column:
    return column(measurements, lambda measured: measured.peak / MIB)


def cpu(measurements: Sequence[Measurement]) -> Column:
    return column(measurements, lambda measured: measured.cpu)


def written(measurements: Sequence[Measurement]) -> Column:
    return column(measurements, lambda measured: measured.written / MIB)


def side_by_side(settings: Settings) -> Report:
    """W1 to W4."""
    table = Table(
        {
            "work": "",
            "system": "",
            "seconds": ".1f",
            "s a round": ".3f",
            "peak MiB": ",.0f",
            "CPU s": ".1f",
            "CPU ms a peer's round": ".1f",
            "MiB written": ",.0f",
            "times as fast": ".2f",
            "of the CPU": ".2f",
            "of the memory": ".2f",
        }
    )
    text = (
        "D-PSGD with the same graph, networks and number of steps, in turns. W1: 16 peers, CNN of 2.3 MB, 3 steps a "
        "round, 50 rounds; W2: 8 peers, MLP of 46 MB, 1 step, 10 rounds; W3: as W1 with 64 peers, 10 rounds; W4: the "
        "same with 128. Random 4-regular graph, SGD, batches of 8, evaluation at the end. Seconds last from the "
        "command to its end; a round is the mean without the first two and the last; the peak is of the summed PSS "
        "of all processes, sampled; CPU is user and system time of all processes from the command to its end, also "
        f"where it is divided by the rounds of all peers. Dataset: {runs.dataset_name()}."
    )
    report = Report("work", "Side by side", text, [table])
    for name, work in (runs.QUICK if settings.quick else runs.WORK).items():
        tree = runs.work(name, work)
        systems = {OURS: partial(measuring.launch, tree)}
        if settings.rival is not None and name in TIMES_AS_FAST:
            systems[THEIRS] = partial(settings.rival.measure, work, runs.regular_edges(work.peers))
        found = in_turns(systems, settings)
        ours, theirs = found[OURS], found.get(THEIRS, [])
        faster = ratios(seconds(theirs), seconds(ours)) if theirs else []
        cheaper = ratios(cpu(ours), cpu(theirs)) if theirs else []
        smaller = ratios(peaks(ours), peaks(theirs)) if theirs else []
        for system, measurements in found.items():
            figures = [known(figure(measurements)) for figure in (seconds, rounds, peaks, cpu)]
            figures.append([1000 * total / (work.peers * work.rounds) for total in figures[-1]])
            compared = (faster, cheaper, smaller) if system == OURS else (None, None, None)
            table.add(name, system, *figures, known(written(measurements)), *compared)
        if theirs:
            goal = Goal(f"{name}: times as fast as {THEIRS}", median_of(faster), TIMES_AS_FAST[name], "", "higher")
            report.goal(goal, tree)
            report.goal(Goal(f"{name}: of its memory", median_of(smaller), FRACTION_OF_MEMORY[name]))
        if name == "W4":
            report.goal(Goal("W4: seconds", median_of(seconds(ours)), 60, "s"), tree)
            report.goal(Goal("W4: peak memory", median_of(column(ours, lambda p: p.peak / 1e9)), 5, "GB"))
    return report


def overhead(settings: Settings) -> Report:
    """A round of W1 against bare training."""
    tree = runs.work("W1", runs.QUICK["W1"] if settings.quick else runs.WORK["W1"])
    short = 3 if settings.quick else SHORT
    bare, silent = "bare training", "p2pfl without neighbors"
    systems = {
        OURS: partial(measuring.slope, measuring.launch, tree, short),
        silent: partial(measuring.slope, measuring.launch, runs.without_messages(tree), short),
        bare: partial(measuring.slope, measure_bare, tree, short),
    }
    found = in_turns(systems, settings)
    times = {name: rounds([slope.long for slope in slopes]) for name, slopes in found.items()}
    times[silent] = alone([slope.long for slope in found[silent]])
    cost = {name: [slope.cpu for slope in slopes] for name, slopes in found.items()}
    table = Table(
        {
            "W1 as": "",
            "s a round": ".3f",
            "of bare training": ".2f",
            "CPU ms a peer's round": ".1f",
            "of bare training's CPU": ".2f",
            "CPU s in all": ".1f",
        }
    )
    for name, slopes in found.items():
        each = [1000 * figure for figure in known(cost[name])]
        compared = ratios(times[name], times[bare]), ratios(cost[name], cost[bare])
        table.add(
            name, known(times[name]), compared[0], each, compared[1], known(cpu([slope.long for slope in slopes]))
        )
    text = (
        "A round of W1, without the first two and the last. CPU is user and system time of all processes: the "
        f"difference between a run of {SHORT} rounds and the whole one, divided by the rounds of all peers between "
        "them, which leaves out start and end. Bare training is the local steps of all peers in plain PyTorch, one "
        "process per core, on the same samples: nothing is sent, averaged, recorded or saved. Without neighbors, "
        "peers do everything but send and receive. [What the milliseconds are](#where-the-time-of-w1-goes)."
    )
    report = Report("overhead", "Overhead over bare training", text, [table])
    in_cpu, in_time = (median_of(ratios(figure[OURS], figure[bare])) for figure in (cost, times))
    report.goal(Goal("W1: CPU of a round, of bare training", in_cpu, OVER_BARE_CPU), tree)
    report.goal(Goal("W1: a round, of bare training", in_time, OVER_BARE_TIME), tree)
    return report


def measure_bare(tree: RunTree) -> Measurement:
    with measuring.scratch_folder() as folder:
        file = folder / "run.yaml"
        file.write_text(json.dumps(tree))
        command = [sys.executable, "-m", "benchmarks.bench.bare", str(file), str(folder / "run")]
        return measuring.measure(command, folder, "*.log", " round done t=")


def checkpoints(settings: Settings) -> Report:
    """The cost of checkpoints."""
    peers, last = (4, 6) if settings.quick else (10, 22)
    every: dict[str, Any] = {"every round": 1, "every 10 rounds": 10, "auto": "auto", "last round": 1000}
    table = Table(
        {
            "method": "",
            "checkpoint": "",
            "s a round": ".2f",
            "ratio to last round": ".2f",
            "MiB written a peer": ".1f",
        }
    )
    for method in ("mapl",) if settings.quick else runs.CHECKPOINTED:
        trees = {name: runs.checkpointed(method, peers, last, value) for name, value in every.items()}
        systems = {
            name: partial(measuring.launch, tree)
            for name, tree in trees.items()
            if name != "auto" or measuring.is_accepted(tree)
        }
        found = in_turns(systems, settings)
        for name, measurements in found.items():
            compared = ratios(rounds(measurements), rounds(found["last round"]))
            each = [size / peers for size in known(written(measurements))]
            table.add(method, name, known(rounds(measurements)), compared, each)
    text = (
        "The cost of [recovering from crashes](reliability.md): ten peers, `tiny4` on digits, a checkpoint after the "
        "last round and, besides, after every one, after every tenth, or as the peer decides. A round of MAPL or "
        "DFML (one mutual epoch) takes half a second for all ten peers."
    )
    return Report("checkpoints", "Checkpoints", text, [table])
