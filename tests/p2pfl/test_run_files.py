"""The run files that come with the project are ready to launch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from p2pfl.config import load
from p2pfl.errors import RunFileError
from p2pfl.rng import Streams
from p2pfl.session import load_data, make_algorithm

PROJECT = Path(__file__).parents[2]
FILES = sorted((PROJECT / "topologies").glob("*.yaml"))


@pytest.fixture(autouse=True, scope="module")
def _data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One cache for this module; real image sets from $P2PFL_DATA, else from beside the project."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("P2PFL_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("P2PFL_DATA", os.environ.get("P2PFL_DATA") or str(PROJECT.parent / "shared" / "data"))
        yield


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_loads_and_its_resolved_form_is_the_same_run(file: Path, tmp_path: Path) -> None:
    run = load(file)
    assert run.name == file.stem
    again = tmp_path / "again.yaml"
    again.write_text(run.to_yaml())
    assert load(again).digest() == run.digest()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_peer_gets_samples_and_a_method(file: Path) -> None:
    run = load(file, ["data.download=false"])
    try:
        data = load_data(run)
    except RunFileError as error:
        pytest.skip(f"no data: {error}")
    assert all(len(share.train) and len(share.test) for share in data[1])
    algorithm = make_algorithm(run, 0, data, torch.device("cpu"), Streams(run.seed, 0))
    assert algorithm.model.classes == data[0].classes
