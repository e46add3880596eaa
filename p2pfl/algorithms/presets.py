"""What the presets of each method change, against its defaults, which are what works best here.

``paper`` is the formulas as printed, ``official`` the released code; the pages in docs/algorithms say what differs
and why. We know of no released code of a method without ``official``.
"""

from __future__ import annotations

from collections.abc import Mapping

Presets = Mapping[str, Mapping[str, object]]

MAPL: Presets = {
    "paper": {
        "temperature": 100.0,
        "head_relu": False,
        "betas": (0.5, 0.999),
        "shared_init": False,
        "compare": "weights",
        "similarity": "flat",
        "degree_term": "exact",
    },
    "official": {
        "temperature": 100.0,
        "losses": "official",
        "betas": (0.5, 0.999),
        "fresh_optimizer": True,
        "shared_init": False,
        "compare": "weights",
        "graph_optimizer": "adam",
        "graph_lr": 0.1,
        "scale_similarity": True,
        "prune": False,
        "drop_last": True,
    },
}

L2C: Presets = {"paper": {"mixing_optimizer": "adam"}}
META_L2C: Presets = {"paper": {"mixing_optimizer": "adam"}, "official": {"score": "mean"}}

FEDPROTO: Presets = {"paper": {"distance": "euclidean"}, "official": {"weighted": False, "drop_last": True}}
FEDTGP: Presets = {
    "paper": {"distance": "euclidean", "margin": "pairwise-max"},
    "official": {"drop_last": True},
}
FEDDISTILL: Presets = {"paper": {"outputs": "probabilities", "teachers": "others"}}

FEDCLASSAVG: Presets = {
    "official": {
        "betas": (0.5, 0.999),
        "fresh_optimizer": True,
        "contrastive": 100.0 / 0.07,
        "temperature": 100.0,
        "similarity": "inner",
        "supervised_views": "first",
        "proximal": "mean",
        "drop_last": True,
    },
}

DFML: Presets = {"paper": {"shape": "falling"}}

FEDSTYLE: Presets = {"paper": {"train_generator": False, "probe_steps": 1}}
