"""How a user watches a run that a command starts: the live view, and the endpoint for scrapers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console

from launcher.lossy_output import dropping
from launcher.views.progress import Progress, progress_on
from p2pfl.run_folder.folder import RunFolder

if TYPE_CHECKING:
    from launcher.tracking.prometheus import MetricsServer


@dataclass(frozen=True)
class Watching:
    """What to show, and where.

    Attributes:
        ui: the live view in full screen, in place of lines.
        metrics: answers scrapers once the run has a folder.
    """

    ui: bool = False
    metrics: MetricsServer | None = None

    @contextmanager
    def progress(self, console: Console, folder: RunFolder) -> Iterator[Progress]:
        """Display the progress of a run; drop lines that a closed terminal or a full disk does not take."""
        if self.ui:
            from launcher.ui.progress import UiProgress

            with UiProgress(console, folder) as progress:
                yield progress
            return
        with dropping(console), progress_on(console) as progress:
            yield progress

    def serve(self, folder: RunFolder, console: Console) -> None:
        """Let the endpoint, if there is one, answer for this run, and print its address."""
        if self.metrics is not None:
            self.metrics.start(folder, folder.settings)
            console.print(f"metrics: {self.metrics.url}", soft_wrap=True)


@contextmanager
def watching(console: Console, ui: bool, metrics: tuple[str, int] | None) -> Iterator[Watching]:
    """Prepare what the user asks for, before any peer starts.

    Args:
        metrics: host and port of the endpoint; None for none.

    Raises:
        MissingExtra: textual is not installed.
        LaunchError: the port is not free.
    """
    if ui:
        from launcher.ui.progress import has_terminal, require_ui

        require_ui()
        if not has_terminal():
            console.print("without the live view: stdin and stderr are not a terminal")
            ui = False
    if metrics is None:
        yield Watching(ui)
        return
    from launcher.tracking.prometheus import MetricsServer

    with MetricsServer(*metrics) as server:
        yield Watching(ui, server)
