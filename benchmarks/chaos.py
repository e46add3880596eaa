"""Compare runs with injected faults to fault-free ones: are they bit-identical, and what does it cost?

    python -m benchmarks.chaos kills --seeds 10     # every peer is killed twice; 20 peers with MAPL and with DFML
    python -m benchmarks.chaos dead                 # one of 20 peers dies and is not restarted
    python -m benchmarks.chaos parted               # a partition separates two halves for five rounds

Run files are in topologies/chaos/. Prints Markdown tables. Times are of whole launches, including start-up.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median
from typing import Any

import click

from benchmarks.scenarios import COMMAND
from launcher.facts.digests import compare
from p2pfl.run_folder.folder import RunFolder
from p2pfl.session import metrics

FILES = Path(__file__).parent.parent / "topologies" / "chaos"
ROUND_DONE = re.compile(r" INFO +round done t=(\d+)")


def p2pfl(command: str, file: str, folder: Path, *sets: str) -> tuple[RunFolder, dict[str, Any]]:
    """Run a command on a run file; return the run folder and its summary.

    Exit code 1 (a peer did not finish) is left to the caller.
    """
    arguments = [command, str(FILES / f"{file}.yaml"), "--run-dir", str(folder), "--json"]
    arguments += [part for assignment in sets for part in ("--set", assignment)]
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True)
    if done.returncode not in (0, 1) or not done.stdout:
        raise click.ClickException(f"p2pfl {' '.join(arguments)}: exit code {done.returncode}\n{done.stderr}")
    return RunFolder.open(folder), json.loads(done.stdout.splitlines()[-1])


@click.group(help=__doc__)
def main() -> None:
    return


@main.command()
@click.option(
    "--seeds", default=10, show_default=True, help="Number of seeds of the faults; the run's seed does not change."
)
@click.option("--file", "files", multiple=True, default=("killed20", "killed20-dfml"), show_default=True)
@click.option("--calm", default=3, show_default=True, help="Fault-free launches in between.")
def kills(seeds: int, files: tuple[str, ...], calm: int) -> None:
    """Kill every peer twice, for several seeds of the faults."""
    click.echo("| run file | chaos.seed | kills | rounds repeated | seconds | ratio to calm | same bits |")
    click.echo("|---|---|---|---|---|---|---|")
    different = unharmed = 0
    for file in files:
        with tempfile.TemporaryDirectory() as root:
            expected, _ = p2pfl("simulate", file, Path(root) / "simulated")
            calm_seconds: list[float] = []
            rows: list[tuple[str, float]] = []
            every = max(1, seeds // calm)
            for seed in range(seeds):
                if seed % every == 0 and len(calm_seconds) < calm:
                    folder, summary = p2pfl("launch", file, Path(root) / f"calm{seed}", "chaos={}")
                    assert compare(folder, expected).same
                    calm_seconds.append(summary["seconds"])
                folder, summary = p2pfl("launch", file, Path(root) / f"chaos{seed}", f"chaos.seed={seed}")
                same = summary["finished"] and compare(folder, expected).same
                different += not same
                kills = sum(len(files.injected()) for files in folder.peers())
                unharmed += not kills
                repeated = sum(repeated_rounds(folder))
                row = f"| {file} | {seed} | {kills} | {repeated} | {summary['seconds']:.0f} | RATIO | {yes(same)} |"
                rows.append((row, summary["seconds"]))
            calm_median = median(calm_seconds)
            for row, seconds in rows:
                click.echo(row.replace("RATIO", f"{seconds / calm_median:.2f}"))
            shown = ", ".join(f"{seconds:.0f}" for seconds in calm_seconds)
            ratio = fmean(seconds for _, seconds in rows) / calm_median
            click.echo(f"| {file} | calm | 0 | 0 | {shown} | mean {ratio:.2f} | yes |")
    if different:
        raise click.ClickException(f"{different} runs differ from the simulation")
    if unharmed:
        raise click.ClickException(f"in {unharmed} runs no peer was killed: they show nothing")


def repeated_rounds(folder: RunFolder) -> Iterator[int]:
    """Count the rounds that each peer repeated after its crashes, from its log."""
    for files in folder.peers():
        done = repeated = 0
        for number in ROUND_DONE.findall(files.log.read_text(encoding="utf-8")):
            repeated += int(number) < done
            done = max(done, int(number) + 1)
        yield repeated


def yes(value: object) -> str:
    return "yes" if value else "NO"


@main.command()
def dead() -> None:
    """Kill one of 20 peers in round 5 and do not restart it."""
    with tempfile.TemporaryDirectory() as root:
        _, calm = p2pfl("launch", "dead20", Path(root) / "calm", "chaos={}")
        _, summary = p2pfl("launch", "dead20", Path(root) / "dead")
        _, calm_again = p2pfl("launch", "dead20", Path(root) / "again", "chaos={}")
        others = [peer for peer in summary["peers"] if peer["peer"] != 7]
        finished = sum(peer["ended"] == "finished" and peer["rounds_done"] == summary["rounds"] for peer in others)
        naming = sum(
            "neighbor declared dead peer=7:" in Path(peer["log"]).read_text(encoding="utf-8") for peer in others
        )
        missing = sum(peer["missing"] for peer in others)
    calm_mean = fmean((calm["seconds"], calm_again["seconds"]))
    click.echo(f"{finished} of the other 19 peers finished all rounds; {naming} of their logs declare peer 7 dead")
    click.echo(f"messages missing: {missing}")
    click.echo(f"{summary['seconds']:.1f} s; fault-free {calm['seconds']:.1f} and {calm_again['seconds']:.1f} s")
    click.echo(f"delay {summary['seconds'] - calm_mean:.1f} s, of which transport.give_up is 10 s")
    if finished < len(others):
        raise click.ClickException(f"{len(others) - finished} of the other peers did not finish")


@main.command()
def parted() -> None:
    """Separate two halves in rounds 6 to 10 and show what each of them did."""
    with tempfile.TemporaryDirectory() as root:
        folder, summary = p2pfl("launch", "parted20", Path(root) / "parted")
        rounds: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
        skipped_rounds = [0, 0]
        for files in folder.peers():
            half = files.peer // 10
            result = files.result()
            skipped_rounds[half] += result.skipped_rounds if result else 0
            for record in metrics.read(files.metrics):
                rounds[record["t"], half].append(record)
    click.echo(f"finished: {yes(summary['finished'])}; rounds skipped by the peers of each half: {skipped_rounds}\n")
    click.echo(
        "| round | half | peers | prototypes from the same half | from the other | missing | seconds | accuracy |"
    )
    click.echo("|---|---|---|---|---|---|---|---|")
    for (t, half), records in sorted(rounds.items()):
        same = other = missing = 0
        for record in records:
            for sender, kinds in record["received"].items():
                count = kinds.get("Prototypes", [0])[0]
                same += count * (int(sender) // 10 == half)
                other += count * (int(sender) // 10 != half)
            missing += sum(map(len, record["missing"].values()))
        seconds = fmean(record["seconds"]["total"] for record in records)
        accuracies = [record["personal"]["accuracy"] for record in records if record["personal"]]
        accuracy = f"{100 * fmean(accuracies):.1f} %" if accuracies else ""
        peers = "0-9" if half == 0 else "10-19"
        click.echo(f"| {t} | {peers} | {len(records)} | {same} | {other} | {missing} | {seconds:.1f} | {accuracy} |")
    if not summary["finished"]:
        raise click.ClickException("not all peers finished")


if __name__ == "__main__":
    main()
