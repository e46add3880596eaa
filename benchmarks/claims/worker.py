"""A process that executes runs, one after the other, so that torch is imported once.

    python -m benchmarks.claims.worker

Each line of its input is a JSON object {"key", "seed", "tree", "probe", "code", "sockets"}. It answers with a line:
the record, as the store keeps it. It ends with its input, or with the first run that fails.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

from benchmarks.claims.summary import executed


def execute(request: dict[str, Any]) -> dict[str, Any]:
    """Execute one run and return its record."""
    tree = request["tree"]
    began, cpu = time.perf_counter(), cpu_seconds()
    summary = executed(tree, request["probe"], sockets=request["sockets"])
    return {
        "key": request["key"],
        "seed": request["seed"],
        "about": f"{tree['algorithm']['name']}, {tree['peers']} peers, {tree['rounds']} rounds",
        "seconds": round(time.perf_counter() - began, 1),
        "cpu_seconds": round(cpu_seconds() - cpu, 1),
        "device": tree["device"],
        **({"sockets": True} if request["sockets"] else {}),
        "code": request["code"],
        "summary": summary.to_dict(),
    }


def cpu_seconds() -> float:
    """Seconds of CPU time of this process and of the peers that have ended."""
    return sum(os.times()[:4])


def main() -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # stops the peers of a launched run
    for line in sys.stdin:
        print(json.dumps(execute(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
