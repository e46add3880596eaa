"""Make text safe for a terminal: logs and results may come from other hosts, and error texts from other peers."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""Escape what a terminal obeys or cannot show, e.g. ESC as ``\x1b``; keep line feeds and tabs.

    That includes C1 controls, Unicode's marks of writing direction, which can hide text, and lone surrogates.
    """
    if text.replace("\n", "").replace("\t", "").isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter in "\n\t" else _escaped(letter) for letter in text)


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")
