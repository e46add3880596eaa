"""L2C's claims at the paper's own size: one GPU for days each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.claims.claim import Settings
from benchmarks.claims.l2c_runs import GROUP_RING, LOCAL, PAPER
from benchmarks.claims.paper_size import at_paper_size, runs_of
from benchmarks.claims.statistics import Relation

METHODS: Mapping[str, Mapping[str, Any]] = {
    "l2c": {},
    "meta-l2c": {**LOCAL, "local_epochs": 5, "prune_round": 10, "prune_to": 10},
    "transfer": {"name": "meta-l2c", **LOCAL, "local_epochs": 5, "train_encoder": False},
    "local": {**LOCAL, "local_epochs": 5},
    "fedfomo": {**LOCAL, "local_epochs": 5, "models": 10},
    "dpsgd": {**LOCAL, "local_epochs": None, "local_steps": 1},
    "cga": {**LOCAL, "local_epochs": None},
    **{name: {**LOCAL, "local_epochs": 5, "participation": 0.1} for name in ("fedavg", "ditto")},
}
"""Those of Table 4's transfer lack the encoder, a run on another dataset."""
LONGER: Mapping[str, Mapping[str, Any]] = {
    "dpsgd": {"rounds": 20_000, "graph": GROUP_RING},
    "cga": {"rounds": 20_000, "graph": GROUP_RING},
    "fedavg": {"rounds": 2_000},
    "ditto": {"rounds": 1_000},
}
"""More rounds, of one step or of a tenth of the peers, and the baselines' graph."""
AT_PAPER_SIZE: tuple[tuple[str, str, Relation, Mapping[tuple[str, str], str]], ...] = (
    (
        "l2c-cifar10",
        "CIFAR-10",
        ">",
        {
            ("l2c", "local"): "+2.64 ± 1.7",
            ("l2c", "fedfomo"): "+1.42 ± 0.46",
            ("meta-l2c", "l2c"): "+1.96 ± 0.88",
        },
    ),
    (
        "l2c-cifar100",
        "CIFAR-100",
        ">",
        {("l2c", "local"): "+3.53 ± 2.6", ("l2c", "fedfomo"): "+6.56 ± 0.88", ("meta-l2c", "local"): "+2.81 ± 2.6"},
    ),
    ("l2c-cifar100", "CIFAR-100", "<", {("meta-l2c", "l2c"): "−0.72 ± 1.5"}),
    (
        "l2c-miniimagenet",
        "MiniImageNet",
        ">",
        {("l2c", "local"): "+8.44 ± 3.1", ("l2c", "fedfomo"): "+5.47 ± 1.1", ("meta-l2c", "local"): "+7.21 ± 3.2"},
    ),
    ("l2c-miniimagenet", "MiniImageNet", "<", {("meta-l2c", "l2c"): "−1.23 ± 1.8"}),
)
"""Table 2."""

CLAIMS = [
    claim
    for file, label, relation, papers in AT_PAPER_SIZE
    for claim in at_paper_size(
        file,
        "Table 2",
        PAPER,
        METHODS,
        {},
        papers,
        label=label,
        relation=relation,
    )
]


def cells(
    methods: Sequence[str], datasets: Sequence[str] = ("cifar100", "miniimagenet")
) -> list[dict[str, Settings]]:
    """Return the runs of these methods for each dataset of Table 2."""
    return [
        {
            method: run
            for name in methods
            for method, run in runs_of(f"l2c-{dataset}", {name: METHODS[name]}, changes=LONGER.get(name)).items()
        }
        for dataset in datasets
    ]
