"""A peer without a launcher: it creates its own run folder from the run file, which all peers have.

    p2pfl peer --file mesh.yaml --run /run/p2pfl --me 3

Peers on separate hosts or in containers share nothing but that file. The run id is derived from it, unless one is
given.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from p2pfl import PeerId
from p2pfl.errors import RunFolderError
from p2pfl.run_file.load import load
from p2pfl.run_file.run import Run
from p2pfl.run_folder.folder import RunFolder
from p2pfl.run_folder.new_run import write_run
from p2pfl.run_folder.run_info import derive_run_id, describe_run


def open_or_create(
    file: Path, root: Path, me: PeerId, run_id: str | None = None, sets: Sequence[str] = ()
) -> tuple[RunFolder, Run]:
    """Create a run folder for peer ``me`` alone, or open the folder of an earlier process of the peer.

    In between, ``file`` may have changed in keys that do not affect the run's result, such as addresses. Raises
    RunFileError, RunFolderError, WriteError.
    """
    run = load(file, sets, os.environ)
    run.check_real_time()
    if me >= run.peers:
        raise RunFolderError(f"{file}: no peer {me}; the {run.peers} peers are 0 to {run.peers - 1}")
    if run_id is not None and not re.fullmatch(r"[0-9a-f]{16}", run_id):
        raise RunFolderError(f"run id {run_id!r} should be 16 hex digits")
    expected_id = run_id or derive_run_id(run)
    folder = RunFolder.create(root, [me], again=True)
    if folder.run_file.exists():
        _check_same(folder.require_local(), run, file, expected_id)
    else:
        folder.write_info(describe_run(run, expected_id))
    write_run(folder, run)
    return folder, run


def _check_same(folder: RunFolder, run: Run, file: Path, run_id: str) -> None:
    info = folder.info
    remedy = "use another folder, or remove this one to start over"
    if info.get("config_hash") != run.config_hash():
        before, now = load(folder.run_file).resolved(), run.resolved()
        keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
        raise RunFolderError(f"{folder.root}: contains a run that differs from {file} in {', '.join(keys)}; {remedy}")
    if info["id"] != run_id:
        raise RunFolderError(f"{folder.root}: contains run {info['id']}, not {run_id}; {remedy}")
