"""Sessions: records, stopping and resuming, compute slots."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from p2pfl.algorithms.local import Local
from p2pfl.errors import CheckpointError, ModelError
from p2pfl.learning.evaluation import ExtraMetric
from p2pfl.learning.peer_data import Samples
from p2pfl.messaging.endpoint import Endpoint
from p2pfl.messaging.net import Net
from p2pfl.run_file.run import Run
from p2pfl.run_folder.folder import Result, RunFolder
from p2pfl.session import checkpoint, metrics
from p2pfl.session.compute_slot import HeldSlot
from p2pfl.session.scoring import evaluate_run
from p2pfl.session.session import Session
from p2pfl.simulation.simulate import simulate
from tests.sessions import in_process

RECORD = {
    "peer": int,
    "t": int,
    "loss": dict,
    "seconds": dict,
    "elapsed": float,
    "cost": dict,
    "sent": dict,
    "received": dict,
    "missing": dict,
    "sources": int,
    "receivers": int,
    "weights": dict | None,
    "personal": dict | None,
    "global": dict | None,
    "extra_metrics": dict,
    "diagnostics": dict,
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: Any, make_run: Any, prepare: Any) -> tuple[RunFolder, list[Result]]:
    """A run of 5 rounds, evaluated every two rounds."""
    run = make_run(rounds=5, eval_every=2, global_test=True, checkpoint_every=2)
    folder = prepare(tmp_path_factory.mktemp("session") / "run", run)
    return folder, simulate(run, folder)


# ---- records


@pytest.mark.exhaustive
def test_metrics_have_one_documented_record_per_round(finished: Any) -> None:
    folder, _ = finished
    for peer_folder in folder.peers():
        records = metrics.read(peer_folder.metrics)
        assert [record["t"] for record in records] == [0, 1, 2, 3, 4]
        for record in records:
            assert record.keys() == RECORD.keys()
            assert all(isinstance(record[key], kind) for key, kind in RECORD.items())
            assert record["peer"] == peer_folder.peer
            assert record["missing"] == {}
            assert record["seconds"].keys() == {"training", "waiting", "sending", "queued", "evaluating", "total"}
            assert 0 < record["seconds"]["training"] <= record["seconds"]["total"]
            assert record["cost"].keys() == {"cpu_seconds"}
            assert record["cost"]["cpu_seconds"] > 0
            assert record["loss"].keys() == {"ce"}
            assert sum(record["weights"].values()) == pytest.approx(1)
            assert record["sources"] == record["receivers"] == 3
            neighbors = {str(j) for j in range(4) if j != peer_folder.peer}
            for counts in (record["sent"], record["received"]):
                assert counts.keys() == neighbors
                for kinds in counts.values():
                    ((messages, payload, header),) = kinds.values()
                    assert messages == 1
                    assert payload > header > 0


def test_elapsed_seconds_grow_by_at_least_the_time_of_the_round(finished: Any) -> None:
    folder, _ = finished
    for files in folder.peers():
        records = metrics.read(files.metrics)
        ends = [0.0, *(record["elapsed"] for record in records)]
        for before, end, record in zip(ends, ends[1:], records, strict=False):
            assert end - before >= record["seconds"]["total"] - 0.001  # rounded


@pytest.mark.exhaustive
def test_a_resumed_peer_counts_elapsed_seconds_on(tmp_path: Path, make_run: Any, prepare: Any) -> None:
    run = make_run(rounds=2, peers=2)
    folder = prepare(tmp_path / "run", run)
    simulate(run, folder)
    path = folder.peer(1).metrics
    records = metrics.read(path)
    records[1]["elapsed"] = 1000.0
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    simulate(make_run(rounds=3, peers=2), folder)
    assert 1000 < metrics.read(path)[2]["elapsed"] < 2000
    assert metrics.read(folder.peer(0).metrics)[2]["elapsed"] < 1000


@pytest.mark.exhaustive
def test_a_resumed_peer_does_not_evaluate_again(
    tmp_path: Path, make_run: Any, prepare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(rounds=2, peers=2, global_test=True, metrics=["macro-f1"])
    folder = prepare(tmp_path / "run", run)
    results = simulate(run, folder)
    assert all(result.accuracy is not None and result.metrics["macro-f1"] is not None for result in results)
    monkeypatch.setattr("p2pfl.session.session.evaluate_algorithm", None)
    assert simulate(run, folder) == results
    assert [(files.status().starts, files.status().resumes) for files in folder.peers()] == [(2, 1)] * 2


@pytest.mark.exhaustive
def test_evaluates_before_it_skips_the_last_rounds(
    tmp_path: Path, make_run: Any, prepare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last round that it has computed was none of those that are evaluated."""
    run = make_run(peers=2, rounds=8, eval_every=3)
    folder = prepare(tmp_path / "run", run)
    monkeypatch.setattr(Endpoint, "next_round", lambda endpoint, t: 8 if t == 5 else t)
    results = simulate(run, folder)
    for result, evaluated in zip(results, evaluate_run(run, folder), strict=True):
        assert (result.rounds_done, result.skipped_rounds) == (8, 3)
        records = metrics.read(folder.peer(result.peer).metrics)
        assert [record["t"] for record in records if record["personal"]] == [2]
        assert evaluated.evaluations.personal is not None
        assert result.accuracy == evaluated.evaluations.personal.accuracy
        assert result.best is not None
        assert result.best >= result.accuracy


