"""Sizes of source files and classes, and levels of inheritance, as CONTRIBUTING.md limits them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from p2pfl.algorithms import ALGORITHMS
from p2pfl.algorithms.base import Algorithm

REPOSITORY = Path(__file__).resolve().parents[3]
FOLDERS = ("p2pfl", "peers", "launcher", "tests", "benchmarks")
FILE, ALGORITHM, CLASS, LEVELS = 450, 250, 350, 2


def longest(folder: Path, limit: int) -> dict[str, int]:
    """Return the source files of more lines than ``limit``, with their numbers of lines."""
    lines = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in folder.rglob("*.py")}
    return {str(file.relative_to(REPOSITORY)): count for file, count in lines.items() if count > limit}


@pytest.mark.parametrize("folder", FOLDERS)
def test_source_files_are_short(folder: str) -> None:
    assert any((REPOSITORY / folder).rglob("*.py"))
    assert longest(REPOSITORY / folder, FILE) == {}


def test_algorithm_files_are_shorter() -> None:
    assert longest(REPOSITORY / "p2pfl" / "algorithms", ALGORITHM) == {}


@pytest.mark.exhaustive
def test_classes_are_short() -> None:
    long = {
        f"{file}: {node.name}": node.end_lineno - node.lineno + 1
        for folder in FOLDERS
        for file in longest(REPOSITORY / folder, CLASS - 1)  # only these have room for such a class
        for node in ast.walk(ast.parse((REPOSITORY / file).read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and node.end_lineno and node.end_lineno - node.lineno >= CLASS
    }
    assert long == {}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithms_have_few_levels_of_inheritance(name: str) -> None:
    levels = [ancestor for ancestor in ALGORITHMS[name].__mro__ if issubclass(ancestor, Algorithm)]
    assert len(levels) <= 1 + LEVELS, levels
