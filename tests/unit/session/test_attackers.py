"""Who attacks in a run, as its run folder says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from p2pfl.attackers import attacks
from p2pfl.errors import RunFolderError
from p2pfl.run_folder.folder import RunFolder
from tests.conftest import tree
from tests.guide_pages import files


def of(*entries: dict[str, Any]) -> dict[int, str]:
    return attacks({"peers": 10, "seed": 3, "adversaries": list(entries)})


def test_attackers_are_ascending_and_have_the_names_of_all_their_attacks() -> None:
    assert attacks({"peers": 10, "seed": 3}) == {}
    assert of({"peers": [7, 2], "name": "noise"}, {"peers": [7], "name": "scaled", "from": 4}) == {
        2: "noise",
        7: "noise, scaled",
    }


def test_a_fraction_draws_other_peers_for_each_entry_and_at_least_one() -> None:
    one, two = (
        of({"peers": {"fraction": 0.4}, "name": "a"}),
        of({"peers": [], "name": "-"}, {"peers": {"fraction": 0.4}, "name": "a"}),
    )
    assert (len(one), len(two)) == (4, 4)
    assert one != two
    assert len(of({"peers": {"fraction": 0.01}, "name": "a"})) == 1


@pytest.mark.parametrize("entry", ["x", {"name": "a"}, {"peers": [1]}, {"peers": ["x"], "name": "a"}, {"peers": 3}])
def test_a_damaged_run_file_is_reported(entry: Any) -> None:
    with pytest.raises(RunFolderError, match=r"run\.yaml: adversaries: damaged"):
        of(entry)


@pytest.mark.parametrize("peers", [[1, 2], {"fraction": 0.5}])
def test_a_run_folder_names_the_peers_that_attack_in_the_run(
    peers: Any, make_run: Any, prepare: Any, tmp_path: Path
) -> None:
    plugin = tmp_path / "my_parts.py"
    plugin.write_text(files("own-codec.md")["my_parts.py"])
    adversaries = [{"peers": [0], "name": "two-faced"}, {"peers": peers, "name": "two-faced"}]
    run = make_run(**tree(algorithm="dpsgd", peers=4, plugins=[str(plugin)], adversaries=adversaries))
    folder: RunFolder = prepare(tmp_path / "run", run)
    assert attacks(folder.settings).keys() == run.attackers(0) | run.attackers(1)
