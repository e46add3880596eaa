"""FedTGP's claims at the paper's own size: one GPU for days."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.claims.claim import Claim, Settings
from benchmarks.claims.paper_size import at_paper_size, runs_of

BEST: dict[str, Any] = {"series": "pooled", "best_round": True}
PAPER = "20 peers, 1,000 rounds, 2,625 samples"
PAPER_CIFAR = "20 peers, 1,000 rounds, 2,250 samples"
PAPER_FLOWERS = "20 peers, 1,000 rounds, 307 samples"
PAPER_TINY = "20 peers, 1,000 rounds, 3,750 samples"
PAPER_50 = "50 peers, 1,000 rounds, 900 samples"
PAPER_100 = "100 peers, 1,000 rounds, 450 samples"
CELLS: tuple[tuple[str, str, str, str, Mapping[str, str]], ...] = (
    (
        "practical-fmnist",
        "Table 10",
        PAPER,
        "practical",
        {
            "fedproto": "+0.12 ± 0.12",
            "feddistill": "+0.10 ± 0.10",
            "fml": "+0.22 ± 0.10",
            "fedgen": "+0.23 ± 0.11",
            "fedkd": "+0.28 ± 0.10",
        },
    ),
    (
        "pathological-fmnist",
        "Table 10",
        PAPER,
        "pathological",
        {
            "fedproto": "+0.08 ± 0.07",
            "feddistill": "+0.09 ± 0.07",
            "fml": "+0.14 ± 0.06",
            "fedgen": "+0.18 ± 0.08",
            "fedkd": "+0.19 ± 0.12",
        },
    ),
    (
        "practical-cifar10",
        "Table 1",
        PAPER_CIFAR,
        "CIFAR-10, practical",
        {
            "fedproto": "+6.08 ± 3.8",
            "feddistill": "+2.14 ± 0.88",
            "fml": "+2.27 ± 1.0",
            "fedgen": "+5.60 ± 1.1",
            "fedkd": "+1.70 ± 1.0",
        },
    ),
    (
        "practical-cifar100",
        "Table 1",
        PAPER_CIFAR,
        "CIFAR-100, practical",
        {"fedproto": "+10.60 ± 0.60", "feddistill": "+5.40 ± 0.25"},
    ),
    (
        "practical-flowers102",
        "Table 1",
        PAPER_FLOWERS,
        "Flowers102, practical",
        {"fedproto": "+12.47 ± 0.64", "feddistill": "+4.55 ± 1.9"},
    ),
    (
        "practical-tiny-imagenet",
        "Table 1",
        PAPER_TINY,
        "Tiny-ImageNet, practical",
        {"fedproto": "+8.36 ± 0.25", "fedkd": "+1.86 ± 0.77", "feddistill": "+2.50 ± 0.67"},
    ),
    (
        "pathological-cifar10",
        "Table 1",
        PAPER_CIFAR,
        "CIFAR-10, pathological",
        {"fedproto": "+6.63 ± 0.62", "fedkd": "+2.70 ± 0.69"},
    ),
    (
        "pathological-cifar100",
        "Table 1",
        PAPER_CIFAR,
        "CIFAR-100, pathological",
        {"fedproto": "+8.27 ± 0.67", "fedgen": "+3.60 ± 0.76"},
    ),
    (
        "pathological-flowers102",
        "Table 1",
        PAPER_FLOWERS,
        "Flowers102, pathological",
        {"fedproto": "+13.85 ± 0.93", "fedgen": "+9.08 ± 0.95"},
    ),
    (
        "pathological-tiny-imagenet",
        "Table 1",
        PAPER_TINY,
        "Tiny-ImageNet, pathological",
        {"fedproto": "+5.28 ± 0.74", "fedkd": "+1.92 ± 0.74"},
    ),
    *(
        (f"practical-cifar100-{group}", "Table 2", scale, f"CIFAR-100, {group}", papers)
        for group, scale, papers in (
            ("htfe2", PAPER_CIFAR, {"fedproto": "+5.85 ± 0.59", "feddistill": "+2.94 ± 0.61"}),
            ("htfe3", PAPER_CIFAR, {"fedproto": "+11.51 ± 1.3", "lg-fedavg": "+4.09 ± 0.84"}),
            ("htfe4", PAPER_CIFAR, {"fedproto": "+11.87 ± 1.3", "lg-fedavg": "+2.63 ± 0.34"}),
            ("htfe9", PAPER_CIFAR, {"fedproto": "+15.31 ± 1.9", "fml": "+5.64 ± 0.57"}),
            ("htc4", PAPER_CIFAR, {"fedproto": "+15.92 ± 0.55", "feddistill": "+3.46 ± 0.56"}),
            ("htfe8-htc4", PAPER_CIFAR, {"fedproto": "+18.96 ± 1.7", "feddistill": "+2.86 ± 0.35"}),
            ("n50", PAPER_50, {"fedproto": "+10.14 ± 0.86", "feddistill": "+4.66 ± 0.74"}),
            ("n100", PAPER_100, {"fedproto": "+12.62 ± 1.0", "fml": "+5.48 ± 0.66"}),
        )
    ),
)
"""File, table, scale, label, and FedTGP's gains over others: FedProto, the best of the others, in some cells more."""
MEMES: Mapping[str, str] = {"practical-cifar100-htfe9": "htfe-resnet4"}
"""The smallest network of the group, where that is not the CNN."""


