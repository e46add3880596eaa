"""DFML's claims at the paper's own size: one GPU for days."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.claims.claim import Settings
from benchmarks.claims.dfml_runs import PAPER_10, PAPER_50, PAPER_100, PAPER_CALTECH, SGD
from benchmarks.claims.paper_size import at_paper_size, runs_of

RESNETS: Mapping[str, Any] = {"models": "dfml-h1-resnet"}
TEN: Mapping[str, Any] = {
    "models": [
        *("dfml-vit-512", "dfml-vit-256"),
        *(f"dfml-resnet-{width}" for width in (64, 32, 16, 8)),
        *("dfml-cnn-32-64-128-256", "dfml-cnn-32-64-128", "dfml-cnn-32-64", "dfml-cnn-16-32-64"),
    ]
}
"""The largest of Table 10, for Fig. 6."""
FEDAVG: Mapping[str, Any] = {"lr": 0.01}
PARTIAL = {"heterofl": FEDAVG, "fedrolex": FEDAVG}
OTHERS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "n50-niid-h0": {
        "fedprox-dec": {"lr": 0.01, "mu": 1.0},
        "def-kt": {"lr": 0.01, "participation": 0.5, "supervision": "wsm", **SGD},
    },
    "n50-niid-h1-cnn": PARTIAL,
    "n50-niid-h1-resnet": PARTIAL,
    "n50-niid-h1-vit": PARTIAL,
    "n10-niid-h2-efficientnet": {},
}
"""Beside decentralized FedAvg."""
CIFAR_100: Mapping[str, Any] = {"dataset": "cifar100"}
FMNIST: Mapping[str, Any] = {"dataset": "fashion-mnist"}
PAPER_FMNIST = "50 peers, 500 rounds, 960 samples"

CLAIMS = [
    claim
    for file, where, scale, label, papers, data, changes in (
        ("n10-niid", "Table 6", PAPER_10, "CIFAR-10, non-IID, 10 peers", {"fedavg-dec": "+30.52 ± 2.2"}, {}, {}),
        ("n10-iid", "Table 6", PAPER_10, "CIFAR-10, IID, 10 peers", {"fedavg-dec": "+11.22 ± 0.46"}, {}, {}),
        ("n50-niid", "Table 6", PAPER_50, "CIFAR-10, non-IID, 50 peers", {"fedavg-dec": "+16.46 ± 0.45"}, {}, {}),
        ("n50-iid", "Table 6", PAPER_50, "CIFAR-10, IID, 50 peers", {"fedavg-dec": "+10.23 ± 0.57"}, {}, {}),
        (
            "n50-niid",
            "Table 6",
            PAPER_50,
            "CIFAR-100, non-IID, 50 peers",
            {"fedavg-dec": "+19.95 ± 0.70"},
            CIFAR_100,
            {},
        ),
        ("n50-iid", "Table 6", PAPER_50, "CIFAR-100, IID, 50 peers", {"fedavg-dec": "+17.20 ± 0.40"}, CIFAR_100, {}),
        ("n100-niid", "Table 6", PAPER_100, "CIFAR-10, non-IID, 100 peers", {"fedavg-dec": "+13.96 ± 0.23"}, {}, {}),
        ("n100-iid", "Table 6", PAPER_100, "CIFAR-10, IID, 100 peers", {"fedavg-dec": "+8.94 ± 0.79"}, {}, {}),
        (
            "n50-niid-h0",
            "Table 3",
            PAPER_50,
            "CIFAR-10, non-IID",
            {"fedavg-dec": "+1.59 ± 0.96", "fedprox-dec": "+1.72 ± 0.84", "def-kt": "+3.68 ± 0.85"},
            {},
            {},
        ),
        (
            "n50-niid-h1-cnn",
            "Table 4",
            PAPER_50,
            "CNNs, CIFAR-10, non-IID",
            {"fedavg-dec": "+14.03 ± 0.42", "heterofl": "+9.66 ± 1.5", "fedrolex": "+9.57 ± 0.86"},
            {},
            {},
        ),
        (
            "n50-niid-h1-resnet",
            "Table 4",
            PAPER_50,
            "ResNets, CIFAR-10, non-IID",
            {"fedavg-dec": "+16.31 ± 1.9", "heterofl": "+2.32 ± 1.5", "fedrolex": "+1.83 ± 0.46"},
            {},
            {},
        ),
        (
            "n50-niid-h1-vit",
            "Table 4",
            PAPER_50,
            "ViTs, CIFAR-10, non-IID",
            {"fedavg-dec": "+3.74 ± 0.64", "heterofl": "+0.60 ± 0.22", "fedrolex": "+0.94 ± 1.5"},
            {},
            {},
        ),
        (
            "n50-niid-h1-resnet",
            "Table 5",
            PAPER_FMNIST,
            "Fashion-MNIST, non-IID",
            {"fedavg-dec": "+13.78 ± 0.30", "heterofl": "+1.82 ± 0.23", "fedrolex": "+1.25 ± 0.46"},
            FMNIST,
            {},
        ),
        (
            "n10-niid-h2-efficientnet",
            "Table 7",
            PAPER_CALTECH,
            "Caltech101, non-IID",
            {"fedavg-dec": "+34.78 ± 0.34"},
            {},
            {},
        ),
        ("n50-niid", "Fig. 6", PAPER_50, "ten networks, CIFAR-10, non-IID", {"fedavg-dec": "above"}, {}, TEN),
        ("bridge", "Table 12", PAPER_50, "two cliques and a bridge", {"fedavg-dec": "+43.49 ± 0.44"}, {}, {}),
        (
            "bridge",
            "Table 11",
            PAPER_50,
            "ResNets, two cliques and a bridge",
            {"fedavg-dec": "+46.41 ± 0.13", "heterofl": "+25.07 ± 0.52", "fedrolex": "+24.98 ± 0.46"},
            {},
            RESNETS,
        ),
    )
    for claim in at_paper_size(
        f"dfml-{file}",
        where,
        scale,
        {
            "dfml": {},
            "fedavg-dec": {**FEDAVG, **({"batch": 8} if "efficientnet" in file else {})},
            **OTHERS.get(file, PARTIAL),
        },
        data,
        {("dfml", other): paper for other, paper in papers.items()},
        label=label,
        changes=changes,
    )
]

TABLE_6 = tuple(f"n{peers}-{part}" for peers in (10, 50, 100) for part in ("iid", "niid"))
RESTRICTED = tuple(f"n50-niid-h1-{network}" for network in ("cnn", "resnet", "vit"))
"""Tables 4 and 9."""
RESNET, EFFICIENTNET = RESTRICTED[1:2], ("n10-niid-h2-efficientnet",)
BOTH = ("cifar10", "cifar100")
IID: Mapping[str, Any] = {"partition": {"name": "iid-train", "validation": 0.2}}
TABLE_9: Mapping[str, Mapping[str, Any]] = {
    f"{supervision}, {shape}": {"name": "dfml", "supervision": supervision, **alpha}
    for supervision in ("ce", "wsm")
    for shape, alpha in (("fixed", {"shape": "fixed", "alpha_max": 0.5}), ("cyclic", {}))
}
"""Two supervision signals, α fixed or cyclic."""
FIG_9: Mapping[str, Mapping[str, Any]] = {
    "cyclic": TABLE_9["ce, cyclic"],
    **{f"α = {alpha}": {**TABLE_9["ce, fixed"], "alpha_max": alpha} for alpha in (0.5, 0.8, 1.0)},
}
AGAINST_FEDAVG: Mapping[str, Mapping[str, Any]] = {"dfml": {}, "fedavg-dec": FEDAVG}
MORE_EPOCHS: Mapping[str, Mapping[str, Any]] = {
    f"K = {epochs}": {"name": "dfml", "mutual_epochs": epochs} for epochs in (10, 20)
}
FEWER_SENDERS: Mapping[str, Mapping[str, Any]] = {
    f"{name}, {fraction:.0%} senders": {"name": name, **hyper, "participation": fraction}
    for fraction in (0.5, 0.1)
    for name, hyper in AGAINST_FEDAVG.items()
}


def large(size: int) -> list[dict[str, Any]]:
    """Return the datasets of Table 7, and of Table 5 besides Fashion-MNIST."""
    return [{"name": name, "size": size} for name in ("caltech101", "oxford-pets", "stanford-cars")]


def cells(
    files: Sequence[str],
    datasets: Sequence[Any] = ("cifar10",),
    methods: Mapping[str, Mapping[str, Any]] | None = None,
    iid: bool = False,
    changes: Mapping[str, Any] | None = None,
    **hyper: Any,
) -> list[dict[str, Settings]]:
    """Return the runs of each file with each dataset.

    Args:
        methods: {label: hyper-parameters}; by default DFML and those that the paper compares with these networks.
        iid: IID data in files with other data.
        changes: replaces other sections of the file.
        hyper: of all methods.
    """
    return [
        runs_of(
            f"dfml-{file}",
            {
                label: {**own, **hyper}
                for label, own in (methods or {**AGAINST_FEDAVG, **OTHERS.get(file, {})}).items()
            },
            {"dataset": dataset, **(IID if iid else {})},
            changes,
        )
        for file in files
        for dataset in datasets
    ]


def bridge(datasets: Sequence[Any], iid: bool = False) -> list[dict[str, Settings]]:
    """Return the runs of Tables 11 and 12."""
    restricted = {**AGAINST_FEDAVG, **PARTIAL}
    return [
        *cells(("bridge",), datasets, restricted, iid, changes=RESNETS),
        *cells(("bridge",), datasets, iid=iid),
    ]


IID_CELLS = (
    *cells(("n50-niid-h0", *RESTRICTED), BOTH, iid=True),
    *cells(RESNET, ("fashion-mnist",), iid=True),
    *cells(EFFICIENTNET, large(224), iid=True, batch=8),
    *bridge(BOTH, iid=True),
)
"""Tables 3, 4, 5 (the large images have a row of their own), 7, 11 and 12; CIFAR-10 in Table 6 has claims."""
CIFAR_100_CELLS = (
    *cells(("n50-niid-h0", *RESTRICTED), ("cifar100",)),
    *cells((*TABLE_6[:2], *TABLE_6[4:]), ("cifar100",)),
    *bridge(("cifar100",)),
)
"""Tables 3, 4, 6, 11 and 12, but for those cells and those with a claim."""
