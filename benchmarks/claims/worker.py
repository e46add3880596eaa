"""A process that executes runs, one after the other, so that torch is imported once.

    python -m benchmarks.claims.worker STORE

Each line of its input is a JSON object {"key", "seed", "tree", "probe", "code"}. It appends the run to the store and
then prints the key. It ends with its input, or with the first run that fails.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.claims.store import Store
from benchmarks.claims.summary import simulated


def execute(store: Store, request: dict[str, Any]) -> None:
    """Simulate one run and append it to the store."""
    tree = request["tree"]
    began, cpu = time.perf_counter(), time.process_time()
    summary = simulated(tree, request["probe"])
    record = {
        "key": request["key"],
        "seed": request["seed"],
        "about": f"{tree['algorithm']['name']}, {tree['peers']} peers, {tree['rounds']} rounds",
        "seconds": round(time.perf_counter() - began, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "device": tree["device"],
        "code": request["code"],
        "summary": summary.to_dict(),
    }
    store.add(record)


def main() -> None:
    store = Store(Path(sys.argv[1]))
    for line in sys.stdin:
        request = json.loads(line)
        execute(store, request)
        print(request["key"], flush=True)


if __name__ == "__main__":
    main()
