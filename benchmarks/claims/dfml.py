"""DFML (Khalil et al., 2024).

Digits (about 115 training samples a peer, where CIFAR-10 gives 4,000), ten peers, five of which send in each round,
the four small networks of `tiny4` instead of H2 CNNs, batches of 32. DFML has 105 rounds of K = 5 passes (paper: 500
of 10), in periods of 5, 10, … and 30 rounds: the last round is a maximum of α. The baselines have 100 rounds. Some
rows are of the part of CIFAR-10, after 30 or 105 rounds. Where a verdict may depend on how old peak models are, or on
curves that still rise, there is a row after 330 rounds too.

Accuracies are global ones: on the whole test set, mean over peers, for DFML of the peak models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from benchmarks.claims import dfml_cifar10
from benchmarks.claims.claim import Claim, Paper, Settings, difference
from benchmarks.claims.dfml_figures import (
    by_network,
    final,
    keep,
    least_gain,
    local,
    rise,
    swing,
    times_as_fast,
)
from benchmarks.claims.dfml_runs import (
    ABOVE_DEF_KT,
    ABOVE_FEDAVG,
    ABOVE_FEDAVG_IID,
    ABOVE_FEDROLEX_BY_ITS_LAST_ROUND,
    ABOVE_PARTIAL,
    ABOVE_WITH_ONE_NETWORK,
    ABOVE_WITH_THREE_WIDTHS,
    ACE,
    ACE_ABOVE_CE,
    ADAPTIVE,
    CE,
    DFML,
    EQUAL,
    FEDAVG,
    FEW_SENDERS,
    IID_RUNS,
    ONE_NETWORK,
    ONE_NETWORK_IID,
    OTHER_METHODS,
    PAPER_10,
    PAPER_50,
    SGD,
    THREE_WIDTHS,
    WIDTHS_COST,
    baseline,
    claim,
    faster,
    faster_as_trained,
    fewer_rounds,
    gains_more,
    longer,
    run,
    up_to_date,
)
from benchmarks.claims.paper_size import at_paper_size, left
from benchmarks.claims.statistics import Relation

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
EQUAL_WEIGHTS = {"equal weights": DFML.but(teachers="equal")}
WEIGHTED = claim("weights by size gain", "Fig. 20", DFML, EQUAL_WEIGHTS, "above", PAPER_50)
MUTUAL = claim(
    "mutual learning above teaching the aggregator alone",
    "Fig. 21",
    DFML,
    {"vanilla": DFML.but(mutual=False)},
    "above",
    PAPER_50,
)
GROWING = claim(
    "a growing period above a fixed one",
    "Fig. 28",
    DFML,
    {"fixed period": DFML.but(period_increment=0)},
    "above",
    PAPER_50,
)
FIVE_EPOCHS = claim(
    "five mutual epochs above one",
    "Fig. 22",
    DFML,
    {"K = 1": DFML.but(mutual_epochs=1)},
    "K = 10 faster than fewer",
    PAPER_50,
)
WITHOUT_DISTILLATION = {"dfml": DFML, "α = 0": DFML.but(shape="fixed", alpha_max=0.0)}
OF_OTHER_AGES = (
    claim(
        "cyclic α gains with cross-entropy",
        "Table 9",
        CE,
        {"fixed": CE.but(shape="fixed", alpha_max=0.5)},
        "+12.31 ± 5.5 (41.47 against 29.16)",
        PAPER_50,
        "cyclic",
    ),
    claim(
        "cyclic α gains with WSM",
        "Table 9",
        DFML,
        {"fixed": DFML.but(shape="fixed", alpha_max=0.5)},
        "+0.67 ± 0.72 (44.26 against 43.59)",
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
    GROWING,
    replace(
        claim(
            "distillation gains",
            "Fig. 14",
            DFML,
            {"α = 0": WITHOUT_DISTILLATION["α = 0"]},
            "saves computation, see the other row",
            PAPER_50,
        ),
        whose="ours",
    ),
)
"""Comparisons of runs whose peak models are not equally old."""
LOCAL_ACCURACY: tuple[tuple[str, Mapping[str, Settings], str, Relation, str], ...] = (
    ("IID", IID_RUNS, "above", ">", "above"),
    ("non-IID", {"dfml": DFML, "fedavg-dec": FEDAVG}, "below", "<", "a little below with 10 peers, else above"),
    ("CIFAR-10, IID", dfml_cifar10.IID_RUNS, "above", ">", "above"),
    ("CIFAR-10, non-IID", dfml_cifar10.NON_IID_RUNS, "below", "<", "a little below with 10 peers, else above"),
)
ABOVE_WITH_WIDTHS = (ABOVE_WITH_THREE_WIDTHS, *ABOVE_PARTIAL)
CLAIMS = (
    ABOVE_FEDAVG,
    ABOVE_FEDAVG_IID,
    *dfml_cifar10.CLAIMS,
    fewer_rounds({"dfml": DFML, "fedavg-dec": FEDAVG}),
    *OF_OTHER_AGES,
    *(
        up_to_date(each)
        for each in (*OF_OTHER_AGES, ABOVE_FEDAVG_IID, ABOVE_WITH_ONE_NETWORK, ABOVE_DEF_KT, *ABOVE_WITH_WIDTHS)
    ),
    *map(longer, (*OF_OTHER_AGES[:2], GROWING, *ACE_ABOVE_CE)),
    longer(ABOVE_WITH_ONE_NETWORK, fedavg_dec=0.09),  # with 0.27, three of five runs break down
    claim(
        "WSM above cross-entropy", "Table 9", DFML, {"ce": CE}, "+2.79 ± 0.61 (44.26 against 41.47)", PAPER_50, "wsm"
    ),
    claim(
        "above decentralized FedAvg on two cliques and a bridge",
        "Table 12",
        run("dfml", 80, graph="bridge"),
        {"fedavg-dec": baseline("fedavg-dec", graph="bridge")},
        "+43.49 ± 0.44 (68.52 against 25.03)",
        PAPER_50,
    ),
    ABOVE_WITH_ONE_NETWORK,
    claim(
        "above decentralized FedProx, equal networks",
        "Table 3",
        ONE_NETWORK["dfml"],
        {"fedprox-dec": ONE_NETWORK["fedprox-dec"]},
        "+1.72 ± 0.84 (76.27 against 74.55)",
        PAPER_50,
    ),
    ABOVE_DEF_KT,
    Claim(
        "decentralized FedProx as good as FedAvg",
        "Table 3",
        {name: ONE_NETWORK[name] for name in ("fedprox-dec", "fedavg-dec")},
        difference("fedprox-dec", "fedavg-dec", final),
        "−0.13 ± 0.42 (74.55 against 74.68)",
        PAPER_50,
        relation="≈",
        threshold=1.0,
        whose="ours",
    ),
    gains_more(ABOVE_FEDAVG, {"dfml": DFML, "fedavg-dec": FEDAVG}, IID_RUNS),
    *ABOVE_WITH_WIDTHS,
    ABOVE_FEDROLEX_BY_ITS_LAST_ROUND,
    *(
        claim(
            f"decentralized {title} above FedAvg, three widths",
            "Table 4",
            THREE_WIDTHS[name],
            {"fedavg-dec": THREE_WIDTHS["fedavg-dec"]},
            paper,
            PAPER_50,
            name,
        )
        for title, name, paper in (
            ("HeteroFL", "heterofl", "+4.37 ± 1.5 (64.21 against 59.84)"),
            ("FedRolex", "fedrolex", "+4.46 ± 0.87 (64.30 against 59.84)"),
        )
    ),
    *WIDTHS_COST,
    faster(ABOVE_WITH_ONE_NETWORK, "Fig. 15"),
    faster_as_trained(ABOVE_WITH_ONE_NETWORK, "Fig. 15"),
    faster(ABOVE_DEF_KT, "Fig. 15"),
    *(faster(above, "Fig. 16") for above in ABOVE_WITH_WIDTHS),
    faster(ABOVE_FEDAVG, "Fig. 17"),
    faster(ABOVE_FEDAVG_IID, "Fig. 17"),
    faster_as_trained(ABOVE_FEDAVG, "Fig. 17"),
    faster_as_trained(ABOVE_FEDAVG_IID, "Fig. 17"),
    Claim(
        "mixed networks cost decentralized FedAvg accuracy, IID",
        "Fig. 1",
        {"one network": ONE_NETWORK_IID["fedavg-dec"], "mixed": IID_RUNS["fedavg-dec"]},
        lambda runs: final(runs["one network"]) - by_network(runs["mixed"], 4)[0],
        "less accurate",
        PAPER_50,
        unit="points, peers with `tiny-cnn`",
    ),
    claim(
        "non-IID data cost decentralized FedAvg accuracy, one network",
        "Fig. 1",
        ONE_NETWORK_IID["fedavg-dec"],
        {"non-IID": ONE_NETWORK["fedavg-dec"]},
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
    Claim(
        "α = 0.5 and α = 0.8 throughout above α = 1",
        "Fig. 9",
        {f"α = {alpha:g}": CE.but(shape="fixed", alpha_max=alpha) for alpha in (0.5, 0.8, 1.0)},
        lambda runs: min(final(runs["α = 0.5"]), final(runs["α = 0.8"])) - final(runs["α = 1"]),
        "α = 1 is the worst",
        PAPER_50,
        unit="points, lesser of two",
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
    Claim(
        "distillation saves rounds",
        "Fig. 14",
        WITHOUT_DISTILLATION,
        times_as_fast,
        "about 10 times the computation without it",
        PAPER_50,
        unit="times the rounds without it",
        threshold=1.0,
        whose="ours",
        curves="peak",
    ),
    claim(
        "above decentralized FedAvg with 20 % senders",
        "Fig. 19",
        FEW_SENDERS["dfml"],
        {"fedavg-dec": FEW_SENDERS["fedavg-dec"]},
        "above",
        PAPER_50,
    ),
    *(
        faster(
            claim("", "Fig. 19", half, {"20 % senders": FEW_SENDERS[name]}, "faster", PAPER_50, "50 % senders"),
            "Fig. 19",
            f"{title} with 50 % senders faster than with 20 %",
        )
        for title, name, half in (("DFML", "dfml", DFML), ("decentralized FedAvg", "fedavg-dec", FEDAVG))
    ),
    WEIGHTED,
    faster(WEIGHTED, "Fig. 20", "weights by size speed up"),
    MUTUAL,
    faster(MUTUAL, "Fig. 21"),
    FIVE_EPOCHS,
    faster(FIVE_EPOCHS, "Fig. 22"),
    faster(GROWING, "Fig. 28"),
    faster_as_trained(GROWING, "Fig. 28"),
    *(
        faster(
            replace(claim("", where, slowly, {label: other}, "faster", scale, "slowly growing"), whose="ours"),
            where,
            f"{name}, periods of 5, 6, 7 rounds and so on",
        )
        for where, name, slowly, label, other, scale in (
            (
                "Fig. 17",
                ABOVE_FEDAVG_IID.name.replace("above", "faster than"),
                IID_RUNS["dfml"].but(period_increment=1),
                "fedavg-dec",
                IID_RUNS["fedavg-dec"],
                PAPER_10,
            ),
            (
                "Fig. 28",
                "a growing period faster than a fixed one",
                DFML.but(period_increment=1),
                "fixed period",
                DFML.but(period_increment=0),
                PAPER_50,
            ),
        )
    ),
    *OTHER_METHODS,
    *ADAPTIVE,
    claim("WSM above ACE", "Fig. 25", DFML, {"ace": ACE}, "above", PAPER_50, "wsm"),
    *ACE_ABOVE_CE,
    claim(
        "α for both terms above distillation alone",
        "Fig. 27",
        CE,
        {"distillation": CE.but(scheduled="distillation")},
        "above",
        PAPER_50,
    ),
    claim(
        "α for cross-entropy alone above a common one",
        "Fig. 27",
        CE.but(scheduled="supervision"),
        {"common": CE.but(scheduled="common")},
        "above",
        PAPER_50,
        "cross-entropy",
    ),
    Claim(
        "α for cross-entropy alone as good as for both terms",
        "Fig. 27",
        {"cross-entropy": CE.but(scheduled="supervision"), "both": CE},
        difference("cross-entropy", "both", final),
        "the same",
        PAPER_50,
        relation="≈",
        threshold=3.0,
        whose="ours",
        curves="peak",
    ),
    Claim(
        "α for distillation alone gains nothing over a fixed α, regular models",
        "Fig. 27",
        {"distillation": CE.but(scheduled="distillation"), "fixed": CE.but(shape="fixed", alpha_max=0.5)},
        difference("distillation", "fixed", lambda run: run.last()),
        "no gain",
        PAPER_50,
        relation="<",
        threshold=1.0,
        whose="ours",
    ),
    *at_paper_size("dfml"),
)

MODULE = Paper(
    "dfml",
    "DFML: Decentralized Federated Mutual Learning",
    [*(f"Table {n}" for n in range(1, 13)), *(f"Fig. {n}" for n in range(1, 29))],
    CLAIMS,
    left("dfml"),
    "α: weight of distillation; peak models: each peer's copy from the last maximum of α; K: mutual epochs. WSM, "
    "ACE: cross-entropy with a softmax weighted by the peer's class counts, or over some classes only. WSL, ANL-KD: "
    "other schedules of distillation. Meme: the small network that FML shares.",
)
