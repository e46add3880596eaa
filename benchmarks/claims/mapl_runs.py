"""The runs of MAPL's claims; the ``mapl`` module says of what size they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmarks.claims.claim import Settings

RATES = (0.0005, 0.001, 0.002)
PAPER = "20 peers, 400 rounds, 1,500 samples"
SAMPLES = {1: "1,500", 2: "2,100", 3: "1,000", 4: "1,400"}
"""Training samples of a peer in each scenario; of 3 and 4 the mean."""
PAPER_10 = "10 peers, 200 rounds, 1,500 samples"
PAPER_10_SC_2 = "10 peers, 200 rounds, 1,800 samples"
SCENARIOS: Mapping[int, Mapping[str, Any]] = {
    1: {"per_class": 30},
    2: {"per_class": 30, "overlap": 4},
    3: {"per_class": [10, 30]},
    4: {"per_class": [10, 30], "overlap": 4},
}

ADAM: Mapping[str, Any] = {"optimizer": "adam", "lr": 0.001}
OWN: Mapping[str, Any] = {"lr": 0.001, "warmup": 20, "projector_hidden": 128}


def colors(
    name: str,
    seconds: float,
    models: str = "tiny4",
    peers: int = 8,
    scenario: int = 1,
    per_class: int | None = None,
    **h: Any,
) -> Settings:
    """The part of CIFAR-10, two clusters; ``per_class`` images, or else as many as SCENARIOS has.

    Sc. 2 has batches of 15: with 16, the last one of 210 samples would have two, too few for the batch
    normalization of MAPL's projector. In Sc. 3 and 4, where peers differ in samples, incomplete batches are dropped,
    as the released code does.
    """
    own = {**(OWN if name.startswith("mapl") else ADAM), **({"drop_last": True} if scenario > 2 else {})}
    partition = {"name": "clusters", "clusters": 2, "test_per_class": 100, **SCENARIOS[scenario]}
    if per_class is not None:
        partition["per_class"] = per_class
    tree = {
        "rounds": 80,
        "peers": peers,
        "data": {"dataset": "cifar10-part", "partition": partition, "augment": "mapl"},
        "models": models,
        "algorithm": {"name": name, "batch": 15 if scenario == 2 else 16, **own, **h},
        "eval_every": 5,
    }
    series = "own_head" if name in ("fedsim", "fedclassavg") else "accuracy"
    return Settings(tree, seconds * peers / 8, RATES, series)


TABLE_1: Mapping[int, Mapping[str, Settings]] = {
    scenario: {
        "mapl": colors("mapl", 150 * share, scenario=scenario),
        "local": colors("local", 75 * share, scenario=scenario),
        "fedproto": colors("fedproto", 85 * share, scenario=scenario, alignment=0.1),
        "fedclassavg": colors("fedclassavg", 130 * share, scenario=scenario),
        "fedsim": colors("fedsim", 80 * share, scenario=scenario),
    }
    for scenario, share in ((1, 1.0), (2, 1.4), (3, 0.67), (4, 0.93))
}
"""By scenario; the shares are their samples relative to Sc. 1's, which the duration grows with."""
MAPL, LOCAL = TABLE_1[1]["mapl"], TABLE_1[1]["local"]
MAPL_2, LOCAL_2 = TABLE_1[2]["mapl"], TABLE_1[2]["local"]
TEN = colors("mapl", 150, peers=10)
"""As many as in Fig. 4: the fewer peers, the more the graph's similarities weigh against its regularizer."""
MORE_SAMPLES = replace(colors("mapl", 800, peers=4, per_class=150, batch=64), rates=())
"""Batches as in the paper, in which a class has four times as many views as with 16; at the rate of those."""
TERMS: Mapping[str, str] = {"l_proto": "prototype", "l_cont": "contrastive", "l_uni": "uniformity", "l_g": "cgl"}
"""Of Table 2, and the options that turn them off."""
SINGLE_VIEW: Mapping[str, Any] = {"contrastive": False, "single_view": True}
"""Without l_cont and the second view, which no other term needs."""
WHOLE_BATCHES = MAPL.but(batch=15)
"""With batches of 16 the last one of 150 samples has six."""
EQUAL = {
    "mapl+": colors("mapl+", 110, "tiny-cnn"),
    "mapl": colors("mapl", 100, "tiny-cnn"),
    "local": colors("local", 45, "tiny-cnn"),
    "dfedavgm": colors("dfedavgm", 55, "tiny-cnn", optimizer="sgd", lr=0.01),
    "fedavg": colors("fedavg", 50, "tiny-cnn"),
    "pfedsim": colors("pfedsim", 50, "tiny-cnn"),
    "fedclassavg": colors("fedclassavg", 80, "tiny-cnn"),
    "flt": colors("flt", 75, "tiny-cnn"),
}
CLUSTERS = [[i, j] for first in (0, 4) for j in range(first, first + 4) for i in range(first, j)]
EQUAL["fedavg in clusters"] = replace(
    EQUAL["fedavg"],
    tree={**EQUAL["fedavg"].tree, "graph": {"name": "edges", "edges": CLUSTERS, "allow_disconnected": True}},
)
"""What FLT is if it finds the clusters, which takes more centers than eight peers have."""
EQUAL["dfedavgm"] = Settings(EQUAL["dfedavgm"].tree, 55, (0.01, 0.02, 0.05))
EQUAL_2 = {
    "mapl+": colors("mapl+", 155, "tiny-cnn", scenario=2),
    "mapl": colors("mapl", 140, "tiny-cnn", scenario=2),
}


