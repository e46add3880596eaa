"""Measure one launch from outside: seconds, CPU, bytes, and what its processes hold.

The launch is stopped (SIGSTOP) after some rounds, counted, and killed: it has no last round. CPU seconds of rounds,
messages and bytes are those in the peers' own records (p2pfl/session/metrics.py).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import fmean, median
from time import monotonic
from typing import Any

import click

from benchmarks.bench import measuring, procfs
from benchmarks.bench.report import describe_machine
from benchmarks.scale import snapshot
from benchmarks.scale.launches import Launch
from benchmarks.scale.snapshot import Figures, Processes
from benchmarks.scenarios import COMMAND, start
from benchmarks.ssh import Lab, network
from p2pfl.session import metrics

WARM_UP = 2
"""Rounds that are not counted."""
TICK = 0.25

Record = dict[str, Any]


class NotMeasured(click.ClickException):
    """The launch has failed, took too long, or left too little memory."""


@contextmanager
def started(launch: Launch, root: Path) -> Iterator[tuple[subprocess.Popen[bytes], list[Path], Callable[[], str]]]:
    """Start a launch; yield the launcher, the run folders on its hosts, and a function that returns its output."""
    tree = launch.tree()
    if launch.hosts > 1:
        with network(root, launch.hosts, None) as places:
            lab = Lab(root, places[0], places[1:])
            lab.write("run", tree)
            yield lab.launch("run"), [place.root / "run" for place in lab.hosts], lambda: lab.output("run")
        return
    (root / "run.yaml").write_text(json.dumps(tree))
    output = root / "run.out"
    process = start([*COMMAND, "launch", "run.yaml", "--run-dir", "run"], output, root)
    yield process, [root / "run"], output.read_text


def measure(launch: Launch, timeout: float, progress: Callable[[str], None]) -> Record:
    """Measure a launch. Raises NotMeasured."""
    load, machine = os.getloadavg(), describe_machine(1)
    with measuring.scratch_folder() as root, started(launch, root) as (launcher, folders, output):
        began, began_at = monotonic(), time.time()  # noqa: TID251  # compared with stamps of logs
        processes = Processes()
        try:
            launcher_cpu = _follow(launch, launcher, folders, output, began + timeout)
            rounds_ended = monotonic() - began
            progress(f"{launch.name}: {launch.rounds} rounds after {rounds_ended:.0f} s")
            processes = _stop(launch, launcher, folders)
            hosts = [
                snapshot.host(folder, peers, processes.warm.get(folder)) for folder, peers in processes.peers.items()
            ]
            first = procfs.tree(launcher.pid)
            local = set(processes.warm.values()) | {
                pid for peers in processes.peers.values() for pid in peers.values()
            }
            own = [snapshot.process(pid, {}, set()) for pid in first if pid not in local]
        finally:
            _kill(launcher, processes)
        logs = [log for folder in folders for log in sorted((folder / "peers").glob("*/peer.log"))]
        times = [measuring.log_times(log.read_text(errors="replace"), " round done t=", began_at) for log in logs]
        ready = measuring.all_after(times, 1)
        shared = snapshot.files(root / "run") if launch.hosts > 1 else {}
        return {
            "name": launch.name,
            "use": launch.use,
            "peers": launch.peers,
            "degree": launch.degree,
            "hosts": launch.hosts,
            "model": launch.model,
            "seed": launch.tree()["seed"],
            "rounds": launch.rounds,
            "delay": launch.delay,
            "seconds": {"ready": ready, "round": measuring.seconds_a_round(times, WARM_UP)},
            **_rounds(folders),
            "peer": _means([each for peers, _ in hosts for each in peers]),
            "most": _most([each for peers, _ in hosts for each in peers]),
            "host": [total for _, total in hosts],
            "launcher": {
                "cpu_ready": measuring.cpu_until(launcher_cpu, ready),
                "core": measuring.cpu_fraction(launcher_cpu, ready, rounds_ended),
                **{name: sum(each[name] for each in own) for name in ("pss", "private", "descriptors", "threads")},
                "files": shared.get("files", 0.0),
                "disk": shared.get("disk", 0.0),
            },
            "load": [round(load[0], 1), round(os.getloadavg()[0], 1)],
            "machine": {name: value for name, value in machine.items() if name not in ("turns", "load")},
        }


def _follow(
    launch: Launch,
    launcher: subprocess.Popen[bytes],
    folders: Sequence[Path],
    output: Callable[[], str],
    end: float,
) -> list[tuple[float, float]]:
    """Wait until all peers have done the rounds. Return (seconds, CPU seconds of the launcher) until then."""
    began, samples = monotonic(), list[tuple[float, float]]()
    while True:
        if launcher.poll() is not None:
            raise NotMeasured(f"{launch.name}: the launcher has exited ({launcher.returncode})\n{output()[-2000:]}")
        if procfs.available() < measuring.RESERVE:
            raise NotMeasured(f"{launch.name}: less than {measuring.RESERVE >> 30} GiB of memory were left")
        if monotonic() > end:
            raise NotMeasured(f"{launch.name}: not within the time limit\n{output()[-2000:]}")
        cpu = sum(procfs.cpu_seconds(pid) for pid in _launcher(launcher.pid))
        samples.append((monotonic() - began, cpu))
        files = [file for folder in folders for file in (folder / "peers").glob("*/metrics.jsonl")]
        if len(files) == launch.peers and all(file.read_bytes().count(b"\n") >= launch.rounds for file in files):
            return samples
        time.sleep(max(TICK, launch.peers / 200))


def _launcher(pid: int) -> list[int]:
    """Return the processes that are the launcher: not the warm process that it forks on this host, but `ip`."""
    return [pid, *(child for child in procfs.children(pid) if not _is_warm(child))]


def _is_warm(pid: int) -> bool:
    with suppress(OSError):
        return b"p2pfl warm" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _stop(launch: Launch, launcher: subprocess.Popen[bytes], folders: Sequence[Path]) -> Processes:
    """Stop all processes, the launcher first, which would restart peers, and then the peers. Raises NotMeasured."""
    for pid in _launcher(launcher.pid):
        os.kill(pid, signal.SIGSTOP)
    processes = snapshot.find(folders)
    found = sum(map(len, processes.peers.values()))
    if found != launch.peers:
        raise NotMeasured(f"{launch.name}: {found} of {launch.peers} peers are running")
    for peers in processes.peers.values():
        for pid in peers.values():
            os.kill(pid, signal.SIGSTOP)
    return processes


def _kill(launcher: subprocess.Popen[bytes], processes: Processes) -> None:
    for host in processes.peers.values():
        for pid in [*host.values(), *processes.warm.values()]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    measuring.kill_tree(launcher)


def _rounds(folders: Sequence[Path]) -> Record:
    """Return means over peers and rounds of CPU, phases, messages and bytes, as the peers have recorded them."""
    owner = {int(peer.name): folder for folder in folders for peer in (folder / "peers").iterdir()}
    records = {
        peer: metrics.read(folder / "peers" / f"{peer:02d}" / "metrics.jsonl") for peer, folder in owner.items()
    }
    last = min(map(len, records.values()))
    counted = [record for own in records.values() for record in own[WARM_UP:last]]
    cpu = [fmean(own[t]["cost"]["cpu_seconds"] for own in records.values()) for t in range(WARM_UP, last)]
    kinds: dict[str, list[float]] = {}
    local = remote = 0
    for record in counted:
        for to, by_kind in record["sent"].items():
            for kind, counts in by_kind.items():
                kinds[kind] = [one + other for one, other in zip(kinds.get(kind, [0, 0, 0]), counts, strict=True)]
                inside = owner[int(to)] == owner[record["peer"]]
                local, remote = local + counts[0] * inside, remote + counts[0] * (not inside)
    rounds = len(counted)
    return {
        "cpu": {"round": fmean(cpu), "median": median(cpu), "least": min(cpu), "most": max(cpu)},
        "phases": {name: fmean(each["seconds"].get(name, 0.0) for each in counted) for name in counted[0]["seconds"]},
        "sent": {kind: [count / rounds for count in counts] for kind, counts in kinds.items()},
        "messages": {"local": local / rounds, "remote": remote / rounds},
        "counted": rounds,
    }


def _means(figures: Sequence[Figures]) -> Figures:
    return {name: fmean(each[name] for each in figures) for name in figures[0]}


def _most(figures: Sequence[Figures]) -> Figures:
    return {name: max(each[name] for each in figures) for name in figures[0]}
