"""Every code block of docs/guide/ works, in the order of its page, in a folder that holds nothing else.

A Python or YAML block after a line that ends in "`name`:" or names one file in backquotes is that file; other Python
blocks run one after the other in one interpreter, and console blocks are commands.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
PAGES = sorted((PROJECT / "docs" / "guide").glob("*.md"))
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_of_the_page_work(page: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for program, options in (("p2pfl", "-P -m launcher.cli"), ("python", "")):
        script = tmp_path / "bin" / program
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {options} "$@"\n')
        script.chmod(0o755)
    path = os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]])
    sources = os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PATH": path, "PYTHONPATH": sources}
    folder = tmp_path / "work"
    folder.mkdir()
    scripts: list[str] = []
    commands = 0
    for language, text, name in blocks(page):
        if name is not None:
            (folder / name).write_text(text)
        elif language == "python":
            scripts.append(text)
        elif language == "console":
            done = subprocess.run(
                ["bash", "-e"], input=text, cwd=folder, env=environment, capture_output=True, text=True
            )
            assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
            commands += 1
    if scripts:
        command = [sys.executable, "-c", "\n".join(scripts)]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
    assert commands or scripts
    assert list(folder.iterdir())


def test_readme_of_the_documentation_lists_every_page() -> None:
    text = (PROJECT / "docs" / "README.md").read_text(encoding="utf-8")
    assert all(f"(guide/{page.name})" in text for page in PAGES)
