"""CostMeter: seconds of CPU and GPU, joules where the host tells."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from p2pfl.session import cost
from p2pfl.session.cost import CostMeter


class Host:
    """A host whose clocks and counters stand still until they are set."""

    cpu = 5.0
    now = 100.0
    gpu_joules = 7.0

    def __init__(self, root: Path) -> None:
        self.root = root
        for zone, name in (("intel-rapl:0", "package-0"), ("intel-rapl:1", "package-1"), ("intel-rapl:0:0", "core")):
            (root / zone).mkdir()
            (root / zone / "name").write_text(f"{name}\n")
            (root / zone / "max_energy_range_uj").write_text("100000000\n")
        self.joules(10, 20)
        self.busy(0)

    def joules(self, *packages: float) -> None:
        for number, joules in enumerate(packages):
            (self.root / f"intel-rapl:{number}" / "energy_uj").write_text(f"{round(1e6 * joules)}\n")

    def busy(self, ticks: int) -> None:
        (self.root / "stat").write_text(f"cpu  {ticks} 0 0 123456 99 0 0 0 5 5\ncpu0 1 2 3 4\n")


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    host = Host(tmp_path)
    monkeypatch.setattr(cost, "POWERCAP", tmp_path)
    monkeypatch.setattr(cost, "STAT", tmp_path / "stat")
    monkeypatch.setattr(cost, "process_time", lambda: host.cpu)
    monkeypatch.setattr(cost, "perf_counter", lambda: host.now)
    monkeypatch.setattr(os, "sysconf", lambda name: 100)
    return host


def test_a_peer_with_its_own_process_is_charged_all_its_cpu_time(host: Host) -> None:
    meter = CostMeter(alone=True)
    host.cpu += 1.5  # of other threads, while the peer waits
    assert meter.drain()["cpu_seconds"] == pytest.approx(1.5)
    assert meter.drain()["cpu_seconds"] == 0


def test_a_peer_that_shares_a_process_is_charged_only_while_it_computes(host: Host) -> None:
    meter = CostMeter()
    host.cpu += 10.0
    meter.begin()
    host.cpu += 1.5
    meter.end()
    host.cpu += 10.0
    meter.begin()
    host.cpu += 0.25
    assert meter.drain() == {"cpu_seconds": pytest.approx(1.75)}
    host.cpu += 0.5  # the computation goes on
    meter.end()
    assert meter.drain() == {"cpu_seconds": pytest.approx(0.5)}


def test_energy_is_charged_by_the_fraction_of_the_cpu_time_of_all_programs(host: Host) -> None:
    meter = CostMeter(alone=True)
    host.cpu += 2.0
    host.busy(800)  # eight seconds of all programs
    host.joules(30, 60)
    assert meter.drain()["cpu_joules"] == pytest.approx(60 * 2 / 8)


def test_a_peer_is_never_charged_more_than_the_counter(host: Host) -> None:
    meter = CostMeter(alone=True)
    host.cpu += 0.009  # less than a tick
    host.joules(11, 20)
    assert meter.drain()["cpu_joules"] == pytest.approx(1.0)


def test_a_counter_that_starts_again_does_not_count_backwards(host: Host) -> None:
    host.joules(95, 20)
    meter = CostMeter(alone=True)
    host.cpu += 1.0
    host.busy(100)
    host.joules(5, 25)
    assert meter.drain()["cpu_joules"] == pytest.approx(10 + 5)


@pytest.mark.parametrize("damage", ["none", "unreadable", "no number"])
def test_without_counters_energy_is_absent(host: Host, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if damage == "none":
        monkeypatch.setattr(cost, "POWERCAP", host.root / "missing")
    else:
        path = host.root / "intel-rapl:0" / "energy_uj"
        path.unlink()
        path.mkdir() if damage == "unreadable" else path.write_text("")
    meter = CostMeter(alone=True)
    assert meter.drain() == {"cpu_seconds": 0.0}


def test_counters_that_become_unreadable_cost_only_the_energy(host: Host) -> None:
    meter = CostMeter(alone=True)
    (host.root / "intel-rapl:1" / "energy_uj").unlink()
    host.cpu += 1.0
    assert meter.drain() == {"cpu_seconds": 1.0}


def test_peers_on_a_gpu_are_charged_equal_parts_of_its_energy(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: {"GPU-abc": 1000 * host.gpu_joules}[handle],
        NVMLError=type("NVMLError", (Exception,), {}),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="abc"))
    meter = CostMeter(alone=True, device=torch.device("cuda", 1), peers=7)  # peers 1, 3 and 5
    meter.begin()
    host.now += 4.0
    meter.end()
    host.now += 4.0
    host.gpu_joules += 60.0
    found = meter.drain()
    assert found["gpu_seconds"] == pytest.approx(4.0)
    assert found["gpu_joules"] == pytest.approx(20.0)


def test_a_gpu_without_an_energy_counter_still_has_its_seconds(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    meter = CostMeter(alone=True, device=torch.device("cuda", 0), peers=2)
    assert meter.drain().keys() == {"cpu_seconds", "cpu_joules", "gpu_seconds"}


def test_reads_the_cpu_time_of_this_host() -> None:
    before = cost.busy_seconds()
    assert 0 < before <= cost.busy_seconds()
