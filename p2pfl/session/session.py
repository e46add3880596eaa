"""One peer's run from its first round to its last: the round loop, evaluation, records and checkpoints.

The same session runs over any link: ``simulate`` drives many sessions in one process, ``peers`` one per process.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch

from p2pfl import PeerId
from p2pfl.algorithms.base import Algorithm
from p2pfl.errors import PluginError, error_text
from p2pfl.learning.cuda_graph import CapturedGradients
from p2pfl.messaging.clock import Clock
from p2pfl.messaging.conversation import Conversation
from p2pfl.messaging.deadline import WaitPolicy
from p2pfl.messaging.endpoint import Endpoint
from p2pfl.messaging.journal import BodyStore
from p2pfl.messaging.neighborhood import Neighborhood
from p2pfl.plugins.loading import naming_lines
from p2pfl.rng import Streams
from p2pfl.run_file.faults import Faults
from p2pfl.run_file.run import Run
from p2pfl.run_folder.folder import PeerFolder, Phase, Result, Status
from p2pfl.session import checkpoint, metrics
from p2pfl.session.build import RunData, has_models_of_users, make_algorithm
from p2pfl.session.checkpoint_copies import CheckpointCopies
from p2pfl.session.compute_slot import FreeSlot, HeldSlot, Slot
from p2pfl.session.cost import CostMeter
from p2pfl.session.evaluation import Evaluations, evaluate_algorithm
from p2pfl.session.method_results import diagnostics_of, layouts_of, weights_of
from p2pfl.session.metrics import RoundRecord, Totals
from p2pfl.session.order import make_mailbox
from p2pfl.session.out_of_memory import memory_errors
from p2pfl.session.pipelines import make_pipeline
from p2pfl.session.reporting import StatusFile, log_diverged_loss, log_round, log_rule, make_result
from p2pfl.session.saving import Saver, load, unstorable
from p2pfl.session.screening import net_of
from p2pfl.session.training_errors import naming_batches
from p2pfl.tensors import digest


class Stopped(BaseException):
    """The session was asked to stop; the last state that it kept is checkpointed.

    Raised by a signal anywhere, also while a checkpoint is read: no handler of errors must take it for one.
    """


@dataclass(frozen=True)
class Runtime:
    """What a process gives to the sessions that it runs.

    Attributes:
        device: where models live.
        wait_policy: limits of a wait for a neighbor; default: none.
        slot: permission to compute, held while computing and released in every wait.
        log: receives one line per event.
        alone: the process runs no other peer; what it costs is this peer's.
        on_round: called after each round with the peer and the round.
        store: holds what was sent until no neighbor can ask for it; default: memory.
        clock: returns the clock of a peer with this algorithm and meter of costs; default: real time. If it is
            simulated, the peer writes no checkpoints: threads would write them, and lack what is in transit.
    """

    device: torch.device = torch.device("cpu")
    wait_policy: WaitPolicy | None = None
    slot: Slot = FreeSlot()
    log: logging.Logger = logging.getLogger("p2pfl.null")
    alone: bool = False
    on_round: Callable[[PeerId, int], None] = lambda peer, t: None
    store: BodyStore | None = None
    clock: Callable[[Algorithm[Any], CostMeter], Clock] = lambda algorithm, meter: Clock()


class Session:
    """One peer's run.

    Args:
        run: the run.
        me: this peer.
        run_id: id of the launch, equal on all peers.
        data: returned by ``load_data``.
        folder: the peer's files; None writes none.
        runtime: what the process gives.
    """

    def __init__(
        self,
        run: Run,
        me: PeerId,
        run_id: str,
        data: RunData,
        folder: PeerFolder | None = None,
        runtime: Runtime = Runtime(),
    ) -> None:
        self.settings, self._rules = run.file, run.rules
        self.me, self.run_id, self.folder = me, run_id, folder
        self.log, self.on_round = runtime.log, runtime.on_round
        self.faults = Faults()
        """Fault injector."""
        self.streams = Streams(run.seed, me)
        self.algorithm = make_algorithm(run, me, data, runtime.device, self.streams)
        self.algorithm.after_batch = self._after_batch
        meter = CostMeter(alone=runtime.alone, device=runtime.device, peers=run.peers)
        self.clock = runtime.clock(self.algorithm, meter)
        self.algorithm.now = self.clock.now
        self.slot = HeldSlot(runtime.slot, meter, self.clock.now)
        if run.file.gpu.cuda_graphs and runtime.device.type == "cuda" and not has_models_of_users(run):
            self.algorithm.captured = CapturedGradients(self.log)
        layouts = layouts_of(self.algorithm)
        conversation = Conversation(layouts, self.algorithm.prunes, self.algorithm.on_receive)
        place = Neighborhood(me, run.topology, run.schedule, run.file.joins_at)
        self.endpoint = Endpoint(
            place,
            run_id,
            conversation,
            runtime.wait_policy,
            self._idle,
            runtime.store,
            make_pipeline(run, place, layouts, self.streams, self.algorithm),
            make_mailbox(place.neighbors, run.file.synchrony.bound, conversation.once, folder, self.log),
        )
        self.endpoint.outcomes, self.endpoint.waits.clock = self.algorithm.outcomes, self.clock
        self.totals = Totals()
        self.status = Status(me, os.getpid(), tested_on=asdict(self.algorithm.data.tested_on))
        self.status_file = StatusFile(self.status, folder, run.peers, self._queues, live=not self.clock.simulated)
        self.rounds_done = run.file.joins_at.get(me, 0)
        self.evaluations = Evaluations()
        self._recorded = -1
        """Round of the last record."""
        self._loss_diverged = False  # the log has a warning of it, which later rounds do not repeat
        self.stopping = False
        self._current: asyncio.Future[None] | None = None
        every, url = self.settings.checkpoint_every, self.settings.checkpoint_copies
        kept_in = None if self.clock.simulated else folder
        self._copies = None if kept_in is None or url is None else CheckpointCopies(url, run_id, kept_in, self.log)
        self.saver = None if kept_in is None else Saver(kept_in, self.endpoint, every, me, self.log, self._copies)
        self._resumed = False
        self._began = self.clock.now()
        self._elapsed_before = 0.0
        """Seconds that earlier processes of this peer have taken."""

    # -- the loop

    async def run(self) -> Result:
        """Run all remaining rounds; write the result to the folder too. It is "failed" if every round was discarded.

        Raises:
            Stopped: on request; the last state that was kept is on disk.
        """
        status_updates = asyncio.create_task(self.status_file.keep_current())
        try:
            with self._located_errors():
                return await self._run_rounds()
        except (Stopped, asyncio.CancelledError):
            raise
        except BaseException as error:
            with suppress(Exception):  # with a full disk or no memory, only the original error matters
                self._end("failed", error_text(error))
            raise
        finally:
            status_updates.cancel()
            self.slot.release()
            if self.saver is not None:
                self.saver.close()

    @contextmanager
    def _located_errors(self) -> Iterator[None]:
        device = self.algorithm.device
        with naming_lines(), memory_errors(self.me, device, self.settings), naming_batches(self.algorithm):
            yield

    async def _located_round(self, t: int) -> None:
        """Run a round. Its errors are located here: a SystemExit that leaves a task ends the event loop."""
        try:
            with self._located_errors():
                await self._round(t)
        except PluginError as error:
            raise error.during(f"round {t}") from error.__cause__

    async def _run_rounds(self) -> Result:
        try:
            if not self._resumed:
                self.resume()
            log_rule(self.log, self._rules, self.algorithm.aggregation, self.endpoint.neighborhood, self.rounds_done)
            self._began = self.clock.now()
            self.slot.meter.drain()
            self.endpoint.open(self.rounds_done)
            self._take_snapshot()
            while self.rounds_done < self.settings.rounds and not self.algorithm.finished:
                if self.stopping:
                    self._take_snapshot()
                    raise Stopped
                if self._catch_up():
                    continue
                self._current = asyncio.ensure_future(self._located_round(self.rounds_done))
                await self._current
            await self._finish_saving(final=True)
            return self._end(*self.totals.ended())
        except (Stopped, asyncio.CancelledError):
            await self._finish_saving(final=False)
            saved = None if self.saver is None or self.saver.kept < 0 else self.saver.read()
            if saved is not None:
                self._adopt(saved)
            self._end("stopped", saved=saved)
            self.log.info("stopped rounds_done=%d", self.rounds_done)
            if self.stopping:
                raise Stopped from None
            raise

    async def _finish_saving(self, *, final: bool) -> None:
        self.slot.release()
        if self.saver is not None:
            if final and self.saver.kept < self.rounds_done:  # the last rounds were skipped
                self._take_snapshot()
            await self.saver.finish(final=final)

    def _catch_up(self) -> bool:
        """Skip the rounds that the neighbors completed without this peer. Returns False if there are none."""
        t = min(self.endpoint.next_round(self.rounds_done), self.settings.rounds)
        skipped = t - self.rounds_done
        if skipped == 0:
            return False
        self.log.warning(
            "skipped rounds t=%d..%d: the neighbors continued without this peer", self.rounds_done, t - 1
        )
        self.endpoint.open(t)
        self.totals.skipped_rounds += skipped
        self.rounds_done = t
        if t == self.settings.rounds:  # the last round that this peer has computed need not have been evaluated
            computed = max(0, self._recorded)
            self._enter("evaluating", computed)
            self._evaluate()
            self.totals.note_accuracy(self.evaluations.personal, computed)
        return True

    async def _round(self, t: int) -> None:
        began = self.clock.now()
        self.slot.queued = 0.0
        self._enter("queued", t)
        await self.slot.acquire()
        self._enter("training", t)
        self.faults.begins(t)
        self.endpoint.begin(t)
        net = net_of(self.algorithm, self.endpoint, t, self.settings.seed)
        await self.endpoint.await_start(t)
        sources = len(net.sources)
        self.algorithm.aggregation.t, self.algorithm.aggregation.ages = t, self.endpoint.taken_ages
        await self.algorithm.round(t, net)
        await self.clock.settle()
        receivers = len(net.receivers) if self.endpoint.knows_receivers else None
        self.endpoint.finish(t)
        last = t + 1 == self.settings.rounds or self.algorithm.finished
        evaluating = self.clock.now()
        due = last or (t + 1) % self.settings.eval_every == 0
        if due:
            self._enter("evaluating", t)
            self._evaluate()
            await self.clock.settle()
        now = self.clock.now()
        record = RoundRecord(
            peer=self.me,
            t=t,
            loss=self.algorithm.meter.drain(),
            seconds={
                "training": self.algorithm.training_seconds,
                "waiting": self.endpoint.waits.seconds,
                "sending": self.endpoint.sending,
                "queued": self.slot.queued,
                "evaluating": now - evaluating,
                "total": now - began,
            },
            elapsed=self._elapsed_before + now - self._began,
            cost=self.slot.meter.drain(),
            sent=self.endpoint.sent,
            received=self.endpoint.received,
            missing=self.endpoint.missing,
            sources=sources,
            receivers=receivers,
            combined=self.algorithm.aggregation.measured(),
            ages={} if self.endpoint.waits_for_rounds else self.endpoint.taken_ages,
            weights=weights_of(self.algorithm),
            evaluations=self.evaluations if due else Evaluations(),
            diagnostics=diagnostics_of(self.algorithm),
            outcomes=self.algorithm.outcomes.drain(),
        )
        self.endpoint.waits.policy.took(now - began - self.endpoint.waits.wasted)
        self.algorithm.training_seconds = 0.0
        self.rounds_done = t + 1
        self.totals.add(record)
        if self.folder is not None:
            metrics.append(self.folder.metrics, record)
        self._recorded = t
        log_round(self.log, record, self.totals.best, self.endpoint.nonfinite)
        if not self._loss_diverged:
            self._loss_diverged = log_diverged_loss(self.log, record)
        if self.saver is not None:
            due = self.saver.is_due(self.rounds_done)
            if due or self.saver.is_stale():
                self._take_snapshot()
            if due:
                async with self._idle(list):
                    await self.saver.begin()
        self.faults.ends(t)
        self.on_round(self.me, t)
        self.slot.meter.end()  # the slot is kept, but in one process, other peers compute before the next round

    def _evaluate(self) -> None:
        self.evaluations = evaluate_algorithm(
            self.algorithm,
            masked=self.settings.masked_test,
            whole=self.settings.global_test,
            metrics=self.settings.metrics,
        )
        self.clock.evaluated()

    @asynccontextmanager
    async def _idle(self, waits_for: Callable[[], list[PeerId]]) -> AsyncIterator[None]:
        """Release the compute slot during a wait for neighbors."""
        with self.slot.released():
            self._enter("waiting", self.status.t, waits_for)
            yield
        self._enter("queued", self.status.t)
        await self.slot.take_back()
        self.faults.wait_ended()
        self._enter("training", self.status.t)

    def _enter(self, phase: Phase, t: int, waits_for: Callable[[], list[PeerId]] = list) -> None:
        self.status_file.enter(phase, t, self.rounds_done, self.evaluations, self.totals, waits_for)

    def _queues(self) -> tuple[int, int]:
        return self.endpoint.mailbox.unread, self.endpoint.link.undelivered()

    def _end(self, phase: Phase, error: str = "", saved: checkpoint.PeerState | None = None) -> Result:
        result = make_result(
            self.algorithm,
            phase,
            error,
            rounds_done=self.rounds_done,
            digest=digest(saved["algorithm"] if saved else self.algorithm.state_dict()),
            evaluations=self.evaluations,
            totals=self.totals,
            dropped=self.endpoint.dropped,
            expired=self.endpoint.mailbox.expired,
        )
        if self.folder is not None:
            self.folder.write_result(result)  # before the final status, which implies that there is a result
        self.status.error = error
        self._enter(phase, max(0, self.rounds_done - 1))
        return result

    # -- stopping

    def stop(self) -> None:
        """Ask the session to stop after the current batch; ``interrupt`` must follow from the event loop."""
        self.stopping = True

    def interrupt(self) -> None:
        """Cancel the current round's wait."""
        if self._current is not None:
            self._current.cancel()

    def _after_batch(self) -> None:
        self.faults.batch()
        self.status_file.write()
        if self.stopping:
            raise Stopped

    # -- checkpoints

    def _take_snapshot(self) -> None:
        """Keep the state between two rounds; a stop during a round rolls back to it."""
        if self.saver is None:
            return
        state = self.algorithm.state_dict()
        try:
            self.saver.keep(
                {
                    "format": checkpoint.FORMAT,
                    "run": self.run_id,
                    "peer": self.me,
                    "rounds_done": self.rounds_done,
                    "finished": bool(self.algorithm.finished),
                    "algorithm": state,
                    "streams": self.streams.state_dict(),
                    "endpoint": self.endpoint.state_dict(),
                    "totals": self.totals.state_dict(),  # copied by ``keep``, like everything else
                    "evaluations": self.evaluations.state_dict(),
                    "recorded": self._recorded,
                }
            )
        except checkpoint.Unstorable as error:
            raise unstorable(error, state, self.algorithm, self.rounds_done) from None

    def resume(self) -> None:
        """Restore the last usable checkpoint, if there is one.

        Call it before the endpoint's link starts; otherwise ``run`` calls it. Raises CheckpointError.
        """
        self._resumed = True
        if self.folder is None:
            return
        self.folder.clear_result()
        last = self.folder.status()
        if last is not None:
            self.status.resumes = last.resumes_at_start()
        self.status.starts = 1 + (last.starts if last is not None and type(last.starts) is int else 0)
        saved = None if self.saver is None else load(self.folder, self.endpoint, self.run_id, self.log, self._copies)
        if saved is None or self.saver is None:
            self._elapsed_before = metrics.truncate(self.folder.metrics, 0, self.log)
            return
        self.algorithm.load_state_dict(saved["algorithm"])
        self.algorithm.finished = saved["finished"]
        self.streams.load_state_dict(saved["streams"])
        self._adopt(saved)
        self.saver.saved = self.rounds_done
        self._elapsed_before = metrics.truncate(self.folder.metrics, self.rounds_done, self.log, self._recorded)
        self.log.info("resumed t=%d", self.rounds_done)

    def _adopt(self, saved: checkpoint.PeerState) -> None:
        self.totals = Totals.from_state_dict(saved["totals"])
        self._recorded = saved["recorded"]
        self.rounds_done = saved["rounds_done"]
        self.evaluations = Evaluations.from_state_dict(saved["evaluations"])
