"""The ``p2pfl`` command group, options that several commands share."""

from __future__ import annotations

import errno
import math
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from launcher.formatting.console import echo
from p2pfl.errors import P2pflError, RunFileError
from p2pfl.terminal import legible, printable, wants_color

if TYPE_CHECKING:
    from launcher.facts.sweep_folder import SweepRun
    from p2pfl.run_folder.folder import RunFolder


def open_run(run: Path) -> RunFolder:
    """Open a run. If its peers are on other hosts and its launcher has ended, fetch their files first."""
    from p2pfl.run_folder.folder import RunFolder

    folder = RunFolder.open(run)
    _refresh(folder)
    return folder


def open_all(runs: Iterable[Path]) -> list[tuple[RunFolder, SweepRun | None]]:
    """Open runs as ``open_run`` does; a sweep stands for its runs that have begun. Raises RunFolderError."""
    from launcher.facts.sweep_folder import expand

    found = expand(runs)
    for folder, _ in found:
        _refresh(folder)
    return found


def _refresh(folder: RunFolder) -> None:
    from launcher.facts.host_state import NAME

    if (folder.root / NAME).exists():
        from launcher.backends.refresh import refresh
        from launcher.errors import LaunchError
        from p2pfl.errors import RunFolderError, WriteError

        try:
            refresh(folder)
        except (LaunchError, RunFolderError, WriteError) as error:
            echo(f"{folder.root}: not up to date, because not all hosts answer: {error}", err=True)


@contextmanager
def _escaping() -> Iterator[None]:
    """Escape control characters in messages of click, which quote arguments, perhaps taken from files by a script."""
    try:
        yield
    except click.ClickException as error:
        message = error.format_message()
        shown = legible(printable(message), sys.stderr)
        if shown == message:
            raise
        if isinstance(error, click.UsageError):
            raise click.UsageError(shown, error.ctx) from None
        raise click.ClickException(shown) from None


class HelpFormatter(click.HelpFormatter):
    """Writes help in the encoding of the terminal."""

    def getvalue(self) -> str:
        return legible(super().getvalue(), sys.stdout)


click.Context.formatter_class = HelpFormatter


class CommandGroup(click.Group):
    """A group that prints errors of this project without a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        if not wants_color():
            ctx.color = False
        try:
            with _escaping():
                return super().invoke(ctx)
        except P2pflError as error:
            echo(f" {error}", prefix=click.style("error:", fg="red", bold=True), err=True)
            ctx.exit(2 if isinstance(error, RunFileError) else 1)


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="p2pfl-mesh", prog_name="p2pfl-mesh")
def commands() -> None:
    """Peer-to-peer personalized learning: every client is a process; there is no server."""


RUN = click.argument("run", type=click.Path(path_type=Path))


class FiniteNumber(click.FloatRange):
    """A number in a range; neither NaN nor infinite, which have no JSON."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = float(super().convert(value, param, ctx))
        if not math.isfinite(found):
            self.fail(f"{value} is not a finite number", param, ctx)
        return found


class Fraction(click.ParamType[float]):
    """A fraction: ``0.8`` or ``80%``."""

    name = "fraction"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value).strip()
        try:
            found = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            found = -1.0
        if not 0 < found <= 1:
            self.fail(f"{text!r} is not an accuracy; expected a fraction above 0 such as 0.8, or 80%", param, ctx)
        return found


def require_file(context: click.Context, argument: click.Parameter, file: Path | None) -> Path | None:
    """Reject a run file that does not exist before torch is imported, which takes seconds."""
    from p2pfl.errors import Problem

    try:
        if file is None or file.exists():
            return file
    except OSError as error:
        raise RunFileError([Problem(str(file), "", f"cannot be read: {error.strerror}")]) from None
    from p2pfl.options import closest

    siblings = [path.name for path in file.parent.glob("*.y*ml")] if file.parent.is_dir() else []
    near = closest(file.name, siblings)
    hint = "" if near is None else f"; did you mean {str(file.with_name(near))!r}?"
    raise RunFileError([Problem(str(file), "", f"cannot be read: {os.strerror(errno.ENOENT)}{hint}")])


FILE = click.argument("file", type=click.Path(path_type=Path), callback=require_file)
SETS = click.option(
    "--set", "sets", multiple=True, metavar="KEY=VALUE", help="Change a key of the run file, e.g. algorithm.lr=0.01."
)
PLUGINS = click.option(
    "--plugin",
    "plugins",
    multiple=True,
    metavar="FILE",
    help="Also load this plug-in: a file or a module; repeatable.",
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
MASKED = click.option(
    "--masked/--unmasked",
    "masked",
    default=None,
    help="Count only the scores of local classes, or of all classes; default: masked_test of the run file.",
)


SECONDS_TO = click.option(
    "--seconds-to", type=Fraction(), metavar="ACCURACY", help="Count the seconds to this accuracy, e.g. 0.8."
)


def _check_picture(context: click.Context, option: click.Parameter, file: Path | None) -> Path | None:
    """Reject a picture that cannot be written before anything is computed."""
    if file is not None:
        from launcher.formatting.pictures import format_of

        try:
            format_of(file)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None
        folder = file.absolute().parent
        if not folder.is_dir():
            raise click.BadParameter(f"there is no folder {str(folder)!r}; create it first, or choose another one")
        if not os.access(file if file.exists() else folder, os.W_OK):
            raise click.BadParameter(f"{str(file)!r} is not writable; choose another file or folder")
    return file


PNG = click.option(
    "--png",
    type=click.Path(path_type=Path, dir_okay=False),
    callback=_check_picture,
    help="Also draw it to this file: .png, .svg or .pdf.",
)
