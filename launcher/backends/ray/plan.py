"""What a run asks of a Ray cluster: options, the division of peers among nodes, and errors that compare both.

Nothing here imports Ray.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import yaml

from launcher.errors import LaunchError
from p2pfl import PeerId

WAIT = 60.0
"""Seconds until the resources that were free a moment ago must be reserved."""
SETUP = 600.0
"""Seconds that a node may take to set up a runtime environment, unless that sets another limit; Ray's default."""
ENVIRONMENT = "runtime environment"
MARGIN = 1e-9
"""Sums of fractions may miss whole numbers by this much."""
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
LEAST_MEMORY = 2**20
"""Fewer bytes per peer are a number without its unit."""


@dataclass(frozen=True)
class RayOptions:
    """``--option KEY=VALUE`` of `p2pfl launch`.

    Attributes:
        address: of the cluster: HOST:PORT; default: $RAY_ADDRESS, or the cluster of this host.
        hosts: nodes to use; default: all that have room.
        cpus: CPUs per peer, e.g. 0.25; default: what is free, and at most one per peer and thread.
        gpus: fraction of a GPU per peer, e.g. 0.25, or whole GPUs.
        memory: bytes per peer, e.g. 500MB.
        wait: seconds to wait for resources, e.g. of an autoscaler.
        runtime_env: YAML file with a runtime environment of Ray, for what plug-ins import.
    """

    address: str | None = None
    hosts: int | None = None
    cpus: float | None = None
    gpus: float = 0.0
    memory: int = 0
    wait: float | None = None
    runtime_env: Mapping[str, Any] | None = None

    @classmethod
    def parse(cls, given: Sequence[str]) -> Self:
        """Parse ``KEY=VALUE`` texts. Raises LaunchError with all problems."""
        values: dict[str, Any] = {}
        problems = []
        for text in given:
            key, equals, value = text.partition("=")
            parse = _PARSERS.get(key)
            if parse is None or not equals:
                problems.append(f"--option {text}: should be KEY=VALUE with one of {', '.join(_PARSERS)}")
                continue
            try:
                values[key] = parse(value)
            except ValueError as error:
                problems.append(f"--option {text}: {error}")
        gpus = values.get("gpus", 0.0)
        if gpus > 1 and gpus != int(gpus):
            problems.append(f"--option gpus={gpus:g}: should be a fraction of one GPU, e.g. 0.25, or a whole number")
        if problems:
            raise LaunchError("\n".join(problems))
        return cls(**values)

    @property
    def setup_limit(self) -> float:
        """Seconds that a node may take to set up the runtime environment; 0 if there is none."""
        if not self.runtime_env:
            return 0.0
        config = self.runtime_env.get("config") or {}
        asked = config.get("setup_timeout_seconds", SETUP) if isinstance(config, Mapping) else SETUP
        return float(asked) if isinstance(asked, (int, float)) and asked > 0 else SETUP

    def to_dict(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}


def _number(what: str, *, whole: bool = False, zero: bool = False) -> Any:
    def parse(text: str) -> float | int:
        try:
            value = int(text) if whole else float(text)
        except ValueError:
            raise ValueError(f"should be {what}") from None
        if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
            raise ValueError(f"should be {what}")
        return value

    return parse


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)", text)
    if match is None or match[2].upper() not in UNITS:
        raise ValueError("should be a number of bytes, e.g. 500MB or 2GiB")
    value = int(float(match[1]) * UNITS[match[2].upper()])
    if 0 < value < LEAST_MEMORY:
        raise ValueError(f"is {value} bytes per peer; did you mean {match[1]}GB?")
    return value


def _address(text: str) -> str:
    if not text:
        raise ValueError("should be HOST:PORT, e.g. 10.0.0.1:6379")
    return text


def _runtime_env(text: str) -> dict[str, Any]:
    try:
        found = yaml.safe_load(Path(text).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError):
        raise ValueError("not YAML") from None
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ValueError("should contain a mapping, e.g. `pip: [einops]`")
    return found


_PARSERS: dict[str, Any] = {
    "address": _address,
    "hosts": _number("a number of nodes, at least 1", whole=True),
    "cpus": _number("a number of CPUs per peer, e.g. 0.25"),
    "gpus": _number("a fraction of a GPU per peer, e.g. 0.25, or a whole number", zero=True),
    "memory": _bytes,
    "wait": _number("a number of seconds", zero=True),
    "runtime_env": _runtime_env,
}


@dataclass(frozen=True)
class Node:
    """A node of the cluster, with its resources as Ray names them: CPU, GPU, memory (bytes)."""

    id: str
    address: str
    total: Mapping[str, float]
    free: Mapping[str, float]


@dataclass(frozen=True)
class Bundle:
    """What one node gives to the run.

    Attributes:
        peers: the peers on the node.
        resources: what is reserved for all of them.
        slots: peers that compute at the same time; None: as the run file says.
    """

    peers: tuple[PeerId, ...]
    resources: Mapping[str, float]
    slots: int | None = None


@dataclass(frozen=True)
class Demand:
    """What the peers of a run need.

    Attributes:
        threads: CPU threads per peer.
        slots: of the run file.
    """

    peers: int
    threads: int = 1
    slots: int | None = None