def methods_of(file: str, others: Iterable[str], **hyper: Any) -> dict[str, dict[str, Any]]:
    """Return FedTGP's and the other methods' hyper-parameters in the setting of a file."""
    own: dict[str, Any] = {"batch": 10, **({"participation": 0.5} if file.endswith(("n50", "n100")) else {}), **hyper}
    methods: dict[str, dict[str, Any]] = {"fedtgp": hyper, **dict.fromkeys(others, own)}
    meme = MEMES.get(file, "htfe-cnn")
    if "fml" in methods:
        methods["fml"] = {**own, "meme": meme}
    if "fedkd" in methods:
        methods["fedkd"] = {**own, "meme": meme, "energy_end": 0.95}
    return methods


def cell(file: str, where: str, scale: str, label: str, papers: Mapping[str, str], **changes: Any) -> Iterator[Claim]:
    yield from at_paper_size(
        f"fedtgp-{file}",
        where,
        scale,
        methods_of(file, papers),
        {},
        {("fedtgp", other): paper for other, paper in papers.items()},
        label=label,
        **BEST,
        changes=changes,
    )


TABLE_11: Mapping[int, Mapping[str, str]] = {
    10: {"fedproto": "+9.25 ± 1.3", "lg-fedavg": "+2.13 ± 1.1"},
    18: {"fedproto": "+6.56 ± 2.4", "lg-fedavg": "+1.73 ± 2.3"},
    34: {"fedproto": "+9.20 ± 2.3", "lg-fedavg": "+2.18 ± 2.3"},
}


def resnet(depth: int) -> dict[str, Any]:
    """Return the section ``models`` of Table 11."""
    return {"name": f"htfe-resnet{depth}", "features": 512}


CLAIMS = [
    *(claim for entry in CELLS for claim in cell(*entry)),
    *(
        claim
        for depth, papers in TABLE_11.items()
        for claim in cell(
            "practical-cifar100",
            "Table 11",
            PAPER_CIFAR,
            f"ResNet{depth} for all",
            papers,
            models=resnet(depth),
        )
    ),
]
OTHERS = ("lg-fedavg", "fedgen", "fml", "fedkd", "feddistill")
"""Beside FedProto."""
ALL = ("fedproto", *OTHERS)


def runs(
    others: Iterable[str],
    file: str = "practical-cifar100",
    models: Any = None,
    *,
    with_fedtgp: bool = True,
    **hyper: Any,
) -> dict[str, Settings]:
    """Return FedTGP's run and the other methods' runs of a cell."""
    changes = {} if models is None else {"models": models}
    methods = methods_of(file, others, **hyper)
    if not with_fedtgp:
        del methods["fedtgp"]
    return runs_of(f"fedtgp-{file}", methods, changes=changes)


def features(number: int) -> dict[str, Any]:
    """Return the section ``models`` of Table 4."""
    return {"name": "htfe8", "features": number}


TABLES_3_4_11 = (
    *(runs(OTHERS, local_epochs=epochs) for epochs in (5, 10, 20)),
    *(runs(OTHERS, models=features(number)) for number in (64, 256, 1024)),
    *(runs(OTHERS[1:], models=resnet(depth)) for depth in TABLE_11),
)
"""The cells of these tables, without FedProto, and without LG-FedAvg where it has a claim."""


def cells_without_a_row(where: str) -> list[dict[str, Settings]]:
    """Return, for each cell of Table 1 or 2, the runs of the methods that no claim compares with FedTGP there."""
    found = []
    for file, table, _, _, papers in CELLS:
        if table == where:
            several_layers = file.endswith("htc4")  # the heads: LG-FedAvg and FedGen share none
            possible: Sequence[str] = OTHERS[2:] if several_layers else OTHERS
            found.append(runs([method for method in possible if method not in papers], file))
    return found


def ablations(file: str) -> dict[str, Settings]:
    """Return the runs of a row of Table 6."""
    variants: Mapping[str, Mapping[str, Any]] = {
        "SCL": {"margin": "none"},
        "FM": {"margin": "fixed"},
        "without F": {"transform": False},
    }
    own = {label: {"name": "fedtgp", **hyper} for label, hyper in variants.items()}
    return runs_of(f"fedtgp-{file}", {**methods_of(file, ["fedproto"]), **own})


def tau_or_s_of_one() -> dict[str, Settings]:
    """Return the runs of Table 7 with τ = 1 or S = 1, and FedDistill's."""
    variants: Mapping[str, Mapping[str, Any]] = {"τ = 1": {"threshold": 1}, "S = 1": {"prototype_epochs": 1}}
    own = {label: {"name": "fedtgp", **hyper} for label, hyper in variants.items()}
    file = "practical-cifar100"
    return runs_of(f"fedtgp-{file}", {"feddistill": methods_of(file, ["feddistill"])["feddistill"], **own})
