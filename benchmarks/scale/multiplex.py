"""One connection per edge against one per pair of hosts, over plain pyzmq: what multiplexing could save at best.

Two groups of processes stand for the peers of two hosts. Each peer has some neighbors in the other group, sends its
body to each of them in every round, and waits for theirs.

    edges   as p2pfl does it: a ROUTER per peer, and a DEALER per neighbor connected to the neighbor's ROUTER
    pairs   a DEALER per peer to a forwarder on its host (Unix socket); the two forwarders have one connection per
            direction and put the frames of all edges into it

TCP connections are encrypted (CURVE), as those between hosts are; all is on the loopback device.
"""

from __future__ import annotations

import multiprocessing  # noqa: TID251  # forks or communicates with its children
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection  # noqa: TID251
from multiprocessing.context import ForkProcess  # noqa: TID251
from pathlib import Path
from typing import Any, Literal

import zmq

from benchmarks.bench import measuring
from benchmarks.bench.raw_zmq import received
from benchmarks.scale import snapshot

WARM_UP = 2
TIMEOUT = 120_000
"""Milliseconds without a message after which a process gives up."""
KINDS: tuple[Literal["edges", "pairs"], ...] = ("edges", "pairs")

Keys = list[tuple[bytes, bytes]]
"""Public and secret key of each host."""


def exchange(kind: Literal["edges", "pairs"], peers: int, degree: int, size: int, rounds: int) -> dict[str, Any]:
    """Measure the rounds of ``peers`` per host with ``degree`` neighbors on the other host, and bodies of ``size``.

    Returns:
        CPU seconds and seconds of a round, and what all processes of both hosts hold in the end.
    """
    fork = multiprocessing.get_context("fork")
    keys: Keys = [zmq.curve_keypair(), zmq.curve_keypair()]
    with measuring.scratch_folder() as folder:
        targets: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        if kind == "pairs":
            targets += [(_forward, (host, peers, folder, keys)) for host in (0, 1)]
        peer = _peer_of_edges if kind == "edges" else _peer_of_pairs
        targets += [(peer, (host, me, peers, degree, folder, keys)) for host in (0, 1) for me in range(peers)]
        pipes = [fork.Pipe() for _ in targets]
        children = [
            fork.Process(target=_only, args=(pipes, number, target, *arguments, size, rounds), daemon=True)
            for number, (target, arguments) in enumerate(targets)
        ]
        for child in children:
            child.start()
        ends = [pipe for pipe, _ in pipes]
        try:
            return _measure(kind, peers, degree, size, rounds, ends, children)
        finally:
            for child in children:
                child.kill()
                child.join()


