"""Entry point of the ``p2pfl`` command."""

from __future__ import annotations

import errno
import os
import signal
import sys

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""Errors of a write to a full or damaged disk."""


def main() -> None:
    """Run the command line."""
    reject_conflicting_distribution()
    # Import late: the other distribution installs its files into the same package, p2pfl.
    try:
        import p2pfl  # noqa: F401  # raises ImportError on other systems than Linux
    except ImportError as error:
        sys.exit(f"error: {error}")
    from p2pfl.standard_streams import open_closed_streams
    from p2pfl.stop_signals import interrupt_by
    from p2pfl.terminal import make_legible

    open_closed_streams()
    make_legible()
    reject_deleted_folder()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts `p2pfl simulate … &` like this
        signal.signal(signal.SIGINT, signal.default_int_handler)  # `p2pfl stop` and sweeps stop it by this signal
    interrupt_by(signal.SIGHUP)
    try:
        from launcher.commands import commands
    except KeyboardInterrupt:  # later, click catches it
        sys.exit(128 + signal.SIGINT)
    try:
        commands(prog_name="p2pfl")
    except OSError as error:
        if error.errno not in DISK_ERRORS or error.filename is not None:
            raise
        # Errors of run folders are WriteErrors; this one is of standard output, or of a temporary file.
        sys.stdout = None  # otherwise Python writes the rest at its exit, and fails again
        sys.exit(f"error: the output cannot be written: {error.strerror}")
    finally:
        drop_closed_streams()


def drop_closed_streams() -> None:
    """Drop the streams of a closed terminal: Python would fail to write to them at its exit, with status 120."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        try:
            os.write(number, b"")
        except OSError as error:
            if error.errno == errno.EIO:
                setattr(sys, name, None)


def reject_conflicting_distribution() -> None:
    """Exit with an explanation if the unrelated distribution ``p2pfl`` is installed in this environment."""
    if not any(map(_may_hold_it, sys.path)):
        return
    from importlib import metadata  # takes tens of milliseconds

    try:
        version = metadata.version("p2pfl")
    except metadata.PackageNotFoundError:
        return
    sys.exit(
        f"p2pfl {version}, an unrelated distribution, is installed in the same environment as p2pfl-mesh. "
        "Both provide the package p2pfl, so neither can work. Remove both, then reinstall p2pfl-mesh:\n"
        f"    {sys.executable} -m pip uninstall p2pfl p2pfl-mesh"
    )


def reject_deleted_folder() -> None:
    """Exit with an explanation if the working directory was deleted: libraries such as MKL end the process then."""
    try:
        os.getcwd()
    except FileNotFoundError:
        sys.exit("error: the working directory was deleted; change to one that exists, e.g. `cd ~`")


def _may_hold_it(folder: str) -> bool:
    """Return whether a folder of ``sys.path`` has metadata of it: p2pfl-1.0.dist-info; ours are p2pfl_mesh-…"""
    try:
        names = os.listdir(folder or ".")
    except OSError:
        return False
    return any(name.lower().startswith(("p2pfl-", "p2pfl.")) and name.endswith("-info") for name in names)


if __name__ == "__main__":
    main()
