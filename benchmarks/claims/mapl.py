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

from benchmarks.claims.claim import Claim, Paper, difference
from benchmarks.claims.mapl_figures import (
    blocks,
    cost_of_steps,
    head_gap,
    payload,
    saved,
    series,
    settled,
    uneven,
    within_budget,
)
from benchmarks.claims.mapl_runs import (
    ALIGNED,
    COLOR_HEADS,
    EQUAL,
    EQUAL_2,
    LOCAL,
    LOCAL_2,
    MAPL,
    MAPL_2,
    MORE_SAMPLES,
    PAPER,
    PAPER_10,
    PAPER_10_SC_2,
    PLAIN_HEADS,
    SINGLE_VIEW,
    STEPS,
    TABLE_1,
    TEN,
    UNPRUNED,
    WHOLE_BATCHES,
    colors,
    digits,
    paper_scale,
    without_terms,
)
from benchmarks.claims.paper_size import at_paper_size, left


def ablation(name: str, label: str, where: str, paper: str, sc2: bool = False, **hyper: Any) -> Claim:
    base = MAPL_2 if sc2 else MAPL
    runs = {"mapl": base, label: base.but(**hyper)}
    scenario = 2 if sc2 else 1
    return Claim(f"{name}, Sc. {scenario}", where, runs, settled("mapl", label), paper, paper_scale(scenario))


TITLES = {"local": "local training", "fedproto": "FedProto", "fedclassavg": "FedClassAvg", "fedsim": "FedSim"}
ACCURACIES: Mapping[int, Mapping[str, float]] = {
    1: {"mapl": 77.27, "local": 70.60, "fedproto": 73.13, "fedclassavg": 74.67, "fedsim": 64.93},
    2: {"mapl": 65.43, "local": 58.67, "fedproto": 61.14, "fedclassavg": 62.86, "fedsim": 52.33},
    3: {"mapl": 71.53, "local": 65.40, "fedproto": 66.00, "fedclassavg": 69.53, "fedsim": 56.67},
    4: {"mapl": 59.52, "local": 53.52, "fedproto": 56.33, "fedclassavg": 57.29, "fedsim": 49.14},
}
"""The paper's Table 1, CIFAR-10, by scenario."""


def above(other: str, scenario: int) -> Claim:
    runs, paper = TABLE_1[scenario], ACCURACIES[scenario]
    return Claim(
        f"above {TITLES[other]}, Sc. {scenario}",
        "Table 1",
        {"mapl": runs["mapl"], other: runs[other]},
        settled("mapl", other),
        f"+{paper['mapl'] - paper[other]:.2f} ({paper['mapl']:.2f} against {paper[other]:.2f})",
        paper_scale(scenario),
    )


def at_usual_rate(claim: Claim) -> Claim:
    """The same comparison with MAPL's learning rate of the other scenarios, whatever the tuning run prefers."""
    runs = {**claim.runs, "mapl": replace(claim.runs["mapl"], rates=())}
    return replace(claim, name=f"{claim.name}, MAPL's learning rate of Sc. 1 to 3", runs=runs, whose="ours")


CONT, CONT_2 = "+4.87 (77.27 against 72.40)", "+5.38 (65.43 against 60.05)"
"""What l_cont gains in the paper's two scenarios."""

