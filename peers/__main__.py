"""``python -m peers --run FOLDER --me 3``: one peer, in this process."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

import click

from p2pfl.errors import P2pflError
from p2pfl.runfolder import RunFolder


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--run", "root", type=click.Path(path_type=Path), envvar="P2PFL_RUN", help="Run folder.")
@click.option("--me", type=click.IntRange(min=0), envvar="P2PFL_ME", help="Which peer to be.")
@click.option(
    "--file",
    type=click.Path(path_type=Path),
    envvar="P2PFL_FILE",
    help="Run file: make the run folder of this peer from it, unless that is there.",
)
@click.option(
    "--run-id", envvar="P2PFL_RUN_ID", help="With --file: 16 hex digits, the same for all peers; default: from FILE."
)
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="With --file: change a key of it.")
@click.option("--health", is_flag=True, help="Ask this peer how it does, from the same host; exit code 1: no answer.")
@click.option("--warm", is_flag=True, hidden=True, help="Fork peers on request (for the launcher; see peers.warm).")
def main(
    root: Path | None,
    me: int | None,
    file: Path | None,
    run_id: str | None,
    sets: tuple[str, ...],
    health: bool,
    warm: bool,
) -> None:
    """Run one peer: of a run that `p2pfl launch` has made, or of --file.

    It goes on after its last checkpoint. Options may also be given as P2PFL_RUN, P2PFL_ME, P2PFL_FILE, P2PFL_RUN_ID.
    """
    if warm:
        # Kernels must not start threads before the fork, so the limit comes before torch.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        from peers.warm import serve

        # Not sys.exit: what was frozen before the fork is never collected, and extension modules would call
        # that a leak on their way out.
        os._exit(serve())
    if root is None or me is None:
        raise click.UsageError("give --run FOLDER and --me N")
    if health:
        from peers.health import examine

        well, words = examine(RunFolder(root).peer(me))
        click.echo(words)
        sys.exit(0 if well else 1)
    run = None
    try:
        if file is not None:
            from peers.own import own_folder

            folder, run = own_folder(file, root, me, run_id, sets)
        else:
            folder = RunFolder.open(root.parent if root.name == "run.yaml" else root).own()
            if not folder.peer(me).root.is_dir():
                raise click.UsageError(f"{folder.root} has no peer {me}")
    except P2pflError as error:
        raise click.ClickException(str(error)) from None
    with suppress(OSError):  # who cannot be told cannot be told
        click.echo(f"peer {me}: loading torch")  # for a minute, where many do it at once
    from peers.runtime import run_peer

    def last_words(text: str) -> None:
        click.echo(text, err=True)

    sys.exit(run_peer(folder, me, run, last_words=last_words, echo=sys.stdout))


if __name__ == "__main__":
    main()
