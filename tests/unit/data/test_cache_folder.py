"""Where datasets are kept, of users with and without a home folder."""

from __future__ import annotations

import os
import pwd
import tempfile
from pathlib import Path
from typing import Any

import pytest

from launcher.doctor import examine
from p2pfl.data import DATASETS, open_dataset
from p2pfl.data.cache_folder import cache_folders, data_root
from p2pfl.errors import DataError
from tests.launcher_fixtures import Invoke


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder, and no variable that names another one."""
    for name in ("HOME", "XDG_CACHE_HOME", "P2PFL_CACHE", "P2PFL_DATA"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def nameless(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user id without a name, as in containers with an arbitrary one. Returns the folder that takes the place."""

    def unknown(uid: int) -> Any:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    return temporary / f"p2pfl-{os.getuid()}"


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch, temporary: Path) -> set[Path]:
    """Folders that cannot be written, although root could."""
    folders: set[Path] = set()
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) not in folders and access(path, mode))
    return folders


def test_a_user_without_a_home_has_a_private_folder_in_the_temporary_one(nameless: Path) -> None:
    dataset = open_dataset("digits", DATASETS["digits"]())
    assert len(list((nameless / "decoded").glob("digits-*/metadata.json"))) == 1
    assert nameless.stat().st_mode & 0o777 == 0o700
    assert open_dataset("digits", DATASETS["digits"]()).sha256 == dataset.sha256
    assert data_root() == nameless / "data"


@pytest.mark.parametrize("home", ["nonexistent/home", "readable"])
def test_a_home_that_cannot_be_written_is_replaced(
    temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_only: set[Path], home: str
) -> None:
    (tmp_path / "readable").mkdir()
    read_only |= {tmp_path, tmp_path / "readable"}
    monkeypatch.setenv("HOME", str(tmp_path / home))
    open_dataset("digits", DATASETS["digits"]())
    assert list(temporary.glob("p2pfl-*/decoded/digits-*"))


def test_what_an_image_has_in_a_read_only_home_is_used(
    temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_only: set[Path]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    open_dataset("digits", DATASETS["digits"]())
    cache = tmp_path / "home/.cache/p2pfl"
    (cache / "data").mkdir()
    read_only |= {cache / "decoded", cache / "data"}
    open_dataset("digits", DATASETS["digits"]())
    assert not list(temporary.glob("p2pfl-*/decoded"))
    assert data_root() == cache / "data"


def test_variables_take_precedence(nameless: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P2PFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("P2PFL_DATA", str(tmp_path / "data"))
    assert (cache_folders(), data_root()) == ([tmp_path / "cache"], tmp_path / "data")
    assert not nameless.exists()


def test_a_folder_that_others_can_write_is_not_trusted(nameless: Path) -> None:
    nameless.mkdir()
    nameless.chmod(0o777)
    with pytest.raises(
        DataError, match=r"no place for the cache of datasets: no home folder, .*; set \$P2PFL_CACHE to"
    ):
        open_dataset("digits", DATASETS["digits"]())


def test_a_link_in_place_of_the_folder_is_not_trusted(
    nameless: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    nameless.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=r"set \$P2PFL_CACHE to a writable folder"):
        open_dataset("digits", DATASETS["digits"]())
    monkeypatch.setenv("P2PFL_CACHE", str(tmp_path / "cache"))
    with pytest.raises(DataError, match=r"Set data\.root or \$P2PFL_DATA to the folder that contains MNIST/raw/"):
        open_dataset("mnist", DATASETS["mnist"](), download=False)


def test_an_embedded_dataset_needs_a_cache_only(
    nameless: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nameless.touch(0o666)
    nameless.chmod(0o666)
    monkeypatch.setenv("P2PFL_CACHE", str(tmp_path / "cache"))
    open_dataset("digits", DATASETS["digits"]())
    assert list((tmp_path / "cache").glob("digits-*"))


def test_doctor_names_both_folders(nameless: Path) -> None:
    (nameless / "data" / "MNIST").mkdir(parents=True, mode=0o700)
    found = {finding.topic: finding for finding in examine(None)}
    assert (found["data"].level, found["data"].text) == ("ok", f"{nameless / 'data'}: 1 entries")
    assert (found["cache"].level, found["cache"].text) == ("ok", f"{nameless / 'decoded'}, for prepared datasets")


def test_doctor_says_that_there_is_no_place(nameless: Path, invoke: Invoke) -> None:
    nameless.touch()
    nameless.chmod(0o666)
    outcome = invoke("doctor")
    assert outcome.exit_code == 1
    assert "set $P2PFL_CACHE to a writable folder" in " ".join(outcome.stdout.split())


def test_doctor_names_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("P2PFL_CACHE", str(tmp_path / "file" / "cache"))
    (found,) = [finding for finding in examine(None) if finding.topic == "cache"]
    assert (found.level, found.advice) == ("problem", "set P2PFL_CACHE to a writable folder")


def test_a_path_below_a_missing_home_is_an_error_in_the_run_file(
    nameless: Path, make_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        Exception, match="'~/runs': this user has no home folder; write the path in full, or set HOME"
    ):
        make_run(out="~/runs")
