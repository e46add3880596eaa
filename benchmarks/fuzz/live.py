"""Attacks on peers in the middle of a run."""

from __future__ import annotations

import asyncio
import json
import multiprocessing  # noqa: TID251  # forks or communicates with its children
import os
import random
import re
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import psutil
import torch

from benchmarks.fuzz.attackers import ATTACKER, ATTACKS, PEERS, MaliciousNeighbor, Strangers
from benchmarks.fuzz.messages import RUN_ID
from p2pfl.run_file.load import from_dict
from p2pfl.run_file.run import Run
from p2pfl.run_folder.folder import RunFolder
from p2pfl.session.build import load_data
from p2pfl.simulation.simulate import simulate
from peers.device import slots_on
from peers.runtime import run_peer
from peers.slots import HostSlot

NEVER = 1 << 40
LIMIT = 600
"""Seconds that a run under attack may take."""
RUN: dict[str, Any] = {
    "name": "fuzzed",
    "seed": 3,
    "rounds": 40,
    "peers": PEERS + 1,
    "graph": "complete",
    "data": {
        "dataset": "digits",
        "partition": {"name": "clusters", "clusters": 2, "per_class": 8, "test_per_class": 5},
    },
    "models": "tiny-mixer",
    "algorithm": {"name": "mapl", "batch": 16, "warmup": 4},
    "joins_at": {ATTACKER: 1},
    "transport": {"deadline": 300, "give_up": 60, "max_message": 1 << 22},
    "device": "cpu",
}


@dataclass
class Outcome:
    """How one run under attack ended.

    Attributes:
        frames: frames sent, by ATTACKS.
        memory: resident bytes (RSS) of each peer: when the attack began, then every half second.
        differing: peers whose result differs from the simulation's.
        refused: log lines about refused or dropped messages.
    """

    frames: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    memory: dict[int, list[int]] = field(default_factory=dict)
    codes: list[int | None] = field(default_factory=list)
    differing: list[int] = field(default_factory=list)
    refused: int = 0


def live_run(rounds: int = RUN["rounds"]) -> Run:
    run = from_dict({**RUN, "rounds": rounds})
    run.file.joins_at[ATTACKER] = NEVER  # not allowed in a run file
    return run


def simulate_run(run: Run, root: Path) -> RunFolder:
    """Simulate the run without attackers, in a new process, because peers are forked from this one."""
    folder = _prepare(run, root)
    process = multiprocessing.get_context("fork").Process(target=simulate, args=(run, folder))
    process.start()
    process.join()
    assert process.exitcode == 0
    return folder


def _prepare(run: Run, root: Path) -> RunFolder:
    folder = RunFolder.create(root, range(run.peers))
    folder.write_info({"id": RUN_ID})
    folder.run_file.write_text(run.to_yaml())
    return folder


def attack_run(run: Run, root: Path, expected: RunFolder, seed: int) -> Outcome:
    """Run the peers under attack. No peer computes before all attackers have sent something.

    Peers that have not finished after ``LIMIT`` seconds are killed, as they are if the attack fails.
    """
    folder, data = _prepare(run, root), load_data(run)
    count, slots_folder = slots_on(run.file, torch.device("cpu"))
    slots = [HostSlot(folder.slots, count, slots_folder) for _ in range(count)]
    for slot in slots:
        asyncio.run(slot.acquire())
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=_be_peer, args=(folder, me, run, data, slots)) for me in range(PEERS)]
    outcome = Outcome()
    chance = random.Random(seed)
    began = time.monotonic()
    for process in processes:
        process.start()
    neighbor = MaliciousNeighbor(folder, run, chance)
    strangers = Strangers(folder, chance)
    next_measurement = 0.0
    try:
        while any(process.is_alive() for process in processes) and time.monotonic() - began < LIMIT:
            neighbor.attack(outcome.frames)
            strangers.attack(outcome.frames)
            if slots and all(outcome.frames[name] for name in ATTACKS):
                for slot in slots:
                    slot.release()
                slots.clear()
            if time.monotonic() > next_measurement:
                next_measurement = time.monotonic() + 0.5
                for me, process in enumerate(processes):
                    with suppress(psutil.Error):
                        memory = psutil.Process(process.pid).memory_info().rss
                        if memory:
                            outcome.memory.setdefault(me, []).append(memory)
    finally:
        neighbor.close()
        strangers.close()
        for process in processes:
            process.kill()
            process.join()
    outcome.seconds = time.monotonic() - began
    outcome.codes = [process.exitcode for process in processes]
    for me in range(PEERS):
        found, right = folder.peer(me).result(), expected.peer(me).result()
        assert right is not None
        if found is None or (found.digest, found.rounds_done) != (right.digest, right.rounds_done):
            outcome.differing.append(me)
        log = folder.peer(me).log.read_text(encoding="utf-8")
        outcome.refused += len(
            re.findall(r"WARNING (?:message .*(?:dropped|refused)|(?:Hello|connection) refused)", log)
        )
    return outcome


def _be_peer(folder: RunFolder, me: int, run: Run, data: Any, inherited: list[HostSlot]) -> None:
    for slot in inherited:
        slot.release()  # closes this process's copy: the parent still holds the slot
    os._exit(run_peer(folder, me, run, data))


@click.command()
@click.option("--seconds", default=60, show_default=True, help="Start no further run after this many seconds.")
@click.option("--rounds", default=RUN["rounds"], show_default=True, help="Rounds of each run.")
@click.option(
    "--seed", default=1, show_default=True, help="Seed of the first run's attackers; each further run adds 1."
)
def live(seconds: int, rounds: int, seed: int) -> None:
    """Attack peers in the middle of a run."""
    torch.set_num_threads(1)
    run = live_run(rounds)
    columns = ["seed", "seconds", *ATTACKS, "frames/s", "refusals in the logs", "RSS at first, MB", "maximum"]
    columns += ["at the end", "bit-identical"]
    click.echo(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    failed, total, took = 0, 0, 0.0
    with tempfile.TemporaryDirectory() as root:
        expected = simulate_run(run, Path(root) / "simulated")
        while took < seconds:
            outcome = attack_run(run, Path(root) / f"{seed}", expected, seed)
            total, took = total + sum(outcome.frames.values()), took + outcome.seconds
            passed = not outcome.differing and outcome.codes == [0] * PEERS
            failed += not passed
            counts = [outcome.frames[name] for name in ATTACKS]
            memory = [
                max(choose(values) for values in outcome.memory.values()) >> 20
                for choose in (lambda v: v[0], max, lambda v: v[-1])
            ]
            numbers = [*counts, round(sum(counts) / outcome.seconds), outcome.refused, *memory]
            row = [seed, f"{outcome.seconds:.0f}", *numbers, "yes" if passed else json.dumps(outcome.differing)]
            click.echo("| " + " | ".join(map(str, row)) + " |")
            if not passed:
                click.echo("\n".join(_ends_of_logs(Path(root) / f"{seed}")))
            seed += 1
    click.echo(f"\n{total} frames, {took:.0f} s, {total / took:.0f} frames/s; {failed} runs with findings")
    if failed:
        raise click.ClickException(f"{failed} runs failed or differ from the simulation")


def _ends_of_logs(root: Path) -> list[str]:
    return [f"{log}: {line}" for log in root.glob("peers/*/peer.log") for line in log.read_text().splitlines()[-8:]]
