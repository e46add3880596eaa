"""`p2pfl collect`: folders on this host are combined into one run folder."""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import CollectError
from launcher.facts.logs import has_ended
from launcher.facts.runs import find_runs
from p2pfl.run_folder.folder import RunFolder, Status
from tests.launcher_fixtures import RUN_ID, Host, Invoke, gather, hosts_by_peer


def test_collects_folders_of_two_hosts_into_one_run(host: Host, into: Path, invoke: Invoke) -> None:
    one, other = host("one", 0, 1), host("other", 2, 3)
    outcome = invoke("collect", into, one.root, other.root)
    assert outcome.exit_code == 0
    assert outcome.stdout.splitlines()[:2] == [f"{one.root}: peers 0-1", f"{other.root}: peers 2-3"]
    assert outcome.stdout.splitlines()[-1] == f"run: {into}"
    assert outcome.stderr == ""
    folder = RunFolder.open(into)
    assert hosts_by_peer(folder) == {0: "one", 1: "one", 2: "other", 3: "other"}
    assert folder.run_file.read_bytes() == one.run_file.read_bytes()
    assert sorted(path.name for path in into.iterdir()) == ["peers", "run.json", "run.yaml", "summary.json"]
    assert sorted(path.name for path in folder.peer(0).root.iterdir()) == [
        "metrics.jsonl", "origin.json", "peer.log", "result.json", "status.json"
    ]  # fmt: skip
    info = folder.info
    assert info["collected"]["sources"] == [str(one.root), str(other.root)]
    assert not {"host", "launcher_pid"} & info.keys()
    origin = folder.peer(3).origin()
    assert origin is not None
    assert (origin.source, origin.info["host"]) == (str(other.root), "other")
    assert json.loads(folder.summary.read_text())["finished"]


def test_other_commands_accept_a_collection(host: Host, into: Path, invoke: Invoke) -> None:
    whole = host("whole", 0, 1, 2, 3)
    gather(into, host("one", 0, 1).root, host("other", 2, 3).root)
    assert invoke("digest", into, whole.root).exit_code == 0
    assert len(invoke("logs", into).stdout.splitlines()) == 4
    assert invoke("compare", into, whole.root).exit_code == 0
    outcome = invoke("list", into.parent)
    assert "finished (collected " in outcome.stdout
    assert json.loads(invoke("list", into.parent, "--json").stdout)[0]["state"] == "finished"


def test_finds_run_folders_in_a_folder(tmp_path: Path, host: Host, into: Path) -> None:
    for peer in range(4):
        volume = tmp_path / "volumes" / f"run-{peer}"
        volume.mkdir(parents=True)
        host(f"peer-{peer}", peer).root.rename(volume / "_data")
    (tmp_path / "volumes" / "lost+found").mkdir(mode=0)
    (tmp_path / "volumes" / "something else").mkdir()
    folder, lines = gather(into, tmp_path / "volumes")
    assert hosts_by_peer(folder) == {peer: f"peer-{peer}" for peer in range(4)}
    assert lines[3] == f"{tmp_path}/volumes/run-3/_data: peer 3"
    # The collection may lie among them.
    again, lines = gather(tmp_path / "volumes" / "all", tmp_path / "volumes")
    again, lines = gather(tmp_path / "volumes" / "all", tmp_path / "volumes")
    assert len(lines) == 4
    assert hosts_by_peer(again) == hosts_by_peer(folder)


def test_collects_checkpoints_on_request(host: Host, into: Path) -> None:
    one = host("one", 0)
    assert not gather(into, one.root)[0].peer(0).checkpoint.exists()
    assert gather(into, one.root, checkpoints=True)[0].peer(0).checkpoint.read_bytes() == b"large"


def test_an_update_keeps_collecting_checkpoints(host: Host, into: Path) -> None:
    one = host("one", 0, 1)
    one.peer(0).checkpoint.write_bytes(b"old")
    gather(into, one.root, checkpoints=True)
    one.peer(0).checkpoint.write_bytes(b"new")
    for locations in ((), (one.root,)):
        assert gather(into, *locations)[0].peer(0).checkpoint.read_bytes() == b"new"


