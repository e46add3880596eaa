"""What of a log goes to the file, and what to who watches."""

from __future__ import annotations

import io
import re
from pathlib import Path

from p2pfl.peerlog import close_logger, details, peer_logger


def test_who_watches_is_spared_the_date_and_the_details(tmp_path: Path) -> None:
    shown = io.StringIO()
    log = peer_logger(3, tmp_path / "peer.log", shown)
    log.info("round %d", 7, extra=details("ce 2.3", "100% of it"))
    log.warning("peer 2 is late")
    close_logger(log)
    date, time = r"\d{4}-\d\d-\d\dT", r"\d\d:\d\d:\d\d\.\d{3}"
    kept = rf"{date}{time} INFO    round 7 \| ce 2\.3 \| 100% of it\n{date}{time} WARNING peer 2 is late\n"
    assert re.fullmatch(kept, (tmp_path / "peer.log").read_text())
    assert re.fullmatch(rf"{time} INFO    round 7\n{time} WARNING peer 2 is late\n", shown.getvalue())


def test_a_traceback_comes_after_the_details(tmp_path: Path) -> None:
    log = peer_logger(3, tmp_path / "peer.log")
    try:
        raise ValueError("no such thing")
    except ValueError:
        log.exception("failed", extra=details("round 7"))
    close_logger(log)
    lines = (tmp_path / "peer.log").read_text().splitlines()
    assert lines[0].endswith("ERROR   failed | round 7")
    assert lines[-1] == "ValueError: no such thing"
