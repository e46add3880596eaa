"""Runs with faults on purpose, beside calm ones: do they end with the same bits, and what does it cost?

    python -m benchmarks.chaos kills --seeds 10     # every peer is killed twice; a MAPL and a DFML mesh of twenty
    python -m benchmarks.chaos dead                 # one of twenty dies for good
    python -m benchmarks.chaos parted               # the mesh falls into two halves for five rounds

Run files are those of topologies/chaos/. Prints Markdown tables. Times are of whole launches, start-up included.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median
from typing import Any

import click

from launcher.digests import compare
from p2pfl import metrics
from p2pfl.runfolder import RunFolder

FILES = Path(__file__).parent.parent / "topologies" / "chaos"


def p2pfl(command: str, file: str, folder: Path, *sets: str) -> tuple[RunFolder, dict[str, Any]]:
    """Run it; the run folder and its summary. Exit code 1 (somebody did not finish) is for the caller to judge."""
    arguments = [command, str(FILES / f"{file}.yaml"), "--run-dir", str(folder), "--json"]
    arguments += [part for assignment in sets for part in ("--set", assignment)]
    done = subprocess.run([sys.executable, "-m", "launcher.cli", *arguments], capture_output=True, text=True)
    if done.returncode not in (0, 1) or not done.stdout:
        raise click.ClickException(f"p2pfl {' '.join(arguments)}: exit code {done.returncode}\n{done.stderr}")
    return RunFolder.open(folder), json.loads(done.stdout.splitlines()[-1])


@click.group(help=__doc__)
def main() -> None:
    return


@main.command()
@click.option("--seeds", default=10, show_default=True, help="Of the chaos; the run's stays.")
@click.option("--file", "files", multiple=True, default=("killed20", "killed20-dfml"), show_default=True)
@click.option("--calm", default=3, show_default=True, help="Launches without chaos, in between.")
def kills(seeds: int, files: tuple[str, ...], calm: int) -> None:
    """Every peer is killed twice, for several seeds of the chaos."""
    click.echo("| run file | chaos.seed | kills | rounds done twice | seconds | ratio to calm | same bits |")
    click.echo("|---|---|---|---|---|---|---|")
    unlike = 0
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
                unlike += not same
                blows = sum(len(place.injected()) for place in folder.peers())
                again = sum(computed_again(folder))
                row = f"| {file} | {seed} | {blows} | {again} | {summary['seconds']:.0f} | RATIO | {yes(same)} |"
                rows.append((row, summary["seconds"]))
            usual = median(calm_seconds)
            for row, seconds in rows:
                click.echo(row.replace("RATIO", f"{seconds / usual:.2f}"))
            shown = ", ".join(f"{seconds:.0f}" for seconds in calm_seconds)
            ratio = fmean(seconds for _, seconds in rows) / usual
            click.echo(f"| {file} | calm | 0 | 0 | {shown} | mean {ratio:.2f} | yes |")
    if unlike:
        raise click.ClickException(f"{unlike} runs ended with other bits")


def computed_again(folder: RunFolder) -> Iterator[int]:
    """Rounds that each peer had to compute again after its crashes, from what its log says."""
    for place in folder.peers():
        done = again = 0
        for line in place.log.read_text(encoding="utf-8").splitlines():
            what = line.split(maxsplit=2)[2]
            if what.startswith("round ") and " | " in what:
                t = int(what.split()[1])
                again += t < done
                done = max(done, t + 1)
        yield again


def yes(value: object) -> str:
    return "yes" if value else "NO"


@main.command()
def dead() -> None:
    """One of twenty peers dies in round 5, for good."""
    with tempfile.TemporaryDirectory() as root:
        _, calm = p2pfl("launch", "dead20", Path(root) / "calm", "chaos={}")
        _, summary = p2pfl("launch", "dead20", Path(root) / "dead")
        _, calm_again = p2pfl("launch", "dead20", Path(root) / "again", "chaos={}")
        others = [peer for peer in summary["peers"] if peer["peer"] != 7]
        finished = sum(peer["ended"] == "finished" and peer["rounds_done"] == summary["rounds"] for peer in others)
        naming = sum("peer 7 is gone" in Path(peer["log"]).read_text(encoding="utf-8") for peer in others)
        missing = sum(peer["missing"] for peer in others)
    usual = fmean((calm["seconds"], calm_again["seconds"]))
    click.echo(f"{finished} of the other 19 finished all rounds; {naming} of their logs name peer 7")
    click.echo(f"messages missed: {missing}")
    click.echo(f"{summary['seconds']:.1f} s, calm {calm['seconds']:.1f} and {calm_again['seconds']:.1f} s:")
    click.echo(f"delay {summary['seconds'] - usual:.1f} s, of which transport.give_up is 10")


@main.command()
def parted() -> None:
    """Two halves that do not reach each other in rounds 6 to 10: what each of them did."""
    with tempfile.TemporaryDirectory() as root:
        folder, summary = p2pfl("launch", "parted20", Path(root) / "parted")
        rounds: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
        left_out = [0, 0]
        for place in folder.peers():
            half = place.peer // 10
            result = place.result()
            left_out[half] += result.left_out if result else 0
            for record in metrics.read(place.metrics):
                rounds[record["t"], half].append(record)
    click.echo(f"finished: {yes(summary['finished'])}; rounds left out by peers of each half: {left_out}\n")
    click.echo("| round | half | peers | prototypes from own half | from the other | missing | seconds | accuracy |")
    click.echo("|---|---|---|---|---|---|---|---|")
    for (t, half), records in sorted(rounds.items()):
        own = other = missing = 0
        for record in records:
            for sender, kinds in record["in"].items():
                count = kinds.get("Prototypes", [0])[0]
                own, other = own + count * (int(sender) // 10 == half), other + count * (int(sender) // 10 != half)
            missing += sum(map(len, record["missing"].values()))
        seconds = fmean(record["seconds"]["total"] for record in records)
        known = [record["personal"]["accuracy"] for record in records if record["personal"]]
        accuracy = f"{100 * fmean(known):.1f} %" if known else ""
        who = "0-9" if half == 0 else "10-19"
        click.echo(f"| {t} | {who} | {len(records)} | {own} | {other} | {missing} | {seconds:.1f} | {accuracy} |")


if __name__ == "__main__":
    main()
