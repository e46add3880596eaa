"""FedTGP's claims, at a size that two cores can do.

Fashion-MNIST, ten peers with the eight networks of HtCNN8, batch 10, learning rate 0.01, as in the paper; but 15
rounds instead of 1000, about 125 training samples a peer instead of 2600, and 64 features (one of Table 4's) instead
of 512, which makes training the prototypes five times faster. A tenth of all samples, 700 a peer, is for testing; of
the rest all but a fiftieth is held out, and nobody touches it.

Accuracy is Σ correct / Σ samples over the peers' own test splits, in percent, after the last round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.claims.claim import Claim, Figures, Played, played
from p2pfl.config import from_dict
from p2pfl.session import load_data

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


def accuracy(run: Played) -> float:
    return 100.0 * sum(result.correct for result in run.results) / sum(result.samples for result in run.results)


def accuracies(methods: Sequence[str], **where: Any) -> Callable[[int], Figures]:
    return lambda seed: {method: accuracy(played(seed, **keys(method, **where))) for method in methods}


def against(name: str, **change: Any) -> Callable[[int], Figures]:
    """FedTGP with another hyper-parameter, and as it is."""
    return lambda seed: {
        name: accuracy(played(seed, **keys("fedtgp", **change))),
        "fedtgp": accuracy(played(seed, **keys("fedtgp"))),
    }


def observed(seed: int, names: Mapping[str, str], **where: Any) -> Figures:
    """What peer 0 observed in the last round, by method; on a complete graph all peers observe the same."""
    figures = {}
    for method in ("fedproto", "fedtgp"):
        last = played(seed, **keys(method, **where)).records(0)[-1]["observed"]
        figures.update({f"{method} {shown}": last[name] for name, shown in names.items()})
    return figures


def traffic(seed: int) -> Figures:
    """Numbers that all peers send in a round, as counted and as Table 5's formula says, without and with a server."""
    run, given = played(seed, **keys("fedtgp")), keys("fedtgp")
    dataset, shares = load_data(from_dict({"name": "claim", "seed": seed, **given}))
    features, labels = given["models"]["features"], dataset.labelled.pool
    held = [len(np.unique(labels[share.train])) for share in shares]
    counted = [peer[-1]["out"] for peer in run.all_records]
    return {
        "counted": sum(kinds["Prototypes"][1] for out in counted for kinds in out.values()) / 4,
        "Σ over directed edges of d·C_j": features * sum(held) * (PEERS - 1),
        "with a server, Σ d·(C_j + C)": features * sum(own + dataset.classes for own in held),
    }


COMPARED = ("local", "lg-fedavg", "fedproto", "fedtgp")

CLAIMS: Sequence[Claim] = (
    Claim(
        "margins, class by class",
        "Fig. 1",
        "share of the classes whose global prototype is at least as far from the nearest other as at the best peer: "
        "fedtgp = 1 > fedproto",
        lambda seed: observed(seed, {"wider": "share"}),
        lambda f: f["fedtgp share"] == 1.0 > f["fedproto share"],
    ),
    Claim(
        "smallest margin",
        "Fig. 1",
        "smallest distance of global prototypes against the largest of the peers' own, d = 512, 8 rounds: "
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
