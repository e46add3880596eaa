"""What the models of a run have learned: needs its data and its checkpoints, and executes its plug-ins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from launcher.report.numbers import rounded
from p2pfl.errors import P2pflError, RunFolderError
from p2pfl.run_folder.folder import RunFolder

if TYPE_CHECKING:
    from p2pfl.session.inspection import Inspection

MAX_POINTS = 1000
"""Embeddings that are projected, of all peers together."""
MAX_PROTOTYPES = 1000
MAX_CONFUSION = 40_000
"""Cells of the confusion matrices of single peers that a page holds; the pooled one is always there."""

Matrix = npt.NDArray[np.float32]


@dataclass
class Learned:
    """Attributes:
    partition: as ``p2pfl data show --json`` gives it; None if not available.
    confusion: by peer, [[true class, predicted class, count], …].
    points: columns ``x``, ``y``, ``kind`` (embedding or prototype), ``label`` and ``peer``.
    absent: by section (partition, confusion, points): why it is missing.
    """

    partition: dict[str, Any] | None = None
    confusion: dict[int, list[list[int]]] = field(default_factory=dict)
    points: dict[str, list[Any]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

    def name(self, label: int) -> str | int:
        """The name of a class; its number if it has none."""
        names = self.partition["dataset"]["class_names"] if self.partition else []
        return str(names[label]) if names else label


def read(folder: RunFolder) -> Learned:
    """Evaluate the last checkpoints. What is not possible is absent, with the reason; nothing raises."""
    learned = Learned()
    reasons = ("partition", "confusion", "points")
    try:
        _read(folder.require_local(), learned)
    except P2pflError as error:
        reason = str(error).partition("\n")[0]
        if isinstance(error, RunFolderError) and "collected" in folder.info:
            reason = "a collection: the data and the code of other hosts are not loaded; see the report made there"
        for section in reasons:
            learned.absent.setdefault(section, reason)
    return learned


def _read(folder: RunFolder, learned: Learned) -> None:
    from launcher.views import partition
    from p2pfl.run_file import load as run_files
    from p2pfl.session.build import load_data
    from p2pfl.session.inspection import inspect_models

    run = run_files.load(folder.run_file, overrides={"data.download": False})
    data = load_data(run, folder.root)
    learned.partition = partition.describe(run, *data)
    present = sum(files.checkpoint.is_file() for files in folder.peers())
    if not present:
        why = "no peer has written a checkpoint"
        learned.absent |= {"confusion": why, "points": why}
        return
    inspected = list(inspect_models(run, folder, data, math.ceil(MAX_POINTS / present)))
    learned.confusion = {one.peer: _confusion(one) for one in inspected if len(one.labels)}
    if not learned.confusion:
        learned.absent["confusion"] = "no peer has test samples"
    try:
        learned.points = project(inspected)
    except P2pflError as error:
        learned.absent["points"] = str(error)


def _confusion(one: Inspection) -> list[list[int]]:
    pairs, counts = np.unique(np.stack([one.labels, one.predicted]), axis=1, return_counts=True)
    return [[int(true), int(said), int(count)] for (true, said), count in zip(pairs.T, counts, strict=True)]


def project(inspected: Sequence[Inspection]) -> dict[str, list[Any]]:
    """Project the embeddings of test samples, and the prototypes, of all peers together onto a plane by t-SNE.

    Distances are between directions (cosine), which most methods train.

    Raises:
        RunFolderError: there is nothing to project, or the peers' features have different widths.
    """
    parts: list[tuple[Matrix, str, int, Sequence[int]]] = []
    for one in inspected:
        parts.append((one.features, "embedding", one.peer, one.labels[: len(one.features)].tolist()))
        parts.append((one.prototypes, "prototype", one.peer, one.prototype_classes))
    parts = [part for part in parts if len(part[0])]
    widths = sorted({part[0].shape[1] for part in parts})
    if len(widths) > 1:
        raise RunFolderError(f"the peers' features have different widths: {', '.join(map(str, widths))}")
    table = np.concatenate([part[0] for part in parts]) if parts else np.empty((0, 1), np.float32)
    flat = [(kind, peer, int(label)) for _, kind, peer, labels in parts for label in labels]
    usable = np.flatnonzero(np.isfinite(table).all(axis=1) & (np.abs(table).sum(axis=1) > 0))
    usable = _at_most(usable, [flat[i][0] for i in usable])
    if len(usable) < 4:
        raise RunFolderError("too few embeddings to project")
    plane = _tsne(table[usable])
    chosen = [flat[i] for i in usable]
    return {
        "x": [rounded(float(x), 4) for x in plane[:, 0]],
        "y": [rounded(float(y), 4) for y in plane[:, 1]],
        "kind": [kind for kind, _, _ in chosen],
        "peer": [peer for _, peer, _ in chosen],
        "label": [label for _, _, label in chosen],
    }


def _at_most(usable: npt.NDArray[np.int64], kinds: Sequence[str]) -> npt.NDArray[np.int64]:
    """Drop embeddings and prototypes beyond their limits, evenly."""
    of = np.array(kinds)
    kept = [
        usable[of == kind][np.unique(np.linspace(0, count - 1, min(count, most)).astype(int))]
        for kind, most in (("embedding", MAX_POINTS), ("prototype", MAX_PROTOTYPES))
        if (count := int((of == kind).sum()))
    ]
    return np.sort(np.concatenate(kept)) if kept else usable


def _tsne(table: Matrix) -> npt.NDArray[np.float64]:
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    directions = table / np.linalg.norm(table, axis=1, keepdims=True)
    if np.allclose(directions, directions[0]):
        raise RunFolderError("all embeddings are equal: the models have learned nothing, or have collapsed")
    perplexity = min(30.0, (len(directions) - 1) / 3)
    # Between unit vectors, Euclidean distances order pairs as cosines do, and sklearn finds neighbors faster.
    with threadpool_limits(1):  # OpenMP's threads spin, which is very slow on a host that is busy
        tsne = TSNE(perplexity=perplexity, init="pca", random_state=0, n_jobs=1, max_iter=500)
        return np.asarray(tsne.fit_transform(directions), dtype=np.float64)
