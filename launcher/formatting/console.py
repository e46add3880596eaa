"""Print to the terminal: control characters escaped, and tables not cut off."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import click

from p2pfl.terminal import legible, printable, wants_color

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

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
    """Print a text that other programs read: in UTF-8 in every locale, unless a terminal shows it."""
    if sys.stdout.isatty():
        echo(text, nl=False)
    else:
        click.echo(printable(text).encode(), nl=False)


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


def make_table(
    head: Iterable[str], rows: Iterable[Sequence[str]], *, left: Collection[str] = (), gap: int = 2
) -> Table:
    """Return a table whose columns are numbers, except those ``left``, which are texts."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    for column in head:
        text = column in left
        table.add_column(column, justify="left" if text else "right", no_wrap=not text, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table of texts."""
    make_console().print(make_table(head, rows, left=head))
