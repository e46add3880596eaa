"""Every code block of docs/guide/ works, in the order of its page, in a folder that holds nothing else.

A Python or YAML block after a line that ends in "`name`:" or names one file in backquotes is that file; other Python
blocks run one after the other in one interpreter, and console blocks are commands. A TOML block is the package of the
files so far, which is installed then. Notebooks run from top to bottom.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import p2pfl
from tests.fast_python.fixture import FastPython
from tests.guide_pages import GUIDE, blocks, files

PROJECT = Path(__file__).parents[2]
PAGES = sorted(GUIDE.glob("*.md"))
NOTEBOOKS = sorted(GUIDE.glob("*.ipynb"))


def install(folder: Path, package: dict[str, Any], site: Path) -> None:
    """Move the modules of a package to ``site``, with the metadata that pip would write."""
    project = package["project"]
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
    points = [
        f"[{group}]\n{name} = {value}\n"
        for group, found in project["entry-points"].items()
        for name, value in found.items()
    ]
    (info / "entry_points.txt").write_text("".join(points))
    for module in package["tool"]["setuptools"]["py-modules"]:
        (folder / f"{module}.py").rename(site / f"{module}.py")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_of_the_page_work(page: Path, tmp_path: Path, fast_python: FastPython) -> None:
    (tmp_path / "bin").mkdir()
    for program, options in (("p2pfl", "-P -m launcher.cli"), ("python", ""), ("pip", "-m pip")):
        script = tmp_path / "bin" / program
        script.write_text(f'#!/bin/sh\nexec {fast_python.executable} {options} "$@"\n')
        script.chmod(0o755)
    path = os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]])
    site = tmp_path / "site"
    sources = os.pathsep.join(filter(None, [str(PROJECT), str(site), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PATH": path, "PYTHONPATH": sources}
    folder = tmp_path / "work"
    folder.mkdir()
    scripts: list[str] = []
    commands = 0
    for language, text, name in blocks(page):
        if language == "toml":
            install(folder, tomllib.loads(text), site)
        elif name is not None:
            # Two rounds show that a run works; what the guide's method learns is another test.
            (folder / name).write_text(re.sub(r"(?m)^rounds: \d+$", "rounds: 2", text))
        elif language == "python":
            scripts.append(text)
        elif language == "console":
            done = subprocess.run(
                ["bash", "-e"], input=text, cwd=folder, env=environment, capture_output=True, text=True
            )
            assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
            commands += 1
    if scripts:
        command = [fast_python.executable, "-c", "\n".join(scripts)]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
    assert commands or scripts
    assert list(folder.iterdir())


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.slow] if path.stem == "comparing" else []) for path in NOTEBOOKS],
    ids=lambda path: path.stem,
)
def test_notebook_works_and_is_stored_with_its_outputs(path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    command = [sys.executable, "-m", "tests.notebooks", str(path)]
    done = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert {output["output_type"] for output in outputs} <= {"stream", "execute_result", "display_data"}
    assert not [output for output in outputs if output.get("name") == "stderr"]  # no warnings
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert path.stat().st_size < 100_000


def test_readme_of_the_documentation_lists_every_page() -> None:
    text = (PROJECT / "docs" / "README.md").read_text(encoding="utf-8")
    assert NOTEBOOKS
    assert all(f"(guide/{page.name})" in text for page in (*PAGES, *NOTEBOOKS))


def test_method_of_the_guide_learns_and_finds_the_peers_of_its_group(tmp_path: Path) -> None:
    for name, text in files("own-method.md").items():
        (tmp_path / name).write_text(text)
    run = p2pfl.load(tmp_path / "mine.yaml", rounds=16, algorithm__best=1).simulate(tmp_path / "run")
    accuracy = run.metrics().groupby("t")["accuracy"].mean()
    assert accuracy.iloc[-1] > accuracy.iloc[0] + 0.25
    groups = np.array([subset.group for subset in run.partition()])
    weights, same = run.graph(), groups[:, None] == groups[None, :]
    np.fill_diagonal(same, False)
    assert weights[same].mean() > 2 * weights[groups[:, None] != groups[None, :]].mean()
