"""ZmqLink: how neighbors find each other."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
from pathlib import Path
from typing import Any

import pytest

from p2pfl.errors import RunFolderError
from p2pfl.messaging.topology import Topology
from p2pfl.run_folder.files import allow_many_files
from peers import io_loop, resolver
from peers.io_loop import TICK
from tests.bodies import PAIR, Word, complete
from tests.sockets.raw_peer import LAYOUTS, exchange, up

pytestmark = pytest.mark.usefixtures("no_needless_waits")


async def test_peers_may_start_in_any_order(sockets: Any) -> None:
    endpoints = [sockets.endpoint(me, complete(5), LAYOUTS) for me in range(5)]
    links = [sockets.link(endpoint) for endpoint in endpoints]
    tasks = []
    for me in random.sample(range(5), 5):
        await links[me].start()
        tasks.append(asyncio.create_task(endpoints[me].begin(0).exchange(Word(f"from {me}"))))
        await asyncio.sleep(random.choice([0, 0.03]))
    for task in tasks:
        assert len(await task) == 4


async def test_finds_an_address_published_within_one_tick_of_the_file_systems_clock(
    sockets: Any, alone: Any, eventually: Any, tmp_path: Path
) -> None:
    await eventually(lambda: alone.link.io.next_check > 0)
    before = tmp_path.stat()
    assert (tmp_path / "00").read_text() == alone.link.address
    second = await up(sockets, 1)
    os.utime(tmp_path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert await exchange([alone, second]) == [{1: "1"}, {0: "0"}]
    await sockets.close()
    assert not (tmp_path / "00").exists()


async def test_connects_a_complete_graph(sockets: Any) -> None:
    allow_many_files()
    endpoints = await sockets.open(complete(30), LAYOUTS, faults={"delay": 0.0})
    assert [len(one) for one in await exchange(endpoints)] == [29] * 30


async def test_a_port_that_closes_its_connections_does_not_count_as_the_neighbor(
    sockets: Any, tmp_path: Path, caplog: Any, eventually: Any
) -> None:
    """A forwarded port or a proxy accepts connections before the neighbor has started."""
    caplog.set_level(logging.INFO)
    checked: list[float] = []

    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(close, "127.0.0.1", 0) as server:
        (tmp_path / "01").write_text(f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        zero = await up(sockets, 0, give_up=0.1)
        connection = zero.link.io.connections[1]
        await eventually(lambda: connection.lost_at is not None)
        check = connection.check

        def note(now: float) -> None:
            check(now)
            checked.append(now)

        connection.check = note
        await eventually(lambda: checked and checked[-1] - connection.lost_at > 0.1)
    one = await up(sockets, 1)
    assert await exchange([zero, one]) == [{1: "1"}, {0: "0"}]
    assert "connection lost" not in caplog.text
    assert "declared dead" not in caplog.text


async def test_survives_an_address_that_another_peer_took_over(sockets: Any, tmp_path: Path, eventually: Any) -> None:
    """After a restart, peer 2 may have the port that was peer 1's."""
    topology = complete(3)
    endpoints = [sockets.endpoint(me, topology, LAYOUTS) for me in range(3)]
    links = [sockets.link(endpoint) for endpoint in endpoints]
    await links[2].start()
    (tmp_path / "01").write_text(links[2].address)
    await links[0].start()
    net, other = endpoints[0].begin(0), endpoints[2].begin(0)
    await net.broadcast(Word("from 0"))
    assert await other.gather(Word, of=[0]) == {0: Word("from 0")}
    await links[1].start()
    assert await endpoints[1].begin(0).gather(Word, of=[0]) == {0: Word("from 0")}
    await net.send(2, Word("once more"))
    assert await other.gather(Word, of=[0]) == {0: Word("once more")}


