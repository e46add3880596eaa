"""The live view: what it reads, what it draws, and its keys."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("textual")

from rich.console import Console
from rich.segment import Segment
from textual.widgets import RichLog, Static

from launcher.ui import drawing
from launcher.ui.__main__ import poll_pipe
from launcher.ui.app import LiveView, LogScreen, Peers, WeightsScreen
from launcher.ui.drawing import Scales, columns_for, sparkline
from launcher.ui.state import RunState
from p2pfl.run_folder.folder import Status
from p2pfl.run_folder.records import parse
from tests.launcher_fixtures import Invoke, MakeFolder

HOSTILE = "2026-11-21T02:41:00.000 WARNING neighbor \x1b[2Junreachable peer=1\n"
PEERS = 20


@pytest.fixture
def state(make_folder: MakeFolder) -> RunState:
    """A running run of 20 peers; peer 3 is the slowest, and peer 4 has warned."""
    folder = make_folder(peers=PEERS, results=dict.fromkeys(range(PEERS)))
    for peer in range(PEERS):
        files = folder.peer(peer)
        done = 1 if peer == 3 else 3
        waits = [3] if peer == 5 else []
        phase: Any = "waiting" if waits else "training"
        files.write_status(Status(peer, os.getpid(), phase, done, done, waits, 0.5, 1000 * peer, 2000))
        lines = [
            {
                "peer": peer,
                "t": t,
                "personal": {"accuracy": 0.1 * t + peer / 100},
                "loss": {"ce": 2.0 - t, "cont": 5.0},
                "weights": {str(peer): 0.5, str((peer + 1) % PEERS): 0.5},
                "missing": {"Head": [1]} if peer == 6 else {},
            }
            for t in range(done)
        ]
        files.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    folder.peer(4).log.write_text("2026-11-21T02:41:00.000 INFO    WARNING is only a word here\n" + HOSTILE)
    state = RunState(folder, rounds=3)
    state.read()
    return state


def plain(segments: list[Segment]) -> str:
    return "".join(segment.text for segment in segments)


def lines_of(state: RunState, width: int) -> list[str]:
    columns = columns_for(width)
    scales = Scales.of(state)
    return [plain(drawing.row(peer, columns, state.rounds, scales)) for peer in state.peers]


# ---- state and drawing -------------------------------------------------------------------------------------


def test_without_colors_shades_and_reversed_text_tell_things_apart(
    state: RunState, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drawn() -> str:
        _, first, *_ = drawing.heat_map(state, 80, 40)
        return plain(first)[3:]

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert drawn().strip() == ""
    monkeypatch.setenv("NO_COLOR", "1")
    assert drawn().strip() == "████"  # a peer's own weight and that of a neighbor
    view = LiveView(state, "toy")
    assert view.no_color
    assert view.native_ansi_color  # so that Textual has no grays in place of colors


def test_a_row_shows_what_a_peer_does(state: RunState) -> None:
    lines = lines_of(state, 120)
    assert lines[5].split() == [
        "5",
        "waiting",
        "3",
        "25.0",
        "▂▄▅",
        "0.0000",
        "█▅▁",
        "5.0",
        "kB",
        "2.0",
        "kB",
        "·",
        "·",
        "3",
    ]
    assert lines[6].split()[-2] == "3"  # missed messages
    assert lines[4].split()[-1] == "1"  # warnings in its log


@pytest.mark.parametrize("width", [40, 60, 80, 100, 160, 300])
def test_rows_fit_the_terminal(state: RunState, width: int) -> None:
    assert {len(line) for line in lines_of(state, width)} == {sum(wide + 1 for _, wide in columns_for(width))}
    assert len(lines_of(state, width)[0]) <= width
    assert len(drawing.header(columns_for(width), "peer", False).plain) <= width


def test_records_of_a_resumed_peer_are_not_counted_twice(state: RunState) -> None:
    peer = state.peers[6]
    before = (dict(peer.accuracies), dict(peer.losses), peer.missing)
    text = state.folder.peer(6).metrics.read_text()
    state.folder.peer(6).metrics.unlink()
    state.folder.peer(6).metrics.write_text(text.splitlines(True)[0])
    state.read()
    state.folder.peer(6).metrics.write_text(text)
    state.read()
    assert (peer.accuracies, peer.losses, peer.missing) == before


def test_warnings_of_peers_are_collected_with_their_escapes_neutralized(state: RunState) -> None:
    assert list(state.notices) == ["02:41:00 peer 4: neighbor \x1b[2Junreachable peer=1"]
    console = Console(width=200, force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(drawing.summary(state, "a\x1b[2J", "0:01", 80))
    assert "\x1b[2J" not in capture.get()


@pytest.mark.parametrize(
    "record",
    [
        {"peer": 0, "t": 1, "personal": 3},
        {"peer": 0, "t": 1, "weights": {"x": 1, "1": "a"}},
        {"peer": 0, "t": 1, "loss": {"ce": None}, "missing": [1]},
    ],
)
def test_damaged_records_do_not_end_the_view(state: RunState, record: dict[str, Any]) -> None:
    state.peers[0].add(next(parse([record])))
    lines_of(state, 120)
    drawing.heat_map(state, 60, 30)


def test_sparklines_share_a_scale_and_keep_the_last_value() -> None:
    assert sparkline([0.0, 0.5, 1.0], 10, 0.0, 1.0) == "▁▅█"
    assert sparkline(list(range(100)), 4, 0, 99)[-1] == "█"
    assert sparkline([], 4, 0, 1) == ""
    assert sparkline([2.0], 4, 2.0, 2.0) == "▁"


def test_the_heat_map_is_as_wide_as_there_is_room(state: RunState) -> None:
    wide, narrow = drawing.heat_map(state, 60, 40), drawing.heat_map(state, 30, 40)
    assert len(plain(wide[1])) == 3 + 2 * PEERS
    assert len(plain(narrow[1])) == 3 + PEERS
    assert "do not fit" in plain(drawing.heat_map(state, 20, 40)[0])
    colors = [(segment.text, segment.style.bgcolor.name) for segment in wide[1][1:] if segment.style]  # type: ignore[union-attr]
    assert colors == [(" " * 4, "#ffbe3c"), (" " * 36, "#1c2030")]  # to itself and to peer 1


# ---- screens and keys --------------------------------------------------------------------------------------


def shown(app: LiveView) -> list[str]:
    """The lines of the table."""
    peers = app.query_one(Peers)
    return [peers.render_line(y).text.rstrip() for y in range(peers.size.height)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("terminal", [(80, 24), (160, 50)])
async def test_shows_peers_sorts_and_opens_a_log(state: RunState, terminal: tuple[int, int], eventually: Any) -> None:
    app = LiveView(state, "toy (local)")
    async with app.run_test(size=terminal) as pilot:
        await pilot.pause()
        lines = shown(app)
        assert lines[0].split()[:3] == ["peer▲", "phase", "round"]
        assert [line.split()[0] for line in lines[1:4]] == ["0", "1", "2"]
        assert app.query_one("#side").display == (terminal[0] == 160)
        assert "neighbor \\x1b[2Junreachable" in str(app.query_one("#notices", Static).render())
        await pilot.press("s", "s")  # by rounds
        assert shown(app)[1].split()[0] == "3"
        await pilot.press("r")
        assert shown(app)[1].split()[0] == "0"  # of equal peers the one with the lowest id
        await pilot.press("home", "end", "enter")
        await pilot.pause()
        assert isinstance(app.screen, LogScreen)
        await pilot.press("s", "r", "w", "n")  # no keys of the table
        log = app.screen.query_one(RichLog)
        await eventually(lambda: any("neighbor \\x1b[2Junreachable" in line.text for line in log.lines))
        await pilot.press("escape", "w")
        await pilot.pause()
        assert isinstance(app.screen, WeightsScreen)
        await pilot.press("escape", "q")
    assert app.return_code == 0


@pytest.mark.exhaustive
async def test_new_records_appear(state: RunState) -> None:
    app = LiveView(state, "toy")
    async with app.run_test(size=(120, 40)) as pilot:
        with state.folder.peer(0).metrics.open("a") as file:
            file.write('{"peer": 0, "t": 3, "personal": {"accuracy": 0.875}}\n')
        state.read()
        app.show_state()
        await pilot.pause()
        assert "87.5" in shown(app)[1]


async def test_the_end_of_the_launcher_ends_the_view_and_its_lines_are_shown(
    state: RunState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.ui.app.INTERVAL", 1000.0)  # the test triggers each refresh
    told: list[list[str] | None] = [["peer 3: killed by SIGKILL; restarting"], None]
    app = LiveView(state, "toy", lambda: told.pop(0))
    async with app.run_test(size=(80, 24)):
        assert "restarting" in str(app.query_one("#notices", Static).render())
        app._listen()
    assert app.return_code == 0


async def test_ctrl_c_closes_the_view_of_a_run_that_another_command_has_started(
    state: RunState, eventually: Any
) -> None:
    app = LiveView(state, "toy")
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("ctrl+c")
        await eventually(lambda: not app.is_running)


@pytest.mark.exhaustive
async def test_ctrl_c_interrupts_the_launcher_and_not_the_view(state: RunState) -> None:
    interrupts: list[int] = []
    app = LiveView(state, "toy", list, lambda: interrupts.append(1))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("ctrl+c")
        assert interrupts == [1]
        assert app.is_running


def test_lines_of_the_launcher_arrive_whole() -> None:
    reads, writes = os.pipe()
    poll = poll_pipe(reads)
    assert poll() == []
    os.write(writes, b"one\ntw")
    assert poll() == ["one"]
    os.write(writes, b"o\n")
    assert poll() == ["two"]
    os.close(writes)
    assert poll() is None
    os.close(reads)


# ---- command line ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["launch", "simulate", "ui"])
def test_a_missing_library_is_an_error_before_there_is_a_run(
    tmp_path: Path, file: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr("launcher.ui.progress.find_spec", lambda name: None)
    options = [] if command == "ui" else ["--ui", "--run-dir", tmp_path / "run"]
    outcome = invoke(command, file, *options)
    assert outcome.exit_code == 1
    assert "the live view needs textual, which is not installed: pip install 'p2pfl-mesh[ui]'" in outcome.stderr
    assert not (tmp_path / "run").exists()


def test_the_view_needs_a_terminal(make_folder: MakeFolder, invoke: Invoke) -> None:
    outcome = invoke("ui", make_folder().root)
    assert outcome.exit_code == 2
    assert "needs a terminal" in outcome.stderr


def test_help_does_not_import_textual(invoke: Invoke) -> None:
    before = "textual" in sys.modules
    invoke("launch", "--help")
    assert ("textual" in sys.modules) == before
