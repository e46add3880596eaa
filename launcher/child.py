"""Call functions in a child process, so that this one does not keep what they import."""

from __future__ import annotations

import multiprocessing  # noqa: TID251  # it unpickles only what its child has pickled
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection  # noqa: TID251  # as above
from multiprocessing.context import ForkProcess  # noqa: TID251  # as above
from typing import TypeVar

from launcher.errors import LaunchError
from p2pfl.errors import P2pflError

T = TypeVar("T")


def in_child(function: Callable[[], T]) -> T:
    """Return what ``function`` returns in a forked process, or raise the P2pflError that it raises.

    Importing torch takes 300 MiB, and the launcher lives as long as its peers. Any other exception is printed by the
    child, and raises SystemExit here.
    """
    result, child = in_lasting_child(function, lambda: None)
    child.join()
    return result


def in_lasting_child(function: Callable[[], T], afterwards: Callable[[], None]) -> tuple[T, ForkProcess]:
    """Return what ``function`` returns, as ``in_child`` does, and the process, which then calls ``afterwards``."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_call, args=(function, sender, afterwards), daemon=True)
    child.start()
    sender.close()
    try:
        result, error = receiver.recv()
    except EOFError:
        child.join()
        code = child.exitcode or 1
        if code < 0:
            killed = f"the process that checks the run file was killed by {signal.Signals(-code).name}"
            raise LaunchError(killed) from None
        sys.exit(code)
    except KeyboardInterrupt:
        child.terminate()
        child.join()
        raise
    finally:
        receiver.close()
    if error is not None:
        child.join()
        raise error
    return result, child


def _call(function: Callable[[], object], sender: Connection, afterwards: Callable[[], None]) -> None:
    multiprocessing.current_process().daemon = False  # plug-ins may start processes
    with suppress(KeyboardInterrupt):  # the parent has received it too
        try:
            sender.send((function(), None))
        except P2pflError as error:
            sender.send((None, error))
            return
        sender.close()
        afterwards()
