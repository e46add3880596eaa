"""``p2pfl simulate``: all peers in this process, with the files and the summary of a launch."""

from __future__ import annotations

import signal
import time

from rich.console import Console
from setproctitle import setproctitle

from launcher.backends.processes import simulation_title
from launcher.prepare import LaunchRequest
from launcher.views.progress import Display, print_run_path, progress_on
from launcher.views.summary import Summary, summarize
from p2pfl.session.run_folder import RunFolder


def simulate(request: LaunchRequest, console: Console) -> tuple[RunFolder, Summary]:
    """Create a run and run all its peers in this process."""
    from p2pfl.session.simulate import simulate as run_peers

    run = request.load()
    folder = request.prepare(run, simulated=True)
    print_run_path(folder, console)
    setproctitle(simulation_title(folder))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `p2pfl stop` then acts like Ctrl-C
    began = time.monotonic()
    with progress_on(console) as progress:
        display = Display(progress, folder, range(run.peers), run.rounds)
        try:
            run_peers(run, folder, lambda peer, t: display.update())
        except KeyboardInterrupt:
            progress.print("stopped")
        display.update(now=True)
    return folder, summarize(folder, seconds=time.monotonic() - began)
