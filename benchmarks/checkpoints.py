"""What does it cost that a crash is invisible?

    python benchmarks/checkpoints.py             # about three minutes on two cores; run folders are in $TMPDIR

Runs of real processes, MAPL (prototypes and heads) and DFML (whole models), with a checkpoint after each round, after
each tenth, and none but the last. The three take turns, in another order each time; each turn gives one ratio to the
run without, so that whatever else the machine does falls on all of them. Seconds are those of so many rounds: from
when the last peer has done its first one until the last peer has done its last one.

Bytes are means over peers, at the end of so many rounds: of the messages that a peer keeps because a neighbour
might ask for them again, and of its two checkpoints on disk, which hold them too. A save is the time of one more
checkpoint of that state, one peer after the other. All digests must be the same.
"""

from __future__ import annotations

import io
import tempfile
from datetime import datetime
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any

import click
from rich.console import Console

from launcher.local import follow, threads
from launcher.logs import LogFile
from launcher.prepare import Order
from launcher.warm import WarmProcess
from p2pfl import checkpoint
from p2pfl.config import from_dict
from p2pfl.runfolder import RunFolder

EVERY = (1, 10, None)

BODIES: dict[str, dict[str, Any]] = {
    "mapl": {
        "data": {
            "dataset": "digits",
            "partition": {"name": "clusters", "clusters": 2, "per_class": 14, "test_per_class": 15},
            "augment": "mapl",
        },
        "algorithm": {"name": "mapl", "warmup": 10, "batch": 32, "projector_hidden": 128},
    },
    "dfml": {
        "data": {"dataset": "digits", "partition": {"name": "dirichlet-train", "beta": 0.5, "validation": 0.2}},
        "algorithm": {
            "name": "dfml",
            "batch": 32,
            "lr": 0.01,
            "mutual_epochs": 1,
            "period": 5,
            "period_increment": 5,
        },
    },
}


def play(name: str, every: int | None, peers: int, rounds: int, warm: WarmProcess, root: Path) -> RunFolder:
    run = from_dict(
        {
            "name": name,
            "rounds": rounds,
            "peers": peers,
            "models": "tiny4",
            "device": "cpu",
            "eval_every": 5,
            "checkpoint_every": every or rounds + 1,
            **BODIES[name],
        }
    )
    folder = Order(Path(), run_dir=root).prepare(run)
    crew = follow(folder, range(peers), run, warm, Console(file=io.StringIO()), "never")
    if set(crew.codes.values()) != {0}:
        raise click.ClickException(f"peers have failed: {crew.codes} {crew.words}")
    return folder


def seconds(folder: RunFolder) -> float:
    """From the last peer's round 0 to the last peer's last round, by their logs."""
    begun, ended = [], []
    for place in folder.peers():
        rounds = [entry.stamp for entry in LogFile(place.peer, place.log).read() if "INFO    round " in entry.text]
        begun.append(rounds[0])
        ended.append(rounds[-1])
    return (datetime.fromisoformat(max(ended)) - datetime.fromisoformat(max(begun))).total_seconds()


def sizes(folder: RunFolder) -> tuple[float, float, float]:
    """Bytes of kept messages and of checkpoints on disk, and seconds that it takes to save one; means over peers."""
    kept, disk, took = [], [], []
    for place in folder.peers():
        state = checkpoint.read(place.checkpoint)
        sent = state["endpoint"]["sent"]
        kept.append(sum(frame.numel() for frame in sent["frames"]) + sent["headers"].numel())
        disk.append(sum(path.stat().st_size for path in (place.checkpoint, checkpoint.previous(place.checkpoint))))
        began = perf_counter()
        checkpoint.save(place.checkpoint, state)
        took.append(perf_counter() - began)
    return fmean(kept), fmean(disk), fmean(took)


def digests(folder: RunFolder) -> tuple[str, ...]:
    return tuple(result.digest for place in folder.peers() if (result := place.result()) is not None)


@click.command(help=__doc__)
@click.option("--peers", default=10, show_default=True)
@click.option("--rounds", default=20, show_default=True)
@click.option("--turns", default=2, show_default=True)
@click.option("--body", "bodies", multiple=True, type=click.Choice([*BODIES]), default=[*BODIES], show_default=True)
def main(peers: int, rounds: int, turns: int, bodies: tuple[str, ...]) -> None:
    click.echo("| body | checkpoint_every | seconds | ratio to none | kept messages | checkpoints on disk | a save |")
    click.echo("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as root, WarmProcess(threads(1)) as warm:
        for name in bodies:
            times: dict[int | None, list[float]] = {every: [] for every in EVERY}
            seen = set[tuple[str, ...]]()
            for turn in range(turns):
                for every in EVERY[turn % 3 :] + EVERY[: turn % 3]:
                    folder = play(name, every, peers, rounds + 1, warm, Path(root) / f"{name}-{turn}-{every}")
                    times[every].append(seconds(folder))
                    seen.add(digests(folder))
            if len(seen) != 1:
                raise click.ClickException(f"{name}: runs have ended with different bits")
            for every in EVERY:
                ratios = [mine / none for mine, none in zip(times[every], times[None], strict=True)]
                spread = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if every else "1"
                folder = play(name, every, peers, rounds, warm, Path(root) / f"{name}-{every}")
                kept, disk, save = sizes(folder)
                mebibytes = (f"{size / 2**20:.2f} MiB" for size in (kept, disk))
                line = (name, str(every or "none"), f"{median(times[every]):.1f}", spread, *mebibytes)
                click.echo(f"| {' | '.join(line)} | {1000 * save:.0f} ms |")


if __name__ == "__main__":
    main()
