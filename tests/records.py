"""Records of rounds: how accurate a peer was when, written into run folders."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from p2pfl.run_folder.folder import RunFolder


def record(peer: int, t: int, accuracy: float | None, seconds: float = 1.0, **more: Any) -> dict[str, Any]:
    personal = (
        None if accuracy is None else {"accuracy": accuracy, "unmasked_accuracy": accuracy, "masked_accuracy": 1.0}
    )
    sent = {"1": {"Shared": [1, 90, 10]}}
    times = {"seconds": {"total": seconds}, "elapsed": seconds * (t + 1)}
    return {"peer": peer, "t": t, **times, "sent": sent, "personal": personal, **more}


def record_tests(folder: RunFolder, samples: Mapping[int, str], dataset: str = "", classes: str = "") -> None:
    """Say in the results of a run on which test samples its peers were tested."""
    for peer, found in samples.items():
        files = folder.peer(peer)
        result = files.result()
        assert result is not None
        files.write_result(replace(result, tested_on={"dataset": dataset, "samples": found, "classes": classes}))


def write_records(folder: RunFolder, records: list[dict[str, Any]]) -> None:
    for files in folder.peers():
        text = "".join(json.dumps(found) + "\n" for found in records if found["peer"] == files.peer)
        files.metrics.write_text(text)
