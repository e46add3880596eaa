"""Computes, reads and writes the pinned outcomes.

    python -m tests.golden check                     compare with the file of this CPU and torch version
    python -m tests.golden renew --reason "..."      write that file anew; the reason is kept in it

Floating-point sums depend on the torch version and on the CPU's vector instructions, so there is one file for each
combination. Each run pins, per peer: the digest of the final method state, the digest of the round records (without
times), the accuracy, and messages and bytes by kind. The digests come twice: once with the names of keys and once
over the values alone. A commit that renames a field changes the first and keeps the second, which shows that it
changes no number.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import tempfile
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

import torch

from p2pfl.run_file.load import from_dict
from p2pfl.run_folder.folder import Result, RunFolder
from p2pfl.session import checkpoint, metrics
from p2pfl.simulation.simulate import simulate
from p2pfl.tensors import digest
from tests.conftest import tree
from tests.golden.runs import RUNS
from tests.simulation.run_schedule import run_schedule

Pinned = dict[str, Any]

FOLDER = Path(__file__).parent
RUN_ID = "0123456789abcdef"
FAULTY = "faulty"
"""Name of the run over simulated faulty connections, in virtual time."""
FAULTY_SEED = 100_005
"""A schedule with deadlines, crashes, damaged checkpoints, and rounds that peers skip."""
NAMES = (*RUNS, FAULTY)


def platform_key() -> str:
    """What floating-point results depend on: torch version, instruction set, CPU vendor and vector capability."""
    cpu = Path("/proc/cpuinfo")
    vendor = re.search(r"^vendor_id\s*: (\S+)", cpu.read_text() if cpu.exists() else "", flags=re.MULTILINE)
    capability = torch.backends.cpu.get_cpu_capability()
    parts = (f"torch-{torch.__version__}", platform.machine(), vendor[1] if vendor else "unknown", capability)
    return "_".join(re.sub(r"[^\w.+-]", "-", part) for part in parts)


def pinned_file() -> Path:
    return FOLDER / f"{platform_key()}.json"


def pinned() -> Pinned | None:
    """The pinned outcomes for this platform by name of the run; None if none were ever written for it."""
    file = pinned_file()
    return json.loads(file.read_text())["runs"] if file.exists() else None


def renew(reason: str) -> Path:
    """Write the outcomes of the present code for this platform, with the reason and the date.

    Where they replace other outcomes, those of other platforms are outdated: null takes their place.
    """
    file, before = pinned_file(), pinned()
    history = json.loads(file.read_text())["history"] if file.exists() else []
    history.append({"date": date.today().isoformat(), "reason": reason})
    content = {"platform": platform_key(), "history": history, "runs": {name: outcome(name) for name in NAMES}}
    for other in set(FOLDER.glob("*.json")) - {file} if before is not None else ():
        outdated = json.loads(other.read_text())
        outdated["runs"] = _unchanged(outdated["runs"], before, content["runs"])
        _write(other, outdated)
    _write(file, content)
    return file


def _write(file: Path, content: Pinned) -> None:
    file.write_text(json.dumps(content, indent=1) + "\n")


def _unchanged(other: Any, before: Any, after: Any) -> Any:
    """Return the outcomes of another platform with null wherever ``before``, if it is known, and ``after`` differ."""
    if all(isinstance(value, dict) for value in (other, before, after)):
        return {key: _unchanged(other.get(key), before.get(key), after[key]) for key in after}
    return other if before in (None, after) else None


def is_complete(outcome: Any) -> bool:
    """Return whether all of an outcome is known."""
    if isinstance(outcome, dict):
        return bool(outcome) and all(value == {} or is_complete(value) for value in outcome.values())
    return outcome is not None


def outcome(name: str) -> Pinned:
    """What one run ends with, as plain JSON values."""
    if name == FAULTY:
        return _faulty()
    with tempfile.TemporaryDirectory() as root:
        return outcome_in(simulated(name, Path(root)))


def simulated(name: str, root: Path) -> RunFolder:
    """Simulate a run of RUNS in ``root``."""
    run = from_dict(tree(**RUNS[name]))
    folder = RunFolder.create(root, range(run.peers))
    folder.write_info({"id": RUN_ID})
    folder.run_file.write_text(run.to_yaml())
    simulate(run, folder)
    return folder


def outcome_in(folder: RunFolder) -> Pinned:
    """What the finished run in ``folder`` ended with."""
    peers = {}
    for files in folder.peers():
        result = files.result()
        assert result is not None
        state = checkpoint.read(files.checkpoint)["algorithm"]
        records = [
            {k: v for k, v in record.items() if k not in metrics.MEASURED} for record in metrics.read(files.metrics)
        ]
        peers[str(result.peer)] = {
            "rounds_done": result.rounds_done,
            "accuracy": result.accuracy,
            "state": result.digest,
            "state_values": values_digest(state),
            "records": digest(records),
            "records_values": values_digest(records),
            "sent": by_kind(result),
        }
    return peers


def _faulty() -> Pinned:
    outcome = run_schedule(FAULTY_SEED)
    assert not outcome.violations
    return {
        "virtual_seconds": round(outcome.seconds, 6),
        "faults": sum(outcome.counts.values()),
        **{
            str(peer): {
                "rounds_done": result.rounds_done,
                "state": result.digest,
                "skipped": result.skipped_rounds,
                "missing": result.missing,
                "sent": by_kind(result),
            }
            for peer, result in sorted(outcome.results.items())
        },
    }


def by_kind(result: Result) -> dict[str, list[int]]:
    """Messages, payload bytes and header bytes that a peer sent, by kind."""
    total: dict[str, list[int]] = {}
    for kinds in result.sent.values():
        for kind, counts in kinds.items():
            total[kind] = [a + b for a, b in zip(total.get(kind, [0, 0, 0]), counts, strict=True)]
    return dict(sorted(total.items()))


def values_digest(state: Any) -> str:
    """SHA-256 over the leaves of a state, regardless of the names and the order of the keys above them."""
    return hashlib.sha256("".join(sorted(_leaves(state))).encode()).hexdigest()


def _leaves(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [leaf for below in value.values() for leaf in _leaves(below)]
    if isinstance(value, list | tuple):
        return [leaf for below in value for leaf in _leaves(below)]
    return [digest(value)]


def differences(expected: Pinned, found: Pinned, path: str = "") -> list[str]:
    """The paths at which two outcomes differ, with both values. Null stands for an outcome that is not known."""
    lines = []
    for key in (*expected, *(key for key in found if key not in expected)):
        below, one, other = f"{path}/{key}", expected.get(key), found.get(key)
        if isinstance(one, dict) and isinstance(other, dict):
            lines += differences(one, other, below)
        elif one != other and not (key in expected and one is None):
            lines.append(f"{below}: pinned {one}, found {other}")
    return lines
