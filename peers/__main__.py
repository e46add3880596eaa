"""``python -m peers --run FOLDER --me 3``: one peer, in this process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from p2pfl.errors import P2pflError
from p2pfl.runfolder import RunFolder


@click.command()
@click.option("--run", "run", type=click.Path(path_type=Path), help="Run folder, or the run.yaml in it.")
@click.option("--me", type=click.IntRange(min=0), help="Which peer to be.")
@click.option("--warm", is_flag=True, help="Fork peers on request (for the launcher; see peers.warm).")
def main(run: Path | None, me: int | None, warm: bool) -> None:
    """Run one peer of a run that `p2pfl launch` has made."""
    if warm:
        # Kernels must not start threads before the fork, so the limit comes before torch.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        from peers.warm import serve

        # Not sys.exit: what was frozen before the fork is never collected, and extension modules would call
        # that a leak on their way out.
        os._exit(serve())
    if run is None or me is None:
        raise click.UsageError("give --run FOLDER and --me N")
    try:
        folder = RunFolder.open(run.parent if run.name == "run.yaml" else run)
        if not folder.peer(me).root.is_dir():
            raise click.UsageError(f"{folder.root} has no peer {me}")
    except P2pflError as error:
        raise click.ClickException(str(error)) from None
    from peers.runtime import run_peer

    sys.exit(run_peer(folder, me, last_words=lambda text: click.echo(text, err=True)))


if __name__ == "__main__":
    main()
