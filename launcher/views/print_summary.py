"""Print the summary of a run as tables and lines of text."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from launcher import formatting
from launcher.facts.processes import NOT_COLLECTED, RUNNING
from launcher.facts.skipped import skipped_lines
from launcher.facts.summary import Attackers, Collaboration, PeerSummary, Summary
from launcher.formatting import heat_map
from launcher.formatting.console import echo, make_table
from launcher.views.evaluation import RunEvaluation
from p2pfl import PeerId


def show_summary(summary: Summary, console: Console, *, as_json: bool) -> None:
    """Print a summary for people or as JSON, then what went wrong to stderr."""
    if as_json:
        echo(json.dumps(summary.to_dict()))
    else:
        print_summary(summary, console)
    for line in failure_lines(summary):
        echo(line, err=True)


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
    for kind, (middle, lowest, highest) in summary.ages.items():
        console.print(f"ages of {kind} in rounds: median {middle:g}, from {lowest} to {highest}")
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
        what, since = ("simulated time", "") if summary.clock else ("total time", ", from the start of the peers")
        console.print(f"{what}: {formatting.duration(summary.seconds)}{since}")
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
    """Return a line for each accuracy, both where masking changes one, and a line for attackers."""
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
    lines += [
        f"{name}: NaN or infinite at {formatting.peers(peers)}" for name, peers in summary.nonfinite_metrics.items()
    ]
    return lines + ([] if summary.attackers is None else [_attackers_line(summary.attackers)])


def _attackers_line(attackers: Attackers) -> str:
    """Say who attacks, and what is known of these peers apart from the figures of the honest ones."""
    accuracy = "" if attackers.accuracy is None else f", accuracy {formatting.percent(attackers.accuracy.mean)} %"
    weight = ""
    if attackers.weight is not None and attackers.honest_weight is not None:
        weight = f", mean weight at honest peers {attackers.weight:.4f} (of each other {attackers.honest_weight:.4f})"
    return f"attackers, not in these figures: {attackers_text(attackers.attacks)}{accuracy}{weight}"


def attackers_text(attacks: Mapping[PeerId, str]) -> str:
    """``peers 3 7 (sign-flip); peer 8 (noise)``"""
    by_attack: dict[str, list[PeerId]] = defaultdict(list)
    for peer, attack in attacks.items():
        by_attack[attack].append(peer)
    return "; ".join(f"{formatting.peers(peers)} ({attack})" for attack, peers in by_attack.items())


def restarted(peers: Sequence[PeerSummary]) -> str:
    """Say which peers were restarted after a failure, and how often; empty if none was."""
    again = {peer.peer: peer.restarts for peer in peers if peer.restarts}
    if not again:
        return ""
    total = sum(again.values())
    if len(again) == 1:
        return f"{formatting.peers(again)} was restarted {'once' if total == 1 else f'{total} times'}"
    return f"{formatting.peers(again)} were restarted, {total} times in all"


def _lost_message_lines(peers: Sequence[PeerSummary]) -> list[str]:
    """Return a line for each way in which messages of some peers were lost."""
    expired = {peer.peer: peer.expired for peer in peers if peer.expired}
    dropped: dict[int, int] = defaultdict(int)
    for peer in peers:
        for sender, count in peer.dropped.items():
            dropped[int(sender)] += count
    lines = []
    if peers and all(peer.missing and not peer.bytes_in for peer in peers):
        lines.append(f"no message has reached any peer, though they waited for {sum(p.missing for p in peers)}")
    ways = ("dropped as invalid, from", dropped), ("expired before they were used, at", expired)
    return lines + [
        f"messages {way} {formatting.peers(counts)}: {sum(counts.values())}" for way, counts in ways if counts
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
        log = "" if ended in ("stopped", "never started", NOT_COLLECTED, RUNNING) else f"; see {peers[0].log}"
        lines.append(f"{formatting.peers([peer.peer for peer in peers])}: {ended}{log}")
    if summary.parts is not None:
        parts = "; ".join(formatting.ids(part) for part in summary.parts)
        lines.append(f"without them the graph has {len(summary.parts)} components: {parts}")
    if summary.unwritten:
        lines.append(summary.unwritten)
    return lines


def _peer_table(summary: Summary) -> Table:
    rows = [
        {
            "peer": str(peer.peer),
            "attack": summary.attacks.get(peer.peer, ""),
            "model": peer.model,
            "group": "" if peer.group is None else str(peer.group),
            "rounds": str(peer.rounds_done),
            "acc %": formatting.percent(peer.accuracy),
            "best %": formatting.percent(peer.best),
            "sent": formatting.size(peer.bytes_out),
            "recv": formatting.size(peer.bytes_in),
            "missed": str(peer.missing),
            "skipped": str(sum(peer.skipped.values())),
            "time": formatting.duration(peer.seconds),
            "ended": peer.ended.partition(":")[0],  # the reason follows below the tables
        }
        for peer in summary.peers
    ]
    shown = {"attack": bool(summary.attacks), "skipped": any(peer.skipped for peer in summary.peers)}
    head = [column for column in (rows[0] if rows else ()) if shown.get(column, True)]
    left = ("attack", "model", "ended")
    return make_table(head, [[row[column] for column in head] for row in rows], left=left, gap=1)


def _traffic_table(summary: Summary) -> Table:
    rows = [
        [kind, str(sent["messages"]), formatting.size(sent["payload"]), formatting.size(sent["header"])]
        for kind, sent in summary.traffic.items()
    ]
    return make_table(["kind", "messages", "payload", "headers"], rows, left=["kind"])
