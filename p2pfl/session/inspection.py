"""What a peer's last checkpoint predicts, and where its model maps samples and prototypes, for reports.

An algorithm that learns prototypes keeps them as ``prototypes``, float [K, d], with ``known``, bool [K], if some may
be unset; where they are in another space than the backbone's features, its ``projector`` maps those into it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from p2pfl import PeerId
from p2pfl.algorithms.base import Algorithm
from p2pfl.learning.evaluation import PREDICTION_BATCH
from p2pfl.run_file.run import Run
from p2pfl.run_folder.folder import RunFolder
from p2pfl.session import checkpoint
from p2pfl.session.build import RunData
from p2pfl.session.determinism import deterministic
from p2pfl.session.peer_model import restored_algorithm


@dataclass(frozen=True)
class Inspection:
    """One peer's model on its local test split.

    Attributes:
        labels, predicted: int64 [n]; the scores of all classes count, or of the local classes if the run is masked.
        features: float32 [m, d] of the first m test samples that ``inspect_models`` was asked for.
        prototypes: float32 [k, d] of the classes ``prototype_classes`` that the peer has samples of.
    """

    peer: PeerId
    rounds_done: int
    labels: npt.NDArray[np.int64]
    predicted: npt.NDArray[np.int64]
    features: npt.NDArray[np.float32]
    prototypes: npt.NDArray[np.float32]
    prototype_classes: tuple[int, ...]


def inspect_models(run: Run, folder: RunFolder, data: RunData, samples: int) -> Iterator[Inspection]:
    """Inspect the peers that have written a checkpoint, on the CPU. Nothing in ``folder`` changes.

    Args:
        samples: the number of test samples of each peer whose features are returned.

    Raises:
        CheckpointError: a checkpoint is damaged, or of another run.
    """
    run_id = folder.info["id"]
    torch.set_num_threads(run.file.threads)
    for files in folder.peers():
        saved = checkpoint.load(files.checkpoint, run_id, files.peer, repair=False)
        if saved is None:
            continue
        algorithm = restored_algorithm(run, files.peer, data, saved)
        with deterministic(strictly=True), torch.no_grad(), algorithm.streams.evaluation():
            inspection = _inspect(algorithm, saved["rounds_done"], samples, masked=run.file.masked_test)
        yield inspection


def _inspect(algorithm: Algorithm[Any], rounds_done: int, samples: int, *, masked: bool) -> Inspection:
    data, test = algorithm.data, algorithm.data.test
    excluded = np.setdiff1d(np.arange(data.classes), data.scored_classes(test)) if masked else np.array([])
    predicted = [np.empty(0, np.int64)]
    features: list[npt.NDArray[np.float32]] = []
    for batch, _ in data.sweep(test):
        for x in torch.split(batch, PREDICTION_BATCH):
            scores = algorithm.predict(x).index_fill(1, torch.from_numpy(excluded.astype(np.int64)), -torch.inf)
            predicted.append(scores.argmax(1).numpy())
            if sum(len(part) for part in features) < samples:
                with algorithm.streams.evaluation():
                    features.append(_embed(algorithm, x))
    table, classes = _prototypes(algorithm)
    return Inspection(
        peer=algorithm.me,
        rounds_done=rounds_done,
        labels=np.asarray(test.labels, dtype=np.int64),
        predicted=np.concatenate(predicted),
        features=np.concatenate(features)[:samples] if features else np.empty((0, 0), np.float32),
        prototypes=table,
        prototype_classes=classes,
    )


def _embed(algorithm: Algorithm[Any], x: Tensor) -> npt.NDArray[np.float32]:
    z = algorithm.model.backbone(x)
    projector = getattr(algorithm, "projector", None)
    return np.asarray((z if projector is None else projector(z)).numpy(), dtype=np.float32)


def _prototypes(algorithm: Algorithm[Any]) -> tuple[npt.NDArray[np.float32], tuple[int, ...]]:
    table, known = getattr(algorithm, "prototypes", None), getattr(algorithm, "known", None)
    if not isinstance(table, Tensor) or table.ndim != 2:
        return np.empty((0, 0), np.float32), ()
    classes = [k for k in algorithm.data.local_classes if known is None or bool(known[k])]
    return np.asarray(table.detach()[classes].numpy(), dtype=np.float32), tuple(classes)
