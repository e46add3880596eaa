"""``p2pfl track``: pass the records of a run on to a tracker."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import click

from launcher.commands.group import RUN, open_run
from launcher.formatting.console import echo
from p2pfl.installed import TRACKERS, names


def _installed_trackers(context: click.Context, option: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    known = names(TRACKERS) if given else []
    for name in given:
        if name not in known:
            raise click.BadParameter(f"unknown tracker {name!r}; installed: {', '.join(known)}")
    return given


@click.command()
@RUN
@click.option(
    "--to",
    "trackers",
    metavar="NAME",
    callback=_installed_trackers,
    multiple=True,
    help="Tracker: tensorboard, wandb, mlflow, or one of an installed package; repeatable. Default: those that "
    "the run file lists under track.",
)
@click.option("--pooled", is_flag=True, help="One run of the tracker for all peers.")
@click.option("--project", help="W&B project or MLflow experiment; default: the name of the run file.")
def track(run: Path, trackers: tuple[str, ...], pooled: bool, project: str | None) -> None:
    """Pass the records of RUN on to trackers, until it ends.

    For a run without `track` in its run file, or whose peers were started by hand, or whose tracker failed: what a
    tracker has received already is not sent again. Ctrl-C ends it, and not the run.
    """
    from launcher.tracking.processes import Trackers
    from launcher.tracking.tracker import require

    if not trackers and (pooled or project):
        raise click.UsageError("--pooled and --project need --to")
    folder = open_run(run)
    entries = [{"name": name, "pooled": pooled, "project": project} for name in dict.fromkeys(trackers)]
    entries = entries or folder.settings.get("track") or []
    if not entries:
        raise click.UsageError(f"the run file of {run} lists no trackers; name one, e.g. --to tensorboard")
    for entry in entries:
        require(str(entry["name"]))
    try:
        sent = Trackers(folder, entries).wait(lambda line: echo(line, err=True))
    except KeyboardInterrupt:
        echo(err=True)  # after the terminal's ^C
        sys.exit(128 + signal.SIGINT)
    sys.exit(0 if sent else 1)
