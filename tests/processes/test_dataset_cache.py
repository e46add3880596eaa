"""The cache of datasets as several processes use it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from p2pfl.data import DATASETS, open_dataset

REPOSITORY = Path(__file__).resolve().parents[2]

SCRIPT = """
import os, sys, time
from pathlib import Path
from p2pfl.data import DATASETS, open_dataset
from p2pfl.data.loaders.synthetic import Synthetic

def read(self, root, original=Synthetic.read):
    with open(sys.argv[1], "a") as log:
        log.write("read\\n")
    time.sleep(0.3)
    return original(self, root)

Synthetic.read = read
start, go = os.pipe()
children = []
for _ in range(32):
    pid = os.fork()
    if not pid:
        os.close(go)
        os.read(start, 1)
        dataset = open_dataset("synthetic", DATASETS["synthetic"].parse({"train": 50, "test": 50}))
        os._exit(0 if len(dataset.train) == 50 else 1)
    children.append(pid)
os.close(go)
print(sum(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0 for pid in children))
"""


@pytest.mark.usefixtures("fast_children")
def test_processes_that_start_together_read_a_dataset_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P2PFL_CACHE", str(tmp_path / "cache"))
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "log")]
    process = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=200)
    assert process.stdout == "32\n", process.stderr
    assert (tmp_path / "log").read_text() == "read\n"


def test_cached_dataset_is_opened_without_heavy_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P2PFL_CACHE", str(tmp_path))
    open_dataset("digits", DATASETS["digits"]())
    script = """if True:
        import sys
        from p2pfl.data import DATASETS, open_dataset
        from p2pfl.models import build
        open_dataset("digits", DATASETS["digits"]())
        for peer in range(4):
            build("tiny4", peer, 1, (8, 8), 10)
        print([name for name in ("sklearn", "torchvision") if name in sys.modules])
    """
    run = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True)
    assert run.stdout == "[]\n", run.stderr
