"""Presets: every method of the five papers has them, they change something, and its page says what."""

from __future__ import annotations

from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from p2pfl.algorithms import ALGORITHMS
from p2pfl.options import OptionErrors

DOCS = Path(__file__).parents[3] / "docs" / "algorithms"
METHODS = ("mapl", "mapl+", "l2c", "meta-l2c", "fedproto", "fedtgp", "feddistill", "dfml", "fedstyle")
CASES = [(name, preset) for name in METHODS for preset in ALGORITHMS[name].Hyper.PRESETS]


@pytest.mark.parametrize("name", METHODS)
def test_method_names_its_presets(name: str) -> None:
    options = ALGORITHMS[name].Hyper
    names = get_args(get_type_hints(options)["preset"])
    assert names == ("default", *options.PRESETS)
    assert "paper" in names
    assert options() == options.parse({}) == options.parse({"preset": "default"})
    page = (DOCS / f"{name.removesuffix('+')}.md").read_text(encoding="utf-8")
    assert "`preset: paper`" in page
    assert "`preset: official`" in page  # or that there is none


@pytest.mark.parametrize(("name", "preset"), CASES)
def test_preset_changes_the_defaults_that_it_lists(name: str, preset: str) -> None:
    options = ALGORITHMS[name].Hyper
    changes = options.PRESETS[preset]
    default, chosen = options().to_dict(), options.parse({"preset": preset}).to_dict()
    assert {key for key in default if default[key] != chosen[key]} == {"preset", *changes}
    assert options.parse(chosen) == options.parse({"preset": preset})


def test_preset_with_another_optimizer_is_accepted() -> None:
    """The preset's `betas` are not the user's, who cannot remove them."""
    options = ALGORITHMS["mapl"].Hyper
    assert options.parse({"preset": "paper", "optimizer": "sgd"}).to_dict()["optimizer"] == "sgd"
    with pytest.raises(OptionErrors, match="betas has no effect"):
        options.parse({"preset": "paper", "optimizer": "sgd", "betas": [0.6, 0.99]})
