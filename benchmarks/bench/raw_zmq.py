"""Messages over plain pyzmq between processes of this host: what a transport could reach at best.

Every process sends its body over a DEALER to the ROUTER of every other process, and waits for theirs, in rounds.
"""

from __future__ import annotations

import multiprocessing  # noqa: TID251  # forks or communicates with its children
import time
from multiprocessing.connection import Connection, wait  # noqa: TID251
from multiprocessing.context import ForkProcess  # noqa: TID251
from statistics import fmean
from typing import Any, NamedTuple

import zmq

WARM_UP = 2
"""Rounds that are not counted."""
TIMEOUT = 60_000
"""Milliseconds without a message after which a process gives up."""

KeyPair = tuple[bytes, bytes]
"""Public and secret key."""


class Cost(NamedTuple):
    """What a round costs: seconds that it lasts, and CPU seconds of a process, its I/O thread included."""

    seconds: float
    cpu: float


def exchange(processes: int, size: int, rounds: int, *, curve: bool = False) -> Cost:
    """Measure rounds in which each of ``processes`` sends ``size`` bytes to each other one."""
    fork = multiprocessing.get_context("fork")
    keys = [zmq.curve_keypair() for _ in range(processes)] if curve else None
    pipes = [fork.Pipe() for _ in range(processes)]
    children = [
        fork.Process(target=_exchange, args=(me, processes, size, rounds, keys, pipes[me][1]), daemon=True)
        for me in range(processes)
    ]
    for child in children:
        child.start()
    try:
        ends = [pipe for pipe, _ in pipes]
        ports = [received(child, end) for child, end in zip(children, ends, strict=True)]
        for end in ends:
            end.send(ports)
        costs: list[Cost] = [received(child, end) for child, end in zip(children, ends, strict=True)]
        return Cost(max(cost.seconds for cost in costs), fmean(cost.cpu for cost in costs))
    except BaseException:
        for child in children:
            child.kill()  # it may wait for one that has failed
        raise
    finally:
        for child in children:
            child.join(TIMEOUT / 1000)
            child.kill()


def received(child: ForkProcess, end: Connection) -> Any:
    """Return what ``child`` sends to ``end``.

    Raises:
        RuntimeError: the child ends without having sent it. Its siblings keep the pipe open, so there is no EOFError.
    """
    wait([end, child.sentinel])
    if not end.poll():
        child.join()
        raise RuntimeError(f"{child.name} of the benchmark ended with exit code {child.exitcode}")
    return end.recv()


def _exchange(
    me: int, processes: int, size: int, rounds: int, keys: list[KeyPair] | None, parent: Connection
) -> None:
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.rcvtimeo = TIMEOUT
    if keys:
        router.curve_server = True
        router.curve_publickey, router.curve_secretkey = keys[me]
    parent.send(router.bind_to_random_port("tcp://127.0.0.1"))
    dealers = []
    for other, port in enumerate(parent.recv()):
        if other != me:
            dealer = context.socket(zmq.DEALER)
            dealer.identity = f"{me}".encode()
            if keys:
                dealer.curve_serverkey = keys[other][0]
                dealer.curve_publickey, dealer.curve_secretkey = keys[me]
            dealer.connect(f"tcp://127.0.0.1:{port}")
            dealers.append(dealer)
    body, began, cpu = bytes(size), 0.0, 0.0
    for t in range(WARM_UP + rounds):
        if t == WARM_UP:
            began, cpu = time.perf_counter(), time.process_time()
        for dealer in dealers:
            dealer.send_multipart([b"header", body], copy=False)
        for _ in dealers:
            router.recv_multipart(copy=False)
    parent.send(Cost((time.perf_counter() - began) / rounds, (time.process_time() - cpu) / rounds))
    context.destroy(linger=TIMEOUT)
