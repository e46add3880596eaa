"""``p2pfl ui``: the live view of a run that is already running."""

from __future__ import annotations

from pathlib import Path

import click

from launcher.commands.group import RUN, open_run


@click.command()
@RUN
def ui(run: Path) -> None:
    """Show peers, curves, weights and logs of RUN in full screen.

    It only reads files; q closes it. The run may be running or finished, and may have been started in any way.
    """
    from launcher.ui.progress import has_terminal, require_ui

    require_ui()
    if not has_terminal():
        raise click.UsageError("the live view needs a terminal: its stdin and stderr are not one")
    folder = open_run(run)
    from launcher.ui.__main__ import show

    show(folder)