def test_evaluates_when_due_and_in_the_last_round(finished: Any) -> None:
    folder, _ = finished
    for record in metrics.read(folder.peer(2).metrics):
        evaluated = record["t"] in (1, 3, 4)
        for key, samples in (("personal", 25), ("global", 360)):
            assert (record[key] is not None) == evaluated
            if evaluated:
                assert record[key].keys() == {
                    *("accuracy", "loss", "correct", "samples"),
                    *("masked_accuracy", "unmasked_accuracy"),
                }
                assert record[key]["accuracy"] == record[key]["unmasked_accuracy"] <= record[key]["masked_accuracy"]
                assert record[key]["samples"] == samples or key == "global"
                assert record[key]["accuracy"] == record[key]["correct"] / record[key]["samples"]


class WithExtraMetrics(Local):
    """Also evaluates its bias alone, and on two splits; its diagnostics are the round."""

    async def round(self, t: int, net: Net) -> None:
        await super().round(t, net)
        self.t = t

    def diagnostics(self) -> Mapping[str, float]:
        return {"t": float(self.t)}

    def extra_metrics(self, whole: bool) -> Iterable[ExtraMetric]:
        yield ExtraMetric("bias", self._bias, self.data.test)
        if whole:
            yield ExtraMetric("everywhere", self.predict, self.data.global_test)
        yield ExtraMetric("nothing", self.predict, Samples(self.data.test.images, self.data.test.indices[:0]))
        for part, sign in (("more", 1), ("less", -1)):
            yield ExtraMetric(part, partial(self._scaled, sign), self.data.test, part_of="both")

    def _bias(self, x: Tensor) -> Tensor:
        return self.model.linear_head.bias.expand(len(x), -1)

    def _scaled(self, sign: int, x: Tensor) -> Tensor:
        return sign * self.predict(x)


