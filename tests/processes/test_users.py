"""A user id without a name and without HOME, as in containers that run with an arbitrary one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from p2pfl.run_folder.folder import RunFolder
from tests.run_file_texts import SMALLEST

UID = 54321
AS_ANOTHER = ["unshare", "--user", f"--map-user={UID}"]


def another_user() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*AS_ANOTHER, "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not another_user(), reason="user namespaces are not permitted")
def test_every_kind_of_run_works_without_a_name_and_a_home(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(SMALLEST)
    (tmp_path / "tmp").mkdir()
    environment = {"PATH": os.defpath, "TMPDIR": str(tmp_path / "tmp")}
    for command in (
        "doctor run.yaml",
        "simulate run.yaml --run-dir runs/a",
        "launch run.yaml --run-dir runs/b",
        "sweep run.yaml --seeds 1 --simulate --out sweep",
        "list",
    ):
        done = subprocess.run(
            [*AS_ANOTHER, sys.executable, "-P", "-m", "launcher.cli", *command.split()],
            cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    assert len(list((tmp_path / "tmp" / f"p2pfl-{UID}").glob("decoded/digits-*"))) == 1
    digests = {RunFolder.open(tmp_path / "runs" / name).peer(1).result().digest for name in "ab"}  # type: ignore[union-attr]
    assert len(digests) == 1