def _measure(
    kind: str, peers: int, degree: int, size: int, rounds: int, ends: list[Connection], children: list[ForkProcess]
) -> dict[str, Any]:
    load = round(os.getloadavg()[0], 1)
    pids = [child.pid or 0 for child in children]
    addresses = [received(child, end) for child, end in zip(children, ends, strict=True)]
    for end in ends:
        end.send(addresses)
    own = list(zip(children, ends, strict=True))[-2 * peers :]
    for child, end in own:
        received(child, end)  # warm
    cpu, began = sum(map(cpu_seconds, pids)), time.perf_counter()
    for _, end in own:
        end.send(None)
    for child, end in own:
        received(child, end)  # all rounds done
    seconds, cpu = time.perf_counter() - began, sum(map(cpu_seconds, pids)) - cpu
    tcp, unix = snapshot.tcp_states(pids[0]), snapshot.unix_sockets(pids[0])
    held = [snapshot.process(pid, tcp, unix) for pid in pids]
    return {
        "kind": kind,
        "peers": peers,
        "degree": degree,
        "bytes": size,
        "rounds": rounds,
        "seconds": seconds / rounds,
        "cpu": cpu / rounds,
        "load": load,
        **{name: sum(each[name] for each in held) for name in ("connections", "unix", "descriptors", "private")},
    }


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of all threads of a process. Finer than clock ticks, of which short runs have few."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def _only(pipes: list[tuple[Connection, Connection]], number: int, target: Callable[..., None], *given: Any) -> None:
    """Call ``target`` in a child, after closing all descriptors that it has inherited but its own pipe."""
    for other, ends in enumerate(pipes):
        ends[0].close()
        if other != number:
            ends[1].close()
    own = pipes[number][1]
    os.closerange(3, own.fileno())
    os.closerange(own.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
    target(*given, own)


def _peer_of_edges(
    host: int, me: int, peers: int, degree: int, folder: Path, keys: Keys, size: int, rounds: int, parent: Connection
) -> None:
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    _serve(router, keys[host])
    parent.send(router.bind_to_random_port("tcp://127.0.0.1"))
    ports = parent.recv()
    dealers = []
    for step in range(degree):
        dealer = context.socket(zmq.DEALER)
        dealer.identity = f"{host}.{me}".encode()
        _connect(dealer, keys[host], keys[1 - host][0], ports[(1 - host) * peers + (me + _sign(host) * step) % peers])
        dealers.append(dealer)
    body = bytes(size)

    def one_round() -> None:
        for dealer in dealers:
            dealer.send_multipart([b"header", body], copy=False)
        for _ in dealers:
            router.recv_multipart(copy=False)

    _rounds(one_round, rounds, parent, router)


def _peer_of_pairs(
    host: int, me: int, peers: int, degree: int, folder: Path, keys: Keys, size: int, rounds: int, parent: Connection
) -> None:
    parent.send(None)
    parent.recv()
    dealer = zmq.Context().socket(zmq.DEALER)
    dealer.identity = str(me).encode()
    dealer.connect(f"ipc://{folder}/{host}")
    dealer.send(b"")  # the forwarder can reach a peer only after a message from it
    dealer.recv()
    neighbors = [str((me + _sign(host) * step) % peers).encode() for step in range(degree)]
    body = bytes(size)

    def one_round() -> None:
        for neighbor in neighbors:
            dealer.send_multipart([neighbor, b"header", body], copy=False)
        for _ in neighbors:
            dealer.recv_multipart(copy=False)

    _rounds(one_round, rounds, parent, dealer)


def _sign(host: int) -> int:
    """Return in which direction a peer counts its neighbors, so that each edge has both ends."""
    return 1 if host == 0 else -1


def _rounds(one_round: Callable[[], None], rounds: int, parent: Connection, receiver: zmq.Socket[bytes]) -> None:
    receiver.rcvtimeo = TIMEOUT
    for _ in range(WARM_UP):
        one_round()
    parent.send(None)
    parent.recv()
    for _ in range(rounds):
        one_round()
    parent.send(None)
    parent.recv()  # until it is killed


def _forward(host: int, peers: int, folder: Path, keys: Keys, size: int, rounds: int, parent: Connection) -> None:
    """Forward messages between the peers of a host and the other host's forwarder."""
    context = zmq.Context()
    inside, heard, other = context.socket(zmq.ROUTER), context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    for socket in (inside, heard, other):
        socket.set_hwm(0)  # the rounds limit what is on its way
    inside.router_mandatory = True
    inside.bind(f"ipc://{folder}/{host}")
    _serve(heard, keys[host])
    parent.send(heard.bind_to_random_port("tcp://127.0.0.1"))
    _connect(other, keys[host], keys[1 - host][0], parent.recv()[1 - host])
    for name in [inside.recv_multipart()[0] for _ in range(peers)]:
        inside.send_multipart([name, b""])
    poller = zmq.Poller()
    poller.register(inside, zmq.POLLIN)
    poller.register(heard, zmq.POLLIN)
    while True:
        ready = dict(poller.poll())
        for source, target in ((inside, other), (heard, inside)):
            while source in ready:
                try:
                    frames = source.recv_multipart(zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    break
                target.send_multipart(frames[1:], copy=False)


def _serve(socket: zmq.Socket[bytes], keys: tuple[bytes, bytes]) -> None:
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = keys


def _connect(socket: zmq.Socket[bytes], keys: tuple[bytes, bytes], server: bytes, port: int) -> None:
    socket.curve_serverkey = server
    socket.curve_publickey, socket.curve_secretkey = keys
    socket.connect(f"tcp://127.0.0.1:{port}")
