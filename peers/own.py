"""A peer without a launcher: it makes a run folder of its own, from the run file that all peers have.

    p2pfl peer --file mesh.yaml --run /run/p2pfl --me 3

Peers on separate hosts, or in containers, share nothing but that file. The run id follows from it, unless one is
given.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from p2pfl.about import about_run, id_of
from p2pfl.config import Run, load
from p2pfl.errors import RunFolderError
from p2pfl.runfolder import PeerId, RunFolder, write_atomically


def own_folder(
    file: Path, root: Path, me: PeerId, run_id: str | None = None, sets: Sequence[str] = ()
) -> tuple[RunFolder, Run]:
    """The run folder of peer ``me`` alone, new or with what an earlier process of it has left.

    Where, with whom and on what the run goes on may have changed in ``file`` since then; what its result follows from
    may not. Raises RunFileError, RunFolderError, Unwritable.
    """
    run = load(file, sets, os.environ)
    if me >= run.peers:
        raise RunFolderError(f"{file}: no peer {me}; the {run.peers} peers are 0 to {run.peers - 1}")
    if run_id is not None and not re.fullmatch(r"[0-9a-f]{16}", run_id):
        raise RunFolderError(f"run id {run_id!r} should be 16 hex digits")
    wanted = run_id or id_of(run)
    folder = RunFolder.create(root, [me], again=True)
    if folder.run_file.exists():
        _check_same(folder.own(), run, file, wanted)
    else:
        folder.write_about(about_run(run, wanted))
    text = run.to_yaml().encode()
    if not folder.run_file.exists() or folder.run_file.read_bytes() != text:
        write_atomically(folder.run_file, text, durable=True)  # last: a folder with a run.yaml in it is a run
    return folder, run


def _check_same(folder: RunFolder, run: Run, file: Path, run_id: str) -> None:
    about = folder.about
    remedy = "give another folder, or remove this one to begin anew"
    if about.get("digest") != run.digest():
        before, now = load(folder.run_file).resolved(), run.resolved()
        keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
        raise RunFolderError(f"{folder.root}: holds another run than {file}: {', '.join(keys)} differ; {remedy}")
    if about["id"] != run_id:
        raise RunFolderError(f"{folder.root}: holds run {about['id']}, not {run_id}; {remedy}")
