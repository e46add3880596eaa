"""Evaluate a finished run again, from the final checkpoints of its peers. Nothing in its folder is changed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from p2pfl import PeerId
from p2pfl.errors import CheckpointError, P2pflError, RunFolderError
from p2pfl.run_file.run import Run
from p2pfl.run_folder.folder import PeerFolder, RunFolder
from p2pfl.session import checkpoint
from p2pfl.session.build import load_data
from p2pfl.session.determinism import deterministic
from p2pfl.session.evaluation import Evaluations, evaluate_algorithm
from p2pfl.session.peer_model import restored_algorithm


@dataclass(frozen=True)
class PeerEvaluations:
    """What one peer's final model achieves; ``model`` is the name of its architecture."""

    peer: PeerId
    model: str
    evaluations: Evaluations


def evaluate_run(
    run: Run, folder: RunFolder, *, masked: bool | None = None, device: torch.device = torch.device("cpu")
) -> Iterator[PeerEvaluations]:
    """Evaluate the peers in ``folder``, one after the other, each as in the last round of ``run``.

    On the CPU, evaluations are bit-identical to the last record.

    Args:
        run: the folder's run file.
        masked: which accuracy ``accuracy`` is; None: as the run file says.
        device: where to compute.

    Raises:
        RunFolderError: a peer has not finished.
        CheckpointError: its final checkpoint is missing or unusable.
        RunFileError: the dataset is not available.
    """
    peers, run_id = list(folder.peers()), folder.info["id"]
    for files in peers:  # before the first evaluation, as one may take minutes
        _require_finished(files, run)
    torch.set_num_threads(run.file.threads)
    data = load_data(run, folder.root)
    for files in peers:
        saved = checkpoint.load(files.checkpoint, run_id, files.peer, repair=False)
        if saved is None:
            raise CheckpointError(
                f"{files.checkpoint}: not found, but it holds what peer {files.peer} has learned; restore it (for a "
                "collection: p2pfl collect --checkpoints)"
            )
        if saved["rounds_done"] < run.rounds and not saved["finished"]:
            raise CheckpointError(
                f"{files.checkpoint}: peer {files.peer} finished, but the newest usable checkpoint has "
                f"{saved['rounds_done']} of {run.rounds} rounds; restore the final one"
            )
        algorithm = restored_algorithm(run, files.peer, data, saved, device)
        with deterministic(strictly=algorithm.device.type == "cpu"):
            evaluations = evaluate_algorithm(
                algorithm,
                masked=run.file.masked_test if masked is None else masked,
                whole=run.file.global_test,
                metrics=run.file.metrics,
            )
        yield PeerEvaluations(files.peer, algorithm.model.name, evaluations)


def _require_finished(files: PeerFolder, run: Run) -> None:
    result, status = files.result(), files.status()
    if result is None or result.phase != "finished":
        last = result or status
        raise RunFolderError(
            f"{files.root}: peer {files.peer} has not finished: {last.rounds_done if last else 0} of {run.rounds} "
            f"rounds done; evaluate after `p2pfl resume {files.root.parents[1]}`"
        )


def device_named(name: str) -> torch.device:
    """Return the device ``cpu`` or ``cuda``. Raises P2pflError if there is no GPU."""
    if name == "cuda" and not torch.cuda.is_available():
        raise P2pflError("--device cuda, but torch finds no GPU on this host; use --device cpu")
    return torch.device(name)
