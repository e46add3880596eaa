"""What is printed where the encoding lacks letters, and where $NO_COLOR forbids colors."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from launcher.commands import commands
from launcher.formatting.console import echo_file, make_console
from p2pfl.terminal import encode_as_utf8, legible, make_legible, wants_color

Stream = Callable[[str], io.TextIOWrapper]


@pytest.fixture
def stdout(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """Replace stdout by a strict stream of an encoding."""

    def replace(encoding: str) -> io.TextIOWrapper:
        stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
        monkeypatch.setattr(sys, "stdout", stream)
        return stream

    return replace


def written(stream: io.TextIOWrapper) -> bytes:
    buffer = stream.buffer
    assert isinstance(buffer, io.BytesIO)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [
        ("utf-8", "1c0f… 60 ± 1 · é → 数 λ█ “a” \ud800"),
        ("iso-8859-1", r'1c0f... 60 ± 1 · é -> \u6570 lambda# "a" \ud800'),
        ("cp1252", r"1c0f… 60 ± 1 · é -> \u6570 lambda# “a” \ud800"),
        ("ascii", r'1c0f... 60 +- 1 . e -> \u6570 lambda# "a" \ud800'),
        ("euc-jp", r"1c0f… 60 ± 1 . é → 数 λ# “a” \ud800"),
    ],
)
def test_letters_that_an_encoding_lacks_become_similar_ones(encoding: str, shown: str, stdout: Stream) -> None:
    text = "1c0f… 60 ± 1 · é → 数 λ█ “a” \ud800"
    if encoding != "utf-8":
        assert legible(text, stdout(encoding)) == shown
    stream = stdout(encoding)
    make_legible()
    print(text, end="")
    assert written(stream) == shown.encode(encoding, "backslashreplace")


def test_the_error_handler_of_the_locale_c_is_replaced_but_in_utf_8(stdout: Stream) -> None:
    for encoding, shown in (("ascii", rb"o\udce9"), ("utf-8", b"\xc3\xb6\xe9")):
        stream = stdout(encoding)
        stream.reconfigure(errors="surrogateescape")
        make_legible()
        print("ö\udce9", end="")
        assert written(stream) == shown


def test_columns_keep_their_widths(stdout: Stream) -> None:
    stream = stdout("ascii")
    assert legible("a…b → 数é│█", stream, one_column=True) == "a.b > ??e|#"
    make_legible(one_column=True)
    print("a…b → 数é│█", end="")
    assert written(stream) == b"a.b > ??e|#"


def test_output_of_a_peer_is_utf_8(stdout: Stream) -> None:
    stream = stdout("ascii")
    encode_as_utf8()
    print("größe … \ud800", end="")
    assert written(stream) == "größe … ".encode() + rb"\ud800"


@pytest.mark.parametrize("configure", [make_legible, encode_as_utf8])
def test_a_stream_whose_file_has_become_a_pipe_is_replaced(
    configure: Callable[[], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    receives, sends = os.pipe()
    with (tmp_path / "out").open("w", encoding="iso-8859-1") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        print("before", flush=True)
        os.dup2(sends, stream.fileno())
        os.close(sends)
        configure()
        print("größe", flush=True)
    found = "größe\n".encode("utf-8" if configure is encode_as_utf8 else "iso-8859-1")
    assert os.read(receives, 100) == found
    os.close(receives)


def test_a_stream_without_an_encoding_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    make_legible()
    encode_as_utf8()
    assert legible("größe", sys.stderr) == "größe"


def test_tables_are_laid_out_with_what_is_shown(stdout: Stream) -> None:
    stream = stdout("ascii")
    table = Table("±", "b", box=None, pad_edge=False)
    table.add_row("60 ± 1 …", "x")
    table.add_row(Text("█ ×"), "y")
    console = make_console()
    console.print(table)
    console.print(ProgressBar(total=2.0, completed=1.0, width=8))
    *rows, bar = written(stream).decode("ascii").splitlines()
    assert [row.split() for row in rows] == [["+-", "b"], ["60", "+-", "1", "...", "x"], ["#", "x", "y"]]
    assert {row.rstrip().rindex(last) for row, last in zip(rows, "bxy", strict=True)} == {len("60 +- 1 ... ") + 1}
    assert bar.strip("- ") == ""


def test_files_for_other_programs_are_utf_8(stdout: Stream) -> None:
    stream = stdout("iso-8859-1")
    echo_file("path: größe\n")
    assert written(stream).decode() == "path: größe\n"


@pytest.mark.parametrize("value", ["1", "0", "anything"])
def test_no_color_leaves_out_all_styles(value: str, monkeypatch: pytest.MonkeyPatch, stdout: Stream) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")

    def print_styled() -> bytes:
        stream = stdout("utf-8")
        make_console().print(Text("styled", style="bold red"), Text("more", style="dim"))
        return written(stream)

    assert b"\x1b[" in print_styled()
    monkeypatch.setenv("NO_COLOR", "")
    assert wants_color()
    assert b"\x1b[" in print_styled()
    monkeypatch.setenv("NO_COLOR", value)
    assert not wants_color()
    assert print_styled() == b"styled more\n"


def test_errors_have_no_color_either(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = CliRunner()
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" in runner.invoke(commands, ["show", "nowhere"], color=True).stderr
    monkeypatch.setenv("NO_COLOR", "1")
    found = runner.invoke(commands, ["show", "nowhere"], color=True)
    assert found.exit_code == 1
    assert found.stderr.startswith("error: nowhere")