def plan(demand: Demand, options: RayOptions, nodes: Sequence[Node]) -> list[Bundle]:
    """Divide the peers among nodes in proportion to their room, in blocks of consecutive ids.

    Raises:
        LaunchError: they do not fit; with the demand, and the resources of each node.
    """
    rooms = sorted(((_room(node, options, demand.peers), node) for node in nodes), key=lambda pair: -pair[0][1])
    rooms = [(room, node) for room, node in rooms if room[0] > 0]
    if options.hosts is not None:
        if len(rooms) < options.hosts:
            raise LaunchError(_too_little(demand, options, nodes, f"{options.hosts} nodes are asked for"))
        rooms = rooms[: options.hosts]
    rooms = rooms[: demand.peers]
    if sum(most for (most, _), _ in rooms) < demand.peers:
        raise LaunchError(_too_little(demand, options, nodes))
    counts = _divide(demand.peers, [room for room, _ in rooms])
    bundles, first = [], 0
    for count, (_, node) in zip(counts, rooms, strict=True):
        if count:
            bundles.append(_bundle(range(first, first + count), demand, options, node))
            first += count
    return bundles


def _room(node: Node, options: RayOptions, peers: int) -> tuple[int, float]:
    """Return how many peers fit on a node, and its weight among the others."""
    cpus, memory = node.free.get("CPU", 0.0), node.free.get("memory", 0.0)
    limits = [peers]
    if options.cpus is not None:
        limits.append(int(cpus / options.cpus + MARGIN))
    elif not options.gpus and cpus < 1:
        return 0, 0.0
    if options.memory:
        limits.append(int(memory / options.memory + MARGIN))
    if options.gpus:
        free = node.free.get("GPU", 0.0) + MARGIN
        if options.gpus >= 1:
            limits.append(int(free / options.gpus))
        else:
            each = int(1 / options.gpus + MARGIN)
            limits.append(int(free) * each if free >= 1 else int(free / options.gpus))
    most = min(limits)
    return most, float(most) if len(limits) > 1 else min(cpus, float(peers))


def _divide(peers: int, rooms: Sequence[tuple[int, float]]) -> list[int]:
    """Divide by weight, and give what does not fit on one node to the others."""
    counts = [0] * len(rooms)
    while rest := peers - sum(counts):
        open_ = [number for number, (most, _) in enumerate(rooms) if counts[number] < most]
        weight = sum(rooms[number][1] for number in open_)
        before, given = 0.0, 0
        for number in open_:
            before += rooms[number][1] / weight * rest
            part = min(round(before) - given, rooms[number][0] - counts[number])
            given = round(before)
            counts[number] += part
    return counts


def _bundle(peers: range, demand: Demand, options: RayOptions, node: Node) -> Bundle:
    if options.cpus is not None:
        cpus = options.cpus * len(peers)
    else:
        cpus = float(min(int(node.free.get("CPU", 0.0)), len(peers) * demand.threads))
    gpus = options.gpus * len(peers)
    if options.gpus < 1 < gpus:  # Ray gives out whole GPUs, or a part of one
        gpus = float(math.ceil(len(peers) / int(1 / options.gpus + MARGIN)))
    resources = {"CPU": round(cpus, 4), "GPU": round(gpus, 4), "memory": float(options.memory * len(peers))}
    slots = None if demand.slots is not None or options.gpus else max(1, int(cpus / demand.threads + MARGIN))
    return Bundle(tuple(peers), {name: value for name, value in resources.items() if value}, slots)


def _too_little(demand: Demand, options: RayOptions, nodes: Sequence[Node], why: str = "") -> str:
    """Return an error text that compares the demand with the resources of the nodes."""
    cpus = 1.0 if options.cpus is None and not options.gpus else options.cpus or 0.0
    each = {"CPU": cpus, "GPU": options.gpus, "memory": float(options.memory)}
    per = "node" if options.cpus is None and not (options.gpus or options.memory) else "peer"
    asked = f"{demand.peers} peers ask for {amounts(each)} per {per}"
    names = [name for name, value in each.items() if value]
    has = [
        f"{node.address} has {amounts(node.free, names)} free of {amounts(node.total, names)}"
        f" (room for {_room(node, options, demand.peers)[0]})"
        for node in nodes
    ]
    there = "; ".join(has) if has else "no node is alive"
    remedy = "ask for less with --option cpus=, gpus= or memory=, add nodes, or wait with --option wait=SECONDS"
    return f"the Ray cluster has no room: {asked}{f', and {why}' if why else ''}; {there}; {remedy}"


def amounts(resources: Mapping[str, float], names: Sequence[str] | None = None) -> str:
    """Format resources: ``2 CPUs, 0.5 GPUs and 4 GB of memory``."""
    texts = {"CPU": "{:g} CPUs", "GPU": "{:g} GPUs", "memory": "{:.3g} GB of memory"}
    scale = {"memory": 1e-9}
    found = [
        texts[name].format(round(resources.get(name, 0.0) * scale.get(name, 1.0), 3))
        for name in texts
        if (name in names if names is not None else resources.get(name))
    ]
    return " and ".join(filter(None, [", ".join(found[:-1]), *found[-1:]])) or "nothing"
