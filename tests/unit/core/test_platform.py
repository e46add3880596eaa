"""What p2pfl says where Python lacks modules that it needs: on Windows, for example."""

from __future__ import annotations

import subprocess
import sys

import pytest

MISSING = "import sys; sys.modules[{!r}] = None; "


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", ["fcntl", "termios"])
def test_an_import_elsewhere_names_linux_and_what_to_use(name: str) -> None:
    done = run(MISSING.format(name) + "import p2pfl")
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: p2pfl needs Linux: this Python has no module {name}; use WSL 2 on Windows, and a container "
        "elsewhere (docs/deploy.md)"
    )


def test_the_command_elsewhere_prints_one_line() -> None:
    done = run(MISSING.format("fcntl") + "from launcher.cli import main; main()")
    assert done.returncode == 1
    assert done.stderr.startswith("error: p2pfl needs Linux: this Python has no module fcntl; use WSL 2")
    assert done.stderr.count("\n") == 1
