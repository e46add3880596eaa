"""Create a run folder from a run file."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import active_children  # noqa: TID251  # unpickles nothing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.errors import LaunchError
from launcher.formatting.console import echo
from p2pfl.errors import MissingExtra
from p2pfl.run_folder.folder import RunFolder
from p2pfl.run_folder.new_run import create
from p2pfl.run_folder.peer_log import log_info

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
    log_format: str = "text"
    log_levels: Sequence[str] = ()
    log_size: int | None = None
    launcher_pid: int = field(default_factory=os.getpid)
    """This process, not the child that prepares the run (``in_child``)."""

    def load(self, *, clock: bool = False) -> Run:
        """Check the run file and its models, and load and partition its dataset once before any peer starts.

        Print what there is to know about the dataset, which rule ``aggregation: auto`` is, and that ``time`` has no
        effect without a simulated ``clock``.

        Raises:
            RunFileError: something is wrong with one of them.
        """
        from p2pfl.leftover_processes import end_servers, left_running
        from p2pfl.session.build import check_models, load_data  # imports torch: not before the warm process

        run = self.check()
        dataset, subsets = load_data(run)
        for remark in check_models(run, dataset, subsets):
            echo(f"warning: {remark}", err=True)
        end_servers()
        if left := active_children():
            raise run.error_at("plugins", LaunchError(f"a plug-in {left_running(left)}"))
        check_report(run)
        for note in dataset.notes:
            echo(f"note: {note}", err=True)
        if run.recommended:
            echo(f"note: aggregation: auto is {run.rules[0]} for {run.file.algorithm.name}", err=True)
        if run.file.time is not None and not clock:
            echo("note: this run takes real time; `time` is for `p2pfl simulate --clock`", err=True)
        return run

    def check(self) -> Run:
        """Check the run file, without its dataset. Raises RunFileError."""
        from p2pfl.run_file import load as run_files  # as above

        options = {"seed": self.seed, "rounds": self.rounds}
        overrides = [f"{key}={value}" for key, value in options.items() if value is not None]
        return run_files.load(self.file, [*self.sets, *overrides], os.environ)

    def prepare(self, run: Run, *, simulated: bool = False, clock: bool = False, here: bool = True) -> RunFolder:
        """Create a run folder, in which peers will run if ``here``. Raises RunFolderError."""
        log = self._log(run.peers)
        pid = self.launcher_pid
        folder = create(run, self.run_dir, launcher_pid=pid, simulated=simulated, clock=clock, here=here)
        if log:
            folder.write_info({**folder.info, "log": log})
        return folder

    def _log(self, peers: int) -> dict[str, Any]:
        """Return ``log`` of run.json, with what differs from the defaults. Raises LaunchError."""
        try:
            return log_info(self.log_format, self.log_levels, self.log_size, peers)
        except ValueError as error:
            raise LaunchError(str(error)) from None


def check_report(run: Run) -> None:
    """Raise RunFileError if the run file asks for a report and the library that draws it is not installed."""
    if run.file.report and importlib.util.find_spec("vl_convert") is None:
        raise run.error_at("report", MissingExtra("vl-convert-python", "report", "writing a report"))
