"""Peers that run out of memory: what they report, and that they resume."""

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
from p2pfl.session.out_of_memory import memory_errors
from p2pfl.simulation.simulate import simulate
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
"""Peer 1 allocates a gigabyte of address space for a moment in each round; how depends on the run's seed. In round 3
it waits until a limit is set."""


@pytest.mark.parametrize(
    ("seed", "error"), [(0, "allocate memory"), (1, "Unable to allocate 1.00 GiB"), (2, "Cannot allocate memory")]
)
def test_peer_out_of_memory_reports_it_and_can_be_restarted(
    seed: int, error: str, make_run: Any, prepare: Any, altered_warm: Any, until: Any, tmp_path: Path
) -> None:
    run = make_run(seed=seed, rounds=12, checkpoint_every=4, graph="ring", chaos={"link": {"jitter": 0.02}})
    folder = prepare(tmp_path / "run", run)
    pids = altered_warm.start(folder)
    files = folder.peer(1)
    until(lambda: (status := files.status()) and status.rounds_done == 3)  # it holds no gigabyte now
    room = psutil.Process(pids[1]).memory_info().vms + (1 << 29)
    resource.prlimit(pids[1], resource.RLIMIT_AS, (room, resource.RLIM_INFINITY))
    assert altered_warm.wait({1: pids[1]}) == {1: 1}
    output = altered_warm.errors[pids[1]]
    assert output.startswith("peer 1: out of memory on its host (")
    assert error in output
    assert output.endswith("; use fewer compute slots (slots), fewer peers, or a smaller batch or model")
    assert files.result().error == output
    assert "Traceback" not in files.log.read_text()
    pids.update(altered_warm.start(folder, [1]))
    resource.prlimit(pids[1], resource.RLIMIT_AS, (1 << 46, resource.RLIM_INFINITY))
    assert altered_warm.wait(pids) == dict.fromkeys(range(4), 0)
    for one, calm in zip(folder.peers(), simulate(run), strict=True):
        result = one.result()
        assert (result.digest, result.sent, result.received, result.missing) == (
            calm.digest,
            calm.sent,
            calm.received,
            0,
        )


@pytest.mark.parametrize(
    ("number", "error"),
    [
        (errno.ENOMEM, "cannot be forked: Cannot allocate memory"),
        (
            errno.EAGAIN,
            "cannot be forked: Resource temporarily unavailable; the limit on processes is reached: see `ulimit -u` "
            "and pids.max of the control group",
        ),
    ],
)
def test_reports_peers_that_cannot_be_forked(
    number: int, error: str, make_run: Any, prepare: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    folder = prepare(tmp_path / "run", make_run(peers=2))
    output: list[dict[str, Any]] = []

    def fork() -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fork", fork)
    monkeypatch.setattr(warm, "send_event", lambda descriptor, event: output.append(event))
    monkeypatch.setattr(warm, "set_title", lambda title: None)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    warm.Forks(events=1).fork(folder.root, [0, 1], close=())
    assert output == [{"event": "exited", "peer": peer, "code": 1, "error": error} for peer in range(2)]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes. Error code 12"),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
    ],
    ids=lambda error: type(error).__name__,
)
def test_recognizes_out_of_memory_errors(error: Exception, make_run: Any) -> None:
    with (
        pytest.raises(OutOfMemory, match=r"^peer 3: out of memory on its host") as caught,
        memory_errors(3, torch.device("cpu"), make_run().file),
    ):
        raise error
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(("fraction", "share"), [(0.25, "0.25"), (None, "1 / peers per GPU")])
def test_out_of_gpu_memory_names_the_device_and_the_limit(fraction: float | None, share: str, make_run: Any) -> None:
    run = make_run(gpu={"memory_fraction": fraction})
    output = "CUDA out of memory. Tried to allocate 2.00 GiB.\nSee documentation"
    with pytest.raises(OutOfMemory) as caught, memory_errors(3, torch.device("cuda", 1), run.file):
        raise torch.cuda.OutOfMemoryError(output)
    assert str(caught.value) == (
        "peer 3: out of memory on cuda:1 (CUDA out of memory. Tried to allocate 2.00 GiB.); gpu.memory_fraction "
        f"is {share}: use a smaller batch or model, or fewer peers per GPU with a larger fraction each"
    )


@pytest.mark.parametrize("output", ["CUDA error: out of memory\nOr so", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED"])
def test_out_of_gpu_memory_for_libraries_names_the_device(output: str, make_run: Any) -> None:
    with (
        pytest.raises(OutOfMemory, match=r"peer 3: out of memory on cuda:1 \(CUDA error: [a-zA-Z_ ]+\); gpu\.memory"),
        memory_errors(3, torch.device("cuda", 1), make_run().file),
    ):
        raise RuntimeError(output)


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), OSError(errno.ENOSPC, "disk"), ValueError("odd")])
def test_other_errors_pass_unchanged(error: Exception, make_run: Any) -> None:
    with pytest.raises(type(error)) as caught, memory_errors(3, torch.device("cpu"), make_run().file):
        raise error
    assert caught.value is error
