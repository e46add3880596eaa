"""The generated parts of docs/scale.md: tables from the JSON files of benchmarks/results/scale."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from benchmarks.bench.report import Value, markdown_table
from benchmarks.scale.limits import Limits, first, of_neighbors, of_peers
from benchmarks.scale.model import QUANTITIES, Model, Record, Size, megabytes, quietest

MB, GIB = 1e6, 2.0**30
SMALL_HOST, LARGE_HOST = Limits(), Limits(memory=256 * GIB)
SIZES = [
    (Size(1_000), SMALL_HOST),
    (Size(1_000, hosts=8), SMALL_HOST),
    (Size(10_000, hosts=8, cores=64), LARGE_HOST),
    (Size(10_000, hosts=40), SMALL_HOST),
    (Size(100_000, hosts=100), SMALL_HOST),
    (Size(100_000, hosts=100, cores=64), LARGE_HOST),
    (Size(100_000, hosts=400), SMALL_HOST),
]


def blocks(
    records: Sequence[Record], pairs: Sequence[Mapping[str, Any]], clock: Sequence[Mapping[str, Any]]
) -> dict[str, str]:
    """Return the text of each generated block by its name."""
    whole = quietest(records)
    model = Model(whole)
    return {
        "launches": launches(whole, records),
        "constants": constants(model),
        "held-out": held_out(model, whole),
        "errors": errors(model, whole),
        "needs": needs(model),
        "limits": limits(model),
        "pairs": pairs_table(pairs),
        "clock": clock_table(clock),
    }


def launches(whole: Sequence[Record], records: Sequence[Record]) -> str:
    """Return the table of all launches."""
    columns = {
        "peers": ",d", "neighbors": "d", "hosts": "d", "MB a message": ".2f", "": "", "turns": "d",
        "all in round 1, s": ".1f", "s a round": ".2f", "CPU ms of a peer's round": ".1f", "connections": ".0f",
        "descriptors": ".0f", "threads": ".1f", "private MB a peer": ".1f", "MB a host": ",.0f",
        "files a peer": ".1f", "load": "",
    }  # fmt: skip
    rows: list[list[Value]] = []
    for record in whole:
        peer, turns = record["peer"], [each for each in records if each["name"] == record["name"]]
        row: list[Value] = [record["peers"], record["degree"], record["hosts"], megabytes(record)]
        row += [
            f"delayed by {record['delay']:.0f} s"
            if record["delay"]
            else ""
            if record["use"] == "fit"
            else "held out",
            len(turns),
        ]
        row += [record["seconds"]["ready"], record["seconds"]["round"], 1000 * record["cpu"]["round"]]
        row += [peer["connections"], peer["descriptors"], peer["threads"], peer["private"] / MB]
        row += [max(host["pss"] for host in record["host"]) / MB, peer["files"]]
        rows.append([*row, spread([load for each in turns for load in each["load"]])])
    return markdown_table(columns, rows)


def spread(loads: Sequence[float]) -> str:
    """Return the range of load averages."""
    return f"{min(loads):.0f} to {max(loads):.0f}"


def constants(model: Model) -> str:
    """Return the table of the fitted constants, in units that suit their size."""
    rows: list[list[Value]] = []
    for name, quantity in QUANTITIES.items():
        scale, unit = {"s": (1000.0, "ms"), "B": (1 / MB, "MB")}.get(quantity.unit, (1.0, ""))
        found = model.fits[name]
        for term, value in found.constants.items():
            shown = f"{scale * value:.3g} ± {scale * found.half(term):.2g} {unit}".strip()
            rows.append([quantity.title, term, shown, f"{scale * found.sigma:.2g} {unit}".strip()])
    return markdown_table({"quantity": "", "for each": "", "constant": "", "residuals": ""}, rows)


def compared(model: Model, record: Record) -> list[tuple[str, float, float, float]]:
    """Return (quantity, predicted, half of the 95 % prediction interval, measured) for a launch.

    Nothing that was measured of it is used, but for ``cpu given``, to which the seconds of its round are given.
    """
    cores = record["machine"]["cores"]
    times = model.times(record, record["peers"], cores)
    expected, found = {**record, "seconds": times}, []
    for name in ("cpu", "connections", "descriptors", "threads", "private", "start", "warm", "launcher"):
        found.append((name, *model(name, expected), float(QUANTITIES[name].value(record) or 0.0)))
    found.append(("cpu given", *model("cpu", record), float(record["cpu"]["round"])))
    if record["hosts"] == 1:
        peers, own, shared = record["peers"], model("private", record), model("shared", record)
        half = ((peers * own[1]) ** 2 + shared[1] ** 2) ** 0.5
        found.append(("memory", shared[0] + peers * own[0], half, float(record["host"][0]["pss"])))
    for name in ("round", "ready"):
        found.append((name, times[name], 0.0, float(record["seconds"][name])))
    return found


SHOWN = {
    "cpu": ("CPU ms of a peer's round", 1000.0, ".1f"),
    "cpu given": ("the same, given the seconds of a round", 1000.0, ".1f"),
    "round": ("s a round", 1.0, ".2f"),
    "ready": ("s until all are in round 1", 1.0, ".1f"),
    "connections": ("connections a peer", 1.0, ".0f"),
    "descriptors": ("descriptors a peer", 1.0, ".0f"),
    "threads": ("threads a peer", 1.0, ".1f"),
    "private": ("private MB a peer", 1 / MB, ".1f"),
    "memory": ("MB of the host", 1 / MB, ",.0f"),
    "start": ("CPU ms of a peer's start", 1000.0, ".0f"),
    "warm": ("CPU s of the forking process", 1.0, ".1f"),
    "launcher": ("CPU s of the launcher until all run", 1.0, ".2f"),
}


def title(record: Record) -> str:
    """Return what a launch is, in a few words."""
    hosts = f"{record['hosts']} hosts" if record["hosts"] > 1 else "1 host"
    model = "" if record["model"] == "tiny-cnn" else ", large bodies"
    return f"{record['peers']} peers × {record['degree']}, {hosts}{model}"


def held_out(model: Model, whole: Sequence[Record]) -> str:
    """Return predictions beside measurements for the launches that the fit has not seen."""
    unseen = [record for record in whole if record["use"] != "fit"]
    found = [{name: (one, other) for name, one, _, other in compared(model, record)} for record in unseen]
    rows: list[list[Value]] = []
    for name, (shown, scale, form) in SHOWN.items():
        pairs = [each.get(name) for each in found]
        rows.append([shown, *(pair and f"{scale * pair[0]:{form}} / {scale * pair[1]:{form}}" for pair in pairs)])
    return markdown_table({"predicted / measured": "", **dict.fromkeys(map(title, unseen), "")}, rows)


def errors(model: Model, whole: Sequence[Record]) -> str:
    """Return how far predictions are from measurements, by quantity."""
    rows: list[list[Value]] = []
    for name, (shown, _, _) in SHOWN.items():
        ratios, inside, worst = [], 0, ""
        for record in whole:
            for found, predicted, half, value in compared(model, record):
                if record["use"] != "fit" and found == name:
                    ratios.append(predicted / value - 1)
                    inside += abs(predicted - value) <= half
                    if abs(ratios[-1]) == max(map(abs, ratios)):
                        worst = f"{ratios[-1]:+.0%} ({title(record)})"
        if ratios:
            row = [shown, f"{median(map(abs, ratios)):.0%}", worst]
            rows.append([*row, "–" if name in ("round", "ready") else f"{inside} of {len(ratios)}"])
    columns = {"quantity": "", "median error": "", "largest": "", "within the 95 % interval": ""}
    return markdown_table(columns, rows)


def needs(model: Model) -> str:
    """Return what launches beyond this machine would need."""
    columns = {
        "peers": ",d", "hosts": "d", "cores, GiB of a host": "", "peers a host": ",.0f", "s a round": ".1f",
        "min until all run": ".1f", "GiB a host": ",.1f", "threads a host": ",.0f", "connections a host": ",.0f",
        "GB a round between hosts, a host": ".2f", "CPU s of the launcher": ",.0f", "exceeded": "",
    }  # fmt: skip
    rows: list[list[Value]] = []
    for size, limits in SIZES:
        host = model.host(size)
        exceeded = ", ".join(first(model, size, limits)) or "nothing"
        row: list[Value] = [size.peers, size.hosts, f"{size.cores}, {limits.memory / GIB:.0f}", host["peers"]]
        row += [host["round"], host["ready"] / 60, host["memory"] / GIB, host["tasks"], host["connections"]]
        rows.append([*row, host["sent"] / 1e9, host["launcher"], exceeded])
    return markdown_table(columns, rows)


def limits(model: Model) -> str:
    """Return what breaks first on one host, and for one peer."""
    rows: list[list[Value]] = []
    for name, size, given in (
        ("2 cores, 24 GiB", Size(2), SMALL_HOST),
        ("64 cores, 256 GiB", Size(2, cores=64), LARGE_HOST),
        ("64 cores, 256 GiB, of many hosts", Size(2, hosts=1000, cores=64), LARGE_HOST),
    ):
        size = replace(size, peers=max(2, size.hosts))
        rows += [
            [f"a host with {name}", limit.what, _plain(limit.limit, limit.unit), f"{limit.most:,d} peers"]
            for limit in of_peers(model, size, given)
        ]
    for descriptors in (SMALL_HOST.descriptors, 1024):
        rows += [
            ["a peer", limit.what, _plain(limit.limit, limit.unit), f"{limit.most:,d} neighbors"]
            for limit in of_neighbors(model, replace(SMALL_HOST, descriptors=descriptors))
            if descriptors == SMALL_HOST.descriptors or "descriptors" in limit.what
        ]
    return markdown_table({"of": "", "limit": "", "value": "", "reached at": ""}, rows)


def _plain(value: float, unit: str) -> str:
    return f"{value / GIB:.0f} GiB" if unit == "B" else f"{value:,.0f} {unit}".strip()


def pairs_table(pairs: Sequence[Mapping[str, Any]]) -> str:
    """Return one connection per edge beside one per pair of hosts."""
    columns = {
        "neighbors on the other host": "d", "kB a body": ",.1f", "": "", "connections": ",d", "descriptors": ",d",
        "private MB": ".1f", "CPU ms a message": ".3f", "s a round": ".3f", "load": "",
    }  # fmt: skip
    rows: list[list[Value]] = []
    groups: dict[tuple[int, int, str], list[Mapping[str, Any]]] = {}
    for each in pairs:
        groups.setdefault((each["bytes"], each["degree"], each["kind"]), []).append(each)
    for (size, degree, kind), turns in sorted(groups.items()):
        milliseconds = 1000 * min(turn["cpu"] for turn in turns) / (2 * turns[0]["peers"] * degree)
        row: list[Value] = [degree, size / 1000, "one per edge" if kind == "edges" else "one per pair of hosts"]
        row += [turns[0]["connections"] // 2, max(turn["descriptors"] for turn in turns)]
        row += [median(turn["private"] for turn in turns) / MB, milliseconds, min(turn["seconds"] for turn in turns)]
        rows.append([*row, spread([turn["load"] for turn in turns])])
    return markdown_table(columns, rows)


def clock_table(clock: Sequence[Mapping[str, Any]]) -> str:
    """Return what runs on a simulated clock without training say, and what they take."""
    columns = {
        "peers": ",d", "neighbors": "d", "rounds": "d", "simulated s a round": ".2f", "kB of a peer, a round": ",.0f",
        "CPU s of the simulation": ",.0f", "GB of memory": ".2f",
    }  # fmt: skip
    rows: list[list[Value]] = []
    for each in sorted(clock, key=lambda run: int(run["peers"])):
        peers, rounds = each["peers"], each["rounds"]
        row: list[Value] = [peers, each["degree"], rounds, each["seconds"] / rounds]
        rows.append([*row, each["bytes"] / peers / rounds / 1000, each["cpu"], each["memory"] / 1e9])
    return markdown_table(columns, rows)


def write(page: str, generated: Mapping[str, str]) -> str:
    """Replace the blocks of a page. Raises ValueError if it lacks one, or has an unknown one."""
    pattern = re.compile(r"(<!-- scale: begin ([\w-]+) -->\n).*?(<!-- scale: end -->)", re.DOTALL)
    found = pattern.findall(page)
    if sorted(name for _, name, _ in found) != sorted(generated):
        raise ValueError(f"the page should have each of these blocks once: {', '.join(generated)}")
    return pattern.sub(lambda match: f"{match[1]}\n{generated[match[2]]}\n\n{match[3]}", page)
