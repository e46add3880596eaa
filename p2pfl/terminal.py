"""Make text safe and legible for a terminal.

Safe: logs and results may come from other hosts, and error texts from other peers. Legible: the encoding of a
terminal or a file, by the locale or $PYTHONIOENCODING, may lack letters and symbols; similar ones replace them.
"""

from __future__ import annotations

import codecs
import os
import sys
import unicodedata
from collections.abc import Callable
from typing import IO

_SIMILAR = {
    "…": "...",
    "±": "+-",
    "·": ".",
    "×": "x",
    "→": "->",
    "←": "<-",
    "≤": "<=",
    "≥": ">=",
    "≠": "!=",
    "≈": "~",
    "∞": "inf",
    "Σ": "sum",
    "√": "sqrt",
    "∈": "in",
    "ß": "ss",
    **dict.fromkeys("–—−━─╸╺", "-"),
    **dict.fromkeys("│┃", "|"),
    **dict.fromkeys("‘’", "'"),
    **dict.fromkeys("“”„", '"'),
    **dict(zip("▼▲ ░▒▓", "v^ .:=", strict=True)),
    **dict(zip("▁▂▃▄▅▆▇█", "_.-=+*%#", strict=True)),
}
"""ASCII text that resembles symbols that this project or its users print."""


def wants_color() -> bool:
    """Return whether $NO_COLOR does not forbid colors (https://no-color.org)."""
    return not os.environ.get("NO_COLOR")


def make_legible(*, one_column: bool = False) -> None:
    """Let no standard stream raise UnicodeEncodeError: replace what its encoding lacks, as ``legible`` does."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        # In the locale C in UTF-8 mode, undecodable bytes of file names are printed as they are.
        if stream is not None and (stream.encoding, stream.errors) != ("utf-8", "surrogateescape"):
            _configure(name, stream.encoding, "p2pfl-columns" if one_column else "p2pfl")


def encode_as_utf8() -> None:
    """Write to standard streams, which are files of a run, in UTF-8 under any locale."""
    for name in ("stdout", "stderr"):
        _configure(name, "utf-8", "backslashreplace")


def _configure(name: str, encoding: str, errors: str) -> None:
    stream = getattr(sys, name)
    if not hasattr(stream, "reconfigure"):
        return
    try:
        stream.reconfigure(encoding=encoding, errors=errors)
    except OSError:  # the stream was opened on a file, and its descriptor has become a pipe since
        setattr(sys, name, os.fdopen(stream.fileno(), "w", 1, encoding=encoding, errors=errors, closefd=False))


def legible(text: str, stream: IO[str], *, one_column: bool = False) -> str:
    """Replace what the encoding of ``stream`` lacks by something similar, in ASCII.

    Args:
        one_column: by one character for each column, as is needed after a table is laid out.
    """
    encoding = getattr(stream, "encoding", None) or "utf-8"
    if text.isascii() or _has(encoding, text):
        return text
    return "".join(
        letter if _has(encoding, letter) else _columns(letter) if one_column else _similar(letter) for letter in text
    )


def _has(encoding: str, text: str) -> bool:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


def _similar(letter: str) -> str:
    if letter in _SIMILAR:
        return _SIMILAR[letter]
    if plain := unicodedata.normalize("NFKD", letter).encode("ascii", "ignore").decode():
        return plain
    name = unicodedata.name(letter, "")
    if name.startswith("GREEK") and "LETTER" in name:
        return name.split("LETTER ")[1].split()[0].lower().replace("lamda", "lambda")
    return _escaped(letter)


def _columns(letter: str) -> str:
    """Return one character for each column of the letter."""
    found, wide = _similar(letter), 2 if unicodedata.east_asian_width(letter) in "WF" else 1
    return found if len(found) == wide else (found[-1] if letter in _SIMILAR else "?") * wide


def _handler(similar: Callable[[str], str]) -> Callable[[UnicodeError], tuple[str, int]]:
    def replace(error: UnicodeError) -> tuple[str, int]:
        if not isinstance(error, UnicodeEncodeError):
            raise error
        return "".join(map(similar, error.object[error.start : error.end])), error.end

    return replace


codecs.register_error("p2pfl", _handler(_similar))
codecs.register_error("p2pfl-columns", _handler(_columns))


def printable(text: str) -> str:
    r"""Escape what a terminal obeys or cannot show, e.g. ESC as ``\x1b``; keep line feeds and tabs.

    That includes C1 controls, Unicode's marks of writing direction, which can hide text, and lone surrogates.
    """
    if text.replace("\n", "").replace("\t", "").isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter in "\n\t" else _escaped(letter) for letter in text)


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")
