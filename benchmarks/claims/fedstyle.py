"""FedStyle (Yang et al., 2022).

MNIST and USPS at 16x16 are two styles of the digits (SVHN, the paper's third, is not at hand), one peer each, λ = 1,
SimCLR, τ = 0.07, SGD with learning rate 0.1, batch 64, E_s = 10, E_l = 5, as in the paper's Table 1; but two
convolutions and 64 features instead of ResNet18, MLPs of 32 and 16 units instead of 256 and 128, 400 training samples
a peer instead of 46,849, 2,000 samples instead of a whole style for the linear probe, and 20 rounds instead of 100.
Accuracies are on the whole test sets, after the last round. The generator is trained unless a claim says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.claims.claim import Claim, Paper, Settings, difference, spread
from benchmarks.claims.paper_size import left
from benchmarks.claims.summary import Summary

PAPER = "3 peers, 100 rounds, 46,849 samples"
PAPER_OFFICE = "4 peers, 100 rounds, 2,730 samples"
PAPER_ADAPTIOPE = "3 peers, 100 rounds, 8,610 samples"
PAPER_30 = "30 peers, 100 rounds, 4,685 samples"

USPS = {"name": "held-out", "of": "usps"}
"""Tested on a sixth of its training images: the test images at hand were prepared in another way."""


def digits(
    seconds: float,
    name: str = "fedstyle",
    rounds: int = 20,
    per_style: int = 1,
    beta: float | None = None,
    samples: int = 400,
    **hyper: Any,
) -> Settings:
    """Return a run of this method; λ is 1 if it is FedStyle and ``hyper`` does not say otherwise."""
    partition = {"name": "styles", "per_peer": samples, **({} if beta is None else {"beta": beta})}
    strength = {"style_weight": 1.0} if name == "fedstyle" else {}
    tree = {
        "rounds": rounds,
        "peers": 2 * per_style,
        "data": {
            "dataset": {"name": "styles", "of": ["mnist", USPS], "size": 16},
            "partition": partition,
            "augment": "simclr",
        },
        "models": {"name": "tiny-cnn", "features": 64},
        "algorithm": {"name": name, **strength, "probe_samples": 2000, "probe_peers": 1, **hyper},
        "eval_every": rounds,
    }
    return Settings(tree, seconds, series="generalization")


def every_fifth(found: Settings) -> Settings:
    """The same run, evaluated in every fifth round."""
    return Settings({**found.tree, "eval_every": 5}, found.seconds, series=found.series)


PAIR = (("fedstyle", "fedstyle"), ("fedavg", "fedavg-ssl"))
CENTRALIZED = Settings({**digits(100, "fedavg-ssl", loss="simsiam").tree, "peers": 1}, 100, series="generalization")
"""One peer with 400 samples of both styles."""
BASELINES = {"FedPer": 100, "FedRep": 180, "FedProx": 110, "APFL": 200, "Ditto": 200}
"""FedStyle's baselines besides FedAvg, and how many seconds a run of two peers takes."""
ONE = {"fedstyle": digits(130), "fedavg": digits(100, "fedavg-ssl")}
ONE["fedstyle"] = Settings(ONE["fedstyle"].tree, 135, series="generalization", probe="content alone")
SIAMESE = {"fedstyle": digits(130, loss="simsiam"), "fedavg": digits(100, "fedavg-ssl", loss="simsiam")}
MORE = {
    "fedstyle": Settings(digits(140, samples=2000).tree, 140, series="generalization", probe="content alone"),
    "fedavg": digits(95, "fedavg-ssl", samples=2000),
}
"""``ONE`` with more samples: a peer's probe, with the generator, is trained on nothing else."""
MORE_SIAMESE = {
    "fedstyle": digits(140, loss="simsiam", samples=2000),
    "fedavg": digits(95, "fedavg-ssl", loss="simsiam", samples=2000),
}
LARGER, SMALL_SHARES = ", 2,000 samples per peer", ", 3 peers per style, β = 0.2"
MANY: dict[str, Any] = {"per_style": 3, "beta": 0.2, "participation": 0.5}
THREE = {"fedstyle": digits(220, style_weight=0.5, **MANY), "fedavg": digits(180, "fedavg-ssl", **MANY)}
THREE_SIAMESE = {
    "fedstyle": digits(220, loss="simsiam", style_weight=0.5, **MANY),
    "fedavg": digits(180, "fedavg-ssl", loss="simsiam", **MANY),
}
PARTITIONS: Mapping[str, Mapping[str, Any]] = {
    "IID": {"per_style": 3, "participation": 0.5},
    "β = 0.8": {**MANY, "beta": 0.8},
}
TABLE_3 = {
    (loss, share): {
        "fedstyle": digits(220, loss=loss.lower(), style_weight=0.5, **size),
        "fedavg": digits(180, "fedavg-ssl", loss=loss.lower(), **size),
    }
    for loss in ("SimCLR", "SimSiam")
    for share, size in PARTITIONS.items()
}
"""Table 3, IID and with β = 0.8."""
CURVES = {
    (loss, size): {
        name: every_fifth(digits(100, method, loss=loss.lower(), samples=samples)) for name, method in PAIR
    }
    for loss in ("SimCLR", "SimSiam")
    for size, samples in (("", 400), (LARGER, 2000))
}
SIMCLR_GAINS = (
    "+1.0 (94.8 against 93.8); without SVHN +0.1",
    "+1.4 (94.8 against 93.4); without SVHN +0.1",
    "+7.7 (94.8 against 87.1); without SVHN +2.9",
    "+22.6 (94.8 against 72.2); without SVHN +19.6",
    "+0.9 (94.8 against 93.9); without SVHN +0.2",
)
SIMSIAM_GAINS = (
    "+0.1 (95.3 against 95.2); without SVHN +0.2",
    "+11.0 (95.3 against 84.3); without SVHN +4.6",
    "+43.8 (95.3 against 51.5); without SVHN +32.3",
    "+0.1 (95.3 against 95.2); without SVHN +0.4",
    "+0.3 (95.3 against 95.0); without SVHN +0.1",
)
SIMCLR_GAINS_30 = (
    "+0.4 (54.8 against 54.5); without SVHN +0.1",
    "−0.0 (54.8 against 54.9); without SVHN −0.2",
    "+0.3 (54.8 against 54.5); without SVHN −0.05",
    "+14.8 (54.8 against 40.0); without SVHN +14.3",
    "+1.3 (54.8 against 53.5); without SVHN +1.1",
)
SIMSIAM_GAINS_30 = (
    "−0.3 (57.9 against 58.2); without SVHN −0.7",
    "+1.2 (57.9 against 56.6); without SVHN +0.9",
    "+28.5 (57.9 against 29.4); without SVHN +29.1",
    "+7.6 (57.9 against 50.3); without SVHN +7.1",
    "+0.5 (57.9 against 57.4); without SVHN −0.1",
)
STRENGTHS = {f"λ = {x:g}": digits(130, style_weight=x) for x in (0.5, 10.0)}
SIAMESE_STRENGTHS = {"λ = 1": SIAMESE["fedstyle"], "λ = 10": digits(130, loss="simsiam", style_weight=10.0)}
EXTRACTION = {10: ONE["fedstyle"], 0: digits(110, style_epochs=0), 100: digits(220, style_epochs=100)}
SIAMESE_EXTRACTION = {
    10: SIAMESE["fedstyle"],
    0: digits(110, loss="simsiam", style_epochs=0),
    100: digits(220, loss="simsiam", style_epochs=100),
}
UNTRAINED = digits(25, "fedavg-ssl", rounds=1, lr=1e-12, local_epochs=1)

