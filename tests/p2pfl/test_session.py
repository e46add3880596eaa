"""Sessions: what they write, how they stop, and how they go on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from p2pfl import checkpoint, metrics
from p2pfl.algorithms.local import Local
from p2pfl.config import Run
from p2pfl.errors import CheckpointError
from p2pfl.net import LocalHub, Net
from p2pfl.runfolder import Result, RunFolder
from p2pfl.session import Session, Stopped, load_data
from p2pfl.simulate import deterministic, simulate
from p2pfl.training import Measure, Samples

RECORD = {
    "peer": int,
    "t": int,
    "loss": dict,
    "seconds": dict,
    "out": dict,
    "in": dict,
    "missing": dict,
    "sources": int,
    "listeners": int,
    "weights": dict | None,
    "personal": dict | None,
    "global": dict | None,
    "measures": dict,
    "observed": dict,
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: Any, make_run: Any, prepare: Any) -> tuple[RunFolder, list[Result]]:
    """A run of 5 rounds, evaluated after every second."""
    run = make_run(rounds=5, eval_every=2, global_test=True, checkpoint_every=2)
    folder = prepare(tmp_path_factory.mktemp("session") / "run", run)
    return folder, simulate(run, folder)


# ---- records


def test_metrics_have_one_record_per_round_in_the_documented_form(finished: Any) -> None:
    folder, _ = finished
    for place in folder.peers():
        records = metrics.read(place.metrics)
        assert [record["t"] for record in records] == [0, 1, 2, 3, 4]
        for record in records:
            assert record.keys() == RECORD.keys()
            assert all(isinstance(record[key], sort) for key, sort in RECORD.items())
            assert record["peer"] == place.peer
            assert record["missing"] == {}
            assert record["seconds"].keys() == {"training", "waiting", "queued", "evaluating", "total"}
            assert 0 < record["seconds"]["training"] <= record["seconds"]["total"]
            assert record["loss"].keys() == {"ce"}
            assert sum(record["weights"].values()) == pytest.approx(1)
            assert record["sources"] == record["listeners"] == 3
            neighbors = {str(j) for j in range(4) if j != place.peer}
            for counts in (record["out"], record["in"]):
                assert counts.keys() == neighbors
                for kinds in counts.values():
                    ((messages, payload, header),) = kinds.values()
                    assert messages == 1
                    assert payload > header > 0


def test_evaluation_happens_when_asked_for_and_in_the_last_round(finished: Any) -> None:
    folder, _ = finished
    for record in metrics.read(folder.peer(2).metrics):
        evaluated = record["t"] in (1, 3, 4)
        for key, samples in (("personal", 25), ("global", 360)):
            assert (record[key] is not None) == evaluated
            if evaluated:
                assert record[key].keys() == {"accuracy", "loss", "correct", "samples"}
                assert record[key]["samples"] == samples or key == "global"
                assert record[key]["accuracy"] == record[key]["correct"] / record[key]["samples"]


class Peaked(Local):
    """Evaluates its bias alone too, on two splits, and observes the round."""

    async def round(self, t: int, net: Net) -> None:
        await super().round(t, net)
        self.t = t

    def observations(self) -> Mapping[str, float]:
        return {"t": float(self.t)}

    def measures(self, whole: bool) -> Iterable[Measure]:
        head = self.model.linear_head
        yield Measure("bias", lambda x: head.bias.expand(len(x), -1), self.data.test)
        if whole:
            yield Measure("everywhere", self.predict, self.data.everything)
        yield Measure("nothing", self.predict, Samples(self.data.test.images, self.data.test.indices[:0]))
        for part, sign in (("more", 1), ("less", -1)):
            yield Measure(part, lambda x, sign=sign: sign * self.predict(x), self.data.test, part_of="both")


@pytest.mark.parametrize("whole", [False, True])
def test_what_else_a_method_evaluates_and_observes_is_recorded(
    whole: bool, tmp_path: Path, make_run: Any, prepare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(
        algorithm={"name": "local", "batch": 16}, rounds=3, eval_every=2, global_test=whole, masked_test=False
    )
    monkeypatch.setattr(Run, "algorithm", Peaked)
    folder = prepare(tmp_path / "run", run)
    for place, result in zip(folder.peers(), simulate(run, folder), strict=True):
        records = metrics.read(place.metrics)
        assert [record["observed"] for record in records] == [{"t": t} for t in (0.0, 1.0, 2.0)]
        names = {"bias", "more", "less", "both"} | ({"everywhere"} if whole else set())
        assert [record["measures"].keys() for record in records] == [set(), names, names]
        assert result.measures == {name: value["accuracy"] for name, value in records[-1]["measures"].items()}
        assert records[-1]["measures"]["bias"]["samples"] == result.samples
        parts = [result.measures[name] for name in ("more", "less")]
        assert parts[0] == result.accuracy != parts[1]
        assert result.measures["both"] == pytest.approx(sum(parts) / 2)
        if whole:
            assert records[-1]["measures"]["everywhere"] == records[-1]["global"]
            assert result.measures["everywhere"] == result.global_accuracy


def test_result_sums_up_the_rounds(finished: Any) -> None:
    folder, results = finished
    for place, result in zip(folder.peers(), results, strict=True):
        assert place.result() == result
        records = metrics.read(place.metrics)
        assert (result.peer, result.phase, result.rounds_done, result.error) == (place.peer, "finished", 5, "")
        assert result.missing == 0
        for which, totals in (("out", result.out), ("in", result.inn)):
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


def test_what_one_peer_sends_the_other_gets(finished: Any) -> None:
    _, results = finished
    for sender in results:
        for receiver in results:
            assert sender.out.get(str(receiver.peer)) == receiver.inn.get(str(sender.peer))


def test_status_ends_in_the_final_phase(finished: Any) -> None:
    folder, results = finished
    for place, result in zip(folder.peers(), results, strict=True):
        status = place.status()
        assert status is not None
        assert (status.peer, status.phase, status.rounds_done, status.t) == (place.peer, "finished", 5, 4)
        assert status.waiting_for == []
        assert status.accuracy == result.accuracy
        for total, counts in ((status.bytes_out, result.out), (status.bytes_in, result.inn)):
            assert total == sum(entry[1] + entry[2] for kinds in counts.values() for entry in kinds.values())


def test_the_log_has_a_line_per_round(finished: Any) -> None:
    folder, _ = finished
    text = folder.peer(1).log.read_text()
    accuracy, times = r"( \| accuracy \S+ \(best \S+\))?", r" \| train \S+ s, wait \S+ s"
    for t in range(5):
        assert re.search(rf" round {t}{accuracy}{times} \| ce .* \| largest weights .* \| sent ", text), text
    assert " | accuracy " in text


def test_the_last_round_is_checkpointed(finished: Any) -> None:
    folder, results = finished
    for place, result in zip(folder.peers(), results, strict=True):
        saved = checkpoint.load(place.checkpoint, folder.about["id"], place.peer)
        assert saved is not None
        assert saved["rounds_done"] == result.rounds_done


def test_files_are_json_to_others(finished: Any) -> None:
    folder, _ = finished
    for path in folder.root.glob("peers/*/*.json*"):
        for line in path.read_text().splitlines():
            json.loads(line)


# ---- stopping and going on


def in_process(
    run: Run, folder: RunFolder | None, life: Callable[[list[Session]], Awaitable[Any]], **options: Any
) -> Any:
    """``life`` with the sessions of all peers, connected."""

    async def main() -> Any:
        data, hub, sessions = load_data(run), LocalHub(), []
        for me in range(run.peers):
            place = folder.peer(me) if folder else None
            session = Session(run, me, folder.about["id"] if folder else "0" * 16, data, folder=place, **options)
            hub.join(session.endpoint)
            sessions.append(session)
        with deterministic():
            return await life(sessions)

    return asyncio.run(main())


def stop_all_after(run: Run, folder: RunFolder, rounds: int) -> None:
    """Run until every peer has completed so many rounds, and is stopped then."""

    async def life(sessions: list[Session]) -> None:
        for session in sessions:
            session.on_round = lambda peer, t: sessions[peer].stop() if t + 1 == rounds else None
        ends = await asyncio.gather(*(session.run() for session in sessions), return_exceptions=True)
        assert all(isinstance(end, Stopped) for end in ends)

    in_process(run, folder, life)


ALGORITHMS = {
    "local": {"name": "local", "batch": 16},
    "dpsgd": {"name": "dpsgd", "batch": 16, "momentum": 0.9, "local_steps": 2},
    "fedavg": {"name": "fedavg", "batch": 16, "participation": 0.5},
    "lg-fedavg": {"name": "lg-fedavg", "batch": 16, "optimizer": "adam"},
    "dfedavgm": {"name": "dfedavgm", "batch": 8},
    "fedproto": {"name": "fedproto", "batch": 16, "momentum": 0.9, "participation": 0.5},
    "fedtgp": {"name": "fedtgp", "batch": 16, "prototype_epochs": 5},
    "dfml": {"name": "dfml", "batch": 16, "mutual_epochs": 2, "period": 2},
    "fedavg-dec": {"name": "fedavg-dec", "batch": 16},
    "fedprox-dec": {"name": "fedprox-dec", "batch": 16},
    "mapl": {"name": "mapl", "warmup": 1, "batch": 16, "lr": 0.01, "projector_hidden": 16, "graph_lr": 5.0},
    "fedstyle": {
        "name": "fedstyle",
        "style_epochs": 2,
        "participation": 0.5,
        "batch": 16,
        "momentum": 0.9,
        "local_epochs": 1,
        "probe_samples": 50,
        "probe_epochs": 2,
    },
    "mapl+": {"name": "mapl+", "warmup": 1, "batch": 16, "lr": 0.01, "projector_hidden": 16, "graph_lr": 5.0},
    "l2c": {"name": "l2c", "local_epochs": 1, "momentum": 0.9, "prune_round": 2, "prune_to": 1, "spool": True},
    "meta-l2c": {"name": "meta-l2c", "local_epochs": 1, "prune_round": 2, "prune_to": 1},
}
DATA = {
    "augment": "mapl",
    "partition": {"name": "clusters", "clusters": 2, "per_class": 8, "test_per_class": 5, "validation": 0.25},
}
"""What each of them can learn from."""


@pytest.mark.parametrize("name", ALGORITHMS)
def test_stopping_and_going_on_ends_with_the_same_bits(
    name: str, tmp_path: Path, make_run: Any, prepare: Any
) -> None:
    run = make_run(rounds=5, algorithm=ALGORITHMS[name], data=DATA, checkpoint_every=100)
    whole = simulate(run)
    folder = prepare(tmp_path / "run", run)
    for rounds in (1, 3):
        stop_all_after(run, folder, rounds)
        part = simulate(make_run(**_shorter(run, rounds)))
        for place, expected in zip(folder.peers(), part, strict=True):
            result, status = place.result(), place.status()
            assert result is not None
            assert status is not None
            assert result.phase == status.phase == "stopped"
            assert (result.rounds_done, result.digest) == (rounds, expected.digest)
    for expected, result in zip(whole, simulate(run, folder), strict=True):
        assert (result.phase, result.rounds_done) == ("finished", 5)
        assert (result.digest, result.out, result.inn) == (expected.digest, expected.out, expected.inn)
        assert (result.accuracy, result.best) == (expected.accuracy, expected.best)
        assert (result.weights, result.measures) == (expected.weights, expected.measures)
        assert [record["t"] for record in metrics.read(folder.peer(result.peer).metrics)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_peers_that_join_late_take_part_from_their_round_on(
    name: str, tmp_path: Path, make_run: Any, prepare: Any
) -> None:
    run = make_run(peers=5, rounds=5, algorithm=ALGORITHMS[name], data=DATA, joins_at={3: 1, 1: 3})
    folder = prepare(tmp_path / "run", run)
    results = simulate(run, folder)
    assert [(result.phase, result.rounds_done, result.missing) for result in results] == [("finished", 5, 0)] * 5
    for peer, joins in enumerate((0, 3, 0, 1, 0)):
        records = list(metrics.read(folder.peer(peer).metrics))
        assert [record["t"] for record in records] == list(range(joins, 5))
        for record in records:
            heard = {neighbor for neighbor, kinds in record["in"].items() if set(kinds) - {"Begun"}}
            assert all({"3": 1, "1": 3}.get(neighbor, 0) <= record["t"] for neighbor in heard)
    begun = {r.peer: sorted(int(j) for j, kinds in r.inn.items() if "Begun" in kinds) for r in results}
    assert begun == {0: [], 1: [0, 2, 3, 4], 2: [], 3: [0, 2, 4], 4: []}


def _shorter(run: Run, rounds: int) -> dict[str, Any]:
    return {**run.resolved(), "rounds": rounds}


def test_a_stop_in_the_middle_of_a_round_goes_back_to_its_beginning(
    tmp_path: Path, make_run: Any, prepare: Any
) -> None:
    run = make_run(rounds=50, peers=2, algorithm={"name": "local", "batch": 4}, checkpoint_every=100)
    folder = prepare(tmp_path / "run", run)

    async def life(sessions: list[Session]) -> None:
        session, batches = sessions[0], 0
        after_batch = session.algorithm.after_batch

        def stop_in_the_third_round() -> None:
            nonlocal batches
            batches += session.rounds_done == 2
            if batches == 2:
                session.stop()
            after_batch()

        session.algorithm.after_batch = stop_in_the_third_round
        with pytest.raises(Stopped):
            await session.run()

    in_process(run, folder, life)
    result = folder.peer(0).result()
    assert result is not None
    assert (result.phase, result.rounds_done) == ("stopped", 2)
    assert result.digest == simulate(make_run(**_shorter(run, 2)))[0].digest
    assert [record["t"] for record in metrics.read(folder.peer(0).metrics)] == [0, 1]


def test_a_stop_ends_the_wait_for_a_neighbor(tmp_path: Path, make_run: Any, prepare: Any) -> None:
    run = make_run()
    folder = prepare(tmp_path / "run", run)

    async def life(sessions: list[Session]) -> None:
        running = asyncio.create_task(sessions[0].run())
        while not sessions[0].endpoint.mailbox.waits_for:
            await asyncio.sleep(0)
        sessions[0].stop()
        sessions[0].interrupt()
        with pytest.raises(Stopped):
            await running

    in_process(run, folder, life)
    saved = checkpoint.load(folder.peer(0).checkpoint, folder.about["id"], 0)
    assert saved is not None
    assert saved["rounds_done"] == 0


def test_records_after_the_checkpoint_are_written_again(tmp_path: Path, make_run: Any, prepare: Any) -> None:
    run = make_run(rounds=4, peers=2, algorithm="local")
    folder = prepare(tmp_path / "run", run)
    stop_all_after(run, folder, 2)
    with folder.peer(0).metrics.open("a") as file:  # as if it had been killed later, while it wrote
        file.write(json.dumps({"peer": 0, "t": 2}) + '\n{"peer": 0, "t": 3, "lo')
    simulate(run, folder)
    assert [record["t"] for record in metrics.read(folder.peer(0).metrics)] == [0, 1, 2, 3]


def test_a_damaged_checkpoint_costs_rounds_and_nothing_else(tmp_path: Path, make_run: Any, prepare: Any) -> None:
    run = make_run(rounds=8, peers=2, algorithm="local", checkpoint_every=2)
    folder = prepare(tmp_path / "run", run)
    stop_all_after(run, folder, 5)
    place = folder.peer(1)
    place.checkpoint.write_bytes(place.checkpoint.read_bytes()[:-1])
    for result, expected in zip(simulate(run, folder), simulate(run), strict=True):
        assert (result.phase, result.digest) == ("finished", expected.digest)
        assert [record["t"] for record in metrics.read(folder.peer(result.peer).metrics)] == list(range(8))
    said = place.log.read_text()
    assert "checkpoint.pt: damaged: its checksum is wrong; set aside" in said
    assert "going on from the one after round 3" in said
    assert "resumed after round 3" in said


def test_neighbors_are_told_what_the_checkpoint_before_the_last_one_holds(
    tmp_path: Path, make_run: Any, prepare: Any
) -> None:
    run = make_run(rounds=7, peers=2, algorithm="local", checkpoint_every=2)
    folder = prepare(tmp_path / "run", run)
    told: list[int] = []

    def play(rounds: int) -> None:
        async def life(sessions: list[Session]) -> None:
            session = sessions[0]
            session.endpoint.link.checkpointed = told.append  # type: ignore[method-assign]
            session.on_round = lambda peer, t: session.stop() if t + 1 == rounds else None
            with contextlib.suppress(Stopped):
                await session.run()

        in_process(run, folder, life)

    play(rounds=5)
    assert told == [0, 2, 4]  # at 2, at 4 and at the stop
    saved = checkpoint.load(folder.peer(0).checkpoint, folder.about["id"], 0)
    assert saved is not None
    assert (saved["rounds_done"], saved["durable"]) == (5, 4)
    play(rounds=8)
    assert told[3:] == [5, 6, 7]  # at 6, at the end, and once more: then the neighbours will be gone
    before = checkpoint.read(checkpoint.previous(folder.peer(0).checkpoint))
    assert before["rounds_done"] == 7


def test_a_session_without_a_usable_checkpoint_fails(tmp_path: Path, make_run: Any, prepare: Any) -> None:
    run = make_run(rounds=2, peers=2, algorithm="local")
    folder = prepare(tmp_path / "run", run)
    simulate(run, folder)
    path = folder.peer(1).checkpoint
    for one in (path, checkpoint.previous(path)):
        one.write_bytes(b"torn")
    with pytest.raises(
        CheckpointError, match=r"peers/01/checkpoint\.pt: damaged.*01/checkpoint-previous\.pt: damaged"
    ):
        simulate(run, folder)
    status = folder.peer(1).status()
    assert status is not None
    assert status.phase == "failed"
    assert "checkpoint.pt" in status.error


def test_whatever_else_goes_wrong_is_written_down(tmp_path: Path, make_run: Any, prepare: Any) -> None:
    run = make_run(peers=2, algorithm="local")
    folder = prepare(tmp_path / "run", run)

    async def life(sessions: list[Session]) -> None:
        sessions[0].algorithm.after_batch = lambda: 1 / 0
        with pytest.raises(ZeroDivisionError):
            await sessions[0].run()

    in_process(run, folder, life)
    result, status = folder.peer(0).result(), folder.peer(0).status()
    assert result is not None
    assert status is not None
    assert result.phase == status.phase == "failed"
    assert result.error == status.error == "ZeroDivisionError: division by zero"


# ---- compute slots


class CountingSlot:
    """A slot that notes whether it is held, and says who held it when somebody began to wait."""

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


def test_no_slot_is_held_while_waiting(make_run: Any) -> None:
    async def life(sessions: list[Session]) -> None:
        slots: list[CountingSlot] = []
        held_while_waiting = []
        for session in sessions:
            session.slot = slot = CountingSlot()
            slots.append(slot)
            check = session.endpoint.mailbox.blocked

            def blocked(slot: CountingSlot = slot, check: Callable[[], None] = check) -> None:
                held_while_waiting.append(slot.held)
                check()

            session.endpoint.mailbox.blocked = blocked
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


def test_a_session_that_is_cancelled_while_it_queues_leaves_no_slot_behind(make_run: Any) -> None:
    class Never(CountingSlot):
        async def acquire(self) -> None:
            await asyncio.Event().wait()

    async def life(sessions: list[Session]) -> None:
        sessions[0].slot = Never()
        running = asyncio.create_task(sessions[0].run())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        assert running.cancelled()

    in_process(make_run(), None, life)
