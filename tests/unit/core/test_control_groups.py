"""CPUs and memory within the limits of control groups, of versions 1 and 2."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from launcher.doctor import examine
from launcher.facts.sweep_folder import Sweep, SweepFolder
from launcher.sweep.runner import default_jobs
from p2pfl import control_groups
from p2pfl.control_groups import available_memory, cpu_quota, total_memory, usable_cores
from p2pfl.run_folder.run_info import describe_run
from p2pfl.session.gpus import peers_at_once
from peers.host import hello

Build = Callable[..., Path]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Build:
    """``host(groups, {path: content})``: a tree with /proc/self/cgroup and files below /sys/fs/cgroup; 8 cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8))

    def build(groups: str | None, files: dict[str, str]) -> Path:
        if groups is not None:
            (tmp_path / "proc/self").mkdir(parents=True)
            (tmp_path / "proc/self/cgroup").write_text(groups)
        for name, content in files.items():
            path = tmp_path / "sys/fs/cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{content}\n")
        return tmp_path

    return build


V1 = "9:pids:/a/b\n4:cpu,cpuacct:/a/b\n3:memory:/a/b\n1:name=systemd:/a/b\n"


@pytest.mark.parametrize(
    ("groups", "files", "cpus", "cores"),
    [
        ("0::/job\n", {"job/cpu.max": "150000 100000"}, 1.5, 1),
        ("0::/job\n", {"job/cpu.max": "50000 100000"}, 0.5, 1),
        ("0::/job\n", {"job/cpu.max": "250000 50000"}, 5.0, 5),
        ("0::/job\n", {"job/cpu.max": "max 100000"}, None, 8),
        ("0::/job\n", {"job/cpu.max": "9900000 100000"}, 99.0, 8),
        # Slices of systemd: the tightest one counts, wherever it is.
        (
            "0::/user.slice/user-7.slice/x.scope\n",
            {"user.slice/user-7.slice/cpu.max": "200000 100000", "user.slice/cpu.max": "300000 100000"},
            2.0,
            2,
        ),
        (
            "0::/user.slice/x.scope\n",
            {"user.slice/x.scope/cpu.max": "400000 100000", "user.slice/cpu.max": "300000 100000"},
            3.0,
            3,
        ),
        # Containers: the namespace hides the group, or there is none, and the mount shows the group as the root.
        ("0::/\n", {"cpu.max": "200000 100000"}, 2.0, 2),
        ("0::/docker/0123abc\n", {"cpu.max": "200000 100000"}, 2.0, 2),
        ("0::/../../kubepods/pod7\n", {"cpu.max": "200000 100000"}, 2.0, 2),
        (V1, {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2.0, 2),
        # Version 1: the controllers may be mounted together, with or without a link for each.
        (
            V1,
            {"cpu/a/b/cpu.cfs_quota_us": "-1", "cpu/a/b/cpu.cfs_period_us": "100000"},
            None,
            8,
        ),
        (V1, {"cpu/a/cpu.cfs_quota_us": "330000", "cpu/a/cpu.cfs_period_us": "100000"}, 3.3, 3),
        (V1, {"cpu,cpuacct/a/b/cpu.cfs_quota_us": "20000", "cpu,cpuacct/a/b/cpu.cfs_period_us": "10000"}, 2.0, 2),
        # Both versions.
        (
            f"{V1}0::/s\n",
            {
                "cpu/a/b/cpu.cfs_quota_us": "400000",
                "cpu/a/b/cpu.cfs_period_us": "100000",
                "unified/s/cpu.max": "300000 100000",
            },
            3.0,
            3,
        ),
        ("0::/job\n", {"job/cpu.max": "damaged"}, None, 8),
        ("0::/job\n", {}, None, 8),
        (None, {}, None, 8),
    ],
)
def test_the_lowest_quota_counts_rounded_down_but_at_least_one_core(
    host: Build, groups: str | None, files: dict[str, str], cpus: float | None, cores: int
) -> None:
    root = host(groups, files)
    quota = cpu_quota(root)
    assert (None if quota is None else quota.cpus) == cpus
    assert usable_cores(root) == cores


def test_the_affinity_may_be_lower_than_the_quota(host: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    root = host("0::/job\n", {"job/cpu.max": "500000 100000"})
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5})
    assert usable_cores(root) == 2
    monkeypatch.delattr(os, "sched_getaffinity")  # some builds of Python lack it
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert usable_cores(root) == 3


# ---- memory


def test_the_lowest_limit_of_memory_and_the_least_room_count(host: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    root = host(
        "0::/slice/job\n",
        {
            "slice/job/memory.max": "9000",
            "slice/job/memory.current": "1000",
            "slice/job/memory.stat": "anon 1000\ninactive_file 0",
            "slice/memory.max": "12000",
            "slice/memory.current": "11000",  # others use most of it
            "slice/memory.stat": "anon 1000\ninactive_file 500",
        },
    )
    assert (total_memory(root), available_memory(root)) == (9000, 1500)
    memory: Any = type("M", (), {"total": 8000, "available": 700})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    assert (total_memory(root), available_memory(root)) == (8000, 700)


def test_memory_without_a_limit_is_that_of_the_host(host: Build) -> None:
    root = host(
        "0::/job\n", {"job/memory.max": "max", "job/memory.current": "1", "job/memory.stat": "inactive_file 0"}
    )
    assert total_memory(root) == psutil.virtual_memory().total
    assert available_memory(root) > 10**6


def test_memory_in_groups_of_version_1_counts_the_files_of_those_below(host: Build) -> None:
    root = host(
        V1,
        {
            "memory/a/memory.limit_in_bytes": "9000",
            "memory/a/memory.usage_in_bytes": "8000",
            "memory/a/memory.stat": "inactive_file 100\ntotal_inactive_file 3000",
            "memory/a/b/memory.limit_in_bytes": "9223372036854771712",
        },
    )
    assert (total_memory(root), available_memory(root)) == (9000, 4000)


def test_a_group_above_its_limit_has_no_memory_left(host: Build) -> None:
    files = {"job/memory.max": "900", "job/memory.current": "1000", "job/memory.stat": "inactive_file 0"}
    assert available_memory(host("0::/job\n", files)) == 0


# ---- who asks


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This process has 8 cores and a quota of 2.5 CPUs."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8))
    quota = control_groups.Quota(2.5, Path("/sys/fs/cgroup/job/cpu.max"))
    monkeypatch.setattr(control_groups, "cpu_quota", lambda root=Path("/"): quota)
    monkeypatch.setattr("launcher.doctor.cpu_quota", control_groups.cpu_quota)


@pytest.mark.usefixtures("limited")
def test_a_quota_limits_slots_jobs_and_hosts(make_run: Any, tmp_path: Path) -> None:
    run = make_run()
    assert peers_at_once(run.file, 0) == 2
    assert peers_at_once(make_run(threads=2).file, 0) == 1
    assert peers_at_once(make_run(slots=7).file, 0) == 7
    folder = SweepFolder(tmp_path)
    folder.write(Sweep("", "x.yaml", True))
    assert default_jobs(folder) == 2
    assert hello()["cores"] == describe_run(run, "")["cores"] == 2


@pytest.mark.usefixtures("limited")
def test_doctor_names_the_quota() -> None:
    texts = {finding.topic: finding.text for finding in examine(None)}
    assert texts["CPU"] == "2 of 8 cores usable: /sys/fs/cgroup/job/cpu.max allows 2.5 CPUs"
    if "none" in texts["GPU"]:
        assert texts["GPU"] == "none; peers compute on 2 CPU cores"
