"""The peer log: what goes to the file, and what to the terminal."""

from __future__ import annotations

import fcntl
import io
import json
import re
from pathlib import Path

import pytest

from p2pfl.run_folder.peer_log import MAX_LINE, LogSettings, close_logger, details, peer_logger, rotated


def test_echo_omits_the_date_and_details(tmp_path: Path) -> None:
    terminal = io.StringIO()
    log = peer_logger(3, tmp_path / "peer.log", terminal)
    log.info("round %d", 7, extra=details("ce 2.3", "100% of it"))
    log.warning("peer 2 is late")
    close_logger(log)
    date, time = r"\d{4}-\d\d-\d\dT", r"\d\d:\d\d:\d\d\.\d{3}"
    logged = rf"{date}{time} INFO    round 7 \| ce 2\.3 \| 100% of it\n{date}{time} WARNING peer 2 is late\n"
    assert re.fullmatch(logged, (tmp_path / "peer.log").read_text())
    assert re.fullmatch(rf"{time} INFO    round 7\n{time} WARNING peer 2 is late\n", terminal.getvalue())


def test_traceback_follows_the_details(tmp_path: Path) -> None:
    log = peer_logger(3, tmp_path / "peer.log")
    try:
        raise ValueError("no such thing")
    except ValueError:
        log.exception("failed", extra=details("round 7"))
    close_logger(log)
    lines = (tmp_path / "peer.log").read_text().splitlines()
    assert lines[0].endswith("ERROR   failed | round 7")
    assert lines[-1] == "ValueError: no such thing"


def test_escapes_control_characters_in_file_and_echo(tmp_path: Path) -> None:
    terminal = io.StringIO()
    log = peer_logger(3, tmp_path / "peer.log", terminal)
    log.warning("peer %s has disconnected", "\x1b]0;2\x07", extra=details("at \x9b2J\r"))
    close_logger(log)
    assert terminal.getvalue().endswith("peer \\x1b]0;2\\x07 has disconnected\n")
    assert (tmp_path / "peer.log").read_text().endswith(" has disconnected | at \\x9b2J\\r\n")


def test_long_details_go_to_further_lines(tmp_path: Path) -> None:
    log = peer_logger(3, tmp_path / "peer.log")
    log.info("round done t=7", extra=details(*(f"detail number {number} of some length" for number in range(9))))
    close_logger(log)
    lines = (tmp_path / "peer.log").read_text().splitlines()
    assert len(lines) > 1
    assert all(len(line) <= MAX_LINE for line in lines)
    assert [line[:6] for line in lines[1:]] == ["    | "] * (len(lines) - 1)
    assert " ".join(lines).count("| detail number") == 9


def test_json_has_an_object_per_entry(tmp_path: Path) -> None:
    log = peer_logger(3, tmp_path / "peer.log", settings=LogSettings("json"))
    try:
        raise ValueError("\x1b[2J")
    except ValueError:
        log.exception("failed\nbadly", extra=details("round 7"))
    close_logger(log)
    (line,) = (tmp_path / "peer.log").read_text().splitlines()
    entry = json.loads(line)
    assert (entry["level"], entry["peer"], entry["message"], entry["details"]) == (
        *("ERROR", 3, "failed\nbadly"),
        ["round 7"],
    )
    assert entry["traceback"].endswith("ValueError: \x1b[2J")
    assert "\x1b" not in line
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}", entry["time"])


def test_a_full_log_is_rotated_and_stays_locked(tmp_path: Path) -> None:
    path = tmp_path / "peer.log"
    log = peer_logger(3, path, settings=LogSettings(max_bytes=100))
    log.info("first %s", "x" * 100)
    log.info("second")
    with path.open() as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    log.info("third %s", "x" * 100)
    log.info("fourth")
    close_logger(log)
    assert [line.split()[2] for line in rotated(path).read_text().splitlines()] == ["second", "third"]
    assert path.read_text().endswith("fourth\n")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["peer.log", "peer.log.1"]


def test_a_log_that_cannot_be_rotated_grows_on(tmp_path: Path) -> None:
    path = tmp_path / "peer.log"
    rotated(path).mkdir()
    log = peer_logger(3, path, settings=LogSettings(max_bytes=10))
    log.info("first")
    log.info("second")
    close_logger(log)
    assert [line.split()[2] for line in path.read_text().splitlines()] == ["first", "second"]


def test_each_peer_has_its_level() -> None:
    info = {"log": {"format": "json", "level": "warning", "levels": {"3": "debug"}, "max_bytes": 5}}
    assert LogSettings.of(info, 3) == LogSettings("json", "debug", 5)
    assert LogSettings.of(info, 2).level == "warning"
    assert LogSettings.of({}, 2) == LogSettings()
