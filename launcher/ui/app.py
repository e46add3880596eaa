"""The screens of the live view and their keys."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import ClassVar

from rich.segment import Segment
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.geometry import Size
from textual.screen import Screen
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Footer, RichLog, Static

from launcher.facts.logs import LogFile, has_ended
from launcher.ui import drawing
from launcher.ui.drawing import COLUMNS, Scales
from launcher.ui.state import Peer, RunState, level_of
from launcher.views.progress import Clock
from p2pfl import PeerId
from p2pfl.terminal import printable, wants_color

INTERVAL = 1.0
"""Seconds between two updates, unless they take more than MAX_LOAD."""
SLOWEST = 10.0
MAX_LOAD = 0.01
"""Most of a core that the view takes on average."""
WIDE = 118
"""Columns of a terminal that shows the weights beside the peers."""
LOG_LINES = 1000
SELECTED = "on #34456b"

Poll = Callable[[], "list[str] | None"]
"""Return new lines of the launcher; None if it has ended."""


class Peers(ScrollView, can_focus=True):
    """A row per peer; one is selected."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup", "move(-10)", show=False),
        Binding("pagedown", "move(10)", show=False),
        Binding("home", "move(-100000)", show=False),
        Binding("end", "move(100000)", show=False),
    ]

    def __init__(self, state: RunState) -> None:
        super().__init__()
        self._state = state
        self.sort, self.reverse = 0, False
        self.selected: PeerId = state.peers[0].peer
        self._order: list[Peer] = list(state.peers)
        self._scales = Scales.of(state)

    def show_state(self) -> None:
        """Draw the state again."""
        self._order = sorted(self._state.peers, key=self._key, reverse=self.reverse)
        self._scales = Scales.of(self._state)
        self.virtual_size = Size(0, len(self._order) + 1)
        self.refresh()

    def _key(self, peer: Peer) -> tuple[float | str, int]:
        return COLUMNS[self.sort].key(peer), -peer.peer if self.reverse else peer.peer

    def action_move(self, by: int) -> None:
        place = next(at for at, peer in enumerate(self._order) if peer.peer == self.selected)
        place = min(len(self._order) - 1, max(0, place + by))
        self.selected = self._order[place].peer
        top, height = self.scroll_offset.y, max(1, self.size.height - 1)
        if place < top:
            self.scroll_to(y=place, animate=False)
        elif place >= top + height:
            self.scroll_to(y=place - height + 1, animate=False)
        self.refresh()

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        columns = drawing.columns_for(width)
        place = y - 1 + self.scroll_offset.y
        segments: list[Segment] = []
        if y == 0:  # stays on top
            segments = list(drawing.header(columns, COLUMNS[self.sort].title, self.reverse).render(self.app.console))
        elif place < len(self._order):
            peer = self._order[place]
            background = (SELECTED if wants_color() else "reverse") if peer.peer == self.selected else ""
            segments = drawing.row(peer, columns, self._state.rounds, self._scales, background)
            if background:
                segments.append(Segment(" " * width, drawing.style_of(background)))
        return Strip(segments).adjust_cell_length(width).apply_style(self.rich_style)


class Weights(Widget):
    """The mixing weights as a heat map."""

    def __init__(self, state: RunState) -> None:
        super().__init__()
        self._state = state
        self._drawn: tuple[object, ...] = ()
        self._lines: list[list[Segment]] = []
        self._room = (0, 0)

    def show_state(self, width: int, height: int) -> None:
        """Draw the weights in at most so much room, if they or the room have changed."""
        if (self._state.weights_read, width, height) != self._drawn:
            self._drawn = self._state.weights_read, width, height
            self._lines = drawing.heat_map(self._state, width, height)
            wide = max(sum(segment.cell_length for segment in line) for line in self._lines)
            if (wide, len(self._lines)) != self._room:
                self._room = self.styles.width, self.styles.height = wide, len(self._lines)
            self.refresh()

    def render_line(self, y: int) -> Strip:
        line = self._lines[y] if y < len(self._lines) else []
        return Strip(line).adjust_cell_length(self.size.width).apply_style(self.rich_style)


