"""`p2pfl names`, and run files that do not exist."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from launcher.views.names import FAMILIES, KEYS, find_kind
from p2pfl.models import MODELS
from p2pfl.plugins import TABLES
from tests.launcher_fixtures import Invoke

PLUGIN = """
from p2pfl import plugins

@plugins.metric("names-test")
def names_test(scores, labels):
    \"\"\"Half of everything.\"\"\"
    return 0.5
"""


def test_every_kind_has_its_key_in_a_run_file(invoke: Invoke) -> None:
    assert set(KEYS) == set(TABLES)
    found = json.loads(invoke("names", "--json").stdout)
    listed = {each["kind"]: each["names"] for each in found}
    assert listed.keys() == TABLES.keys()
    assert listed["partition"] == list(TABLES["partition"])
    assert {*listed["model"], *listed["backbone"]} == set(MODELS)
    for kind in TABLES:
        assert find_kind(kind) == find_kind(f"{kind}s") == kind
        assert invoke("names", kind).exit_code == 0


def test_examples_of_model_families_exist() -> None:
    assert all(MODELS.find(name).members == (name,) for name in FAMILIES)
    assert not set(FAMILIES) & set(MODELS)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["partitions", "clusters"], ["Clusters of peers", "per_class", "int > 0 | [int > 0, int > 0]", "300"]),
        (["algorithm", "mapl"], ["warmup", "projector_hidden"]),
        (["metrics", "ece"], ["ece: Expected calibration error"]),
        (["graphs"], ["el-oracle", "torus"]),
    ],
)
def test_describes_a_kind_or_a_name(invoke: Invoke, arguments: list[str], shown: list[str]) -> None:
    outcome = invoke("names", *arguments)
    assert outcome.exit_code == 0
    assert not [text for text in shown if text not in outcome.stdout]


def test_names_of_plug_ins_are_listed(invoke: Invoke, tmp_path: Path) -> None:
    file = tmp_path / "names_test_metric.py"
    file.write_text(PLUGIN)
    assert "Half of everything." in invoke("names", "metrics", "--plugin", file).stdout


def test_a_misspelled_kind_or_name_is_an_error_with_the_known_ones(invoke: Invoke) -> None:
    wrong_kind, wrong_name = invoke("names", "partision"), invoke("names", "graph", "rng")
    assert wrong_kind.exit_code == wrong_name.exit_code == 2
    assert "unknown kind 'partision'; known: algorithm" in wrong_kind.stderr
    assert "did you mean 'partition'?" in wrong_kind.stderr
    assert "did you mean 'ring'?" in wrong_name.stderr


@pytest.mark.parametrize("command", [["graph"], ["launch"], ["simulate"], ["data", "show"], ["compose"]])
def test_a_missing_run_file_is_named_without_an_import_of_torch(
    command: list[str], invoke: Invoke, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "p2pfl.run_file.load", raising=False)
    outcome = invoke(*command, file.with_name("toi.yaml"))
    assert outcome.exit_code == 2
    assert outcome.stderr == (
        f"error: {file.with_name('toi.yaml')}: cannot be read: No such file or directory; did you mean '{file}'?\n"
    )
    assert "p2pfl.run_file.load" not in sys.modules
