"""What a run came to: the tables printed at its end, and summary.json.

    {"name": "mesh20", "algorithm": "mapl", "seed": 0, "rounds": 60, "started": "2026-11-21T09:30:00+00:00",
     "run": "<folder>", "seconds": 93.1,        from asking for the peers to the last exit (*); null if nobody watched
     "finished": true,                          all peers did
     "parts": [[0, 1, 2], [4, 5]] | null,       those into which the graph has fallen without the peers that did not
     "peers": [{"peer": 3, "model": "…", "group": 1, "rounds_done": 60, "digest": "…",
                "accuracy": 0.97, "best": 0.98, "best_round": 41, "global_accuracy": null,
                "bytes_out": 81234, "bytes_in": 81234, "messages_out": 1140, "missing": 0,
                "seconds": 80.2, "ended": "finished", "log": "<path>"}, …],
     "accuracy": {"mean": …, "std": …, "worst_tenth": …, "worst_fifth": …} | null,   over the peers with one
     "best": …, "global_accuracy": …,                                  likewise
     "measures": {"peak": {"mean": …, …}, …},                          what else the method evaluates, likewise
     "weighted_accuracy": 0.96 | null,          correct answers of all peers by test samples of all peers
     "traffic": {"Prototypes": {"messages": …, "payload": …, "header": …}, …},     bytes sent, by kind
     "collaboration": {"peers": [0, 2, …], "groups": [0, 0, …], "weights": [[…], …],
                       "inside": …, "across": …, "ratio": …} | null}

(*) Of a run that was resumed, the sum over its parts, without the time between them; and never less than what the
slowest peer took, for there may be parts that nobody watched to their end.

``std`` is that of the population. ``worst_tenth`` and ``worst_fifth`` are the means over the tenth and the fifth of
the peers (at least one) with the lowest values. ``collaboration.weights[a][b]`` is what the a-th of
``collaboration.peers`` gives to the b-th, 0 if it does not hear it; peers are in the order of their groups.
``inside`` and ``across`` are mean weights over all ordered pairs of different peers in one group, and in two; null
where there is no such pair.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

import yaml
from rich.console import Console
from rich.table import Table

from launcher import text
from launcher.picture import MOST_PEERS, draw
from launcher.processes import NOT_COLLECTED, how_it_ended
from p2pfl.errors import RunFolderError, Unwritable
from p2pfl.runfolder import PeerFolder, PeerId, Result, RunFolder, read_json, write_json

if TYPE_CHECKING:
    from p2pfl.topology import Topology


@dataclass(frozen=True)
class PeerSummary:
    """One peer's line."""

    peer: PeerId
    model: str
    group: int | None
    rounds_done: int
    digest: str
    accuracy: float | None
    best: float | None
    best_round: int | None
    global_accuracy: float | None
    bytes_out: int
    bytes_in: int
    messages_out: int
    missing: int
    seconds: float
    ended: str
    log: str


@dataclass(frozen=True)
class Spread:
    """Mean, standard deviation and the means of the worst tenth and fifth."""

    mean: float
    std: float
    worst_tenth: float
    worst_fifth: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        known = sorted(value for value in values if value is not None)
        if not known:
            return None
        tenth, fifth = (fmean(known[: math.ceil(len(known) / part)]) for part in (10, 5))
        return cls(fmean(known), pstdev(known), tenth, fifth)

    def __str__(self) -> str:
        mean, std, tenth, fifth = (
            text.percent(value) for value in (self.mean, self.std, self.worst_tenth, self.worst_fifth)
        )
        return f"{mean} ± {std} %, worst tenth {tenth} %, worst fifth {fifth} %"


@dataclass(frozen=True)
class Collaboration:
    """The matrix of mixing weights, and how much of them stays within groups."""

    peers: list[PeerId]
    groups: list[int]
    weights: list[list[float]]
    inside: float | None
    across: float | None
    ratio: float | None

    @classmethod
    def of(cls, results: Iterable[Result]) -> Collaboration | None:
        results = [result for result in results if result.rounds_done]  # before, weights are initial values
        rows = {result.peer: result.weights for result in results if result.weights is not None}
        if not rows:
            return None
        group = {result.peer: result.group for result in results}
        peers = sorted(rows, key=lambda peer: (group[peer], peer))
        weights = [[rows[i].get(str(j), 0.0) for j in peers] for i in peers]
        pairs = [(i, j) for i in range(len(peers)) for j in range(len(peers)) if i != j]
        same = [weights[i][j] for i, j in pairs if group[peers[i]] == group[peers[j]]]
        other = [weights[i][j] for i, j in pairs if group[peers[i]] != group[peers[j]]]
        inside = fmean(same) if same else None
        across = fmean(other) if other else None
        ratio = inside / across if inside is not None and across else None
        return cls(peers, [group[peer] for peer in peers], weights, inside, across, ratio)