class LogScreen(Screen[None]):
    """The log of one peer, which is followed."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,l", "back", "Back"),
        Binding("n", "next(1)", "Next peer"),
        Binding("p", "next(-1)", "Previous peer"),
    ]

    def __init__(self, state: RunState, peer: PeerId) -> None:
        super().__init__()
        self._state = state
        self._open(peer)

    def _open(self, peer: PeerId) -> None:
        self._peer = peer
        self._log = LogFile(peer, self._state.folder.peer(peer).log)

    def compose(self) -> ComposeResult:
        yield Static(id="title")
        yield RichLog(max_lines=LOG_LINES, wrap=True, markup=False, highlight=False, min_width=20)
        yield Footer()

    def on_mount(self) -> None:
        self.query_one(RichLog).focus()
        self.call_after_refresh(self.show_state)

    def show_state(self) -> None:
        """Add the entries that are new, and stay at the end if that is what is shown."""
        title = f"peer {self._peer}: {self._state.folder.peer(self._peer).log}"
        self.query_one("#title", Static).update(Text(printable(title), "bold", no_wrap=True, overflow="ellipsis"))
        view = self.query_one(RichLog)
        at_end = view.is_vertical_scroll_end
        for entry in self._log.read()[-LOG_LINES:]:
            for line in entry.text.split("\n"):
                level = _LEVELS.get(level_of(line), "")
                view.write(Text(printable(line), level), scroll_end=False)
        if at_end:
            view.scroll_end(animate=False)

    def action_next(self, by: int) -> None:
        peers = [peer.peer for peer in self._state.peers]
        self._open(peers[(peers.index(self._peer) + by) % len(peers)])
        self.query_one(RichLog).clear()
        self.show_state()

    def action_back(self) -> None:
        self.dismiss()


_LEVELS = {"WARNING": "yellow", "ERROR": "bold red", "CRITICAL": "bold red"}


class WeightsScreen(Screen[None]):
    """The mixing weights of all peers."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,w", "back", "Back")]

    def __init__(self, state: RunState) -> None:
        super().__init__()
        self._state = state

    def compose(self) -> ComposeResult:
        yield Static("[b]mixing weights[/b]")
        yield Weights(self._state)
        yield Footer()

    def on_mount(self) -> None:
        self.show_state()

    def show_state(self) -> None:
        """Draw the weights again."""
        self.query_one(Weights).show_state(self.app.size.width, self.app.size.height - 2)

    def action_back(self) -> None:
        self.dismiss()


