"""The interpreter of tests/fast_python: its commands behave like real ones, and none outlives the tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.fast_python.fixture import FastPython


@pytest.fixture(scope="module", params=["real", "fast"])
def python(request: pytest.FixtureRequest, fast_python: FastPython) -> str:
    """The real interpreter and the fast one, of which the same tests hold."""
    return sys.executable if request.param == "real" else fast_python.executable


@pytest.fixture
def waiting(fast_python: FastPython) -> Iterator[subprocess.Popen[str]]:
    """A command that waits for a signal."""
    code = "import time; print('waits', flush=True)\nwhile True: time.sleep(1)"
    with subprocess.Popen([fast_python.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        yield process
        process.kill()


def execute(python: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([python, *arguments], capture_output=True, text=True, timeout=200, **options)


@pytest.mark.parametrize(
    ("code", "status", "error"),
    [
        ("pass", 0, ""),
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('not so')", 1, "not so\n"),
        ("import os; os._exit(7)", 7, ""),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt\n"),
    ],
)
def test_ends_with_the_status_of_the_command(python: str, code: str, status: int, error: str) -> None:
    done = execute(python, "-c", code)
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr.endswith(error)
    assert bool(done.stderr) == bool(error)


def test_threads_and_exit_handlers_end_first(python: str) -> None:
    code = (
        "import atexit, threading; atexit.register(print, 'at exit')\n"
        "threading.Thread(target=lambda: (threading.main_thread().join(), print('thread'))).start()\n"
        "print('main')"
    )
    assert execute(python, "-c", code).stdout == "main\nthread\nat exit\n"


def test_has_the_streams_arguments_folder_and_environment_of_its_client(python: str, tmp_path: Path) -> None:
    code = (
        "import json, os, sys; print('error', file=sys.stderr)\n"
        "json.dump([sys.argv, sys.stdin.read(), os.getcwd(), os.environ['ODD'], 'HOME' in os.environ], sys.stdout)"
    )
    environment = {"ODD": "x=1\nü", "PATH": os.environ["PATH"]}
    done = execute(python, "-c", code, "a b", "", input="given\0", cwd=tmp_path, env=environment)
    assert json.loads(done.stdout) == [["-c", "a b", ""], "given\0", str(tmp_path), "x=1\nü", False]
    assert done.stderr == "error\n"


SHOW = "import json, sys; json.dump([__name__, sys.argv, sys.path], sys.stdout)"


@pytest.mark.parametrize("safe", [[], ["-P"]], ids=["", "-P"])
@pytest.mark.parametrize("way", [["-c", SHOW], ["-m", "show"], ["show.py"]], ids=["code", "module", "file"])
def test_finds_modules_where_the_real_interpreter_does(
    fast_python: FastPython, tmp_path: Path, way: list[str], safe: list[str]
) -> None:
    (tmp_path / "modules").mkdir()
    for folder in (tmp_path, tmp_path / "modules"):
        (folder / "show.py").write_text(SHOW)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'modules'}"}
    real, fast = (
        execute(python, *safe, *way, "option", cwd=tmp_path, env=environment)
        for python in (sys.executable, fast_python.executable)
    )
    assert (fast.returncode, fast.stderr) == (0, "")
    assert json.loads(fast.stdout) == json.loads(real.stdout)


def test_handles_signals_like_a_process_that_was_just_started(fast_python: FastPython) -> None:
    code = (
        "import signal, threading; print(threading.active_count(), signal.pthread_sigmask(signal.SIG_BLOCK, ()))\n"
        "handlers = [signal.getsignal(number) for number in sorted(signal.valid_signals())]\n"
        "print([getattr(one, '__name__', one) for one in handlers], signal.set_wakeup_fd(-1))"
    )
    real, fast = (execute(python, "-c", code) for python in (sys.executable, fast_python.executable))
    assert (fast.stdout, fast.stderr) == (real.stdout, "")


def test_inherits_no_files_of_the_server(fast_python: FastPython) -> None:
    code = "import os; print(len(os.listdir('/proc/self/fd')))"
    real, fast = (execute(python, "-c", code).stdout for python in (sys.executable, fast_python.executable))
    assert fast == real


def test_has_torch_and_one_thread(fast_python: FastPython) -> None:
    code = (
        "import os, sys; print('torch' in sys.modules); import torch; print(torch.get_num_threads(), sys.executable)"
    )
    assert execute(fast_python.executable, "-c", code).stdout.split() == ["True", "1", fast_python.executable]


def test_is_a_process_in_a_session_of_its_own(fast_python: FastPython, waiting: subprocess.Popen[str]) -> None:
    pid = fast_python.pid(waiting)
    assert pid != waiting.pid
    assert os.getsid(pid) == os.getpgid(pid) == pid
    assert psutil.Process(pid).cmdline()[0].startswith(f"{fast_python.executable} -c import time; ")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_receives_the_signals_of_its_client(waiting: subprocess.Popen[str], number: int) -> None:
    waiting.send_signal(number)
    assert waiting.wait(200) == -number


def test_is_killed_with_its_client(fast_python: FastPython, waiting: subprocess.Popen[str], until: Any) -> None:
    pid = fast_python.pid(waiting)
    waiting.kill()
    until(lambda: not psutil.pid_exists(pid), timeout=60)


def test_options_that_it_does_not_know_are_an_error(fast_python: FastPython) -> None:
    done = execute(fast_python.executable, "-W", "error", "-c", "pass")
    assert done.returncode == 1
    assert done.stderr == "tests/fast_python does not know the option -W: start sys.executable\n"


WORKER = """
import os, pathlib, subprocess, sys, time
from tests.fast_python import fixture
python = fixture.FastPython(pathlib.Path(sys.argv[1]), ["json"])
code = '''
import os, signal
if not os.fork():
    os.setsid()  # an orphan in another session
    if os.fork():
        os._exit(0)
os.write(1, b"%d " % os.getpid())  # two processes write
signal.pause()
'''
command = subprocess.Popen([python.executable, "-c", code], stdout=subprocess.PIPE)
def pids():
    found = b""
    while found.count(b" ") < 2:
        found += os.read(command.stdout.fileno(), 64)
    return found.split()
print(python.server.pid, command.pid, *map(int, pids()), flush=True)
if input() == "close":
    fixture.GRACE = 0.0
    try:
        python.close()
    except AssertionError as error:
        sys.exit(0 if "processes survived the tests" in str(error) else 2)
    sys.exit(1)  # it has not noticed them
"""


@pytest.mark.parametrize("end", ["close", "exit", "kill"])
def test_no_process_survives_the_worker(end: str, until: Any, fast_python: FastPython, tmp_path: Path) -> None:
    folder = fast_python.folder / end
    folder.mkdir()
    command = [sys.executable, "-c", WORKER, str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        processes = [psutil.Process(int(pid)) for pid in worker.stdout.readline().split()]
        assert len(processes) == 4
        if end == "kill":
            worker.kill()
        else:
            worker.stdin.write(f"{end}\n")
            worker.stdin.flush()
    assert worker.returncode == (-signal.SIGKILL if end == "kill" else 0)
    try:
        until(lambda: not any(map(runs, processes)), timeout=60)
    finally:
        for process in filter(runs, processes):
            process.kill()


def runs(process: psutil.Process) -> bool:
    return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
