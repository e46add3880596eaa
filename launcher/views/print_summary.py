"""Print the summary of a run as tables and lines of text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from launcher import formatting
from launcher.facts.processes import NOT_COLLECTED, RUNNING
from launcher.facts.skipped import skipped_lines
from launcher.facts.summary import Collaboration, PeerSummary, Summary
from launcher.formatting import heat_map
from launcher.views.evaluation import RunEvaluation


def print_summary(summary: Summary, console: Console) -> None:
    console.print(_peer_table(summary))
    for line in accuracy_lines(summary):
        console.print(line)
    if summary.weighted_accuracy is not None:
        console.print(f"accuracy weighted by test samples: {formatting.percent(summary.weighted_accuracy)} %")
    if summary.statistics:
        console.print(f"batch-normalization statistics: {summary.statistics}")
    if summary.traffic:
        console.print()
        console.print(_traffic_table(summary))
    skipped = skipped_lines({peer.peer: peer.skipped for peer in summary.peers})
    for line in (*_lost_message_lines(summary.peers), *skipped):
        console.print(line)
    if text := restarted(summary.peers):
        console.print(text)
    if summary.collaboration is not None:
        console.print()
        _print_collaboration(summary.collaboration, console)
    if summary.seconds is not None or summary.cost:
        console.print()
    if summary.seconds is not None:
        console.print(f"total time: {formatting.duration(summary.seconds)}, from the start of the peers")
    if summary.cost:
        console.print(f"cost: {cost_text(summary.cost)}")


def cost_text(cost: Mapping[str, float]) -> str:
    """Return what rounds cost: seconds of CPU and GPU, and joules where they were measured."""
    seconds = [
        f"{formatting.duration(cost[name])} of {unit} time"
        for name, unit in (("cpu_seconds", "CPU"), ("gpu_seconds", "GPU"))
        if name in cost
    ]
    joules = [
        f"{cost[name]:.0f} J by {source} (estimate)"
        for name, source in (("cpu_joules", "RAPL"), ("gpu_joules", "NVML"))
        if name in cost
    ]
    return ", ".join(seconds + joules)


def accuracy_lines(summary: Summary | RunEvaluation) -> list[str]:
    """Return a line for each accuracy; where masking changes one, both, with which is which."""
    masks = ("masked", "unmasked") if summary.masked_test else ("unmasked", "masked")
    lines = []
    for label, name, spread in (
        ("accuracy", "personal", summary.accuracy),
        ("best", "", summary.best),
        ("global accuracy", "", summary.global_accuracy),
        *((name, name, spread) for name, spread in summary.extra_metrics.items()),
    ):
        accuracies = {"masked": summary.masked_accuracies, "unmasked": summary.unmasked_accuracies}
        both = [(mask, accuracies[mask].get(name)) for mask in masks]
        if both[0][1] != both[1][1]:
            lines += [f"{label}, {mask}: {found}" for mask, found in both]
        elif spread is not None:
            lines.append(f"{label}: {spread}")
    lines += [f"{name}: {spread}" for name, spread in summary.metrics.items()]
    return lines + [
        f"{name}: NaN or infinite at peer{'s' * (len(peers) > 1)} {formatting.ids(peers)}"
        for name, peers in summary.nonfinite_metrics.items()
    ]


def restarted(peers: Sequence[PeerSummary]) -> str:
    """Say which peers were restarted after a failure, and how often; empty if none was."""
    again = {peer.peer: peer.restarts for peer in peers if peer.restarts}
    if not again:
        return ""
    total = sum(again.values())
    if len(again) == 1:
        return f"peer {formatting.ids(again)} was restarted {'once' if total == 1 else f'{total} times'}"
    return f"peers {formatting.ids(again)} were restarted, {total} times in all"


def _lost_message_lines(peers: Sequence[PeerSummary]) -> list[str]:
    """Return a line for each way in which messages of some peers were lost."""
    expired = {peer.peer: peer.expired for peer in peers if peer.expired}
    dropped: dict[int, int] = defaultdict(int)
    for peer in peers:
        for sender, count in peer.dropped.items():
            dropped[int(sender)] += count
    ways = (
        ("dropped as invalid, from", dropped),
        ("expired before they were used, at", expired),
    )
    nothing = peers and all(peer.missing and not peer.bytes_in for peer in peers)
    lines = [f"no message has reached any peer, though they waited for {sum(p.missing for p in peers)}"] * bool(
        nothing
    )
    return lines + [
        f"messages {way} {'peer' if len(counts) == 1 else 'peers'} {formatting.ids(counts)}: {sum(counts.values())}"
        for way, counts in ways
        if counts
    ]


def _print_collaboration(graph: Collaboration, console: Console) -> None:
    if len(graph.peers) <= heat_map.MAX_PEERS:
        console.print("mixing weights (one row and one column per peer, in the same order; denser is larger):")
        console.print(heat_map.draw(graph.peers, graph.groups, graph.weights))
    if graph.inside is not None and graph.across is not None:
        ratio = "" if graph.ratio is None else f", ratio {graph.ratio:.1f}"
        console.print(f"mean weight within groups {graph.inside:.4f}, across groups {graph.across:.4f}{ratio}")


def failure_lines(summary: Summary) -> list[str]:
    """Return a line for each way in which peers failed to finish, with a log where it helps, and further errors."""
    by_outcome: dict[str, list[PeerSummary]] = defaultdict(list)
    for peer in summary.peers:
        if peer.ended != "finished":
            by_outcome[peer.ended].append(peer)
    lines = []
    for ended, peers in by_outcome.items():
        noun = "peer" if len(peers) == 1 else "peers"
        log = "" if ended in ("stopped", "never started", NOT_COLLECTED, RUNNING) else f"; see {peers[0].log}"
        lines.append(f"{noun} {formatting.ids(peer.peer for peer in peers)}: {ended}{log}")
    if summary.parts is not None:
        parts = "; ".join(formatting.ids(part) for part in summary.parts)
        lines.append(f"without them the graph has {len(summary.parts)} components: {parts}")
    if summary.unwritten:
        lines.append(summary.unwritten)
    return lines


def _peer_table(summary: Summary) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    skipped = ("skipped",) if any(peer.skipped for peer in summary.peers) else ()
    columns = ("peer", "model", "group", "rounds", "acc %", "best %", "sent", "recv", "missed")
    for column in (*columns, *skipped, "time", "ended"):
        table.add_column(column, justify="left" if column in ("model", "ended") else "right", no_wrap=True)
    for peer in summary.peers:
        table.add_row(
            str(peer.peer),
            peer.model,
            "" if peer.group is None else str(peer.group),
            str(peer.rounds_done),
            formatting.percent(peer.accuracy),
            formatting.percent(peer.best),
            formatting.size(peer.bytes_out),
            formatting.size(peer.bytes_in),
            str(peer.missing),
            *(str(sum(peer.skipped.values())) for _ in skipped),
            formatting.duration(peer.seconds),
            peer.ended.partition(":")[0],  # the reason follows below the tables
        )
    return table


def _traffic_table(summary: Summary) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("kind")
    for column in ("messages", "payload", "headers"):
        table.add_column(column, justify="right")
    for kind, sent in summary.traffic.items():
        table.add_row(kind, str(sent["messages"]), formatting.size(sent["payload"]), formatting.size(sent["header"]))
    return table
