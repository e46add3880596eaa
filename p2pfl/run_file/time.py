"""The run file's section ``time``: how long computing and messages take for ``p2pfl simulate --clock``.

It says what devices and networks are like; p2pfl/simulation/simulated_time.py and transfers.py, what follows from it.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveFloat, field_validator, model_validator

from p2pfl import PeerId
from p2pfl.options import Section
from p2pfl.paths import LocalPath
from p2pfl.seeds import shared

SPEED = 1e9
LATENCY = 0.02

SectionT = TypeVar("SectionT", bound=Section)

Interval = tuple[float, float]
"""Seconds at which a peer goes down, and at which it is back."""


def _at_most_one(section: SectionT, *keys: str) -> SectionT:
    given = [key for key in keys if getattr(section, key) is not None]
    if len(given) > 1:
        raise ValueError(f"set only one of {', '.join(keys)}; found {' and '.join(given)}")
    return section


class TimeError(ValueError):
    """A file of the section does not have the form that it should have.

    Attributes:
        key: below ``time``, which names the file.
    """

    def __init__(self, key: tuple[str, str], problem: str) -> None:
        super().__init__(problem)
        self.key = key


class Lognormal(Section):
    """Speeds whose logarithms are normally distributed."""

    median: PositiveFloat = SPEED
    """FLOP per second of the median peer."""
    ratio: float = Field(default=10.0, ge=1.0)
    """Speed of the fastest peer over the speed of the slowest."""

    def draw(self, peers: int, seed: int) -> list[float]:
        """Return the speed of each peer.

        Standard normal numbers are drawn from the seed, then shifted and scaled so that median and ratio are exact.
        """
        drawn = shared(seed, "time.devices").standard_normal(peers)
        spread = float(np.ptp(drawn)) or 1.0
        powers = (drawn - np.median(drawn)) * (math.log(self.ratio) / spread)
        return [float(speed) for speed in self.median * np.exp(powers)]


class Devices(Section):
    """How fast the peers compute; set one key."""

    speed: PositiveFloat | None = None
    """FLOP per second of each peer; default: 1e9."""
    lognormal: Lognormal | None = None
    """Speeds that are drawn from the seed."""
    file: LocalPath | None = None
    """CSV file with the lines ``peer,speed``, one for each peer, in FLOP per second."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        return _at_most_one(self, "speed", "lognormal", "file")

    def speeds(self, peers: int, seed: int) -> list[float]:
        """Return the FLOP per second of each peer. Raises TimeError."""
        if self.lognormal is not None:
            return self.lognormal.draw(peers, seed)
        if self.file is None:
            return [self.speed or SPEED] * peers
        found: dict[PeerId, float] = {}
        for where, peer, (speed,) in _rows(("devices", "file"), self.file, ("peer", "speed"), peers):
            if not 0 < speed < math.inf:
                raise TimeError(("devices", "file"), f"{where}: a speed should be positive, got {speed:g}")
            found[peer] = speed
        if missing := sorted(set(range(peers)) - set(found)):
            raise TimeError(("devices", "file"), f"{self.file}: no speed of peer {missing[0]} of {peers} peers")
        return [found[peer] for peer in range(peers)]


class Network(Section):
    """How long messages take; each direction of an edge is a link."""

    latency: NonNegativeFloat | None = None
    """Seconds from one peer to another; default: 0.02, or as in ``matrix``."""
    bandwidth: PositiveFloat = 1e7
    """Bytes per second of each link."""
    interface: PositiveFloat | None = None
    """Bytes per second that a peer can send, and as many that it can receive, over all its links together; default:
    no limit."""
    matrix: LocalPath | None = None
    """CSV file with the latencies between places in milliseconds: from the place of a line to the place of a column,
    without a heading. A negative number was not measured: the other direction counts, or else the median."""
    places: Literal["in-order", "drawn"] = "in-order"
    """Which place of ``matrix`` peer i is in: number i mod n, or one drawn from the seed, none twice while some are
    free."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.matrix is None and "places" in self.model_fields_set and self.places != "in-order":
            raise ValueError("places are those of a matrix; add one, or remove places")
        return _at_most_one(self, "latency", "matrix")

    def latencies(self, peers: int, seed: int) -> Callable[[PeerId, PeerId], float]:
        """Return a function that returns the seconds from one peer to another. Raises TimeError."""
        if self.matrix is None:
            latency = LATENCY if self.latency is None else self.latency
            return lambda sender, receiver: latency
        measured = _square(("network", "matrix"), self.matrix) / 1000.0
        place = np.arange(peers) % len(measured)
        if self.places == "drawn":
            draw = shared(seed, "time.places")
            turns = [draw.permutation(len(measured)) for _ in range(-(-peers // len(measured)))]
            place = np.concatenate(turns)[:peers]
        return lambda sender, receiver: float(measured[place[sender], place[receiver]])


class Churn(Section):
    """Peers that go down and come back, each at times drawn from the seed."""

    up: PositiveFloat
    """Mean seconds for which a peer is up."""
    down: PositiveFloat
    """Mean seconds for which a peer is down."""


class Availability(Section):
    """When the peers are up; set one key."""

    trace: LocalPath | None = None
    """CSV file with the lines ``peer,down,up``: the seconds at which a peer goes down and is back."""
    churn: Churn | None = None
    """Exponentially distributed times; at the start, each peer is down with probability down / (up + down)."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if self.trace is None and self.churn is None:
            raise ValueError("set trace or churn")
        return _at_most_one(self, "trace", "churn")

    def intervals(self, peers: int) -> list[list[Interval]]:
        """Return when each peer is down by the trace, ascending. Raises TimeError."""
        found: list[list[Interval]] = [[] for _ in range(peers)]
        assert self.trace is not None
        for where, peer, (down, up) in _rows(("availability", "trace"), self.trace, ("peer", "down", "up"), peers):
            last = found[peer][-1][1] if found[peer] else 0.0
            if not (last <= down < up < math.inf):
                text = f"{where}: down should be before up, and both after the last time of peer {peer}, {last:g}"
                raise TimeError(("availability", "trace"), text)
            found[peer].append((down, up))
        return found


