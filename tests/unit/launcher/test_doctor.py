"""p2pfl doctor: findings, and what to do about them."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
from collections import namedtuple
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from launcher import doctor
from launcher.doctor import Finding, examine
from launcher.errors import LaunchError
from launcher.tracking import tracker
from p2pfl.errors import P2pflError
from p2pfl.run_file.load import from_dict
from p2pfl.session import gpus
from p2pfl.session.gpus import GpuSlice, HostGpu, find_gpus, peers_at_once, require_gpu, slices
from tests.launcher_fixtures import Invoke

H100 = HostGpu("H100", 80_000_000_000)


def found(topic: str, findings: Sequence[Finding]) -> list[tuple[str, str]]:
    return [(finding.level, finding.text) for finding in findings if finding.topic == topic]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "find_gpus", list)
    monkeypatch.setattr(shutil, "which", lambda program: None)


def test_nothing_prevents_a_small_run_here(file: Path, invoke: Invoke) -> None:
    outcome = invoke("doctor", file)
    assert outcome.exit_code == 0, outcome.stdout
    lines = outcome.stdout.splitlines()
    assert all(line.startswith("ok") for line in lines)
    topics = [
        "Python",
        "torch",
        "run",
        "CPU",
        "GPU",
        "limits",
        "memory",
        "disk",
        "data",
        "addresses",
        "ports",
        "keys",
    ]
    assert [line.split()[1] for line in lines] == topics


def test_examines_the_host_without_a_run_file(invoke: Invoke) -> None:
    outcome = invoke("doctor", "--json")
    assert {finding["topic"] for finding in json.loads(outcome.stdout)} == {
        *("Python", "torch", "CPU", "GPU", "limits", "memory", "disk", "data", "cache")
    }
    assert outcome.exit_code == 0


def test_an_unreadable_output_folder_is_a_problem(file: Path, tmp_path: Path) -> None:
    out = tmp_path / ("x" * 256)
    assert found("disk", examine(file, (f"out={out}",))) == [
        ("problem", f"{out}: cannot be read: File name too long")
    ]


def test_set_needs_a_run_file(invoke: Invoke) -> None:
    assert invoke("doctor", "--set", "seed=1").exit_code == 2


def test_an_invalid_run_file_is_a_problem(file: Path, invoke: Invoke) -> None:
    outcome = invoke("doctor", file, "--set", "algorithm=mapel")
    assert outcome.exit_code == 1
    assert outcome.stdout.splitlines()[-1].startswith("problem  run file  --set algorithm=mapel: ")


def test_says_what_prevents_a_run_and_what_to_do(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "available_memory", lambda: 500_000_000)
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(1000))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        sets = (f"transport.port={port}", "device=cuda", f"transport.keys={tmp_path}", "data.dataset=stanford-cars")
        findings = examine(file, sets)
    ((level, text),) = found("ports", findings)
    assert level == "problem"
    assert f"transport.port: port {port} of peer 0 is in use; stop the process that listens there" in text
    assert found("GPU", findings) == [("problem", f"device: cuda, but {gpus.NO_GPU}")]
    assert [level for level, _ in found("keys", findings) + found("data", findings)] == ["problem", "problem"]
    ((level, text),) = found("memory", findings)
    assert (level, text.partition(";")[0]) == ("warning", "500 MB available")
    assert [level for level, _ in found("disk", findings)] == ["warning"]
    assert all(finding.advice for finding in findings if finding.topic in ("memory", "disk"))


@pytest.mark.parametrize(
    ("out", "problem"), [("runs", "is a broken symbolic link to /no"), ("file", "is not a folder")]
)
def test_something_else_in_the_place_of_out_is_a_problem(file: Path, tmp_path: Path, out: str, problem: str) -> None:
    (tmp_path / "runs").symlink_to("/no/disk")
    (tmp_path / "file").touch()
    ((level, text),) = found("disk", examine(file, (f"out={tmp_path / out}/below",)))
    assert level == "problem"
    assert text.startswith(f"{tmp_path / out} {problem}")


def test_reports_what_a_launch_would_refuse(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(run: Any, peers: Any) -> None:
        raise LaunchError("too many peers; start fewer")

    monkeypatch.setattr(doctor, "check_limits", refuse)
    assert found("limits", examine(file)) == [("problem", "too many peers; start fewer")]


def test_missing_packages_of_trackers_and_reports_are_problems(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing: set[str] = set()
    gpus.torch_build()  # imports torchvision, which looks for modules too
    for module in (importlib.util, tracker):
        monkeypatch.setattr(module, "find_spec", lambda name: None if name in missing else object())
    sets = ("track=[{name: tensorboard}]", "report=true")
    findings = examine(file, sets)
    assert found("trackers", findings) == [("ok", "tensorboard: installed")]
    assert found("report", findings) == [("ok", "what draws it is installed")]
    missing |= {"tensorboard", "vl_convert"}
    findings = examine(file, sets)
    for topic, extra in (("trackers", "tensorboard"), ("report", "report")):
        ((level, text),) = found(topic, findings)
        assert level == "problem"
        assert f"pip install 'p2pfl-mesh[{extra}]'" in text


@pytest.mark.parametrize(
    "reason", [ImportError("no torch"), OSError("libcudart.so"), RuntimeError("torchvision::nms")]
)
def test_without_torch_nothing_else_is_examined(
    file: Path, monkeypatch: pytest.MonkeyPatch, reason: Exception
) -> None:
    def fail() -> None:
        raise reason

    monkeypatch.setattr(gpus, "torch_build", fail)
    findings = examine(file)
    assert [finding.level for finding in findings] == ["ok", "problem"]
    assert findings[1].text == f"cannot be imported: {reason}"


def test_a_model_that_does_not_fit_the_data_is_a_problem(file: Path) -> None:
    problems = [finding for finding in examine(file, ("models=htfe-cnn",)) if finding.level == "problem"]
    assert ["images of 8x8 are too small" in problem.text for problem in problems] == [True]


def test_shows_how_gpus_will_be_shared(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "find_gpus", lambda: [H100, H100, H100, H100])
    findings = examine(file, ("gpu.peers_per_gpu=2", "peers=6"))
    assert found("GPU", findings) == [
        ("ok", "0: H100, 80.0 GB; peers 0 4, each up to 40.0 GB, 2 at the same time"),
        ("ok", "1: H100, 80.0 GB; peers 1 5, each up to 40.0 GB, 2 at the same time"),
        ("ok", "2: H100, 80.0 GB; peers 2, each up to 80.0 GB, 1 at the same time"),
        ("ok", "3: H100, 80.0 GB; peers 3, each up to 80.0 GB, 1 at the same time"),
    ]
    assert found("GPU", examine(file, ("device=cpu",)))[0] == ("ok", "0: H100, 80.0 GB")


def test_mps_without_its_control_program_is_a_problem(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "find_gpus", lambda: [H100])
    assert [level for level, _ in found("MPS", examine(file, ("gpu.mps=true",)))] == ["problem"]
    assert found("MPS", examine(file)) == []
    monkeypatch.setattr(shutil, "which", lambda program: f"/usr/bin/{program}")
    assert [level for level, _ in found("MPS", examine(file))] == ["ok"]


def test_a_driver_without_a_gpu_for_torch_is_a_warning(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda program: f"/usr/bin/{program}")
    monkeypatch.setattr(gpus, "torch_build", lambda: ("2.4", None, "0.19"))
    warning = next(finding for finding in examine(file) if finding.level == "warning")
    assert warning.advice == "install a build of torch for CUDA"


# ---- GPUs


def run_with(**changes: Any) -> Any:
    tree = {"name": "toy", "rounds": 1, "peers": 5, "data": {"dataset": "digits"}, "algorithm": "local"}
    return from_dict({**tree, **changes})


def test_peers_take_turns_on_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_with(gpu={"peers_per_gpu": 2}).file
    assert slices(run, 2) == [GpuSlice(range(0, 5, 2), 1 / 3, 2), GpuSlice(range(1, 5, 2), 1 / 2, 2)]
    assert len(slices(run, 8)) == 5
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(16))
    assert [part.at_once for part in slices(run_with(threads=2).file, 2)] == [4, 4]
    assert [part.at_once for part in slices(run_with(threads=20).file, 2)] == [1, 1]
    assert [peers_at_once(run, 0), peers_at_once(run_with(slots=3).file, 0)] == [16, 3]
    assert slices(run_with(slots=3, gpu={"memory_fraction": 0.1}).file, 1) == [GpuSlice(range(5), 0.1, 3)]


def test_finds_gpus_in_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_gpus", lambda: [H100])
    assert find_gpus() == [H100]


def test_a_gpu_is_required_only_if_the_run_file_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    require_gpu(run_with(device="auto"))
    with pytest.raises(P2pflError, match="device: cuda, but torch finds no GPU"):
        require_gpu(run_with(device="cuda"))
    monkeypatch.setattr(gpus, "find_gpus", lambda: [H100])
    require_gpu(run_with(device="cuda"))
