"""MAPL's claims at the paper's own size: one GPU for hours each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.claims.claim import Claim, Settings
from benchmarks.claims.mapl_runs import paper_scale
from benchmarks.claims.paper_size import at_paper_size, runs_of
from benchmarks.claims.statistics import Relation

PAPER_ADAM: Mapping[str, Any] = {"optimizer": "adam", "batch": 64, "lr": 1e-4, "betas": [0.5, 0.999]}
"""As in the run files of MAPL at the paper's size."""
METHODS: Mapping[str, Mapping[str, Any]] = {
    "mapl": {},
    "mapl+": {},
    "fedproto": {**PAPER_ADAM, "alignment": 0.1},
    "dfedavgm": {"lr": 0.01},
    **dict.fromkeys(("local", "fedsim", "fedclassavg", "fedavg", "pfedsim", "flt"), PAPER_ADAM),
}
CINIC: Mapping[str, Any] = {"name": "folder", "path": "CINIC-10", "size": 32}
TABLE_1: tuple[tuple[int, Any, str, Mapping[str, str]], ...] = (
    (1, "cifar10", "CIFAR-10", {"local": "+6.67", "fedproto": "+4.14", "fedclassavg": "+2.60"}),
    (2, "cifar10", "CIFAR-10", {"local": "+6.76", "fedclassavg": "+2.57"}),
    (3, "cifar10", "CIFAR-10", {"local": "+6.13", "fedclassavg": "+2.00"}),
    (4, "cifar10", "CIFAR-10", {"local": "+6.00", "fedclassavg": "+2.23"}),
    (1, CINIC, "CINIC-10", {"local": "+10.27", "fedclassavg": "+3.87"}),
    (1, "svhn", "SVHN", {"local": "+5.47", "fedclassavg": "+2.67"}),
    (1, "mnist", "MNIST", {"local": "+0.27"}),
    (1, "fashion-mnist", "Fashion-MNIST", {"local": "−0.47"}),
)
"""In each cell with FedClassAvg, that is the best of the others."""
PART: Mapping[str, Any] = {
    "dataset": "cifar10-part",
    "partition": {"name": "clusters", "clusters": 2, "per_class": 295, "test_per_class": 15},
}
"""Of each class the part of CIFAR-10 has 2,954 images or more, for ten peers; the paper gives 300 to each."""
TABLE_9: tuple[tuple[int, Relation, Mapping[tuple[str, str], str]], ...] = (
    (
        1,
        ">",
        {
            ("mapl+", "mapl"): "+6.66",
            ("mapl+", "dfedavgm"): "+1.67",
            ("mapl+", "flt"): "+0.73",
            ("mapl", "local"): "+20.60",
        },
    ),
    (2, ">", {("mapl+", "mapl"): "+13.05", ("mapl+", "dfedavgm"): "+1.19", ("mapl", "local"): "+21.05"}),
    (3, ">", {("mapl+", "mapl"): "+8.86", ("mapl", "local"): "+16.80"}),
    (3, "<", {("mapl+", "dfedavgm"): "−1.67"}),
    (4, ">", {("mapl+", "mapl"): "+16.19", ("mapl+", "dfedavgm"): "+0.52", ("mapl", "local"): "+18.00"}),
)
"""Table 9, CIFAR-10."""


def in_table_1(
    scenario: int, data: Mapping[str, Any], name: str, figures: Mapping[str, str], relation: Relation = ">"
) -> list[Claim]:
    """Return MAPL's claims against each method that ``figures`` has the paper's difference from."""
    return at_paper_size(
        f"mapl-sc{scenario}-hetero",
        "Table 1",
        paper_scale(scenario),
        METHODS,
        data,
        {("mapl", other): paper for other, paper in figures.items()},
        label=f"{name}, Sc. {scenario}",
        relation=relation,
    )


CLAIMS = (
    *in_table_1(1, PART, "part of CIFAR-10", TABLE_1[0][3]),
    *(
        claim
        for scenario, dataset, name, figures in TABLE_1
        for claim in in_table_1(
            scenario, {"dataset": dataset}, name, figures, "<" if name == "Fashion-MNIST" else ">"
        )
    ),
    *(
        claim
        for scenario, relation, figures in TABLE_9
        for claim in at_paper_size(
            f"mapl-sc{scenario}-homo",
            "Table 9",
            paper_scale(scenario),
            METHODS,
            {"dataset": "cifar10"},
            figures,
            label=f"CIFAR-10, Sc. {scenario}",
            relation=relation,
        )
    ),
)


def cells(
    methods: Sequence[str],
    datasets: Sequence[Any] = ("cifar10",),
    scenarios: Sequence[int] = (1, 2, 3, 4),
    networks: str = "hetero",
) -> list[dict[str, Settings]]:
    """Return the runs of these methods for each cell of Table 1, or with ``networks="homo"`` of Table 9."""
    return [
        runs_of(
            f"mapl-sc{scenario}-{networks}", {method: METHODS[method] for method in methods}, {"dataset": dataset}
        )
        for dataset in datasets
        for scenario in scenarios
    ]
