"""DFML (Khalil et al., 2024).

Digits (about 115 training samples a peer, where CIFAR-10 gives 4,000), ten peers, five of which send in each round,
the four small networks of `tiny4` instead of H2 CNNs, batches of 32. DFML has 105 rounds of K = 5 passes (paper: 500
of 10), in periods of 5, 10, … and 30 rounds: the last round is a maximum of α. The baselines have 100 rounds. On the
part of CIFAR-10, with 375 training samples a peer, DFML has 30 rounds, in periods of 5, 10 and 15.

Accuracies are global ones: on the whole test set, mean over peers, for DFML of the peak models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmarks.claims import left
from benchmarks.claims.claim import Claim, Paper, Settings, difference
from benchmarks.claims.dfml_figures import (
    MAXIMA,
    area,
    by_network,
    final,
    keep,
    least_gain,
    local,
    rise,
    rounds_saved,
    swing,
)
from benchmarks.claims.paper_size import at_paper_size
from benchmarks.claims.statistics import Relation

RATES = (0.003, 0.01, 0.03)
NON_IID: Mapping[str, Any] = {"name": "dirichlet-train", "beta": 0.1}
IID: Mapping[str, Any] = {"name": "iid-train"}
WIDTHS = ["dfml-cnn-8-16", "dfml-cnn-16-32", "dfml-cnn-32-64"]
PAPER_10 = "10 peers, 500 rounds, 4,000 samples"
PAPER_50 = "50 peers, 500 rounds, 800 samples"
PAPER_100 = "100 peers, 500 rounds, 400 samples"
PAPER_CALTECH = "10 peers, 500 rounds, 555 samples"
RESNETS: Mapping[str, Any] = {"models": "dfml-h1-resnet"}
TEN: Mapping[str, Any] = {
    "models": [
        *("dfml-vit-512", "dfml-vit-256"),
        *(f"dfml-resnet-{width}" for width in (64, 32, 16, 8)),
        *("dfml-cnn-32-64-128-256", "dfml-cnn-32-64-128", "dfml-cnn-32-64", "dfml-cnn-16-32-64"),
    ]
}
"""The largest of Table 10, for Fig. 6."""


def run(
    name: str,
    seconds: float,
    partition: Mapping[str, Any] = NON_IID,
    graph: str = "complete",
    rounds: int = MAXIMA[-1],
    models: Any = "tiny4",
    eval_every: int = 5,
    **hyper: Any,
) -> Settings:
    own = {"mutual_epochs": 5, "period": 5, "period_increment": 5} if name == "dfml" else {}
    tree = {
        "rounds": rounds,
        "peers": 10,
        "graph": graph,
        "data": {"dataset": "digits", "partition": dict(partition)},
        "models": models,
        "algorithm": {"name": name, "batch": 32, "lr": 0.01, **own, **hyper},
        "eval_every": eval_every,
    }
    return Settings(tree, seconds, RATES, series="peak" if name == "dfml" else "accuracy")


def baseline(name: str, **where: Any) -> Settings:
    return run(name, 30, **{"rounds": 100, "eval_every": 10, **where})


def colors(name: str, seconds: float, rounds: int, eval_every: int) -> Settings:
    found = run(name, seconds, {**NON_IID, "validation": 0.875}, rounds=rounds, eval_every=eval_every)
    return replace(found, tree={**found.tree, "data": {**found.tree["data"], "dataset": "cifar10-part"}})


DFML = run("dfml", 80)
CE = run("dfml", 80, supervision="ce", alpha_max=1.0)
FEDAVG = baseline("fedavg-dec")


def claim(
    name: str,
    where: str,
    one: Settings,
    others: Mapping[str, Settings],
    paper: str,
    scale: str = PAPER_10,
    label: str = "dfml",
) -> Claim:
    """DFML, or a variant, above another run."""
    (other,) = others
    return Claim(name, where, {label: one, **others}, difference(label, other, final), paper, scale, curves="peak")


def faster(compared: Claim, where: str) -> Claim:
    """The claim that the first run of a comparison also learns faster."""
    one, other = compared.runs
    return replace(
        compared,
        name=compared.name.replace("above", "faster than"),
        where=where,
        figure=difference(one, other, area),
        paper="faster",
        unit="points, mean of rounds 10 to 100",
    )


def up_to_date(peaks: Claim) -> Claim:
    """The same comparison of the regular models after the last round, a maximum of α.

    Four of ten peers take no part in that round: their peak models are from the 75th or before, and accuracy still
    grows. Over the paper's 500 rounds, this costs less.
    """
    one, other = peaks.runs
    return replace(
        peaks,
        name=f"{peaks.name}, regular models",
        figure=difference(one, other, lambda run: run.last()),
        paper=f"{peaks.paper}; peak models",
        whose="ours",
        curves="accuracy",
    )


EQUAL: dict[str, Any] = {"models": "tiny-cnn"}
SGD: Mapping[str, Any] = {"momentum": 0.9, "weight_decay": 5e-4}
IID_RUNS = {"dfml": run("dfml", 80, IID), "fedavg-dec": baseline("fedavg-dec", partition=IID)}
THREE_WIDTHS = {"dfml": run("dfml", 100, models=WIDTHS), "fedavg-dec": baseline("fedavg-dec", models=WIDTHS)}
ABOVE_FEDAVG = claim(
    "above decentralized FedAvg, digits, non-IID",
    "Table 6",
    DFML,
    {"fedavg-dec": FEDAVG},
    "+30.52 (74.30 against 43.78)",
)
WITH_A_SERVER = claim(
    "FedAvg above decentralized FedAvg",
    "Fig. 12",
    baseline("fedavg", participation=0.6, **SGD, **EQUAL),
    {"fedavg-dec": baseline("fedavg-dec", supervision="ce", **EQUAL)},
    "faster",
    PAPER_50,
    "fedavg",
)
"""On a complete graph `fedavg` is FedAvg with a server; six peers train in each round of both."""
ABOVE_WITH_ONE_NETWORK = claim(
    "above decentralized FedAvg, equal networks",
    "Table 3",
    run("dfml", 80, **EQUAL),
    {"fedavg-dec": baseline("fedavg-dec", **EQUAL)},
    "+1.59 (76.27 against 74.68)",
    PAPER_50,
)
ABOVE_WITH_THREE_WIDTHS = claim(
    "above decentralized FedAvg, three widths",
    "Table 4",
    THREE_WIDTHS["dfml"],
    {"fedavg-dec": THREE_WIDTHS["fedavg-dec"]},
    "+14.03 (73.87 against 59.84)",
    PAPER_50,
)
OF_OTHER_AGES = (
    claim(
        "cyclic α gains with cross-entropy",
        "Table 9",
        CE,
        {"fixed": CE.but(shape="fixed", alpha_max=0.5)},
        "+12.31 (41.47 against 29.16)",
        PAPER_50,
        "cyclic",
    ),
    claim(
        "cyclic α gains with WSM",
        "Table 9",
        DFML,
        {"fixed": DFML.but(shape="fixed", alpha_max=0.5)},
        "+0.67 (44.26 against 43.59)",
        PAPER_50,
        "cyclic",
    ),
    claim(
        "cyclic α above α = 0.8 throughout",
        "Fig. 9",
        CE,
        {"α = 0.8": CE.but(shape="fixed", alpha_max=0.8)},
        "above",
        PAPER_50,
        "cyclic",
    ),
    claim(
        "a growing period above a fixed one",
        "Fig. 28",
        DFML,
        {"fixed period": DFML.but(period_increment=0)},
        "above",
        PAPER_50,
    ),
    claim(
        "distillation gains", "Fig. 14", DFML, {"α = 0": DFML.but(shape="fixed", alpha_max=0.0)}, "above", PAPER_50
    ),
)
"""Comparisons of runs whose peak models are not equally old."""
LOCAL_ACCURACY: tuple[tuple[str, Mapping[str, Settings], str, Relation, str], ...] = (
    ("IID", IID_RUNS, "above", ">", "above"),
    ("non-IID", {"dfml": DFML, "fedavg-dec": FEDAVG}, "below", "<", "a little below with 10 peers, else above"),
)
CLAIMS = (
    ABOVE_FEDAVG,
    claim(
        "above decentralized FedAvg, digits, IID",
        "Table 6",
        IID_RUNS["dfml"],
        {"fedavg-dec": IID_RUNS["fedavg-dec"]},
        "+11.22 (83.87 against 72.65)",
    ),
    claim(
        "above decentralized FedAvg, CIFAR-10, non-IID",
        "Table 6",
        colors("dfml", 1300, 30, 30),
        {"fedavg-dec": colors("fedavg-dec", 800, 100, 100)},
        "+30.52 (74.30 against 43.78)",
    ),
    Claim(
        "fewer rounds than decentralized FedAvg's 100",
        "Table 8",
        {"dfml": DFML, "fedavg-dec": FEDAVG},
        rounds_saved,
        "20",
        PAPER_10,
        unit="rounds",
        relation="<",
        threshold=100.0,
        curves="peak",
    ),
    *OF_OTHER_AGES,
    *(up_to_date(each) for each in OF_OTHER_AGES),
    claim("WSM above cross-entropy", "Table 9", DFML, {"ce": CE}, "+2.79 (44.26 against 41.47)", PAPER_50, "wsm"),
    claim(
        "above decentralized FedAvg on two cliques and a bridge",
        "Table 12",
        run("dfml", 80, graph="bridge"),
        {"fedavg-dec": baseline("fedavg-dec", graph="bridge")},
        "+43.49 (68.52 against 25.03)",
        PAPER_50,
    ),
    ABOVE_WITH_ONE_NETWORK,
    claim(
        "above decentralized FedProx, equal networks",
        "Table 3",
        run("dfml", 80, **EQUAL),
        {"fedprox-dec": baseline("fedprox-dec", **EQUAL)},
        "+1.72 (76.27 against 74.55)",
        PAPER_50,
    ),
    claim(
        "above Def-KT, equal networks",
        "Table 3",
        run("dfml", 80, **EQUAL),
        {"def-kt": baseline("def-kt", rounds=120, participation=0.5, supervision="wsm", **SGD, **EQUAL)},
        "+3.68 (76.27 against 72.59)",
        PAPER_50,
    ),
    ABOVE_WITH_THREE_WIDTHS,
    *(
        claim(
            f"above decentralized {title}, three widths",
            "Table 4",
            THREE_WIDTHS["dfml"],
            {name: baseline(name, models=WIDTHS)},
            paper,
            PAPER_50,
        )
        for title, name, paper in (
            ("HeteroFL", "heterofl", "+9.66 (73.87 against 64.21)"),
            ("FedRolex", "fedrolex", "+9.57 (73.87 against 64.30)"),
        )
    ),
    faster(ABOVE_WITH_ONE_NETWORK, "Fig. 15"),
    faster(ABOVE_WITH_THREE_WIDTHS, "Fig. 16"),
    faster(ABOVE_FEDAVG, "Fig. 17"),
    Claim(
        "mixed networks cost decentralized FedAvg accuracy, IID",
        "Fig. 1",
        {"one network": baseline("fedavg-dec", partition=IID, **EQUAL), "mixed": IID_RUNS["fedavg-dec"]},
        lambda runs: final(runs["one network"]) - by_network(runs["mixed"], 4)[0],
        "less accurate",
        PAPER_50,
        unit="points, peers with `tiny-cnn`",
    ),
    claim(
        "non-IID data cost decentralized FedAvg accuracy, one network",
        "Fig. 1",
        baseline("fedavg-dec", partition=IID, **EQUAL),
        {"non-IID": baseline("fedavg-dec", **EQUAL)},
        "less accurate",
        PAPER_50,
        "IID",
    ),
    Claim(
        "the largest network above the smallest",
        "Fig. 5",
        {"dfml": THREE_WIDTHS["dfml"]},
        lambda runs: by_network(runs["dfml"], 3)[2] - by_network(runs["dfml"], 3)[0],
        "larger is better",
        PAPER_50,
    ),
    Claim(
        "each network above decentralized FedAvg's",
        "Fig. 5",
        {"dfml": DFML, "fedavg-dec": FEDAVG},
        lambda runs: least_gain(runs["dfml"], runs["fedavg-dec"], 4),
        "above, all five",
        PAPER_50,
        unit="points, least of 4",
    ),
    Claim(
        "regular models rise and fall with α, full cycles",
        "Fig. 7",
        {"full cycles": CE.but(shape="full")},
        swing,
        "rise and fall",
        PAPER_50,
    ),
    claim(
        "α = 0.8 throughout above α = 1",
        "Fig. 9",
        CE.but(shape="fixed", alpha_max=0.8),
        {"α = 1": CE.but(shape="fixed", alpha_max=1.0)},
        "α = 1 is the worst",
        PAPER_50,
        "α = 0.8",
    ),
    faster(WITH_A_SERVER, "Fig. 12"),
    *(
        Claim(
            f"local accuracy {side} decentralized FedAvg, {label}",
            "Fig. 18",
            runs,
            difference("dfml", "fedavg-dec", local),
            paper,
            PAPER_10,
            relation=relation,
            curves="local",
        )
        for label, runs, side, relation, paper in LOCAL_ACCURACY
    ),
    Claim("regular models rise and fall with α", "Fig. 8", {"dfml": CE}, rise, "rise and fall", PAPER_50),
    Claim("peak models keep the peak", "Fig. 8", {"dfml": CE}, keep, "above regular ones", PAPER_50, curves="peak"),
    claim(
        "a random aggregator above a fixed one",
        "Fig. 13",
        DFML,
        {"fixed aggregator": DFML.but(fixed_aggregator=True)},
        "above",
        PAPER_50,
        "random",
    ),
    claim(
        "above decentralized FedAvg with 20 % senders",
        "Fig. 19",
        run("dfml", 50, participation=0.2),
        {"fedavg-dec": baseline("fedavg-dec", participation=0.2)},
        "above",
        PAPER_50,
    ),
    claim("weights by size gain", "Fig. 20", DFML, {"equal weights": DFML.but(teachers="equal")}, "above", PAPER_50),
    claim(
        "mutual learning above teaching the aggregator alone",
        "Fig. 21",
        DFML,
        {"vanilla": DFML.but(mutual=False)},
        "above",
        PAPER_50,
    ),
    claim(
        "five mutual epochs above one",
        "Fig. 22",
        DFML,
        {"K = 1": DFML.but(mutual_epochs=1)},
        "K = 10 above fewer",
        PAPER_50,
    ),
    claim("WSM above ACE", "Fig. 25", DFML, {"ace": DFML.but(supervision="ace")}, "above", PAPER_50, "wsm"),
    claim(
        "α for both terms above distillation alone",
        "Fig. 27",
        CE,
        {"distillation": CE.but(scheduled="distillation")},
        "above",
        PAPER_50,
    ),
    *(
        paper_sized
        for file, where, scale, paper, label, changes in (
            ("n10-niid", "Table 6", PAPER_10, "+30.52", "CIFAR-10, non-IID, 10 peers", {}),
            ("n10-iid", "Table 6", PAPER_10, "+11.22", "CIFAR-10, IID, 10 peers", {}),
            ("n50-niid", "Table 6", PAPER_50, "+16.46", "CIFAR-10, non-IID, 50 peers", {}),
            ("n50-iid", "Table 6", PAPER_50, "+10.23", "CIFAR-10, IID, 50 peers", {}),
            ("n100-niid", "Table 6", PAPER_100, "+13.96", "CIFAR-10, non-IID, 100 peers", {}),
            ("n100-iid", "Table 6", PAPER_100, "+8.94", "CIFAR-10, IID, 100 peers", {}),
            ("n50-niid-h0", "Table 3", PAPER_50, "+1.59", "CIFAR-10, non-IID", {}),
            ("n50-niid-h1-cnn", "Table 4", PAPER_50, "+14.03", "CNNs, CIFAR-10, non-IID", {}),
            ("n50-niid-h1-resnet", "Table 4", PAPER_50, "+16.31", "ResNets, CIFAR-10, non-IID", {}),
            ("n50-niid-h1-vit", "Table 4", PAPER_50, "+3.74", "ViTs, CIFAR-10, non-IID", {}),
            ("n10-niid-h2-efficientnet", "Table 7", PAPER_CALTECH, "+34.78", "Caltech101, non-IID", {}),
            ("n50-niid", "Fig. 6", PAPER_50, "above", "ten networks, CIFAR-10, non-IID", TEN),
            ("bridge", "Table 12", PAPER_50, "+43.49", "two cliques and a bridge", {}),
            ("bridge", "Table 11", PAPER_50, "+46.41", "ResNets, two cliques and a bridge", RESNETS),
        )
        for paper_sized in at_paper_size(
            f"dfml-{file}",
            where,
            scale,
            {"dfml": {}, "fedavg-dec": {"lr": 0.01, **({"batch": 8} if "efficientnet" in file else {})}},
            {},
            {("dfml", "fedavg-dec"): paper},
            label=label,
            changes=changes,
        )
    ),
    *at_paper_size(
        "dfml-n50-niid-h1-resnet",
        "Table 5",
        "50 peers, 500 rounds, 960 samples",
        {"dfml": {}, "fedavg-dec": {"lr": 0.01}},
        {"dataset": "fashion-mnist"},
        {("dfml", "fedavg-dec"): "+13.78"},
        label="Fashion-MNIST, non-IID",
    ),
)

MODULE = Paper(
    "dfml",
    "DFML: Decentralized Federated Mutual Learning",
    [*(f"Table {n}" for n in range(1, 13)), *(f"Fig. {n}" for n in range(1, 29))],
    CLAIMS,
    left.DFML,
)