CLAIMS = (
    *(above(other, scenario) for other in TITLES for scenario in TABLE_1),
    *(at_usual_rate(above(other, 4)) for other in TITLES),
    Claim(
        "above local training, Sc. 1, no ReLU in MAPL's classifier",
        "Table 1",
        {"mapl": MAPL.but(head_relu=False), "local": LOCAL},
        settled("mapl", "local"),
        "+6.67 (77.27 against 70.60); a ReLU for both in its code",
        PAPER,
        whose="ours",
    ),
    *(
        Claim(
            f"above FedProto{scored}, Sc. 1",
            "Table 1",
            {label: TABLE_1[1][label] for label in ("mapl", "fedproto")},
            lambda runs, curve=curve: runs["mapl"].settled() - runs["fedproto"].settled(curve),  # type: ignore[misc]
            "+4.14 (77.27 against 73.13)",
            PAPER,
            whose="ours",
        )
        for scored, curve in (("'s heads", "head"), (" with the peer's classes alone", "masked"))
    ),
    ablation("l_cont gains", "without l_cont", "Table 2", CONT, contrastive=False),
    Claim(
        "l_cont gains, Sc. 1, 750 samples per peer in batches of 64",
        "Table 2",
        {"mapl": MORE_SAMPLES, "without l_cont": MORE_SAMPLES.but(contrastive=False)},
        settled("mapl", "without l_cont"),
        CONT,
        PAPER,
    ),
    replace(ablation("l_proto gains", "without l_proto", "Table 2", "not varied", prototype=False), whose="ours"),
    *(
        replace(
            ablation("all terms together gain", "l_ce alone", "Table 2", "not varied", sc2=sc2, **without_terms()),
            whose="ours",
        )
        for sc2 in (False, True)
    ),
    *(
        Claim(
            f"{term} gains over {title}, Sc. 1",
            "Table 2",
            {f"with {term}": MAPL.but(**without_terms(*base, term)), "without": MAPL.but(**without_terms(*base))},
            settled(f"with {term}", "without"),
            paper,
            PAPER,
            whose="paper" if base else "ours",
        )
        for term, title, base, paper in (
            ("l_proto", "l_ce alone", (), "not varied"),
            ("l_cont", "l_ce alone", (), "not varied"),
            ("l_cont", "l_ce and l_proto", ("l_proto",), "+4.20 (75.60 against 71.40)"),
        )
    ),
    *(
        Claim(
            f"l_ce alone, on two views, above local training, Sc. {scenario}",
            "Table 2",
            {"l_ce alone": base.but(**without_terms()), "local": local},
            settled("l_ce alone", "local"),
            "not varied",
            paper_scale(scenario),
            whose="ours",
        )
        for scenario, base, local in ((1, MAPL, LOCAL), (2, MAPL_2, LOCAL_2))
    ),
    *(
        Claim(
            f"l_cont and the second view gain, Sc. {scenario}{batches}",
            "Table 2",
            {"mapl": base, "without them": base.but(**SINGLE_VIEW)},
            settled("mapl", "without them"),
            paper,
            paper_scale(scenario),
            whose="ours",
        )
        for scenario, batches, base, paper in ((1, ", batches of 15", WHOLE_BATCHES, CONT), (2, "", MAPL_2, CONT_2))
    ),
    *(
        Claim(
            f"without l_cont and the second view above local training, Sc. {scenario}{batches}",
            "Table 2",
            {"mapl": base.but(**SINGLE_VIEW), "local": local},
            settled("mapl", "local"),
            paper,
            paper_scale(scenario),
            whose="ours",
        )
        for scenario, batches, base, local, paper in (
            (1, ", batches of 15", WHOLE_BATCHES, LOCAL.but(batch=15), "+1.80 (72.40 against 70.60)"),
            (2, "", MAPL_2, LOCAL_2, "+1.38 (60.05 against 58.67)"),
        )
    ),
    ablation("the graph gains", "without graph", "Table 2", "+1.60 (77.27 against 75.67)", cgl=False),
    ablation("l_uni gains", "without l_uni", "Table 2", "+1.60 (77.27 against 75.67)", uniformity=False),
    ablation("l_cont gains", "without l_cont", "Table 2", CONT_2, sc2=True, contrastive=False),
    ablation("the graph gains", "without graph", "Table 2", "+0.24 (65.43 against 65.19)", sc2=True, cgl=False),
    ablation("l_uni gains", "without l_uni", "Table 2", "+0.81 (65.43 against 64.62)", sc2=True, uniformity=False),
    ablation("confidence gains", "γ = 1", "Table 3", "+2.00 (77.27 against 75.27)", confidence=False),
    ablation("ℓ2 above ℓ1", "ℓ1", "Table 3", "+1.67 (77.27 against 75.60)", norm="l1"),
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
        threshold=33.55,
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
            f"the margin over FedClassAvg grows with the peers{label}",
            "Table 5",
            {
                "mapl": runs["mapl"],
                "fedclassavg": runs["fedclassavg"],
                "mapl, 16": colors("mapl", runs["mapl"].seconds, peers=16, scenario=scenario),
                "fedclassavg, 16": colors("fedclassavg", runs["fedclassavg"].seconds, peers=16, scenario=scenario),
            },
            lambda runs: settled("mapl, 16", "fedclassavg, 16")(runs) - settled("mapl", "fedclassavg")(runs),
            paper,
            paper_scale(scenario),
        )
        for label, scenario, runs, paper in (
            ("", 1, TABLE_1[1], "+1.00 (+2.60 with 20 peers, +1.60 with 10)"),
            (", Sc. 2", 2, TABLE_1[2], "+1.53 (+2.58 with 20 peers, +1.05 with 10)"),
        )
    ),
    Claim(
        "one step on the graph above two, Sc. 1",
        "Table 6",
        {"E_g 1": MAPL, "E_g 2": MAPL.but(graph_steps=2)},
        settled("E_g 1", "E_g 2"),
        "+2.87 (77.27 against 74.40)",
        PAPER,
    ),
    Claim(
        "more steps on the graph cost little, Sc. 2",
        "Table 6",
        STEPS,
        cost_of_steps,
        "+0.47 (65.43 against 64.96, the mean of E_g 2 to 20); 1.00 from least to most",
        paper_scale(2),
        relation="<",
        threshold=1.0,
        whose="ours",
    ),
    Claim(
        "numbers sent are 2·N_e·(d·K + |φ|) per round, heads from T_thr on",
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
            ("FLT", "flt", "+0.73 (82.93 against 82.20)"),
        )
    ),
    Claim(
        "MAPL+ above FLT with the true clusters",
        "Table 9",
        {k: EQUAL[k] for k in ("mapl+", "fedavg in clusters")},
        settled("mapl+", "fedavg in clusters"),
        "+0.73 (82.93 against 82.20)",
        PAPER,
        whose="ours",
    ),
    Claim(
        "MAPL above FedClassAvg where networks are equal",
        "Table 9",
        {k: EQUAL[k] for k in ("mapl", "fedclassavg")},
        settled("mapl", "fedclassavg"),
        "+0.67 (76.27 against 75.60)",
        PAPER,
    ),
    Claim(
        "MAPL above local training where networks are equal",
        "Table 9",
        {k: EQUAL[k] for k in ("mapl", "local")},
        settled("mapl", "local"),
        "+20.60 (76.27 against 55.67)",
        PAPER,
    ),
    *(
        Claim(
            f"l_proto aligns heads{which}",
            "Fig. 3",
            runs,
            difference("with l_proto", "without", head_gap),
            "blocks with l_proto, none without",
            PAPER_10,
            unit="of s inside − across",
            curves="accuracy" if which else "",
        )
        for which, runs in (("", ALIGNED), (", CIFAR-10", COLOR_HEADS))
    ),
    *(
        Claim(
            f"without l_proto heads reveal nothing{which}",
            "Fig. 3",
            {"without": run},
            lambda runs: runs["without"].probe["separable"],
            "no blocks",
            PAPER_10,
            unit="% of pairs in order",
            relation="<",
            threshold=60.0,
            whose="ours",
            curves="",
        )
        for which, run in (
            ("", ALIGNED["without"]),
            (", no ReLU before them", PLAIN_HEADS),
            (", CIFAR-10", COLOR_HEADS["without"]),
            (", CIFAR-10, no ReLU before them", COLOR_HEADS["without"].but(head_relu=False)),
        )
    ),
    *(
        Claim(
            f"the graph becomes block-diagonal{which}",
            where,
            {"mapl": run},
            blocks,
            "almost zero across",
            scale,
            unit="% across, relative to inside",
            relation="<",
            threshold=5.0,
            whose="ours",
            curves="across",
        )
        for which, where, run, scale in (
            ("", "Fig. 4", MAPL, PAPER_10),
            (", 10 peers", "Fig. 5", TEN, PAPER_10),
            (", digits", "Fig. 5", digits(), PAPER_10),
            (", Sc. 2", "Fig. 6", MAPL_2, PAPER_10_SC_2),
            (", overlapping digits", "Fig. 6", digits(overlap=2), PAPER_10_SC_2),
        )
    ),
    *(
        Claim(
            f"peers of a cluster get equal weights{size}",
            "Fig. 4",
            {"mapl": run},
            uneven,
            "equal weights",
            PAPER_10,
            unit="% from least to most, of the mean",
            relation="<",
            threshold=50.0,
            whose="ours",
            curves="",
        )
        for size, run in (("", MAPL), (", 10 peers", TEN), (", equal networks", EQUAL["mapl"]))
    ),
    *(
        Claim(
            f"converges faster than {title}{where}",
            "Fig. 7",
            {label: TABLE_1[scenario][label] for label in ("mapl", other)},
            difference("mapl", other, lambda run: run.mean(series(run))),
            "faster",
            paper_scale(scenario),
            unit="points, mean of all rounds",
        )
        for other, title in TITLES.items()
        for where, scenario in (("", 1), (", Sc. 2", 2))
    ),
    *at_paper_size("mapl"),
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
    left("mapl"),
    "Sc. 1, 2: two clusters of peers with disjoint or overlapping classes; Sc. 3, 4: the same with unequal "
    "numbers of images. l_ce, l_cont, l_proto, l_uni: cross-entropy, contrastive, prototype and uniformity loss. "
    "γ: a peer's share of the samples, S: similarity of heads, E_g: steps on the graph per round, T_thr: the "
    "round from which on it is learned.",
)
