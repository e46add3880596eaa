"""How launch, rounds and memory grow with the number of peers."""

from __future__ import annotations

from typing import Any

from benchmarks.bench import measuring, runs
from benchmarks.bench.measuring import cpu_fraction, cpu_until
from benchmarks.bench.report import Goal, Report, Table, Value
from benchmarks.bench.settings import Settings

MB, GB = 1e6, 1e9
TINY_CNN = 4 * 36_010
"""Bytes of the parameters of `tiny-cnn` at 1x8x8."""
BODY = f"{TINY_CNN / 1000:.0f} kB"

LAUNCHES: dict[int, Any] = {
    4: "complete",
    20: {"name": "regular", "degree": 6},
    100: {"name": "regular", "degree": 6},
    500: {"name": "regular", "degree": 4},
    1000: {"name": "regular", "degree": 4},
}
GRAPHS: list[tuple[int, Any]] = [
    *((peers, {"name": "regular", "degree": 4}) for peers in (16, 32, 64, 128, 256, 512)),
    *((peers, "complete") for peers in (16, 50, 100)),
]


def launch(settings: Settings) -> Report:
    """Seconds until all peers are in round 1, by number of peers."""
    table = Table(
        {
            "peers": "d",
            "graph": "",
            "first in round 1": ".1f",
            "all in round 1": ".1f",
            "launcher: CPU s until then": ".2f",
            "warm process: CPU s until then": ".2f",
            "launcher: part of a core after it": ".3f",
            "MB a peer": ".1f",
            "failure": "",
        }
    )
    text = (
        "`tiny-cnn`, one step of one sample a round. Seconds from the start of `p2pfl launch` until the first peer "
        "and until all have finished round 0. Memory is the mean PSS of a peer at the peak; above 100 peers, the PSS "
        "of all processes, divided by the peers."
    )
    report = Report("launch", "Launch", text, [table])
    for peers, graph in LAUNCHES.items():
        if peers > settings.most_peers:
            continue
        settings.progress(f"{peers} peers")
        split = peers <= 100  # reading smaps of 500 peers takes seconds
        tree = runs.light(peers, graph, rounds=6 if settings.quick else 10 if peers > 100 else 40)
        measured = measuring.launch(tree, split=split, timeout=1200)
        ready = measured.all_in_round_1
        after = cpu_fraction(measured.launcher, ready, measured.last_round)
        each = (measured.memory.total if split else measured.peak / peers) / MB
        first = min((times[0] for times in measured.rounds if times), default=None)
        cells: list[Value] = [peers, _name(graph), first, ready]
        cells += [cpu_until(measured.launcher, ready), cpu_until(measured.warm, ready), after]
        table.add(*cells, each or None, measured.failure)
        if peers == 100:
            beyond = (measured.memory.total - measured.memory.data - 2 * TINY_CNN) / MB  # parameters and gradients
            report.goal(Goal("100 peers, 6-regular: all in round 1", ready, 10, "s"), tree)
            report.goal(Goal("100 peers: each beyond model, optimizer, data", beyond if each else None, 30, "MB"))
            report.goal(Goal("100 peers: launcher, part of a core", after, 0.03))
        if peers == 500:
            peak = None if measured.failure else measured.peak / GB
            report.goal(Goal("500 peers, 4-regular: peak memory", peak, 24, "GB"))
        if peers == 1000:
            done = min(map(len, measured.rounds), default=0)
            report.goal(Goal("1,000 peers, 4-regular: all in round 1", ready, 180, "s"), tree)
            report.goal(Goal("1,000 peers, 4-regular: rounds finished by all", done, 10, "", "higher"))
    return report


def scale(settings: Settings) -> Report:
    """Seconds of a round by number of peers and graph."""
    table = Table(
        {
            "peers": "d",
            "graph": "",
            "body": "",
            "messages a round": ",d",
            "all in round 1": ".1f",
            "s a round": ".3f",
            "ms a peer": ".2f",
            "CPU ms a peer's round": ".2f",
            "CPU s in all": ".1f",
            "peak MB": ",.0f",
            "failure": "",
        }
    )
    text = (
        "The peers of [launch](#launch): training takes next to nothing. A round is the mean without the first two "
        "and the last; its CPU is what the peers record of theirs."
    )
    report = Report("scale", "Seconds a round", text, [table])
    for peers, graph in GRAPHS:
        if peers > settings.most_peers:
            continue
        settings.progress(f"{peers} peers, {_name(graph)}")
        degree = peers - 1 if graph == "complete" else graph["degree"]
        long = peers * degree > 5_000  # messages
        tree = runs.light(peers, graph, rounds=6 if settings.quick or long else 8 if peers > 100 else 20)
        measured = measuring.launch(tree)
        seconds = measured.seconds_a_round
        each = None if seconds is None else 1000 * seconds / peers
        cells: list[Value] = [peers, _name(graph), BODY, peers * degree, measured.all_in_round_1, seconds, each]
        cpu = None if measured.cpu_a_round is None else 1000 * measured.cpu_a_round
        table.add(*cells, cpu, measured.cpu, measured.peak / MB, measured.failure)
        if (peers, graph) == (100, "complete"):
            what = f"100 peers, complete, bodies of {BODY}: all in round 1"
            report.goal(Goal(what, measured.all_in_round_1, 30, "s"), tree)
    return report


def memory(settings: Settings) -> Report:
    """Memory of a peer by kind."""
    trees = {
        "W1": runs.work("W1", runs.WORK["W1"]._replace(rounds=12)),
        "W2": runs.work("W2", runs.WORK["W2"]._replace(rounds=6)),
        "100 peers of launch": runs.light(100, LAUNCHES[100], rounds=20),
    }
    if settings.quick:
        trees = {"W1": runs.work("W1", runs.QUICK["W1"])}
    table = Table(
        {
            "run": "",
            "MB a peer": ".1f",
            "code, shared": ".1f",
            "data, shared": ".1f",
            "model, optimizer, objects": ".1f",
            "messages, mapped": ".1f",
            "messages, private": ".1f",
            "failure": "",
        }
    )
    for name, tree in trees.items():
        settings.progress(name)
        measured = measuring.launch(tree, split=True)
        alone = measuring.launch(runs.without_messages(tree), split=True)
        found = measured.memory
        messages = max(0.0, found.private - alone.private)
        kinds = (found.total, found.code, found.data, found.private - messages, found.messages, messages)
        table.add(name, *(size / MB for size in kinds), measured.failure or alone.failure)
    text = (
        "PSS of a peer at the peak of a run, mean over peers. Code: libraries, and what the warm process imported "
        "before the fork. Messages: mapped files of the run folder, and the memory that a peer allocates beyond that "
        "of the same run without neighbors, which is for its model, gradients, optimizer, snapshots and objects."
    )
    return Report("memory", "Memory of a peer", text, [table])


def _name(graph: Any) -> str:
    return graph if isinstance(graph, str) else f"{graph['degree']}-regular"
