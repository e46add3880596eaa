"""What installed packages provide by entry points."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2pfl.errors import P2pflError
from p2pfl.installed import BACKENDS, TRACKERS, load, names


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package with two trackers."""
    info = tmp_path / "lab-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: lab\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[p2pfl.trackers]\nmine = no_such_module:Mine\nwandb = lab:Wandb\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("package")
def test_names_are_those_of_all_packages() -> None:
    assert "ssh" in names(BACKENDS)
    found = names(TRACKERS)
    assert {"mine", "wandb"} < set(found)
    assert found == sorted(set(found))


@pytest.mark.usefixtures("package")
def test_errors_name_the_package() -> None:
    reason = "mine cannot be loaded from no_such_module:Mine of lab: ModuleNotFoundError: No module named"
    with pytest.raises(P2pflError, match=reason):
        load(TRACKERS, "mine")
    with pytest.raises(P2pflError, match="wandb is provided by lab and p2pfl-mesh: uninstall all but one"):
        load(TRACKERS, "wandb")
