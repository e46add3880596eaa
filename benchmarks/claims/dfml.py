"""DFML's claims, at a size that fits two cores.

Digits (about 115 training samples a peer, where CIFAR-10 gives 4000), ten peers, five of which send in each round,
with the four small networks of `tiny4` instead of H2 CNNs, batches of 32. DFML has 30 rounds of K = 5 passes (paper:
500 of 10), in periods of 5, 10 and 15 rounds, with learning rate 0.01 (at 0.03 one of the networks diverges). The
baselines use 0.03, their best rate of 0.01, 0.03, 0.1, and at least twice as many rounds.

Accuracies are global ones, in percent: on the whole test set, mean over peers, for DFML of the peak models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from benchmarks.claims.claim import Claim, Figures, SimulatedRun, simulated

NON_IID = {"name": "dirichlet-train", "beta": 0.1}
IID = {"name": "iid-train"}
ROUNDS = 30
MAXIMA = (4, 14, 29)
"""Rounds, from 0, in which α is α_max."""
CE: dict[str, Any] = {"supervision": "ce", "alpha_max": 1.0, "eval_every": 1}
WSM_FIXED: dict[str, Any] = {"shape": "fixed", "alpha_max": 0.5}
CE_FIXED: dict[str, Any] = {"supervision": "ce", **WSM_FIXED}


def dfml(
    seed: int, partition: Mapping[str, Any] = NON_IID, graph: str = "complete", eval_every: int = 5, **h: Any
) -> SimulatedRun:
    hyper = {"batch": 32, "lr": 0.01, "mutual_epochs": 5, "period": 5, "period_increment": 5, **h}
    return _run(seed, {"name": "dfml", **hyper}, ROUNDS, eval_every, partition, graph)


def baseline(
    seed: int, name: str, rounds: int = 100, partition: Mapping[str, Any] = NON_IID, graph: str = "complete"
) -> SimulatedRun:
    return _run(seed, {"name": name, "batch": 32, "lr": 0.03}, rounds, rounds, partition, graph)


def _run(
    seed: int, algorithm: dict[str, Any], rounds: int, eval_every: int, partition: Mapping[str, Any], graph: str
) -> SimulatedRun:
    return simulated(
        seed,
        rounds=rounds,
        peers=10,
        graph=graph,
        data={"dataset": "digits", "partition": dict(partition)},
        models="tiny4",
        algorithm=algorithm,
        eval_every=eval_every,
    )


def peak(run: SimulatedRun) -> float:
    return run.extra_metric("peak")


def peaks(run: SimulatedRun, every: int = 5) -> dict[int, float]:
    """Return the accuracy of the peak models by number of completed rounds."""
    read = run.curve(
        lambda record: 100.0 * record["extra_metrics"]["peak"]["accuracy"] if record["extra_metrics"] else -1.0
    )
    return {t + 1: accuracy for t, accuracy in enumerate(read) if accuracy >= 0}


def rise_and_fall(seed: int) -> Figures:
    """Fig. 8, with CE supervision, from the second period on."""
    run = dfml(seed, **CE)
    regular = run.curve(lambda record: 100.0 * record["personal"]["accuracy"])
    kept = list(peaks(run).values())
    alpha = [record["diagnostics"]["alpha"] for record in run.records(0)]
    after, last = MAXIMA[0] + 1, MAXIMA[1] + 1
    return {
        "regular, α = 1": fmean(regular[t] for t in MAXIMA[1:]),
        "regular, α < ½": fmean(regular[t] for t in range(after, ROUNDS) if alpha[t] < 0.5),
        "regular, rounds 16-29": fmean(regular[last : ROUNDS - 1]),
        "peak, rounds 16-29": fmean(kept[last : ROUNDS - 1]),
    }


def against(
    partition: Mapping[str, Any], *names: str, rounds: int, graph: str = "complete"
) -> Callable[[int], Figures]:
    """Compare DFML to baselines after ``rounds`` rounds."""

    def measure(seed: int) -> Figures:
        others = {
            f"{name}, {rounds} rounds": baseline(seed, name, rounds, partition, graph).accuracy for name in names
        }
        return {"dfml, 30 rounds": peak(dfml(seed, partition, graph)), **others}

    return measure


def first_is_largest(figures: Figures) -> bool:
    first, *others = figures.values()
    return all(first > other for other in others)


def rounds_to_catch_up(seed: int) -> Figures:
    """Rounds, in steps of five, until the peak models reach Dec. FedAvg's final accuracy; 99 if never."""
    goal = baseline(seed, "fedavg-dec").accuracy
    reached = [rounds for rounds, accuracy in peaks(dfml(seed)).items() if accuracy >= goal]
    return {"dfml's rounds to fedavg-dec's 100": min(reached, default=99)}


def ablation(**variants: Mapping[str, Any]) -> Callable[[int], Figures]:
    """The peak models' accuracy by variant of the hyper-parameters."""
    return lambda seed: {name: peak(dfml(seed, **hyper)) for name, hyper in variants.items()}


CLAIMS: Sequence[Claim] = [
    Claim(
        "regular models rise and fall with α, peak models keep the peak",
        "Fig. 8",
        "regular at α_max > regular at α < α_max/2; between maxima peak > regular",
        rise_and_fall,
        lambda f: f["regular, α = 1"] > f["regular, α < ½"] and f["peak, rounds 16-29"] > f["regular, rounds 16-29"],
    ),
    Claim(
        "DFML beats averaging with heterogeneous models, non-IID",
        "Table 6",
        "dfml > fedavg-dec and fedprox-dec",
        against(NON_IID, "fedavg-dec", "fedprox-dec", rounds=100),
        first_is_largest,
    ),
    Claim(
        "DFML beats averaging with heterogeneous models, IID",
        "Table 6",
        "dfml > fedavg-dec",
        against(IID, "fedavg-dec", rounds=60),
        first_is_largest,
    ),
    Claim(
        "DFML needs a fraction of the rounds",
        "Table 8",
        "peak models reach fedavg-dec's accuracy after 100 rounds in at most 30",
        rounds_to_catch_up,
        lambda f: f["dfml's rounds to fedavg-dec's 100"] <= ROUNDS,
    ),
    Claim(
        "cyclic α helps plain cross-entropy, non-IID",
        "Table 9",
        "cyclic > α = 0.5 throughout",
        ablation(cyclic=CE, fixed=CE_FIXED),
        first_is_largest,
    ),
    Claim(
        "cyclic α helps WSM, non-IID",
        "Table 9",
        "cyclic > α = 0.5 throughout",
        ablation(cyclic={}, fixed=WSM_FIXED),
        first_is_largest,
    ),
    Claim(
        "WSM beats plain cross-entropy, non-IID",
        "Table 9",
        "WSM > CE, both with cyclic α",
        ablation(wsm={}, ce=CE),
        first_is_largest,
    ),
    Claim(
        "DFML beats averaging on two cliques and a bridge",
        "Table 12",
        "dfml > fedavg-dec",
        against(NON_IID, "fedavg-dec", rounds=60, graph="bridge"),
        first_is_largest,
    ),
]