@dataclass(frozen=True)
class Summary:
    """A whole run; the schema is in the module's docstring."""

    name: str
    algorithm: str
    seed: int
    rounds: int
    started: str
    run: str
    seconds: float | None
    finished: bool
    parts: list[list[PeerId]] | None
    peers: list[PeerSummary]
    accuracy: Spread | None
    best: Spread | None
    global_accuracy: Spread | None
    measures: dict[str, Spread]
    weighted_accuracy: float | None
    traffic: dict[str, dict[str, int]]
    collaboration: Collaboration | None
    unwritten: str = ""
    """Why there is no summary.json; the only thing that is not in it."""

    def to_dict(self) -> dict[str, Any]:
        plain = asdict(self)
        del plain["unwritten"]
        return plain


def settings(folder: RunFolder) -> dict[str, Any]:
    """The run file as plain values, unchecked: enough to name what is in it without importing torch."""
    try:
        plain = yaml.safe_load(folder.run_file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RunFolderError(f"{folder.run_file}: unreadable: {error}") from None
    if not isinstance(plain, dict):
        raise RunFolderError(f"{folder.run_file}: holds no mapping")
    return plain


def watched(folder: RunFolder) -> float | None:
    """Seconds that launchers have measured so far; None if none stayed to the end of its part."""
    seconds: float | None = (read_json(folder.summary) or {}).get("seconds")
    return seconds


def summarize(
    folder: RunFolder,
    codes: Mapping[PeerId, int] | None = None,
    seconds: float | None = None,
    topology: Topology | None = None,
    words: Mapping[PeerId, str] | None = None,
) -> Summary:
    """Read what the peers left behind, and write summary.json.

    Where known, ``codes`` are exit codes and ``words`` what peers have said of why they failed; ``seconds`` are those
    that were watched.
    """
    plain = settings(folder)
    places = list(folder.peers())
    results = [result for result in (place.result() for place in places) if result is not None]
    peers = [_peer(place, (codes or {}).get(place.peer), (words or {}).get(place.peer, "")) for place in places]
    summary = Summary(
        name=plain["name"],
        algorithm=plain["algorithm"]["name"],
        seed=plain["seed"],
        rounds=plain["rounds"],
        started=folder.about["started"],
        run=str(folder.root),
        seconds=None if seconds is None else max([seconds, *(peer.seconds for peer in peers)]),
        finished=all(peer.ended == "finished" for peer in peers),
        parts=_parts(topology, {peer.peer for peer in peers if peer.ended != "finished"}) if topology else None,
        peers=peers,
        accuracy=Spread.of(peer.accuracy for peer in peers),
        best=Spread.of(peer.best for peer in peers),
        global_accuracy=Spread.of(peer.global_accuracy for peer in peers),
        measures=_measures(results),
        weighted_accuracy=_weighted(results),
        traffic=_traffic(results),
        collaboration=Collaboration.of(results),
    )
    try:
        write_json(folder.summary, summary.to_dict())
    except Unwritable as error:
        return replace(summary, unwritten=str(error))
    return summary


def _parts(topology: Topology, lost: set[PeerId]) -> list[list[PeerId]] | None:
    """Parts of the graph that could reach each other only through those who are lost."""
    left = [sorted(set(part) - lost) for part in topology.without(lost).components]
    parts = [part for part in left if part]
    before = [part for part in topology.components if set(part) - lost]
    return parts if len(parts) > len(before) else None


def _peer(place: PeerFolder, code: int | None, words: str) -> PeerSummary:
    result, status = place.result(), place.status()
    out, inn = (_total(result.out), _total(result.inn)) if result else ([0, 0, 0], [0, 0, 0])
    last = result or status
    return PeerSummary(
        peer=place.peer,
        model=result.model if result else "",
        group=result.group if result else None,
        rounds_done=last.rounds_done if last else 0,
        digest=result.digest if result else "",
        accuracy=last.accuracy if last else None,
        best=result.best if result else None,
        best_round=result.best_round if result else None,
        global_accuracy=result.global_accuracy if result else None,
        bytes_out=out[1] + out[2] if result else status.bytes_out if status else 0,
        bytes_in=inn[1] + inn[2] if result else status.bytes_in if status else 0,
        messages_out=out[0],
        missing=result.missing if result else 0,
        seconds=result.seconds.get("total", 0.0) if result else 0.0,
        ended=how_it_ended(place, code, words),
        log=str(place.log),
    )


def _measures(results: list[Result]) -> dict[str, Spread]:
    names = sorted({name for result in results for name in result.measures})
    spreads = {name: Spread.of(result.measures.get(name) for result in results) for name in names}
    return {name: spread for name, spread in spreads.items() if spread is not None}


def _weighted(results: Iterable[Result]) -> float | None:
    """Σ correct / Σ samples: peers count by the size of their test splits (FedTGP)."""
    counts = [(result.correct, result.samples) for result in results]
    correct, samples = (sum(part) for part in zip(*counts, strict=True)) if counts else (0, 0)
    return correct / samples if samples else None


def _total(counts: Mapping[str, Mapping[str, list[int]]]) -> list[int]:
    entries = [entry for kinds in counts.values() for entry in kinds.values()]
    return [sum(entry[part] for entry in entries) for part in range(3)]


def _traffic(results: Iterable[Result]) -> dict[str, dict[str, int]]:
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for result in results:
        for kinds in result.out.values():
            for kind, entry in kinds.items():
                totals[kind] = [have + more for have, more in zip(totals[kind], entry, strict=True)]
    return {kind: dict(zip(("messages", "payload", "header"), totals[kind], strict=True)) for kind in sorted(totals)}


# ---- for people -------------------------------------------------------------------------------------------


def show(summary: Summary, console: Console) -> None:
    console.print(_peer_table(summary))
    for label, spread in (
        ("accuracy", summary.accuracy),
        ("best", summary.best),
        ("on the whole test set", summary.global_accuracy),
        *summary.measures.items(),
    ):
        if spread is not None:
            console.print(f"{label}: {spread}")
    if summary.weighted_accuracy is not None:
        console.print(f"accuracy over the test samples of all peers: {text.percent(summary.weighted_accuracy)} %")
    if summary.traffic:
        console.print()
        console.print(_traffic_table(summary))
    if summary.collaboration is not None:
        console.print()
        show_collaboration(summary.collaboration, console)
    if summary.seconds is not None:
        console.print(f"\nall peers together took {text.duration(summary.seconds)}, start-up included")


def show_collaboration(graph: Collaboration, console: Console) -> None:
    if len(graph.peers) <= MOST_PEERS:
        console.print("who learns from whom (a row per peer; the fuller the block, the more weight):")
        console.print(draw(graph.peers, graph.groups, graph.weights))
    if graph.inside is not None and graph.across is not None:
        ratio = "" if graph.ratio is None else f", {graph.ratio:.1f} times as much inside"
        console.print(
            f"mean weight inside groups {graph.inside:.4f}, across groups {graph.across:.4f}{ratio}",
        )


def failures(summary: Summary) -> list[str]:
    """A line for each way in which peers did not finish, with the peers and, where it helps, their logs; and for what
    else went wrong."""
    alike: dict[str, list[PeerSummary]] = defaultdict(list)
    for peer in summary.peers:
        if peer.ended != "finished":
            alike[peer.ended].append(peer)
    lines = []
    for ended, peers in alike.items():
        noun = "peer" if len(peers) == 1 else "peers"
        log = "" if ended in ("stopped", "never started", NOT_COLLECTED) else f"; see {peers[0].log}"
        lines.append(f"{noun} {text.ids(peer.peer for peer in peers)}: {ended}{log}")
    if summary.parts is not None:
        parts = "; ".join(text.ids(part) for part in summary.parts)
        lines.append(f"without them the graph falls into {len(summary.parts)} parts: {parts}")
    if summary.unwritten:
        lines.append(summary.unwritten)
    return lines


def _peer_table(summary: Summary) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("peer", "model", "group", "rounds", "acc %", "best %", "out", "in", "miss", "time", "ended"):
        table.add_column(column, justify="left" if column in ("model", "ended") else "right", no_wrap=True)
    for peer in summary.peers:
        table.add_row(
            str(peer.peer),
            peer.model,
            "" if peer.group is None else str(peer.group),
            str(peer.rounds_done),
            text.percent(peer.accuracy),
            text.percent(peer.best),
            text.size(peer.bytes_out),
            text.size(peer.bytes_in),
            str(peer.missing),
            text.duration(peer.seconds),
            peer.ended.partition(":")[0],  # the reason follows below the tables
        )
    return table


def _traffic_table(summary: Summary) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("sent")
    for column in ("messages", "payload", "headers"):
        table.add_column(column, justify="right")
    for kind, sent in summary.traffic.items():
        table.add_row(kind, str(sent["messages"]), text.size(sent["payload"]), text.size(sent["header"]))
    return table
