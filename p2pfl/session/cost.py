"""What a peer's rounds cost: seconds of CPU and GPU, and joules where the host measures them.

    cpu_seconds   user and system time, of all threads
    gpu_seconds   time for which the peer held a slot of its GPU; peers that share one hold slots at the same time
    cpu_joules    an estimate; see below
    gpu_joules    an estimate; see below

Energy counters include all programs, idle ones too: RAPL on the host's processors, NVML on the GPU. So a peer is
charged a part: of RAPL's energy in a round, its fraction of the CPU time of all programs; of the GPU's energy, one
over the number of the run's peers on it. Other programs on the GPU are charged to the peers.
RAPL's files are readable by root only on most systems; NVML needs the package nvidia-ml-py (extra ``energy``).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import perf_counter, process_time

import torch

POWERCAP = Path("/sys/class/powercap")
STAT = Path("/proc/stat")

Cost = dict[str, float]


class CostMeter:
    """Measures the cost of one peer's rounds.

    Args:
        alone: the process runs no other peer, so that all its CPU time is this peer's. Otherwise only that while the
            peer computes is, and energy is not measured.
        device: where the peer computes.
        peers: number of peers of the run.
    """

    def __init__(self, *, alone: bool = False, device: torch.device | None = None, peers: int = 1) -> None:
        self._alone = alone
        self._gpu = device is not None and device.type == "cuda"
        self._since: tuple[float, float] | None = None
        """CPU time and time when the peer began to compute; None while it does not."""
        self._cpu = self._held = 0.0
        self._rapl = _Rapl.find() if alone else None
        self._gpu_joules = _nvml_joules(device) if alone and device is not None and self._gpu else None
        self._gpu_peers = 1 if self._gpu_joules is None or device is None else _peers_on(device, peers)
        self._last = self._counters()

    def begin(self) -> None:
        """Note that the peer computes from now on, if it does not already."""
        if self._since is None:
            self._since = process_time(), perf_counter()

    def end(self) -> None:
        """Note that the peer computes no more."""
        if self._since is not None:
            cpu, at = self._since
            self._since = None
            self._cpu += process_time() - cpu
            self._held += perf_counter() - at

    def drain(self) -> Cost:
        """Return the cost since the last call."""
        if self._since is not None:  # in the middle of a computation
            self.end()
            self.begin()
        last, now = self._last, self._counters()
        self._last = now
        found = {"cpu_seconds": now["process"] - last["process"] if self._alone else self._cpu}
        if self._gpu:
            found["gpu_seconds"] = self._held
        if self._rapl is not None and {"rapl", "busy"} <= now.keys() & last.keys():
            part = found["cpu_seconds"] / max(now["busy"] - last["busy"], found["cpu_seconds"], 1e-9)
            found["cpu_joules"] = part * self._rapl.between(last["rapl"], now["rapl"])
        if "gpu" in now.keys() & last.keys():
            found["gpu_joules"] = (now["gpu"] - last["gpu"]) / self._gpu_peers
        self._cpu = self._held = 0.0
        return found

    def _counters(self) -> dict[str, float]:
        found = {"process": process_time()}
        with suppress(OSError, ValueError, IndexError):  # no longer readable
            if self._rapl is not None:
                found |= {"rapl": self._rapl.read(), "busy": busy_seconds()}
        if self._gpu_joules is not None:
            found["gpu"] = self._gpu_joules()
        return found


class _Rapl:
    """The energy counters of all processor packages of this host."""

    def __init__(self, zones: list[Path]) -> None:
        self._files = [zone / "energy_uj" for zone in zones]
        self._range = sum(int((zone / "max_energy_range_uj").read_text()) for zone in zones) / 1e6
        self.read()

    @classmethod
    def find(cls) -> _Rapl | None:
        """Return the counters, if this user may read any."""
        with suppress(OSError, ValueError):
            zones = [
                zone
                for zone in sorted(POWERCAP.glob("intel-rapl:*"))  # so called on AMD too
                if (zone / "name").read_text().startswith("package")  # not their parts
            ]
            return cls(zones) if zones else None
        return None

    def read(self) -> float:
        """Return the joules counted by all packages."""
        return sum(int(file.read_text()) for file in self._files) / 1e6

    def between(self, before: float, after: float) -> float:
        """Return the joules between two readings; nothing or little if a counter was reset in between."""
        return after - before if after >= before else max(0.0, after - before + self._range / len(self._files))


def busy_seconds() -> float:
    """Return the CPU time of all programs on this host since it started."""
    user, nice, system, _, _, *rest = map(int, STAT.read_text().split("\n", 1)[0].split()[1:9])
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


def _peers_on(device: torch.device, peers: int) -> int:
    return len(range(device.index or 0, peers, max(1, torch.cuda.device_count()))) or 1


def _nvml_joules(device: torch.device) -> Callable[[], float] | None:
    """Return a reader of a GPU's energy counter; None without nvidia-ml-py, or if the GPU has no counter."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except (pynvml.NVMLError, AttributeError):  # torch before 2.5 does not tell the UUID
        return None
    return lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000