@pytest.mark.exhaustive
@pytest.mark.parametrize("whole", [False, True])
def test_records_extra_metrics_and_diagnostics(
    whole: bool, tmp_path: Path, make_run: Any, prepare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(
        algorithm={"name": "local", "batch": 16}, rounds=3, eval_every=2, global_test=whole, masked_test=False
    )
    monkeypatch.setattr(Run, "algorithm", WithExtraMetrics)
    folder = prepare(tmp_path / "run", run)
    for peer_folder, result in zip(folder.peers(), simulate(run, folder), strict=True):
        records = metrics.read(peer_folder.metrics)
        assert [record["diagnostics"] for record in records] == [{"t": t} for t in (0.0, 1.0, 2.0)]
        names = {"bias", "more", "less", "both"} | ({"everywhere"} if whole else set())
        assert [record["extra_metrics"].keys() for record in records] == [set(), names, names]
        assert result.extra_metrics == {
            name: value["accuracy"] for name, value in records[-1]["extra_metrics"].items()
        }
        for which in ("masked", "unmasked"):
            recorded = {"personal": records[-1]["personal"], **records[-1]["extra_metrics"]}
            accuracies = {name: value[f"{which}_accuracy"] for name, value in recorded.items()}
            assert getattr(result, f"{which}_accuracies") == accuracies
        assert records[-1]["extra_metrics"]["bias"]["samples"] == result.samples
        parts = [result.extra_metrics[name] for name in ("more", "less")]
        assert parts[0] == result.accuracy != parts[1]
        assert result.extra_metrics["both"] == pytest.approx(sum(parts) / 2)
        if whole:
            assert records[-1]["extra_metrics"]["everywhere"] == records[-1]["global"]
            assert result.extra_metrics["everywhere"] == result.global_accuracy


@pytest.mark.exhaustive
def test_result_totals_match_the_records(finished: Any) -> None:
    folder, results = finished
    for peer_folder, result in zip(folder.peers(), results, strict=True):
        assert peer_folder.result() == result
        records = metrics.read(peer_folder.metrics)
        assert (result.peer, result.phase, result.rounds_done, result.error) == (peer_folder.peer, "finished", 5, "")
        assert result.missing == 0
        for which, totals in (("sent", result.sent), ("received", result.received)):
            for neighbor, kinds in totals.items():
                for kind, total in kinds.items():
                    assert total == [
                        sum(column) for column in zip(*(r[which][neighbor][kind] for r in records), strict=True)
                    ]
        evaluated = [record for record in records if record["personal"]]
        assert result.accuracy == records[-1]["personal"]["accuracy"]
        assert result.global_accuracy == records[-1]["global"]["accuracy"]
        best = max(evaluated, key=lambda record: record["personal"]["accuracy"])
        assert (result.best, result.best_round) == (best["personal"]["accuracy"], best["t"])
        assert result.weights == {key: pytest.approx(value) for key, value in records[-1]["weights"].items()}


def test_sent_counts_equal_received_counts(finished: Any) -> None:
    _, results = finished
    for sender in results:
        for receiver in results:
            assert sender.sent.get(str(receiver.peer)) == receiver.received.get(str(sender.peer))


def test_status_ends_in_the_final_phase(finished: Any) -> None:
    folder, results = finished
    for peer_folder, result in zip(folder.peers(), results, strict=True):
        status = peer_folder.status()
        assert status is not None
        assert (status.peer, status.phase, status.rounds_done, status.t) == (peer_folder.peer, "finished", 5, 4)
        assert status.waiting_for == []
        assert status.accuracy == result.accuracy
        for total, counts in ((status.bytes_out, result.sent), (status.bytes_in, result.received)):
            assert total == sum(entry[1] + entry[2] for kinds in counts.values() for entry in kinds.values())


def test_log_has_a_line_per_round(finished: Any) -> None:
    folder, _ = finished
    text = folder.peer(1).log.read_text()
    line = r"round done t={t}( accuracy=0\.\d+ best=0\.\d+)? train=\S+s wait=\S+s"
    for t in range(5):
        assert re.search(
            line.replace("{t}", f"{t}") + r" \| loss ce=.*\n? +\| largest weights .*\n? +\| sent ", text
        ), text
    assert " accuracy=" in text


def test_checkpoints_the_last_round(finished: Any) -> None:
    folder, results = finished
    for peer_folder, result in zip(folder.peers(), results, strict=True):
        saved = checkpoint.load(peer_folder.checkpoint, folder.info["id"], peer_folder.peer)
        assert saved is not None
        assert saved["rounds_done"] == result.rounds_done


def test_json_files_are_valid(finished: Any) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    folder, _ = finished
    for path in folder.root.glob("peers/*/*.json*"):
        for line in path.read_text().splitlines():
            json.loads(line, parse_constant=refuse)


# ---- stopping and resuming


def test_session_without_a_usable_checkpoint_fails(tmp_path: Path, make_run: Any, prepare: Any) -> None:
    run = make_run(rounds=2, peers=2, algorithm="local")
    folder = prepare(tmp_path / "run", run)
    simulate(run, folder)
    path = folder.peer(1).checkpoint
    for file in (path, checkpoint.previous(path)):
        file.write_bytes(b"torn")
    with pytest.raises(
        CheckpointError, match=r"peers/01/checkpoint\.pt: damaged.*01/checkpoint-previous\.pt: damaged"
    ):
        simulate(run, folder)
    status = folder.peer(1).status()
    assert status is not None
    assert status.phase == "failed"
    assert "checkpoint.pt" in status.error


def test_records_unexpected_errors(tmp_path: Path, make_run: Any, prepare: Any) -> None:
    run = make_run(peers=2, algorithm="local")
    folder = prepare(tmp_path / "run", run)

    async def life(sessions: list[Session]) -> None:
        def fail() -> None:
            raise ZeroDivisionError("division by zero")

        sessions[0].algorithm.after_batch = fail
        with pytest.raises(ZeroDivisionError):
            await sessions[0].run()

    in_process(run, folder, life)
    result, status = folder.peer(0).result(), folder.peer(0).status()
    assert result is not None
    assert status is not None
    assert result.phase == status.phase == "failed"
    assert result.error == status.error == "ZeroDivisionError: division by zero"


def test_batches_of_one_sample_are_named_where_normalization_cannot_take_them(make_run: Any) -> None:
    run = make_run(peers=2, rounds=1, models="dfml-resnet-4", algorithm={"name": "local", "batch": 1})
    with pytest.raises(ModelError, match=r"peer \d trains .* on batches of one sample \(algorithm.batch: 1"):
        simulate(run)


# ---- compute slots


class CountingSlot:
    """A slot that records whether it is held."""

    def __init__(self) -> None:
        self.held = False
        self.taken = 0

    async def acquire(self) -> None:
        assert not self.held
        await asyncio.sleep(0)
        self.held = True
        self.taken += 1

    def release(self) -> None:
        assert self.held
        self.held = False


@pytest.mark.exhaustive
def test_releases_the_slot_while_waiting(make_run: Any) -> None:
    async def life(sessions: list[Session]) -> None:
        slots: list[CountingSlot] = []
        held_while_waiting = []
        for session in sessions:
            slot = CountingSlot()
            session.slot = HeldSlot(slot)
            slots.append(slot)
            check = session.endpoint.mailbox.on_block

            def blocked(slot: CountingSlot = slot, check: Callable[[], None] = check) -> None:
                held_while_waiting.append(slot.held)
                check()

            session.endpoint.mailbox.on_block = blocked
            train = session.algorithm.train

            def training(slot: CountingSlot = slot, train: Any = train, **options: Any) -> None:
                assert slot.held
                train(**options)

            session.algorithm.train = training  # type: ignore[method-assign]
        await asyncio.gather(*(session.run() for session in sessions))
        assert held_while_waiting
        assert not any(held_while_waiting)
        assert not any(slot.held for slot in slots)

    in_process(make_run(), None, life)


def test_session_cancelled_in_the_queue_holds_no_slot(make_run: Any) -> None:
    class Never(CountingSlot):
        async def acquire(self) -> None:
            await asyncio.Event().wait()

    async def life(sessions: list[Session]) -> None:
        sessions[0].slot = HeldSlot(Never())
        running = asyncio.create_task(sessions[0].run())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        assert running.cancelled()

    in_process(make_run(), None, life)


@pytest.mark.exhaustive
@pytest.mark.parametrize("damaged", [{"starts": "x"}, {"starts": None, "resumes": []}])
def test_resumes_although_the_status_has_wrong_types(
    tmp_path: Path, make_run: Any, prepare: Any, damaged: dict[str, Any]
) -> None:
    run = make_run(rounds=2, peers=2)
    folder = prepare(tmp_path / "run", run)
    results = simulate(run, folder)
    path = folder.peer(1).root / "status.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **damaged}))
    assert simulate(run, folder) == results
    assert folder.peer(1).status().starts == 1
