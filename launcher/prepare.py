"""From a run file to a new run folder."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from p2pfl.about import about_run
from p2pfl.errors import RunFolderError
from p2pfl.runfolder import RunFolder, write_atomically

if TYPE_CHECKING:
    from p2pfl.config import Run


@dataclass(frozen=True)
class Order:
    """What the user asked for: a run file, what to change in it, and where the run should go."""

    file: Path
    sets: Sequence[str] = ()
    seed: int | None = None
    rounds: int | None = None
    run_dir: Path | None = None

    def load(self) -> Run:
        """The checked run, with its data found, decoded and partitioned once before any peer starts.

        ``seed`` and ``rounds`` win over ``sets``. Raises RunFileError.
        """
        # torch comes with these: not before the warm process has begun to import it too
        from p2pfl import config
        from p2pfl.session import load_data

        short = {"seed": self.seed, "rounds": self.rounds}
        given = [f"{key}={value}" for key, value in short.items() if value is not None]
        run = config.load(self.file, [*self.sets, *given], os.environ)
        load_data(run)
        return run

    def prepare(self, run: Run, *, simulated: bool = False) -> RunFolder:
        """A new run folder with run.yaml and run.json in it. Raises RunFolderError."""
        now = datetime.now().astimezone()
        root = self.run_dir or _free_folder(run.file.out / f"{run.name}-{now:%Y%m%d-%H%M%S}")
        folder = RunFolder.create(root, range(run.peers))
        folder.write_about({**about_run(run, secrets.token_hex(8), now), "simulated": simulated})
        # Last: a folder with a run.yaml in it is a run.
        write_atomically(folder.run_file, run.to_yaml().encode(), durable=True)
        return folder


def _free_folder(root: Path) -> Path:
    """Make ``root``, or ``root-2``, ``root-3``, … if it is taken."""
    for number in count(1):
        candidate = root if number == 1 else root.with_name(f"{root.name}-{number}")
        try:
            candidate.mkdir(parents=True)
            return candidate
        except FileExistsError:
            continue
        except OSError as error:
            raise RunFolderError(f"{candidate}: cannot be made: {error.strerror}") from error
    raise AssertionError("count() ends")
