"""``python -m tests.golden``: check or renew the pinned outcomes."""

from __future__ import annotations

import sys

import click

from tests.golden import pinned


@click.group(help=pinned.__doc__)
def main() -> None:
    pass


@main.command()
def check() -> None:
    """Compare every run with its pinned outcome; exit 1 if one differs, 3 if none is pinned for this platform."""
    expected = pinned.pinned()
    if expected is None:
        click.echo(f"nothing pinned for {pinned.platform_key()}: python -m tests.golden renew --reason TEXT")
        sys.exit(3)
    changed = partly = 0
    for name in pinned.NAMES:
        lines = pinned.differences({name: expected.get(name)}, {name: pinned.outcome(name)})
        complete = pinned.is_complete(expected.get(name))
        changed += bool(lines)
        partly += not (lines or complete)
        click.echo(f"{'differs' if lines else 'same' if complete else 'unknown':8}{name}")
        for line in lines:
            click.echo(f"        {line}")
    same = len(pinned.NAMES) - changed - partly
    click.echo(f"{same} of {len(pinned.NAMES)} runs end as pinned ({pinned.platform_key()}); {partly} not all pinned")
    sys.exit(1 if changed else 0)


@main.command()
@click.option("--reason", required=True, help="Why the outcomes may change, e.g. what was renamed.")
def renew(reason: str) -> None:
    """Write the outcomes of the present code, and why."""
    click.echo(f"wrote {pinned.renew(reason)}")


main(prog_name="python -m tests.golden")
