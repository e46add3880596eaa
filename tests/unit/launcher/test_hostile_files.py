"""Files of a run folder may come from anyone: no command prints their control characters."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
import yaml

from launcher import commands
from launcher.facts.snapshot import Snapshot
from launcher.formatting.console import make_console
from launcher.views.progress import LineProgress, LiveProgress
from p2pfl.run_folder.folder import RunFolder
from tests.launcher_fixtures import Host, Invoke

EVIL = "evil\x1b]0;title\x07\x1b[2J\x9b31m\r\b\x7f\u202e\ud800"
"""Sets a terminal's title, clears its screen, colors and overwrites text, and reverses it."""


def assert_harmless(text: str) -> None:
    assert "evil" in text
    found = {letter for letter in text if not letter.isprintable()} - {"\n"}
    assert not found, f"{found} in {text!r}"


def replace_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture
def evil(host: Host) -> RunFolder:
    """A run folder of two peers whose files have control characters wherever they may have text."""
    folder = host("one", 0, 1)
    settings = yaml.safe_load(folder.run_file.read_text())
    settings.update(name=EVIL, data={"dataset": {"name": EVIL}}, algorithm={"name": EVIL})
    folder.run_file.write_text(json.dumps(settings))  # JSON is YAML
    replace_json(folder.root / "run.json", command=EVIL, host=EVIL)
    for files in folder.peers():
        replace_json(
            files.root / "result.json",
            phase="failed",
            digest=EVIL,
            model=EVIL,
            group=EVIL,
            error=EVIL,
            extra_metrics={EVIL: 0.5},
            sent={EVIL: {EVIL: [1, 2, 3]}},
            weights={EVIL: 0.5},
        )
        replace_json(files.root / "status.json", phase=EVIL, error=EVIL, t=EVIL)
        stamp = "2026-11-21T02:41:01.000"
        files.log.write_text(f"{stamp} INFO {EVIL}\n{EVIL}\n", errors="surrogatepass")
    return folder


@pytest.mark.parametrize(
    "command",
    [["logs"], ["logs", "--peer", 0], ["digest"], ["compare"]],
    ids=lambda command: " ".join(map(str, command)),
)
def test_no_command_prints_control_characters_of_a_run_folder(
    evil: RunFolder, invoke: Invoke, command: list[str]
) -> None:
    outcome = invoke(command[0], evil.root, *command[1:])
    assert_harmless(outcome.output)


def test_list_prints_no_control_characters(evil: RunFolder, invoke: Invoke) -> None:
    replace_json(evil.root / "run.json", started=EVIL)
    assert_harmless(invoke("list", evil.root.parent).output)


def test_compare_prints_no_control_characters_of_differing_runs(evil: RunFolder, host: Host, invoke: Invoke) -> None:
    assert_harmless(invoke("compare", evil.root, host("two", 0).root).output)


def test_collect_prints_no_control_characters(evil: RunFolder, into: Path, invoke: Invoke) -> None:
    assert_harmless(invoke("collect", into, evil.root).output)  # group must be an integer
    for files in evil.peers():
        replace_json(files.root / "result.json", group=0)
        replace_json(files.root / "status.json", phase="failed", t=0)
    outcome = invoke("collect", into, evil.root)
    assert_harmless(outcome.output)
    assert "peers 0-1: failed: evil\\x1b]0;title\\x07" in outcome.stderr
    assert_harmless(invoke("logs", into).output)


def test_json_output_escapes_control_characters(evil: RunFolder, invoke: Invoke) -> None:
    for command in ("digest", "compare"):
        assert_harmless(invoke(command, evil.root, "--json").stdout)


def test_an_error_prints_no_control_characters(evil: RunFolder, invoke: Invoke) -> None:
    evil.run_file.write_text(f"name: [{EVIL}", errors="replace")
    assert_harmless(invoke("digest", evil.root).output)


def test_progress_prints_no_control_characters(evil: RunFolder) -> None:
    out = make_console()
    out.file = io.StringIO()
    with LineProgress(out) as lines:
        lines.print(f"peer 0: failed: {EVIL}")
        lines.update(Snapshot.take(evil, range(2), rounds=3))
    assert_harmless(out.file.getvalue())


def test_the_live_display_prints_no_control_characters_of_files(
    evil: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "300")
    out = make_console()
    out.file = io.StringIO()
    with LiveProgress(out) as live:
        live.print(f"peer 0: failed: {EVIL}")
        live.update(Snapshot.take(evil, range(2), rounds=3))
    shown = out.file.getvalue()
    assert "2 evil\\x1b]0;title" in shown  # phases
    assert_harmless(
        re.sub(r"\x1b\[[?0-9;]*[A-Za-z]|\r", "", shown)
    )  # without those that rich writes to move the cursor


def test_commands_print_only_with_echo_and_make_console() -> None:
    launcher = Path(commands.__file__ or "").parents[1]
    sources = [path for folder in ("commands", "formatting") for path in (launcher / folder).glob("*.py")]
    using = {path.name for path in sources if re.search(r"click\.s?echo\(|(?<!\.)\bprint\(", path.read_text())}
    assert using == {"console.py"}
