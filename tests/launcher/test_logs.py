from __future__ import annotations

import threading

import pytest

from launcher import logs
from launcher.logs import LogFile
from p2pfl.runfolder import Status


def stamp(second: int, text: str) -> str:
    return f"2026-11-21T02:41:{second:02d}.000 INFO    {text}\n"


@pytest.fixture
def folder(make_folder):
    folder = make_folder(peers=3)
    folder.peer(0).log.write_text(stamp(1, "round 0") + stamp(4, "round 1"))
    folder.peer(1).log.write_text(stamp(2, "round 0") + "Traceback:\n  ValueError\n" + stamp(5, "over"))
    return folder  # peer 2 never wrote a log


def lines(outcome) -> list[str]:
    assert outcome.exit_code == 0
    return [line.replace("2026-11-21T02:41:", "").replace(".000 INFO   ", "") for line in outcome.stdout.splitlines()]


def test_logs_are_merged_by_time_and_tracebacks_stay_with_their_line(folder, invoke):
    assert lines(invoke("logs", folder.root)) == [
        "  0 │ 01 round 0",
        "  1 │ 02 round 0",
        "  1 │ Traceback:",
        "  1 │   ValueError",
        "  0 │ 04 round 1",
        "  1 │ 05 over",
    ]


def test_one_peer_needs_no_prefix(folder, invoke):
    assert lines(invoke("logs", folder.root, "--peer", 0)) == ["01 round 0", "04 round 1"]
    assert len(lines(invoke("logs", folder.root, "--peer", 0, "--peer", 1))) == 6


def test_grep_keeps_whole_entries(folder, invoke):
    assert lines(invoke("logs", folder.root, "--peer", 1, "--grep", "Value.rror")) == [
        "02 round 0", "Traceback:", "  ValueError"
    ]  # fmt: skip


def test_grep_minds_case_unless_it_is_told_not_to(folder, invoke):
    assert lines(invoke("logs", folder.root, "--grep", "ROUND")) == []
    assert len(lines(invoke("logs", folder.root, "-i", "--grep", "ROUND"))) == 5


def test_following_ends_quietly_with_ctrl_c(folder, invoke, monkeypatch):
    def press(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(logs, "has_ended", lambda folder, place: False)
    monkeypatch.setattr(logs.time, "sleep", press)
    outcome = invoke("logs", folder.root, "--follow", "--peer", 0)
    assert outcome.exit_code == 130
    assert len(outcome.stdout.splitlines()) == 2
    assert outcome.stderr == "\n"


def test_lines_counts_entries_from_the_end(folder, invoke):
    assert lines(invoke("logs", folder.root, "--lines", 2)) == ["  0 │ 04 round 1", "  1 │ 05 over"]
    assert lines(invoke("logs", folder.root, "--lines", 0)) == []


def test_a_peer_that_is_not_there(folder, invoke):
    outcome = invoke("logs", folder.root, "--peer", 7)
    assert outcome.exit_code == 1
    assert "has no peer 7; it has 0-2" in outcome.stderr


def test_a_growing_file_is_read_in_whole_lines(tmp_path):
    path = tmp_path / "peer.log"
    log = LogFile(0, path)
    assert log.read() == []  # not there yet
    path.write_text(stamp(1, "one")[:-5])
    assert log.read() == []
    path.write_text(stamp(1, "one") + stamp(2, "two"))
    assert [entry.text[-3:] for entry in log.read()] == ["one", "two"]
    with path.open("a") as file:
        file.write("  a late continuation\n")
    (late,) = log.read()
    assert late.stamp == "2026-11-21T02:41:02.000"
    assert log.read() == []


def test_follow_ends_with_the_last_word_of_the_last_peer(folder, make_process):
    process = make_process(folder, 0)
    files = logs.open_logs(folder, [0])
    found = []
    reader = threading.Thread(target=lambda: found.extend(logs.follow(folder, files, bool)))
    reader.start()
    with folder.peer(0).log.open("a") as file:
        file.write(stamp(9, "finished"))
    folder.peer(0).write_status(Status(0, process.pid, "finished"))
    reader.join(200)
    assert not reader.is_alive()
    assert [entry.text[-8:] for entry in found] == [" round 0", " round 1", "finished"]


def test_follow_does_not_wait_for_the_dead(folder, make_process):
    process = make_process(folder, 0)
    assert not logs.has_ended(folder, folder.peer(0))
    process.kill()
    process.wait()
    assert logs.has_ended(folder, folder.peer(0))


def test_follow_does_not_wait_for_a_peer_that_nobody_will_start(make_folder):
    folder = make_folder(results={0: None})
    assert logs.has_ended(folder, folder.peer(0))
