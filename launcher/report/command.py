"""What `p2pfl report`, and a run file with ``report: true``, do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from launcher.facts.sweep_folder import Point
from launcher.report import comparison, figures, page, papers, sections, several
from launcher.report.collect import Collected, collect
from launcher.report.several import Member
from p2pfl.errors import RunFolderError
from p2pfl.run_folder.files import write_atomically, write_errors
from p2pfl.run_folder.folder import RunFolder

NAME = "report.html"


def write_run(run: Collected, file: Path) -> None:
    """Write the page of one run. Raises MissingExtra, WriteError."""
    shown = figures.of_run(run)
    text = page.assemble(sections.title(run.folder), sections.body(run, shown), shown.to_dict())
    _write(file, text)


def write_several(members: Sequence[Member], file: Path) -> None:
    """Write the page that compares several runs. Raises MissingExtra, WriteError."""
    groups = several.group(members)
    shown = figures.of_several(groups)
    body = comparison.body(groups, several.tests(groups), shown)
    _write(file, page.assemble(f"{len(members)} runs · p2pfl report", body, shown.to_dict()))


def write(
    runs: Sequence[tuple[RunFolder, Point | None]],
    file: Path,
    *,
    models: bool = True,
    png: Path | None = None,
    pdf: Path | None = None,
) -> list[Path]:
    """Write the page of one run or of several, and figures if asked for.

    Args:
        runs: each with its point if it is part of a sweep.
        models: load the data and evaluate the checkpoints of a single run.
        png: folder for the figures as PNG.
        pdf: file for all of them.

    Returns:
        The files, the page first.

    Raises:
        MissingExtra: vl-convert or matplotlib is not installed.
        RunFolderError: a run is damaged, or given twice.
        WriteError: a file cannot be written.
    """
    roots = [folder.root for folder, _ in runs]
    if repeated := sorted({root for root in roots if roots.count(root) > 1}):
        raise RunFolderError(f"{repeated[0]}: given more than once; name each run once")
    page.library()  # before minutes of work, if it is missing
    if png is not None or pdf is not None:
        papers.require()
    if len(runs) == 1:
        run = collect(runs[0][0], models=models)
        write_run(run, file)
        return [file, *papers.write(papers.of_run(run), png, pdf)]
    members = several.read(runs)
    write_several(members, file)
    return [file, *papers.write(papers.of_several(several.group(members)), png, pdf)]


def _write(file: Path, text: str) -> None:
    with write_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, text.encode("utf-8", errors="replace"))
