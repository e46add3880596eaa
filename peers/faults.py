"""The run file's chaos, applied to this process: it kills, stops and slows down itself, and cuts its own connections.

What has happened once does not happen again after a restart: ``chaos.jsonl`` in the peer's folder remembers it, and
tells afterwards what was injected when.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from p2pfl.chaos import Blow, Partition, blows
from p2pfl.config import Run
from p2pfl.errors import Unwritable
from p2pfl.runfolder import PeerFolder, PeerId, append_line

TYPICAL = 0.5
"""Seconds that a round counts as lasting until one is over."""


class Injector:
    """Injects the faults of ``run`` into the process of peer ``me``.

    Args:
        cut: told which neighbours are not to be reached from now on.
    """

    def __init__(
        self, run: Run, me: PeerId, place: PeerFolder, cut: Callable[[frozenset[PeerId]], None], log: logging.Logger
    ) -> None:
        chaos = run.file.chaos
        self.place = place
        self.cut = cut
        self.log = log
        done = {entry["name"] for entry in place.injected()}
        self._blows = [blow for blow in blows(chaos, me, run.rounds, run.seed) if blow.name not in done]
        self._slower = max((one.factor for one in chaos.straggler if one.peer == me), default=1.0)
        self._partitions = {
            f"partition {number}": partition
            for number, partition in enumerate(chaos.partition)
            if partition.cuts_off(me) and f"partition {number}" not in done
        }
        self._me = me
        self._timers: dict[str, tuple[threading.Timer, Blow]] = {}
        self._striking = threading.Lock()
        self._healing: dict[str, float] = {}
        self._began = time.monotonic()
        self._typical = TYPICAL
        self._batch = time.perf_counter()

    def begins(self, t: int) -> None:
        self._began = time.monotonic()
        self._batch = time.perf_counter()
        self._part(t)
        for blow in self._blows:
            if blow.t <= t:
                timer = threading.Timer(blow.moment * self._typical, self._strike, [blow])
                timer.daemon = True
                self._timers[blow.name] = (timer, blow)
                timer.start()
        self._blows = [blow for blow in self._blows if blow.t > t]

    def ends(self, t: int) -> None:
        self._typical = time.monotonic() - self._began
        for timer, blow in list(self._timers.values()):  # the round was over sooner than the one before
            timer.cancel()
            self._strike(blow)

    def goes_on(self) -> None:
        self._batch = time.perf_counter()  # a straggler computes slowly; it does not wait slowly

    def batch(self) -> None:
        if self._slower > 1.0:
            time.sleep((self._slower - 1.0) * (time.perf_counter() - self._batch))
            self._batch = time.perf_counter()

    def _strike(self, blow: Blow) -> None:
        """It is over when this returns: no later round is hit, nor a peer that has finished, if the disk is slow."""
        with self._striking:
            if blow.name in self._timers:  # else the timer and the end of the round came at the same time
                self._hit(blow)
                del self._timers[blow.name]

    def _hit(self, blow: Blow) -> None:
        self.log.warning(
            "chaos: %s in round %d%s", blow.what, blow.t, f" for {blow.seconds:g} s" * bool(blow.seconds)
        )
        try:
            self._remember(asdict(blow))
        except Unwritable as error:
            self.log.warning("chaos: not done, since it would be done again after each restart: %s", error)
            return
        if blow.what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            me = os.getpid()
            # Nobody can wake up itself.
            subprocess.run(["/bin/sh", "-c", f"kill -STOP {me}; sleep {blow.seconds}; kill -CONT {me}"], check=False)

    # -- partitions

    def _part(self, t: int) -> None:
        for name, partition in self._partitions.items():
            if t >= partition.round and name not in self._healing and not _is_over(partition, t):
                self.log.warning("chaos: cut off from %s in round %d", _some(partition.cuts_off(self._me)), t)
                self._remember({"name": name, "what": "partition", "t": t} if partition.rounds is None else None)
                self._healing[name] = time.monotonic() + (partition.seconds or float("inf"))
                if partition.seconds is not None:
                    timer = threading.Timer(partition.seconds, self._heal, [name])
                    timer.daemon = True
                    timer.start()
        for name in [name for name in self._healing if _is_over(self._partitions[name], t)]:
            self._heal(name)
        self._cut()

    def _heal(self, name: str) -> None:
        if self._healing.pop(name, None) is not None:
            self.log.warning("chaos: connected again with %s", _some(self._partitions.pop(name).cuts_off(self._me)))
            self._cut()

    def _cut(self) -> None:
        lists = (self._partitions[name].cuts_off(self._me) for name in tuple(self._healing))
        self.cut(frozenset().union(*lists))

    def _remember(self, entry: dict[str, Any] | None) -> None:
        if entry is not None:
            append_line(self.place.chaos, json.dumps(entry), durable=True)


def _is_over(partition: Partition, t: int) -> bool:
    return partition.rounds is not None and t >= partition.round + partition.rounds


def _some(peers: frozenset[PeerId]) -> str:
    return f"{len(peers)} peers ({', '.join(map(str, sorted(peers)[:8]))}{', …' * (len(peers) > 8)})"
