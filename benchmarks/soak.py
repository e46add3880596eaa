"""Launch 64 peers for 2,000 rounds and kill one of them every 30 seconds: does anything grow?

    python -m benchmarks.soak                                  # about half an hour on two cores
    python -m benchmarks.soak --rounds 300 --every 10
    python -m benchmarks.soak --set synchrony=none --rounds 4000 --minutes 30       # rounds that do not wait

Samples memory, open descriptors, disk and progress, fits a line to each, and compares the digests with those of
`p2pfl simulate`, with `--replay` of the run if its rounds did not wait. Fails if a digest differs, or if a
restarted peer could not repeat its order (docs/synchrony.md). Samples count until the first peer has finished.

A slope is per 1,000 rounds, with its 95 % confidence interval, over the means of equal parts of the run, because
single samples depend on each other. A restarted peer holds 1 to 2 MB more than before, but not more with each
restart; hence the row of the peers that were never killed. Of these only private memory counts: of pages that forks
share, each has a larger part when another one ends.
"""

from __future__ import annotations

import json
import math
import random
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import click
import psutil
from scipy import stats

from benchmarks.bench import procfs
from benchmarks.bench.measuring import kill_tree, scratch_folder
from benchmarks.bench.runs import light
from benchmarks.scenarios import COMMAND, simulate, start, tail, waits
from launcher.facts.digests import compare
from launcher.facts.processes import find_process
from p2pfl import PeerId
from p2pfl.run_folder.folder import PeerFolder, RunFolder

PARTS = 20
"""Parts of the run whose means are fitted."""
WARM_UP = 0.1
"""Fraction of the rounds before the first sample that counts."""
RECORDS = ("metrics.jsonl", "order.jsonl", "peer.log", "output.log")
"""Files that grow by a line or so a round, as they should."""


class Sample(NamedTuple):
    """One look at the run.

    Attributes:
        seconds: since the launch.
        round: mean over peers.
        memory: PSS of all processes, MB.
        never_killed: mean private memory of the peers that were never killed, MB.
        descriptors: open in all peers.
        disk: MB of the run folder, without RECORDS.
        finished: peers that have finished.
    """

    seconds: float
    round: float
    memory: float
    never_killed: float
    descriptors: float
    disk: float
    finished: float


@dataclass(frozen=True)
class Slope:
    """A line fitted to a figure over the rounds: its mean, the slope per 1,000 rounds, and half its interval."""

    mean: float
    slope: float
    margin: float

    @classmethod
    def fit(cls, rounds: Sequence[float], values: Sequence[float]) -> Slope:
        line = stats.linregress([t / 1000 for t in rounds], values)
        quantile = float(stats.t.ppf(0.975, len(rounds) - 2))
        return cls(fmean(values), float(line.slope), quantile * float(line.stderr))


def means_of_parts(samples: Sequence[Sample], parts: int) -> list[Sample]:
    """Means over ``parts`` equal ranges of rounds; ranges without a sample are left out."""
    first, last = samples[0].round, samples[-1].round
    width = (last - first) / parts
    found = []
    for part in range(parts):
        low, high = first + part * width, first + (part + 1) * width
        if inside := [each for each in samples if low <= each.round < high]:
            found.append(Sample(*map(fmean, zip(*inside, strict=True))))
    return found


def slopes(samples: Sequence[Sample], rounds: int) -> dict[str, Slope]:
    """The slope of each figure after the warm-up, over the rounds."""
    parts = means_of_parts([each for each in samples if each.round >= WARM_UP * rounds], PARTS)
    reached = [each.round for each in parts]
    never_killed = [each.never_killed for each in parts if not math.isnan(each.never_killed)]
    found = {
        "memory of all processes, MB": Slope.fit(reached, [each.memory for each in parts]),
        "private memory of a peer never killed, MB": Slope.fit(reached[: len(never_killed)], never_killed),
        "open descriptors of all peers": Slope.fit(reached, [each.descriptors for each in parts]),
        "disk without records, MB": Slope.fit(reached, [each.disk for each in parts]),
    }
    pairs = list(pairwise(parts))
    times = [1000 * (after.seconds - before.seconds) / (after.round - before.round) for before, after in pairs]
    middles = [(before.round + after.round) / 2 for before, after in pairs]
    return {**found, "ms a round": Slope.fit(middles, times)}


def look(launcher: int, folder: RunFolder, killed: set[PeerId], began: float) -> Sample:
    descriptors, finished, rounds, memory = 0, 0, [], []
    for files in folder.peers():
        status = files.status()
        rounds.append(status.t or 0 if status else 0)
        finished += bool(status and status.phase == "finished")
        if process := find_process(folder, files.peer):
            with suppress(psutil.Error):
                descriptors += process.num_fds()
            if files.peer not in killed:
                with suppress(psutil.Error):
                    memory.append(process.memory_full_info().uss / 1e6)
    total = sum(map(procfs.pss, procfs.tree(launcher))) / 1e6
    never_killed = fmean(memory) if memory else math.nan
    disk = size(folder.root) / 1e6
    return Sample(time.monotonic() - began, fmean(rounds), total, never_killed, descriptors, disk, finished)


