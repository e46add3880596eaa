"""The Python API: check a run, run it, and read its records. ``import p2pfl`` exports it.

    run = p2pfl.load("mine.yaml", seed=7, algorithm__lr=0.01)
    run.simulate().metrics()                      # in this process
    with run.launch() as launched:                # one process per peer
        for record in launched.records(): ...

``launch`` starts the command ``p2pfl launch`` as a process, as a shell does: this package imports neither sockets nor
the launcher, nothing of the caller's process is forked, and it does not matter whether an event loop is running or
whether a script has a ``__main__`` guard.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
import torch

from p2pfl import PeerId
from p2pfl.attackers import attacks
from p2pfl.data import Dataset, Subset
from p2pfl.data.cache_folder import data_root
from p2pfl.errors import Diverged, MissingExtra, ModelWarning, P2pflError, RunFailed, RunFolderError
from p2pfl.messaging.topology import Topology
from p2pfl.models import Model
from p2pfl.run_file import load as run_files
from p2pfl.run_file.run import Run
from p2pfl.run_folder import records
from p2pfl.run_folder.failures import why_failed
from p2pfl.run_folder.folder import Result, RunFolder, Status, require_empty
from p2pfl.run_folder.new_run import create, create_unique, write_run
from p2pfl.run_folder.records import RecordFile
from p2pfl.run_folder.replay import Replay
from p2pfl.session import peer_model
from p2pfl.session.build import check_models, has_models_of_users, load_data
from p2pfl.simulation.simulate import OnRound, simulate, without_event_loop

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["LaunchedRun", "PlannedRun", "RecordedRun", "load", "open_run"]
AnyPath = str | os.PathLike[str]
POLL = 0.1  # seconds between two looks at the files of a run


def load(source: AnyPath | Mapping[str, Any], **overrides: Any) -> PlannedRun:
    """Check a run, without opening its dataset and without building models that have an import path.

    ``PlannedRun.partition`` does both, as does the start of the run.

    Args:
        source: a run file, or the same as nested dicts, whose relative paths start from the working directory.
        overrides: other values for keys, with ``__`` for the dots: ``seed=7, algorithm__lr=0.01``.

    Raises:
        RunFileError: with every problem found, by line and key.
    """
    changes = {key.replace("__", "."): value for key, value in overrides.items()}
    if isinstance(source, Mapping):
        return PlannedRun(run_files.from_dict(source, overrides=changes))
    return PlannedRun(run_files.load(Path(source), overrides=changes))


def open_run(folder: AnyPath) -> RecordedRun:
    """Open the folder of a run, finished or not. Raises RunFolderError if there is none."""
    return RecordedRun(RunFolder.open(Path(folder)))


class PlannedRun:
    """A checked run that has not been started. It can be started any number of times."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __repr__(self) -> str:
        run = self._run
        return f"<PlannedRun {run.name}: {run.algorithm.name}, {run.peers} peers, {run.rounds} rounds>"

    @property
    def settings(self) -> dict[str, Any]:
        """The run file as plain values, with every default filled in."""
        return self._run.resolved()

    @property
    def topology(self) -> Topology:
        """The graph: edges, neighbors, spectral gap."""
        return self._run.topology

    def topology_at(self, t: int) -> Topology:
        """Return the graph of round ``t``. If it changes, ``topology`` is the union over all rounds."""
        return self._run.topology if self._run.schedule is None else self._run.schedule(t)

    def partition(self) -> list[Subset]:
        """Return the samples of each peer, as indices into the dataset.

        Raises:
            RunFileError: the dataset is not available, or a model from a module cannot be built for it.
        """
        return self._checked_data()[1]

    def _checked_data(self) -> tuple[Dataset, list[Subset]]:
        """Load the data and check the models. Warns about what may be wrong with a user's model."""
        data = load_data(self._run)
        for remark in check_models(self._run, *data) if has_models_of_users(self._run) else ():
            warnings.warn(remark, ModelWarning, stacklevel=3)
        return data

    def files(self) -> list[str]:
        """Return the files and folders of the dataset, there or not, relative to the folder of datasets."""
        root = data_root(self._run.file.data.root)
        return [os.path.relpath(path, root) for path in self._run.loader.files(root)]

    def missing_files(self) -> list[str]:
        """Return those of ``files`` that are not there."""
        return [name for name in self.files() if not (data_root(self._run.file.data.root) / name).exists()]

    def dataset(self) -> Dataset:
        """Return the dataset that ``partition`` divides. Raises RunFileError if it is not available."""
        return load_data(self._run)[0]

    def class_names(self) -> tuple[str, ...]:
        """Return the names of the classes, in the order of outputs; none if they are numbers. Raises RunFileError."""
        return load_data(self._run)[0].class_names

    def simulate(
        self,
        run_dir: AnyPath | None = None,
        on_round: OnRound = lambda peer, t: None,
        replay: RecordedRun | None = None,
        clock: bool = False,
    ) -> RecordedRun:
        """Run all peers to the end in this process, on the CPU unless the run says ``device: cuda``.

        Args:
            run_dir: the run folder, new or empty; by default a new one in the run file's ``out``.
            on_round: called after each round with the peer and the round.
            replay: a finished run with the same settings and a ``synchrony``: rounds take the messages that its took.
            clock: follow a simulated clock, by the run's section ``time``; all seconds recorded are simulated.

        Raises:
            P2pflError: the run failed.
            Diverged: a peer has done nothing in the whole run, since its values had diverged; `open_run` opens it.
        """
        interrupted = threading.Event()

        def after_round(peer: PeerId, t: int) -> None:
            if interrupted.is_set():
                raise KeyboardInterrupt
            on_round(peer, t)

        if has_models_of_users(self._run):
            self._checked_data()  # before there is a folder
        replayed = None if replay is None else Replay(replay._folder, self._run.config_hash())
        folder = create(self._run, None if run_dir is None else Path(run_dir), simulated=True, clock=clock)
        threads = torch.get_num_threads()
        try:
            if replayed is not None:
                replayed.copy_order(folder)
            results = without_event_loop(lambda: simulate(self._run, folder, after_round, clock=clock), interrupted)
        finally:
            torch.set_num_threads(threads)
        if failed := [f"peer {result.peer}: {result.error}" for result in results if result.phase == "failed"]:
            raise Diverged("; ".join(failed[:3]))
        return RecordedRun(folder)

    def launch(self, run_dir: AnyPath | None = None) -> LaunchedRun:
        """Start one process per peer on this host, and return while they run.

        Args:
            run_dir: as in ``simulate``.

        Raises:
            RunFolderError: ``run_dir`` is not empty.
            RunFailed: the peers could not be started, or lack what only this program has registered.
        """
        for kind, name in run_files.registered_by_main(self._run.file):
            text = "this program has registered it, but each peer is another one; put its code into a file, that into"
            raise RunFailed(f"{kind} {name!r}: {text} `plugins`")
        root = create_unique(self._run) if run_dir is None else Path(run_dir)
        if root.is_dir():
            require_empty(root)  # the launcher would say so too late: the run in it would be taken for this one
        scratch = Path(tempfile.mkdtemp(prefix="p2pfl-"))
        launched = LaunchedRun(self._run, root, scratch)
        try:
            return launched._when_created()
        except BaseException:
            launched.stop()
            raise


