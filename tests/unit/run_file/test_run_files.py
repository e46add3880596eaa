"""The project's run files are ready to launch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from p2pfl.errors import RunFileError
from p2pfl.rng import Streams
from p2pfl.run_file.load import load
from p2pfl.session.build import load_data, make_algorithm

pytestmark = pytest.mark.exhaustive

PROJECT = Path(__file__).parents[3]
FOLDERS = (".", "chaos", "hostile")
FILES = sorted(file for folder in FOLDERS for file in (PROJECT / "topologies" / folder).glob("*.yaml"))


@pytest.fixture(autouse=True, scope="module")
def _data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One cache for this module; real datasets from $P2PFL_DATA, else from beside the project."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("P2PFL_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("P2PFL_DATA", os.environ.get("P2PFL_DATA") or str(PROJECT.parent / "shared" / "data"))
        yield


def test_project_includes_the_documented_run_files() -> None:
    assert {file.stem for file in FILES} >= {
        "mesh20",
        "local20",
        "dpsgd-ring16",
        "mapl-fmnist-sc1",
        "quick4",
        "killed20",
    }


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_run_file_loads_and_its_resolved_form_is_equal(file: Path, tmp_path: Path) -> None:
    run = load(file)
    assert run.name == file.stem
    again = tmp_path / "again.yaml"
    again.write_text(run.to_yaml())
    assert load(again).config_hash() == run.config_hash()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_peer_gets_samples_and_an_algorithm(file: Path) -> None:
    run = load(file, ["data.download=false"])
    try:
        data = load_data(run)
    except RunFileError as error:
        if ": missing " not in str(error):
            raise
        pytest.skip(str(error))
    assert all(len(subset.train) and len(subset.test) for subset in data[1])
    algorithm = make_algorithm(run, 0, data, torch.device("cpu"), Streams(run.seed, 0))
    assert algorithm.model.classes == data[0].classes