def size(root: Path) -> int:
    """Allocated bytes of the files in a folder, without RECORDS."""
    total = 0
    for path in root.rglob("*"):
        with suppress(OSError):
            total += 0 if path.name in RECORDS else path.lstat().st_blocks * 512
    return total


def kill_one(folder: RunFolder, chance: random.Random) -> PeerId | None:
    """Kill (SIGKILL) a peer that is in the middle of its rounds; the launcher restarts it."""
    running = [files.peer for files in folder.peers() if _is_running(files)]
    victim = chance.choice(running) if running else None
    process = find_process(folder, victim) if victim is not None else None
    if process is None:
        return None
    with suppress(psutil.NoSuchProcess):
        process.kill()
    return victim


def _is_running(files: PeerFolder) -> bool:
    status = files.status()
    return status is not None and status.phase not in ("starting", "finished") and files.result() is None


def same_as_simulated(folder: RunFolder) -> bool:
    """Whether a simulation ends with the digests of a finished run, whose order it repeats if there is one."""
    replay = [] if waits(folder) else ["--replay", folder.root]
    return compare(folder, simulate(folder.run_file, *replay)).same


def not_repeated(folder: RunFolder) -> int:
    """How often a restarted peer could not take what it had taken before, by the logs."""
    logs = (path.read_text(errors="replace") for files in folder.peers() for path in files.root.glob("peer.log*"))
    return sum(log.count("order not repeated") for log in logs)


@click.command(help=__doc__)
@click.option("--peers", default=64, show_default=True)
@click.option("--rounds", default=2000, show_default=True)
@click.option("--every", default=30.0, show_default=True, help="Seconds between two kills.")
@click.option("--minutes", type=float, help="Kill nobody after so many minutes; default: kill to the end.")
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Change a key of the run file.")
@click.option("--sample", default=5.0, show_default=True, help="Seconds between two samples.")
@click.option("--seed", default=1, show_default=True, help="Seed of which peers are killed.")
@click.option("--samples", "record", type=click.Path(path_type=Path), help="Also write the samples, as JSON lines.")
def main(
    peers: int,
    rounds: int,
    every: float,
    minutes: float | None,
    sets: tuple[str, ...],
    sample: float,
    seed: int,
    record: Path | None,
) -> None:
    tree = light(peers, {"name": "regular", "degree": 4}, rounds)
    tree["transport"] = {"give_up": 120, "deadline": 600}  # a restarted peer must not be declared dead
    tree["eval_every"] = max(1, int(WARM_UP * rounds) // 2)  # the first evaluation takes memory: during the warm-up
    chance, samples, kills = random.Random(seed), list[Sample](), list[PeerId]()
    with scratch_folder() as root:
        (root / "run.yaml").write_text(json.dumps(tree))
        began = time.monotonic()
        next_kill, next_sample = began + every, began
        last_kill = math.inf if minutes is None else began + 60 * minutes
        changes = [word for change in sets for word in ("--set", change)]
        process = start([*COMMAND, "launch", "run.yaml", "--run-dir", "run", *changes], root / "output", root)
        try:
            while process.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.1, min(next_kill, next_sample) - time.monotonic()))
                exists = (root / "run" / "run.yaml").exists()
                if exists and time.monotonic() >= next_sample:
                    next_sample = time.monotonic() + sample
                    samples.append(look(process.pid, RunFolder.open(root / "run"), set(kills), began))
                    if record:
                        with record.open("a") as lines:
                            lines.write(json.dumps(samples[-1]._asdict()) + "\n")
                if exists and time.monotonic() >= next_kill:
                    next_kill = next_kill + every if next_kill + every <= last_kill else math.inf
                    victim = kill_one(RunFolder.open(root / "run"), chance)
                    kills += [] if victim is None else [victim]
        finally:
            kill_tree(process)
        seconds = time.monotonic() - began
        if process.returncode:
            raise click.ClickException(tail(root / "output"))
        folder = RunFolder.open(root / "run")
        same, lost = same_as_simulated(folder), not_repeated(folder)
    of = len(set(kills))
    click.echo(
        f"{peers} peers, {rounds} rounds, {len(kills)} kills of {of}, {seconds:.0f} s, {len(samples)} samples\n"
    )
    click.echo("| figure | mean | slope per 1,000 rounds | 95 % interval |\n|---|---:|---:|---|")
    for name, line in slopes([each for each in samples if not each.finished], rounds).items():
        low, high = line.slope - line.margin, line.slope + line.margin
        click.echo(f"| {name} | {line.mean:,.1f} | {line.slope:+.2f} | {low:+.2f} to {high:+.2f} |")
    click.echo(f"\nbit-identical to the simulation: {'yes' if same else 'NO'}")
    if not same:
        raise click.ClickException("the digests differ")
    if lost:
        raise click.ClickException(f"an order was not repeated: {lost} times, by the logs of the peers")


if __name__ == "__main__":
    main()
