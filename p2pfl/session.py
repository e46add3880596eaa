"""One peer's run from its first round to its last: build, round, evaluate, record, checkpoint.

The same session runs over any link: ``simulate`` drives many of them in one process, ``peers`` one per process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from time import perf_counter
from typing import Any, Protocol

import torch

from p2pfl import checkpoint, metrics, rng
from p2pfl.algorithms.base import Algorithm, Setting
from p2pfl.chaos import Faults, NoFaults
from p2pfl.config import Run
from p2pfl.data import Dataset, Share, open_dataset
from p2pfl.errors import DataError, ModelError, Unwritable, in_words
from p2pfl.memory import fitting
from p2pfl.metrics import RoundRecord, Totals
from p2pfl.models import Model, architecture, build
from p2pfl.net import Endpoint, Patience
from p2pfl.options import OptionErrors
from p2pfl.peerlog import details
from p2pfl.rng import Streams
from p2pfl.runfolder import FINAL, PeerFolder, PeerId, Phase, Result, Status, sync
from p2pfl.tensors import digest
from p2pfl.training import Evaluation, PeerData, evaluate, mean_of

STATUS_EVERY = 0.25
"""Seconds between two updates of the status file, at least: phases may last milliseconds."""


class Stopped(Exception):
    """The session was asked to stop; its last completed round is checkpointed."""


class Slot(Protocol):
    """Permission to compute, of which a host has only so many at a time."""

    async def acquire(self) -> None: ...

    def release(self) -> None: ...


class FreeSlot:
    """Always granted: within one process only one peer computes anyway."""

    async def acquire(self) -> None:
        return

    def release(self) -> None:
        return


def load_data(run: Run) -> tuple[Dataset, list[Share]]:
    """The run's images, mapped from this host's cache, and who gets which of them.

    Raises RunFileError: the dataset cannot be had, or not be partitioned like this.
    """
    data = run.file.data
    try:
        dataset = open_dataset(data.dataset.name, run.source, data.root, data.download)
    except DataError as error:
        raise run.blame("data.dataset", error) from None
    try:
        shares = run.partition.split(dataset.labelled, run.peers, run.seed)
    except DataError as error:
        raise run.blame("data.partition", error) from None
    if run.file.global_test and any(share.merged for share in shares):
        reason = DataError(
            f"partition {data.partition.name} deals out the test set too, so that peers train on it: "
            "there is nothing left for global_test"
        )
        raise run.blame("global_test", reason)
    without = [peer for peer, share in enumerate(shares) if not len(share.validation)]
    if run.algorithm.needs_validation and without:
        some = ", ".join(map(str, without[:5])) + (", …" if len(without) > 5 else "")
        reason = DataError(
            f"{run.algorithm.name} learns from validation samples, of which {len(without)} of {run.peers} peers have "
            f"none ({some}); hold out a part of the training samples, e.g. 0.2, that is one sample or more"
        )
        raise run.blame("data.partition.validation", reason)
    return dataset, shares


def make_algorithm(
    run: Run, me: PeerId, data: tuple[Dataset, Sequence[Share]], device: torch.device, streams: Streams
) -> Algorithm[Any]:
    """Peer ``me``'s model, samples and method as they are before round 0.

    Raises RunFileError: its model cannot take the dataset's images, or the method not the model.
    """
    dataset, shares = data
    augment = run.augmentation.build(dataset.channels, dataset.size, dataset.mirror)
    models = run.file.models

    def build_on_device(peer: PeerId) -> Model:
        size, classes = dataset.size, dataset.classes
        return build(models.name, peer, dataset.channels, size, classes, models.features).to(device)

    initialised = rng.torch_seeded(run.seed, "model") if run.algorithm.homogeneous else streams.torch("model")
    with initialised:
        try:
            model = build_on_device(me)
        except ModelError as error:
            raise run.blame("models.name", error) from None
    setting = Setting(
        me=me,
        peers=run.peers,
        seed=run.seed,
        model=model,
        data=PeerData(dataset, shares[me], augment, device),
        streams=streams,
        device=device,
        architectures=tuple(architecture(models.name, peer) for peer in range(run.peers)),
        build=build_on_device,
    )
    try:
        return run.algorithm(run.hyper, setting)
    except OptionErrors as errors:
        raise run.blame_options("algorithm", errors) from None


class Session:
    """One peer's run.

    Args:
        run: the run.
        me: this peer.
        run_id: id of the launch, equal on all peers.
        data: what ``load_data`` returned.
        folder: where the peer's files go; None keeps nothing.
        device: where the model lives.
        patience: how long one wait for a neighbour may last.
        slot: permission to compute.
        log: receives one line per event.
        pid: goes into the status file.
        on_round: told when a round is over.
        faults: injected on purpose.
    """

    def __init__(
        self,
        run: Run,
        me: PeerId,
        run_id: str,
        data: tuple[Dataset, Sequence[Share]],
        *,
        folder: PeerFolder | None = None,
        device: torch.device | None = None,
        patience: Patience | None = None,
        slot: Slot | None = None,
        log: logging.Logger | None = None,
        pid: int = 0,
        on_round: Callable[[PeerId, int], None] = lambda peer, t: None,
        faults: Faults | None = None,
    ) -> None:
        self.settings = run.file
        self.masked_test = run.masked_test
        self.me = me
        self.run_id = run_id
        self.folder = folder
        self.log = log or logging.getLogger("p2pfl.null")
        self.slot = slot or FreeSlot()
        self.on_round = on_round
        self.faults = faults or NoFaults()
        self.streams = Streams(run.seed, me)
        self.algorithm = make_algorithm(run, me, data, device or torch.device("cpu"), self.streams)
        self.algorithm.after_batch = self._after_batch
        self.endpoint = Endpoint(
            me,
            run.topology,
            run_id,
            run.seed,
            self.algorithm.layouts(),
            patience,
            self._idle,
            self.algorithm.stow,
            run.file.joins_at,
        )
        self.totals = Totals()
        self.status = Status(me, pid)
        self._status_written = -STATUS_EVERY
        self._last_status: Status | None = None
        self.rounds_done = run.file.joins_at.get(me, 0)
        self.personal: Evaluation | None = None
        self.whole: Evaluation | None = None
        self.measures: dict[str, Evaluation] = {}
        self.stopping = False
        self._current: asyncio.Future[None] | None = None
        self._queued = 0.0
        self._computing = False
        self._saved: dict[str, Any] | None = None
        self._resumed = False
        self._saved_on_disk = -1
        self._waits_for: Callable[[], list[PeerId]] = list

    # -- the loop

    async def run(self) -> Result:
        """All rounds that are left. Returns the result; it is also written to the folder.

        Raises Stopped after a request to stop (the last completed round is then on disk); whatever else goes
        wrong is raised after it was written down too, if it can be.
        """
        ticker = asyncio.create_task(self._keep_status())
        try:
            with fitting(self.me, self.algorithm.device, self.settings):
                return await self._live()
        except (Stopped, asyncio.CancelledError):
            raise
        except BaseException as error:
            with suppress(Exception):  # on a full disk, or without memory: what went wrong first is what counts
                self._end("failed", in_words(error))
            raise
        finally:
            ticker.cancel()
            self._release()

    async def _live(self) -> Result:
        try:
            if not self._resumed:
                self.resume()
            self._take_snapshot()
            while self.rounds_done < self.settings.rounds and not self.algorithm.finished:
                if self.stopping:
                    raise Stopped
                if self._catch_up():
                    continue
                self._current = asyncio.ensure_future(self._round(self.rounds_done))
                await self._current
            self._save(final=True)
            return self._end("finished")
        except (Stopped, asyncio.CancelledError):
            self._save()
            self._end("stopped")
            self.log.info("stopped after %d rounds; checkpointed", self.rounds_done)
            if self.stopping:
                raise Stopped from None
            raise

    def _catch_up(self) -> bool:
        """Leave out the rounds that the neighbours have done without us. False if there are none."""
        t = min(self.endpoint.next_round(self.rounds_done), self.settings.rounds)
        left_out = t - self.rounds_done
        if left_out == 0:
            return False
        self.log.warning(
            "the neighbours went on without us and are in round %d: rounds %d to %d are left out",
            *(t, self.rounds_done, t - 1),
        )
        self.endpoint.skip_to(t)
        self.totals.left_out += left_out
        self.rounds_done = t
        return True

    async def _round(self, t: int) -> None:
        began = perf_counter()
        self._queued = 0.0
        self._say("queued", t)
        await self._acquire()
        self._say("training", t)
        self.faults.begins(t)
        net = self.endpoint.begin(t)
        await self.endpoint.meet(t)
        sources, listeners = len(net.sources), len(net.listeners)
        await self.algorithm.round(t, net)
        await self.endpoint.finish(t)
        last = t + 1 == self.settings.rounds or self.algorithm.finished
        evaluating = perf_counter()
        due = last or (t + 1) % self.settings.eval_every == 0
        if due:
            self._say("evaluating", t)
            self._evaluate()
        now = perf_counter()
        record = RoundRecord(
            peer=self.me,
            t=t,
            loss=self.algorithm.meter.drain(),
            seconds={
                "training": self.algorithm.training_seconds,
                "waiting": self.endpoint.waited,
                "queued": self._queued,
                "evaluating": now - evaluating,
                "total": now - began,
            },
            out=self.endpoint.out,
            inn=self.endpoint.inn,
            missing=self.endpoint.missing,
            sources=sources,
            listeners=listeners,
            weights=self.algorithm.weights(),
            personal=self.personal if due else None,
            whole=self.whole if due else None,
            measures=self.measures if due else {},
            observed=self.algorithm.observations(),
        )
        self.endpoint.patience.took(now - began - self.endpoint.waited_in_vain)
        self.algorithm.training_seconds = 0.0
        self.rounds_done = t + 1
        self.totals.add(record)
        self._report(record)
        self._take_snapshot()
        if self.rounds_done % self.settings.checkpoint_every == 0:
            self._save()
        self.faults.ends(t)
        self.on_round(self.me, t)

    def _evaluate(self) -> None:
        data = self.algorithm.data
        self.personal = evaluate(self.algorithm.predict, data, data.test, masked=self.masked_test)
        if self.settings.global_test:
            self.whole = evaluate(self.algorithm.predict, data, data.everything)
        self.measures = {}
        parts: dict[str, list[Evaluation]] = {}
        for measure in self.algorithm.measures(self.settings.global_test):
            masked = self.masked_test and measure.samples is not data.everything
            evaluation = evaluate(measure.predict, data, measure.samples, masked=masked)
            if evaluation is not None:
                self.measures[measure.name] = evaluation
                if measure.part_of:
                    parts.setdefault(measure.part_of, []).append(evaluation)
        self.measures |= {name: mean_of(evaluations) for name, evaluations in parts.items()}

    # -- compute slots: held while computing, given up in every wait

    async def _acquire(self) -> None:
        if not self._computing:
            began = perf_counter()
            await self.slot.acquire()
            self._computing = True
            self._queued += perf_counter() - began

    def _release(self) -> None:
        if self._computing:
            self.slot.release()
            self._computing = False

    @asynccontextmanager
    async def _idle(self, waits_for: Callable[[], list[PeerId]]) -> AsyncIterator[None]:
        self._release()
        self._say("waiting", self.status.t, waits_for)
        yield
        self._say("queued", self.status.t)
        await self._acquire()
        self.faults.goes_on()
        self._say("training", self.status.t)

    async def _keep_status(self) -> None:
        """Keep the status file saying what this peer does, and whom it waits for, while its event loop turns."""
        while self.folder is not None:
            await asyncio.sleep(STATUS_EVERY)
            self._write_status()

    # -- stopping

    def stop(self) -> None:
        """Ask the session to stop after the current batch; ``interrupt`` must follow from the event loop."""
        self.stopping = True

    def interrupt(self) -> None:
        """End whatever the round waits for."""
        if self._current is not None:
            self._current.cancel()

    def _after_batch(self) -> None:
        self.faults.batch()
        self._write_status()
        if self.stopping:
            raise Stopped

    # -- state

    def _take_snapshot(self) -> None:
        """Remember the state between two rounds; it is what a stop in mid-round goes back to."""
        if self.folder is None:
            return
        self._saved = {
            "format": checkpoint.FORMAT,
            "run": self.run_id,
            "peer": self.me,
            "rounds_done": self.rounds_done,
            "finished": self.algorithm.finished,
            "algorithm": checkpoint.snapshot(self.algorithm.state_dict()),
            "streams": checkpoint.snapshot(self.streams.state_dict()),
            "endpoint": self.endpoint.state_dict(),
            "totals": checkpoint.snapshot(asdict(self.totals)),
        }

    def _save(self, *, final: bool = False) -> None:
        """Write a checkpoint, if the last one is not of this round.

        ``final``: there will be no other one, and neighbours will be gone: let both copies be of this round.
        """
        if self.folder is None or self._saved is None:
            return
        done = self._saved["rounds_done"]
        while self._saved_on_disk < done or (final and self.endpoint.durable < done):
            # Not the newest one's round: should that be damaged, we need again what came since the one before.
            self.endpoint.durable = max(0, self._saved_on_disk)
            sync(self.folder.metrics)  # whoever goes on from here writes these records no more; its name comes along
            checkpoint.save(self.folder.checkpoint, {**self._saved, "durable": self.endpoint.durable})
            self._saved_on_disk = done
            self.endpoint.link.checkpointed(self.endpoint.durable)
            self.log.debug("checkpoint after round %d", done - 1)

    def resume(self) -> None:
        """Go back to the last checkpoint that can be used, if there is one.

        To be called before the endpoint's link starts, or else ``run`` does it. Raises CheckpointError.
        """
        self._resumed = True
        if self.folder is None:
            return
        self.folder.clear_result()
        saved = checkpoint.load(self.folder.checkpoint, self.run_id, self.me, self.log)
        if saved is None:
            metrics.keep_before(self.folder.metrics, 0)
            return
        self.algorithm.load_state_dict(saved["algorithm"])
        self.algorithm.finished = saved["finished"]
        self.streams.load_state_dict(saved["streams"])
        self.endpoint.load_state_dict(saved["endpoint"])
        self.totals = Totals(**saved["totals"])
        self.rounds_done = self._saved_on_disk = self.endpoint.t = saved["rounds_done"]
        self.endpoint.durable = saved["durable"]
        self._evaluate()
        metrics.keep_before(self.folder.metrics, self.rounds_done)
        self.log.info("resumed after round %d", self.rounds_done - 1)

    # -- records

    def _say(self, phase: Phase, t: int, waits_for: Callable[[], list[PeerId]] = list) -> None:
        self.status.phase = phase
        self.status.t = t
        self.status.rounds_done = self.rounds_done
        self._waits_for = waits_for
        self.status.accuracy = self.personal.accuracy if self.personal else None
        self.status.bytes_out = self.totals.bytes_out()
        self.status.bytes_in = self.totals.bytes_in()
        self._write_status(now=phase in FINAL)

    def _write_status(self, now: bool = False) -> None:
        due = self._status_written + STATUS_EVERY
        if self.folder is None or not (now or perf_counter() >= due):
            return
        self.status.waiting_for = self._waits_for()
        if (written := replace(self.status)) != self._last_status:
            self._status_written = perf_counter()
            with suppress(Unwritable):  # it is for those who look on; it is written again when it changes
                self.folder.write_status(written)
                self._last_status = written

    def _report(self, record: RoundRecord) -> None:
        if self.folder is not None:
            metrics.append(self.folder.metrics, record)
        parts = [f"round {record.t}"]
        if record.personal is not None:
            parts.append(f"accuracy {record.personal.accuracy:.2%} (best {self.totals.best:.2%})")
        seconds = record.seconds
        parts.append(f"train {seconds['training']:.2f} s, wait {seconds['waiting']:.2f} s")
        more = []
        if record.loss:
            more.append(" ".join(f"{name} {value:.4f}" for name, value in record.loss.items()))
        if record.sources or record.listeners:
            more.append(f"heard by {record.listeners}, hears {record.sources}")
        if record.weights:
            largest = sorted(record.weights.items(), key=lambda item: -item[1])[:4]
            more.append("largest weights " + " ".join(f"{j}:{w:.3f}" for j, w in largest))
        if record.out:
            out = sum(entry[1] + entry[2] for kinds in record.out.values() for entry in kinds.values())
            count = sum(entry[0] for kinds in record.out.values() for entry in kinds.values())
            more.append(f"sent {out} B in {count} message{'s' * (count != 1)}")
        self.log.info(" | ".join(parts), extra=details(*more))
        for kind, absent in record.missing.items():
            self.log.warning("round %d: no %s from %s", record.t, kind, ", ".join(map(str, absent)))
        for kind, senders in self.endpoint.spoilt.items():
            self.log.warning("round %d: NaN or infinity in %s from %s", record.t, kind, ", ".join(map(str, senders)))

    def _end(self, phase: Phase, error: str = "") -> Result:
        keyed = partial(_by_name, self.totals)
        weights = self.algorithm.weights()
        state = self.algorithm.state_dict()
        if phase == "stopped" and self._saved is not None:
            state = self._saved["algorithm"]  # what was done since then is given up
        result = Result(
            peer=self.me,
            phase=phase,
            rounds_done=self.rounds_done,
            digest=digest(state),
            model=self.algorithm.model.name,
            group=self.algorithm.data.group,
            accuracy=self.personal.accuracy if self.personal else None,
            loss=self.personal.loss if self.personal else None,
            correct=self.personal.correct if self.personal else 0,
            samples=self.personal.samples if self.personal else 0,
            global_accuracy=self.whole.accuracy if self.whole else None,
            measures={name: evaluation.accuracy for name, evaluation in self.measures.items()},
            best=self.totals.best,
            best_round=self.totals.best_round,
            out=keyed("out"),
            inn=keyed("inn"),
            weights=None if weights is None else {str(j): w for j, w in weights.items()},
            missing=self.totals.missing,
            left_out=self.totals.left_out,
            seconds=self.totals.seconds,
            error=error,
        )
        if self.folder is not None:
            self.folder.write_result(result)  # before the status: without it nobody has finished
        self.status.error = error
        self._say(phase, max(0, self.rounds_done - 1))
        return result


def _by_name(totals: Totals, which: str) -> dict[str, dict[str, list[int]]]:
    counts = getattr(totals, which)
    return {str(neighbor): counts[neighbor] for neighbor in sorted(counts)}


__all__ = ["FreeSlot", "Session", "Slot", "Stopped", "load_data", "make_algorithm"]
