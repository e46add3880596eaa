"""Transfers that share links and interfaces, against events computed by hand."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import pytest

from p2pfl.simulation.transfers import Transfers, fair_rates
from p2pfl.simulation.virtual_loop import VirtualLoop

Ends = dict[str, float]


def ends_of(act: Callable[[Transfers, Callable[[str], Callable[[], None]]], None], **settings: float) -> Ends:
    """Return when each transfer that ``act`` begins has ended."""
    loop, ends = VirtualLoop(stall=math.inf), Ends()
    transfers = Transfers(loop, 4, settings["bandwidth"], settings.get("interface"))

    def ended(name: str) -> Callable[[], None]:
        return lambda: ends.update({name: loop.time()})

    async def run() -> None:
        act(transfers, ended)
        await asyncio.sleep(1000.0)

    try:
        loop.run_until_complete(run())
    finally:
        loop.close()
    return ends


def test_transfers_without_interfaces_do_not_slow_each_other_down() -> None:
    def act(transfers: Transfers, ended: Callable[[str], Callable[[], None]]) -> None:
        transfers.begin(0, 1, 100, ended("one"))
        transfers.begin(0, 2, 200, ended("two"))

    assert ends_of(act, bandwidth=50.0) == {"one": 2.0, "two": 4.0}


def test_transfers_of_one_sender_share_its_interface_until_one_ends() -> None:
    def act(transfers: Transfers, ended: Callable[[str], Callable[[], None]]) -> None:
        transfers.begin(0, 1, 100, ended("short"))  # 50 B/s: 2 s
        transfers.begin(0, 2, 200, ended("long"))  # 100 bytes left after 2 s, at the 80 B/s of its link

    found = ends_of(act, bandwidth=80.0, interface=100.0)
    assert found == pytest.approx({"short": 2.0, "long": 3.25})


def test_a_transfer_that_begins_slows_down_another_one() -> None:
    def act(transfers: Transfers, ended: Callable[[str], Callable[[], None]]) -> None:
        transfers.begin(0, 2, 300, ended("first"))  # alone for 1 s: 100 bytes
        asyncio.get_running_loop().call_at(1.0, transfers.begin, 1, 2, 100, ended("second"))  # 50 B/s each, 2 s

    found = ends_of(act, bandwidth=500.0, interface=100.0)
    assert found == pytest.approx({"second": 3.0, "first": 4.0})


def test_a_cancelled_transfer_leaves_its_rate_to_others_and_never_ends() -> None:
    def act(transfers: Transfers, ended: Callable[[str], Callable[[], None]]) -> None:
        cancelled = transfers.begin(0, 1, 100, ended("cancelled"))
        transfers.begin(0, 2, 100, ended("other"))  # 50 bytes in the first second, then 100 B/s
        asyncio.get_running_loop().call_at(1.0, transfers.cancel, cancelled)

    assert ends_of(act, bandwidth=500.0, interface=100.0) == pytest.approx({"other": 1.5})


def test_a_transfer_without_interface_can_be_cancelled() -> None:
    def act(transfers: Transfers, ended: Callable[[str], Callable[[], None]]) -> None:
        transfers.cancel(transfers.begin(0, 1, 100, ended("cancelled")))

    assert ends_of(act, bandwidth=500.0) == {}


def test_the_next_transfer_may_begin_when_one_ends() -> None:
    def act(transfers: Transfers, ended: Callable[[str], Callable[[], None]]) -> None:
        def next_one() -> None:
            ended("one")()
            transfers.begin(0, 1, 100, ended("two"))

        transfers.begin(0, 1, 100, next_one)

    assert ends_of(act, bandwidth=500.0, interface=100.0) == pytest.approx({"one": 1.0, "two": 2.0})


@pytest.mark.parametrize(
    ("senders", "receivers", "bandwidth", "rates"),
    [
        ([0, 1], [1, 0], 1000.0, [90.0, 90.0]),  # both directions of an interface are its own
        ([0, 1, 1], [2, 2, 3], 1000.0, [45.0, 45.0, 45.0]),
        ([0, 1, 3, 1], [2, 2, 2, 4], 1000.0, [30.0, 30.0, 30.0, 60.0]),  # what host 2 cannot take is left to host 4
        ([0, 1, 3, 1], [2, 2, 2, 4], 50.0, [30.0, 30.0, 30.0, 50.0]),
        ([0, 1, 2], [3, 4, 0], 20.0, [20.0, 20.0, 20.0]),
    ],
)
def test_rates_are_max_min_fair(
    senders: list[int], receivers: list[int], bandwidth: float, rates: list[float]
) -> None:
    assert fair_rates(senders, receivers, 5, bandwidth, 90.0).tolist() == pytest.approx(rates)
