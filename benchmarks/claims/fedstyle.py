"""FedStyle's claims, at a size that fits two cores.

MNIST and USPS at 16x16 are two styles of the digits, one peer each (Table 1, "Client @1"), λ = 1, SimCLR, τ = 0.07,
SGD with learning rate 0.1, batch 64, E_s = 10, E_l = 5, as in the paper; but two convolutions and 64 features instead
of ResNet18, 400 training samples a peer instead of some 30,000, and 20 rounds instead of 100. The probe of the global
model uses 2,000 training samples of each style. Accuracies are on the whole test sets, in percent, after the last
round: *generalization* the mean over styles, *personal* the mean over peers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.claims.claim import Claim, Figures, SimulatedRun, simulated
from p2pfl.learning.evaluation import evaluate
from p2pfl.rng import Streams
from p2pfl.run_file.load import from_dict
from p2pfl.session.build import load_data, make_algorithm

ROUNDS = 20

METHODS: Mapping[str, Mapping[str, Any]] = {
    "fedavg": {"style": False},
    "fedstyle": {},
    "G trained": {"train_generator": True},
    "λ = 10": {"train_generator": True, "style_weight": 10.0},
    "untrained": {"style": False, "lr": 1e-12, "local_epochs": 1},
}


def keys(method: str, **switches: Any) -> dict[str, Any]:
    rounds = 1 if method == "untrained" else ROUNDS
    given = {"style_weight": 1.0, "probe_samples": 2000, "probe_peers": 1, **METHODS[method], **switches}
    return {
        "rounds": rounds,
        "peers": 2,
        "data": {
            "dataset": {"name": "styles", "of": ["mnist", "usps"], "size": 16},
            "partition": {"name": "styles", "per_peer": 400},
            "augment": "simclr",
        },
        "models": {"name": "tiny-cnn", "features": 64},
        "algorithm": {"name": "fedstyle", **given},
        "eval_every": rounds,
    }


def generalization(run: SimulatedRun) -> float:
    return 100.0 * run.results[0].extra_metrics["generalization"]


def personal(run: SimulatedRun) -> float:
    return run.accuracy


def compared(accuracy: Callable[[SimulatedRun], float], *methods: str) -> Callable[[int], Figures]:
    return lambda seed: {method: accuracy(simulated(seed, **keys(method))) for method in methods}


def with_and_without_style(seed: int) -> Figures:
    """Evaluate the same nets, personalized with Eq. 4 and with the content features alone."""
    run = simulated(seed, **keys("fedstyle"))
    plain = from_dict({"name": "claim", "device": "cpu", **keys("fedstyle", stylized=False), "seed": seed})
    data, cpu, evaluations = load_data(plain), torch.device("cpu"), []
    for me in range(plain.peers):
        peer = make_algorithm(plain, me, data, cpu, Streams(seed, me))
        peer.load_state_dict(run.state(me))
        evaluations.append(evaluate(peer.predict, peer.data, peer.data.test))
    return {
        "h_c + G([h_c, h_s])": personal(run),
        "h_c": 100.0 * sum(found.accuracy for found in evaluations if found is not None) / len(evaluations),
    }


def first_is_larger(by: float = 0.0) -> Callable[[Figures], bool]:
    def holds(figures: Figures) -> bool:
        first, second, *_ = figures.values()
        return first > second + by

    return holds


CLAIMS = (
    Claim(
        "features without labels",
        "§ Evaluations",
        "a linear probe on FedStyle's global net beats one on an untrained net by 10 points",
        compared(generalization, "fedstyle", "untrained"),
        first_is_larger(by=10.0),
    ),
    Claim(
        "generalization",
        "Tables 1–3",
        "FedStyle above unsupervised FedAvg",
        compared(generalization, "fedstyle", "fedavg"),
        first_is_larger(),
    ),
    Claim(
        "generalization, generator trained",
        "Tables 1–3",
        "FedStyle with a trained generator above unsupervised FedAvg",
        compared(generalization, "G trained", "fedavg"),
        first_is_larger(),
    ),
    Claim(
        "personalization",
        "Tables 1–3",
        "FedStyle above unsupervised FedAvg",
        compared(personal, "fedstyle", "fedavg"),
        first_is_larger(),
    ),
    Claim(
        "personalization, generator trained",
        "Tables 1–3",
        "FedStyle with a trained generator above unsupervised FedAvg",
        compared(personal, "G trained", "fedavg"),
        first_is_larger(),
    ),
    Claim(
        "stylized content feature",
        "figure in § Ablation studies",
        "personal accuracy with Eq. 4 above that of the same nets with content features alone",
        with_and_without_style,
        first_is_larger(),
    ),
    Claim(
        "a large λ collapses the generator",
        "Table 4",
        "personal accuracy with λ = 10 lower than with λ = 1 by 10 points, generator trained",
        compared(personal, "G trained", "λ = 10"),
        first_is_larger(by=10.0),
    ),
)
