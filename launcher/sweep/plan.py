"""Check what a sweep asks for, and write its folder: the resolved run file of every run, before any of them starts.

What checks run files imports torch: call ``prepare`` and ``plan_trial`` in a child (launcher.child).
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.errors import SweepError
from launcher.facts.sweep_folder import ELSEWHERE, Sweep, SweepFolder, SweepRun, is_sweep
from launcher.sweep.grid import Axis, by_depth, points, seeds_of
from launcher.sweep.space import corners, parse
from p2pfl.errors import Problem, RunFileError, RunFolderError
from p2pfl.file_locks import require_locks
from p2pfl.run_folder.files import write_errors
from p2pfl.run_folder.folder import RunFolder

if TYPE_CHECKING:
    from p2pfl.run_file.run import Run

SPACE = "search space"
"""Where the values of a search come from, for errors."""


@dataclass(frozen=True)
class SweepRequest:
    """What the user asks for.

    Attributes:
        axes: the keys that are varied, as given.
        seeds: number of seeds, from the run file's seed on; None: one, or the values of an axis ``seed``.
        out: the sweep's folder; by default one that is named after the run file and what is asked.
        search: in place of axes: the content of a search space.
        backend: ``--backend`` of `p2pfl launch`.
        clock: simulate on a simulated clock; then ``simulate`` is true.
    """

    file: Path
    axes: Sequence[Axis] = ()
    seeds: int | None = None
    sets: Sequence[str] = ()
    rounds: int | None = None
    simulate: bool = False
    out: Path | None = None
    search: Mapping[str, Any] | None = None
    backend: str = "local"
    clock: bool = False

    @property
    def all_sets(self) -> tuple[str, ...]:
        return (*self.sets, *([f"rounds={self.rounds}"] if self.rounds is not None else []))


def prepare(request: SweepRequest) -> SweepFolder:
    """Check every run and create the sweep's folder, or find it if this was asked before.

    Raises:
        RunFileError: with the problems of all runs.
        SweepError: the folder holds another sweep.
    """
    options = {axis.key: axis.option for axis in request.axes}
    first = _load(request, {axis.key: axis.values[0].value for axis in by_depth(request.axes)}, options)
    from p2pfl.session.build import check_models, load_data

    # A seed of the grid is not among the values of a point: it has a separate place.
    axes, seeds = seeds_of(list(request.axes), first.seed, request.seeds)
    planned = [] if request.search is not None else points(axes, seeds)
    search = None if request.search is None else {**request.search, "seed": first.seed}
    if search is None:
        runs = _load_all(request, axes, planned)
    else:
        runs = []
        ends = [SweepRun("", {}, first.seed, values) for values in corners(parse(search))]
        first, *_ = _load_all(request, [Axis(SPACE, key, ()) for key in search["space"]], ends)
    check_models((runs or [first])[0], *load_data((runs or [first])[0]))
    sweep = Sweep(
        digest=_digest([run.resolved() for run in runs or [first]], request, search),
        file=str(request.file.resolve()),
        simulate=request.simulate,
        sets=request.all_sets,
        grid={axis.key: [value.label for value in axis.values] for axis in axes},
        points=tuple(planned),
        search=search,
        sha256=_sha256(request.file),
        backend=request.backend,
        clock=request.clock,
    )
    root = request.out or Path("sweeps") / f"{first.name}-{sweep.digest[:8]}"
    if is_sweep(root):
        return _same(SweepFolder.open(root), sweep)
    folder = _create(root)
    for point, run in zip(planned, runs, strict=True):
        _write_plan(folder, point.name, run)
    folder.write(sweep)  # last: a folder that has it is complete
    return folder


def plan_trial(folder: SweepFolder, point: SweepRun) -> None:
    """Write the run file of one run of a search. Raises RunFileError if the run file has changed, or values of it."""
    sweep = folder.sweep
    file = Path(sweep.file)
    if file.is_file() and _sha256(file) != sweep.sha256:
        raise SweepError(
            f"{file} has changed since the sweep {folder.root} began; restore it, or choose another --out"
        )
    request = SweepRequest(file, sets=sweep.sets, simulate=sweep.simulate, clock=sweep.clock)
    run = _load(request, {**point.values, "seed": point.seed}, dict.fromkeys(point.values, SPACE))
    _write_plan(folder, point.name, run)


def _write_plan(folder: SweepFolder, name: str, run: Run) -> None:
    from p2pfl.run_folder.new_run import write_run

    plan = folder.plan(name).parent
    with write_errors(plan):
        plan.mkdir(parents=True, exist_ok=True)
    write_run(RunFolder(plan), run)


def _load_all(request: SweepRequest, axes: Sequence[Axis], planned: Sequence[SweepRun]) -> list[Run]:
    """Load the run of every point. Raises RunFileError with all problems, each once."""
    options = {axis.key: axis.option for axis in axes}
    runs, problems = [], dict[Problem, None]()
    for point in planned:
        try:
            runs.append(_load(request, {**point.values, "seed": point.seed}, options))
        except RunFileError as error:
            problems.update(dict.fromkeys(error.problems))
    if problems:
        raise RunFileError(problems)
    return runs


def _load(request: SweepRequest, values: Mapping[str, Any], options: Mapping[str, str]) -> Run:
    """Load the run file with other values. Problems with them name the option that they come from."""
    from p2pfl.run_file import load as run_files
    from p2pfl.simulation.simulate import check_order

    try:
        # Copied: a longer key is written into the value of a shorter one.
        run = run_files.load(request.file, request.all_sets, os.environ, copy.deepcopy(dict(values)))
        if not request.clock:
            run.check_real_time()
            if request.simulate:
                check_order(run, None)
        return run
    except RunFileError as error:
        # The loader places them at "key=value", with the value of one run.
        places = {f"{key}={value!r}": options.get(key, f"{key}={value}") for key, value in values.items()}
        raise RunFileError(
            replace(problem, where=places.get(problem.where, problem.where)) for problem in error.problems
        ) from None


def _digest(runs: Sequence[Mapping[str, Any]], request: SweepRequest, search: Mapping[str, Any] | None) -> str:
    asked: dict[str, Any] = {"runs": runs, "simulate": request.simulate}
    if request.clock:
        asked["clock"] = True
    if search is not None:  # more trials of the same search are the same sweep
        asked["search"] = {key: value for key, value in search.items() if key != "trials"}
    return hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _same(folder: SweepFolder, asked: Sweep) -> SweepFolder:
    """Return the folder if it is of the sweep that is asked for now. Raises SweepError."""
    found = folder.sweep
    if found.digest == asked.digest:
        if (found.search, found.backend) != (asked.search, asked.backend):  # in the trials or where they run only
            with folder.locked():  # a search that is at work adds its trials to the same file
                folder.write(replace(folder.sweep, search=asked.search, backend=asked.backend))
        return folder
    parts: dict[str, Callable[[Sweep], Any]] = {
        "the run file": lambda sweep: sweep.file,
        "--simulate": lambda sweep: sweep.simulate,
        "--clock": lambda sweep: sweep.clock,
        "--set": lambda sweep: list(sweep.sets),
        "--grid": lambda sweep: dict(sweep.grid),
        "the seeds": lambda sweep: sorted({point.seed for point in sweep.points}),
        "--optuna": lambda sweep: sweep.search,
    }
    differ = [f"{name} ({get(found)} there)" for name, get in parts.items() if get(found) != get(asked)]
    reason = f"which differs in {', '.join(differ)}" if differ else "made from another version of the run file"
    raise SweepError(
        f"{folder.root}: holds another sweep, {reason}; choose another --out, or continue that one with "
        f"`p2pfl sweep {folder.root}`"
    )


def _create(root: Path) -> SweepFolder:
    """Create the folder. One whose creation was interrupted has only plans."""
    require_locks(root, ELSEWHERE)
    try:
        root.mkdir(parents=True, exist_ok=True)
        other = sorted(entry.name for entry in root.iterdir() if entry.name != "plans")
    except OSError as error:
        raise RunFolderError(f"{root}: cannot be created: {error.strerror}") from None
    if other:
        raise RunFolderError(f"{root}: not empty (it has {other[0]}); choose a new or empty folder")
    return SweepFolder(root.resolve())
