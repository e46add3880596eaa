"""The command that examines this host: doctor."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from launcher.commands.group import JSON, SETS
from launcher.formatting.console import echo


@click.command()
@click.argument("file", required=False, type=click.Path(path_type=Path))
@SETS
@JSON
def doctor(file: Path | None, sets: tuple[str, ...], as_json: bool) -> None:
    """Check this host, for the run FILE if given.

    Look at Python, torch, GPUs and how peers would share them, limits, memory, disk, data, ports, keys, and the
    packages that trackers and a report need. No peer starts; a dataset that is missing is downloaded, as for a
    launch. Exit with 1 if something prevents the run.
    """
    from dataclasses import asdict
    from functools import partial

    from launcher.child import in_child
    from launcher.doctor import examine

    if sets and file is None:
        raise click.UsageError("--set changes a run file: give one")
    findings = in_child(partial(examine, file, sets))
    if as_json:
        echo(json.dumps([asdict(finding) for finding in findings]))
    else:
        colors = {"ok": "green", "warning": "yellow", "problem": "red"}
        for finding in findings:
            mark = click.style(f"{finding.level:<8}", fg=colors[finding.level])
            advice = f"\n{'':19}→ {finding.advice}" if finding.advice else ""
            echo(f" {finding.topic:<10}{finding.text}{advice}", prefix=mark)
    sys.exit(1 if any(finding.level == "problem" for finding in findings) else 0)
