"""A simulated clock, and what the run file's section ``time`` makes of it for each peer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from p2pfl import PeerId
from p2pfl.algorithms.base import Algorithm
from p2pfl.messaging.clock import Clock
from p2pfl.messaging.deadline import WaitPolicy
from p2pfl.models import architecture
from p2pfl.models.backbone import kept_random_states
from p2pfl.models.cost import Flops, flops
from p2pfl.run_file.run import Run
from p2pfl.run_file.time import Time
from p2pfl.session.build import RunData
from p2pfl.session.cost import CostMeter
from p2pfl.simulation.uptime import Uptime, uptimes
from p2pfl.simulation.virtual_loop import VirtualLoop


class SimulatedTime:
    """The clock of all peers, how fast they compute, and when they are up.

    Args:
        run: the run.
        data: returned by ``load_data``.
    """

    def __init__(self, run: Run, data: RunData) -> None:
        self.settings = run.file.time or Time()
        self.peers = run.peers
        self.loop = VirtualLoop(max_turns=math.inf, stall=math.inf)
        self.speeds = self.settings.devices.speeds(run.peers, run.seed)
        """FLOP per second of each peer."""
        self.uptimes = uptimes(self.settings.availability, run.peers, run.seed)
        self.latency = self.settings.network.latencies(run.peers, run.seed)
        """Returns the seconds from one peer to another."""
        self._wait_policy = run.file.transport.wait_policy
        self._whole_test_set = run.file.global_test
        self._architectures = [architecture(run.file.models.group, peer) for peer in range(run.peers)]
        self._flops = {name: _flops_of(name, run, data) for name in sorted(set(self._architectures))}
        """FLOP of each architecture on one sample."""

    def now(self) -> float:
        """Return the seconds since the start of the run."""
        return self.loop.time()

    def call_at(self, when: float, function: Callable[[], None]) -> None:
        """Call a function at a moment; never if that is infinite."""
        if when < math.inf:
            self.loop.call_at(when, function)

    def wait_policy(self, me: PeerId) -> WaitPolicy:
        """Return how long a peer waits for its neighbors."""
        return UptimePolicy(self._wait_policy, self.uptimes[me])

    def clock(self, algorithm: Algorithm[Any], meter: CostMeter) -> PeerClock:
        """Return the clock of the peer with this algorithm, whose real costs the meter measures."""
        me, data = algorithm.me, algorithm.data
        speed, each = self.speeds[me], self._flops[self._architectures[me]]
        evaluation = 0.0
        if self.settings.evaluation:
            samples = len(data.test) + (len(data.global_test) if self._whole_test_set else 0)
            evaluation = samples * each.forward / speed
        return PeerClock(algorithm, meter, self.loop, self.uptimes[me], each.training / speed, evaluation)


def _flops_of(name: str, run: Run, data: RunData) -> Flops:
    dataset, models = data[0], run.file.models
    with kept_random_states():
        width = models.features or models.group.features
        return flops(name, dataset.channels, dataset.size, dataset.classes, width)


class PeerClock(Clock):
    """The simulated time of one peer, which passes when it computes and when it waits.

    Computing is counted when it is done, and takes its time in the next ``settle``: before anything is sent, waited
    for or recorded. So what a peer sends after training leaves after training.

    Args:
        algorithm: counts the samples that it has trained on.
        meter: of its real costs, which are not those of others that compute while its time passes.
        loop: with the clock of all peers.
        uptime: of this peer.
        training: seconds of one sample in training.
        evaluation: seconds of one evaluation.
    """

    simulated = True

    def __init__(
        self,
        algorithm: Algorithm[Any],
        meter: CostMeter,
        loop: VirtualLoop,
        uptime: Uptime,
        training: float,
        evaluation: float,
    ) -> None:
        self._algorithm = algorithm
        self._meter = meter
        self._loop = loop
        self._uptime = uptime
        self._training = training
        self._evaluation = evaluation
        self._counted = 0
        """Trained samples that were counted."""
        self._evaluations = 0
        self._free_at = 0.0
        """When everything counted so far is computed."""

    def now(self) -> float:
        return self._loop.time()

    def evaluated(self) -> None:
        self._evaluations += 1

    async def settle(self) -> None:
        algorithm, now = self._algorithm, self._loop.time()
        training = (algorithm.trained_samples - self._counted) * self._training
        algorithm.training_seconds += training
        seconds = training + self._evaluations * self._evaluation
        self._counted, self._evaluations = algorithm.trained_samples, 0
        self._free_at = self._uptime.after(max(now, self._free_at), seconds)
        if self._free_at > now:  # several tasks of a method may wait for it
            free = self._loop.create_future()
            timer = self._loop.call_at(self._free_at, free.set_result, None)
            self._meter.end()
            try:
                await free
            finally:
                timer.cancel()
                self._meter.begin()


class UptimePolicy(WaitPolicy):
    """Counts only seconds in which the peer is up, as a process counts only those in which it is not suspended."""

    def __init__(self, policy: WaitPolicy, uptime: Uptime) -> None:
        super().__init__(policy.deadline, policy.adaptive, policy.quorum, policy.give_up)
        self._uptime = uptime

    def after(self, when: float, seconds: float) -> float:
        return self._uptime.after(when, seconds)
