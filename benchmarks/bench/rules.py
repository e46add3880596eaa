"""What a rule of aggregation costs: CPU time beside the mean's, and memory beside the models that it combines."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.bench import runs
from benchmarks.bench.report import Report, Table
from benchmarks.bench.settings import Settings
from p2pfl import PeerId
from p2pfl.aggregation import AGGREGATIONS, Contributions, Rule, RuleList
from p2pfl.aggregation.distances import Distances
from p2pfl.messaging.tensor_file import Spool
from p2pfl.models import build
from p2pfl.session.free_memory import free_heap, keep_heap
from p2pfl.tensors import Tensors, clone, equal, parameters_of

RULES: list[Any] = [
    "mean",
    *("median", "trimmed-mean"),
    *("krum", "geometric-median", "mda", "smea", "caf"),
    *("monna", {"name": "centered-clipping", "radius": 1.0}, "self-centered-clipping"),
    *({"name": "norm-clip", "factor": 0.5}, "arc", {"name": "clip", "radius": 0.5}),
    *("balance", "ubar"),
    ["nnm", "trimmed-mean"],
    ["norm-clip", "nnm", "trimmed-mean"],
]
NEIGHBORS = 16
FEW = 4
BATCH = 64
REPETITIONS = 5


class Measured(Rule):
    """The mean, after the distances that records hold if there are attackers or rules."""

    def transform(self, given: Contributions) -> Contributions:
        assert given.own is not None
        distances = Distances()
        distances.measure(given.kind, given.tensors, given.me, given.own)
        distances.drain()
        return given


class Cost(NamedTuple):
    """Of one combination: CPU seconds, and bytes beside the models at most."""

    seconds: float
    memory: int


def rules(settings: Settings) -> Report:
    """CPU time and memory of each rule for 16 neighbors."""
    torch.set_num_threads(1)
    keep_heap()
    model = build("tiny-cnn" if settings.quick else runs.CNN, 0, 1, (28, 28), 10)
    images, labels = torch.randn(BATCH, 1, 28, 28), torch.randint(10, (BATCH,))

    @torch.no_grad()
    def loss(tensors: Tensors) -> float:
        scores = torch.func.functional_call(model, dict(tensors), (images,))
        return float(nn.functional.cross_entropy(scores, labels))

    def given(neighbors: int, *, on_disk: bool) -> Contributions:
        stream, spool = torch.Generator().manual_seed(0), Spool()
        start, models = clone(parameters_of(model)), dict[PeerId, Tensors]()
        for j in range(neighbors + 1):
            moved = {name: x + 0.01 * torch.randn(x.shape, generator=stream) for name, x in start.items()}
            models[j] = spool.put(moved) if on_disk and j else moved
        return Contributions(models, equal(models), 0, models[0], "Parameters", 0, 10, {}, loss)

    table = Table(
        {
            "rule": "",
            "CPU ms": ".0f",
            "times the mean": ".1f",
            "MiB": ".1f",
            f"of {NEIGHBORS} on disk": ".1f",
            f"of {FEW} on disk": ".1f",
        }
    )
    mean = None
    named = {" → ".join(map(_name, one)) if isinstance(one, list) else _name(one): _rule(one) for one in RULES}
    for name, rule in {**named, "mean, and distances for the records": Measured()}.items():
        settings.progress(name)
        in_memory = measure(rule, given(NEIGHBORS, on_disk=False), 1 if settings.quick else REPETITIONS)
        many, few = (measure(rule, given(count, on_disk=True), 1) for count in (NEIGHBORS, FEW))
        mean = mean or in_memory.seconds
        memory = [cost.memory / 2**20 for cost in (in_memory, many, few)]
        table.add(name, 1e3 * in_memory.seconds, in_memory.seconds / mean, *memory)
    text = (
        f"One peer combines its model of {sum(map(torch.numel, parameters_of(model).values())):,} parameters with "
        f"those of {NEIGHBORS} neighbors, with one thread; f is auto: {NEIGHBORS // 3}. CPU is the median of "
        f"{REPETITIONS}. MiB are what the process needed at most beside the models, the result included: with all "
        f"models in memory, and with those of {NEIGHBORS} and of {FEW} neighbors on disk (option `spool`). UBAR "
        f"evaluates a batch of {BATCH}."
    )
    return Report("rules", "Rules of aggregation", text, [table])


def _name(section: str | Mapping[str, Any]) -> str:
    return section if isinstance(section, str) else str(section["name"])


def _rule(section: Any) -> Rule:
    if isinstance(section, list):
        return RuleList.parse({"rules": section})
    given = {"name": section} if isinstance(section, str) else dict(section)
    return AGGREGATIONS[given.pop("name")].parse(given)


def measure(rule: Rule, given: Contributions, repetitions: int) -> Cost:
    """Combine the contributions; new tensors receive the result."""
    gc.collect()
    free_heap()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    resident = _status("VmRSS")
    rule.combine(rule.transform(given))
    memory = _status("VmHWM") - resident
    seconds = []
    for _ in range(repetitions):
        began = time.thread_time()
        rule.combine(rule.transform(given))
        seconds.append(time.thread_time() - began)
    return Cost(median(seconds), memory)


def _status(key: str) -> int:
    """Return a size of this process, in bytes."""
    (kilobytes,) = re.findall(rf"^{key}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), flags=re.MULTILINE)
    return 1024 * int(kilobytes)
