"""Claims and records of runs for tests of benchmarks/claims."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from benchmarks.claims import compare
from benchmarks.claims.claim import Claim, Settings, difference
from benchmarks.claims.declared import PAPERS
from benchmarks.claims.store import RESULTS, Store, identity
from benchmarks.claims.summary import Summary


@cache
def project_store() -> Store:
    """The project's results, to read only: it takes seconds to unpack them."""
    return Store(RESULTS)


ALL = [*(claim for paper in PAPERS for claim in paper.claims), *compare.CLAIMS]

TREE: Mapping[str, Any] = {
    "rounds": 2,
    "peers": 2,
    "data": {
        "dataset": "digits",
        "partition": {"name": "clusters", "clusters": 2, "per_class": 3, "test_per_class": 2},
    },
    "models": "tiny-cnn",
    "algorithm": {"name": "local", "lr": 0.01},
}


def summary(accuracy: float) -> Summary:
    """A run of four evaluated rounds that is constantly this good."""
    points = [(t, accuracy) for t in range(1, 5)]
    return Summary(
        [accuracy], accuracy, {"accuracy": points, "masked": points, "worst": points}, [[0]], [{}], {}, 30.0, 2.0
    )


def settings(name: str = "local", **hyper: Any) -> Settings:
    return Settings({**TREE, "algorithm": {"name": name, "lr": 0.01, **hyper}})


ONE, OTHER = settings(), settings("fedavg")


def claim(one: Settings = ONE, other: Settings = OTHER, **given: Any) -> Claim:
    read = difference("one", "other", lambda run: run.last())
    return Claim("one above other", "Table 1", {"one": one, "other": other}, read, "+1", "many", **given)


def record(store: Store, run: Settings, seed: int, accuracy: float, rate: float | None = None) -> None:
    key = identity(run.with_rate(rate), run.probe).key
    content = {
        "key": key,
        "seed": seed,
        "seconds": 4.0,
        "cpu_seconds": 3.0,
        "device": "cpu",
        "code": "abc, torch 2",
        "about": "",
    }
    store.folder.mkdir(parents=True, exist_ok=True)
    store.add({**content, "summary": summary(accuracy).to_dict()})
