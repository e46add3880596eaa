"""L2C and meta-L2C (Li, Zhou, Tian, Tao, 2022).

Tables 2 and 3: the paper's 100 peers on the part of CIFAR-10, two classes and 49 training images each instead of 400,
a CNN of 14,000 parameters, 20 rounds of 5 epochs instead of 100. All scores count, on test images of the peer's
classes. DPSGD has ten neighbors, so the paper's self weight of 1/11, and L2C keeps ten too. FedAvg trains a tenth of
the peers per round, and so does Ditto: they have ten times the rounds for the same epochs. Ditto also has rows with
as many rounds as the others, which the paper may mean. FedFomo, the paper's FOMO, gets the models of ten neighbors in
each round. CGA, whose steps cost most, also has rows with 30 peers and four neighbors. With fewer peers and as many
images in all, L2C does not gain: a peer shares both classes with 0.3 others of 20, but with 2.1 of 100.

Table 4, Figs. 4, 8 and pruning in Fig. 9: 15 peers in five groups on Fashion-MNIST, 10 rounds of 2 epochs. There L2C
gains two thirds of a point over local training, so the thresholds of "almost no difference" bind little. Fig. 7: 20
peers with five classes each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from statistics import fmean, pstdev
from typing import Any

import numpy as np

from benchmarks.claims.claim import Claim, Paper, Settings, difference, spread
from benchmarks.claims.l2c_runs import (
    AT_PAPERS_RATE,
    BRIEF,
    CLIPPED,
    DIFFER_LESS,
    FEW,
    FROZEN,
    GROUPS,
    ONE_STEP,
    PAPER,
    PAPERS_RATE,
    SHARED,
    TABLE_2,
    VALIDATION,
    on_cifar10,
    shards,
)
from benchmarks.claims.paper_size import at_paper_size, left
from benchmarks.claims.summary import Summary


def settled(curve: str) -> Callable[[Summary], float]:
    return lambda run: run.settled(curve)


def compared(
    one: str,
    other: str,
    paper: str,
    name: str = "",
    where: str = "Table 2",
    read: str = "accuracy",
    settings: Mapping[str, Settings] = TABLE_2,
) -> Claim:
    runs = {label: settings[label] for label in (one, other)}
    return Claim(
        name or f"{one} above {other}",
        where,
        runs,
        difference(one, other, settled(read)),
        paper,
        PAPER,
        curves=read,
    )


def worst_fifth(run: Summary) -> float:
    """Mean accuracy of the worst fifth of the peers after the last round."""
    return fmean(sorted(run.accuracies)[: len(run.accuracies) // 5])


def above_trained(one: str) -> Callable[[Mapping[str, Summary]], float]:
    """How far ``one`` is above Ditto after the last round, over the peers that Ditto has ever trained.

    With a tenth of the peers per round, an eighth of them never takes part in 20 rounds; in the paper's 100, none.
    They are at the accuracy of chance, up to 17 %; the others have 49 or more.
    """

    def figure(runs: Mapping[str, Summary]) -> float:
        pairs = zip(runs[one].accuracies, runs["ditto"].accuracies, strict=True)
        return fmean(mine - other for mine, other in pairs if other > 30.0)

    return figure


def shared_classes(runs: Mapping[str, Summary]) -> float:
    """Correlation, over ordered pairs of peers, of w_ij with the number of shared classes."""
    (run,) = runs.values()
    classes = [set(found) for found in run.classes]
    pairs = [
        (len(classes[i] & classes[int(j)]), weight)
        for i, row in enumerate(run.weights)
        for j, weight in row.items()
        if int(j) != i
    ]
    return float(np.corrcoef(np.array(pairs).T)[0, 1])


def more_robust(one: str, runs: Mapping[str, Summary]) -> float:
    return spread(runs, "fedfomo") - spread(runs, one)


FOUND: dict[str, Any] = {"unit": "% of the peers", "threshold": 90.0, "whose": "ours", "curves": "right"}
PAPER_15 = "15 peers, 10 rounds, 2,667 samples"

ABOVE_DITTO = (("meta-l2c", "+4.78 ± 1.0 (92.10 against 87.32)"), ("l2c", "+2.82 ± 0.85 (90.14 against 87.32)"))

CLAIMS = (
    compared("local", "dpsgd", "+11.61 ± 2.1 (87.50 against 75.89)"),
    compared("local", "fedavg", "+16.85 ± 4.7 (87.50 against 70.65)"),
    compared("l2c", "local", "+2.64 ± 1.7 (90.14 against 87.50)"),
    compared("meta-l2c", "local", "+4.60 ± 1.7 (92.10 against 87.50)"),
    Claim(
        "l2c above local, the paper's rate",
        "Table 2",
        {"l2c": PAPERS_RATE, "local": TABLE_2["local"]},
        difference("l2c", "local", lambda run: run.settled()),
        "+2.64 ± 1.7 (90.14 against 87.50)",
        PAPER,
    ),
    compared("meta-l2c", "l2c", "+1.96 ± 0.88 (92.10 against 90.14; CIFAR-100 and MiniImageNet: below)"),
    compared("l2c", "dpsgd", "+14.25 ± 1.8 (90.14 against 75.89)"),
    compared("local", "cga", "+21.85 ± 3.0 (87.50 against 65.65)"),
    compared("l2c", "cga", "+24.49 ± 2.9 (90.14 against 65.65)"),
    compared("local", "cga", "+21.85 ± 3.0 (87.50 against 65.65)", "local above cga, 30 peers", settings=FEW),
    compared("l2c", "cga", "+24.49 ± 2.9 (90.14 against 65.65)", "l2c above cga, 30 peers", settings=FEW),
    compared("l2c", "fedavg", "+19.49 ± 4.8 (90.14 against 70.65)"),
    compared("meta-l2c", "ditto", "+4.78 ± 1.0 (92.10 against 87.32)"),
    compared("meta-l2c", "fedfomo", "+3.38 ± 0.88 (92.10 against 88.72)"),
    compared("ditto", "fedavg", "+16.67 ± 4.8 (87.32 against 70.65)"),
    compared("fedfomo", "fedavg", "+18.07 ± 4.8 (88.72 against 70.65)"),
    compared("l2c", "ditto", "+2.82 ± 0.85 (90.14 against 87.32)"),
    *(
        compared("ditto", "local", "−0.18 ± 1.7 (87.32 against 87.50); the text: above", name, settings=settings)
        for name, settings in (("", TABLE_2), ("ditto above local with as many rounds", BRIEF))
    ),
    compared("fedfomo", "local", "+1.22 ± 1.7 (88.72 against 87.50)"),
    compared("ditto", "dpsgd", "+11.43 ± 1.8 (87.32 against 75.89)"),
    compared("fedfomo", "dpsgd", "+12.83 ± 1.8 (88.72 against 75.89)"),
    *(
        compared(one, "ditto", paper, f"{one} above ditto with as many rounds", settings=BRIEF)
        for one, paper in ABOVE_DITTO
    ),
    *(
        Claim(
            f"{one} above ditto with as many rounds, peers that trained",
            "Table 2",
            {label: BRIEF[label] for label in (one, "ditto")},
            above_trained(one),
            paper,
            PAPER,
            whose="ours",
            curves="accuracy",
        )
        for one, paper in ABOVE_DITTO
    ),
    compared("l2c", "fedfomo", "+1.42 ± 0.46 (90.14 against 88.72)"),
    compared(
        "l2c",
        "fedfomo",
        "+4.22 ± 12.3 (83.02 against 78.80)",
        "L2C's worst tenth above FedFomo's",
        "Table 3",
        "worst",
    ),
    compared(
        "l2c",
        "fedfomo",
        "+1.42 ± 0.46 (90.14 against 88.72)",
        "l2c above fedfomo, the paper's rate",
        settings=AT_PAPERS_RATE,
    ),
    compared(
        "l2c",
        "fedfomo",
        "+4.22 ± 12.3 (83.02 against 78.80)",
        "L2C's worst tenth above FedFomo's, the paper's rate",
        "Table 3",
        "worst",
        settings=AT_PAPERS_RATE,
    ),
    compared("l2c", "local", "+5.67 ± 6.1 (83.02 against 77.35)", "L2C lifts the worst tenth", "Table 3", "worst"),
    compared(
        "meta-l2c", "local", "+5.55 ± 3.7 (82.90 against 77.35)", "meta-L2C lifts the worst tenth", "Table 3", "worst"
    ),
    compared(
        "meta-l2c",
        "fedfomo",
        "+4.10 ± 12.3 (82.90 against 78.80)",
        "meta-L2C's worst tenth above FedFomo's",
        "Table 3",
        "worst",
    ),
    *(
        Claim(
            name,
            "Table 3",
            {k: TABLE_2[k] for k in runs},
            difference(*runs, worst_fifth),
            paper,
            PAPER,
        )
        for name, runs, paper in (
            ("L2C lifts the worst fifth", ("l2c", "local"), "+3.51 ± 12.4 (85.10 against 81.59)"),
            ("meta-L2C lifts the worst fifth", ("meta-l2c", "local"), "+7.25 ± 12.5 (88.84 against 81.59)"),
            ("meta-L2C's worst fifth above FedFomo's", ("meta-l2c", "fedfomo"), "+3.64 ± 6.2 (88.84 against 85.20)"),
        )
    ),
    *(
        Claim(
            name,
            "Table 3",
            {k: settings[k] for k in runs},
            difference(*runs, lambda run: pstdev(run.accuracies)),
            f"{paper} over five partitions)",
            PAPER,
            unit="points of std over peers",
            relation="<",
        )
        for name, settings, runs, paper in DIFFER_LESS
    ),
    *(
        Claim(
            f"{title} converges faster than {other}",
            "Fig. 3",
            {k: TABLE_2[k] for k in (name, against)},
            difference(name, against, lambda run: run.mean()),
            "faster",
            PAPER,
            unit="points, mean of all rounds",
        )
        for title, name, other, against in (
            ("meta-L2C", "meta-l2c", "local training", "local"),
            ("meta-L2C", "meta-l2c", "FedFomo", "fedfomo"),
            ("L2C", "l2c", "local training", "local"),
            ("L2C", "l2c", "FedFomo", "fedfomo"),
        )
    ),
    *(
        Claim(
            f"ten neighbors are better than two for DPSGD{scored}",
            "Fig. 9",
            {"dpsgd": TABLE_2["dpsgd"], "dpsgd, ring": shards("dpsgd", 240, "ring")},
            difference("dpsgd", "dpsgd, ring", settled(curve)),
            "accuracy grows with the neighbors",
            PAPER,
            whose="ours" if scored else "paper",
            curves=curve,
        )
        for scored, curve in (("", "accuracy"), (", scores of the peer's classes", "masked"))
    ),
    Claim(
        "L2C hardly needs the neighbors",
        "Fig. 9",
        {"l2c, 4 kept": TABLE_2["l2c"].but(prune_to=4), "l2c": TABLE_2["l2c"]},
        difference("l2c, 4 kept", "l2c", lambda run: run.settled()),
        "almost no difference",
        PAPER,
        threshold=-1.0,
        whose="ours",
    ),
    *(
        Claim(
            f"{title}: peers with one task find each other{which}",
            where,
            {name: run},
            lambda runs: next(iter(runs.values())).last("right"),
            "all, after 10 rounds",
            PAPER_15,
            **FOUND,
        )
        for title, where, name, seconds in (("L2C", "Fig. 4a", "l2c", 150), ("meta-L2C", "Fig. 4b", "meta-l2c", 210))
        for which, run in (("", GROUPS[name]), (", CIFAR-10", on_cifar10(GROUPS[name], seconds)))
    ),
    Claim(
        "an encoder of other tasks finds them in the first round",
        "Fig. 4c",
        {"frozen": FROZEN},
        lambda runs: runs["frozen"].at(1, "right"),
        "all, after one round",
        PAPER_15,
        **FOUND,
    ),
    Claim(
        "an encoder of other tasks is above local training",
        "Table 4",
        {
            "frozen": Settings({**FROZEN.tree, "rounds": 10, "eval_every": 10}, 70, probe=FROZEN.probe),
            "local": GROUPS["local"],
        },
        difference("frozen", "local", lambda run: run.last()),
        "+3.83 ± 1.7 (91.33 against 87.50)",
        PAPER,
    ),
    Claim(
        "an encoder of other tasks is as good as one of the same tasks",
        "Table 4",
        {
            "frozen": Settings({**FROZEN.tree, "rounds": 10, "eval_every": 10}, 70, probe=FROZEN.probe),
            "meta-l2c": GROUPS["meta-l2c"],
        },
        difference("frozen", "meta-l2c", lambda run: run.last()),
        "−0.77 ± 1.2 (CIFAR-100: −1.69 ± 1.9)",
        PAPER,
        threshold=-1.0,
        whose="ours",
    ),
    *(
        Claim(
            f"{title}: weights grow with the shared classes",
            "Fig. 7",
            {name: SHARED[name]},
            shared_classes,
            "grow",
            PAPER,
            unit="correlation",
        )
        for title, name in (("L2C", "l2c"), ("meta-L2C", "meta-l2c"))
    ),
    *(
        Claim(
            f"{title} more robust than FedFomo to the fraction of validation samples",
            "Fig. 8",
            {**VALIDATION["fedfomo"], **VALIDATION[name]},
            partial(more_robust, name),
            "more robust",
            PAPER,
            unit="points of spread",
        )
        for title, name in (("L2C", "l2c"), ("meta-L2C", "meta-l2c"))
    ),
    Claim(
        "the fraction of validation samples matters little for L2C",
        "Fig. 8",
        VALIDATION["l2c"],
        spread,
        "almost no difference",
        PAPER,
        unit="points from least to most, by chance too",
        relation="<",
        threshold=2.0,
        whose="ours",
    ),
    *(
        Claim(
            f"{title}: pruning costs no accuracy",
            "Fig. 9",
            {k: GROUPS[k] for k in (f"{name}, 2 kept", name)},
            difference(f"{name}, 2 kept", name, lambda run: run.last()),
            "almost no difference",
            PAPER,
            threshold=-0.5,
            whose="ours",
        )
        for title, name in (("L2C", "l2c"), ("meta-L2C", "meta-l2c"))
    ),
    Claim(
        "local above dpsgd, clipped scores of local classes",
        "Table 2",
        CLIPPED,
        difference("local", "dpsgd", lambda run: run.settled("masked")),
        "+11.61 ± 2.1 (87.50 against 75.89)",
        PAPER,
        whose="ours",
        curves="masked",
    ),
    *(
        compared(one, other, paper, name, settings=ONE_STEP)
        for one, other, paper, name in (
            (
                "1 step",
                "5 epochs",
                "+7.12 ± 2.0 (83.01 against 75.89)",
                "one step per round is better than five epochs for DPSGD",
            ),
            ("local", "1 step", "+4.49 ± 2.0 (87.50 against 83.01)", "local above dpsgd, one step per round"),
            ("l2c", "1 step", "+7.13 ± 1.6 (90.14 against 83.01)", "l2c above dpsgd, one step per round"),
        )
    ),
    *at_paper_size("l2c"),
)

MODULE = Paper(
    "l2c",
    "Learning to Collaborate in Decentralized Learning of Personalized Models",
    [*(f"Table {n}" for n in range(1, 5)), *(f"Fig. {n}" for n in range(1, 10))],
    CLAIMS,
    left("l2c"),
    '"Find each other": a peer\'s largest mixing weights are those of the peers with the same task. Kept: '
    "neighbors that are left after pruning. Rate: the learning rate.",
)
