"""Fault injection: apply the run file's ``chaos`` section to this process.

The process kills, stops and slows down itself, and cuts its own connections. ``chaos.jsonl`` in the peer's folder
records the injected faults, so that none is repeated after a restart.
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

from p2pfl import PeerId
from p2pfl.errors import WriteError
from p2pfl.run_file.faults import Faults, Partition, PlannedFault, planned_faults
from p2pfl.run_file.run import Run
from p2pfl.run_folder.files import append_line
from p2pfl.run_folder.folder import PeerFolder

FIRST_ROUND = 0.5
"""Assumed seconds of a round until one has been measured."""


class Injector(Faults):
    """Injects the faults of ``run`` into the process of peer ``me``.

    Args:
        run: the run.
        me: this peer.
        files: the peer's folder.
        cut: called with the neighbors to cut off from now on.
        log: receives a warning for each fault.
    """

    def __init__(
        self, run: Run, me: PeerId, files: PeerFolder, cut: Callable[[frozenset[PeerId]], None], log: logging.Logger
    ) -> None:
        chaos = run.file.chaos
        self._me = me
        self._files = files
        self._cut = cut
        self._log = log
        done = {entry["name"] for entry in files.injected()}
        self._pending = [fault for fault in planned_faults(chaos, me, run.rounds, run.seed) if fault.name not in done]
        self._slowdown = max((one.factor for one in chaos.straggler if one.peer == me), default=1.0)
        self._partitions = {
            f"partition {number}": partition
            for number, partition in enumerate(chaos.partition)
            if partition.cuts_off(me) and f"partition {number}" not in done
        }
        self._active: set[str] = set()
        """Names of the partitions in effect."""
        self._partitioning = threading.RLock()  # timers heal partitions while the event loop begins others
        self._timers: dict[str, tuple[threading.Timer, PlannedFault]] = {}
        self._injecting = threading.Lock()
        self._round_began = time.monotonic()
        self._last_round = FIRST_ROUND
        self._batch_began = time.perf_counter()

    # ---- called by the session

    def begins(self, t: int) -> None:
        self._round_began = time.monotonic()
        self._batch_began = time.perf_counter()
        self._update_partitions(t)
        for fault in self._pending:
            if fault.t <= t:
                timer = threading.Timer(fault.moment * self._last_round, self._inject, [fault])
                timer.daemon = True
                self._timers[fault.name] = (timer, fault)
                timer.start()
        self._pending = [fault for fault in self._pending if fault.t > t]

    def ends(self, t: int) -> None:
        self._last_round = time.monotonic() - self._round_began
        for timer, fault in list(self._timers.values()):  # the round was shorter than the previous one
            timer.cancel()
            self._inject(fault)

    def wait_ended(self) -> None:
        self._batch_began = time.perf_counter()  # a straggler computes slowly; it does not wait slowly

    def batch(self) -> None:
        if self._slowdown > 1.0:
            time.sleep((self._slowdown - 1.0) * (time.perf_counter() - self._batch_began))
            self._batch_began = time.perf_counter()

    # ---- kills and pauses

    def _inject(self, fault: PlannedFault) -> None:
        """Inject one fault and return when it is over, so that it hits neither a later round nor a finished peer."""
        with self._injecting:
            if fault.name in self._timers:  # otherwise already injected: the timer and the end of the round coincided
                self._kill_or_pause(fault)
                del self._timers[fault.name]

    def _kill_or_pause(self, fault: PlannedFault) -> None:
        duration = f" seconds={fault.seconds:g}" if fault.seconds else ""
        self._log.warning("fault injected: %s t=%d%s", fault.what, fault.t, duration)
        try:
            self._record(asdict(fault))
        except WriteError as error:
            self._log.warning("fault skipped: not recorded, so every restart would repeat it: %s", error)
            return
        me = os.getpid()
        if fault.what == "kill":
            os.kill(me, signal.SIGKILL)
        else:
            # A stopped process cannot continue itself.
            subprocess.run(["/bin/sh", "-c", f"kill -STOP {me}; sleep {fault.seconds}; kill -CONT {me}"], check=False)

    # ---- partitions

    def _update_partitions(self, t: int) -> None:
        with self._partitioning:
            for name, partition in self._partitions.items():
                if t >= partition.round and name not in self._active and not _is_over(partition, t):
                    self._begin_partition(name, partition, t)
            for name in [name for name in self._active if _is_over(self._partitions[name], t)]:
                self._heal(name)
            self._apply_partitions()

    def _begin_partition(self, name: str, partition: Partition, t: int) -> None:
        self._log.warning("fault injected: partition t=%d cut_off=%s", t, _some(partition.cuts_off(self._me)))
        if partition.rounds is None:
            self._record({"name": name, "what": "partition", "t": t})
        self._active.add(name)
        if partition.seconds is not None:
            timer = threading.Timer(partition.seconds, self._heal, [name])
            timer.daemon = True
            timer.start()

    def _heal(self, name: str) -> None:
        with self._partitioning:
            if name in self._active:
                self._active.remove(name)
                self._log.warning("partition healed cut_off=%s", _some(self._partitions.pop(name).cuts_off(self._me)))
                self._apply_partitions()

    def _apply_partitions(self) -> None:
        self._cut(frozenset().union(*(self._partitions[name].cuts_off(self._me) for name in self._active)))

    def _record(self, entry: dict[str, Any]) -> None:
        append_line(self._files.chaos, json.dumps(entry), durable=True)


def _is_over(partition: Partition, t: int) -> bool:
    return partition.rounds is not None and t >= partition.round + partition.rounds


def _some(peers: frozenset[PeerId]) -> str:
    more = ", …" if len(peers) > 8 else ""
    return f"{len(peers)} peers ({', '.join(map(str, sorted(peers)[:8]))}{more})"
