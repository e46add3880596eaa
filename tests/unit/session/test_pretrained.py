"""Pretrained modules: found in run folders and checkpoints, checked, and never executed."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import pytest

from p2pfl.algorithms.meta_l2c import MetaL2C
from p2pfl.errors import RunFileError
from p2pfl.options import OptionErrors
from p2pfl.session import checkpoint
from p2pfl.session.pretrained import load_pretrained
from p2pfl.simulation.simulate import simulate
from p2pfl.tensors import digest
from tests.support import linear_model, peer_data, random_dataset, setting

RUN = {
    "rounds": 1,
    "data": {"partition": {"name": "groups", "groups": 2, "per_class": 8, "validation": 0.25}},
    "peers": 4,
}
ALGORITHM: dict[str, Any] = {"name": "meta-l2c", "local_epochs": 1, "batch": 16}


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: Any, make_run: Any, prepare: Any) -> Any:
    """The folder of a run that trained an encoder."""
    run = make_run(**RUN, algorithm=ALGORITHM)
    folder = prepare(tmp_path_factory.mktemp("earlier") / "run", run)
    simulate(run, folder)
    return folder


@pytest.mark.exhaustive
@pytest.mark.parametrize("which", ["folder", "a peer's checkpoint"])
def test_loads_encoder_from_run_folder_or_checkpoint(
    which: str, earlier: Any, tmp_path: Path, make_run: Any, prepare: Any
) -> None:
    saved = checkpoint.read(earlier.peer(0).checkpoint)["algorithm"]["encoder"]
    assert digest(saved) == digest(checkpoint.read(earlier.peer(3).checkpoint)["algorithm"]["encoder"])
    path = earlier.root if which == "folder" else earlier.peer(3).checkpoint
    run = make_run(**RUN, seed=11, algorithm={**ALGORITHM, "encoder": str(path), "train_encoder": False})
    folder = prepare(tmp_path / "run", run)
    simulate(run, folder)
    assert digest(checkpoint.read(folder.peer(2).checkpoint)["algorithm"]["encoder"]) == digest(saved)


def error_of(make_run: Any, path: Path, **changes: Any) -> str:
    run = make_run(**{**RUN, **changes}, algorithm={**ALGORITHM, "encoder": str(path), "train_encoder": False})
    with pytest.raises(RunFileError) as info:
        simulate(run)
    (problem,) = info.value.problems
    assert problem.key == "algorithm.encoder"
    assert str(path) in problem.message
    return problem.message


@pytest.mark.exhaustive
def test_names_the_path_that_holds_no_encoder(make_run: Any, prepare: Any, tmp_path: Path) -> None:
    assert "cannot be read: No such file" in error_of(make_run, tmp_path / "missing.pt")
    assert "not a run folder" in error_of(make_run, tmp_path)
    run = make_run(algorithm={"name": "local", "batch": 16}, rounds=1)
    folder = prepare(tmp_path / "run", run)
    assert "no peer of this run has written a checkpoint" in error_of(make_run, folder.root)
    simulate(run, folder)
    assert "holds no encoder; give the folder of a meta-l2c run" in error_of(make_run, folder.root)


@pytest.mark.exhaustive
def test_names_the_tensor_that_does_not_fit(make_run: Any, earlier: Any) -> None:
    message = error_of(make_run, earlier.root, models="tiny-cnn")
    assert "its encoder does not fit this run" in message
    assert "missing" in message
    run = make_run(**RUN, algorithm={**ALGORITHM, "encoder": str(earlier.root), "encoder_width": 7})
    with pytest.raises(
        RunFileError, match=r"float32\[5, 10\] instead of float32\[7, 10\]; use the models, inputs and encoder sizes"
    ):
        simulate(run)


def peer(encoder: Path | None = None) -> MetaL2C:
    data = peer_data(random_dataset(6), range(4), validation=range(4, 6))
    hyper = MetaL2C.Hyper.parse({} if encoder is None else {"encoder": encoder})
    return MetaL2C(hyper, setting(0, 1, linear_model(4, 5, 3), data))


@pytest.mark.parametrize("content", ["diverged", "numbers", "text", "list"])
def test_rejects_a_checkpoint_without_a_finite_encoder(content: str, tmp_path: Path) -> None:
    state = peer().encoder.state_dict()
    path = tmp_path / "encoder.pt"
    wrong: dict[str, Any] = {
        "diverged": {"encoder": {name: tensor * math.nan for name, tensor in state.items()}},
        "numbers": {"encoder": dict.fromkeys(state, 1.0)},
        "text": {"encoder": "hello"},
        "list": [1, 2],
    }
    checkpoint.save(path, {"algorithm": wrong[content]})
    expected = "has diverged" if content == "diverged" else "holds no encoder"
    with pytest.raises(OptionErrors, match=rf"encoder: .*encoder\.pt: .*{expected}"):
        load_pretrained(peer(path))


def test_executes_nothing_in_the_file(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "executed",))

    path = tmp_path / "encoder.pt"
    for write in (
        lambda: path.write_bytes(pickle.dumps(Evil())),
        lambda: checkpoint.save(path, {"algorithm": Evil()}),
    ):
        write()
        with pytest.raises(OptionErrors, match="damaged"):
            load_pretrained(peer(path))
    assert not (tmp_path / "executed").exists()
