"""The code blocks of the pages in docs/guide/."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

GUIDE = Path(__file__).parents[1] / "docs" / "guide"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> Iterator[tuple[str, str, str | None]]:
    """Language, text and file name of each block."""
    text = page.read_text(encoding="utf-8")
    end = 0
    for found in BLOCK.finditer(text):
        before = text[end : found.start()].strip().rpartition("\n\n")[2]
        names = re.findall(r"`([\w.]+\.(?:py|yaml))`", before)
        yield found[1], found[2], names[-1] if names else None
        end = found.end()


def files(page: str) -> dict[str, str]:
    """The files of a page, by name."""
    return {name: text for _, text, name in blocks(GUIDE / page) if name is not None}
