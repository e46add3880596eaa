"""Simulates the schedule of one seed over the project's real code."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from random import Random
from tempfile import TemporaryFile
from typing import Any
from unittest.mock import patch

from p2pfl import PeerId
from p2pfl.errors import P2pflError
from p2pfl.messaging import clock, edge, schema
from p2pfl.rng import Streams
from p2pfl.run_file.run import Run
from p2pfl.run_folder import files
from p2pfl.run_folder.folder import Result
from p2pfl.session import checkpoint, cost, metrics, order, reporting, saving, session
from peers import link_context
from tests.simulation import disk as disks
from tests.simulation.algorithm import DigestAlgorithm
from tests.simulation.mesh import Mesh
from tests.simulation.reference import reference_results
from tests.simulation.schedule import FOREVER, Schedule, asynchronous, draw, with_time_varying_graph


@dataclass
class Outcome:
    """How the run of one schedule ended.

    Attributes:
        counts: faults and their consequences, by kind.
        seconds: virtual time.
        results: how each finished peer ended.
    """

    seed: int
    schedule: Schedule
    violations: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    trace: list[str] = field(default_factory=list)
    results: dict[PeerId, Result] = field(default_factory=dict)

    @property
    def trace_digest(self) -> str:
        return hashlib.sha256("\n".join(self.trace).encode()).hexdigest()


def run_schedule(seed: int, *, time_varying: bool = False, without_waits: bool = False) -> Outcome:
    """Draw the schedule of a seed and run it.

    Args:
        time_varying: with another graph in every round.
        without_waits: rounds do not wait for one another; the fault-free run then is a replay, made at the end.
    """
    random = Random(seed)
    schedule = draw(random)
    if time_varying:
        schedule = with_time_varying_graph(schedule, seed)
    if without_waits:
        schedule = asynchronous(schedule, seed)
    with _simulated():
        outcome = Outcome(seed, schedule)
        try:
            expected = reference_results(schedule) if schedule.waits_forever and not without_waits else None
        except P2pflError as error:
            outcome.violations.append(f"the fault-free run fails: {error}")
        else:
            Mesh(outcome, random, expected).execute()
    return outcome


@contextmanager
def _simulated() -> Iterator[None]:
    """Replace what the session uses of the outside world, apart from its link."""

    def method(run: Run, me: PeerId, host: Any, device: Any, streams: Streams) -> DigestAlgorithm:
        return DigestAlgorithm(host, me, streams)

    def now() -> float:
        return asyncio.get_running_loop().time()

    with ExitStack() as stack:
        for module, name, value in (
            (session, "make_algorithm", method),
            *((module, "perf_counter", now) for module in (clock, saving, reporting)),
            *((cost, name, now) for name in ("perf_counter", "process_time")),
            (reporting, "STATUS_EVERY", FOREVER),
            (edge, "BY_VALUE", 0),
            (edge, "CHUNK", 8),
            (schema, "MAX_HEADER", 256),  # so that windows close, as does the next line
            (link_context, "MIN_BUDGET", 0),
            (checkpoint, "NewFile", disks.NewFile),
            (checkpoint, "TemporaryFile", lambda **options: TemporaryFile()),  # noqa: SIM115
            (files, "NewFile", disks.NewFile),
            (metrics, "append_line", disks.append_line),
            (order, "append_line", disks.append_line),
            (saving, "sync", disks.sync),
            (saving, "on_thread", disks.on_thread),
        ):
            stack.enter_context(patch.object(module, name, value))
        yield
