"""``p2pfl doctor``: what of this host would prevent or slow a run, and what to do about it.

Everything that ``p2pfl launch`` checks is checked by the same functions. They import torch, so ``examine`` is called
in a child process.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from launcher import formatting
from launcher.backends.checks import check_addresses, check_keys, check_ports
from launcher.backends.limits import check_limits, task_limits
from launcher.backends.mps import CONTROL
from launcher.prepare import check_report
from launcher.tracking.processes import check_trackers
from p2pfl.control_groups import available_memory, cores, cpu_quota, usable_cores
from p2pfl.errors import P2pflError
from p2pfl.run_folder.files import obstacle

if TYPE_CHECKING:
    from p2pfl.run_file.run import Run

Level = Literal["ok", "warning", "problem"]

WARM_MEMORY = 400 << 20
"""Bytes of the process that forks the peers, with torch."""
PEER_MEMORY = 70 << 20
"""Bytes of a peer with a small model beyond what it shares, as measured with 8 peers; large models take more."""
LOW_DISK = 1 << 30
"""Bytes of free disk space below which to warn."""


@dataclass(frozen=True)
class Finding:
    """What was checked and found, and what to do about it unless it is ok. A problem prevents the run."""

    level: Level
    topic: str
    text: str
    advice: str = ""


def examine(file: Path | None, sets: tuple[str, ...] = ()) -> list[Finding]:
    """Examine this host, for the run file if one is given."""
    findings = [*_python(), *_torch()]
    if any(finding.level == "problem" for finding in findings):
        return findings
    if file is None:
        return [*findings, *_cpus(), *_gpus(None), *_limits(), *_memory(None), *_disk(Path()), *_data_root()]
    from p2pfl.run_file import load as run_files

    try:
        run = run_files.load(file, sets, os.environ)
    except P2pflError as error:
        return [*findings, Finding("problem", "run file", str(error))]
    findings.append(Finding("ok", "run file", f"{file}: {run.peers} peers, {run.rounds} rounds, {run.name}"))
    findings += [*_cpus(), *_gpus(run), *_limits_of(run), *_memory(run), *_disk(run.file.out), *_data(run)]
    return [*findings, *_ports(run), *_keys(run), *_extras(run)]


def _python() -> Iterator[Finding]:
    version, system = platform.python_version(), platform.system()
    if system != "Linux":
        yield Finding("problem", "Python", f"{version} on {system}", "peers run on Linux only; use it, WSL or Docker")
    else:
        yield Finding("ok", "Python", f"{version}, {sys.executable}")


def _torch() -> Iterator[Finding]:
    try:
        from p2pfl.session.gpus import torch_build

        version, cuda, torchvision = torch_build()
    except (ImportError, OSError, RuntimeError) as error:  # also of versions that do not fit together
        advice = "install p2pfl-mesh again; torch and torchvision must belong together"
        yield Finding("problem", "torch", f"cannot be imported: {error}", advice)
        return
    built = f"for CUDA {cuda}" if cuda else "for the CPU only"
    yield Finding("ok", "torch", f"{version}, {built}; torchvision {torchvision}")


def _cpus() -> Iterator[Finding]:
    text, quota = f"{cores()} cores", cpu_quota()
    if quota is not None and quota.cpus < cores():
        text = f"{usable_cores()} of {text} usable: {quota.file} allows {quota.cpus:g} CPUs"
    yield Finding("ok", "CPU", text)


def _gpus(run: Run | None) -> Iterator[Finding]:
    from p2pfl.session.gpus import NO_GPU, find_gpus, slices, torch_build

    gpus = find_gpus()
    if not gpus:
        if run is not None and run.file.device == "cuda":
            yield Finding("problem", "GPU", f"device: cuda, but {NO_GPU}")
        else:
            yield Finding("ok", "GPU", f"none; peers compute on {usable_cores()} CPU cores")
        if shutil.which("nvidia-smi") is not None:
            advice = "check `nvidia-smi`" if torch_build()[1] else "install a build of torch for CUDA"
            yield Finding("warning", "GPU", "there is a driver (nvidia-smi), but torch finds no GPU", advice)
        return
    parts = [] if run is None or run.file.device == "cpu" else slices(run.file, len(gpus))
    for index, gpu in enumerate(gpus):
        text = f"{index}: {gpu.name}, {formatting.size(gpu.memory)}"
        if index < len(parts):
            part = parts[index]
            text += (
                f"; peers {formatting.ids(part.peers)}, each up to {formatting.size(part.memory * gpu.memory)}, "
                f"{min(part.at_once, len(part.peers))} at the same time"
            )
        yield Finding("ok", "GPU", text)
    if shutil.which(CONTROL) is not None:
        yield Finding("ok", "MPS", f"{CONTROL} found: gpu.mps: true lets kernels of several peers overlap")
    elif run is not None and run.file.gpu.mps:
        yield Finding("problem", "MPS", f"gpu.mps needs {CONTROL}, which is not on PATH", "set gpu.mps: false")


def _limits() -> Iterator[Finding]:
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield Finding("ok", "limits", f"{files} open files per process")
    for limit in task_limits():
        yield Finding("ok", "limits", f"{limit.name}: {limit.used} of {limit.value} in use")


def _limits_of(run: Run) -> Iterator[Finding]:
    yield from _checked(
        "limits", "enough processes, threads and open files", lambda: check_limits(run, range(run.peers))
    )


def _memory(run: Run | None) -> Iterator[Finding]:
    free = available_memory()
    if run is None:
        peers = max(0, free - WARM_MEMORY) // PEER_MEMORY
        yield Finding("ok", "memory", f"{formatting.size(free)} available: about {peers} peers with small models")
        return
    needed = WARM_MEMORY + run.peers * PEER_MEMORY
    small = f"{run.peers} peers with small models need about {formatting.size(needed)}"
    text = f"{formatting.size(free)} available; {small}"
    if needed > free:
        advice = "start fewer peers, use smaller models or a lower `slots`, or several hosts"
        yield Finding("warning", "memory", text, advice)
    else:
        yield Finding("ok", "memory", text)


def _disk(out: Path) -> Iterator[Finding]:
    other_folder = "choose another folder: --set out=DIR"
    if (problem := obstacle(out)) is not None:
        yield Finding("problem", "disk", problem, other_folder)
        return
    folder = out.absolute()
    try:
        while not folder.exists():
            folder = folder.parent
    except OSError as error:
        yield Finding("problem", "disk", f"{folder}: cannot be read: {error.strerror}", other_folder)
        return
    free = shutil.disk_usage(folder).free
    text = f"{formatting.size(free)} free at {folder}, for run folders"
    if not os.access(folder, os.W_OK):
        yield Finding("problem", "disk", f"{folder} is not writable", other_folder)
    elif free < LOW_DISK:
        yield Finding("warning", "disk", text, f"make room, or {other_folder}")
    else:
        yield Finding("ok", "disk", text)


def _data_root() -> Iterator[Finding]:
    from p2pfl.data.cache_folder import cache_folders, data_root, is_writable, writable

    try:
        root, cache = data_root(None), writable(cache_folders())
        text = f"{root}: {len(os.listdir(root))} entries"
    except P2pflError as error:
        yield Finding("problem", "data", str(error))
        return
    except OSError as error:
        advice = "set P2PFL_DATA to the folder with your datasets, or let p2pfl download them there"
        yield Finding("warning", "data", f"{root}: {error.strerror}", advice)
    else:
        yield Finding("ok", "data", text)
    if is_writable(cache):
        yield Finding("ok", "cache", f"{cache}, for prepared datasets")
    else:
        yield Finding("problem", "cache", f"{cache} is not writable", "set P2PFL_CACHE to a writable folder")


def _data(run: Run) -> Iterator[Finding]:
    from p2pfl.session.build import check_models, load_data

    remarks: list[str] = []
    name = run.file.data.dataset.name
    yield from _checked(
        "data",
        f"{name} found and divided among the peers",
        lambda: remarks.extend(check_models(run, *load_data(run))),
    )
    yield from (Finding("warning", "models", remark) for remark in remarks)


def _ports(run: Run) -> Iterator[Finding]:
    port = run.file.transport.port
    yield from _checked("addresses", "all of this host", lambda: check_addresses(run, range(run.peers)))
    text = "chosen by the system" if port is None else f"{port} to {port + run.peers - 1} are free"
    yield from _checked("ports", text, lambda: check_ports(run, range(run.peers)))


def _keys(run: Run) -> Iterator[Finding]:
    transport = run.file.transport
    if transport.keys is None:
        where = "" if transport.insecure else ", loopback only"
        yield Finding("ok", "keys", f"none: messages are not encrypted{where}")
    else:
        yield from _checked("keys", f"{transport.keys}", lambda: check_keys(run, range(run.peers)))


def _extras(run: Run) -> Iterator[Finding]:
    if run.file.track:
        names = ", ".join(entry.name for entry in run.file.track)
        yield from _checked("trackers", f"{names}: installed", lambda: check_trackers(run))
    if run.file.report:
        yield from _checked("report", "what draws it is installed", lambda: check_report(run))


def _checked(topic: str, text: str, check: Callable[[], object]) -> Iterator[Finding]:
    """Yield a problem if ``check`` raises an error, which says what to do."""
    try:
        check()
    except P2pflError as error:
        yield Finding("problem", topic, str(error))
    else:
        yield Finding("ok", topic, text)
