"""Peers that find no memory: what they say, and that they go on when there is some again."""

from __future__ import annotations

import errno
import gc
import os
import resource
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from p2pfl.errors import OutOfMemory
from p2pfl.memory import fitting
from p2pfl.simulate import simulate
from peers import warm

PRELUDE = """
import asyncio, mmap, resource
import numpy, torch
from p2pfl.algorithms.dpsgd import DPSGD

learn = DPSGD.round
take = [
    lambda: torch.empty(1 << 30, dtype=torch.uint8),
    lambda: numpy.empty(1 << 30, numpy.uint8),
    lambda: mmap.mmap(-1, 1 << 30),
]

async def round(self, t, net):
    if self.me == 1:
        while t == 3 and resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
            await asyncio.sleep(0.005)
        take[self.seed]()
    await learn(self, t, net)

DPSGD.round = round
"""
"""Peer 1 takes a gigabyte for a moment in each of its rounds (of address space: nobody touches it); how depends on
the run's seed. In round 3 it waits until somebody has set it a limit."""


@pytest.mark.parametrize(
    ("seed", "error"), [(0, "allocate memory"), (1, "Unable to allocate 1.00 GiB"), (2, "Cannot allocate memory")]
)
def test_a_peer_that_finds_no_memory_says_so_and_can_be_started_again(
    seed: int, error: str, make_run: Any, prepare: Any, altered_warm: Any, until: Any, tmp_path: Path
) -> None:
    run = make_run(seed=seed, rounds=12, checkpoint_every=4, graph="ring", chaos={"link": {"jitter": 0.02}})
    folder = prepare(tmp_path / "run", run)
    pids = altered_warm.start(folder)
    place = folder.peer(1)
    until(lambda: (status := place.status()) and status.rounds_done == 3)  # it holds none of the gigabytes
    room = psutil.Process(pids[1]).memory_info().vms + (1 << 29)
    resource.prlimit(pids[1], resource.RLIMIT_AS, (room, resource.RLIM_INFINITY))
    assert altered_warm.wait({1: pids[1]}) == {1: 1}
    said = altered_warm.words[pids[1]]
    assert said.startswith("peer 1: out of memory on its host (")
    assert error in said
    assert said.endswith("; let fewer peers compute at once (slots), start fewer, or use a smaller batch or model")
    assert place.result().error == said
    assert "Traceback" not in place.log.read_text()
    pids.update(altered_warm.start(folder, [1]))
    resource.prlimit(pids[1], resource.RLIMIT_AS, (1 << 46, resource.RLIM_INFINITY))
    assert altered_warm.wait(pids) == dict.fromkeys(range(4), 0)
    for one, calm in zip(folder.peers(), simulate(run), strict=True):
        result = one.result()
        assert (result.digest, result.out, result.inn, result.missing) == (calm.digest, calm.out, calm.inn, 0)


def test_peers_that_cannot_be_forked_are_reported(
    make_run: Any, prepare: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    folder = prepare(tmp_path / "run", make_run(peers=2))
    said: list[dict[str, Any]] = []

    def fork() -> int:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(os, "fork", fork)
    monkeypatch.setattr(warm, "_say", said.append)
    monkeypatch.setattr(warm, "setproctitle", lambda title: None)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    files = psutil.Process().num_fds()
    warm._fork_all({"run": str(folder.root), "peers": [0, 1]}, {}, {}, close=())
    words = "cannot be forked: Cannot allocate memory"
    assert said == [{"event": "exited", "peer": peer, "code": 1, "words": words} for peer in range(2)]
    assert psutil.Process().num_fds() <= files


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes. Error code 12"),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
    ],
    ids=lambda error: type(error).__name__,
)
def test_the_ways_to_say_that_there_is_no_memory(error: Exception, make_run: Any) -> None:
    with (
        pytest.raises(OutOfMemory, match=r"^peer 3: out of memory on its host") as caught,
        fitting(3, torch.device("cpu"), make_run().file),
    ):
        raise error
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(("fraction", "share"), [(0.25, "0.25"), (None, "an equal share")])
def test_a_gpu_that_is_full_is_named_with_the_share_of_it(fraction: float | None, share: str, make_run: Any) -> None:
    run = make_run(gpu={"memory_fraction": fraction})
    said = "CUDA out of memory. Tried to allocate 2.00 GiB.\nSee documentation"
    with pytest.raises(OutOfMemory) as caught, fitting(3, torch.device("cuda", 1), run.file):
        raise torch.cuda.OutOfMemoryError(said)
    assert str(caught.value) == (
        "peer 3: out of memory on cuda:1 (CUDA out of memory. Tried to allocate 2.00 GiB.); its gpu.memory_fraction "
        f"is {share}: use a smaller batch or model, or place fewer peers on a GPU and give each more of it"
    )


@pytest.mark.parametrize("said", ["CUDA error: out of memory\nOr so", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED"])
def test_a_gpu_without_room_for_its_libraries_is_named_too(said: str, make_run: Any) -> None:
    with (
        pytest.raises(
            OutOfMemory, match=r"peer 3: out of memory on cuda:1 \(CUDA error: [a-zA-Z_ ]+\); its gpu\.memory"
        ),
        fitting(3, torch.device("cuda", 1), make_run().file),
    ):
        raise RuntimeError(said)


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), OSError(errno.ENOSPC, "disk"), ValueError("odd")])
def test_other_errors_pass(error: Exception, make_run: Any) -> None:
    with pytest.raises(type(error)) as caught, fitting(3, torch.device("cpu"), make_run().file):
        raise error
    assert caught.value is error
