"""CPU of a small message: complete graphs whose peers send 2.4 kB to each other, beside plain pyzmq."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import combinations
from typing import NamedTuple

from benchmarks.bench import measuring, raw_zmq, runs
from benchmarks.bench.measuring import RunTree, Slope
from benchmarks.bench.report import Goal, Report, Table, known, median_of
from benchmarks.bench.settings import Settings
from benchmarks.bench.transports import PLAIN, transport_sections
from benchmarks.bench.work import THEIRS, Column, in_turns, ratios

SIZE = runs.mlp_bytes(64, (8,))
"""Bytes of a message's body."""
LIMIT = 0.35
"""Milliseconds of CPU that a message may take."""
PLAIN_ROUNDS = 100
DEGREE = 4
"""Neighbors of the graph with which decentralizepy is compared: it does not run without any."""
ONE_HOST, ONE_PROCESS = "same-host mapping", "in-process"


class Complete(NamedTuple):
    """A complete graph, measured as the difference between a run of ``short`` rounds and one of ``long``.

    Attributes:
        rival: measure decentralizepy too, of which a process takes 300 MB.
    """

    peers: int
    short: int
    long: int
    transports: Sequence[str]
    rival: bool = False

    @property
    def received(self) -> int:
        """Messages that a peer receives in a round."""
        return self.peers - 1


GRAPHS = [
    Complete(24, 10, 60, [ONE_PROCESS, ONE_HOST, "TCP", "CURVE"], rival=True),
    Complete(50, 6, 26, [ONE_HOST]),
]
QUICK = [Complete(6, 5, 45, [ONE_PROCESS, ONE_HOST, "CURVE"])]


def messages(settings: Settings) -> Report:
    """Milliseconds of CPU that a message of 2.4 kB takes."""
    table = Table(
        {
            "peers": "d",
            "transport": "",
            "ms a round": ".1f",
            "CPU ms a peer's round": ".2f",
            "of it messages": ".2f",
            "CPU ms a message": ".3f",
            "of plain pyzmq": ".1f",
            "failure": "",
        }
    )
    text = (
        f"`{runs.SMALL}` at 1x8x8: in every round, each peer of a complete graph sends {SIZE:,} bytes to each other "
        "one, after one step of one sample. CPU is user and system time of all processes: the difference between a "
        "run of few rounds and one of more, divided by the rounds of all peers between them. *Of it messages* is the "
        "difference to the same run without neighbors: encoding, sending, reading, decoding and averaging; *a "
        "message* is that divided by the messages that a peer receives in a round. Plain pyzmq sends as many bodies "
        "of the same size from DEALER to ROUTER between as many processes, and does nothing with them. A message of "
        f"decentralizepy is what its complete graph takes beyond a {DEGREE}-regular one. "
        "[What the milliseconds are](#where-the-time-of-a-small-message-goes)."
    )
    report = Report("messages", "Small messages", text, [table])
    for graph in QUICK if settings.quick else GRAPHS:
        if graph.peers <= settings.most_peers:
            _add(graph, settings, report)
    return report


def _add(graph: Complete, settings: Settings, report: Report) -> None:
    """Measure a graph and add its rows and its goal."""
    (table,) = report.tables
    each: dict[str, Column] = {}
    for name, costs in _plain(graph, settings).items():
        seconds, cpu = ([1000 * figure for figure in figures] for figures in zip(*costs, strict=True))
        each[name] = [ms / graph.received for ms in cpu]
        table.add(graph.peers, name, seconds, cpu, cpu, known(each[name]), None, "")
    found = _through_peers(graph, settings)
    for name, slopes in found.items():
        failure = next((slope.failure for slope in slopes if slope.failure), "")
        whole = known(_ms(slope.cpu) for slope in slopes)
        if name not in (*graph.transports, THEIRS):
            table.add(graph.peers, name, None, whole, None, None, None, failure)
            continue
        fewer = DEGREE if name == THEIRS else 0  # messages of the run that it is compared with
        pairs = [
            (_ms(slope.cpu), _ms(other.cpu)) for slope, other in zip(slopes, found[_compared(name)], strict=True)
        ]
        each[name] = [None if a is None or b is None else (a - b) / (graph.received - fewer) for a, b in pairs]
        part = [graph.received * ms for ms in known(each[name])]
        to_plain = ratios(each[name], each["plain pyzmq, CURVE" if name == "CURVE" else "plain pyzmq, TCP"])
        seconds = known(_ms(slope.long.seconds_a_round) for slope in slopes)
        table.add(graph.peers, name, seconds, whole, part, known(each[name]), to_plain, failure)
    goal = Goal(f"complete {graph.peers}: CPU of a message of 2.4 kB", median_of(each[ONE_HOST]), LIMIT, "ms")
    report.goal(goal, _tree(graph))


def _plain(graph: Complete, settings: Settings) -> dict[str, list[raw_zmq.Cost]]:
    """Measure plain pyzmq in each turn, by name."""
    found: dict[str, list[raw_zmq.Cost]] = {}
    for name, curve in PLAIN.items():
        settings.progress(name)
        found[name] = [raw_zmq.exchange(graph.peers, SIZE, PLAIN_ROUNDS, curve=curve) for _ in range(settings.turns)]
    return found


def _through_peers(graph: Complete, settings: Settings) -> dict[str, list[Slope]]:
    """Measure each transport, and what its messages are compared with, in each turn, by name."""
    tree = _tree(graph)
    with measuring.scratch_folder() as keys:
        sections = transport_sections(keys, graph.peers)
        trees = {name: {**tree, "transport": sections[name]} for name in graph.transports}
        trees |= {_compared(name): runs.without_messages(tree) for name in graph.transports}
        systems = {
            name: partial(
                measuring.slope, measuring.simulate if ONE_PROCESS in name else measuring.launch, each, graph.short
            )
            for name, each in trees.items()
        }
        if graph.rival and settings.rival is not None:
            work = runs.Work(graph.peers, runs.SMALL, 1, graph.long)
            complete = [*combinations(range(graph.peers), 2)]
            for name, edges in ((THEIRS, complete), (_compared(THEIRS), runs.regular_edges(graph.peers, DEGREE))):
                systems[name] = partial(settings.rival.slope, work, edges, graph.short)
        return in_turns(systems, settings)


def _tree(graph: Complete) -> RunTree:
    return runs.light(graph.peers, "complete", graph.long, runs.SMALL)


def _compared(name: str) -> str:
    """Name the run without, or with fewer, messages that a transport or system is compared with."""
    others = {ONE_PROCESS: f"{ONE_PROCESS}, without neighbors", THEIRS: f"{THEIRS}, {DEGREE}-regular"}
    return others.get(name, "without neighbors")


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds
