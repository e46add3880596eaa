"""Which peers stand out, and by what: what a reader should look at first."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, median

from launcher import formatting
from launcher.facts.processes import RUNNING
from launcher.facts.skipped import skipped_lines
from launcher.facts.summary import Summary
from launcher.formatting import duration, percent
from launcher.report.history import History, means
from launcher.report.learned import Learned
from launcher.views.print_summary import attackers_text, restarted

SLOW = 1.8
"""Times the median training time per round from which on a peer is called slow."""
LEAST_EVALUATIONS = 10
"""Evaluations of a curve that is called level: the last fifth of fewer is a single one."""
FEW_POINTS = 0.10
"""Accuracy below the median, at least, of a peer that is called inaccurate; and three times the usual deviation."""
LITTLE_WEIGHT = 0.5
"""Fraction of the usual weight that a peer receives from the others, below which it is called isolated."""
OLD = 2.0
"""Times the median age of a peak model from which on it is called old."""


@dataclass(frozen=True)
class Remark:
    """A remark about peers. ``level``: ``bad`` for what failed, ``look`` for what stands out, ``good`` otherwise."""

    level: str
    text: str


def find(summary: Summary, history: History, learned: Learned) -> list[Remark]:
    """Return what stands out, the worst first; a good word if nothing does."""
    found = [*_ended(summary, history), *_inaccurate(summary, history, learned), *_slow(summary, history)]
    found += _isolated(history) + _lost(summary, history) + _restarted(summary) + _stale(history)
    found += _progress(history) + _attackers(summary)
    order = {"bad": 0, "look": 1, "good": 2}
    if not any(finding.level != "good" for finding in found):
        found.insert(0, Remark("good", "No peer stands out: none failed, restarted, is slow or far less accurate."))
    return sorted(found, key=lambda finding: order[finding.level])


def _attackers(summary: Summary) -> list[Remark]:
    if summary.attackers is None:
        return []
    found = summary.attackers
    verb = "attacks" if len(found.attacks) == 1 else "attack"
    text = f"{attackers_text(found.attacks)} {verb}: the figures are of honest peers"
    if found.weight is not None and found.honest_weight is not None:
        weights = f"{found.weight:.3f}, and each other {found.honest_weight:.3f}"
        text += f", which give an attacker a mean weight of {weights}"
    return [Remark("look", f"{text[0].upper()}{text[1:]}.")]


def _stopped(summary: Summary) -> set[int]:
    """The peers that ended before their last round."""
    return {peer.peer for peer in summary.peers if peer.ended not in ("finished", RUNNING)}


def _ended(summary: Summary, history: History) -> list[Remark]:
    ways: dict[str, list[int]] = {}
    at = {row["peer"]: row["seconds"] for row in history.rows}
    for peer in summary.peers:
        if peer.peer in _stopped(summary):
            when = f", {duration(at[peer.peer])} after the start" if peer.peer in at else ""
            ways.setdefault(f"{peer.ended}, after {peer.rounds_done} rounds{when}", []).append(peer.peer)
    running = [peer.peer for peer in summary.peers if peer.ended == RUNNING]
    found = [Remark("bad", f"{_peers(peers)} did not finish: {ended}.") for ended, peers in ways.items()]
    if running:
        found.append(Remark("look", f"{_peers(running)}: still running; this is what is recorded so far."))
    return found


def _inaccurate(summary: Summary, history: History, learned: Learned) -> list[Remark]:
    """Name the peers far below the others, each compared in the last round that it has evaluated.

    Those that stopped are named for that already, and could not learn on.
    """
    stopped = _stopped(summary)
    known = {
        peer.peer: peer.accuracy for peer in summary.honest if peer.accuracy is not None and peer.peer not in stopped
    }
    by_round, last = _evaluations(history)
    latest = max(last.values(), default=0)
    low = []
    for peer, value in known.items():
        early = last.get(peer, latest) < latest  # others went on learning
        others = by_round[last[peer]] if early else list(known.values())
        middle = median(others)
        usual = 1.4826 * median(abs(other - middle) for other in others)
        if len(others) >= 4 and middle - value > max(FEW_POINTS, 3 * usual):
            when = f" after round {last[peer]}" if early else ""
            low.append((value, peer, middle, when))
    found = []
    for value, peer, middle, when in sorted(low)[:5]:
        text = f"Peer {peer} is far less accurate: {percent(value)} %{when}, the median is {percent(middle)} %."
        doubt = _renaming(learned, peer, 0.75 * middle)
        found.append(Remark("bad" if doubt else "look", text + doubt))
    return found


def _evaluations(history: History) -> tuple[Mapping[int, list[float]], dict[int, int]]:
    """Return the honest peers' accuracies by round, and the last round that each has evaluated."""
    by_round: dict[int, list[float]] = defaultdict(list)
    last: dict[int, int] = {}
    for row in history.rows:
        if row["accuracy"] is not None and row["peer"] not in history.attackers:
            by_round[row["t"]].append(row["accuracy"])
            last[row["peer"]] = max(row["t"], last.get(row["peer"], 0))
    return by_round, last


def _renaming(learned: Learned, peer: int, least: float) -> str:
    """Doubt the labels if a fraction ``least`` of the predictions would be right under other names of classes."""
    confusion = learned.confusion.get(peer, [])
    chosen: dict[int, tuple[int, int]] = {}
    for label, predicted, count in confusion:
        if count > chosen.get(label, (0, 0))[1]:
            chosen[label] = predicted, count
    samples = sum(count for _, _, count in confusion)
    found = {label: predicted for label, (predicted, _) in chosen.items()}
    moved = {label: predicted for label, predicted in found.items() if label != predicted}
    right = sum(count for _, count in chosen.values())
    if not moved or len(set(found.values())) < len(found) or right < least * samples:
        return ""
    pairs = [(learned.name(label), learned.name(predicted)) for label, predicted in list(moved.items())[:5]]
    listed = ", ".join(f"{label} as {predicted}" for label, predicted in pairs)
    more = ", …" if len(moved) > 5 else ""
    return f" It predicts class {listed}{more}: are its labels right?"


def training_times(history: History) -> dict[int, float]:
    """Return the median seconds of training of each peer, over the rounds in which it trained."""
    spent: dict[int, list[float]] = {}
    for row in history.rows:
        if row["training"] > 0:
            spent.setdefault(row["peer"], []).append(row["training"])
    return {peer: median(values) for peer, values in spent.items()}


def _slow(summary: Summary, history: History) -> list[Remark]:
    training = training_times(history)
    if len(training) < 4 or (middle := median(training.values())) <= 0:
        return []
    slow = sorted((peer for peer in training if training[peer] > SLOW * middle), key=lambda peer: -training[peer])
    return [
        Remark(
            "look",
            f"Peer {peer} is slow: it trains {training[peer]:.2g} s in the median round, "
            f"{training[peer] / middle:.1f} times as long as the median peer{_computing(summary, history, peer)}.",
        )
        for peer in slow[:3]
    ]


def _computing(summary: Summary, history: History, peer: int) -> str:
    """Say so if a peer did not compute while it trained: it was delayed, or others had the processor."""
    if summary.clock:  # its seconds are not comparable with those of a processor
        return ""
    spent, trained = history.cpu.get(peer, 0.0), history.seconds[peer]["training"]
    return f", and computes in only {percent(spent / trained)} % of it" if 0 < spent < 0.5 * trained else ""


def received_weight(history: History) -> dict[int, float]:
    """Return the mean weight of each honest peer at the others, in the last round that most peers recorded."""
    full = [t for t, rows in history.weights.items() if 2 * len(rows) >= len(history.peers)]
    if not full:
        return {}
    rows = history.weights[max(full)]
    givers = [peer for peer in rows if peer not in history.attackers]
    return {
        peer: fmean([rows[j].get(peer, 0.0) for j in givers if j != peer])
        for peer in history.honest
        if any(j != peer for j in givers)
    }


