"""Commands that show how a run goes: show, status."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import click

from launcher.commands.group import JSON, RUN, open_run
from launcher.formatting.console import echo, make_console


@click.command()
@RUN
@JSON
def show(run: Path, as_json: bool) -> None:
    """Print the summary of RUN again.

    The run may be unfinished, and anybody may have started its peers. Nothing in RUN changes. Exit with 1 if a peer
    has not finished.
    """
    from launcher.facts.summary import current_summary
    from launcher.views.print_summary import show_summary

    summary = current_summary(open_run(run))
    show_summary(summary, make_console(), as_json=as_json)
    sys.exit(0 if summary.finished else 1)


@click.command()
@RUN
@click.option("-w", "--watch", "again", is_flag=True, help="Update it until all peers have ended; Ctrl-C ends it.")
@JSON
def status(run: Path, again: bool, as_json: bool) -> None:
    """Show what each peer of RUN does now, and who holds up whom.

    \b
    state      what a living peer does (queued: waits for a compute slot; suspended: by a signal), or how it ended
    waits for  neighbors whose messages it waits for, and for how long it has been in this state
    sent, recv bytes of the completed rounds
    ages       if rounds do not wait: how many rounds old the messages were that the last round took, as median and
               range; negative: the neighbor was ahead
    memory     pages that processes share are divided among them
    queues     messages that arrived and are not yet used (in), and that neighbors have not yet received (out)

    Peers write their state a few times a second, less often if there are more than twelve. With --watch, a screen
    that is too low for all peers shows those that failed, hold up others or are furthest behind; with --watch --json,
    print one line for each update.
    """
    from launcher.facts.status import RunStatus, watch
    from launcher.views.status import render

    folder, console = open_run(run), make_console()
    if not again:
        found = RunStatus.take(folder)
        echo(json.dumps(found.to_dict())) if as_json else console.print(render(found))
        return
    from rich.live import Live

    try:
        if as_json or not console.is_terminal:
            for found in watch(folder):
                echo(json.dumps(found.to_dict())) if as_json else console.print(render(found))
            return
        with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
            for found in watch(folder):
                live.update(render(found, console.height), refresh=True)
    except KeyboardInterrupt:  # the usual way to end it
        sys.exit(128 + signal.SIGINT)
