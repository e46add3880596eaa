"""Every run ends with the bits, records and byte counts that are pinned for this CPU and torch version."""

from __future__ import annotations

import pytest

from tests.golden import pinned


@pytest.mark.parametrize("name", pinned.NAMES)
def test_run_ends_as_pinned(name: str) -> None:
    expected = pinned.pinned()
    if expected is None:
        pytest.skip(f"nothing pinned for {pinned.platform_key()}: python -m tests.golden renew --reason TEXT")
    assert pinned.differences(expected.get(name, {}), pinned.outcome(name)) == []


def test_values_digest_ignores_names_and_nothing_else() -> None:
    state = {"weights": {1: 0.25, 2: 0.75}, "rounds": [3, 4]}
    renamed = {"mixing": {"b": 0.75, "a": 0.25}, "steps": (4, 3)}
    changed = {"weights": {1: 0.25, 2: 0.7500001}, "rounds": [3, 4]}
    assert pinned.values_digest(state) == pinned.values_digest(renamed)
    assert pinned.values_digest(state) != pinned.values_digest(changed)


def test_differences_names_each_path() -> None:
    expected = {"0": {"state": "a", "sent": {"Head": [1, 2, 3]}}}
    found = {"0": {"state": "b", "sent": {}}, "1": {}}
    assert [line.partition(":")[0] for line in pinned.differences(expected, found)] == [
        "/0/state",
        "/0/sent/Head",
        "/1",
    ]
