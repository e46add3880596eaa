"""`p2pfl new`: the project works as its README says, and nothing is overwritten."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from launcher.commands.new import FILES
from p2pfl.run_file.yaml_source import Source
from tests.fast_python.fixture import FastPython
from tests.launcher_fixtures import Invoke

PROJECT = Path(__file__).parents[2]


@pytest.mark.slow
def test_commands_and_test_of_the_readme_work(tmp_path: Path, invoke: Invoke, fast_python: FastPython) -> None:
    folder = tmp_path / "my-study"
    outcome = invoke("new", folder)
    assert outcome.stdout.splitlines()[1] == f"next: cd {folder} && p2pfl simulate study.yaml"
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    (commands,) = re.findall(r"```console\n(.*?)```", (folder / "README.md").read_text(), flags=re.DOTALL)
    python = fast_python.executable
    text = "set -e\np2pfl() { " + python + ' -P -m launcher.cli "$@"; }\n'
    text += commands.replace("python -m pytest", f"{python} -m pytest -p no:cacheprovider --rootdir .")
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    done = subprocess.run(["bash", "-c", text], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "worst-class" in done.stdout
    assert "1 passed" in done.stdout
    assert "my-study-method" in done.stdout  # in the comparison


def test_refuses_to_overwrite(tmp_path: Path, invoke: Invoke) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "method.py").write_text("precious")
    outcome = invoke("new", folder)
    assert outcome.exit_code == 1
    assert outcome.stderr == f"error: {folder}: not empty; choose a new or empty folder\n"
    assert [path.read_text() for path in folder.iterdir()] == ["precious"]


@pytest.mark.parametrize("name", ["my study", "-x.y", "über"])
def test_the_name_must_fit_a_run_file(tmp_path: Path, invoke: Invoke, name: str) -> None:
    outcome = invoke("new", tmp_path / name)
    assert outcome.exit_code == 1
    assert "names the study: use letters, digits, '-' and '_' only" in outcome.stderr
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("name", ["2026", "null", "true", "1e5"])
def test_a_name_that_is_another_value_in_yaml_stays_a_name(tmp_path: Path, invoke: Invoke, name: str) -> None:
    outcome = invoke("new", tmp_path / "a b" / name)
    tree = Source("study.yaml").read((tmp_path / "a b" / name / "study.yaml").read_text())
    assert (tree["name"], tree["algorithm"]["name"]) == (name, f"{name}-method")
    assert f"next: cd '{tmp_path}/a b/{name}' && p2pfl simulate study.yaml" in outcome.stdout


def test_installed_packages_contain_the_files() -> None:
    data = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    present = {path.name for pattern in data["launcher"] for path in (PROJECT / "launcher").glob(pattern)}
    assert present == {f"{name}.in" for name in FILES} | {"page.html", "page.css", "page.js"}