def digits(overlap: int = 0, **hyper: Any) -> Settings:
    """10 peers with four small networks, 14 samples of each of 5 digits (6 with an overlap of 2), 30 rounds."""
    tree = {
        "rounds": 30,
        "peers": 10,
        "data": {
            "dataset": "digits",
            "partition": {
                "name": "clusters",
                "clusters": 2,
                "overlap": overlap,
                "per_class": 14,
                "test_per_class": 30,
            },
            "augment": "none",
        },
        "models": "tiny4",
        "algorithm": {"name": "mapl", "lr": 0.001, "batch": 32, "warmup": 8, "projector_hidden": 128, **hyper},
        "eval_every": 5,
    }
    return Settings(tree, 25)


def with_heads(**hyper: Any) -> Settings:
    found = digits(cgl=False, **hyper)
    return Settings(found.tree, found.seconds, probe="heads")


RANDOM_START: Mapping[str, Any] = {"shared_init": False, "compare": "weights"}
ALIGNED = {"with l_proto": with_heads(**RANDOM_START), "without": with_heads(prototype=False, **RANDOM_START)}
COLOR_HEADS = {
    name: Settings(found.tree, found.seconds, probe="heads")
    for name, found in {
        "with l_proto": colors("mapl", 120, peers=10, cgl=False, **RANDOM_START),
        "without": colors("mapl", 120, peers=10, cgl=False, prototype=False, **RANDOM_START),
    }.items()
}
PLAIN_HEADS = with_heads(prototype=False, head_relu=False, **RANDOM_START)
"""Without a ReLU: the paper prints one on the head's output; its code has one before it, and makes heads alike."""
STEPS = {f"E_g {steps}": digits(4, graph_steps=steps, batch=33) for steps in (1, 2, 5, 10, 20)}
"""With batches of 32 the last one of 98 samples would have two."""
UNPRUNED = digits(prune=False)


def without_terms(*kept: str) -> dict[str, bool]:
    """Return the options that turn off all terms but those ``kept``, and l_ce.

    Without any of them the second view and the kind of classifier remain beyond local training.
    """
    return {option: False for term, option in TERMS.items() if term not in kept}


def paper_scale(scenario: int) -> str:
    return PAPER.replace(SAMPLES[1], SAMPLES[scenario])