def _trace(value: Any) -> Any:
    """Expand the short form, the name of a trace."""
    return {"trace": value} if isinstance(value, str) else value


class Time(Section):
    """What seconds are made of in ``p2pfl simulate --clock``; see docs/seconds.md."""

    devices: Devices = Devices()
    """How fast the peers compute."""
    network: Network = Network()
    """How long messages take."""
    availability: Availability | None = None
    """When peers are down: they neither compute nor send or receive. Default: never."""
    evaluation: bool = False
    """Whether evaluation takes time too."""
    train: bool = True
    """Whether models are trained and evaluated. Otherwise only messages are sent, and the time of training passes."""

    _short = field_validator("availability", mode="before")(_trace)

    def files(self) -> Mapping[tuple[str, str], Path]:
        """Return the files that it names, by key. A run folder keeps copies."""
        named = {
            ("devices", "file"): self.devices.file,
            ("network", "matrix"): self.network.matrix,
            ("availability", "trace"): self.availability.trace if self.availability else None,
        }
        return {key: path for key, path in named.items() if path is not None}

    def check(self, peers: int, seed: int) -> None:
        """Raise TimeError if a file cannot be used."""
        self.devices.speeds(peers, seed)
        self.network.latencies(peers, seed)
        if self.availability is not None and self.availability.trace is not None:
            self.availability.intervals(peers)


# ---- files -----------------------------------------------------------------------------------------------------


def _lines(key: tuple[str, str], path: Path) -> list[list[str]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return list(csv.reader(file))
    except OSError as error:
        raise TimeError(key, f"{path}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error):
        raise TimeError(key, f"{path}: not a CSV file in UTF-8") from None


def _numbers(key: tuple[str, str], where: str, row: Sequence[str]) -> list[float]:
    try:
        found = list(map(float, row))
    except ValueError:
        raise TimeError(key, f"{where}: expected numbers, got {','.join(row)[:60]!r}") from None
    if not all(map(math.isfinite, found)):
        raise TimeError(key, f"{where}: numbers should be finite")
    return found


def _rows(key: tuple[str, str], path: Path, head: Sequence[str], peers: int) -> list[tuple[str, PeerId, list[float]]]:
    """Return where each line is, its peer, and the numbers after it."""
    lines = _lines(key, path)
    if not lines or [name.strip() for name in lines[0]] != list(head):
        raise TimeError(key, f"{path}:1: the first line should be {','.join(head)}")
    found = []
    for number, row in enumerate(lines[1:], 2):
        where = f"{path}:{number}"
        if not row:
            continue
        if len(row) != len(head):
            raise TimeError(key, f"{where}: expected {len(head)} columns, {','.join(head)}; got {len(row)}")
        peer, *values = _numbers(key, where, row)
        if peer not in range(peers):
            raise TimeError(key, f"{where}: no peer {row[0]}; the {peers} peers are 0 to {peers - 1}")
        found.append((where, int(peer), values))
    return found


def _square(key: tuple[str, str], path: Path) -> np.ndarray:
    """Return a matrix of numbers, float64 [n, n], of which those that were not measured are replaced."""
    rows = [_numbers(key, f"{path}:{number}", row) for number, row in enumerate(_lines(key, path), 1) if row]
    for number, row in enumerate(rows, 1):
        if len(row) != len(rows):
            raise TimeError(key, f"{path}: line {number} has {len(row)} columns, but there are {len(rows)} lines")
    found = np.array(rows)
    if not (found >= 0).any():
        raise TimeError(key, f"{path}: no latency")
    found = np.where(found < 0, found.T, found)
    return np.where(found < 0, np.median(found[found >= 0]), found)
