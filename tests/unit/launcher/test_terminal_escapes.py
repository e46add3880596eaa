"""No command prints control characters, whoever wrote the name, the note, the record or the path that holds them."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from launcher.commands import commands
from p2pfl.run_folder.folder import RunFolder
from tests.launcher_fixtures import RING, Invoke, MakeFolder

EVIL = "evil\x1b]0;pwned\x07\x1b[2J\x9b31m\u202egpj<script>alert(1)</script> größe 数据 …"
"""Sets a terminal's title, clears its screen, colors text, reverses it, is a script in a page, and has letters that
many encodings lack."""
NAME = EVIL.replace("/", "|")
"""The same as a part of a path."""
STAMP = "2026-11-21T02:41:01.000"
PLUGIN = f"""
from p2pfl import plugins
raise ValueError({EVIL!r})
"""


@dataclass
class Hostile:
    """Attributes:
    runs: a folder with an evil name that holds two runs.
    file, broken: a valid run file at an evil path, and one with a plug-in that raises.
    """

    runs: Path
    one: Path
    two: Path
    file: Path
    broken: Path
    out: Path


@pytest.fixture
def hostile(make_folder: MakeFolder, tmp_path: Path) -> Hostile:
    runs = tmp_path / NAME
    runs.mkdir()
    one, two = (_evil_run(make_folder(f"{NAME}/{name}{NAME}")) for name in ("one", "two"))
    file, broken = runs / f"{NAME}.yaml", runs / "broken.yaml"
    text = RING.replace("name: toy", f"name: {json.dumps(EVIL)}")
    file.write_text(text, encoding="utf-8")
    (runs / f"{NAME}.py").write_text(PLUGIN)
    plain = yaml.safe_load(RING)
    broken.write_text(json.dumps({**plain, "plugins": [f"{NAME}.py"]}))
    return Hostile(runs, one.root, two.root, file, broken, tmp_path / f"out{NAME}")


def _evil_run(folder: RunFolder) -> RunFolder:
    """Put EVIL wherever a run folder may hold text; everything stays of the type that it should be."""
    plain = yaml.safe_load(folder.run_file.read_text())
    plain |= {"name": EVIL, "data": {"dataset": {"name": EVIL}, "partition": {"name": EVIL}}}
    plain |= {"algorithm": {"name": EVIL, EVIL: EVIL}}
    folder.run_file.write_text(json.dumps(plain))
    folder.write_info({**folder.info, "command": EVIL, "host": EVIL, "versions": {EVIL: EVIL}, "python": EVIL})
    for files in folder.peers():
        _change(files.root / "result.json", phase="failed" if files.peer else "finished", error=EVIL, model=EVIL)
        extra: dict[str, Any] = {"metrics": {EVIL: 0.5}, "extra_metrics": {EVIL: 0.5}, "cost": {EVIL: 1.0}}
        _change(files.root / "result.json", digest=EVIL, sent={"1": {EVIL: [1, 2, 3]}}, weights={"0": 0.5}, **extra)
        _change(files.root / "status.json", phase="failed", error=EVIL)
        record = {
            "peer": files.peer,
            "t": 0,
            "loss": {EVIL: 1.0},
            "seconds": {"total": 1.0, "training": 0.5, EVIL: 0.1},
            "sent": {"1": {EVIL: [1, 2, 3]}},
            "missing": {EVIL: [1]},
            "weights": {"0": 0.5, "1": 0.5},
            "personal": {"accuracy": 0.5, EVIL: 0.5},
        }
        files.metrics.write_text(json.dumps(record) + "\n")
        files.log.write_text(f"{STAMP} WARNING round {EVIL} peer=1\n{EVIL}\n")
    return folder


def _change(path: Path, **keys: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


ARGUMENTS: dict[str, Callable[[Hostile], list[list[object]]]] = {
    "algorithms": lambda it: [["--plugin", it.runs / f"{NAME}.py"], [EVIL]],
    "collect": lambda it: [[it.out, it.one], [it.out, it.runs / "missing"], [it.out]],
    "compare": lambda it: [[it.one], [it.one, it.two], [it.runs], [it.one, "--format", "csv"], [it.one, "--json"]],
    "compose": lambda it: [[it.file], [it.broken], [it.runs / f"missing{NAME}"]],
    "data": lambda it: [["show", it.broken], ["show", it.runs / f"missing{NAME}"], ["show", it.file]],
    "digest": lambda it: [[it.one], [it.one, it.two], [it.one, "--json"]],
    "doctor": lambda it: [[it.file], [it.broken]],
    "evaluate": lambda it: [[it.one], [it.runs]],
    "export": lambda it: [["--format", "csv", it.one, "-o", it.out], ["--format", EVIL, it.one]],
    "graph": lambda it: [[it.file], [it.broken], [it.one], [it.runs / f"missing{NAME}"]],
    "join": lambda it: [[it.one, "--peer", 9], [it.runs, "--peer", 0]],
    "k8s": lambda it: [[it.file, "--image", EVIL], [it.broken, "--image", "p2pfl"], [it.file, "--name", EVIL]],
    "keys": lambda it: [["new", "--peers", 2, it.out], ["new", it.broken, it.out], [EVIL]],
    "launch": lambda it: [[it.broken], [it.file, "--set", f"rounds={EVIL}"], [it.file, "--log-level", EVIL]],
    "list": lambda it: [[it.runs], [it.runs / f"missing{NAME}"]],
    "logs": lambda it: [[it.one], [it.one, "--peer", 0, "--grep", "evil"], [it.one, "--since", EVIL], [it.runs]],
    "model": lambda it: [[it.one, "--peer", 0, "-o", it.out], [it.one, "--peer", 0, "-o", it.file], [it.runs]],
    "models": lambda it: [["--plugin", it.runs / f"{NAME}.py"], [EVIL]],
    "names": lambda it: [["--plugin", it.runs / f"{NAME}.py"], [EVIL], ["graph", EVIL]],
    "new": lambda it: [[it.out], [it.one]],
    "report": lambda it: [[it.one, "--without-models"], [it.one, it.two, "-o", f"{it.out}.html"], [it.runs]],
    "resume": lambda it: [[it.runs], [it.one]],
    "show": lambda it: [[it.one], [it.one, "--json"], [it.runs / f"missing{NAME}"]],
    "simulate": lambda it: [
        [it.broken],
        [it.file, "--set", f"rounds={EVIL}"],
        [it.file, "--run-dir", it.one],
        [it.file, "--replay", it.runs / f"missing{NAME}"],
    ],
    "status": lambda it: [[it.one], [it.one, "--watch"], [it.one, "--json"], [it.runs]],
    "stop": lambda it: [[it.one], [it.runs]],
    "sweep": lambda it: [[it.broken, "--grid", f"rounds={EVIL}"], [it.file, "--grid", f"{EVIL}=1"], [it.one]],
    "track": lambda it: [[it.one, "--to", EVIL], [it.runs]],
    "ui": lambda it: [[it.runs, EVIL]],
}


def test_every_command_is_tried() -> None:
    assert set(ARGUMENTS) == set(commands.commands) - {"peer"}  # another program, see tests/processes


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_no_command_prints_control_characters(name: str, hostile: Hostile, invoke: Invoke) -> None:
    if name == "report" and importlib.util.find_spec("vl_convert") is None:
        pytest.skip("needs the extra report")
    texts = []
    for arguments in ARGUMENTS[name](hostile):
        outcome = invoke(name, *arguments)
        texts.append(outcome.output)
        found = {letter for letter in outcome.output if not letter.isprintable()} - {"\n", "\t"}
        assert not found, f"{arguments}: {found} in {outcome.output!r}"
    assert any("evil" in text for text in texts), texts


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_every_command_prints_in_any_encoding(name: str, hostile: Hostile) -> None:
    if name == "report" and importlib.util.find_spec("vl_convert") is None:
        pytest.skip("needs the extra report")
    runs: list[list[object]] = [["--help"], *ARGUMENTS[name](hostile)]
    for charset in ("ascii", "iso-8859-1"):
        runner = CliRunner(charset=charset)  # stdout is strict, as a terminal's is
        for arguments in runs:
            outcome = runner.invoke(commands, [name, *map(str, arguments)], catch_exceptions=False)
            printed = outcome.stdout_bytes + outcome.stderr_bytes
            files = name in ("compose", "k8s") and outcome.exit_code == 0
            assert printed.decode("utf-8" if files else charset).strip()


@pytest.mark.exhaustive
def test_a_page_holds_no_markup_of_others(hostile: Hostile, invoke: Invoke, tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    page = tmp_path / "all.html"
    for runs in ([hostile.one], [hostile.one, hostile.two]):
        assert invoke("report", *runs, "-o", page, "--without-models").exit_code == 0
        text = page.read_text()
        assert "alert(1)" in text
        assert "<script>alert" not in text
        assert not re.search(
            "[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", text.partition("<body")[2].partition("<script")[0]
        )