general = difference("fedstyle", "fedavg", lambda run: run.last("generalization"))
personal = difference("fedstyle", "fedavg", lambda run: run.last())


ABOVE_FEDAVG = (
    ("SimCLR", "generalization", general, "+0.3 (93.4 against 93.1); without SVHN +0.1 (97.3 against 97.2)"),
    ("SimCLR", "personalization", personal, "+0.9 (94.8 against 93.9); without SVHN 0.0 (97.3 for both)"),
    ("SimSiam", "generalization", general, "+0.9 (95.1 against 94.2); without SVHN +0.3 (97.2 against 96.9)"),
    ("SimSiam", "personalization", personal, "+0.2 (95.3 against 95.0); without SVHN +0.2 (97.2 against 97.1)"),
)


ABOVE_FEDAVG_30 = (
    ("SimCLR", "IID", "generalization", general, "+0.0 (92.8 against 92.8); without SVHN +0.3"),
    ("SimCLR", "IID", "personalization", personal, "+0.7 (92.4 against 91.7); without SVHN +0.9"),
    ("SimCLR", "β = 0.8", "generalization", general, "+0.6 (92.6 against 92.1); without SVHN +0.3"),
    ("SimCLR", "β = 0.8", "personalization", personal, "+1.5 (74.6 against 73.2); without SVHN +1.7"),
    ("SimSiam", "IID", "generalization", general, "+0.4 (92.9 against 92.4); without SVHN +0.3"),
    ("SimSiam", "IID", "personalization", personal, "+0.6 (92.8 against 92.2); without SVHN +0.5"),
    ("SimSiam", "β = 0.8", "generalization", general, "+0.2 (92.4 against 92.2); without SVHN +0.05"),
    ("SimSiam", "β = 0.8", "personalization", personal, "+0.3 (75.2 against 74.9); without SVHN +0.4"),
)


