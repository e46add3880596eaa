"""Fixtures for tests of sessions and their files."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a checkpoint goes."""
    return tmp_path / "checkpoint.pt"
