"""Measurements that need a run's files, and runs that need another one before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.claims.summary import planned, records_by_peer
from p2pfl.algorithms.mapl_graph import head_similarity
from p2pfl.api import RecordedRun
from p2pfl.learning.evaluation import evaluate
from p2pfl.rng import Streams
from p2pfl.run_file.load import load
from p2pfl.run_folder.folder import RunFolder
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
    after: Callable[[RecordedRun], Mapping[str, float]] = lambda done: {}


def heads(done: RecordedRun) -> dict[str, float]:
    """Mean similarity s_ij of heads inside and across clusters.

    ``separable``: how often a pair inside is more similar than a pair across, in percent.
    """
    groups = [result.group for result in done.results()]
    found = [done.model(peer).state_dict()["head.weight"] for peer in range(len(groups))]
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
    planned(earlier).simulate(scratch / "earlier")
    return {**tree, "algorithm": {**tree["algorithm"], "encoder": str(scratch / "earlier"), "train_encoder": False}}


def content_alone(done: RecordedRun) -> dict[str, float]:
    """FedStyle's personal accuracy, in percent, of the same nets with content features alone instead of Eq. 4."""
    run = load(done.folder / "run.yaml", overrides={"algorithm.stylized": False})
    data, cpu, accuracies = load_data(run), torch.device("cpu"), []
    for me in range(run.peers):
        peer = make_algorithm(run, me, data, cpu, Streams(run.seed, me))
        peer.load_state_dict(checkpoint.read(RunFolder(done.folder).peer(me).checkpoint)["algorithm"])
        found = evaluate(peer.predict, peer.data, peer.data.test)
        assert found is not None
        accuracies.append(100.0 * found.accuracy)
    return {"content alone": fmean(accuracies)}


def head_counts(done: RecordedRun) -> dict[str, float]:
    """Numbers that FedTGP sends in a round: counted, and Σ over directed edges of d·C_j."""
    labels, subsets = done.dataset().labels.pool, done.partition()
    features = done.plan().settings["models"]["features"] or 0
    local_classes = [len(set(labels[subset.train].tolist())) for subset in subsets]
    last = [records[-1]["sent"] for records in records_by_peer(done)]
    counted = sum(kinds["Prototypes"][1] for sent in last for kinds in sent.values()) / 4
    return {"counted": counted, "formula": float(features * sum(local_classes) * (len(subsets) - 1))}


PROBES: Mapping[str, Probe] = {
    "heads": Probe(after=heads),
    "encoder of other tasks": Probe(before=with_encoder),
    "content alone": Probe(after=content_alone),
    "numbers sent": Probe(after=head_counts),
}
