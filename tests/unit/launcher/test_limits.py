"""Limits of the host that a launch would exceed."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from launcher.backends import limits
from launcher.backends.limits import TaskLimit, check_limits, task_limits
from p2pfl.errors import RunFileError
from tests.launcher_fixtures import Invoke


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A host without control groups that limit processes."""
    files = {
        "proc/loadavg": "0.10 0.20 0.30 2/300 4711\n",
        "proc/sys/kernel/pid_max": "32768\n",
        "proc/sys/kernel/threads-max": "100000\n",
        "proc/self/cgroup": "4:memory:/\n0::/user/session\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "sys/fs/cgroup/user/session").mkdir(parents=True)
    return tmp_path


def limit_group(group: Path, most: object, used: int) -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / "pids.max").write_text(f"{most}\n")
    (group / "pids.current").write_text(f"{used}\n")


def shown(host: Path) -> list[tuple[str, int, int]]:
    return [(limit.name.removeprefix(f"{host}/"), limit.value, limit.used) for limit in task_limits(host)]


KERNEL = [("kernel.pid_max", 32768, 300), ("kernel.threads-max", 100000, 300)]


@pytest.fixture
def ulimit(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``ulimit(NPROC=100)``: change soft and hard limits, as this process sees them."""

    def change(**values: int) -> None:
        found = {getattr(resource, f"RLIMIT_{name}"): value for name, value in values.items()}
        real = resource.getrlimit
        monkeypatch.setattr(
            resource, "getrlimit", lambda which: (found[which],) * 2 if which in found else real(which)
        )

    change(NPROC=resource.RLIM_INFINITY)
    return change


@pytest.mark.usefixtures("ulimit")
def test_reads_the_limits_of_version_2_control_groups(host: Path) -> None:
    groups = host / "sys/fs/cgroup"
    limit_group(groups / "user/session", "max", 7)
    limit_group(groups / "user", 500, 40)
    assert shown(host) == [*KERNEL, ("sys/fs/cgroup/user/pids.max", 500, 40)]


@pytest.mark.usefixtures("ulimit")
def test_reads_the_limits_of_version_1_control_groups(host: Path) -> None:
    (host / "proc/self/cgroup").write_text("8:cpu,pids:/docker/abc\n4:memory:/\n")
    limit_group(host / "sys/fs/cgroup/pids/docker/abc", 100, 1)
    limit_group(host / "sys/fs/cgroup/pids/docker", 200, 2)
    assert shown(host) == [
        *KERNEL,
        ("sys/fs/cgroup/pids/docker/abc/pids.max", 100, 1),
        ("sys/fs/cgroup/pids/docker/pids.max", 200, 2),
    ]


def test_counts_the_threads_of_the_user_except_for_root(
    host: Path, ulimit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ulimit(NPROC=4096)
    monkeypatch.setattr(os, "getuid", lambda: 0)
    assert shown(host) == KERNEL
    infos = [
        {"uids": SimpleNamespace(real=uid), "num_threads": count} for uid, count in ((1000, 3), (0, 9), (1000, 4))
    ]
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    monkeypatch.setattr(psutil, "process_iter", lambda attributes: [SimpleNamespace(info=info) for info in infos])
    assert shown(host) == [("the limit on processes and threads of this user", 4096, 7), *KERNEL]


def test_this_host_runs_small_launches(make_run: Any) -> None:
    check_limits(make_run(peers=4), range(4))


def test_names_the_limit_on_processes_and_what_to_do(make_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = TaskLimit("kernel.pid_max", 1000, 300, "sysctl kernel.pid_max={value}")
    monkeypatch.setattr(limits, "task_limits", lambda: [limit])
    run = make_run(peers=80)
    check_limits(run, range(77))
    with pytest.raises(RunFileError) as caught:
        check_limits(run, range(80))
    assert str(caught.value).endswith(
        "peers: 80 peers on this host need about 720 processes and threads (9 each), but kernel.pid_max is 1000, of "
        "which 300 are in use: raise it with `sysctl kernel.pid_max=1020`, or start peers on several hosts"
    )
    with pytest.raises(RunFileError, match=r"need about 800 .*\(10 each\)"):
        check_limits(make_run(peers=80, threads=2), range(80))


def test_names_the_peer_that_needs_more_open_files_than_allowed(make_run: Any, ulimit: Any) -> None:
    run = make_run(peers=60, graph="star")
    ulimit(NOFILE=limits.FILES_PER_PEER + 59 * limits.FILES_PER_NEIGHBOR)
    check_limits(run, range(60))
    ulimit(NOFILE=400)
    check_limits(run, range(1, 60))
    with pytest.raises(RunFileError) as caught:
        check_limits(run, range(60))
    assert str(caught.value).endswith(
        "graph: peer 0 has 59 neighbors and needs about 418 open files, but the hard limit on open files is 400: "
        "raise it with `ulimit -Hn 418` as root, or use a graph with fewer neighbors"
    )


def test_a_launch_beyond_a_limit_starts_no_peer(
    invoke: Invoke, file: Path, fake_peers: Any, ulimit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in fake_peers(["finishes"] * 3).items():
        monkeypatch.setenv(key, value)
    ulimit(NOFILE=70)
    outcome = invoke("launch", file)
    assert outcome.exit_code == 2
    assert f"{file}:4: graph: peer 0 has 2 neighbors and needs about 76 open files" in outcome.stderr
    assert not (file.parent / "runs").exists()