def _isolated(history: History) -> list[Remark]:
    given = received_weight(history)
    if len(given) < 4 or (middle := median(given.values())) <= 0:
        return []
    low = [peer for peer in sorted(given, key=given.__getitem__) if given[peer] < LITTLE_WEIGHT * middle]
    if len(low) > len(given) / 4:  # then it is the graph that is uneven
        return []
    return [
        Remark(
            "look",
            f"Peer {peer} is little trusted: the others give it a weight of {given[peer]:.3f}, the median peer "
            f"gets {middle:.3f}.",
        )
        for peer in low[:3]
    ]


def _lost(summary: Summary, history: History) -> list[Remark]:
    found = []
    if history.diverged:
        first = min(history.diverged.values())
        found.append(
            Remark("bad", f"The loss of {_peers(history.diverged, inner=True)} diverged, from round {first}.")
        )
    found += [Remark("bad", f"{line[0].upper()}{line[1:]}.") for line in skipped_lines(history.skipped)]
    dropped: dict[int, int] = {}
    for peer in summary.peers:
        for sender, count in peer.dropped.items():
            dropped[int(sender)] = dropped.get(int(sender), 0) + count
    if dropped:
        found.append(Remark("look", f"Invalid messages of {_peers(dropped, inner=True)}: {sum(dropped.values())}."))
    missing = Counter[int]()
    for (_, late), lost in history.missing.items():
        if late not in _stopped(summary):  # which says why
            missing[late] += lost
    if missing:
        (late, most), total = missing.most_common(1)[0], missing.total()
        which = "all" if most == total else f"{most} of them"
        found.append(Remark("look", f"{total} messages did not arrive in time, {which} from peer {late}."))
    return found


def _restarted(summary: Summary) -> list[Remark]:
    text = restarted(summary.peers)
    return [Remark("look", f"{text.capitalize()}.")] if text else []


def _stale(history: History) -> list[Remark]:
    """Name the peers whose peak models are much older than the other peers' peak models. Peak models are used."""
    ages = history.peak_age
    middle = median(ages.values()) if ages else 0.0
    old = [peer for peer in ages if ages[peer] > OLD * max(1.0, middle)]
    if not old:
        return []
    oldest = max(ages[peer] for peer in old)
    age = f"model is {oldest:.0f}" if len(old) == 1 else f"models are up to {oldest:.0f}"
    return [
        Remark(
            "look",
            f"{_peers(old)} had no part in the last rounds with the highest α: the peak {age} rounds old, "
            f"the median peer's {middle:.0f}.",
        )
    ]


def _progress(history: History) -> list[Remark]:
    """Say whether the mean accuracy still rises at the end, or has fallen since its best round."""
    curve = means(history)
    if len(curve) < 4:
        return []
    values = [row["mean"] for row in curve]
    fifth = max(1, len(values) // 5)
    best = max(range(len(values)), key=values.__getitem__)
    since = values[-1 - fifth]
    if values[best] - values[-1] > 0.02:
        t = int(curve[best]["t"])
        fell = 100 * (values[best] - values[-1])
        return [Remark("look", f"The mean accuracy fell by {fell:.1f} points since its best round, {t}.")]
    if values[-1] - since > 0.01:
        rose = 100 * (values[-1] - since)
        return [
            Remark("look", f"The mean accuracy still rises ({rose:+.1f} points in the last fifth): train longer.")
        ]
    level_from = next(i for i in range(len(values)) if all(abs(v - values[-1]) <= 0.01 for v in values[i:]))
    if len(values) < LEAST_EVALUATIONS or level_from >= len(values) - fifth:
        return []
    # A level mean that a broken peer spoils needs a look.
    kind = "good" if curve[-1]["std"] < FEW_POINTS else "look"
    when = f"since round {int(curve[level_from]['t'])}, after {duration(curve[level_from]['seconds'])}"
    return [Remark(kind, f"The mean accuracy has been level at {percent(values[-1])} % {when}.")]


def _peers(peers: Mapping[int, object] | list[int], *, inner: bool = False) -> str:
    text = formatting.peers(peers)
    return text if inner else text.capitalize()
