"""The ``p2pfl`` command group, options that several commands share, and their console output."""

from __future__ import annotations

import errno
import math
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from p2pfl.errors import P2pflError, RunFileError
from p2pfl.terminal import legible, printable, wants_color

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from launcher.sweep.grid import Point
    from p2pfl.run_folder.folder import RunFolder


BROKEN = 20
"""Least width of a column whose texts a narrow terminal breaks into lines."""
MOST_COLUMNS = 10_000
"""Wider than any table."""


def echo(text: str = "", *, prefix: str = "", err: bool = False, nl: bool = True) -> None:
    """Print ``text``, its control characters escaped, after ``prefix``, which may be styled.

    Commands print everything with this function or ``make_console``: text from files may come from other hosts.
    """
    click.echo(legible(prefix + printable(text), sys.stderr if err else sys.stdout), err=err, nl=nl)


def echo_file(text: str) -> None:
    """Print a text that other programs read: in UTF-8 whatever the locale, unless a terminal shows it."""
    if sys.stdout.isatty():
        echo(text, nl=False)
    else:
        click.echo(printable(text).encode(), nl=False)


def open_run(run: Path) -> RunFolder:
    """Open a run. If its peers are on other hosts and its launcher has ended, fetch their files first."""
    from p2pfl.run_folder.folder import RunFolder

    folder = RunFolder.open(run)
    _refresh(folder)
    return folder


def open_all(runs: Iterable[Path]) -> list[tuple[RunFolder, Point | None]]:
    """Open runs as ``open_run`` does; a sweep stands for its runs that have begun. Raises RunFolderError."""
    from launcher.sweep.folder import expand

    found = expand(runs)
    for folder, _ in found:
        _refresh(folder)
    return found


def _refresh(folder: RunFolder) -> None:
    from launcher.backends.host_state import NAME

    if (folder.root / NAME).exists():
        from launcher.backends.multi_host import refresh
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


class Group(click.Group):
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


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
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
    help="Count only the scores of local classes, or those of all classes; default: masked_test of the run file.",
)


def _check_picture(context: click.Context, option: click.Parameter, file: Path | None) -> Path | None:
    """Reject a picture that cannot be written before anything is computed."""
    if file is not None:
        from launcher.views.pictures import format_of

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


def make_console(*, err: bool = False) -> Console:
    """Return a console for stdout, or for stderr, that escapes control characters in the strings it prints."""
    from rich.console import Console as RichConsole
    from rich.console import Group
    from rich.segment import Segment, Segments
    from rich.table import Table

    class Console(RichConsole):
        def print(self, *objects: Any, **options: Any) -> None:
            """Print; a table that the terminal is too narrow for as wide as it is.

            A terminal breaks long lines; of narrower columns, digits would be missing.
            """
            if not any(isinstance(each, Group | Table) for each in objects):
                super().print(*objects, **options)
                return
            for part in chain.from_iterable(
                each.renderables if isinstance(each, Group) else [each] for each in objects
            ):
                if isinstance(part, Table) and least_width(part) > self.width:
                    whole = self.render(part, self.options.update(max_width=MOST_COLUMNS))
                    super().print(Segments(list(whole)), crop=False, end="", soft_wrap=True)
                else:
                    super().print(part, **options)

        def on_broken_pipe(self) -> None:
            # The reader has exited (`| head`, or `| tee` after Ctrl-C). Do not abandon running peers for that.
            self.quiet = True
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.file.fileno())  # also discards what is buffered
            os.close(null)

        def render_str(self, text: str, **options: Any) -> Text:
            # Every string passes here, those in tables and panels too, before its width is measured.
            return super().render_str(legible(printable(text), self.file), **options)

        def render(self, renderable: Any, options: Any = None) -> Iterator[Segment]:
            for segment in super().render(renderable, options):
                shown = segment.text if segment.control else legible(segment.text, self.file, one_column=True)
                yield segment if shown == segment.text else segment._replace(text=shown)

    colors: Literal["auto"] | None = "auto" if wants_color() else None
    console = Console(stderr=err, markup=False, highlight=False, color_system=colors)
    if not console.is_terminal:
        console.width = 160  # instead of 80, which would truncate tables
    return console


def least_width(table: Table) -> int:
    """Return the columns that a terminal needs to show a table; decide how its columns are broken if it has as many.

    Single words are not broken, unless the column folds them as names; longer texts are, and nothing is cut off.
    """
    from rich.cells import cell_len

    least = 0
    for column in table.columns:
        cells = [printable(str(cell)) for cell in (column.header, *column.cells)]
        breaks = not column.no_wrap and (column.overflow == "fold" or any(" " in cell for cell in cells))
        column.no_wrap, column.overflow = not breaks, "fold"
        longest = max(map(cell_len, cells))
        least += (min(longest, BROKEN) if breaks else longest) + table.padding[1] + table.padding[3]
    return least


def print_table(head: list[str], rows: list[list[str]]) -> None:
    from rich.table import Table

    table = Table(*head, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*row)
    make_console().print(table)
