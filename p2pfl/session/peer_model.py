"""Models of peers, from their checkpoints."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch

from p2pfl import PeerId
from p2pfl.algorithms.base import Algorithm
from p2pfl.errors import RunFolderError
from p2pfl.models import Model
from p2pfl.rng import Streams
from p2pfl.run_file.run import Run
from p2pfl.run_folder.files import write_atomically
from p2pfl.run_folder.folder import RunFolder
from p2pfl.session import checkpoint
from p2pfl.session.build import RunData, load_data, make_algorithm


def restore(run: Run, folder: RunFolder, peer: PeerId) -> tuple[Model, int]:
    """Return a peer's model from its last checkpoint, on the CPU, and the number of rounds that it had completed.

    Raises RunFolderError: the peer has written no checkpoint.
    """
    if not 0 <= peer < run.peers:
        raise RunFolderError(f"{folder.root}: no peer {peer}; the {run.peers} peers are 0 to {run.peers - 1}")
    path = folder.peer(peer).checkpoint
    if not path.is_file():
        raise RunFolderError(f"{path}: peer {peer} has written no checkpoint yet")
    saved = checkpoint.read(path)
    algorithm = restored_algorithm(run, peer, load_data(run, folder.root), saved)
    return algorithm.model.eval(), saved["rounds_done"]


def restored_algorithm(
    run: Run,
    peer: PeerId,
    data: RunData,
    saved: checkpoint.PeerState,
    device: torch.device = torch.device("cpu"),
) -> Algorithm[Any]:
    """Return a peer's algorithm in the state of a checkpoint."""
    algorithm = make_algorithm(run, peer, data, device, Streams(run.seed, peer))
    algorithm.load_state_dict(saved["algorithm"])
    return algorithm


def save(model: Model, file: Path) -> None:
    """Write ``plain_state_dict`` as ``torch.save`` does. Raises WriteError."""
    content = io.BytesIO()
    torch.save(model.plain_state_dict(), content)
    write_atomically(file, content.getvalue())
