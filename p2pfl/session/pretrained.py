"""Start parts of an algorithm from an earlier run, e.g. the encoder of meta-L2C."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from p2pfl.algorithms.base import Algorithm
from p2pfl.errors import RunFolderError
from p2pfl.options import OptionErrors
from p2pfl.run_folder.folder import RunFolder
from p2pfl.session import checkpoint
from p2pfl.tensors import InitialValues, has_diverged, is_finite


def load_pretrained(algorithm: Algorithm[Any]) -> None:
    """Load each module in ``algorithm.pretrained`` from the path in the hyper-parameter of that name, if it is set.

    Raises:
        OptionErrors: the path holds no such module, or one with other tensors, or with NaN or infinity.
    """
    for key in algorithm.pretrained:
        path: Path | None = getattr(algorithm.hyper, key)
        if path is None:
            continue
        module = getattr(algorithm, key)
        try:
            found = read_module(path, key, algorithm.name)
            _check(path, key, found, module.state_dict())
        except RunFolderError as error:
            raise OptionErrors([((key,), str(error))]) from None
        module.load_state_dict(found)
    algorithm.note_start()


def read_module(path: Path, key: str, algorithm: str) -> dict[str, Tensor]:
    """Read the state of module ``key`` from a run folder, or from the checkpoint of one of its peers.

    Nothing in the file is executed. Raises RunFolderError: the module is not there.
    """
    if path.is_dir():
        saved = [peer.checkpoint for peer in RunFolder.open(path).peers() if peer.checkpoint.is_file()]
        if not saved:
            raise RunFolderError(f"{path}: no peer of this run has written a checkpoint")
        path = saved[0]
    state = checkpoint.read(path).get("algorithm")
    module = state.get(key) if isinstance(state, dict) else None
    if not isinstance(module, dict) or not all(isinstance(tensor, Tensor) for tensor in module.values()):
        raise RunFolderError(f"{path}: holds no {key}; give the folder of a {algorithm} run, or a checkpoint of one")
    return module


def _check(path: Path, key: str, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name in (*expected, *found):
        there, here = (_shape(state.get(name)) for state in (found, expected))
        if there != here:
            raise RunFolderError(
                f"{path}: its {key} does not fit this run: {name} is {there} instead of {here}; "
                f"use the models, inputs and {key} sizes of the run that trained it"
            )
    if not all(is_finite(x) or not has_diverged(x, InitialValues.of(expected[name])) for name, x in found.items()):
        raise RunFolderError(f"{path}: its {key} has diverged: it holds NaN or infinity")


def _shape(tensor: Tensor | None) -> str:
    if tensor is None:
        return "missing"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
