"""``python -m tests.fast_python.server FOLDER MODULE …``: imports the modules, then forks a process per command.

Listens at ``FOLDER/socket`` for tests/fast_python/client.py. Each command becomes a process in a session of its own,
with the client's arguments, working directory, environment and standard streams, and leaves like any interpreter. In
``FOLDER``, a file with the client's process id as its name holds that of the command.

If a client disappears, its command is killed. When stdin closes, everything that commands have left running is
killed: orphans become children of this process.

Commands have the modules of this process, wherever PYTHONPATH leads, its limits (``ulimit``), and the number of
threads that it was started with, unless they set their own.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil

from p2pfl.process_title import set_title
from tests.fast_python.client import NUMBER

PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Command:
    """A command line of ``python``, in a process that is to execute it."""

    executable: str
    arguments: Sequence[str]
    site: Sequence[str]
    """Where modules are found besides PYTHONPATH."""

    def execute(self) -> None:
        """Do what the interpreter does: ``[-P] -m MODULE``, ``[-P] -c CODE`` or ``[-P] FILE``, and arguments."""
        arguments = list(self.arguments)
        sys.executable = self.executable
        safe = arguments[0] == "-P"
        option = arguments.pop(0) if not safe else arguments.pop(1)
        if safe:
            arguments.pop(0)
        paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:] = [*filter(None, paths), *self.site]
        sys.path_importer_cache.clear()
        importlib.invalidate_caches()
        if option == "-m":
            self._add_path(os.getcwd(), safe)
            sys.argv = arguments
            sys.modules.pop(arguments[0], None)  # or runpy warns
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        elif option == "-c":
            self._add_path("", safe)
            sys.argv = ["-c", *arguments[1:]]
            main = types.ModuleType("__main__")
            sys.modules["__main__"] = main
            exec(compile(arguments[0], "<string>", "exec"), vars(main))
        elif not option.startswith("-"):
            self._add_path(str(Path(option).resolve().parent), safe)
            sys.argv = [option, *arguments]
            runpy.run_path(option, run_name="__main__")
        else:
            sys.exit(f"tests/fast_python does not know the option {option}: start sys.executable")

    @staticmethod
    def _add_path(path: str, safe: bool) -> None:
        if not safe:
            sys.path.insert(0, path)


class Server:
    """Listens in ``folder``, and forks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._site = site_paths()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / "socket"))
        self._listener.listen(128)
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        signal.set_wakeup_fd(self._wake)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        self._commands: dict[int, socket.socket] = {}
        """{process id: its client}"""

    def serve(self) -> Command | None:
        """Serve until stdin closes. In the process of a command, return the command."""
        while True:
            waits_for: list[Any] = [0, self._woken, self._listener, *self._commands.values()]
            ready, _, _ = select.select(waits_for, [], [])
            for pid, client in list(self._commands.items()):
                if client in ready:  # it sends nothing more: it has ended
                    os.kill(pid, signal.SIGKILL)
                    self._commands.pop(pid).close()
            if self._woken in ready:
                os.read(self._woken, 4096)
                self._reap()
            if self._listener in ready:
                client, _ = self._listener.accept()
                with suppress(ConnectionError):  # the client was killed
                    if (command := self._fork(client)) is not None:
                        return command
            if 0 in ready:
                return None

    def _fork(self, client: socket.socket) -> Command | None:
        header, streams, _, _ = socket.recv_fds(client, NUMBER, 3)
        request = client.recv(int(header or 0), socket.MSG_WAITALL)
        if not request:
            client.close()
            return None
        directory, count, *words = request.split(b"\0")
        arguments = [os.fsdecode(word) for word in words[: int(count)]]
        environment = dict(word.split(b"=", 1) for word in words[int(count) :])
        pid = os.fork()
        if pid == 0:
            self._write_pid(client)  # before the command shows any sign of life
            client.close()
            self._become(streams, directory, environment)
            executable = str(self._folder / "python")
            set_title(" ".join([executable, *arguments]))
            return Command(executable, arguments, self._site)
        for stream in streams:
            os.close(stream)
        self._commands[pid] = client
        client.sendall(b"%*d" % (NUMBER, pid))
        return None

    def _write_pid(self, client: socket.socket) -> None:
        """Write the id of this process to the client's file, at once: tests wait until it is there."""
        peer = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        file = self._folder / str(struct.unpack("3i", peer)[0])
        written = file.with_suffix(".new")
        written.write_text(f"{os.getpid()}\n")
        written.rename(file)

    def _become(self, streams: Sequence[int], directory: bytes, environment: Mapping[bytes, bytes]) -> None:
        """Turn this fork into a process like one that was just started."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        for other in (self._listener, *self._commands.values()):
            other.close()
        for target, stream in enumerate(streams):
            os.dup2(stream, target)
        for descriptor in (*streams, self._woken, self._wake):
            os.close(descriptor)
        os.chdir(directory)
        os.environb.clear()
        os.environb.update(environment)

    def _reap(self) -> None:
        """Report the commands that have ended."""
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                pid, status = ended
                if (client := self._commands.pop(pid, None)) is not None:
                    with client, suppress(OSError):
                        client.sendall(b"%*d" % (NUMBER, os.waitstatus_to_exitcode(status)))


def site_paths() -> list[str]:
    """Return where an interpreter without PYTHONPATH finds modules."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    code = "import json, sys; json.dump(sys.path, sys.stdout)"
    found: list[str] = json.loads(subprocess.check_output([sys.executable, "-P", "-c", code], env=environment))
    return found


def exit_code(execute: Callable[[], None]) -> int:
    """Call ``execute``. Return the exit code of an interpreter in which it ends like that."""
    try:
        execute()
    except SystemExit as exit:
        if exit.code is None or isinstance(exit.code, int):
            return exit.code or 0
        print(exit.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        return -signal.SIGINT
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def leave(code: int) -> NoReturn:
    """End this process as multiprocessing does after a fork.

    Not by returning: it takes half a CPU second to release torch, and extension modules would report what is frozen
    as leaks.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the interpreter does
    atexit._run_exitfuncs()
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:  # nobody reads it
        code = 120
    with suppress(OSError):
        if sys.stderr is not None:
            sys.stderr.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def kill_descendants() -> None:
    """Kill all that commands have started and that still runs."""
    this = psutil.Process()
    while left := this.children(recursive=True):
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        with suppress(ChildProcessError):
            os.waitpid(-1, 0)
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass


def main() -> None:
    set_title("p2pfl tests")  # before the environment changes: the title of a command has the room of both
    folder, *modules = sys.argv[1:]
    for module in modules:
        importlib.import_module(module)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    gc.collect()
    gc.freeze()  # keeps memory shared: the collector does not touch it in the forks
    server = Server(Path(folder))
    print("ready", flush=True)
    command = server.serve()
    if command is not None:
        leave(exit_code(command.execute))
    kill_descendants()
    leave(0)


if __name__ == "__main__":
    main()
