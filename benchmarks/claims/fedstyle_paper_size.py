"""FedStyle's runs at the paper's own size, of which the ledger has the price."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.claims.claim import Settings
from benchmarks.claims.paper_size import runs_of

FEDAVG = ("fedavg-ssl",)
OTHERS = ("fedper-ssl", "fedrep-ssl", "fedprox-ssl", "apfl-ssl", "ditto-ssl")
"""Compared in personalization alone, as FedAvg is too."""
CONCENTRATIONS: Mapping[str, Mapping[str, Any]] = {"IID": {}, "β = 0.2": {"beta": 0.2}, "β = 0.8": {"beta": 0.8}}
"""Of the Dirichlet partition of a style among its peers; Tables 2 and 3."""
ALL = tuple(CONCENTRATIONS)
ONE, FIVE = (tuple(f"{dataset}-{peers}" for dataset in ("office-home", "adaptiope")) for peers in (1, 5))
"""Peers per style."""


def cells(
    others: Sequence[str], files: Sequence[str], partitions: Sequence[str] = ("IID",)
) -> list[dict[str, Settings]]:
    """Return FedStyle's run and the other methods' runs for each file and partition, with SimCLR and with SimSiam."""
    return [
        runs_of(
            f"fedstyle-{file}",
            {
                "fedstyle": {"loss": loss},
                **{other: {"loss": loss, "participation": 1.0 if file.endswith("-1") else 0.5} for other in others},
            },
            {"partition": {"name": "styles", **CONCENTRATIONS[partition]}},
        )
        for file in files
        for partition in partitions
        for loss in ("simclr", "simsiam")
    ]
