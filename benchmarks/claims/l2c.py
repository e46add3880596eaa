"""L2C's claims: the learned groups, accuracy, savings by pruning, and transfer of the encoder to other tasks.

Scaled down from 100 peers with FedAvg's CNN, 400 training images each, CIFAR and 100 rounds to 15 or 20 peers with
a CNN of 11,000 parameters, 32 to 150 training images each, Fashion-MNIST (and MNIST to train an encoder) and 10 or 15
rounds. Learning rates, batches, decays and the encoder are the paper's. Accuracy is masked to local classes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.claims.claim import Claim, Figures, SimulatedRun, simulated
from p2pfl.run_file.load import from_dict
from p2pfl.session import checkpoint
from p2pfl.session.build import load_data

LOCAL: dict[str, Any] = {"batch": 10, "lr": 0.01, "momentum": 0.0, "weight_decay": 5e-4}
MODEL = "dfml-cnn-8-16"

# ---- Fig. 4: five groups of three --------------------------------------------------------------------------

GROUPS_ROUNDS = 10


def groups(seed: int, rounds: int = GROUPS_ROUNDS, dataset: str = "fashion-mnist", **algorithm: Any) -> SimulatedRun:
    """15 peers in 5 groups of 3 with the same two classes, 48 training and 12 validation images of each."""
    partition = {"name": "groups", "groups": 5, "per_class": 60}
    return simulated(
        seed,
        rounds=rounds,
        peers=15,
        data={"dataset": dataset, "partition": partition},
        models=MODEL,
        algorithm={**LOCAL, "local_epochs": 2, "prune_round": None, **algorithm},
        eval_every=rounds,
    )


def found(run: SimulatedRun, t: int) -> Figures:
    """Whether the weights of round ``t`` show the groups.

    ``right``: percentage of the peers that give the largest weights to the three of their group. ``inside``,
    ``outside``: mean weight of another peer of the same group, and of a peer of another group.
    """
    group = [result.group for result in run.results]
    right, inside, outside = [], [], []
    for i in range(len(group)):
        w = {int(j): weight for j, weight in run.records(i)[t]["weights"].items()}
        group_of_i = {j for j in w if group[j] == group[i]}
        right.append(set(sorted(w, key=lambda j: -w[j])[: len(group_of_i)]) == group_of_i)
        inside += [weight for j, weight in w.items() if j in group_of_i - {i}]
        outside += [weight for j, weight in w.items() if j not in group_of_i]
    return {"right": 100.0 * fmean(right), "inside": fmean(inside), "outside": fmean(outside)}


def groups_show(figures: Figures) -> bool:
    return figures["right"] == 100.0 and figures["inside"] > 2 * figures["outside"]


@cache
def encoder_of(seed: int) -> Path:
    """Train an encoder on MNIST: 15 peers with two classes each, by the shards of Fig. 2."""
    run = simulated(
        1000 + seed,
        rounds=GROUPS_ROUNDS,
        peers=15,
        data={"dataset": "mnist", "partition": {"name": "shards", "classes_per_peer": 2, "shards": 100}},
        models=MODEL,
        algorithm={"name": "meta-l2c", **LOCAL, "local_epochs": 2, "prune_round": None},
        eval_every=GROUPS_ROUNDS,
    )
    path = Path(tempfile.mkdtemp(prefix="p2pfl-claim-")) / "encoder.pt"
    checkpoint.save(path, {"algorithm": {"encoder": run.state(0)["encoder"]}})
    return path


def transfer(seed: int) -> Figures:
    frozen: dict[str, Any] = {"encoder": str(encoder_of(seed)), "train_encoder": False}
    first = found(groups(seed, rounds=2, name="meta-l2c", **frozen), 0)
    untrained = found(groups(seed, name="meta-l2c"), 0)
    return {**first, "inside, not pretrained": untrained["inside"], "outside, not pretrained": untrained["outside"]}


def pruning(seed: int) -> Figures:
    """Fig. 9: prune to 2 of 14 neighbors (14 %) after the first 4 rounds."""
    dense, sparse = groups(seed, name="l2c"), groups(seed, name="l2c", prune_round=3, prune_to=2)
    saved = 100.0 * (1 - sparse.messages("Update") / dense.messages("Update"))
    return {"not pruned": dense.accuracy, "pruned": sparse.accuracy, "messages saved": saved}


# ---- Fig. 7: weights and shared classes --------------------------------------------------------------------

SHARED = {"dataset": "fashion-mnist", "partition": {"name": "shards", "classes_per_peer": 5, "shards": 200}}


def shared_classes(seed: int) -> Iterator[tuple[int, float]]:
    """Yield (shared classes, w_ij after 10 rounds) for each ordered pair of 20 peers with 5 of 10 classes each."""
    keys: dict[str, Any] = {
        "rounds": 10,
        "peers": 20,
        "data": SHARED,
        "models": MODEL,
        "algorithm": {"name": "l2c", **LOCAL, "local_epochs": 2, "prune_round": None},
        "eval_every": 10,
    }
    dataset, subsets = load_data(from_dict({"name": "claim", "device": "cpu", **keys, "seed": seed}))
    classes = [set(dataset.train.labels[subset.train].tolist()) for subset in subsets]
    for i, w in enumerate(simulated(seed, **keys).weights()):
        yield from ((len(classes[i] & classes[j]), weight) for j, weight in w.items() if j != i)


def by_shared_classes(seed: int) -> Figures:
    pairs = np.array(list(shared_classes(seed)))
    means = {int(n): float(pairs[pairs[:, 0] == n, 1].mean()) for n in np.unique(pairs[:, 0])}
    correlation = float(np.corrcoef(pairs.T)[0, 1])
    return {**{f"w at {n} shared": mean for n, mean in means.items()}, "correlation": correlation}


def grows(figures: Figures) -> bool:
    means = [mean for name, mean in figures.items() if name.startswith("w at")]
    return means[0] == min(means) and means[-1] == max(means) and figures["correlation"] > 0.3


# ---- Tables 2 and 3: accuracy on shards --------------------------------------------------------------------

NEIGHBORS = 2
"""A tenth of the peers: the neighbors that DPSGD has, and that L2C keeps."""


def shards(seed: int, name: str, graph: str = "complete", **algorithm: Any) -> SimulatedRun:
    """20 peers with two classes each, 16 training and 4 validation images of each, 5 epochs in each of 15 rounds."""
    return simulated(
        seed,
        rounds=15,
        peers=20,
        graph=graph,
        data={"dataset": "fashion-mnist", "partition": {"name": "shards", "classes_per_peer": 2, "shards": 300}},
        models=MODEL,
        masked_test=True,
        algorithm={"name": name, **LOCAL, "local_epochs": 5, **algorithm},
        eval_every=15,
    )


def local(seed: int) -> SimulatedRun:
    return shards(seed, "local")


def dpsgd(seed: int) -> SimulatedRun:
    return shards(seed, "dpsgd", graph="ring")


def learned(seed: int, name: str) -> SimulatedRun:
    return shards(seed, name, prune_round=4, prune_to=NEIGHBORS)


def worst_tenth(run: SimulatedRun) -> float:
    accuracies = sorted(100.0 * result.accuracy for result in run.results if result.accuracy is not None)
    return fmean(accuracies[: max(1, len(accuracies) // 10)])


def table_2(seed: int) -> Figures:
    return {
        "local": local(seed).accuracy,
        "dpsgd": dpsgd(seed).accuracy,
        "l2c": learned(seed, "l2c").accuracy,
        "meta-l2c": learned(seed, "meta-l2c").accuracy,
    }


def table_3(seed: int) -> Figures:
    runs = {"local": local(seed), **{name: learned(seed, name) for name in ("l2c", "meta-l2c")}}
    return {name: worst_tenth(run) for name, run in runs.items()}


CLAIMS: Sequence[Claim] = (
    Claim(
        name="L2C: peers with the same task find each other",
        paper="Fig. 4a",
        expects="after 10 rounds all 15 peers weigh the 3 of their group most, and inside > 2 * outside",
        measure=lambda seed: found(groups(seed, name="l2c"), GROUPS_ROUNDS - 1),
        holds=groups_show,
    ),
    Claim(
        name="meta-L2C: peers with the same task find each other",
        paper="Fig. 4b",
        expects="the same",
        measure=lambda seed: found(groups(seed, name="meta-l2c"), GROUPS_ROUNDS - 1),
        holds=groups_show,
    ),
    Claim(
        name="a meta-L2C trained on other tasks finds them at once",
        paper="Fig. 4c, Table 4",
        expects="the same in the first round, with a frozen encoder trained on MNIST",
        measure=transfer,
        holds=groups_show,
    ),
    Claim(
        name="weights grow with the number of shared classes",
        paper="Fig. 7",
        expects="mean w_ij smallest at the fewest shared classes, largest at the most; correlation over pairs > 0.3",
        measure=by_shared_classes,
        holds=grows,
    ),
    Claim(
        name="local training beats DPSGD on such tasks",
        paper="Table 2",
        expects="local > dpsgd (5 epochs, a tenth of the peers as neighbors)",
        measure=table_2,
        holds=lambda figures: figures["local"] > figures["dpsgd"],
    ),
    Claim(
        name="L2C beats local training and DPSGD",
        paper="Table 2",
        expects="l2c > local, l2c > dpsgd",
        measure=table_2,
        holds=lambda figures: figures["l2c"] > max(figures["local"], figures["dpsgd"]),
    ),
    Claim(
        name="meta-L2C beats local training and DPSGD",
        paper="Table 2",
        expects="meta-l2c > local, meta-l2c > dpsgd",
        measure=table_2,
        holds=lambda figures: figures["meta-l2c"] > max(figures["local"], figures["dpsgd"]),
    ),
    Claim(
        name="the worst peers gain",
        paper="Table 3",
        expects="worst tenth of the peers: l2c > local, meta-l2c > local",
        measure=table_3,
        holds=lambda figures: min(figures["l2c"], figures["meta-l2c"]) > figures["local"],
    ),
    Claim(
        name="pruning saves messages and costs no accuracy",
        paper="Fig. 9",
        expects="2 of 14 neighbors from the fifth round on: accuracy within 0.5 points, > 40 % fewer messages",
        measure=pruning,
        holds=lambda figures: figures["pruned"] > figures["not pruned"] - 0.5 and figures["messages saved"] > 40.0,
    ),
)
