"""The commands of ``p2pfl``.

Each command imports what it needs when it runs, so that commands without computation do not wait for torch.

Exit codes: 0 success; 1 peers did not finish, runs differ, or something could not be read; 2 the command line or the
run file is invalid.
"""

from __future__ import annotations

from launcher.commands import (
    collect,
    compare,
    compose,
    describe,
    doctor,
    export,
    inspect,
    k8s,
    keys,
    model,
    new,
    report,
    run,
    status,
    sweep,
    track,
    ui,
)
from launcher.commands.group import commands

for command in (
    run.launch,
    run.resume,
    run.join,
    run.simulate,
    run.stop,
    run.peer,
    sweep.sweep,
    inspect.list_runs,
    status.show,
    status.status,
    doctor.doctor,
    inspect.logs,
    inspect.digest,
    compare.compare,
    inspect.evaluate,
    export.export,
    model.model,
    report.report,
    collect.collect,
    describe.names,
    describe.algorithms,
    describe.models,
    describe.graph,
    describe.data,
    keys.keys,
    compose.compose,
    k8s.k8s,
    new.new,
    track.track,
    ui.ui,
):
    commands.add_command(command)

__all__ = ["commands"]