def above_baselines(
    loss: str,
    where: str,
    runs: Mapping[str, Settings],
    gains: Sequence[str],
    scale: str,
    seconds: float,
    which: str = "",
    **size: Any,
) -> Iterator[Claim]:
    """Yield the claims that FedStyle's personalization is above that of each of ``BASELINES``.

    Args:
        runs: FedStyle's run is the one of this name.
        gains: the paper's, in the order of ``BASELINES``; no claim is made where FedStyle is not above.
        seconds: for a run, times those of ``BASELINES``.
        which: end of the claims' names.
    """
    for (name, expected), gain in zip(BASELINES.items(), gains, strict=True):
        if gain.startswith("−"):
            continue
        other = digits(seconds * expected, f"{name.lower()}-ssl", loss=loss.lower(), **size)
        yield claim(
            f"{loss}: personalization above {name}{which}",
            where,
            {"fedstyle": runs["fedstyle"], name: other},
            difference("fedstyle", name, lambda run: run.last()),
            gain,
            scale,
        )


def claim(
    name: str,
    where: str,
    runs: Mapping[str, Settings],
    figure: Callable[[Mapping[str, Summary]], float],
    paper: str,
    scale: str,
    **more: Any,
) -> Claim:
    """Return a claim without a picture: only the last round is evaluated."""
    return Claim(name, where, runs, figure, paper, scale, curves="", **more)


