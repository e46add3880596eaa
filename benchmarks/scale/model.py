"""A linear model of what a launch needs, fitted to measured launches by least squares.

Each quantity is a sum of a few physical terms: a constant, so much for each neighbor, so much for each byte. Launches
that are held out are never used for the fit. Constants that would be negative are left out: nothing becomes cheaper
by more of anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import t as student

CONFIDENCE = 0.95

Record = Mapping[str, Any]
Terms = dict[str, float]


@dataclass(frozen=True)
class Quantity:
    """Something measured, and the terms that it is a sum of.

    Attributes:
        unit: of what the fit yields.
        value: reads it from a record; None: it was not measured.
        terms: reads the factors of the constants from a record.
        uses: which of the records that may be fitted are used.
    """

    title: str
    unit: str
    value: Callable[[Record], float | None]
    terms: Callable[[Record], Terms]
    uses: Callable[[Record], bool] = lambda record: True


@dataclass(frozen=True)
class Fit:
    """The constants of one quantity.

    Attributes:
        constants: by term.
        covariance: of the constants, in the order of ``constants``.
        sigma: standard deviation of the residuals.
        freedom: records minus constants.
    """

    constants: Mapping[str, float]
    covariance: np.ndarray
    sigma: float
    freedom: int

    @property
    def _quantile(self) -> float:
        return float(student.ppf((1 + CONFIDENCE) / 2, self.freedom)) if self.freedom > 0 else float("inf")

    def half(self, term: str) -> float:
        """Return half of the width of a constant's 95 % interval."""
        at = list(self.constants).index(term)
        return self._quantile * float(np.sqrt(self.covariance[at, at]))

    def predict(self, terms: Terms) -> tuple[float, float]:
        """Return the value for these terms, and half of the width of its 95 % prediction interval."""
        row = np.array([terms[name] for name in self.constants])
        value = float(row @ np.array(list(self.constants.values())))
        return value, self._quantile * float(np.sqrt(self.sigma**2 + row @ self.covariance @ row))


def least_squares(rows: Sequence[Terms], values: Sequence[float]) -> Fit:
    """Fit constants that are not negative. Raises ValueError if the records do not determine them."""
    names = list(rows[0])
    while True:
        matrix = np.array([[row[name] for name in names] for row in rows])
        if not names or len(rows) < len(names) or np.linalg.matrix_rank(matrix) < len(names):
            raise ValueError(f"{len(rows)} records do not determine the constants {', '.join(names)}")
        found, *_ = np.linalg.lstsq(matrix, np.array(values), rcond=None)
        if found.min() >= 0:
            break
        del names[int((found * np.abs(matrix).max(axis=0)).argmin())]
    residuals, freedom = np.array(values) - matrix @ found, len(rows) - len(names)
    sigma = float(np.sqrt(residuals @ residuals / freedom)) if freedom else 0.0
    covariance = sigma**2 * np.linalg.inv(matrix.T @ matrix)
    return Fit(dict(zip(names, map(float, found), strict=True)), covariance, sigma, freedom)


def fit(quantity: Quantity, records: Iterable[Record]) -> Fit:
    """Fit a quantity to the records that are not held out."""
    used = [
        (quantity.terms(record), value)
        for record in records
        if record["use"] == "fit" and quantity.uses(record) and (value := quantity.value(record)) is not None
    ]
    return least_squares([terms for terms, _ in used], [value for _, value in used])


# ---- the quantities ------------------------------------------------------------------------------------------


def megabytes(record: Record) -> float:
    """Return the payload of one message in MB."""
    counts = np.sum([kind[:2] for kind in record["sent"].values()], axis=0)
    return float(counts[1] / counts[0] / 1e6)


def _rounds(record: Record) -> Terms:
    """Return the terms of a round's CPU. ``second``: of the round itself, since a peer that waits costs a little."""
    local, remote, size = record["messages"]["local"], record["messages"]["remote"], megabytes(record)
    return {
        "round": 1.0,
        "MB of the body": size,
        "message": local + remote,
        "message to another host": remote,
        "MB to the same host": local * size,
        "MB to another host": remote * size,
        "second": record["seconds"]["round"] or 0.0,
    }


def _start(record: Record) -> Terms:
    """Return the terms of the CPU of a peer's start. ``second``: until all peers have started."""
    return {**_neighbors(record), "second": record["seconds"]["ready"]}


def _neighbors(record: Record) -> Terms:
    return {"peer": 1.0, "neighbor": float(record["degree"])}


def _neighbors_and_keys(record: Record) -> Terms:
    """Return the terms of what encryption between hosts adds to."""
    return {**_neighbors(record), "peer of several hosts": float(record["hosts"] > 1)}


def _on_one_host(record: Record) -> bool:
    return bool(record["hosts"] == 1)


def _shared(record: Record) -> float:
    """Return the memory of all processes of a host beyond the private memory of the peers, per host."""
    return float(np.mean([host["pss"] - host["peers"] * record["peer"]["private"] for host in record["host"]]))


def start_cpu(record: Record) -> float:
    """Return the CPU seconds of a peer before its first counted round, its rounds at the usual cost left out."""
    return float(record["peer"]["cpu"] - record["rounds"] * record["cpu"]["round"])


def host_figure(name: str) -> Callable[[Record], float]:
    """Return a function that reads the mean of a figure over the hosts."""
    return lambda record: float(np.mean([host[name] for host in record["host"]]))