def test_copies_only_regular_files_of_a_run_folder(
    tmp_path: Path, host: Host, into: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = host("one", 0, 1)
    secret = tmp_path / "secret"
    secret.write_text("private")
    (one.peer(0).root / "output.log").symlink_to(secret)
    (one.peer(0).root / "03.key").write_text("private")
    os.mkfifo(one.peer(0).root / "chaos.jsonl")
    (one.root / "peers" / "..evil").mkdir()
    (one.root / "peers" / "07").mkdir()  # not a peer of this run
    (one.root / "peers" / "07" / "peer.log").write_text("private")
    with socket.socket(socket.AF_UNIX) as unix_socket:
        (one.peer(1).root / "output.log").unlink(missing_ok=True)
        monkeypatch.chdir(one.peer(1).root)  # a socket's path has at most 107 bytes
        unix_socket.bind("output.log")
        folder, _ = gather(into, one.root)
    names = {path.name for path in folder.root.rglob("*") if path.is_file()}
    assert names == {
        *("run.yaml", "run.json", "summary.json", "origin.json"),
        *("peer.log", "metrics.jsonl", "status.json", "result.json"),
    }
    assert sorted(files.peer for files in folder.peers()) == [0, 1, 2, 3]


def test_limits_the_size_of_files_that_are_read_into_memory(host: Host, into: Path, invoke: Invoke) -> None:
    one, two = host("one", 0), host("two", 1)
    with one.peer(0).root.joinpath("result.json").open("r+b") as file:
        file.truncate(1 << 40)  # occupies nothing
    outcome = invoke("collect", into, one.root, two.root)
    reason = "peers/00/result.json has 1.1 TB, more than such a file can have (67.1 MB); remove it"
    assert outcome.stderr.splitlines()[-1] == f"{one.root}: cannot be read: {reason}"
    assert hosts_by_peer(RunFolder.open(into)) == {1: "two"}


@pytest.mark.parametrize(
    ("location", "command"),
    [
        ("alpha:mesh/runs/wide", "rsync -a alpha:mesh/runs/wide/ COPY"),
        ("bob@[fd00::2]:~/wide/", "rsync -a bob@[fd00::2]:~/wide/ COPY"),
    ],
)
def test_says_how_to_copy_from_another_host(
    location: str, command: str, host: Host, into: Path, invoke: Invoke
) -> None:
    outcome = invoke("collect", into, host("one", 0).root, location)
    assert outcome.exit_code == 1
    assert outcome.stderr == (
        f"error: {location}: not on this host; copy it first: {command}; then collect from the folder COPY\n"
    )
    assert not into.exists()


def test_a_folder_may_have_a_colon_in_its_name(host: Host, into: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = host("one", 0)
    monkeypatch.chdir(one.root.parent)
    one.root.rename("alpha:x")
    assert hosts_by_peer(gather(into, "alpha:x")[0]) == {0: "one"}


# ---- updates


@pytest.mark.exhaustive
def test_updates_a_collection(host: Host, into: Path, invoke: Invoke) -> None:
    locations = [host("one", 0, 1, phase="training", rounds=1).root, host("other", 2, phase="waiting", rounds=2).root]
    outcome = invoke("collect", into, *locations)
    assert outcome.exit_code == 0
    assert outcome.stderr.splitlines() == [
        f"peers 0-2: unfinished: had not ended when collected; see {into}/peers/00/peer.log",
        "peer 3: not collected: no source has its files",
    ]
    (line,) = find_runs(into.parent)
    assert (line.state, line.alive, line.rounds_done) == ("unfinished", 0, 0)
    for folder in locations:
        shutil.rmtree(folder)
    host("one", 0, 1)
    host("other", 2, 3)
    outcome = invoke("collect", into)
    assert outcome.exit_code == 0
    assert outcome.stderr == ""
    (line,) = find_runs(into.parent)
    assert (line.state, line.rounds_done) == ("finished", 3)
    assert hosts_by_peer(RunFolder.open(into)) == {0: "one", 1: "one", 2: "other", 3: "other"}


def test_removes_a_result_that_a_restarted_peer_has_removed(host: Host, into: Path) -> None:
    one = host("one", 0)
    gather(into, one.root)
    one.peer(0).clear_result()
    one.peer(0).write_status(Status(0, 1, "training", 2, 2))
    folder, lines = gather(into, one.root)
    assert folder.peer(0).result() is None
    assert lines == [f"{one.root}: peer 0"]


@pytest.mark.exhaustive
def test_prefers_the_folder_with_more_rounds(host: Host, into: Path) -> None:
    slow, fast = host("slow", 0, 1, rounds=1), host("fast", 1, 2)
    line = f"peer 1: from {fast.root} (rounds done: 3), not from {slow.root} (rounds done: 1)"
    for order in ((slow, fast), (fast, slow)):
        folder, lines = gather(into, *(one.root for one in order))
        assert hosts_by_peer(folder) == {0: "slow", 1: "fast", 2: "fast"}
        assert lines[-1] == line


def test_compares_new_files_with_collected_ones(host: Host, into: Path) -> None:
    fast, slow, level = host("fast", 0), host("slow", 0, rounds=1), host("level", 0)
    gather(into, fast.root)
    folder, lines = gather(into, slow.root)
    assert hosts_by_peer(folder) == {0: "fast"}
    assert lines[-1] == f"peer 0: from {fast.root} (rounds done: 3), not from {slow.root} (rounds done: 1)"
    # Ties go to the given location.
    assert hosts_by_peer(gather(into, level.root)[0]) == {0: "level"}
    # From the same location the newer files win: the peer may have crashed and repeat rounds.
    level.peer(0).clear_result()
    level.peer(0).write_status(Status(0, 1, "training", 1, 1))
    status = gather(into, level.root)[0].peer(0).status()
    assert status is not None
    assert status.rounds_done == 1


def test_records_the_earliest_start(host: Host, into: Path) -> None:
    early = host("early", 0, started="2026-11-21T10:00:00+02:00")  # 08:00 UTC
    folder, _ = gather(into, host("late", 1).root, early.root)
    assert folder.info["started"] == "2026-11-21T10:00:00+02:00"


# ---- errors


def test_reports_unreadable_locations_and_collects_the_others(
    tmp_path: Path, host: Host, into: Path, invoke: Invoke
) -> None:
    one = host("one", 0, 1, 2, 3)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "run.json").write_text("{")
    (tmp_path / "damaged" / "run.yaml").write_text("peers: 4\n")
    outcome = invoke("collect", into, tmp_path / "nowhere", one.root, tmp_path / "damaged", tmp_path / "bin")
    assert outcome.exit_code == 1
    assert outcome.stderr.splitlines() == [
        f"{tmp_path}/nowhere: cannot be read: no such folder",
        f"{tmp_path}/bin: cannot be read: no such folder",
        f"{tmp_path}/damaged: cannot be read: run.json: damaged: not a JSON object",
    ]
    assert hosts_by_peer(RunFolder.open(into)) == dict.fromkeys(range(4), "one")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "settings",
    [
        "peers: 4",
        "{name: toy, seed: 0, rounds: 3, algorithm: {name: local}}",
        "{name: toy, seed: 0, rounds: 3, algorithm: {name: local}, peers: 3.5}",
        "{name: toy, seed: 0, rounds: 3, algorithm: {name: local}, peers: 1000000000}",
        "{name: [toy], seed: 0, rounds: 3, algorithm: {name: local}, peers: 4}",
        "[" * 1000,
    ],
    ids=lambda settings: settings[:80],
)
def test_rejects_a_run_file_without_what_a_collection_needs(
    settings: str, host: Host, into: Path, invoke: Invoke
) -> None:
    one = host("one", 0)
    one.run_file.write_text(settings)
    outcome = invoke("collect", into, one.root)
    assert outcome.exit_code == 1
    assert outcome.stderr.startswith(f"error: no run folder found, nothing collected\n{one.root}: run.")
    assert not into.exists()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "values", "wrong"),
    [
        ("result", {"group": "x"}, "group must be an integer of at most 64 bits, got 'x'"),
        ("result", {"peer": True}, "peer must be an integer of at most 64 bits, got True"),
        ("result", {"correct": 2**64}, "correct must be an integer of at most 64 bits, got 18446744073709551616"),
        ("result", {"phase": "gone"}, "phase must be one of starting, queued, "),
        ("result", {"phase": []}, "phase must be one of starting, queued, "),
        ("result", {"accuracy": "0.5"}, "accuracy must be a number of at most 9.22e+18, got '0.5'"),
        ("result", {"best": float("inf")}, "best must be a number of at most 9.22e+18, got inf"),
        ("result", {"error": None}, "error must be a string, got None"),
        ("result", {"weights": {"1": 1e300}}, "weights['1'] must be a number of at most 9.22e+18, got 1e+300"),
        ("result", {"extra_metrics": [0.5]}, "extra_metrics must be an object, got [0.5]"),
        ("result", {"sent": {"1": {"Head": [1, 2]}}}, "sent['1']['Head'] must be a list of 3, got [1, 2]"),
        (
            "result",
            {"sent": {"1": {"Head": [1, 2, "3"]}}},
            "sent['1']['Head'][2] must be an integer of at most 64 bits",
        ),
        ("result", {"seconds": {"total": []}}, "seconds['total'] must be a number of at most 9.22e+18, got []"),
        ("status", {"t": None}, "t must be an integer of at most 64 bits, got None"),
        ("status", {"waiting_for": [1, "x"]}, "waiting_for[1] must be an integer of at most 64 bits, got 'x'"),
    ],
)
def test_names_a_value_of_a_wrong_type_and_collects_the_other_locations(
    name: str, values: dict[str, Any], wrong: str, host: Host, into: Path, invoke: Invoke
) -> None:
    one, other = host("one", 0, 1), host("other", 2, 3)
    path = one.peer(1).root / f"{name}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    outcome = invoke("collect", into, one.root, other.root)
    assert outcome.exit_code == 1
    (line,) = [line for line in outcome.stderr.splitlines() if "cannot be read" in line]
    assert line.startswith(f"{one.root}: cannot be read: peers/01/{name}.json: {wrong}")
    assert line.endswith("; correct or remove it there")
    assert hosts_by_peer(RunFolder.open(into)) == {2: "other", 3: "other"}


