"""MAPL and MAPL+ (Mukherjee, Simonetto, Jamali-Rad, 2024).

CIFAR-10: 8 peers instead of 20, 30 images per class and peer instead of 300, four small networks instead of full-size
ones, 80 rounds instead of 400, a quarter of them before the graph is learned, as in the paper; its augmentation.
Accuracies are means over the last quarter of the rounds. What needs no colors is measured on digits, without
augmentation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmarks.claims import left
from benchmarks.claims.claim import Claim, Paper, Settings, difference
from benchmarks.claims.mapl_figures import area, blocks, head_gap, payload, saved, settled, spread, within_budget
from benchmarks.claims.paper_size import at_paper_size
from benchmarks.claims.statistics import Relation

RATES = (0.0005, 0.001, 0.002)
PAPER = "20 peers, 400 rounds, 1,500 samples"
SAMPLES = {1: "1,500", 2: "2,100", 3: "1,000", 4: "1,400"}
"""Training samples of a peer in each scenario; of 3 and 4 the mean."""
PAPER_10 = "10 peers, 200 rounds, 1,500 samples"
SCENARIOS: Mapping[int, Mapping[str, Any]] = {
    1: {"per_class": 30},
    2: {"per_class": 30, "overlap": 4},
    3: {"per_class": [10, 30]},
    4: {"per_class": [10, 30], "overlap": 4},
}

ADAM: Mapping[str, Any] = {"optimizer": "adam", "batch": 16, "lr": 0.001}
PAPER_ADAM: Mapping[str, Any] = {"optimizer": "adam", "batch": 64, "lr": 1e-4, "betas": [0.5, 0.999]}
"""As in the run files of MAPL at the paper's size."""
CINIC: Mapping[str, Any] = {"name": "folder", "path": "CINIC-10", "size": 32}
OWN: Mapping[str, Any] = {"batch": 16, "lr": 0.001, "warmup": 20, "projector_hidden": 128}


def colors(name: str, seconds: float, models: str = "tiny4", peers: int = 8, scenario: int = 1, **h: Any) -> Settings:
    """The part of CIFAR-10, two clusters."""
    own = OWN if name.startswith("mapl") else ADAM
    partition = {"name": "clusters", "clusters": 2, "test_per_class": 100, **SCENARIOS[scenario]}
    tree = {
        "rounds": 80,
        "peers": peers,
        "data": {"dataset": "cifar10-part", "partition": partition, "augment": "mapl"},
        "models": models,
        "algorithm": {"name": name, **own, **h},
        "eval_every": 5,
    }
    return Settings(tree, seconds * peers / 8, RATES)


MAPL, LOCAL = colors("mapl", 150), colors("local", 75)
MAPL_2, LOCAL_2 = colors("mapl", 210, scenario=2), colors("local", 105, scenario=2)
L_CE_ALONE: Mapping[str, Any] = {"prototype": False, "contrastive": False, "uniformity": False, "cgl": False}
"""Without the terms of Table 2: what remains beyond local training are the second view and the kind of classifier."""
EQUAL = {
    "mapl+": colors("mapl+", 110, "tiny-cnn"),
    "mapl": colors("mapl", 100, "tiny-cnn"),
    "local": colors("local", 45, "tiny-cnn"),
    "dfedavgm": colors("dfedavgm", 55, "tiny-cnn", optimizer="sgd", lr=0.01),
    "fedavg": colors("fedavg", 50, "tiny-cnn"),
    "pfedsim": colors("pfedsim", 50, "tiny-cnn"),
}
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


RANDOM_START = {"shared_init": False, "compare": "weights"}
ALIGNED = {"with l_proto": with_heads(**RANDOM_START), "without": with_heads(prototype=False, **RANDOM_START)}
STEPS = {overlap: {f"E_g {steps}": digits(overlap, graph_steps=steps) for steps in (1, 5, 20)} for overlap in (0, 4)}
UNPRUNED = digits(prune=False)


def paper_scale(scenario: int) -> str:
    return PAPER.replace(SAMPLES[1], SAMPLES[scenario])


def ablation(name: str, label: str, where: str, paper: str, sc2: bool = False, **hyper: Any) -> Claim:
    base = MAPL_2 if sc2 else MAPL
    runs = {"mapl": base, label: base.but(**hyper)}
    scenario = 2 if sc2 else 1
    return Claim(f"{name}, Sc. {scenario}", where, runs, settled("mapl", label), paper, paper_scale(scenario))


