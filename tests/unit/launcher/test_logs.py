"""`p2pfl logs`."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from click.testing import Result

from launcher.facts import logs
from launcher.facts.logs import LogFile
from p2pfl.run_folder.folder import RunFolder
from tests.launcher_fixtures import Invoke, MakeFolder


def stamp(second: int, text: str) -> str:
    return f"2026-11-21T02:41:{second:02d}.000 INFO    {text}\n"


@pytest.fixture
def folder(make_folder: MakeFolder) -> RunFolder:
    folder = make_folder(peers=3)
    folder.peer(0).log.write_text(stamp(1, "round 0") + stamp(4, "round 1"))
    folder.peer(1).log.write_text(stamp(2, "round 0") + "Traceback:\n  ValueError\n" + stamp(5, "over"))
    return folder  # peer 2 has no log


def lines(outcome: Result) -> list[str]:
    assert outcome.exit_code == 0
    return [line.replace("2026-11-21T02:41:", "").replace(".000 INFO   ", "") for line in outcome.stdout.splitlines()]


def test_merges_logs_by_time_and_keeps_tracebacks_together(folder: RunFolder, invoke: Invoke) -> None:
    assert lines(invoke("logs", folder.root)) == [
        "  0 │ 01 round 0",
        "  1 │ 02 round 0",
        "  1 │ Traceback:",
        "  1 │   ValueError",
        "  0 │ 04 round 1",
        "  1 │ 05 over",
    ]


def test_prints_no_prefix_for_a_single_peer(folder: RunFolder, invoke: Invoke) -> None:
    assert lines(invoke("logs", folder.root, "--peer", 0)) == ["01 round 0", "04 round 1"]
    assert len(lines(invoke("logs", folder.root, "--peer", 0, "--peer", 1))) == 6


def test_grep_selects_whole_entries(folder: RunFolder, invoke: Invoke) -> None:
    assert lines(invoke("logs", folder.root, "--peer", 1, "--grep", "Value.rror")) == [
        "02 round 0", "Traceback:", "  ValueError"
    ]  # fmt: skip


def test_grep_is_case_sensitive_by_default(folder: RunFolder, invoke: Invoke) -> None:
    assert lines(invoke("logs", folder.root, "--grep", "ROUND")) == []
    assert len(lines(invoke("logs", folder.root, "-i", "--grep", "ROUND"))) == 5


def test_ctrl_c_ends_following_quietly(folder: RunFolder, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def press(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(logs, "has_ended", lambda folder, files: False)
    monkeypatch.setattr(time, "sleep", press)
    outcome = invoke("logs", folder.root, "--follow", "--peer", 0)
    assert outcome.exit_code == 130
    assert len(outcome.stdout.splitlines()) == 2
    assert outcome.stderr == "\n"


def test_lines_selects_the_last_entries(folder: RunFolder, invoke: Invoke) -> None:
    assert lines(invoke("logs", folder.root, "--lines", 2)) == ["  0 │ 04 round 1", "  1 │ 05 over"]
    assert lines(invoke("logs", folder.root, "--lines", 0)) == []


def test_rejects_an_unknown_peer(folder: RunFolder, invoke: Invoke) -> None:
    outcome = invoke("logs", folder.root, "--peer", 7)
    assert outcome.exit_code == 1
    assert "has no peer 7; it has 0-2" in outcome.stderr


def test_reads_a_growing_log_in_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "peer.log"
    log = LogFile(0, path)
    assert log.read() == []  # does not exist yet
    path.write_text(stamp(1, "one")[:-5])
    assert log.read() == []
    path.write_text(stamp(1, "one") + stamp(2, "two"))
    assert [entry.text[-3:] for entry in log.read()] == ["one", "two"]
    with path.open("a") as file:
        file.write("  a late continuation\n")
    (late,) = log.read()
    assert late.stamp == "2026-11-21T02:41:02.000"
    assert log.read() == []


def test_follow_does_not_wait_for_a_peer_without_launcher(make_folder: MakeFolder) -> None:
    folder = make_folder(results={0: None})
    assert logs.has_ended(folder, folder.peer(0))


def entry(second: int, text: str, level: str = "INFO") -> str:
    return f"2026-11-21T02:41:{second:02d}.000 {level:<7} {text}\n"


@pytest.fixture
def varied(make_folder: MakeFolder) -> RunFolder:
    folder = make_folder(peers=2)
    folder.peer(0).log.write_text(
        entry(1, "round done t=0") + entry(10, "skipped rounds t=1..3", "WARNING") + entry(40, "failed", "ERROR")
    )
    folder.peer(1).log.write_text(
        '{"time": "2026-11-21T02:41:20.000", "level": "INFO", "peer": 1, "message": "round done t=2", '
        '"details": ["loss ce=1", "sent 3"]}\n'
        '{"time": "2026-11-21T02:41:50.000", "level": "ERROR", "peer": 1, "message": "\\u001b[2Jno", '
        '"traceback": "Traceback:\\n  ValueError"}\n{"damaged\n'
    )
    return folder


def test_json_entries_are_shown_as_text(varied: RunFolder, invoke: Invoke) -> None:
    assert lines(invoke("logs", varied.root, "--peer", 1)) == [
        "20 round done t=2 | loss ce=1 | sent 3",
        r"2026-11-21T02:41:50.000 ERROR   \x1b[2Jno".replace("2026-11-21T02:41:", "").replace(".000 INFO   ", ""),
        "Traceback:",
        "  ValueError",
        '{"damaged',
    ]


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        (["--level", "warning"], ["10", "40", "50"]),
        (["--level", "error"], ["40", "50"]),
        (["--round", 2], ["10", "20"]),
        (["--round", 0], ["01"]),
        (["--since", "30s"], ["20", "40", "50"]),
        (["--since", "1h"], ["01", "10", "20", "40", "50"]),
        (["--since", "99999999h"], ["01", "10", "20", "40", "50"]),
        (["--since", "999999999999999h"], ["01", "10", "20", "40", "50"]),
        (["--since", "2026-11-21T02:41:2"], []),
        (["--since", "2026-11-21T02:41:20"], ["20", "40", "50"]),
        (["--since", "2026-11-21"], ["01", "10", "20", "40", "50"]),
        (["--level", "warning", "--round", 2], ["10"]),
    ],
)
def test_selects_entries(varied: RunFolder, invoke: Invoke, options: list[object], seconds: list[str]) -> None:
    outcome = invoke("logs", varied.root, *options)
    assert re.findall(r"T02:41:(\d\d)", outcome.stdout) == seconds
    assert (outcome.exit_code == 2) == (not seconds)


def test_reads_a_log_that_is_rotated_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "peer.log"
    path.with_name("peer.log.1").write_text(stamp(1, "one"))
    path.write_text(stamp(2, "two"))
    log = LogFile(0, path)
    assert [entry.text[-3:] for entry in log.read()] == ["one", "two"]
    path.write_text(stamp(2, "two") + stamp(3, "six"))
    path.replace(path.with_name("peer.log.1"))
    path.write_text(stamp(4, "ten"))
    assert [entry.text[-3:] for entry in log.read()] == ["six", "ten"]
    assert log.read() == []