class RecordedRun:
    """The folder of a run: what its peers have recorded so far."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._run: Run | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.folder}>"

    @property
    def folder(self) -> Path:
        """Where the files are."""
        return self._folder.root

    def plan(self) -> PlannedRun:
        """Return the run as it was started, to start it again. Raises RunFileError."""
        return PlannedRun(self._checked())

    def status(self) -> list[Status]:
        """Return what each peer does now, or how it ended; peers that have not started yet are missing."""
        return [status for files in self._folder.peers() if (status := files.status()) is not None]

    def results(self) -> list[Result]:
        """Return the results of the peers that have ended: accuracy, digest, traffic, mixing weights."""
        return [result for files in self._folder.peers() if (result := files.result()) is not None]

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the record of each peer and round, by peer; p2pfl/session/metrics.py lists the fields."""
        for record in records.read(self._folder):
            yield record.plain

    def metrics(self) -> pd.DataFrame:
        """Return a tidy table: a row for each peer and round, a column for each number.

        Columns are ``peer``, ``t``, ``accuracy``, ``masked_accuracy``, ``unmasked_accuracy``, ``test_loss``,
        ``correct`` and ``samples`` on the local test split, ``metrics.…`` as the run file names them, ``loss.ce`` and
        other terms of the training loss, ``seconds.training``, …, ``elapsed``, ``cost.…``, ``sources``,
        ``receivers``, ``sent.messages``, ``sent.bytes`` (with headers), ``received.messages``, ``received.bytes``,
        ``missing``, what else the method records, and if peers attack, the name of its ``attack`` or "".

        Raises:
            MissingExtra: pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError:
            raise MissingExtra("pandas", "pandas", "a table of metrics") from None
        return pd.DataFrame(list(records.rows(records.read(self._folder), attacks(self._folder.settings))))

    def graph(self, t: int | None = None) -> npt.NDArray[np.float64]:
        """Return the mixing weights after round ``t``, by default the last that all peers have completed.

        Returns:
            float64 [M, M]: row m holds the weights that peer m gives to each peer; NaN if it did not take part. In
            the folder of a peer that was started by hand, M is the largest peer id in its weights plus 1.

        Raises:
            RunFolderError: there are none: the method has no mixing weights, or the round was not completed.
        """
        weights = {(record.peer, record.t): record.weights for record in records.read(self._folder)}
        known = {key: row for key, row in weights.items() if row is not None}
        if not known:
            raise RunFolderError(f"{self.folder}: no mixing weights: no round is completed, or the method has none")
        peers = [files.peer for files in self._folder.peers()]
        size = max([peers[-1], *(peer for row in known.values() for peer in row)]) + 1
        last = min(max((s for peer, s in known if peer == m), default=-1) for m in peers)
        t = max(last, 0) if t is None else t
        if not any((peer, t) in known for peer in peers):
            raise RunFolderError(f"{self.folder}: no mixing weights of round {t}; the last complete round is {last}")
        matrix = np.full((size, size), np.nan)
        for m in peers:
            row = known.get((m, t))
            if row is not None:
                matrix[m] = 0.0
                for peer, weight in row.items():
                    matrix[m, peer] = weight
        return matrix

    def weights(self, peer: PeerId) -> dict[str, Any]:
        """Return the weights of a peer's ``model``, for ``load_state_dict`` of the class that the run file names.

        If the run file names the model otherwise, or changes its number of features, the weights are called
        ``backbone.…`` and ``head.…``. Raises the errors of ``model``.
        """
        return self.model(peer).plain_state_dict()

    def save_weights(self, peer: PeerId, file: AnyPath) -> int:
        """Write ``weights`` as ``torch.save`` does, for ``torch.load(file, weights_only=True)``.

        Return the number of rounds that the peer had completed. Raises WriteError, RunFolderError.
        """
        model, rounds = peer_model.restore(self._checked(), self._folder, peer)
        peer_model.save(model, Path(file))
        return rounds

    def model(self, peer: PeerId) -> Model:
        """Return a peer's model from its last checkpoint, in evaluation mode, on the CPU.

        It maps the network's input, e.g. normalized images, float [B, C, H, W], to logits, float [B, classes].
        Some methods are evaluated by more than this network: MAPL has a ReLU before the head, FedProto and FedTGP
        take the nearest prototype, and those without labels (``*-ssl``, FedStyle) train a classifier on its features.

        Raises:
            RunFolderError: the peer has written no checkpoint.
        """
        return peer_model.restore(self._checked(), self._folder, peer)[0]

    def partition(self) -> list[Subset]:
        """Return the samples of each peer, as indices into the dataset. Raises RunFileError if that is missing."""
        return load_data(self._checked(), self._folder.root)[1]

    def dataset(self) -> Dataset:
        """Return the dataset that ``partition`` divides. Raises RunFileError if it is not available."""
        return load_data(self._checked(), self._folder.root)[0]

    def class_names(self) -> tuple[str, ...]:
        """As in ``PlannedRun``. Raises RunFileError if the dataset is not available."""
        return load_data(self._checked(), self._folder.root)[0].class_names

    def _checked(self) -> Run:
        """Return the run. A collection may come from other hosts: code of plug-ins in it is not executed."""
        if self._run is None:
            self._run = run_files.load(self._folder.require_local().run_file)
        return self._run


class LaunchedRun(RecordedRun):
    """A run whose peers are processes on this host. At the end of a ``with`` block, it is stopped.

    If the process that launched it ends, the peers continue: stop them with `p2pfl stop`.
    """

    def __init__(self, run: Run, root: Path, scratch: Path) -> None:
        super().__init__(RunFolder(root.absolute()))
        self._planned = run
        self._stopped = False
        self._file = scratch / "run.yaml"
        self._remove_scratch = weakref.finalize(self, shutil.rmtree, scratch, ignore_errors=True)
        write_run(RunFolder(scratch), run)
        self._log = scratch / "launcher.log"
        command = [sys.executable, "-P", "-m", "launcher.cli", "launch", str(self._file), "--json"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "--run-dir", str(root)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches this process, which stops the launcher
            )

    def _when_created(self) -> Self:
        """Wait until the run folder exists."""
        while not self._folder.run_file.exists():
            if self._ended(POLL) and not self._folder.run_file.exists():
                raise self._why_failed()
        return self

    def running(self) -> bool:
        """Return whether the run is still going."""
        return not self._ended(0)

    def wait(self, timeout: float | None = None) -> RecordedRun:
        """Wait until all peers have ended; return their records. Ctrl-C stops the peers.

        Args:
            timeout: seconds.

        Raises:
            TimeoutError: the run is still going.
            RunFailed: a peer failed.
        """
        try:
            ended = self._ended(timeout)
        except KeyboardInterrupt:
            self.stop()
            raise
        if not ended:
            raise TimeoutError(f"{self.folder}: still running after {timeout} s")
        if self._process.returncode and not self._all_ended_well():
            raise self._why_failed()
        return RecordedRun(self._folder)

    def stop(self) -> RecordedRun:
        """Stop the peers after their batch; each rolls back to the last state it kept, and writes a checkpoint.

        `p2pfl resume` continues the run.
        """
        if self._process.poll() is None:
            self._stopped = True
            self._process.send_signal(signal.SIGINT)
        self._ended(None)
        return RecordedRun(self._folder)

    def records(self, follow: bool = False) -> Iterator[dict[str, Any]]:
        """Yield the record of each peer and round.

        Args:
            follow: also yield those to come, as they are written, until the run ends.
        """
        if not follow:
            yield from super().records()
            return
        files = {peer.peer: RecordFile(peer.metrics) for peer in self._folder.peers()}
        last = dict.fromkeys(files, -1)
        ended = False
        while not ended:
            ended = self._ended(POLL)  # look once more after the end
            for peer, file in files.items():
                for record in file.read():
                    if record.t > last[peer]:  # otherwise a peer that has resumed writes it again
                        last[peer] = record.t
                        yield record.plain

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _ended(self, timeout: float | None) -> bool:
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _all_ended_well(self) -> bool:
        if not self._folder.run_file.exists():
            return False
        phases = {status and status.phase for status in (files.status() for files in self._folder.peers())}
        if self._stopped:
            phases.discard(None)  # has not started
        return phases <= {"stopped", "finished"}

    def _why_failed(self) -> RunFailed:
        return RunFailed("\n".join(map(self._located, why_failed(self._folder, self._log))))

    def _located(self, line: str) -> str:
        """Name the key of the user's run file, or dict, in place of a line of the temporary one."""
        text = line.removeprefix("error:").strip()
        found = re.fullmatch(rf"{re.escape(str(self._file))}:\d+: ([\w.-]+): (.*)", text)
        return text if found is None else str(self._planned.error_at(found[1], P2pflError(found[2])))
