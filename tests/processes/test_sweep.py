"""`p2pfl sweep` as a process: interrupted and continued, with the results of an undisturbed sweep."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from launcher.facts.sweep_folder import SweepFolder
from p2pfl.run_file.load import load
from p2pfl.run_folder.folder import RunFolder
from p2pfl.simulation.simulate import simulate
from tests.conftest import tree, until
from tests.fast_python.fixture import FastPython

ROUNDS = 15
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(tree(rounds=ROUNDS)))
    return path


@pytest.fixture
def start(fast_python: FastPython) -> Iterator[Start]:
    """Start `p2pfl sweep`, which is killed at the end of the test if it still runs."""
    started: list[subprocess.Popen[str]] = []

    def sweep(*arguments: object) -> subprocess.Popen[str]:
        command = [fast_python.executable, "-P", "-m", "launcher.cli", "sweep", *map(str, arguments), "--json"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield sweep
    for process in started:
        if process.poll() is None:
            kill(fast_python, process, everything=True)
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


def kill(python: FastPython, process: subprocess.Popen[str], *, everything: bool) -> None:
    """Kill the sweep, and the commands of its runs too if ``everything``."""
    sweep = psutil.Process(python.pid(process))
    children = sweep.children(recursive=True) if everything else []
    sweep.kill()
    process.wait()
    for child in children:
        child.kill()
    psutil.wait_procs(children)


def rounds_done(folder: RunFolder) -> int:
    """Completed rounds of the slowest peer."""
    if not folder.run_file.exists():
        return 0
    statuses = [files.status() for files in folder.peers()]
    return min(0 if status is None else status.rounds_done for status in statuses)


def commands(folder: SweepFolder, name: str) -> list[str]:
    """The commands that have worked on a run: ``simulate``, ``resume``, …"""
    lines = folder.log(name).read_text().splitlines()
    return [line.split()[2] for line in lines if line.startswith("$ p2pfl ")]


def digests(folder: RunFolder) -> list[str]:
    results = [files.result() for files in folder.peers()]
    return ["" if result is None else result.digest for result in results]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "continued"), [("--simulate", "resume"), ("--clock", "simulate")])
def test_killed_and_continued_it_ends_like_an_undisturbed_one(
    start: Start, file: Path, fast_python: FastPython, tmp_path: Path, how: str, continued: str
) -> None:
    asked = [file, "--grid", "algorithm=local,dpsgd", how, "--jobs", 1, "--out", tmp_path / "s"]
    folder = SweepFolder(tmp_path / "s")
    names = ["local-seed=3", "dpsgd-seed=3"]
    first = start(*asked)
    until(lambda: rounds_done(folder.run("dpsgd-seed=3")) >= 2)
    kill(fast_python, first, everything=True)
    until(lambda: [folder.state(name) for name in names] == ["finished", "interrupted"])  # the server kills the run

    again = start(*asked)
    out, err = again.communicate()
    assert again.returncode == 0, err
    assert "1 of 2 runs have finished before" in err
    assert [commands(folder, name) for name in names] == [["simulate"], ["simulate", continued]]
    for name in names:
        undisturbed = [result.digest for result in simulate(load(folder.plan(name)), clock=how == "--clock")]
        assert digests(folder.run(name)) == undisturbed
    plain = json.loads(out)
    assert [(line["name"], line["seeds"]) for line in plain["groups"]] == [("local", [3]), ("dpsgd", [3])]
    assert plain["groups"][1]["versus"]["n"] == 1
    assert (plain["finished"], plain["total"], plain["failures"]) == (2, 2, [])


def test_runs_that_a_killed_sweep_left_running_are_waited_for(
    start: Start, file: Path, fast_python: FastPython, tmp_path: Path
) -> None:
    file.write_text(yaml.safe_dump(tree(rounds=4 * ROUNDS)))  # it must not end before it is suspended
    folder = SweepFolder(tmp_path / "s")
    first = start(file, "--seeds", 1, "--simulate", "--out", folder.root)
    until(lambda: rounds_done(folder.run("seed=3")) >= 1)
    of_the_run = psutil.Process(fast_python.pid(first)).children(recursive=True)
    kill(fast_python, first, everything=False)
    for process in of_the_run:
        process.suspend()  # else the run may end before the sweep looks for it
    try:
        again = start(folder.root)
        assert again.stderr is not None
        assert any("seed=3: found running" in line for line in again.stderr)
    finally:
        for process in of_the_run:
            process.resume()
    assert again.wait() == 0
    assert commands(folder, "seed=3") == ["simulate"]
    assert folder.state("seed=3") == "finished"


@pytest.mark.slow
def test_ctrl_c_stops_the_run_and_the_same_folder_continues(start: Start, file: Path, tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path / "s")
    first = start(file, "--seeds", 1, "--simulate", "--out", folder.root)
    until(lambda: rounds_done(folder.run("seed=3")) >= 1)
    first.send_signal(signal.SIGINT)
    out, err = first.communicate()
    assert first.returncode == 128 + signal.SIGINT
    assert f"1 of 1 runs are not finished; continue with: p2pfl sweep {folder.root}" in err
    assert json.loads(out)["finished"] == 0
    assert folder.state("seed=3") == "interrupted"
    again = start(folder.root)
    again.communicate()
    assert again.returncode == 0
    assert commands(folder, "seed=3") == ["simulate", "resume"]


@pytest.mark.slow
def test_a_task_of_a_job_array_requeues_itself_before_the_time_limit_and_goes_on(file: Path, tmp_path: Path) -> None:
    folder, script = SweepFolder(tmp_path / "s"), tmp_path / "sweep.sh"
    command = [sys.executable, "-P", "-m", "launcher.cli", "sweep", str(file), "--seeds", "1", "--simulate"]
    script.write_text(subprocess.check_output([*command, "--sbatch", "--out", str(folder.root)], text=True))
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\necho $* > {tmp_path}/requeued\n")
    (tmp_path / "scontrol").chmod(0o755)
    slurm = {"SLURM_ARRAY_TASK_ID": "0", "SLURM_JOB_ID": "7", "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    python_path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **slurm, "PYTHONPATH": python_path}
    first = subprocess.Popen(["bash", script], env=environment)
    until(lambda: rounds_done(folder.run("seed=3")) >= 2)
    first.terminate()  # the time limit is near
    assert first.wait() != 0
    assert (tmp_path / "requeued").read_text() == "requeue incomplete 7\n"
    assert folder.state("seed=3") == "interrupted"
    for _ in range(2):  # a task of a run that has finished ends at once
        assert subprocess.run(["bash", script], env=environment).returncode == 0
    assert commands(folder, "seed=3") == ["simulate", "resume"]
    assert digests(folder.run("seed=3")) == [result.digest for result in simulate(load(folder.plan("seed=3")))]


def test_a_run_that_fails_is_listed_with_its_log_and_the_others_go_on(
    start: Start, file: Path, tmp_path: Path
) -> None:
    folder = SweepFolder(tmp_path / "s")
    # The first run must not end before the plan of the second is changed.
    first = start(file, "--grid", f"rounds={4 * ROUNDS},2", "--simulate", "--jobs", 1, "--out", folder.root)
    until(lambda: folder.file.exists())
    plan = folder.plan("rounds=2-seed=3")
    plan.write_text(plan.read_text().replace("rounds: 2", "rounds: two"))
    out, err = first.communicate()
    assert first.returncode == 1
    plain = json.loads(out)
    (failure,) = plain["failures"]
    assert failure["run"] == "rounds=2-seed=3"
    assert "rounds: should be an integer (found 'two')" in failure["error"]
    assert Path(failure["log"]).read_text().startswith("$ p2pfl simulate ")
    assert f"failed: rounds=2-seed=3: {failure['error']}; log: {failure['log']}" in err
    assert [line["labels"] for line in plain["groups"]] == [{"rounds": f"{4 * ROUNDS}"}]


@pytest.mark.slow
def test_a_search_continues_its_trials(start: Start, file: Path, fast_python: FastPython, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    space = tmp_path / "space.yaml"
    space.write_text("trials: 2\nprune: false\nspace:\n  algorithm.lr: {low: 0.001, high: 0.5, log: true}\n")
    folder = SweepFolder(tmp_path / "s")
    first = start(file, "--optuna", space, "--simulate", "--jobs", 1, "--out", folder.root)

    def second() -> str | None:
        """The name of the second trial when it is in the middle."""
        points = folder.sweep.points if folder.file.exists() else ()
        return points[1].name if len(points) > 1 and rounds_done(folder.run(points[1].name)) >= 2 else None

    interrupted: Any = until(second)
    kill(fast_python, first, everything=True)
    again = start(folder.root)
    out, err = again.communicate()
    assert again.returncode == 0, err
    names = [point.name for point in folder.sweep.points]
    assert len(names) == 2
    assert names[1] == interrupted
    assert commands(folder, interrupted) == ["simulate", "resume"]
    assert commands(folder, names[0]) == ["simulate"]
    best = max(json.loads(out)["groups"], key=lambda line: line["accuracy"]["mean"])
    assert f"best of 2 finished trials: lr={best['labels']['algorithm.lr']}-seed=3, accuracy" in err


def test_the_help_imports_neither_torch_nor_scipy() -> None:
    code = (
        "import sys\nfrom launcher.cli import main\n"
        "try: main()\n"
        "finally: assert not {'torch', 'scipy', 'pydantic', 'optuna', 'tensorboard'} & sys.modules.keys()"
    )
    for command in ("sweep", "compare", "export"):
        done = subprocess.run(
            [sys.executable, "-c", code, command, "--help"], capture_output=True, text=True, env={**os.environ}
        )
        assert done.stderr == ""
