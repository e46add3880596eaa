"""The titles of processes, by which other commands find them."""

from __future__ import annotations

from setproctitle import setproctitle, setthreadtitle


def set_title(title: str) -> None:
    """Set what ``ps`` shows as the command line of this process, e.g. ``p2pfl peer 3 /runs/mesh``.

    Its short name becomes ``p2pfl-peer``: with spaces in it, Slurm's proctrack/linuxproc cannot parse
    ``/proc/PID/stat``, does not find the process, and drains the node because it cannot end the job.
    """
    setproctitle(title)
    setthreadtitle("-".join(title.split(" ")[:2]))
