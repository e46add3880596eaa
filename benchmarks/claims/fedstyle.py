"""FedStyle (Yang et al., 2022).

MNIST and USPS at 16x16 are two styles of the digits (SVHN, the paper's third, is not at hand), one peer each, λ = 1,
SimCLR, τ = 0.07, SGD with learning rate 0.1, batch 64, E_s = 10, E_l = 5, as in the paper's Table 1; but two
convolutions and 64 features instead of ResNet18, 400 training samples a peer instead of 46,849, and 20 rounds
instead of 100. Accuracies are on the whole test sets. The generator is trained unless a claim says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.claims import left
from benchmarks.claims.claim import Claim, Paper, Settings, difference
from benchmarks.claims.summary import Summary

PAPER = "3 peers, 100 rounds, 46,849 samples"
PAPER_OFFICE = "4 peers, 100 rounds, 2,730 samples"
PAPER_ADAPTIOPE = "3 peers, 100 rounds, 8,610 samples"
PAPER_30 = "30 peers, 100 rounds, 4,684 samples"


def digits(
    seconds: float, rounds: int = 20, per_style: int = 1, beta: float | None = None, **algorithm: Any
) -> Settings:
    partition = {"name": "styles", "per_peer": 400, **({} if beta is None else {"beta": beta})}
    hyper = {"style_weight": 1.0, "probe_samples": 2000, "probe_peers": 1, **algorithm}
    tree = {
        "rounds": rounds,
        "peers": 2 * per_style,
        "data": {
            "dataset": {"name": "styles", "of": ["mnist", "usps"], "size": 16},
            "partition": partition,
            "augment": "simclr",
        },
        "models": {"name": "tiny-cnn", "features": 64},
        "algorithm": {"name": "fedstyle", **hyper},
        "eval_every": rounds,
    }
    return Settings(tree, seconds, series="generalization")


ONE = {"fedstyle": digits(130), "fedavg": digits(100, style=False)}
ONE["fedstyle"] = Settings(ONE["fedstyle"].tree, 135, series="generalization", probe="content alone")
SIAMESE = {"fedstyle": digits(130, loss="simsiam"), "fedavg": digits(100, loss="simsiam", style=False)}
MANY: dict[str, Any] = {"per_style": 3, "beta": 0.2, "style_weight": 0.5, "participation": 0.5}
THREE = {"fedstyle": digits(220, **MANY), "fedavg": digits(180, style=False, **MANY)}
UNTRAINED = digits(25, rounds=1, style=False, lr=1e-12, local_epochs=1)

general = difference("fedstyle", "fedavg", lambda run: run.last("generalization"))
personal = difference("fedstyle", "fedavg", lambda run: run.last())


def spread(runs: Mapping[str, Summary]) -> float:
    """The largest personalization minus the smallest."""
    found = [run.last() for run in runs.values()]
    return max(found) - min(found)


NO_CURVE: dict[str, Any] = {"curves": ""}

CLAIMS = (
    Claim(
        "SimCLR: generalization above FedAvg", "Table 1", ONE, general, "+0.3 (93.4 against 93.1)", PAPER, **NO_CURVE
    ),
    Claim(
        "SimCLR: personalization above FedAvg",
        "Table 1",
        ONE,
        personal,
        "+0.9 (94.8 against 93.9)",
        PAPER,
        **NO_CURVE,
    ),
    Claim(
        "SimSiam: generalization above FedAvg",
        "Table 1",
        SIAMESE,
        general,
        "+0.9 (95.1 against 94.2)",
        PAPER,
        **NO_CURVE,
    ),
    Claim(
        "SimSiam: personalization above FedAvg",
        "Table 1",
        SIAMESE,
        personal,
        "+0.3 (95.3 against 95.0)",
        PAPER,
        **NO_CURVE,
    ),
    Claim(
        "generalization above FedAvg, 3 peers per style, β = 0.2",
        "Table 3",
        THREE,
        general,
        "+0.9 (92.2 against 91.3, β = 0.2)",
        PAPER_30,
        **NO_CURVE,
    ),
    Claim(
        "personalization above FedAvg, 3 peers per style, β = 0.2",
        "Table 3",
        THREE,
        personal,
        "+1.2 (54.8 against 53.7, β = 0.2)",
        PAPER_30,
        **NO_CURVE,
    ),
    Claim(
        "λ = 10 collapses the generator",
        "Table 4",
        {"λ = 1": ONE["fedstyle"], "λ = 10": digits(130, style_weight=10.0)},
        difference("λ = 1", "λ = 10", lambda run: run.last()),
        "+51.4 (53.5 with λ = 0.5 against 2.1)",
        PAPER_OFFICE,
        threshold=10.0,
        whose="ours",
        **NO_CURVE,
    ),
    Claim(
        "λ from 0.01 to 1 matters little",
        "Table 4",
        {"λ = 1": ONE["fedstyle"], **{f"λ = {x}": digits(130, style_weight=x) for x in (0.01, 0.1)}},
        spread,
        "2.3 at most (λ from 0.01 to 0.5)",
        PAPER_OFFICE,
        relation="<",
        threshold=2.3,
        **NO_CURVE,
    ),
    Claim(
        "features are learned without labels",
        "§ Evaluations",
        {"fedstyle": ONE["fedstyle"], "untrained": UNTRAINED},
        difference("fedstyle", "untrained", lambda run: run.last("generalization")),
        "—",
        PAPER,
        threshold=10.0,
        whose="ours",
        **NO_CURVE,
    ),
    Claim(
        "the stylized content feature gains",
        "§ Ablations",
        {"fedstyle": ONE["fedstyle"]},
        lambda runs: runs["fedstyle"].last() - runs["fedstyle"].probe["content alone"],
        "slightly above",
        PAPER,
        **NO_CURVE,
    ),
    Claim(
        "extracting style for longer gains",
        "§ Ablations",
        {"E_s = 10": ONE["fedstyle"], "E_s = 0": digits(110, style_epochs=0)},
        difference("E_s = 10", "E_s = 0", lambda run: run.last()),
        "E_s = 10 above 0",
        PAPER_ADAPTIOPE,
        **NO_CURVE,
    ),
    Claim(
        "a trained generator above an initial one",
        "Algorithm 3",
        {"trained": ONE["fedstyle"], "initial": digits(125, train_generator=False)},
        difference("trained", "initial", lambda run: run.last()),
        "not said",
        PAPER,
        whose="ours",
        **NO_CURVE,
    ),
)

MODULE = Paper(
    "fedstyle",
    "More Generalized and Personalized Unsupervised Representation Learning",
    [*(f"Table {n}" for n in range(1, 6)), *(f"Fig. {n}" for n in range(1, 6))],
    CLAIMS,
    left.FEDSTYLE,
)