class LiveView(App[None]):
    """A row per peer, their mixing weights and warnings."""

    CSS = """
    Screen { background: $background; }
    #summary, #phases, #title { height: 1; }
    #middle { height: 1fr; }
    Peers { background: $background; width: 1fr; height: 1fr; scrollbar-size-vertical: 1; }
    #side { width: auto; max-width: 50%; padding: 0 0 0 2; display: none; }
    #side.wide { display: block; }
    #notices { height: auto; }
    #notices.wide { border-top: solid $panel; }
    RichLog { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "sort(1)", "Sort"),
        Binding("S", "sort(-1)", show=False),
        Binding("r", "reverse", "Reverse"),
        Binding("enter,l", "log", "Log"),
        Binding("w", "weights", "Weights"),
        Binding("q", "quit", "Close view"),
        Binding("ctrl+c", "interrupt", "Stop run", priority=True),
        Binding("ctrl+c", "quit", show=False, priority=True),  # if there is no launcher to stop the run
    ]
    ENABLE_COMMAND_PALETTE = False

    def __init__(
        self, state: RunState, name: str, poll: Poll | None = None, interrupt: Callable[[], None] | None = None
    ) -> None:
        """Create the view.

        Args:
            poll: asks the launcher that has started this view.
            interrupt: passes a Ctrl-C on to it. Without it, Ctrl-C closes the view.
        """
        if wants_color():
            os.environ.pop("NO_COLOR", None)  # an empty one, which Textual would obey
        super().__init__(ansi_color=None if wants_color() else True)  # True: no grays in place of colors
        self.state = state
        self._run_name, self._poll, self._interrupt = name, poll, interrupt
        self._clock = Clock()
        self._used = time.process_time()
        """Seconds of CPU at the last update."""

    def compose(self) -> ComposeResult:
        yield Static(id="summary")
        yield Static(id="phases")
        with Horizontal(id="middle"):
            yield Peers(self.state)
            with Vertical(id="side"):
                yield Static("[b]mixing weights[/b]")
                yield Weights(self.state)
        yield Static(id="notices")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        self.query_one(Peers).focus()
        self._listen()
        self._update()
        self.set_interval(INTERVAL, self._listen)

    def _listen(self) -> None:
        """Read the launcher's lines, and end with it: at a fixed pace, since it waits for that."""
        lines = [] if self._poll is None else self._poll()
        if lines is None:
            self.exit()
        else:
            self.state.add(lines)

    def _update(self) -> None:
        """Read and draw what is new, and come again: later if all since the last time has taken long."""
        self.state.read()
        self.show_state()
        used, self._used = time.process_time() - self._used, time.process_time()
        self.set_timer(min(SLOWEST, max(INTERVAL, used / MAX_LOAD)), self._update)

    def on_resize(self) -> None:
        self.call_after_refresh(self.show_state)

    def show_state(self) -> None:
        """Draw the state on the screen that is shown."""
        if isinstance(self.screen, LogScreen | WeightsScreen):
            self.screen.show_state()
            return
        wide = self.size.width >= WIDE
        self.query_one("#summary", Static).update(
            drawing.summary(self.state, self._run_name, self._times(), self.size.width)
        )
        self.query_one("#phases", Static).update(drawing.phases(self.state))
        side, notices = self.query_one("#side"), self.query_one("#notices", Static)
        side.set_class(wide, "wide")
        notices.set_class(wide, "wide")
        if wide:
            height = self.query_one("#middle").size.height or self.size.height - 8
            self.query_one(Weights).show_state(self.size.width - 80, height - 1)
        most = max(2, min(12, self.size.height - len(self.state.peers) - 6))
        shown = list(self.state.notices)[-most:]
        lines = [Text(printable(line), no_wrap=True, overflow="ellipsis") for line in shown]
        notices.update(Text("\n").join(lines) if lines else Text("no warnings", "dim"))
        self.query_one(Peers).show_state()

    def _times(self) -> str:
        """Elapsed and remaining time, as long as the run goes on."""
        folder = self.state.folder
        if self._poll is None and all(has_ended(folder, folder.peer(peer.peer)) for peer in self.state.peers):
            return "ended"
        return self._clock.describe(self.state.snapshot.fraction)

    def action_sort(self, by: int) -> None:
        peers = self.query_one(Peers)
        shown = [COLUMNS.index(column) for column, _ in drawing.columns_for(peers.size.width)]
        at = shown.index(peers.sort) if peers.sort in shown else 0
        peers.sort = shown[(at + by) % len(shown)]
        peers.show_state()

    def action_reverse(self) -> None:
        peers = self.query_one(Peers)
        peers.reverse = not peers.reverse
        peers.show_state()

    def action_log(self) -> None:
        self.push_screen(LogScreen(self.state, self.query_one(Peers).selected))

    def action_weights(self) -> None:
        self.push_screen(WeightsScreen(self.state))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer to stop the run only where Ctrl-C does, and to sort only where there is a table."""
        if action in ("sort", "reverse", "log", "weights"):
            return not isinstance(self.screen, LogScreen | WeightsScreen)
        return action != "interrupt" or self._interrupt is not None

    def action_interrupt(self) -> None:
        assert self._interrupt is not None
        self._interrupt()
