"""Tables in terminals of any width: nothing is cut off."""

from __future__ import annotations

import io

import pytest
from rich.console import Group
from rich.table import Table

from launcher.formatting.console import least_width, make_console

RUN = "my-study-20261126-063811"
FIGURES = ("20", "91.5 ± 4.1", "92.3 ± 4.4", "0:49")
TEXT = "what stands here is long enough to be broken into lines"


def runs(name: str = RUN) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("run", overflow="fold")
    for heading in ("peers", "acc %", "best %", "time"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_row(name, *FIGURES)
    return table


def texts() -> Table:
    table = Table("run", "what it is", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_row(RUN, TEXT)
    return table


def printed(width: int, *objects: object) -> list[str]:
    console = make_console()
    console.file = io.StringIO()
    console.width = width
    console.print(*objects)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [10, 40, 60, 80, 200])
def test_no_figure_is_cut_off(width: int) -> None:
    shown = "".join(line.replace(" ", "") for line in printed(width, runs()))
    assert all(cell.replace(" ", "") in shown for cell in FIGURES)


def test_names_are_folded_before_lines_get_too_long_for_the_terminal() -> None:
    least = least_width(runs())
    folded = printed(least, runs())
    assert max(map(len, folded)) <= least
    first, second = [line.split()[0] for line in folded[1:]]
    assert first + second == RUN
    assert len(first) >= 20
    whole = printed(least - 1, runs())
    assert whole[1].split() == [RUN, *" ".join(FIGURES).split()]


def test_texts_are_broken_and_single_words_are_not() -> None:
    broken = printed(50, texts())
    assert max(map(len, broken)) <= 50
    assert broken[1].startswith(RUN)
    assert " ".join(" ".join(line.replace(RUN, "").split()) for line in broken[1:]).strip() == TEXT
    assert printed(30, texts())[1].split("  ")[0] == RUN


def test_columns_of_texts_lose_nothing_at_any_width() -> None:
    table = Table("name", "one", "two", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    path = "/a/long/path/that/has/no/spaces/and/an/end.txt"
    table.add_row("\x1b[31m\x1b[0m", f"see {path}", " ".join(["word"] * 20))
    for width in (20, least_width(table), least_width(table) + 5, 150, 400):
        shown = "".join(printed(width, table)).replace(" ", "")
        assert shown.count("word") == 20
        assert "\\x1b[31m\\x1b[0m" in shown
        assert "…" not in shown
    assert path in "".join(printed(150, table))


def test_a_table_that_fits_is_not_widened_by_its_neighbor() -> None:
    both = printed(50, Group(texts(), runs()))
    assert both == [*printed(50, texts()), *printed(50, runs())]


def test_lines_around_a_wide_table_are_printed_as_always() -> None:
    assert printed(30, Group("before", runs(), "after")) == ["before", *printed(30, runs()), "after"]
    assert printed(30, "before", "after") == ["before after"]
