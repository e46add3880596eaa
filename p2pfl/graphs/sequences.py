"""Time-varying graphs that are listed: a list of graphs, and a trace of edges per round."""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt, model_validator

from p2pfl import rng
from p2pfl.errors import RunFileError
from p2pfl.graphs.base import GRAPHS, Graph, Schedule, graph, graph_error
from p2pfl.graphs.static import peer_id, unreadable
from p2pfl.graphs.time_varying import TimeVaryingGraph, topology_of
from p2pfl.messaging.topology import Topology
from p2pfl.paths import ExpandedPath
from p2pfl.registry import parse_section


def _parsed(section: str | dict[str, Any]) -> tuple[str, Graph]:
    return parse_section(GRAPHS, "a graph", section)


def _checked(section: str | dict[str, Any]) -> dict[str, Any]:
    name, graph = _parsed(section)
    return {"name": name, **graph.to_dict()}


Section = Annotated[str | dict[str, Any], AfterValidator(_checked)]


@graph("list")
@dataclass(frozen=True, kw_only=True)
class GraphList(TimeVaryingGraph):
    """Several graphs, taken in turn, or one after the other from given rounds on."""

    required: ClassVar[tuple[str, ...]] = ()  # ``schedule`` takes the edges from the members

    graphs: Annotated[tuple[Section, ...], Field(min_length=1)]
    """The graphs: names, or mappings with a name and parameters. Each may be disconnected."""
    every: PositiveInt | None = None
    """Rounds that each one lasts; after the last one, the first follows. Default without ``at``: 1."""
    at: tuple[NonNegativeInt, ...] | None = None
    """Alternative to every: the first round of each graph, ascending from 0."""

    @model_validator(mode="after")
    def _each_has_its_rounds(self) -> GraphList:
        if self.at is not None and self.every is not None:
            raise ValueError("give every or at, not both")
        if self.at is not None and (
            len(self.at) != len(self.graphs) or self.at[0] != 0 or sorted(set(self.at)) != list(self.at)
        ):
            raise ValueError(f"at should hold {len(self.graphs)} ascending rounds, the first 0, one per graph")
        return self

    @property
    def members(self) -> list[tuple[str, Graph]]:
        """The graphs and their names."""
        return list(map(_parsed, self.graphs))

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(file for _, member in self.members for file in member.files)

    @property
    def directed(self) -> bool:  # type: ignore[override]
        return any(isinstance(member, TimeVaryingGraph) and member.directed for _, member in self.members)

    def schedule(self, peers: int, seed: int, base: Path, rounds: int) -> Schedule:
        every, members = self.every or 1, self.members
        plans: list[tuple[Topology, Schedule | None]] = []
        for number, (_, member) in enumerate(members):
            draw = int(rng.shared(seed, "graph.list", number).integers(2**32))
            try:
                plans.append(replace(member, allow_disconnected=True).plan(peers, draw, base, rounds))
            except RunFileError as error:
                raise graph_error(f"graphs.{number}: {error.problems[0].message}") from None

        def at(t: int) -> Topology:
            position = bisect_right(self.at, t) - 1 if self.at is not None else t // every % len(plans)
            union, schedule = plans[position]
            return union if schedule is None else schedule(t)

        steady = self.at is None and all(schedule is None for _, schedule in plans)
        resolved = [member.resolved(name, *plan) for (name, member), plan in zip(members, plans, strict=True)]
        return Schedule(at, every * len(plans) if steady else None, {"graphs": resolved})


TraceEdge = tuple[NonNegativeInt, int, int] | tuple[NonNegativeInt, int, int, float]
"""Round, two peers, and the weight if there is one."""


@graph("trace")
@dataclass(frozen=True, kw_only=True)
class Trace(TimeVaryingGraph):
    """A mobility trace: the edges of each round, from a CSV file of rounds and pairs of peers."""

    required: ClassVar[tuple[str, ...]] = ()  # as above, from the file

    path: ExpandedPath | None = None
    """The file, relative to the folder of the run file."""
    edges: tuple[TraceEdge, ...] | None = None
    """Instead of the file: lists of a round, two peers, and the weight if there is one."""
    last: NonNegativeInt | None = None
    """The last round of the trace; default: the last one with an edge, or that the file names."""
    repeat: bool = False
    """After the last round, the first one follows; otherwise the run must be over then."""
    directed: bool = False  # type: ignore[misc]
    """The first peer sends to the second one only."""

    @model_validator(mode="after")
    def _one_source(self) -> Trace:
        if (self.path is None) == (self.edges is None):
            raise ValueError("give path or edges")
        return self

    @property
    def files(self) -> tuple[Path, ...]:
        return () if self.path is None else (self.path,)

    def schedule(self, peers: int, seed: int, base: Path, rounds: int) -> Schedule:
        lines = list(self.edges or ()) if self.path is None else read_trace(base / self.path, peers)
        last = max((t for t, *_ in lines), default=0) if self.last is None else self.last
        edges = [line for line in lines if len(line) > 1]
        if beyond := [t for t, *_ in edges if t > last]:
            raise graph_error(f"the trace has an edge in round {beyond[0]}, after its last round {last}")
        if rounds > last + 1 and not self.repeat:
            raise graph_error(
                f"the trace ends with round {last}, but the run has {rounds} rounds; run fewer, or set repeat: true"
            )
        by_round: dict[int, list[Any]] = {}
        for t, *edge in edges:
            by_round.setdefault(t, []).append(edge)

        def at(t: int) -> Topology:
            try:
                return topology_of(by_round.get(t % (last + 1), []), peers, directed=self.directed)
            except RunFileError as error:
                raise graph_error(f"round {t}: {error.problems[0].message}") from None

        return Schedule(at, last + 1, {"path": None, "edges": [list(edge) for edge in edges], "last": last})


def read_trace(file: Path, peers: int) -> list[tuple[Any, ...]]:
    """Return the lines of a trace: (round, i, j), (round, i, j, weight), or (round,) for a round without edges.

    A first line of words is a header; # starts a comment. Raises RunFileError.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(file, error) from None
    lines: list[tuple[Any, ...]] = []
    first = True
    for number, line in enumerate(text.splitlines(), start=1):
        cells = re.split(r"\s*[,;]\s*|\s+", line.partition("#")[0].strip())
        if cells == [""]:
            continue
        header, first = first and cells[0].isalpha(), False
        if not header:
            lines.append(_trace_line(cells, peers, f"{file}:{number}"))
    if not lines:
        raise graph_error(f"{file}: no edges; each line should be a round and two peers")
    return lines


def _trace_line(cells: list[str], peers: int, where: str) -> tuple[Any, ...]:
    t, *ends = cells
    if len(ends) not in (0, 2, 3):
        raise graph_error(f"{where}: expected round, peer, peer and perhaps a weight, found {len(cells)} values")
    if not (t.isascii() and t.isdigit()):
        raise graph_error(f"{where}: {t!r} is not a round")
    edge: list[Any] = [peer_id(end, peers, where) for end in ends[:2]]
    if edge and edge[0] == edge[1]:
        raise graph_error(f"{where}: the edge connects peer {edge[0]} to itself")
    for weight in ends[2:]:
        try:
            edge.append(float(weight))
        except ValueError:
            raise graph_error(f"{where}: {weight!r} is not a weight") from None
    return (int(t), *edge)
