"""What remains of a finished peer with ``--stay``: a small process that waits for SIGTERM.

Supervisors that restart every process that ends, like a StatefulSet, would otherwise start the peer again and again,
and nothing can be read from the volume of a pod without a process.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

_WAIT = "import signal; signal.sigwait({signal.SIGTERM, signal.SIGINT})"


def wait_for_sigterm() -> NoReturn:
    """Replace this process by one without torch, 10 MB, which exits with 0 on SIGTERM or SIGINT."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})  # inherited; none is lost in between
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", _WAIT])
