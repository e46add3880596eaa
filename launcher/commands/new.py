"""``p2pfl new``: write a small project that works at once, to start a study from."""

from __future__ import annotations

import re
import shlex
from importlib import resources
from pathlib import Path

import click

from launcher.errors import NewProjectError
from launcher.formatting.console import echo

FILES = ("README.md", "method.py", "study.yaml", "test_method.py")
"""The files of a project; each is made from launcher/template/<name>.in."""


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
def new(folder: Path) -> None:
    """Write a small project that works at once.

    It has a plug-in, a run file, a test and a README. FOLDER must be new or empty; it names the study.
    """
    create(folder)
    echo(f"{folder}: {', '.join(FILES)}")
    echo(f"next: cd {shlex.quote(str(folder))} && p2pfl simulate study.yaml")


def create(folder: Path) -> None:
    """Write the project. Raises NewProjectError: the folder is not empty, not writable, or has no usable name."""
    name = folder.absolute().name
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
        raise NewProjectError(f"{name!r} names the study: use letters, digits, '-' and '_' only")
    texts = {
        file: resources.files("launcher").joinpath("template", f"{file}.in").read_text("utf-8") for file in FILES
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise NewProjectError(f"{folder}: not empty; choose a new or empty folder")
        for file, text in texts.items():
            (folder / file).write_text(text.replace("@NAME@", name), encoding="utf-8")
    except OSError as error:
        raise NewProjectError(f"{folder}: cannot be written: {error.strerror}") from error
