"""Create a run folder from a run file."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from p2pfl.errors import RunFolderError
from p2pfl.session.files import write_atomically
from p2pfl.session.run_folder import RunFolder
from p2pfl.session.run_info import describe_run

if TYPE_CHECKING:
    from p2pfl.run_file.run import Run


@dataclass(frozen=True)
class LaunchRequest:
    """What the user asks for: a run file, changes to its keys, and the folder for the run.

    ``seed`` and ``rounds`` take precedence over ``sets``.
    """

    file: Path
    sets: Sequence[str] = ()
    seed: int | None = None
    rounds: int | None = None
    run_dir: Path | None = None
    launcher_pid: int = field(default_factory=os.getpid)
    """This process, not the child that prepares the run (``in_child``)."""

    def load(self) -> Run:
        """Check the run file, and load and partition its dataset once before any peer starts. Raises RunFileError."""
        # These import torch: not before the warm process has begun to import it too.
        from p2pfl.run_file import load as run_files
        from p2pfl.session.build import load_data

        options = {"seed": self.seed, "rounds": self.rounds}
        overrides = [f"{key}={value}" for key, value in options.items() if value is not None]
        run = run_files.load(self.file, [*self.sets, *overrides], os.environ)
        load_data(run)
        return run

    def prepare(self, run: Run, *, simulated: bool = False) -> RunFolder:
        """Create a run folder with run.yaml and run.json. Raises RunFolderError."""
        now = datetime.now().astimezone()  # noqa: TID251  # for people
        root = self.run_dir or _create_unique(run.file.out / f"{run.name}-{now:%Y%m%d-%H%M%S}")
        folder = RunFolder.create(root, range(run.peers))
        folder.write_info({**describe_run(run, secrets.token_hex(8), now, self.launcher_pid), "simulated": simulated})
        # Write run.yaml last: a folder that has one counts as a run.
        write_atomically(folder.run_file, run.to_yaml().encode(), durable=True)
        return folder


def _create_unique(root: Path) -> Path:
    """Create ``root``, or ``root-2``, ``root-3``, … if it exists."""
    for number in count(1):
        candidate = root if number == 1 else root.with_name(f"{root.name}-{number}")
        try:
            candidate.mkdir(parents=True)
            return candidate
        except FileExistsError:
            continue
        except OSError as error:
            raise RunFolderError(f"{candidate}: cannot be created: {error.strerror}") from error
    raise AssertionError("count() never ends")
