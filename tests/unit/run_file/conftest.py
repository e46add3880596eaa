"""Fixtures for tests of run files."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to the folder of the test."""
    monkeypatch.chdir(tmp_path)
