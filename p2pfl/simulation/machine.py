"""The machine of a virtual run (simulation/virtual.py): hosts, network, and what messages and peers cost on them.

It is a YAML file of the keys of ``Machine``, each optional. Seconds of computing that it does not give are measured
here, on one peer of each architecture; cores, memory and limits default to what this host and this process's control
groups allow. The other defaults are rounded from docs/benchmarks.md: two cores, small models, a fast network.
"""

from __future__ import annotations

import resource
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median_high
from time import process_time
from typing import Any

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError

from p2pfl.algorithms.base import Algorithm
from p2pfl.control_groups import control_groups, total_memory, usable_cores
from p2pfl.errors import Problem, RunFileError
from p2pfl.options import Section, explain
from p2pfl.run_file.yaml_source import Source

BATCHES, WARM_UP = 5, 2
"""Batches that are timed, and batches before them that are not."""

Seconds = NonNegativeFloat | dict[str, NonNegativeFloat]


def _descriptors() -> int:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if most == resource.RLIM_INFINITY else most


def _tasks() -> int:
    found = [Path("/proc/sys/kernel", name) for name in ("pid_max", "threads-max")]
    found += [group / "pids.max" for group in control_groups(Path("/"), "pids")]
    limits = []
    for file in found:
        with suppress(OSError, ValueError):  # no such file, or "max"
            limits.append(int(file.read_text()))
    return min(limits)


class Machine(Section):
    """The hosts and the network of a virtual run. Seconds of CPU are of one core."""

    hosts: PositiveInt = 1
    """Hosts; the peers are divided among them in blocks of equal size."""
    cores: PositiveInt = Field(default_factory=usable_cores)
    """Cores of a host; default: this one's."""
    memory: PositiveFloat = Field(default_factory=total_memory)
    """Bytes of a host; default: this one's."""
    descriptors: PositiveInt = Field(default_factory=_descriptors)
    """Open files that a process may have, the hard limit; default: this host's."""
    tasks: PositiveInt = Field(default_factory=_tasks)
    """Processes and threads that a host may have; default: this one's."""

    training_seconds: Seconds | None = None
    """Seconds of CPU of a training batch, or {architecture: seconds}; default: measured."""
    evaluation_seconds: Seconds | None = None
    """Seconds of CPU of one test sample, or {architecture: seconds}; default: measured."""
    round_seconds: NonNegativeFloat = 0.004
    """Seconds of CPU of a round apart from training, evaluation and messages."""
    waiting_cpu: NonNegativeFloat = 0.002
    """Fraction of a core that a peer uses even while it waits: heartbeats, checks of connections."""

    send_seconds: NonNegativeFloat = 0.0005
    """Seconds of CPU to send a message to one receiver."""
    receive_seconds: NonNegativeFloat = 0.0005
    """Seconds of CPU to receive a message."""
    write_seconds_per_byte: NonNegativeFloat = 1e-9
    """Seconds of CPU to write a body into the journal, once for all receivers."""
    send_seconds_per_byte: NonNegativeFloat = 5e-10
    """Seconds of CPU to send to a receiver on another host."""
    receive_seconds_per_byte: NonNegativeFloat = 5e-10
    """Seconds of CPU to receive from another host."""
    local_seconds_per_byte: NonNegativeFloat = 2e-10
    """Seconds of CPU to receive from the same host, through the journal's files."""

    latency_within: NonNegativeFloat = 0.0002
    """Seconds from a peer to another on the same host."""
    latency_between: NonNegativeFloat = 0.0005
    """Seconds from a host to another."""
    bandwidth_between: PositiveFloat = 1.25e8
    """Bytes per second that a host can send to others."""
    journal_rate: PositiveFloat = 1e9
    """Bytes per second that a host can write into journals."""

    host_memory: NonNegativeFloat = 4e8
    """Bytes of a host that its peers share: libraries, the warm process, data."""
    peer_memory: NonNegativeFloat = 1.7e7
    """Bytes of a peer besides its model and neighbors."""
    model_copies: NonNegativeFloat = 2.0
    """Bytes of a peer, as a multiple of its model's: parameters, gradients and the state of the optimizer."""
    neighbor_memory: NonNegativeFloat = 1e5
    """Bytes of a peer for each neighbor."""
    peer_descriptors: NonNegativeInt = 35
    """Open files of a peer without neighbors."""
    neighbor_descriptors: NonNegativeInt = 5
    """Open files for each neighbor."""
    peer_tasks: PositiveInt = 9
    """Processes and threads of a peer that computes with one thread."""
    neighbor_connections: NonNegativeInt = 2
    """Connections for each neighbor: one for each direction."""
    peer_files: NonNegativeInt = 8
    """Files of a peer in the run folder at the end, without its journal."""

    start_seconds: NonNegativeFloat = 3.0
    """Seconds until a host starts its first peer."""
    peer_start_seconds: NonNegativeFloat = 0.15
    """Seconds of CPU to start a peer."""

    slow: dict[NonNegativeInt, PositiveFloat] = Field(default={})
    """{peer: factor}: peers whose computing takes longer, besides the run file's stragglers."""
    dies: dict[NonNegativeInt, NonNegativeInt] = Field(default={})
    """{peer: round}: peers that crash at the beginning of a round and do not come back."""

    def host_of(self, peer: int, peers: int) -> int:
        return peer * self.hosts // peers


