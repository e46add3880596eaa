"""The small runs that the parity tests and the golden check share: every algorithm, with its special cases.

A run is the arguments of ``tests.conftest.tree``: changes to a run file with four peers and three rounds. An
algorithm that none of them names has one with its defaults.
"""

from __future__ import annotations

from typing import Any

from p2pfl.algorithms import ALGORITHMS

SMALL = {"name": "mapl", "warmup": 1, "batch": 16, "lr": 0.01, "projector_hidden": 16}
MAPL = {**SMALL, "compare": "weights", "head_init_scale": 0.1, "betas": [0.5, 0.999]}
L2C = {"local_epochs": 1, "batch": 16}
AUTOENCODER = {"encoder_epochs": 2, "encoder_lr": 0.01, "latent": 8, "manifold": "none", "threshold": 0.33}
TASKS = {"name": "groups", "groups": 2, "per_class": 10, "validation": 0.3}

STYLES = {"name": "styles", "per_peer": 30}
STYLED = {"dataset": {"name": "styled", "of": "digits", "styles": 2}, "partition": STYLES, "augment": "simclr"}
SSL = {
    "batch": 16,
    "local_epochs": 1,
    "probe_epochs": 3,
    "probe_steps": 1,
    "probe_samples": 50,
    "probe_peers": 2,
}
FEDSTYLE = {**SSL, "name": "fedstyle", "style_epochs": 2, "train_generator": False}

