"""What `ps` and Slurm read of a process."""

from __future__ import annotations

import subprocess
import sys

CODE = """
from p2pfl.process_title import set_title
set_title("p2pfl peer 3 /runs/a mesh")
print(open("/proc/self/cmdline").read().rstrip("\\0 "))
print(open("/proc/self/stat").read().split()[1])
"""


def test_the_short_name_of_a_process_has_no_spaces() -> None:
    output = subprocess.check_output([sys.executable, "-P", "-c", CODE], text=True)
    assert output.splitlines() == ["p2pfl peer 3 /runs/a mesh", "(p2pfl-peer)"]