def load(path: Path, peers: int) -> Machine:
    """Read and check a machine's file. Raises RunFileError, with all problems found."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise RunFileError([Problem(str(path), "", f"cannot be read: {reason}")]) from None
    source = Source(str(path))
    tree = source.read(text)
    if not isinstance(tree, dict | None):
        raise RunFileError([Problem(str(path), "", "not a mapping; expected keys such as hosts and cores")])
    try:
        machine = Machine.model_validate(tree or {})
    except ValidationError as error:
        raise source.error(explain(error, lambda path: tuple(Machine.model_fields))) from None
    problems = [
        source.locate((key, peer), f"no peer {peer}; the {peers} peers are 0 to {peers - 1}")
        for key in ("slow", "dies")
        for peer in getattr(machine, key)
        if peer >= peers
    ]
    if machine.hosts > peers:
        problems.append(source.locate(("hosts",), f"{machine.hosts}, but there are only {peers} peers"))
    if problems:
        raise RunFileError(problems)
    return machine


@dataclass(frozen=True)
class Computing:
    """Seconds of CPU of an architecture.

    Attributes:
        batch: of a training batch.
        sample: of the evaluation of a test sample.
        measured: whether one of them was measured on this host.
    """

    batch: float
    sample: float
    measured: bool


def computing(machine: Machine, algorithm: Algorithm[Any]) -> Computing:
    """Return what a peer's computations take: as the machine says, or as measured on this host.

    The measurement trains ``algorithm``.
    """

    def given(seconds: Seconds | None) -> float | None:
        return seconds.get(algorithm.model.name) if isinstance(seconds, Mapping) else seconds

    batch, sample = given(machine.training_seconds), given(machine.evaluation_seconds)
    measured = batch is None or sample is None
    return Computing(
        _seconds_of_batch(algorithm) if batch is None else batch,
        _seconds_of_sample(algorithm) if sample is None else sample,
        measured,
    )


def _seconds_of_batch(algorithm: Algorithm[Any]) -> float:
    hyper = algorithm.hyper
    if not hasattr(algorithm, "optimizer"):  # some methods create one in each round
        algorithm.optimizer = hyper.make_optimizer(algorithm.model.parameters())
    began: list[float] = []
    algorithm.after_batch = lambda: began.append(process_time() / torch.get_num_threads())
    try:
        algorithm.train(steps=WARM_UP + BATCHES, batch=hyper.batch)
    finally:
        algorithm.after_batch = lambda: None
    # ``dry_round`` counts each trained model, so that a given ``training_seconds`` is of one.
    return _median_step(began[WARM_UP - 1 :]) / algorithm.trained_models


def _median_step(times: list[float]) -> float:
    steps = [later - earlier for earlier, later in pairwise(times)]
    return median_high(steps) if steps else 0.0


@torch.no_grad()
def _seconds_of_sample(algorithm: Algorithm[Any]) -> float:
    data = algorithm.data

    def sweep() -> float:
        began = process_time() / torch.get_num_threads()
        for x, _ in data.sweep(data.test):
            algorithm.predict(x)
        return process_time() / torch.get_num_threads() - began

    if not len(data.test):
        return 0.0
    sweep()  # the first one allocates
    return min(sweep() for _ in range(3)) / len(data.test)
