"""A state of peer 3, and the checkpoint that holds it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from p2pfl.session import checkpoint

RUN = "0123456789abcdef"


def state(**more: Any) -> dict[str, Any]:
    belongs = {"format": checkpoint.FORMAT, "run": RUN, "peer": 3}
    return {**belongs, "rounds_done": 2, "w": torch.arange(1000.0), "sources": [1, 2], **more}


def loaded(path: Path) -> dict[str, Any]:
    found = checkpoint.load(path, RUN, 3)
    assert found is not None
    return found
