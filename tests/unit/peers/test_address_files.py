"""When published addresses may have changed."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import pytest

from p2pfl.run_file.schema import Transport
from peers.address_files import FEW, AddressFiles
from peers.resolver import Resolver


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def address_files(folder: Path, me: int, clock: Clock) -> AddressFiles:
    resolver = Resolver(clock, logging.getLogger("addresses"))
    return AddressFiles(me, folder, Transport().book(2), (1 - me,), resolver, clock)


@pytest.mark.parametrize("years", [-30, 0, 30])
def test_detects_changes_whatever_the_file_systems_clock_says(years: int, tmp_path: Path) -> None:
    clock = Clock()
    addresses = address_files(tmp_path, 0, clock)
    stamp = time.time() + years * 365 * 86400

    def version() -> int:
        os.utime(tmp_path, (stamp, stamp))  # what any change of the folder would set it to
        return addresses.version()

    assert version() == 0
    clock.now += 1.9
    assert version() == 0
    clock.now += 0.2
    settled = version()
    assert settled > 0
    clock.now += 100
    assert version() == settled
    stamp -= 5  # the clock is set back, and the folder changes
    assert version() == 0
    clock.now += 2.1
    assert version() not in (0, settled)


def test_withdraws_only_its_own_address(tmp_path: Path) -> None:
    zero, one = (address_files(tmp_path, me, Clock()) for me in range(2))
    assert one.is_withdrawn(0)
    zero.publish("tcp://127.0.0.1:5700")
    assert one.address_of(0) == "tcp://127.0.0.1:5700"
    assert not one.is_withdrawn(0)
    zero.withdraw("tcp://127.0.0.1:5701")  # another process of peer 0 has published its address since
    assert not one.is_withdrawn(0)
    zero.withdraw("tcp://127.0.0.1:5700")
    assert one.is_withdrawn(0)
    assert one.address_of(0) is None


def test_lists_the_folder_only_to_look_for_many_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = address_files(tmp_path, 0, Clock())
    for peer in (1, 77):
        (tmp_path / f"{peer:02d}").write_text("tcp://127.0.0.1:5700")
    (tmp_path / "03.dead").touch()
    known, dead = addresses.look(range(FEW + 1))
    assert (set(known), set(dead)) == ({1, 77}, {3})
    monkeypatch.setattr(os, "listdir", lambda folder: pytest.fail(f"{folder} was listed"))
    known, dead = addresses.look([1, 2, 3])
    assert [peer for peer in known if addresses.address_of(peer)] == [1]
    assert dead == [3]


def test_a_peer_that_starts_again_is_not_dead(tmp_path: Path) -> None:
    zero, one = (address_files(tmp_path, me, Clock()) for me in range(2))
    (tmp_path / "00.dead").touch()
    assert one.look([0]) == ([0], [0])
    zero.publish("tcp://127.0.0.1:5700")
    assert one.look([0]) == ([0], [])
