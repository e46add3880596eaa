"""Fixtures for tests of reports."""

from __future__ import annotations

import pytest

from launcher.report import page
from p2pfl.run_folder.folder import RunFolder
from tests.launcher_fixtures import MakeFolder
from tests.records import write_records
from tests.reports import record


@pytest.fixture
def folder(make_folder: MakeFolder) -> RunFolder:
    """A run of two peers and three rounds, with their records."""
    made = make_folder(results={0: {"accuracy": 0.7, "weights": {"0": 0.75, "1": 0.25}}, 1: {"accuracy": 0.8}})
    write_records(made, [record(peer, t) for peer in range(2) for t in range(3)])
    return made


@pytest.fixture
def short_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the plotting library, which takes seconds to bundle."""
    monkeypatch.setattr(page, "library", lambda: "/* library */")
