"""``python -m peers --run FOLDER --me 3``: one peer, in this process."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

import click

from p2pfl.errors import P2pflError
from p2pfl.one_thread import ENVIRONMENT
from p2pfl.session.run_folder import RunFolder
from p2pfl.terminal import printable


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
@click.option("--health", is_flag=True, help="Check this peer's health; exit with 1 if it does not answer.")
@click.option("--warm", is_flag=True, hidden=True, help="Fork peers on request (for the launcher; see peers.warm).")
@click.option("--host", is_flag=True, hidden=True, help="The same on another host (see peers.host).")
def main(
    root: Path | None,
    me: int | None,
    file: Path | None,
    run_id: str | None,
    sets: tuple[str, ...],
    health: bool,
    warm: bool,
    host: bool,
) -> None:
    """Run one peer of a run created by `p2pfl launch`, or of --file.

    The peer resumes from its last checkpoint. The environment variables P2PFL_RUN, P2PFL_ME, P2PFL_FILE and
    P2PFL_RUN_ID can replace the options.
    """
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
    if health:
        from peers.health import check_health

        healthy, line = check_health(RunFolder(root).peer(me))
        click.echo(printable(line))
        sys.exit(0 if healthy else 1)
    run = None
    try:
        if file is not None:
            from peers.standalone import open_or_create

            folder, run = open_or_create(file, root, me, run_id, sets)
        else:
            folder = RunFolder.open(root.parent if root.name == "run.yaml" else root).require_local()
            if not folder.peer(me).root.is_dir():
                raise click.UsageError(f"{folder.root} has no folder of peer {me}")
    except P2pflError as error:
        raise click.ClickException(printable(str(error))) from None
    with suppress(OSError):
        click.echo(f"peer {me}: loading torch")  # takes a minute if many peers start at once
    from peers.runtime import run_peer

    def report_error(text: str) -> None:
        click.echo(printable(text), err=True)

    sys.exit(run_peer(folder, me, run, report_error=report_error, echo=sys.stdout))


if __name__ == "__main__":
    main()