def test_collects_results_of_diverged_runs_and_damaged_records(host: Host, into: Path, invoke: Invoke) -> None:
    one = host("one", 0, 1, 2, 3)
    diverged = {
        "accuracy": math.nan,
        "loss": math.inf,
        "extra_metrics": {"peak": math.nan},
        "weights": {"1": math.nan},
    }
    for peer in (0, 1):
        path = one.peer(peer).root / "result.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **diverged}))
    (one.peer(2).root / "result.json").write_text("{")
    (one.peer(3).root / "status.json").write_text('{"from a later version": 1}')
    outcome = invoke("collect", into, one.root)
    assert outcome.exit_code == 0, outcome.stderr
    assert hosts_by_peer(RunFolder.open(into)) == dict.fromkeys(range(4), "one")


def test_creates_no_folder_if_nothing_was_found(tmp_path: Path, host: Host, into: Path, invoke: Invoke) -> None:
    outcome = invoke("collect", into, tmp_path / "nowhere", tmp_path)
    assert outcome.exit_code == 1
    assert outcome.stderr == (
        f"error: no run folder found, nothing collected\n{tmp_path}/nowhere: no such folder\n"
        f"{tmp_path}: contains no run folder within 2 levels\n"
    )
    assert not into.exists()
    assert "not a collection yet; give the folders to collect from" in invoke("collect", into).stderr
    assert not into.exists()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"id": "f" * 16}, f"({RUN_ID}) and OTHER ({'f' * 16}) have different runs"),
        ({"config_hash": "e" * 64}, f"({'d' * 64}) and OTHER ({'e' * 64}) have different run files"),
    ],
)
def test_rejects_folders_of_different_runs(host: Host, into: Path, invoke: Invoke, change: Any, reason: str) -> None:
    one, other = host("one", 0), host("other", 1, **change)
    outcome = invoke("collect", into, one.root, other.root)
    assert outcome.exit_code == 1
    assert outcome.stderr == f"error: {one.root} {reason.replace('OTHER', str(other.root))}; nothing collected\n"
    assert not into.exists()
    folder, _ = gather(into, one.root)
    before = sorted(into.rglob("*"))
    with pytest.raises(CollectError, match=f"{into} .* and {other.root} .* have different"):
        gather(into, other.root)
    assert sorted(into.rglob("*")) == before
    assert hosts_by_peer(folder) == {0: "one"}


