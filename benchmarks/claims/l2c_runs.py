"""The runs of L2C's claims; the ``l2c`` module says of what size they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.claims.claim import Settings

RATES = (0.01, 0.05, 0.1)
"""The paper's grid."""
LOCAL: Mapping[str, Any] = {"batch": 10, "lr": 0.01, "weight_decay": 5e-4}
MODEL = "dfml-cnn-8-16"
PAPER = "100 peers, 100 rounds, 400 samples"
GROUP_RING = {"name": "small-world", "degree": 10, "p": 0}


def shards(
    name: str, seconds: float, graph: Any = "complete", rounds: int = 20, peers: int = 100, **algorithm: Any
) -> Settings:
    """Two of CIFAR-10's classes for each peer."""
    partition = {"name": "shards", "classes_per_peer": 2, "shards": 100, "validation": 0.2}
    tree = {
        "rounds": rounds,
        "peers": peers,
        "graph": graph,
        "data": {"dataset": "cifar10-part", "partition": partition},
        "models": MODEL,
        "algorithm": {"name": name, "local_epochs": 5, **LOCAL, **algorithm},
        "eval_every": rounds // 4,
    }
    return Settings(tree, seconds, RATES)


PRUNED: Mapping[str, Any] = {"prune_round": 4, "prune_to": 10}
TABLE_2 = {
    "local": shards("local", 230),
    "dpsgd": shards("dpsgd", 260, GROUP_RING),
    "fedavg": shards("fedavg", 260, rounds=200, participation=0.1),
    "l2c": shards("l2c", 330, **PRUNED),
    "meta-l2c": shards("meta-l2c", 400, **PRUNED),
    "ditto": shards("ditto", 520, rounds=200, participation=0.1),
    "fedfomo": shards("fedfomo", 350, models=10),
    "cga": shards("cga", 6000, GROUP_RING, rounds=480, local_epochs=None),
}
BRIEF = {**TABLE_2, "ditto": shards("ditto", 190, participation=0.1)}
"""With a tenth of the epochs for Ditto."""
FEW = {
    "local": shards("local", 70, peers=30),
    "l2c": shards("l2c", 100, peers=30, prune_round=4, prune_to=4),
    "cga": shards("cga", 550, {"name": "small-world", "degree": 4, "p": 0}, rounds=480, peers=30, local_epochs=None),
}
"""What CGA costs grows with peers times neighbors."""
ONE_STEP = {
    "1 step": shards("dpsgd", 600, GROUP_RING, rounds=500, local_epochs=None, local_steps=1),
    "5 epochs": TABLE_2["dpsgd"],
    **{name: TABLE_2[name] for name in ("local", "l2c")},
}
PAPERS_RATE = Settings(TABLE_2["l2c"].tree, 330)
"""L2C with the paper's learning rate, 0.01; TABLE_2 has the one that its tuning run preferred."""
CLIPPED = {
    label: Settings({**found.tree, "models": f"{MODEL}+relu"}, found.seconds, RATES, series="masked")
    for label, found in TABLE_2.items()
    if label in ("local", "dpsgd")
}
"""As later code of the authors trains and tests: a ReLU on the scores, of which the peer's classes count."""


def groups(name: str, seconds: float, rounds: int = 10, **algorithm: Any) -> Settings:
    """15 peers in 5 groups of 3 with the same two classes, 48 training and 12 validation images of each."""
    tree = {
        "rounds": rounds,
        "peers": 15,
        "data": {"dataset": "fashion-mnist", "partition": {"name": "groups", "groups": 5, "per_class": 60}},
        "models": MODEL,
        "algorithm": {"name": name, **LOCAL, "local_epochs": 2, **algorithm},
        "eval_every": rounds,
    }
    return Settings(tree, seconds)


def on_cifar10(found: Settings, seconds: float) -> Settings:
    """The same on CIFAR-10, with 400 training images a peer and five epochs per round."""
    partition = {**found.tree["data"]["partition"], "per_class": 250}
    data = {"dataset": "cifar10-part", "partition": partition}
    algorithm = {**found.tree["algorithm"], "local_epochs": 5}
    return Settings({**found.tree, "data": data, "algorithm": algorithm, "eval_every": 1}, seconds)


def with_validation(fraction: float, name: str = "l2c", **algorithm: Any) -> Settings:
    found = groups(name, 25, **algorithm)
    partition = {**found.tree["data"]["partition"], "validation": fraction}
    return Settings({**found.tree, "data": {**found.tree["data"], "partition": partition}}, 25)


GROUPS = {
    "l2c": groups("l2c", 25, prune_round=None),
    "l2c, 2 kept": groups("l2c", 20, prune_round=3, prune_to=2),
    "meta-l2c": groups("meta-l2c", 35, prune_round=None),
    "meta-l2c, 2 kept": groups("meta-l2c", 30, prune_round=3, prune_to=2),
    "local": groups("local", 15),
}
FROZEN = groups("meta-l2c", 45, rounds=2, prune_round=None)
FROZEN = Settings(FROZEN.tree, FROZEN.seconds, probe="encoder of other tasks")
SHARED = {
    name: Settings(
        {
            **GROUPS[name].tree,
            "peers": 20,
            "data": {
                "dataset": "fashion-mnist",
                "partition": {"name": "shards", "classes_per_peer": 5, "shards": 200},
            },
        },
        seconds,
    )
    for name, seconds in (("l2c", 60), ("meta-l2c", 90))
}
VALIDATION = {
    name: {f"{name}, {fraction}": with_validation(fraction, name, **more) for fraction in (0.1, 0.2, 0.4)}
    for name, more in (
        ("l2c", {"prune_round": None}),
        ("meta-l2c", {"prune_round": None}),
        ("fedfomo", {"models": 5}),
    )
}
AT_PAPERS_RATE = {**TABLE_2, "l2c": PAPERS_RATE}
DIFFER_LESS = (
    ("L2C's peers differ less", TABLE_2, ("l2c", "local"), "−2.29 ± 7.0 (5.85 ± 3.31 against 8.14 ± 5.61"),
    (
        "L2C's peers differ less, the paper's rate",
        AT_PAPERS_RATE,
        ("l2c", "local"),
        "−2.29 ± 7.0 (5.85 ± 3.31 against 8.14 ± 5.61",
    ),
    (
        "L2C's peers differ less than FedFomo's",
        TABLE_2,
        ("l2c", "fedfomo"),
        "−3.17 ± 7.1 (5.85 ± 3.31 against 9.02 ± 5.72",
    ),
    ("meta-L2C's peers differ less", TABLE_2, ("meta-l2c", "local"), "−0.80 ± 7.3 (7.34 ± 4.15 against 8.14 ± 5.61"),
    (
        "meta-L2C's peers differ less than FedFomo's",
        TABLE_2,
        ("meta-l2c", "fedfomo"),
        "−1.68 ± 7.4 (7.34 ± 4.15 against 9.02 ± 5.72",
    ),
)
"""Table 3: name, runs, whose standard deviation is less than whose, and the paper's."""
