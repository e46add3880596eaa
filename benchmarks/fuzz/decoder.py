"""Fuzzing of the decoder, guided by coverage."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click

from benchmarks.fuzz.messages import VALID, encode_valid, is_accepted, mutate, pack, unpack
from p2pfl.messaging import control, wire
from p2pfl.messaging.schema import Layout, MessageSchema

INSTRUMENTED = {
    control: ("unpack", "_read"),
    wire: ("check", "_tensor", "assemble", "take_apart"),
}
"""Functions of modules whose coverage guides the mutations."""


@click.command()
@click.option("--frames", default=0, help="Stop after about this many frames.")
@click.option("--seconds", default=0, help="Stop after this many seconds.")
@click.option("--seed", default=1, show_default=True)
def decoder(frames: int, seconds: int, seed: int) -> None:
    """Fuzz the decoder, guided by coverage."""
    runs = frames // 3 or -1  # a message has about three frames
    with tempfile.TemporaryDirectory() as corpus:
        for number, body in enumerate(VALID):
            (Path(corpus) / f"valid{number}").write_bytes(pack(encode_valid(body)))
        command = [sys.executable, "-m", "benchmarks.fuzz", "guided", "--"]
        command += [f"-runs={runs}", f"-max_total_time={seconds}", f"-seed={seed}"]
        command += ["-max_len=4096", "-rss_limit_mb=4096", f"-artifact_prefix={corpus}/", corpus]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise click.ClickException(f"finding:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    first, last = re.findall(r"#(\d+)\s+(?:INITED|DONE)\s+cov: (\d+) ft: (\d+).*?rss: (\d+)Mb", done.stderr)
    (count,) = re.findall(r"Done (\d+) runs in (\d+) second", done.stderr)
    counts = re.findall(r"^messages (\d+) frames (\d+) accepted (\d+)", done.stdout, re.MULTILINE)[-1]
    click.echo(f"messages {counts[0]}, frames {counts[1]}, messages accepted {counts[2]}; no finding")
    click.echo(f"{int(counts[1]) / max(1, int(count[1])):.0f} frames/s, {count[1]} s")
    click.echo(f"edges reached in control and wire: {last[1]}, by the valid messages alone {first[1]}")
    click.echo(f"memory {first[3]} MB before, {last[3]} MB after")


@click.command(hidden=True, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1)
def guided(arguments: Sequence[str]) -> None:
    """Run libFuzzer in this process; it does not return."""
    import atheris

    for module, names in INSTRUMENTED.items():
        for name in names:
            setattr(module, name, atheris.instrument_func(getattr(module, name)))
    wire.Plan.message = atheris.instrument_func(wire.Plan.message)  # type: ignore[method-assign]
    Layout.mismatch = atheris.instrument_func(Layout.mismatch)  # type: ignore[method-assign]
    MessageSchema.match = atheris.instrument_func(MessageSchema.match)  # type: ignore[method-assign]
    count: Counter[str] = Counter()

    def test_one(data: bytes) -> None:
        frames = unpack(data)
        count["messages"] += 1
        count["frames"] += len(frames)
        count["accepted"] += is_accepted(frames)
        if count["messages"] % 1000 == 0:  # libFuzzer gives no chance to print at the end
            print(*(f"{name} {number}" for name, number in count.items()), flush=True)

    def custom_mutator(data: bytes, max_size: int, seed: int) -> bytes:
        chance = random.Random(seed)
        if chance.random() < 0.2:
            raw: bytes = atheris.Mutate(data, max_size)
            return raw
        return pack(mutate(unpack(data), chance))[:max_size]

    atheris.Setup([sys.argv[0], *arguments], test_one, custom_mutator=custom_mutator)
    atheris.Fuzz()
