"""The records of peers (metrics.jsonl), for all who read them, also while a peer writes them.

Other hosts, or another version of p2pfl, may have written them. A field that is missing or has another type counts as
absent, and an object without a peer or a round is ignored. p2pfl/session/metrics.py lists the fields.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2pfl import PeerId
from p2pfl.run_folder.ages import AgeRange
from p2pfl.run_folder.files import json_object, read_lines
from p2pfl.run_folder.folder import RunFolder


@dataclass(frozen=True)
class Record:
    """One peer's round.

    Attributes:
        plain: as it was written.
        elapsed: seconds since the peer began the run.
    """

    plain: dict[str, Any]
    peer: PeerId
    t: int

    @property
    def elapsed(self) -> float:
        return number(self.plain.get("elapsed")) or 0.0

    @property
    def accuracy(self) -> float | None:
        """On the local test split, as masked_test asks; None if the peer was not evaluated."""
        return number(mapping(self.plain.get("personal")).get("accuracy"))

    def accuracy_with(self, *, masked: bool) -> float | None:
        """Return the accuracy that counts the scores of local classes only, or of all classes."""
        return number(mapping(self.plain.get("personal")).get("masked_accuracy" if masked else "unmasked_accuracy"))

    @property
    def loss(self) -> dict[str, float | None]:
        """By term; None where it was not finite."""
        return {str(term): number(value) for term, value in mapping(self.plain.get("loss")).items()}

    def numbers(self, key: str) -> dict[str, float]:
        """Return the finite numbers of ``seconds``, ``cost``, ``diagnostics`` or ``skipped``, by name."""
        found = {str(name): number(value) for name, value in mapping(self.plain.get(key)).items()}
        return {name: value for name, value in found.items() if value is not None}

    def traffic(self, key: str = "sent") -> Iterator[tuple[PeerId, str, list[int]]]:
        """Yield neighbor, kind, and messages, payload bytes and header bytes that were ``sent`` or ``received``."""
        for neighbor, kinds in mapping(self.plain.get(key)).items():
            for kind, counts in mapping(kinds).items():
                peer = peer_id(neighbor)
                if peer is not None and isinstance(counts, list) and len(counts) == 3:
                    yield peer, str(kind), [count if number(count) is not None else 0 for count in counts]

    @property
    def bytes_sent(self) -> int:
        """With headers."""
        return sum(payload + header for _, _, (_, payload, header) in self.traffic())

    @property
    def missing(self) -> list[PeerId]:
        """The sender of each message that missed the deadline."""
        late = mapping(self.plain.get("missing")).values()
        found = (peer_id(sender) for senders in late if isinstance(senders, list) for sender in senders)
        return [sender for sender in found if sender is not None]

    @property
    def weights(self) -> dict[PeerId, float] | None:
        """The mixing weights after the round; None if the method has none."""
        given = self.plain.get("weights")
        if not isinstance(given, Mapping):
            return None
        found = ((peer_id(peer), number(weight)) for peer, weight in given.items())
        return {peer: weight for peer, weight in found if peer is not None and weight is not None}

    @property
    def ages(self) -> dict[str, Counter[int]]:
        """How many messages of each age the round took, by kind; empty if rounds wait for one another."""
        given = {str(kind): mapping(ages).values() for kind, ages in mapping(self.plain.get("ages")).items()}
        counts = {kind: Counter(age for age in ages if type(age) is int) for kind, ages in given.items()}
        return {kind: of_kind for kind, of_kind in counts.items() if of_kind}

    def combined(self) -> Iterator[tuple[str, PeerId, float | None, float]]:
        """Yield kind, neighbor, relative distance and taken fraction of what the peer has combined with its own."""
        for kind, by_peer in mapping(self.plain.get("combined")).items():
            for neighbor, values in mapping(by_peer).items():
                peer = peer_id(neighbor)
                if peer is not None and isinstance(values, list) and len(values) == 2:
                    yield str(kind), peer, number(values[0]), number(values[1]) or 0.0

    def row(self) -> dict[str, Any]:
        """Flatten the record to a row of a table, without matrices: ``{"loss": {"ce": 1}}`` to ``{"loss.ce": 1}``."""
        found: dict[str, Any] = {}
        for key, value in self.plain.items():
            if key in ("sent", "received"):
                counts = [count for _, _, count in self.traffic(key)]
                found[f"{key}.messages"] = sum(count[0] for count in counts)
                found[f"{key}.bytes"] = sum(count[1] + count[2] for count in counts)
            elif key == "missing":
                found[key] = len(self.missing)
            elif key == "ages":
                ranges = {kind: AgeRange.of(counts)._asdict() for kind, counts in self.ages.items()}
                found.update(_flat(key, ranges))
            elif key not in ("weights", "combined"):
                found.update(_flat("" if key == "personal" else key, value))
        return found

    def scalars(self) -> dict[str, float]:
        """Return the finite numbers of the row besides peer and round."""
        row = self.row().items()
        return {name: value for name, value in row if name not in ("peer", "t") and number(value) is not None}


def rows(found: Iterable[Record], attacks: Mapping[PeerId, str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table of records: if peers attack, each with its peer's ``attack``, "" of an honest one."""
    for record in found:
        row = record.row()
        yield {"peer": row.pop("peer"), "attack": attacks.get(record.peer, ""), **row} if attacks else row


def parse(found: Iterable[dict[str, Any]]) -> Iterator[Record]:
    """Yield the records among JSON objects."""
    for plain in found:
        peer, t = peer_id(plain.get("peer")), peer_id(plain.get("t"))
        if peer is not None and t is not None:
            yield Record(plain, peer, t)


def read(folder: RunFolder) -> Iterator[Record]:
    """Yield the records of all peers, by peer and round. Raises RunFolderError if a file cannot be read."""
    for files in folder.peers():
        yield from parse(read_lines(files.metrics))


class RecordFile:
    """Read the records of a peer while it appends to them.

    A peer that resumes replaces the file by one that ends earlier; then the records are read from its beginning.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode: int | None = None
        self._offset = 0

    def read(self) -> list[Record]:
        """Return the records since the last call; leave an incomplete last line for the next one."""
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._inode or found.st_size < self._offset:
                    self._inode, self._offset = found.st_ino, 0
                file.seek(self._offset)
                new = file.read()
        except OSError:
            return []
        new = new[: new.rfind(b"\n") + 1]
        self._offset += len(new)
        return list(parse(filter(None, map(json_object, new.splitlines()))))


def number(value: Any) -> float | None:
    """Return a finite number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def mapping(value: Any) -> Mapping[str, Any]:
    """Return a mapping, or an empty one for anything else."""
    return value if isinstance(value, Mapping) else {}


def peer_id(value: Any) -> PeerId | None:
    """Return the peer, or the round, that a number or a key names."""
    text = str(value)
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        if name:
            yield name, value
        return
    for key, item in value.items():
        yield from _flat(f"{name}.{key}" if name else f"test_{key}" if key == "loss" else key, item)
