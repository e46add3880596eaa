"""Trackers: what they follow, what they log, and what a run file says about them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from launcher.tracking import backends
from launcher.tracking.__main__ import none_runs, track
from launcher.tracking.backends import Tracked
from launcher.tracking.follow import LAG, Means
from p2pfl.errors import RunFileError
from p2pfl.run_file.load import from_dict
from p2pfl.run_folder.folder import RunFolder
from p2pfl.run_folder.records import RecordFile, parse
from p2pfl.session.metrics import truncate
from tests.conftest import tree
from tests.launcher_fixtures import Invoke, MakeFolder


def record(peer: int, t: int, accuracy: float | None = 0.5, **more: Any) -> str:
    personal = None if accuracy is None else {"accuracy": accuracy, "loss": 1.0}
    return json.dumps({"peer": peer, "t": t, "personal": personal, "weights": {"0": 1.0}, **more}) + "\n"


def append(folder: RunFolder, peer: int, *lines: str) -> None:
    with folder.peer(peer).metrics.open("a") as file:
        file.writelines(lines)


# ---- following records -------------------------------------------------------------------------------------


def test_reads_each_record_once_and_only_when_complete(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = RecordFile(path)
    assert file.read() == []
    path.write_text(record(0, 0) + record(0, 1)[:-5])
    assert [found.t for found in file.read()] == [0]
    path.write_text(record(0, 0) + record(0, 1))
    assert [found.t for found in file.read()] == [1]
    assert file.read() == []


def test_reads_from_the_beginning_when_a_resumed_peer_has_replaced_the_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(record(0, 0) + record(0, 1) + record(0, 2))
    file = RecordFile(path)
    assert len(file.read()) == 3
    truncate(path, 1, logging.getLogger("p2pfl.null"))
    assert [found.t for found in file.read()] == [0]


@pytest.mark.parametrize("line", ["{", "3", "[" * 5000, '{"t": "x"}', '{"peer": 0}', "\x00"])
def test_skips_damaged_records(tmp_path: Path, line: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(line + "\n" + record(0, 4))
    assert [found.t for found in RecordFile(tmp_path / "metrics.jsonl").read()] == [4]


def test_the_numbers_of_a_record_are_flat_and_finite() -> None:
    line = record(
        3,
        1,
        0.25,
        loss={"ce": 2.0, "cont": None},
        sent={"1": {"Head": [1, 100, 10], "Model": [1, 1, 1]}},
        missing={"Head": [4, 5]},
        **{"global": None},
    )
    (found,) = parse([json.loads(line)])
    assert found.scalars() == {
        "accuracy": 0.25,
        "test_loss": 1.0,
        "loss.ce": 2.0,
        "sent.messages": 2,
        "sent.bytes": 112,
        "missing": 2,
    }


def test_means_wait_for_all_peers_but_not_for_one_that_is_far_behind() -> None:
    means = Means(2)
    means.add(0, 0, {"accuracy": 0.25})
    assert list(means.complete()) == []
    means.add(1, 0, {"accuracy": 0.75, "loss.ce": 1.0})
    assert list(means.complete()) == [
        (0, {"accuracy": 0.5, "loss.ce": 1.0, "accuracy.std": 0.25, "accuracy.min": 0.25, "peers": 2})
    ]
    for t in range(1, LAG + 1):
        means.add(0, t, {})
        assert list(means.complete()) == []
    means.add(0, LAG + 1, {})
    assert list(means.complete()) == [(1, {"peers": 1})]
    means.add(1, 1, {})  # too late
    assert list(means.complete()) == []
    assert [t for t, _ in means.complete(end=True)] == list(range(2, LAG + 2))


# ---- what is logged ----------------------------------------------------------------------------------------


class Log:
    """A backend that keeps everything in memory."""

    opened: ClassVar[list[Log]] = []

    def __init__(self, run: Tracked) -> None:
        self.run = run
        self.written: list[tuple[str, int, dict[str, float]]] = []
        self.finished: bool | None = None
        Log.opened.append(self)

    def write(self, stream: str, t: int, values: Mapping[str, float]) -> None:
        self.written.append((stream, t, dict(values)))

    def flush(self) -> None:
        pass

    def close(self, finished: bool) -> None:
        self.finished = finished


Track = Callable[..., Log]


@pytest.fixture
def follow(make_folder: MakeFolder) -> Iterator[tuple[RunFolder, Track]]:
    """A run of two peers, and a function that tracks it to its end."""
    folder = make_folder()
    (folder.root / "tracking").mkdir()

    def run(**entry: Any) -> Log:
        settings = {"name": "toy", "data": {"dataset": "digits"}, "rounds": 3}
        track(folder, settings, {"name": "wandb", **entry}, Log, lambda: True)
        return Log.opened[-1]

    yield folder, run
    Log.opened.clear()


def test_logs_each_peer_and_the_mean(follow: tuple[RunFolder, Track]) -> None:
    folder, run = follow
    append(folder, 0, record(0, 0, 0.25), record(0, 1, None))
    append(folder, 1, record(1, 0, 0.75))
    log = run()
    named = [(stream, t, values.get("accuracy")) for stream, t, values in log.written]
    assert named == [
        ("peer-00", 0, 0.25), ("peer-00", 1, None), ("peer-01", 0, 0.75), ("mean", 0, 0.5), ("mean", 1, None)
    ]  # fmt: skip
    assert log.finished is True
    assert (log.run.project, log.run.settings["data.dataset"]) == ("toy", "digits")


def test_pooled_peers_are_one_stream(follow: tuple[RunFolder, Track]) -> None:
    folder, run = follow
    append(folder, 1, record(1, 0, 0.75))
    log = run(pooled=True, project="mine")
    assert {stream for stream, _, _ in log.written} == {"all"}
    assert log.written[0][2]["accuracy/peer-01"] == 0.75
    assert log.written[1][2]["accuracy/mean"] == 0.75
    assert log.run.project == "mine"


def test_a_resumed_run_is_continued(follow: tuple[RunFolder, Track]) -> None:
    folder, run = follow
    append(folder, 0, record(0, 0))
    append(folder, 1, record(1, 0))
    assert len(run().written) == 3
    append(folder, 0, record(0, 1))
    assert [(stream, t) for stream, t, _ in run().written] == [("peer-00", 1), ("mean", 1)]


def test_the_mean_of_a_round_that_a_stop_interrupted_waits_for_the_resumed_peers(
    follow: tuple[RunFolder, Track],
) -> None:
    folder, run = follow
    status = folder.peer(1).status()
    assert status is not None
    folder.peer(1).write_status(replace(status, phase="stopped"))
    append(folder, 0, record(0, 0, 0.25), record(0, 1, 0.25))
    append(folder, 1, record(1, 0, 0.75))
    assert [(stream, t) for stream, t, _ in run().written if stream == "mean"] == [("mean", 0)]
    folder.peer(1).write_status(status)
    append(folder, 1, record(1, 1, 0.75))
    assert [(t, values["accuracy"]) for stream, t, values in run().written if stream == "mean"] == [(1, 0.5)]


def test_peers_that_never_started_do_not_keep_a_tracker_waiting(
    make_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(results={1: None})
    monkeypatch.setattr("launcher.facts.logs.find_launcher", lambda folder: object())  # it waits for the tracker
    monkeypatch.setattr("launcher.facts.logs.is_alive", lambda folder, peer: True)
    assert none_runs(folder, [0, 1])
    status = folder.peer(0).status()
    assert status is not None
    folder.peer(1).write_status(replace(status, peer=1, phase="training"))
    assert not none_runs(folder, [0, 1])


def test_a_run_without_records_opens_nothing(follow: tuple[RunFolder, Track]) -> None:
    _, run = follow
    with pytest.raises(IndexError):
        run()


def test_writes_event_files_that_tensorboard_reads(make_folder: MakeFolder) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = make_folder()
    (folder.root / "tracking").mkdir()
    for peer in range(2):
        append(folder, peer, record(peer, 0, 0.25), record(peer, 1, 0.5))
    track(folder, {"name": "toy"}, {"name": "tensorboard"}, backends.TensorBoard, lambda: True)
    for stream in ("peer-00", "peer-01", "mean"):
        events = EventAccumulator(str(folder.root / "tensorboard" / stream)).Reload()
        assert [(event.step, event.value) for event in events.Scalars("accuracy")] == [(0, 0.25), (1, 0.5)]


# ---- run file ----------------------------------------------------------------------------------------------


def test_trackers_do_not_change_the_config_hash() -> None:
    with_trackers = from_dict(tree(track=["tensorboard", {"name": "wandb", "project": "x", "pooled": True}]))
    assert with_trackers.config_hash() == from_dict(tree()).config_hash()
    assert with_trackers.resolved()["track"][1] == {"name": "wandb", "pooled": True, "project": "x"}


@pytest.mark.parametrize(
    ("track", "reason"),
    [
        (["comet"], "unknown 'comet'; known: tensorboard, wandb, mlflow"),
        (["wandb", {"name": "wandb", "pooled": True}], "list each tracker once; repeated: wandb"),
        ([{"name": "tensorboard", "project": "x"}], "tensorboard has no projects"),
    ],
)
def test_rejects_invalid_trackers(track: Any, reason: str) -> None:
    with pytest.raises(RunFileError, match="track") as caught:
        from_dict(tree(track=track))
    assert reason in str(caught.value)


@pytest.mark.parametrize("command", ["launch", "simulate"])
def test_a_missing_library_is_an_error_before_there_is_a_run(
    tmp_path: Path, file: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(backends, "LIBRARIES", {"wandb": "no_such_module"})
    outcome = invoke(command, file, "--set", "track=[wandb]", "--run-dir", tmp_path / "run")
    assert outcome.exit_code == 2
    assert "track.0: the tracker wandb needs wandb" in outcome.stderr
    assert "pip install 'p2pfl-mesh[wandb]'" in outcome.stderr
    assert not (tmp_path / "run").exists()


def test_tracks_a_run_by_hand_only_to_a_tracker_that_is_named(make_folder: MakeFolder, invoke: Invoke) -> None:
    folder = make_folder()
    outcome = invoke("track", folder.root)
    assert outcome.exit_code == 2
    assert "name one, e.g. --to tensorboard" in outcome.stderr
    assert invoke("track", folder.root, "--pooled").exit_code == 2
