"""FedTGP's claims, at a size that fits two cores.

Fashion-MNIST, ten peers with the eight networks of HtCNN8, batch 10, learning rate 0.01, as in the paper; but 15
rounds instead of 1000, about 125 training samples a peer instead of 2600, and 64 features (one of Table 4's) instead
of 512, which makes training the prototypes five times faster. A tenth of all samples, 700 a peer, is for testing;
98 % of the rest is unused.

Accuracy is Σ correct / Σ samples over the peers' local test splits, in percent, after the last round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.claims.claim import Claim, Figures, SimulatedRun, simulated
from p2pfl.run_file.load import from_dict
from p2pfl.session.build import load_data

PEERS = 10
PARTITIONS: Mapping[str, Mapping[str, Any]] = {
    "practical": {"name": "dirichlet", "beta": 0.1, "test": 0.1, "validation": 0.98},
    "pathological": {"name": "pathological", "classes_per_peer": 2, "test": 0.1, "validation": 0.98},
}


def keys(method: str, partition: str = "practical", rounds: int = 15, features: int = 64, **h: Any) -> dict[str, Any]:
    momentum = {} if method in ("fedproto", "fedtgp") else {"momentum": 0.0}
    return {
        "rounds": rounds,
        "peers": PEERS,
        "graph": "complete",
        "data": {"dataset": "fashion-mnist", "partition": PARTITIONS[partition]},
        "models": {"name": "htcnn8", "features": features},
        "algorithm": {"name": method, "batch": 10, "lr": 0.01, **momentum, **h},
        "eval_every": rounds,
    }


def accuracy(run: SimulatedRun) -> float:
    return 100.0 * sum(result.correct for result in run.results) / sum(result.samples for result in run.results)


def accuracies(methods: Sequence[str], **where: Any) -> Callable[[int], Figures]:
    return lambda seed: {method: accuracy(simulated(seed, **keys(method, **where))) for method in methods}


def against(name: str, **change: Any) -> Callable[[int], Figures]:
    """Compare FedTGP with a changed hyper-parameter to unchanged FedTGP."""
    return lambda seed: {
        name: accuracy(simulated(seed, **keys("fedtgp", **change))),
        "fedtgp": accuracy(simulated(seed, **keys("fedtgp"))),
    }


def observed(seed: int, names: Mapping[str, str], **where: Any) -> Figures:
    """Return peer 0's diagnostics of the last round, by method; on a complete graph they are equal on all peers."""
    figures = {}
    for method in ("fedproto", "fedtgp"):
        last = simulated(seed, **keys(method, **where)).records(0)[-1]["diagnostics"]
        figures.update({f"{method} {label}": last[name] for name, label in names.items()})
    return figures


def traffic(seed: int) -> Figures:
    """Return the numbers sent in a round, as counted and by Table 5's formulas without and with a server."""
    run, given = simulated(seed, **keys("fedtgp")), keys("fedtgp")
    dataset, subsets = load_data(from_dict({"name": "claim", "seed": seed, **given}))
    features, labels = given["models"]["features"], dataset.labels.pool
    local_classes = [len(np.unique(labels[subset.train])) for subset in subsets]
    counted = [peer[-1]["sent"] for peer in run.all_records]
    return {
        "counted": sum(kinds["Prototypes"][1] for out in counted for kinds in out.values()) / 4,
        "Σ over directed edges of d·C_j": features * sum(local_classes) * (PEERS - 1),
        "with a server, Σ d·(C_j + C)": features * sum(count + dataset.classes for count in local_classes),
    }


COMPARED = ("local", "lg-fedavg", "fedproto", "fedtgp")

CLAIMS: Sequence[Claim] = (
    Claim(
        "margins, class by class",
        "Fig. 1",
        "fraction of the classes whose global prototype is as far from the nearest other as at the best peer: "
        "fedtgp = 1 > fedproto",
        lambda seed: observed(seed, {"wider": "fraction"}),
        lambda f: f["fedtgp fraction"] == 1.0 > f["fedproto fraction"],
    ),
    Claim(
        "smallest margin",
        "Fig. 1",
        "smallest distance of global prototypes against the largest one of a peer, d = 512, 8 rounds: "
        "fedtgp's at least that, fedproto's less",
        lambda seed: observed(seed, {"margin": "global", "peer_margin": "best peer"}, rounds=8, features=512),
        lambda f: f["fedtgp global"] >= f["fedtgp best peer"] and f["fedproto global"] < f["fedproto best peer"],
    ),
    Claim(
        "fedtgp best, practical",
        "Table 10",
        "fedtgp > each of the others",
        accuracies(COMPARED),
        lambda f: f["fedtgp"] > max(f["fedproto"], f["lg-fedavg"], f["local"]),
    ),
    Claim(
        "fedproto next, practical",
        "Table 10",
        "fedproto > lg-fedavg",
        accuracies(("lg-fedavg", "fedproto")),
        lambda f: f["fedproto"] > f["lg-fedavg"],
    ),
    Claim(
        "fedtgp best, pathological",
        "Table 10",
        "fedtgp > each of the others, 8 rounds",
        accuracies(COMPARED, partition="pathological", rounds=8),
        lambda f: f["fedtgp"] > max(f["fedproto"], f["lg-fedavg"], f["local"]),
    ),
    Claim(
        "a margin helps",
        "Table 6",
        "SCL, no margin < fedtgp",
        against("SCL", margin="none"),
        lambda f: f["SCL"] < f["fedtgp"],
    ),
    Claim(
        "an adaptive margin helps",
        "Table 6",
        "FM, the margin fixed at 100 < fedtgp",
        against("FM", margin="fixed"),
        lambda f: f["FM"] < f["fedtgp"],
    ),
    Claim(
        "F helps",
        "Table 6",
        "without F < fedtgp",
        against("w/o F", transform=False),
        lambda f: f["w/o F"] < f["fedtgp"],
    ),
    Claim(
        "τ = 1 is too small",
        "Table 7",
        "τ = 1 < fedtgp, where τ = 100",
        against("τ = 1", threshold=1.0),
        lambda f: f["τ = 1"] < f["fedtgp"],
    ),
    Claim(
        "more epochs on the prototypes help",
        "Table 7",
        "S = 1 < fedtgp, where S = 100",
        against("S = 1", prototype_epochs=1),
        lambda f: f["S = 1"] < f["fedtgp"],
    ),
    Claim(
        "communication",
        "Table 5",
        "numbers in a round's payload = Σ over directed edges of d·C_j",
        traffic,
        lambda f: f["counted"] == f["Σ over directed edges of d·C_j"],
    ),
)
