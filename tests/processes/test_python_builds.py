"""Python built with old headers lacks functions of the kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from p2pfl.run_folder.folder import RunFolder
from tests.run_file_texts import SMALLEST

LACKING = ("memfd_create", "pidfd_open", "eventfd", "eventfd_read", "eventfd_write")


@pytest.mark.parametrize("command", ["launch", "simulate --jobs 2", "sweep --seeds 1"])
def test_runs_work_without_functions_that_some_builds_lack(tmp_path: Path, command: str) -> None:
    (tmp_path / "run.yaml").write_text(SMALLEST)
    (tmp_path / "sitecustomize.py").write_text(f"import os\nfor name in {LACKING}: delattr(os, name)\n")
    name, *options = command.split()
    into = ["--out", "out"] if name == "sweep" else ["--run-dir", "out"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "launcher.cli", name, "run.yaml", *into, *options],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (root,) = {path.parents[2] for path in (tmp_path / "out").rglob("result.json")}
    results = [files.result() for files in RunFolder.open(root).peers()]
    assert [result.phase for result in results if result] == ["finished", "finished"]