def peer_figure(name: str) -> Callable[[Record], float]:
    """Return a function that reads a figure of a peer."""
    return lambda record: float(record["peer"][name])


QUANTITIES: dict[str, Quantity] = {
    "cpu": Quantity("CPU of a peer's round", "s", lambda record: float(record["cpu"]["round"]), _rounds),
    "connections": Quantity(
        "TCP connections of a peer",
        "",
        peer_figure("connections"),
        lambda record: {"neighbor": float(record["degree"])},
    ),
    "descriptors": Quantity("descriptors of a peer", "", peer_figure("descriptors"), _neighbors),
    "threads": Quantity(
        "threads of a peer",
        "",
        peer_figure("threads"),
        lambda record: {"peer": 1.0, "peer of several hosts": float(record["hosts"] > 1)},
    ),
    "private": Quantity(
        "private memory of a peer",
        "B",
        peer_figure("private"),
        lambda record: {
            **_neighbors_and_keys(record),
            "MB of the body": megabytes(record),
            "MB to another host": megabytes(record) * record["messages"]["remote"],
        },
    ),
    "shared": Quantity("memory of a host beyond that", "B", _shared, lambda record: {"host": 1.0}, uses=_on_one_host),
    "start": Quantity("CPU of a peer's start", "s", start_cpu, _start),
    "warm": Quantity(
        "CPU of the process that forks",
        "s",
        host_figure("warm_cpu"),
        lambda record: {"host": 1.0, "peer": record["peers"] / record["hosts"]},
    ),
    "launcher": Quantity(
        "CPU of the launcher until all peers run",
        "s",
        lambda record: record["launcher"]["cpu_ready"],
        lambda record: {"launch": 1.0, "peer": float(record["peers"]), "further host": record["hosts"] - 1.0},
    ),
}


def quietest(records: Sequence[Record]) -> list[Record]:
    """Return of each launch the turn whose rounds took the least CPU: other programs only add to it."""
    turns: dict[str, list[Record]] = {}
    for record in records:
        turns.setdefault(record["name"], []).append(record)
    return [min(each, key=lambda record: float(record["cpu"]["round"])) for each in turns.values()]


# ---- what a launch needs -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """A launch to predict: peers of one graph in equal parts on hosts.

    Attributes:
        size: MB of a message.
        cores: of each host.
        remote: fraction of the neighbors that are on other hosts; None: as in a random graph.
    """

    peers: int
    degree: int = 4
    hosts: int = 1
    size: float = 0.14404
    cores: int = 2
    remote: float | None = None

    def record(self) -> Record:
        """Return what the terms of a quantity are read from; the times are 0."""
        inside = (self.peers / self.hosts - 1) / max(1, self.peers - 1)
        remote = self.degree * (1 - inside if self.remote is None else self.remote)
        return {
            "peers": self.peers,
            "degree": self.degree,
            "hosts": self.hosts,
            "messages": {"local": self.degree - remote, "remote": remote},
            "sent": {"": [self.degree, self.degree * self.size * 1e6, 0.0]},
            "seconds": {"ready": 0.0, "round": 0.0},
        }


def busy_seconds(work: float, idle: float, cores: float, before: float = 0.0) -> float:
    """Return the seconds for which ``cores`` are busy with ``work`` and with what each second adds to it.

    Args:
        work: CPU seconds.
        idle: CPU seconds per second, of all peers that wait.
        before: seconds that precede it, and add to it too.
    """
    return before + (work + idle * before) / (cores - idle) if idle < cores else float("inf")


class Model:
    """The fits of all quantities, from the records of launches."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.fits = {name: fit(quantity, records) for name, quantity in QUANTITIES.items()}

    def __call__(self, name: str, record: Record) -> tuple[float, float]:
        """Predict a quantity: its value, and half of the width of the 95 % prediction interval."""
        return self.fits[name].predict(QUANTITIES[name].terms(record))

    def times(self, record: Record, peers: float, cores: float) -> dict[str, float]:
        """Predict the seconds of a round and those until all peers have started, if nothing else needs the cores.

        Args:
            peers: that share the cores.
        """
        idle = {"seconds": {"ready": 0.0, "round": 0.0}}
        first, start, rounds = self.fits["warm"].constants, self.fits["start"], self.fits["cpu"]
        work = peers * (self("start", {**record, **idle})[0] + first.get("peer", 0.0))
        return {
            "ready": busy_seconds(work, peers * start.constants.get("second", 0.0), cores, first.get("host", 0.0)),
            "round": busy_seconds(
                peers * self("cpu", {**record, **idle})[0], peers * rounds.constants.get("second", 0.0), cores
            ),
        }

    def host(self, size: Size) -> Terms:
        """Return what each host of a launch needs: seconds, bytes and counts.

        ``launcher``: CPU seconds of the launcher until all peers have started.
        """
        record, peers = size.record(), size.peers / size.hosts
        value = {name: self(name, record)[0] for name in self.fits}
        return {
            "peers": peers,
            **self.times(record, peers, size.cores),
            "memory": value["shared"] + peers * value["private"],
            "connections": peers * value["connections"],
            "descriptors": peers * value["descriptors"],
            "tasks": peers * value["threads"],
            "sent": peers * record["messages"]["remote"] * size.size * 1e6,
            "launcher": value["launcher"],
        }
