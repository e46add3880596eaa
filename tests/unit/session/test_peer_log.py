"""The peer log: what goes to the file, and what to the terminal."""

from __future__ import annotations

import io
import re
from pathlib import Path

from p2pfl.session.peer_log import close_logger, details, peer_logger


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
