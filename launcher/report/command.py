"""What `p2pfl report`, and a run file with ``report: true``, do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from launcher.comparison.groups import RunGroup
from launcher.facts.sweep_folder import SweepRun
from launcher.report import comparison, figures, page, papers, sections, several
from launcher.report.charts import Figures
from launcher.report.collect import ReportedRun, collect
from p2pfl.errors import RunFolderError
from p2pfl.run_folder.files import write_atomically, write_errors
from p2pfl.run_folder.folder import RunFolder

NAME = "report.html"


def write_run(run: ReportedRun, file: Path) -> Figures:
    """Write the page of one run; return its figures. Raises MissingExtra, WriteError."""
    shown = figures.of_run(run)
    text = page.assemble(sections.title(run.folder), sections.body(run, shown), shown.to_dict())
    _write(file, text)
    return shown


def write_several(groups: Sequence[RunGroup], file: Path, seconds_to: float | None = None) -> Figures:
    """Write the page that compares several runs; return its figures. Raises MissingExtra, WriteError."""
    shown = figures.of_several(groups)
    body = comparison.body(groups, several.tests(groups), shown, seconds_to)
    runs = sum(len(group.members) for group in groups)
    _write(file, page.assemble(f"{runs} runs · p2pfl report", body, shown.to_dict()))
    return shown


def write(
    runs: Sequence[tuple[RunFolder, SweepRun | None]],
    file: Path,
    *,
    models: bool = True,
    png: Path | None = None,
    pdf: Path | None = None,
    seconds_to: float | None = None,
) -> list[Path]:
    """Write the page of one run or of several, and figures if asked for.

    Args:
        runs: each with its point if it is part of a sweep.
        models: load the data and evaluate the checkpoints of a single run.
        png, pdf: folders for the figures as PNG and as PDF.
        seconds_to: accuracy; of several runs, also show the seconds until each reaches it.

    Returns:
        The files, the page first.

    Raises:
        MissingExtra: vl-convert is not installed.
        RunFolderError: a run is damaged, or given twice.
        WriteError: a file cannot be written.
    """
    roots = [folder.root for folder, _ in runs]
    if repeated := sorted({root for root in roots if roots.count(root) > 1}):
        raise RunFolderError(f"{repeated[0]}: given more than once; name each run once")
    page.library()  # before minutes of work, if it is missing
    if len(runs) == 1:
        shown = write_run(collect(runs[0][0], models=models), file)
    else:
        shown = write_several(several.read(runs), file, seconds_to)
    return [file, *papers.write(shown, png, pdf)]


def _write(file: Path, text: str) -> None:
    with write_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, text.encode("utf-8", errors="replace"))