RUNS: dict[str, dict[str, Any]] = {
    "local": {"algorithm": {"name": "local", "batch": 16, "momentum": 0.9}, "peers": 4, "models": "tiny4"},
    "dpsgd, steps": {
        "algorithm": {"name": "dpsgd", "batch": 16, "local_steps": 2, "lr": 0.05, "momentum": 0.9},
        "graph": "ring",
        "peers": 5,
    },
    "dpsgd, epochs": {
        "algorithm": {"name": "dpsgd", "batch": 16, "local_epochs": 1, "lr": 0.05},
        "graph": {"name": "erdos-renyi", "p": 0.6},
        "peers": 6,
        "models": "tiny-cnn",
    },
    # Another graph in every round; connected over the union of all.
    "dpsgd, el-local": {
        "algorithm": {"name": "dpsgd", "batch": 16, "local_steps": 1, "lr": 0.05},
        "graph": {"name": "el-local", "receivers": 1},
        "models": "tiny-cnn",
        "peers": 5,
        "rounds": 5,
    },
    "fedavg, some take part": {
        "algorithm": {"name": "fedavg", "batch": 16, "momentum": 0.9, "participation": 0.5},
        "graph": {"name": "regular", "degree": 3},
        "peers": 6,
        "models": "tiny-cnn",
    },
    "lg-fedavg": {
        "algorithm": {"name": "lg-fedavg", "batch": 16, "momentum": 0.9},
        "peers": 5,
        "graph": "ring",
        "models": "tiny4",
    },
    # Two models with momentum; the architecture has batch normalization.
    "ditto, some take part": {
        "algorithm": {"name": "ditto", "batch": 16, "momentum": 0.9, "participation": 0.5, "personal_epochs": 2},
        "graph": {"name": "regular", "degree": 3},
        "peers": 6,
        "models": "tiny-cnn",
    },
    "fedsim, some take part": {
        "algorithm": {"name": "fedsim", "batch": 16, "momentum": 0.9, "participation": 0.5},
        "graph": {"name": "regular", "degree": 3},
        "models": "tiny4",
        "peers": 6,
    },
    "fedclassavg": {
        "algorithm": {"name": "fedclassavg", "batch": 16, "lr": 0.001},
        "data": {"augment": "mapl"},
        "graph": "ring",
        "models": "tiny4",
        "peers": 5,
    },
    "fedclassavg, official": {
        "algorithm": {"name": "fedclassavg", "preset": "official", "batch": 16, "participation": 0.5},
        "data": {"augment": "mapl"},
        "models": "tiny4",
    },
    # FedAvg in the first two rounds; one joins after the next, and most of the peers take part.
    "pfedsim, one joins late": {
        "algorithm": {"name": "pfedsim", "batch": 16, "momentum": 0.9, "generalization": 0.4, "participation": 0.7},
        "data": {"partition": {"name": "clusters", "clusters": 2, "per_class": 8, "test_per_class": 5}},
        "graph": {"name": "erdos-renyi", "p": 0.7},
        "models": "tiny-cnn",
        "peers": 6,
        "rounds": 6,
        "joins_at": {3: 3},
    },
    # Peer 5 joins when the others have chosen their neighbors; half of the peers take part.
    "flt, one joins late": {
        "algorithm": {"name": "flt", "batch": 16, "momentum": 0.9, "participation": 0.5, **AUTOENCODER},
        "data": {"partition": {"name": "clusters", "clusters": 2, "per_class": 8, "test_per_class": 5}},
        "graph": {"name": "regular", "degree": 4},
        "models": "tiny-cnn",
        "peers": 6,
        "rounds": 4,
        "joins_at": {5: 2},
    },
    "dfedavgm": {"algorithm": {"name": "dfedavgm", "batch": 16}, "peers": 5, "graph": "star"},
    # Degrees and weights differ; every second round averages.
    "swift": {
        "algorithm": {"name": "swift", "batch": 16, "average_every": 2, "lr": 0.05},
        "graph": {"name": "erdos-renyi", "p": 0.6},
        "models": "tiny-cnn",
        "peers": 6,
        "rounds": 4,
    },
    "divshare, one joins late": {
        "algorithm": {"name": "divshare", "batch": 16, "fragment": 0.3, "receivers": 2, "share_statistics": True},
        "models": "tiny-cnn",
        "peers": 5,
        "joins_at": {4: 1},
    },
    "fedproto, some take part": {
        "algorithm": {"name": "fedproto", "participation": 0.5},
        "graph": {"name": "regular", "degree": 3},
        "models": "tiny4",
        "peers": 6,
    },
    "fedtgp": {
        "algorithm": {"name": "fedtgp", "prototype_epochs": 10},
        "data": {"partition": {"name": "dirichlet"}},
        "models": "tiny4",
    },
    # The paper's form: probabilities, and the means of the others.
    "feddistill, some take part": {
        "algorithm": {"name": "feddistill", "batch": 16, "preset": "paper", "participation": 0.5},
        "graph": {"name": "regular", "degree": 3},
        "data": {"partition": {"name": "dirichlet"}},
        "models": "tiny4",
        "peers": 6,
    },
    "fedgen, some take part": {
        "algorithm": {"name": "fedgen", "batch": 16, "momentum": 0.9, "participation": 0.5, "generator_steps": 20},
        "graph": {"name": "regular", "degree": 3},
        "models": "tiny4",
        "peers": 6,
    },
    # The meme has another architecture than the first and last peers' private models, and batch normalization.
    "fml, some take part": {
        "algorithm": {"name": "fml", "batch": 16, "momentum": 0.9, "participation": 0.5, "meme": "tiny-wide"},
        "graph": {"name": "regular", "degree": 3},
        "models": "tiny4",
        "peers": 6,
    },
    "fedstyle, some take part": {
        "algorithm": {**FEDSTYLE, "participation": 0.5},
        "data": STYLED,
        "graph": {"name": "regular", "degree": 3},
        "models": "tiny-cnn",
    },
    "fedstyle, simsiam": {
        "algorithm": {**FEDSTYLE, "loss": "simsiam", "train_generator": True, "style_epochs": 1},
        "graph": "ring",
        "models": "tiny-residual",
        "rounds": 2,
    },
    "fedavg-ssl": {
        "algorithm": {**SSL, "name": "fedavg-ssl"},
        "data": STYLED,
        "graph": "ring",
        "models": "tiny-residual",
        "rounds": 2,
    },
    "fedper-ssl": {
        "algorithm": {**SSL, "name": "fedper-ssl", "loss": "simsiam"},
        "data": STYLED,
        "graph": "ring",
        "models": "tiny-residual",
        "rounds": 2,
    },
    "fedprox-ssl": {
        "algorithm": {**SSL, "name": "fedprox-ssl"},
        "data": STYLED,
        "graph": "ring",
        "models": "tiny-residual",
        "rounds": 2,
    },
    "fedrep-ssl, some take part": {
        "algorithm": {**SSL, "name": "fedrep-ssl", "participation": 0.5},
        "data": STYLED,
        "graph": {"name": "regular", "degree": 3},
        "models": "tiny-residual",
    },
    "apfl-ssl": {
        "algorithm": {**SSL, "name": "apfl-ssl"},
        "data": STYLED,
        "graph": "ring",
        "models": "tiny-residual",
        "rounds": 2,
    },
    "ditto-ssl, simsiam": {
        "algorithm": {**SSL, "name": "ditto-ssl", "loss": "simsiam"},
        "data": STYLED,
        "graph": "ring",
        "models": "tiny-residual",
        "rounds": 2,
    },
    # Large steps: weights reach 0 in a few rounds, first in one direction of an edge, then in both.
    "mapl, pruned": {
        "algorithm": {**MAPL, "graph_lr": 2.0, "graph_steps": 3},
        "data": {
            "augment": "mapl",
            "partition": {"name": "clusters", "clusters": 2, "per_class": [3, 20], "test_per_class": 5},
        },
        "models": "tiny4",
        "peers": 6,
        "rounds": 5,
    },
    # Five of the seven peers are active.
    "ad-psgd": {
        "algorithm": {"name": "ad-psgd", "batch": 16, "momentum": 0.9, "lr": 0.05, "local_steps": 2},
        "graph": {"name": "edges", "edges": [[0, 1], [2, 1], [3, 1], [4, 1], [4, 5], [6, 5], [0, 5]]},
        "peers": 7,
        "rounds": 4,
    },
    "cga": {
        "algorithm": {"name": "cga", "batch": 16, "momentum": 0.9, "lr": 0.05},
        "graph": {"name": "regular", "degree": 3},
        "models": "tiny-mixer",
        "peers": 6,
        "rounds": 6,
    },
    "fedkd, some take part": {
        "algorithm": {"name": "fedkd", "batch": 16, "momentum": 0.9, "participation": 0.5, "energy_start": 0.6},
        "graph": {"name": "regular", "degree": 3},
        "models": "tiny4",
        "peers": 6,
    },
    "dfml": {
        "algorithm": {"name": "dfml", "batch": 16, "mutual_epochs": 2, "period": 3, "mutual_batch_models": 2},
        "graph": {"name": "erdos-renyi", "p": 0.6},
        "data": {"augment": "mapl"},
        "models": "tiny4",
        "peers": 6,
        "rounds": 6,
    },
    # The aggregator's model has dropout.
    "dfml, bridge": {
        "algorithm": {"name": "dfml", "batch": 16, "mutual_epochs": 2, "supervision": "ce"},
        "graph": "bridge",
        "models": "dfml-vit-32",
        "rounds": 5,
    },
    "fedavg-dec": {"algorithm": {"name": "fedavg-dec", "batch": 16}, "models": "tiny4", "peers": 6, "rounds": 5},
    "dfml, wsl": {
        "algorithm": {"name": "dfml", "batch": 16, "mutual_epochs": 2, "shape": "linear", "wsl": True},
        "models": "tiny4",
        "peers": 6,
        "rounds": 4,
    },
    "fml-dec": {"algorithm": {"name": "fml-dec", "batch": 16}, "models": "tiny4", "peers": 6, "rounds": 5},
    "fedprox-dec": {"algorithm": {"name": "fedprox-dec", "batch": 16}, "models": "tiny4", "peers": 6, "rounds": 5},
    # Sparse: not every sender finds a receiver.
    "def-kt": {
        "algorithm": {"name": "def-kt", "batch": 16, "mutual_epochs": 2},
        "graph": {"name": "erdos-renyi", "p": 0.6},
        "data": {"augment": "mapl"},
        "models": "tiny-residual",
        "peers": 6,
        "rounds": 5,
    },
    "heterofl": {
        "algorithm": {"name": "heterofl", "batch": 16},
        "models": ["dfml-resnet-8", "dfml-resnet-4"],
        "rounds": 4,
    },
    # Some rounds lack the widest network, so channels do not roll in them.
    "fedrolex": {
        "algorithm": {"name": "fedrolex", "batch": 16, "participation": 0.2},
        "models": ["dfml-cnn-16-32", "dfml-cnn-8-16"],
        "peers": 5,
        "rounds": 6,
    },
    "mapl, with a budget": {
        "algorithm": {**MAPL, "prune": False, "message_budget": 30},
        "graph": "ring",
        "models": "tiny4",
        "rounds": 50,
    },
    "mapl, two join late": {
        "algorithm": {**MAPL, "graph_lr": 5.0},
        "models": "tiny4",
        "peers": 5,
        "rounds": 5,
        "joins_at": {4: 1, 2: 3},
    },
    "meta-l2c, one joins late": {
        "algorithm": {"name": "meta-l2c", **L2C, "prune_round": 1, "prune_to": 1},
        "data": {"partition": TASKS},
        "graph": "ring",
        "peers": 5,
        "rounds": 4,
        "joins_at": {0: 2},
    },
    "mapl+": {
        "algorithm": {**MAPL, "name": "mapl+", "graph_lr": 4.0, "graph_steps": 2},
        "models": "tiny-cnn",
        "peers": 5,
    },
    "mapl, official": {"algorithm": {**SMALL, "preset": "official"}, "graph": "star", "models": "tiny4"},
    "l2c, pruned": {
        "algorithm": {"name": "l2c", **L2C, "prune_round": 1, "prune_to": 1},
        "data": {"partition": TASKS},
        "peers": 6,
        "rounds": 5,
    },
    "l2c, on disk": {
        "algorithm": {"name": "l2c", **L2C, "precision": "bfloat16", "spool": True},
        "data": {"partition": TASKS},
        "graph": "ring",
        "peers": 5,
    },
    # Two of up to five neighbors are asked, by what was learned or at random.
    "fedfomo": {
        "algorithm": {"name": "fedfomo", "batch": 16, "momentum": 0.9, "lr": 0.05, "models": 2},
        "data": {"partition": TASKS},
        "peers": 6,
        "rounds": 6,
        "models": "tiny-cnn",
        "joins_at": {5: 1},
    },
    # The allreduce tree has all edges of peer 0; after pruning, most of them carry nothing else.
    "meta-l2c, pruned": {
        "algorithm": {"name": "meta-l2c", **L2C, "prune_round": 1, "prune_to": 1},
        "data": {"partition": TASKS},
        "peers": 6,
        "rounds": 5,
    },
}

_named = {settings["algorithm"]["name"] for settings in RUNS.values()}
RUNS |= {
    name: {"algorithm": {"name": name, "batch": 16}, "graph": "ring", "models": "tiny-cnn", "peers": 5}
    for name in ALGORITHMS
    if name not in _named
}

COVERED = ("fedavg-ssl", "fedper-ssl", "fedprox-ssl", "fedprox-dec")
"""Algorithms without state of their own: another one of the same base is tested."""