CLAIMS = (
    *(
        claim(f"{loss}: {what} above FedAvg{size}", "Table 1", runs[loss], figure, paper, PAPER)
        for size, runs in (
            ("", {"SimCLR": ONE, "SimSiam": SIAMESE}),
            (LARGER, {"SimCLR": MORE, "SimSiam": MORE_SIAMESE}),
        )
        for loss, what, figure, paper in ABOVE_FEDAVG
    ),
    *(
        Claim(
            f"{loss}: FedStyle's personalization has settled by round 15{size}",
            "Table 1",
            runs,
            lambda runs: runs["fedstyle"].last() - runs["fedstyle"].at(15),
            "not said; 100 rounds",
            PAPER,
            unit="points from round 15 to 20",
            relation="≈",
            threshold=0.5,
            whose="ours",
        )
        for (loss, size), runs in CURVES.items()
    ),
    *(
        claim(
            f"SimSiam: generalization of {name} above centralized training",
            "Table 1",
            {method: SIAMESE[method], "centralized": CENTRALIZED},
            difference(method, "centralized", lambda run: run.last("generalization")),
            gain,
            PAPER,
        )
        for method, name, gain in (
            ("fedstyle", "FedStyle", "+1.3 (95.1 against 93.8); without SVHN +0.7"),
            ("fedavg", "FedAvg", "+0.4 (94.2 against 93.8); without SVHN +0.3"),
        )
    ),
    *above_baselines("SimCLR", "Table 1", ONE, SIMCLR_GAINS, PAPER, 0.25),
    *above_baselines("SimSiam", "Table 1", SIAMESE, SIMSIAM_GAINS, PAPER, 0.25),
    *above_baselines("SimCLR", "Table 1", MORE, SIMCLR_GAINS, PAPER, 1.0, LARGER, samples=2000),
    *above_baselines("SimSiam", "Table 1", MORE_SIAMESE, SIMSIAM_GAINS, PAPER, 1.0, LARGER, samples=2000),
    claim(
        "SimCLR: generalization above FedAvg, 3 peers per style, β = 0.2",
        "Table 3",
        THREE,
        general,
        "+0.9 (92.2 against 91.3); without SVHN +0.6",
        PAPER_30,
    ),
    claim(
        "SimCLR: personalization above FedAvg, 3 peers per style, β = 0.2",
        "Table 3",
        THREE,
        personal,
        "+1.2 (54.8 against 53.7); without SVHN +1.1",
        PAPER_30,
    ),
    claim(
        "SimSiam: generalization above FedAvg, 3 peers per style, β = 0.2",
        "Table 3",
        THREE_SIAMESE,
        general,
        "+0.2 (91.8 against 91.6); without SVHN +0.3",
        PAPER_30,
    ),
    claim(
        "SimSiam: personalization above FedAvg, 3 peers per style, β = 0.2",
        "Table 3",
        THREE_SIAMESE,
        personal,
        "+0.7 (57.9 against 57.2); without SVHN +0.1",
        PAPER_30,
    ),
    *(
        claim(
            f"{loss}: {what} above FedAvg, 3 peers per style, {share}",
            "Table 3",
            TABLE_3[loss, share],
            figure,
            paper,
            PAPER_30,
        )
        for loss, share, what, figure, paper in ABOVE_FEDAVG_30
    ),
    *above_baselines("SimCLR", "Table 3", THREE, SIMCLR_GAINS_30, PAPER_30, 0.5, SMALL_SHARES, **MANY),
    *above_baselines("SimSiam", "Table 3", THREE_SIAMESE, SIMSIAM_GAINS_30, PAPER_30, 0.5, SMALL_SHARES, **MANY),
    claim(
        "λ = 10 collapses SimCLR's generator",
        "Table 4",
        STRENGTHS,
        difference("λ = 0.5", "λ = 10", lambda run: run.last()),
        "+51.4 (53.5 against 2.1)",
        PAPER_OFFICE,
        threshold=10.0,
        whose="ours",
    ),
    claim(
        "λ = 10 costs SimCLR generalization, against 0.5",
        "Table 4",
        STRENGTHS,
        difference("λ = 0.5", "λ = 10", lambda run: run.last("generalization")),
        "+1.5 (54.9 against 53.4)",
        PAPER_OFFICE,
    ),
    claim(
        "λ from 0.01 to 0.5 matters little for SimCLR",
        "Table 4",
        {"λ = 0.5": STRENGTHS["λ = 0.5"], **{f"λ = {x}": digits(130, style_weight=x) for x in (0.01, 0.1)}},
        spread,
        "2.3 (51.2 to 53.5, SimCLR's personalization; λ = 1: 35.4)",
        PAPER_OFFICE,
        unit="points from least to most, by chance too",
        relation="<",
        threshold=2.3,
        whose="ours",
    ),
    claim(
        "λ = 10 costs SimSiam generalization, against 1",
        "Table 4",
        SIAMESE_STRENGTHS,
        difference("λ = 1", "λ = 10", lambda run: run.last("generalization")),
        "+7.2 (62.4 against 55.2)",
        PAPER_ADAPTIOPE,
    ),
    claim(
        "λ = 10 costs SimSiam personalization, against 1",
        "Table 4",
        SIAMESE_STRENGTHS,
        difference("λ = 1", "λ = 10", lambda run: run.last()),
        "+7.2 (63.8 against 56.6)",
        PAPER_ADAPTIOPE,
    ),
    claim(
        "features are learned without labels",
        "§ Evaluations",
        {"fedstyle": ONE["fedstyle"], "untrained": UNTRAINED},
        difference("fedstyle", "untrained", lambda run: run.last("generalization")),
        "—",
        PAPER,
        whose="ours",
    ),
    *(
        claim(
            f"SimCLR: the stylized content feature gains over the content feature alone{size}",
            "§ Ablations",
            {"fedstyle": runs["fedstyle"]},
            lambda runs: runs["fedstyle"].last() - runs["fedstyle"].probe["content alone"],
            "slightly above",
            PAPER,
        )
        for size, runs in (("", ONE), (LARGER, MORE))
    ),
    claim(
        "SimCLR: the content feature alone above FedAvg in personalization",
        "§ Ablations",
        ONE,
        lambda runs: runs["fedstyle"].probe["content alone"] - runs["fedavg"].last(),
        "above",
        PAPER,
    ),
    *(
        claim(
            f"{loss}: E_s = {longer} above {shorter}",
            "§ Ablations",
            {f"E_s = {longer}": runs[longer], f"E_s = {shorter}": runs[shorter]},
            difference(f"E_s = {longer}", f"E_s = {shorter}", lambda run: run.last()),
            paper,
            PAPER_ADAPTIOPE,
        )
        for loss, runs, longer, shorter, paper in (
            ("SimCLR", EXTRACTION, 10, 0, "above"),
            ("SimCLR", EXTRACTION, 100, 10, "slightly above"),
            ("SimSiam", SIAMESE_EXTRACTION, 10, 0, "above"),
            ("SimSiam", SIAMESE_EXTRACTION, 100, 10, "above"),
        )
    ),
    claim(
        "a trained generator above an initial one",
        "Algorithm 3",
        {"trained": ONE["fedstyle"], "initial": digits(125, train_generator=False)},
        difference("trained", "initial", lambda run: run.last()),
        "not said",
        PAPER,
        whose="ours",
    ),
)

MODULE = Paper(
    "fedstyle",
    "More Generalized and Personalized Unsupervised Representation Learning",
    [*(f"Table {n}" for n in range(1, 6)), *(f"Fig. {n}" for n in range(1, 6))],
    CLAIMS,
    left("fedstyle"),
    "λ: weight of the style-infused loss; E_s: epochs of training the style extractor; β: concentration of the "
    "Dirichlet partition. Generalization: accuracy on all styles; personalization: on the peer's own. Differences "
    'in the column "paper" are of its unrounded cells.',
)
