"""What `ps` and Slurm read of a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from p2pfl.process_title import has_title

CODE = """
from p2pfl.process_title import set_title
set_title("p2pfl peer 3 /runs/a mesh")
print(open("/proc/self/cmdline").read().rstrip("\\0 "))
print(open("/proc/self/stat").read().split()[1])
"""


def test_the_short_name_of_a_process_has_no_spaces() -> None:
    output = subprocess.check_output([sys.executable, "-P", "-c", CODE], text=True)
    assert output.splitlines() == ["p2pfl peer 3 /runs/a mesh", "(p2pfl-peer)"]


CHANGED = """
import os
from p2pfl.process_title import set_title
os.environ["OMP_NUM_THREADS"] = "1"
set_title("p2pfl warm /runs/mesh")
print(open("/proc/self/cmdline").read().rstrip("\\0 "))
"""


def test_a_process_has_its_title_though_variables_of_its_environment_have_changed() -> None:
    environment = {"OMP_NUM_THREADS": "4"}  # first: the title lies before it
    environment |= {name: value for name, value in os.environ.items() if name not in environment}
    output = subprocess.check_output([sys.executable, "-P", "-c", CHANGED], text=True, env=environment)
    assert output.rstrip() == "p2pfl warm /runs/mesh"


NOT_UTF_8 = """
import os
from p2pfl.process_title import has_title, set_title
title = "p2pfl peer 3 " + os.fsdecode(b"/runs/caf\\xe9/mesh")
set_title(title)
found = open("/proc/self/cmdline").read().rstrip("\\0 ")
print(found)
print(has_title(found, title), has_title(found[:-2], title), has_title(found, title.replace("mesh", "other")))
"""


def test_a_path_that_is_not_utf_8_is_recognized() -> None:
    output = subprocess.check_output([sys.executable, "-P", "-c", NOT_UTF_8], text=True)
    assert output.splitlines() == ["p2pfl peer 3 /runs/caf?/mesh", "True True False"]


CUT_OFF = """
from p2pfl.process_title import has_title, set_title
title = "p2pfl peer 3 /runs/" + 100_000 * "a"
set_title(title)
found = open("/proc/self/cmdline").read()
print(len(found.rstrip("\\0 ")) < len(title), has_title(found, title))
"""


def test_a_title_that_was_cut_off_is_recognized() -> None:
    output = subprocess.check_output([sys.executable, "-P", "-c", CUT_OFF], text=True)
    assert output.split() == ["True", "True"]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ("p2pfl peer 12 /runs/mesh", True),
        ("p2pfl peer 12 /runs/mesh\0\0  ", True),
        ("p2pfl peer 12 /ru", True),
        ("p2pfl peer 1 /runs/mesh", False),
        ("p2pfl peer 12 /runs/mesh2", False),
        ("p2pfl peer 1", False),
        ("", False),
    ],
)
def test_only_the_path_of_a_title_may_be_cut_off(found: str, expected: bool) -> None:
    assert has_title(found, "p2pfl peer 12 /runs/mesh") is expected


def test_a_title_that_names_another_run_is_not_cut_off(tmp_path: Path) -> None:
    title = f"p2pfl peer 1 {tmp_path}/mesh-2"
    assert has_title(f"p2pfl peer 1 {tmp_path}/mesh", title)
    (tmp_path / "mesh").mkdir()
    (tmp_path / "mesh" / "run.yaml").touch()
    assert not has_title(f"p2pfl peer 1 {tmp_path}/mesh", title)