def test_writes_only_into_a_new_folder_or_an_unlocked_collection(tmp_path: Path, host: Host, into: Path) -> None:
    one = host("one", 0)
    with pytest.raises(CollectError, match="a run folder that its peers write to"):
        gather(one.root, one.root)
    into.mkdir(parents=True)
    (into / "notes").touch()
    with pytest.raises(CollectError, match="neither empty nor a collection"):
        gather(into, one.root)
    assert [path.name for path in into.iterdir()] == ["notes"]
    (into / "notes").unlink()
    lock = os.open(into, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(CollectError, match="in use by another `p2pfl collect`"):
        gather(into, one.root)
    os.close(lock)
    gather(into, one.root)


# ---- commands on a collection


@pytest.fixture
def collection(host: Host, into: Path) -> RunFolder:
    """A collection whose peer 0 is training on another host, under the process id that this test has here."""
    return gather(into, host("one", 0, phase="training", rounds=1).root, host("other", 1, 2).root)[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "arguments", [["stop", "RUN"], ["stop", "RUN", "--kill"], ["resume", "RUN"], ["join", "RUN", "--peer", 0]]
)
def test_refuses_to_start_or_stop_collected_peers(
    collection: RunFolder, invoke: Invoke, arguments: list[Any]
) -> None:
    before = {path: path.read_bytes() for path in collection.root.rglob("*") if path.is_file()}
    outcome = invoke(*(collection.root if argument == "RUN" else argument for argument in arguments))
    assert outcome.exit_code == 1
    assert outcome.stderr.startswith(f"error: {collection.root}: ")
    assert {path: path.read_bytes() for path in collection.root.rglob("*") if path.is_file()} == before


def test_logs_does_not_follow_a_collection(collection: RunFolder, invoke: Invoke) -> None:
    outcome = invoke("logs", collection.root, "-f", "-n", 1)
    assert len(outcome.stdout.splitlines()) == 1
    assert outcome.stderr == (
        f"end of the collected logs; for newer entries, copy them again: p2pfl collect {collection.root}\n"
    )
    assert all(has_ended(collection, files) for files in collection.peers())


@pytest.mark.exhaustive
def test_list_shows_the_worst_state_of_collected_peers(host: Host, into: Path) -> None:
    gather(into, host("one", 0, 1).root)
    assert [line.state for line in find_runs(into.parent)] == ["incomplete"]
    gather(into, host("other", 2, phase="waiting").root)
    assert [line.state for line in find_runs(into.parent)] == ["unfinished"]
    gather(into, host("third", 3, phase="failed").root)
    assert [line.state for line in find_runs(into.parent)] == ["failed"]


def test_a_location_that_cannot_be_read_does_not_hinder_the_others(host: Host, into: Path, invoke: Invoke) -> None:
    unreadable = into.parent / ("x" * 256)
    outcome = invoke("collect", into, host("one", 0, 1).root, unreadable)
    assert outcome.exit_code == 1
    assert f"{unreadable}: cannot be read: " in outcome.stderr
    assert "File name too long" in outcome.stderr
    assert len(hosts_by_peer(RunFolder.open(into))) == 2


@pytest.mark.parametrize("name", ["007", "0", "1", "٠٧", "..evil", "link"])
def test_reads_only_folders_that_peers_create(name: str, host: Host, into: Path) -> None:
    """Or the files of one peer would be looked for in the folder of another name, or anywhere."""
    one = host("one", 0, 1)
    folder = one.root / "peers" / name
    one.peer(0).root.rename(folder)
    if name == "link":
        one.peer(0).root.symlink_to(folder)
    assert hosts_by_peer(gather(into, one.root)[0]) == {1: "one"}
