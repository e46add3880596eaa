"""Create the run folder of a new run, with everything that its peers read: run.yaml, run.json and plug-ins."""

from __future__ import annotations

import secrets
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from p2pfl.errors import RunFolderError
from p2pfl.file_locks import require_locks
from p2pfl.run_folder.files import obstacle, write_atomically, write_errors
from p2pfl.run_folder.folder import RunFolder
from p2pfl.run_folder.run_info import describe_run

if TYPE_CHECKING:
    from p2pfl.run_file.run import Run


def create(
    run: Run,
    root: Path | None = None,
    *,
    launcher_pid: int | None = None,
    simulated: bool = False,
    clock: bool = False,
    here: bool = True,
) -> RunFolder:
    """Create the folder of a run.

    Args:
        root: new or empty; by default a new folder in the run file's ``out``.
        clock: its seconds are those of a simulated clock.
        here: peers will run in it, which need locks.

    Raises:
        RunFileError: the run can follow a simulated clock only, and does not.
        RunFolderError: it cannot be created, is not empty, or its file system has no locks.
    """
    if not clock:
        run.check_real_time()
    now = datetime.now().astimezone()  # noqa: TID251  # for people
    if here:
        require_locks(root or run.file.out)
    folder = RunFolder.create(root or create_unique(run, now), range(run.peers))
    info = {**describe_run(run, secrets.token_hex(8), now, launcher_pid), "simulated": simulated}
    folder.write_info({**info, "clock": "simulated"} if clock else info)
    write_run(folder, run)
    return folder


def write_run(folder: RunFolder, run: Run) -> None:
    """Write the run file, and copies of the plug-ins. Raises WriteError, RunFolderError."""
    for path, content in run.copies(folder.root):
        if not path.is_file() or path.read_bytes() != content:
            with write_errors(path):
                path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, content, durable=True)
    text = run.to_yaml().encode()
    if not folder.run_file.exists() or folder.run_file.read_bytes() != text:
        write_atomically(folder.run_file, text, durable=True)  # last: a folder that has one counts as a run


def create_unique(run: Run, now: datetime | None = None) -> Path:
    """Create the folder ``<out>/<name>-<time>``, or ``…-2``, ``…-3`` if it exists. Raises RunFolderError."""
    now = now or datetime.now().astimezone()  # noqa: TID251  # for people
    out = run.file.out
    try:
        out.mkdir(parents=True, exist_ok=True)  # not below, where FileExistsError means another run
    except OSError as error:
        raise RunFolderError(f"{out}: cannot be created: {obstacle(out) or error.strerror}") from error
    root = out / f"{run.name}-{now:%Y%m%d-%H%M%S}"
    for number in count(1):
        candidate = root if number == 1 else root.with_name(f"{root.name}-{number}")
        try:
            candidate.mkdir()
            return candidate
        except FileExistsError:
            continue
        except OSError as error:
            raise RunFolderError(f"{candidate}: cannot be created: {error.strerror}") from error
    raise AssertionError("count() never ends")