AT_PAPER_SIZE: tuple[tuple[int, Relation, Mapping[tuple[str, str], str]], ...] = (
    (1, ">", {("mapl+", "mapl"): "+6.66", ("mapl+", "dfedavgm"): "+1.67", ("mapl", "local"): "+20.60"}),
    (2, ">", {("mapl+", "mapl"): "+13.05", ("mapl+", "dfedavgm"): "+1.19", ("mapl", "local"): "+21.05"}),
    (3, ">", {("mapl+", "mapl"): "+8.86", ("mapl", "local"): "+16.80"}),
    (3, "<", {("mapl+", "dfedavgm"): "−1.67"}),
    (4, ">", {("mapl+", "mapl"): "+16.19", ("mapl+", "dfedavgm"): "+0.52", ("mapl", "local"): "+18.00"}),
)
"""Table 9, CIFAR-10."""

CLAIMS = (
    Claim(
        "above local training, Sc. 1",
        "Table 1",
        {"mapl": MAPL, "local": LOCAL},
        settled("mapl", "local"),
        "+6.67 (77.27 against 70.60)",
        PAPER,
    ),
    Claim(
        "above local training, Sc. 2",
        "Table 1",
        {"mapl": MAPL_2, "local": LOCAL_2},
        settled("mapl", "local"),
        "+6.76 (65.43 against 58.67)",
        paper_scale(2),
    ),
    *(
        Claim(
            f"above local training, Sc. {scenario}",
            "Table 1",
            {
                "mapl": colors("mapl", seconds, scenario=scenario),
                "local": colors("local", seconds / 2, scenario=scenario),
            },
            settled("mapl", "local"),
            paper,
            paper_scale(scenario),
        )
        for scenario, seconds, paper in (
            (3, 100, "+6.13 (71.53 against 65.40)"),
            (4, 140, "+6.00 (59.52 against 53.52)"),
        )
    ),
    *(
        Claim(
            f"above {title}, Sc. 1",
            "Table 1",
            {"mapl": MAPL, name: colors(name, seconds)},
            settled("mapl", name),
            paper,
            PAPER,
        )
        for title, name, seconds, paper in (
            ("FedProto", "fedproto", 85, "+4.14 (77.27 against 73.13)"),
            ("FedClassAvg", "fedclassavg", 130, "+2.60 (77.27 against 74.67)"),
            ("FedSim", "fedsim", 80, "+12.34 (77.27 against 64.93)"),
        )
    ),
    ablation("l_cont gains", "without l_cont", "Table 2", "+4.87 (77.27 against 72.40)", contrastive=False),
    replace(ablation("l_proto gains", "without l_proto", "Table 2", "not varied", prototype=False), whose="ours"),
    replace(ablation("all terms together gain", "l_ce alone", "Table 2", "not varied", **L_CE_ALONE), whose="ours"),
    Claim(
        "l_ce alone, on two views, above local training, Sc. 1",
        "Table 2",
        {"l_ce alone": MAPL.but(**L_CE_ALONE), "local": LOCAL},
        settled("l_ce alone", "local"),
        "not varied",
        PAPER,
        whose="ours",
    ),
    ablation("the graph gains", "without graph", "Table 2", "+1.60 (77.27 against 75.67)", cgl=False),
    ablation("l_uni gains", "without l_uni", "Table 2", "+1.60 (77.27 against 75.67)", uniformity=False),
    ablation("l_cont gains", "without l_cont", "Table 2", "+5.38 (65.43 against 60.05)", sc2=True, contrastive=False),
    ablation("the graph gains", "without graph", "Table 2", "+0.24 (65.43 against 65.19)", sc2=True, cgl=False),
    ablation("l_uni gains", "without l_uni", "Table 2", "+0.81 (65.43 against 64.62)", sc2=True, uniformity=False),
    ablation("similarity gains", "S = 1", "Table 3", "+1.07 (77.27 against 76.20)", similarity="off"),
    ablation("confidence gains", "γ = 1", "Table 3", "+2.00 (77.27 against 75.27)", confidence=False),
    ablation("ℓ2 above ℓ1", "ℓ1", "Table 3", "+1.67 (77.27 against 75.60)", norm="l1"),
    ablation("similarity gains", "S = 1", "Table 3", "+1.05 (65.43 against 64.38)", sc2=True, similarity="off"),
    ablation("confidence gains", "γ = 1", "Table 3", "+0.34 (65.43 against 65.09)", sc2=True, confidence=False),
    ablation("ℓ2 above ℓ1", "ℓ1", "Table 3", "+0.19 (65.43 against 65.24)", sc2=True, norm="l1"),
    Claim(
        "the graph saves a third of the messages",
        "Table 4",
        {"mapl": MAPL, "without graph": MAPL.but(cgl=False)},
        saved,
        "34 % (101,000 of 152,000)",
        PAPER,
        unit="%",
        threshold=34.0,
        curves="sent Prototypes",
    ),
    *(
        Claim(
            f"the graph gains within a budget of messages{label}",
            "Table 4",
            {"mapl": base, "without graph": base.but(cgl=False)},
            within_budget,
            paper,
            scale,
        )
        for label, base, paper, scale in (
            ("", MAPL, "+2.67 (75.20 against 72.53)", PAPER),
            (", Sc. 2", MAPL_2, "+1.61 (63.09 against 61.48)", paper_scale(2)),
        )
    ),
    *(
        Claim(
            f"the margin over local training grows with the peers{label}",
            "Table 5",
            {
                "mapl": mapl,
                "local": local,
                "mapl, 16": colors("mapl", mapl.seconds, peers=16, scenario=scenario),
                "local, 16": colors("local", local.seconds, peers=16, scenario=scenario),
            },
            lambda runs: settled("mapl, 16", "local, 16")(runs) - settled("mapl", "local")(runs),
            paper,
            paper_scale(scenario),
        )
        for label, scenario, mapl, local, paper in (
            ("", 1, MAPL, LOCAL, "+1.34 (+6.67 with 20 peers, +5.33 with 10)"),
            (", Sc. 2", 2, MAPL_2, LOCAL_2, "+0.85 (+6.76 with 20 peers, +5.91 with 10)"),
        )
    ),
    *(
        Claim(
            f"steps on the graph matter little{label}",
            "Table 6",
            runs,
            spread,
            f"{limit:.2f} at most (E_g 1 to 20)",
            scale,
            relation="<",
            threshold=limit,
        )
        for label, runs, limit, scale in (
            ("", STEPS[0], 2.87, PAPER),
            (", Sc. 2", STEPS[4], 1.0, paper_scale(2)),
        )
    ),
    Claim(
        "numbers sent are 2·N_e·(d·K + |φ|) per round",
        "Table 7",
        {"mapl": UNPRUNED},
        payload,
        "1",
        PAPER,
        unit="of the formula",
        relation="=",
        threshold=1.0,
        curves="",
    ),
    Claim(
        "MAPL+ above MAPL where networks are equal",
        "Table 9",
        {k: EQUAL[k] for k in ("mapl+", "mapl")},
        settled("mapl+", "mapl"),
        "+6.66 (82.93 against 76.27)",
        PAPER,
    ),
    Claim(
        "MAPL+ above MAPL where networks are equal, Sc. 2",
        "Table 9",
        EQUAL_2,
        settled("mapl+", "mapl"),
        "+13.05 (77.86 against 64.81)",
        paper_scale(2),
    ),
    *(
        Claim(
            f"MAPL+ above {title}",
            "Table 9",
            {k: EQUAL[k] for k in ("mapl+", name)},
            settled("mapl+", name),
            paper,
            PAPER,
        )
        for title, name, paper in (
            ("DFedAvgM", "dfedavgm", "+1.67 (82.93 against 81.26)"),
            ("FedAvg", "fedavg", "+1.93 (82.93 against 81.00)"),
            ("pFedSim", "pfedsim", "+3.07 (82.93 against 79.86)"),
        )
    ),
    Claim(
        "MAPL above local training where networks are equal",
        "Table 9",
        {k: EQUAL[k] for k in ("mapl", "local")},
        settled("mapl", "local"),
        "+20.60 (76.27 against 55.67)",
        PAPER,
    ),
    Claim(
        "l_proto aligns heads",
        "Fig. 3",
        ALIGNED,
        difference("with l_proto", "without", head_gap),
        "blocks with l_proto, none without",
        PAPER_10,
        unit="of s inside − across",
        curves="",
    ),
    Claim(
        "without l_proto heads reveal nothing",
        "Fig. 3",
        {"without": ALIGNED["without"]},
        lambda runs: runs["without"].probe["separable"],
        "no blocks",
        PAPER_10,
        unit="% of pairs in order",
        relation="<",
        threshold=60.0,
        whose="ours",
        curves="",
    ),
    Claim(
        "the graph becomes block-diagonal",
        "Fig. 4",
        {"mapl": MAPL},
        blocks,
        "almost zero across",
        PAPER_10,
        unit="% of the weight inside",
        relation="<",
        threshold=5.0,
        whose="ours",
        curves="across",
    ),
    Claim(
        "the graph becomes block-diagonal, digits",
        "Fig. 5",
        {"mapl": digits()},
        blocks,
        "almost zero across",
        PAPER_10,
        unit="% of the weight inside",
        relation="<",
        threshold=5.0,
        whose="ours",
        curves="across",
    ),
    Claim(
        "the graph becomes block-diagonal, overlapping digits",
        "Fig. 6",
        {"mapl": digits(overlap=2)},
        blocks,
        "almost zero across",
        PAPER_10,
        unit="% of the weight inside",
        relation="<",
        threshold=5.0,
        whose="ours",
        curves="across",
    ),
    *(
        Claim(
            f"converges faster than local training{label}",
            "Fig. 7",
            {"mapl": mapl, "local": local},
            difference("mapl", "local", area),
            "above from round 50 on",
            scale,
            unit="points, mean of all rounds",
        )
        for label, mapl, local, scale in (("", MAPL, LOCAL, PAPER), (", Sc. 2", MAPL_2, LOCAL_2, paper_scale(2)))
    ),
    *(
        claim
        for scenario, data, name, figures in (
            (1, {"dataset": "cifar10"}, "CIFAR-10", {("mapl", "local"): "+6.67", ("mapl", "fedproto"): "+4.14"}),
            (2, {"dataset": "cifar10"}, "CIFAR-10", {("mapl", "local"): "+6.76"}),
            (3, {"dataset": "cifar10"}, "CIFAR-10", {("mapl", "local"): "+6.13"}),
            (4, {"dataset": "cifar10"}, "CIFAR-10", {("mapl", "local"): "+6.00"}),
            (1, {"dataset": CINIC}, "CINIC-10", {("mapl", "local"): "+10.27"}),
            (1, {"dataset": "svhn"}, "SVHN", {("mapl", "local"): "+5.47"}),
            (1, {"dataset": "mnist"}, "MNIST", {("mapl", "local"): "+0.27"}),
            (1, {"dataset": "fashion-mnist"}, "Fashion-MNIST", {("mapl", "local"): "−0.47"}),
        )
        for claim in at_paper_size(
            f"mapl-sc{scenario}-hetero",
            "Table 1",
            paper_scale(scenario),
            {"mapl": {}, "local": PAPER_ADAM, "fedproto": PAPER_ADAM},
            data,
            figures,
            label=f"{name}, Sc. {scenario}",
            relation="<" if name == "Fashion-MNIST" else ">",
        )
    ),
    *(
        claim
        for scenario, relation, figures in AT_PAPER_SIZE
        for claim in at_paper_size(
            f"mapl-sc{scenario}-homo",
            "Table 9",
            paper_scale(scenario),
            {"mapl+": {}, "mapl": {}, "dfedavgm": {"lr": 0.01}, "local": PAPER_ADAM},
            {"dataset": "cifar10"},
            figures,
            label=f"CIFAR-10, Sc. {scenario}",
            relation=relation,
        )
    ),
)


def with_noise(claim: Claim) -> Claim:
    """Add what the paper's test images leave open: a cell is the accuracy on 20 · 75 (Sc. 2, 4: 20 · 105) of them.

    The 95 % interval is that of two independent proportions. Both methods saw the same images: it is an upper bound.
    """
    cells = re.search(r"\((\d+\.\d+) against (\d+\.\d+)\)", claim.paper)
    if cells is None:
        return claim
    n = 2100 if re.search("Sc. [24]", claim.name) else 1500
    variance = sum(p * (1 - p) / n for p in (float(cell) / 100 for cell in cells.groups()))
    half = 100 * 1.96 * math.sqrt(variance)
    return replace(claim, paper=claim.paper.replace(" (", f" ± {half:.1f} (", 1))


MODULE = Paper(
    "mapl",
    "MAPL: Model Agnostic Peer-to-peer Learning",
    [*(f"Table {n}" for n in range(1, 10)), *(f"Fig. {n}" for n in range(1, 8))],
    [with_noise(claim) for claim in CLAIMS],
    left.MAPL,
)
