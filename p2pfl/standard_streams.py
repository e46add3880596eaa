"""Standard streams that are closed when a process starts, e.g. by ``nohup p2pfl launch run.yaml <&-``."""

from __future__ import annotations

import os
import sys


def open_closed_streams() -> None:
    """Connect closed standard streams to /dev/null. Call it before anything else is opened.

    What is opened later would get their descriptors, which other code reads, writes and replaces: the pipes to the
    process that forks peers, or a peer's journal.
    """
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free descriptor: this one
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))