async def test_reports_an_address_that_cannot_be_bound(sockets: Any) -> None:
    endpoint = sockets.endpoint(0, PAIR, LAYOUTS)
    with pytest.raises(RunFolderError, match=r"tcp://203\.0\.113\.1:\* cannot be bound: .*; transport\.host must be"):
        await sockets.link(endpoint, host="203.0.113.1").start()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(RunFolderError, match=rf"127\.0\.0\.1:{port} cannot be bound: .*; stop the process that"):
            await sockets.link(endpoint, port=port).start()
    sockets.links.clear()


async def test_connects_by_host_name_with_several_addresses(sockets: Any, monkeypatch: Any, eventually: Any) -> None:
    monkeypatch.setattr(resolver, "ADDRESS_PERIOD", 0.3)
    monkeypatch.setattr(io_loop, "STALE", 0.1)
    monkeypatch.setattr(resolver, "look_up_host", lambda host, port: {"alpha": ["192.0.2.1", "127.0.0.1"]}[host])
    zero, one = await sockets.open(PAIR, LAYOUTS, address="tcp://alpha:{port}")
    assert zero.link.address == zero.link.bound.replace("127.0.0.1", "alpha")
    assert await exchange([zero, one]) == [{1: "1"}, {0: "0"}]


@pytest.mark.skipif(not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists(), reason="needs IPv6")
@pytest.mark.parametrize("host", ["::1", "[::1]"])
async def test_connects_over_ipv6(encrypted: Any, host: str) -> None:
    zero, one = await encrypted.open(PAIR, LAYOUTS, host=host)
    assert zero.link.address.startswith("tcp://[::1]:")
    assert await exchange([zero, one]) == [{1: "1"}, {0: "0"}]


async def test_logs_once_which_neighbors_were_not_reached(
    sockets: Any, caplog: Any, monkeypatch: Any, eventually: Any
) -> None:
    caplog.set_level(logging.INFO)
    star = Topology.from_edges(4, [(0, 1), (0, 2), (0, 3)])
    links = [sockets.link(sockets.endpoint(me, star, LAYOUTS)) for me in range(2)]
    (sockets.addresses / "03").write_text("tcp://127.0.0.1:9")  # where no process listens
    for link in links:
        await link.start()
    await eventually(lambda: links[0].io.connections[1].up and links[1].io.connections[0].up)
    assert "neighbors not reached yet" not in caplog.text
    monkeypatch.setattr(io_loop, "OVERDUE", 0.0)
    await eventually(lambda: "not reached yet" in caplog.text)
    look = links[0].io.next_check
    await eventually(lambda: links[0].io.next_check > look + TICK)
    lines = [record.getMessage() for record in caplog.records if "not reached yet" in record.getMessage()]
    where = f"each peer writes its address to {sockets.addresses} unless transport.hosts has it"
    assert lines == [
        f"neighbors not reached yet: peer 2 at no known address, peer 3 at tcp://127.0.0.1:9; {where}; 127.0.0.1 is "
        "this host itself: if peer 3 runs on another one, give its IP address in transport.hosts"
    ]


async def test_names_the_host_name_that_leads_to_this_host_or_nowhere(
    sockets: Any, caplog: Any, monkeypatch: Any, eventually: Any
) -> None:
    """Debian's /etc/hosts has 127.0.1.1 for the name of the host, and images of machines are copied."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(resolver, "look_up_host", lambda host, port: {"alpha": ["127.0.1.1"], "beta": []}[host])
    monkeypatch.setattr(io_loop, "OVERDUE", 0.5)
    star = Topology.from_edges(3, [(0, 1), (0, 2)])
    hosts = {"0": "tcp://127.0.0.1:{port}", "1": "tcp://alpha:9", "2": "tcp://beta:9"}
    link = sockets.link(sockets.endpoint(0, star, LAYOUTS), hosts=hosts)
    await link.start()
    await eventually(lambda: "not reached yet" in caplog.text)
    assert (
        "peer 1 at tcp://127.0.1.1:9 (given as tcp://alpha:9), peer 2 at tcp://beta:9, which does not resolve; "
        "127.0.1.1 is this host itself: if peer 1 runs on another one, correct the line of its name in /etc/hosts "
        "here, or give its IP address in transport.hosts"
    ) in caplog.text
