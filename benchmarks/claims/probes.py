"""Measurements that need a run's files, and runs that need another one before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.claims.summary import Finished, run_of, simulate_in
from p2pfl.algorithms.mapl_graph import head_similarity
from p2pfl.learning.evaluation import evaluate
from p2pfl.rng import Streams
from p2pfl.session import checkpoint
from p2pfl.session.build import load_data, make_algorithm


@dataclass(frozen=True)
class Probe:
    """What is done before and after a simulation.

    Attributes:
        before: from the run file and an empty folder to the run file that is simulated.
        after: from the finished run to named numbers.
    """

    before: Callable[[Mapping[str, Any], Path], Mapping[str, Any]] = lambda tree, scratch: tree
    after: Callable[[Finished], Mapping[str, float]] = lambda done: {}


def heads(done: Finished) -> dict[str, float]:
    """Mean similarity s_ij of heads inside and across clusters.

    ``separable``: how often a pair inside is more similar than a pair across, in percent.
    """
    found = [done.state(result.peer)["model"]["head.weight"] for result in done.results]
    groups = [result.group for result in done.results]
    pairs = list(permutations(range(len(groups)), 2))
    inside, across = (
        torch.tensor(
            [head_similarity(found[i], found[j], "rows") for i, j in pairs if (groups[i] == groups[j]) == same]
        )
        for same in (True, False)
    )
    separable = (inside[:, None] > across[None, :]).double().mean()
    return {"inside": float(inside.mean()), "across": float(across.mean()), "separable": 100.0 * float(separable)}


def with_encoder(tree: Mapping[str, Any], scratch: Path) -> Mapping[str, Any]:
    """Train meta-L2C's encoder on other tasks, MNIST's shards, and let the run use it frozen."""
    earlier = {
        **tree,
        "rounds": 10,
        "seed": 1000 + tree["seed"],
        "data": {"dataset": "mnist", "partition": {"name": "shards", "classes_per_peer": 2, "shards": 100}},
        "eval_every": 10,
    }
    (scratch / "earlier").mkdir()
    trained = simulate_in(run_of(earlier), scratch / "earlier").state(0)["encoder"]
    path = scratch / "encoder.pt"
    checkpoint.save(path, {"algorithm": {"encoder": trained}})
    return {**tree, "algorithm": {**tree["algorithm"], "encoder": str(path), "train_encoder": False}}


def content_alone(done: Finished) -> dict[str, float]:
    """FedStyle's personal accuracy, in percent, of the same nets with content features alone instead of Eq. 4."""
    plain = done.run.resolved()
    plain["algorithm"]["stylized"] = False
    plain.pop("plugins", None)  # named as in the run folder, where the run has its copy
    run = run_of(plain)
    data, cpu, accuracies = load_data(run), torch.device("cpu"), []
    for me in range(run.peers):
        peer = make_algorithm(run, me, data, cpu, Streams(run.seed, me))
        peer.load_state_dict(done.state(me))
        found = evaluate(peer.predict, peer.data, peer.data.test)
        assert found is not None
        accuracies.append(100.0 * found.accuracy)
    return {"content alone": fmean(accuracies)}


def head_counts(done: Finished) -> dict[str, float]:
    """Numbers that FedTGP sends in a round: counted, and Σ over directed edges of d·C_j."""
    dataset, subsets = load_data(done.run)
    labels = dataset.labels.pool
    features = done.run.file.models.features or 0
    local_classes = [len(set(labels[subset.train].tolist())) for subset in subsets]
    counted = sum(kinds["Prototypes"][1] for records in done.records for kinds in records[-1]["sent"].values()) / 4
    return {"counted": counted, "formula": float(features * sum(local_classes) * (done.run.peers - 1))}


PROBES: Mapping[str, Probe] = {
    "heads": Probe(after=heads),
    "encoder of other tasks": Probe(before=with_encoder),
    "content alone": Probe(after=content_alone),
    "numbers sent": Probe(after=head_counts),
}
