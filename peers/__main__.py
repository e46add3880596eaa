"""``python -m peers --run FOLDER --me 3``: one peer, in this process."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from p2pfl.errors import P2pflError
from p2pfl.one_thread import ENVIRONMENT
from p2pfl.run_folder.folder import PeerFolder, RunFolder
from p2pfl.run_folder.peer_log import log_info
from p2pfl.standard_streams import open_closed_streams
from p2pfl.terminal import make_legible, printable


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--run", "root", type=click.Path(path_type=Path), envvar="P2PFL_RUN", help="Run folder.")
@click.option("--me", type=click.IntRange(min=0), envvar="P2PFL_ME", help="Id of the peer.")
@click.option(
    "--file",
    type=click.Path(path_type=Path),
    envvar="P2PFL_FILE",
    help="Run file, to create this peer's run folder from if it does not exist.",
)
@click.option(
    "--run-id",
    envvar="P2PFL_RUN_ID",
    help="With --file: 16 hex digits, the same for all peers. Default: derived from FILE.",
)
@click.option(
    "--set", "sets", multiple=True, metavar="KEY=VALUE", help="With --file: override a key of the run file."
)
@click.option("--log-format", type=click.Choice(["text", "json"]), help="With --file.  [text]")
@click.option(
    "--log-level",
    "log_levels",
    multiple=True,
    metavar="[PEER=]LEVEL",
    help="With --file: least level to log (debug, info, warning, error), of all peers or one; repeatable.  [info]",
)
@click.option("--log-size", type=click.IntRange(min=1), help="With --file: MB of the log before it is rotated.  [64]")
@click.option("--health", is_flag=True, help="Check this peer's health; exit with 1 if it does not answer.")
@click.option(
    "--stay",
    is_flag=True,
    help="When finished, wait for SIGTERM instead of exiting. With --health: count a finished peer as healthy.",
)
@click.option("--warm", is_flag=True, hidden=True, help="Fork peers on request (for the launcher; see peers.warm).")
@click.option("--host", is_flag=True, hidden=True, help="The same on another host (see peers.host).")
def main(
    root: Path | None,
    me: int | None,
    file: Path | None,
    run_id: str | None,
    sets: tuple[str, ...],
    log_format: str | None,
    log_levels: tuple[str, ...],
    log_size: int | None,
    health: bool,
    stay: bool,
    warm: bool,
    host: bool,
) -> None:
    """Run one peer of a run created by `p2pfl launch`, or of --file.

    The peer resumes from its last checkpoint. The environment variables P2PFL_RUN, P2PFL_ME, P2PFL_FILE and
    P2PFL_RUN_ID can replace the options.
    """
    open_closed_streams()
    make_legible()
    if warm:
        os.environ |= ENVIRONMENT
        from peers.warm import serve

        # Not sys.exit: objects frozen before the fork are never collected, and extension modules would report them
        # as leaks.
        os._exit(serve())
    if host:
        os.environ |= ENVIRONMENT
        from peers.host import serve as serve_host

        os._exit(serve_host())  # as above
    if root is None or me is None:
        raise click.UsageError("give --run FOLDER and --me N")
    if root.name == "run.yaml" and not root.is_dir():
        root = root.parent
    if health:
        from peers.health import check_health

        files = RunFolder(root).peer(me)
        healthy, line = check_health(files)
        if not healthy and stay and _has_finished(files):
            healthy, line = True, f"peer {me} has finished"
        click.echo(printable(line))
        sys.exit(0 if healthy else 1)
    run = None
    log_options = log_format is not None or bool(log_levels) or log_size is not None
    if file is None and (sets or run_id is not None):
        raise click.UsageError("--set and --run-id need --file; a run that exists has its settings and id")
    if log_options and file is None:
        raise click.UsageError("the --log options need --file; for a run, give them to `p2pfl launch`")
    try:
        if file is not None:
            from peers.standalone import open_or_create

            folder, run = open_or_create(file, root, me, run_id, sets)
            if log_options:
                folder.write_info({**folder.info, "log": _log(log_format, log_levels, log_size, run.peers)})
        else:
            folder = RunFolder.open(root).require_local()
            if not folder.peer(me).root.is_dir():
                raise click.UsageError(printable(f"{folder.root} has no folder of peer {me}"))
    except P2pflError as error:
        raise click.ClickException(printable(str(error))) from None
    with suppress(OSError):
        click.echo(f"peer {me}: loading torch")  # takes a minute if many peers start at once
    from peers.runtime import run_peer

    def report_error(text: str) -> None:
        click.echo(printable(text), err=True)

    code = run_peer(folder, me, run, report_error=report_error, echo=sys.stdout)
    if stay and _has_finished(folder.peer(me)):
        from peers.idle import wait_for_sigterm

        with suppress(OSError):
            click.echo(f"peer {me}: finished; waiting for SIGTERM")
        wait_for_sigterm()
    sys.exit(code)


def _has_finished(files: PeerFolder) -> bool:
    """Return whether the last process of the peer has finished the run, and none has started since."""
    result = files.result()
    return result is not None and result.phase == "finished"


def _log(log_format: str | None, levels: tuple[str, ...], megabytes: int | None, peers: int) -> dict[str, Any]:
    try:
        return log_info(log_format or "text", levels, megabytes, peers)
    except ValueError as error:
        raise click.UsageError(printable(str(error))) from None


if __name__ == "__main__":
    main()
