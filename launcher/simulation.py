"""``p2pfl simulate``: all peers in this process, with the files and the summary of a launch."""

from __future__ import annotations

import signal
import time

from rich.console import Console
from setproctitle import setproctitle

from launcher.prepare import Order
from launcher.processes import simulation_title
from launcher.progress import progress_on, tell
from launcher.snapshot import Snapshot
from launcher.summary import Summary, summarize
from p2pfl.runfolder import PeerId, RunFolder

SHOW_EVERY = 0.25
"""Seconds between two looks at the status files."""


def simulate(order: Order, console: Console) -> tuple[RunFolder, Summary]:
    """Make a run and run it, all peers in this process."""
    from p2pfl.simulate import simulate as drive

    run = order.load()
    folder = order.prepare(run, simulated=True)
    tell(folder, console)
    setproctitle(simulation_title(folder))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what `p2pfl stop` sends ends it like Ctrl-C
    began = shown = time.monotonic()
    with progress_on(console) as progress:

        def on_round(peer: PeerId, t: int) -> None:
            nonlocal shown
            if time.monotonic() - shown >= SHOW_EVERY:
                progress.update(Snapshot.take(folder, range(run.peers), run.rounds))
                shown = time.monotonic()

        try:
            drive(run, folder, on_round)
        except KeyboardInterrupt:
            progress.say("stopped")
        progress.update(Snapshot.take(folder, range(run.peers), run.rounds))
    return folder, summarize(folder, seconds=time.monotonic() - began)
