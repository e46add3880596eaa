"""Fixtures for tests over real sockets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from peers import connection, io_loop
from tests.sockets.raw_peer import RawPeer, up


@pytest.fixture
def raw(tmp_path: Path) -> Iterator[Any]:
    """``raw(1)``: a RawPeer as peer 1."""
    made: list[RawPeer] = []

    def make(me: int) -> RawPeer:
        made.append(RawPeer(me, tmp_path))
        return made[-1]

    yield make
    for peer in made:
        peer.close()


@pytest.fixture
def no_needless_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pytest's timeout stop a link that waits for a missing confirmation; skip waits that no test depends on."""
    monkeypatch.setattr(connection, "CLOSE_TIMEOUT", 1000.0)
    monkeypatch.setattr(io_loop, "REFUSAL_PERIOD", 0.0)
    monkeypatch.setattr(io_loop, "STALE", 0.1)


@pytest.fixture
async def alone(sockets: Any) -> Any:
    """Peer 0 of two, whose neighbor is not running."""
    return await up(sockets, 0)
