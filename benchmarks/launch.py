"""How long from `p2pfl launch` to the first round, and how much memory, for 20 and for 100 peers.

    python benchmarks/launch.py                     # 20 and 100 peers, forked from the warm process
    python benchmarks/launch.py --peers 20 --spawn  # the same peers started as plain interpreters, in turn

Peers are MAPL peers with `tiny4` networks on digits, on a complete graph for 20 and a 6-regular one for 100
(--graph changes that). Times count from the start of the command:

    listening   every peer has bound its socket and written its address
    first       the first peer has completed round 0
    all         every peer has completed round 0

Memory is the sum of the proportional set sizes (PSS: shared pages are divided among those who share them) of all
peers and the warm process, when every peer has completed round 0.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep

import click
import psutil
import yaml

from p2pfl.runfolder import RunFolder

LIMIT = 900.0
"""Seconds after which a launch counts as failed."""


def run_file(peers: int, graph: str) -> dict[str, object]:
    return {
        "name": f"launch{peers}",
        "rounds": 1000,
        "peers": peers,
        "graph": yaml.safe_load(graph),
        "data": {
            "dataset": "digits",
            "partition": {"name": "clusters", "clusters": 2, "per_class": 14, "test_per_class": 15},
            "augment": "mapl",
        },
        "models": "tiny4",
        "algorithm": {"name": "mapl", "lr": 0.001, "projector_hidden": 128},
        "device": "cpu",
        "eval_every": 1000,
        "checkpoint_every": 1000,
    }


@contextmanager
def forked(file: Path, run: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    command = [sys.executable, "-m", "launcher.cli", "launch", str(file), "--run-dir", str(run)]
    launcher = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield [launcher]
    finally:
        launcher.send_signal(signal.SIGINT)
        launcher.wait(60)


@contextmanager
def spawned(file: Path, run: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """One interpreter for each peer: what the warm process saves."""
    from p2pfl.config import load

    loaded = load(file)
    folder = RunFolder.create(run, range(loaded.peers))
    folder.run_file.write_text(loaded.to_yaml())
    folder.write_about({"id": "0" * 16})
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "peers", "--run", str(run), "--me", str(me)],
            env=environment,
            stderr=subprocess.DEVNULL,
        )
        for me in range(loaded.peers)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(60)


def wait_until(condition: Callable[[], bool], began: float, alive: list[subprocess.Popen[bytes]]) -> float:
    while not condition():
        if monotonic() - began > LIMIT or any(process.poll() for process in alive):
            raise click.ClickException("the launch failed; run it by hand to see why")
        sleep(0.05)
    return monotonic() - began


def peers_of(run: Path) -> list[psutil.Process]:
    """The peers and the warm process of this run, by the titles they give themselves."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(str(run) in part and part.startswith("p2pfl ") for part in process.info["cmdline"] or [])
        or (process.info["cmdline"] and str(run) in process.info["cmdline"] and "peers" in process.info["cmdline"])
    ]


def measure(peers: int, graph: str, spawn: bool) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as scratch:
        file, run = Path(scratch, "launch.yaml"), Path(scratch, "run")
        file.write_text(yaml.safe_dump(run_file(peers, graph)))
        began = monotonic()
        with (spawned if spawn else forked)(file, run) as alive:
            folder = RunFolder(run.resolve())

            def listening() -> bool:
                return folder.addresses.is_dir() and sum(1 for _ in folder.addresses.glob("[0-9]*")) == peers

            def done(count: int) -> bool:
                return sum(folder.peer(p).metrics.exists() for p in range(peers)) >= count

            times = {
                "listening": wait_until(listening, began, alive),
                "first": wait_until(lambda: done(1), began, alive),
                "all": wait_until(lambda: done(peers), began, alive),
            }
            processes = peers_of(folder.root)
            memory = sum(process.memory_full_info().pss for process in processes)
        return {
            "peers": peers,
            "graph": graph,
            "start": "spawn" if spawn else "fork",
            **{name: round(value, 1) for name, value in times.items()},
            "processes": len(processes),
            "pss_mb": round(memory / 1e6),
            "pss_mb_per_peer": round(memory / 1e6 / peers, 1),
        }


@click.command()
@click.option("--peers", "sizes", type=int, multiple=True, default=(20, 100), show_default=True)
@click.option("--graph", help="Default: complete up to 20 peers, 6-regular above.")
@click.option("--spawn", is_flag=True, help="Also start the same peers as plain interpreters, and give the ratio.")
def main(sizes: tuple[int, ...], graph: str | None, spawn: bool) -> None:
    cores = len(os.sched_getaffinity(0))
    click.echo(f"# {cores} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB, Python {sys.version.split()[0]}")
    for size in sizes:
        chosen = graph or ("complete" if size <= 20 else "{name: regular, degree: 6}")
        forked_ones = measure(size, chosen, spawn=False)
        click.echo(json.dumps(forked_ones))
        if spawn:
            plain = measure(size, chosen, spawn=True)
            click.echo(json.dumps(plain))
            ratios = {k: round(float(str(plain[k])) / float(str(forked_ones[k])), 1) for k in ("all", "pss_mb")}
            click.echo(f"# spawn / fork: {ratios}")


if __name__ == "__main__":
    main()
