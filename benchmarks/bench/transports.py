"""Bandwidth and messages a second through real peers, by transport, beside plain pyzmq."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.bench import measuring, raw_zmq, runs
from benchmarks.bench.measuring import Measurement, RunTree
from benchmarks.bench.report import Report, Table, Value, known, ratio
from benchmarks.bench.settings import Settings
from p2pfl.run_folder.key_files import write_new
from peers.keys import new_pair


class Exchange(NamedTuple):
    """Peers of a complete graph that send an MLP with these hidden layers to each other in each round."""

    widths: tuple[int, ...]
    peers: int
    rounds: int

    @property
    def size(self) -> int:
        return runs.mlp_bytes(64, self.widths)

    @property
    def messages(self) -> int:
        return self.peers * (self.peers - 1)

    def tree(self) -> RunTree:
        model = "-".join(["mlp", *map(str, self.widths)])
        # Checkpoints are measured elsewhere.
        return {**runs.light(self.peers, "complete", self.rounds, model), "checkpoint_every": 1000}


EXCHANGES = {
    "2.4 kB": Exchange((8,), 8, 100),
    "2.3 MB": Exchange((640, 830), 4, 30),
    "46 MB": Exchange((3072, 3662), 2, 10),
}
QUICK = {"2.3 MB": Exchange((640, 830), 4, 6)}
PLAIN = {"plain pyzmq, TCP": False, "plain pyzmq, CURVE": True}
"""Whether it is encrypted, by name."""

Turn = tuple[float | None, float | None]
"""Seconds of a round, and the difference to the same run without neighbors: noise may make it negative."""


def transports(settings: Settings) -> Report:
    table = Table(
        {
            "body": "",
            "peers": "d",
            "transport": "",
            "ms a round": ".1f",
            "of it messages": ".1f",
            "messages a second": ",.0f",
            "MB/s": ",.0f",
            "of plain pyzmq": ".2f",
        }
    )
    with measuring.scratch_folder() as keys:
        known_transports = transport_sections(keys, max(each.peers for each in EXCHANGES.values()))
        for body, exchange in (QUICK if settings.quick else EXCHANGES).items():
            turns: dict[str, list[Turn]] = {name: [] for name in (*PLAIN, *known_transports)}
            for _ in range(settings.turns):
                for name, curve in PLAIN.items():
                    settings.progress(f"{body}, {name}")
                    seconds = raw_zmq.exchange(exchange.peers, exchange.size, exchange.rounds, curve=curve).seconds
                    turns[name].append((seconds, seconds))
                for name, transport in known_transports.items():
                    settings.progress(f"{body}, {name}")
                    how = measuring.simulate if name == "in-process" else measuring.launch
                    turns[name].append(_through_peers({**exchange.tree(), "transport": transport}, how))
            for name, measured in turns.items():
                best = turns["plain pyzmq, CURVE" if name == "CURVE" else "plain pyzmq, TCP"]
                pairs = zip(best, measured, strict=True)
                compared = known(ratio(a, b) for (_, a), (_, b) in pairs if b is None or b > 0)
                table.add(
                    body, exchange.peers, name, *_cells(exchange, measured), None if name in PLAIN else compared
                )
    text = (
        "Peers of a complete graph send their model to each other in every round, after one step of one sample. "
        "*Of it messages* is the difference to the same run without neighbors: encoding, sending, reading and "
        "averaging the bodies, and waiting for the slowest peer. Plain pyzmq sends as many bodies of the same size "
        "from DEALER to ROUTER between as many processes, and does nothing with them."
    )
    return Report("transports", "Transports", text, [table])


def _cells(exchange: Exchange, measured: list[Turn]) -> list[Value]:
    """Milliseconds of a round, of its messages, messages a second, megabytes a second."""
    whole, part = zip(*measured, strict=True)
    rates = [exchange.messages / seconds for seconds in known(part) if seconds > 0]
    times = [[1000 * seconds for seconds in known(turns)] for turns in (whole, part)]
    return [*times, rates, [rate * exchange.size / 1e6 for rate in rates]]


def _through_peers(tree: RunTree, how: Callable[[RunTree], Measurement]) -> Turn:
    both = how(tree).seconds_a_round
    alone = how(runs.without_messages(tree)).seconds_a_round_alone
    return both, both - alone if both is not None and alone is not None else None


def transport_sections(keys: Path, peers: int) -> dict[str, dict[str, Any]]:
    """The section `transport` of the run file, by name. Without what this version of the project does not know.

    Args:
        keys: folder that gets a pair of keys for each of ``peers``.
    """
    write_new(keys / "keys", {peer: new_pair() for peer in range(peers)})
    found: dict[str, dict[str, Any]] = {
        "in-process": {},
        "same-host mapping": {"same_host": "on"},
        "TCP": {"same_host": "off"},
        "CURVE": {"same_host": "off", "keys": str(keys / "keys")},
    }
    if not measuring.is_accepted({**runs.light(2, "complete", 1), "transport": found["same-host mapping"]}):
        del found["same-host mapping"]
        for transport in found.values():
            transport.pop("same_host", None)
    return found
