"""Every run ends with the bits, records and byte counts that are pinned for this CPU and torch version."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from p2pfl.run_folder.folder import RunFolder
from tests.golden import pinned

REMEDY = "on the commit before your change, run `python -m tests.golden renew --reason TEXT` and commit the new file"


@pytest.mark.parametrize("name", pinned.NAMES)
def test_run_ends_as_pinned(name: str, simulated: Callable[[str], RunFolder]) -> None:
    expected = pinned.pinned() or {}
    if name not in expected:
        _not_pinned()
    if expected[name] is None:
        pytest.skip(f"{pinned.platform_key()}: not pinned since it was renewed on another platform")
    found = pinned.outcome(name) if name == pinned.FAULTY else pinned.outcome_in(simulated(name))
    assert pinned.differences({name: expected[name]}, {name: found}) == []
    if not pinned.is_complete(expected[name]):
        pytest.skip(f"the rest is not pinned for {pinned.platform_key()}: {REMEDY}")


def _not_pinned() -> NoReturn:
    """Skip the test, or fail it in CI: nothing else would notice that CI has moved to a platform without pins."""
    message = f"nothing is pinned for {pinned.platform_key()}: {REMEDY}"
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)


@pytest.mark.parametrize(("ci", "expected"), [("", pytest.skip.Exception), ("true", pytest.fail.Exception)])
def test_a_platform_without_pins_fails_in_ci_only(
    ci: str, expected: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", ci)
    with pytest.raises(expected, match="on the commit before your change, run `python -m tests"):
        _not_pinned()


def test_values_digest_ignores_names_and_nothing_else() -> None:
    state = {"weights": {1: 0.25, 2: 0.75}, "rounds": [3, 4]}
    renamed = {"mixing": {"b": 0.75, "a": 0.25}, "steps": (4, 3)}
    changed = {"weights": {1: 0.25, 2: 0.7500001}, "rounds": [3, 4]}
    assert pinned.values_digest(state) == pinned.values_digest(renamed)
    assert pinned.values_digest(state) != pinned.values_digest(changed)


def test_differences_names_each_path() -> None:
    expected = {"0": {"state": "a", "records": None, "sent": {"Head": [1, 2, 3]}}}
    found = {"0": {"state": "b", "records": "c", "sent": {}}, "1": {}}
    assert [line.partition(":")[0] for line in pinned.differences(expected, found)] == [
        "/0/state",
        "/0/sent/Head",
        "/1",
    ]


def test_renewing_voids_only_what_has_changed_on_other_platforms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(name: str, state: str, records: str) -> None:
        runs = {"local": {"0": {"state": state, "records": records}}}
        (tmp_path / f"{name}.json").write_text(json.dumps({"history": [], "runs": runs}))

    monkeypatch.setattr(pinned, "FOLDER", tmp_path)
    monkeypatch.setattr(pinned, "NAMES", ("local", "new"))
    monkeypatch.setattr(pinned, "platform_key", lambda: "this")
    monkeypatch.setattr(pinned, "outcome", lambda name: {"0": {"state": "a", "records": f"renewed {name}"}})
    write("this", "a", "b")
    write("other", "c", "d")
    pinned.renew("records have a new field")
    runs = {name: json.loads((tmp_path / f"{name}.json").read_text())["runs"] for name in ("this", "other")}
    assert runs["this"]["local"] == {"0": {"state": "a", "records": "renewed local"}}
    assert runs["other"] == {"local": {"0": {"state": "c", "records": None}}, "new": None}
    assert pinned.differences(runs["other"], {"local": {"0": {"state": "x"}}}) == [
        "/local/0/state: pinned c, found x"
    ]


@pytest.mark.parametrize(
    ("outcome", "complete"),
    [(None, False), ({}, False), ({"0": {"state": None}}, False), ({"0": {"state": "a"}, "1": {"state": "b"}}, True)],
)
def test_an_outcome_with_null_in_it_is_not_complete(outcome: pinned.Pinned | None, complete: bool) -> None:
    assert pinned.is_complete(outcome) == complete


def test_renewing_what_was_not_known_here_voids_nothing_elsewhere() -> None:
    known = {"local": {"0": {"state": "c", "records": "d"}}}
    before = {"local": {"0": {"state": "a", "records": None}}}
    after = {"local": {"0": {"state": "a", "records": "b"}}}
    assert pinned._unchanged(known, before, after) == known
