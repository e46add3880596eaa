"""Plug-ins: what they register, and what is recorded of them."""

from __future__ import annotations

import importlib
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from p2pfl import config_hash
from p2pfl.algorithms import ALGORITHMS
from p2pfl.data import PARTITIONS
from p2pfl.errors import PluginError, RunFileError
from p2pfl.graphs import GRAPHS
from p2pfl.models import HEADS, MODELS, build
from p2pfl.plugins import loading
from p2pfl.registry import Table
from p2pfl.run_file.load import load
from p2pfl.run_folder.new_run import create
from p2pfl.session.build import load_data
from tests.plugin_fixtures import HELPERS, METHOD, PARTS, RUN, Project

pytestmark = pytest.mark.usefixtures("nothing_stays_registered")

# ---- what they register ----------------------------------------------------------------------------------------


def test_names_of_plugins_are_known_while_their_run_is_active(project: Project) -> None:
    tables: dict[str, Table[Any]] = {
        "head-mean": ALGORITHMS,
        "pairs": GRAPHS,
        "in-order": PARTITIONS,
        "my-cnn": MODELS,
        "two-layers": HEADS,
    }
    run = load(project())
    assert [plugin.name for plugin in run.plugins] == ["my_method", "my_parts"]
    assert all(name in table for name, table in tables.items())
    assert run.algorithm.summary == "Average the heads of all neighbors."
    assert list(run.topology.edges) == [(0, 1), (2, 3)]
    loading.activate([])
    assert not any(name in table for name, table in tables.items())
    assert "my_method" not in sys.modules
    run.activate()
    assert all(name in table for name, table in tables.items())
    assert run.algorithm is ALGORITHMS["head-mean"]


def test_values_are_validated_like_those_of_built_in_names(project: Project) -> None:
    text = RUN.replace("head-mean, batch", "head-maen, batch").replace("my-cnn", "my-cmn")
    with pytest.raises(RunFileError) as caught:
        load(project(text.replace("partition: in-order", "partition: in-odrer")))
    problems = [(p.where.rpartition(":")[2], p.key, p.message.rpartition(";")[2]) for p in caught.value.problems]
    assert problems == [
        ("6", "data.partition.name", " did you mean 'in-order'?"),
        ("7", "models.name", " did you mean 'my-cnn'?"),
        ("8", "algorithm.name", " did you mean 'head-mean'?"),
    ]
    with pytest.raises(RunFileError, match=r"mine.yaml:8: algorithm.own_weight: should be a number \(found 'x'\)"):
        load(project(RUN.replace("own_weight: 2", "own_weight: x")))


def test_heads_of_plugins_combine_with_all_backbones(project: Project) -> None:
    load(project())
    for name in ("my-cnn+two-layers", "tiny-cnn+two-layers", "my-cnn+fc128"):
        model = build(name, 0, 1, (8, 8), 10)
        assert (model.name, model.classes) == (name, 10)
    assert "my-cnn+three-layers" not in MODELS
    assert MODELS["tiny-cnn+two-layers"].features == 64


def test_edited_plugin_replaces_its_earlier_version(project: Project) -> None:
    before = load(project())
    file = project(my_parts=PARTS.replace("Conv2d(channels, 4, 3)", "Conv2d(channels, 4, 5)"))
    after = load(file)
    sizes = []
    for run in (before, after, before):
        run.activate()
        sizes.append(next(build("my-cnn", 0, 1, (8, 8), 10).parameters()).shape[-1])
    assert sizes == [3, 5, 3]


def test_a_package_beside_the_run_file_is_a_plugin(project: Project) -> None:
    file = project(RUN.replace("my_method.py", "lab.methods.heads"))
    (file.parent / "lab" / "methods").mkdir(parents=True)
    (file.parent / "lab" / "methods" / "heads.py").write_text(
        f"from ..names import NAME\n{METHOD}".replace("from __future__ import annotations\n", "").replace(
            '"head-mean"', "NAME"
        )
    )
    (file.parent / "lab" / "names.py").write_text('NAME = "head-mean"\n')
    run = load(file)
    assert sorted(run.plugins[0].sources) == ["lab/methods/heads.py", "lab/names.py"]
    assert run.algorithm.__module__ == "lab.methods.heads"


# ---- what is recorded ------------------------------------------------------------------------------------------


def test_run_folder_keeps_a_copy_that_gives_the_same_run(project: Project, tmp_path: Path) -> None:
    file = project()
    run = load(file)
    folder = create(run, tmp_path / "run")
    copies = {path.name: path.read_text() for path in (folder.root / "plugins").iterdir()}
    assert copies == {"my_method.py": METHOD, "my_parts.py": PARTS, "helpers.py": HELPERS}
    for source in file.parent.glob("*.py"):
        source.unlink()
    again = load(folder.run_file)
    assert again.resolved() == run.resolved()
    assert again.config_hash() == run.config_hash()
    assert sys.modules["my_parts"].__file__ == str(folder.root / "plugins" / "my_parts.py")
    assert sorted(path.name for path in (folder.root / "plugins").iterdir()) == sorted(copies)  # no __pycache__


def test_run_of_a_module_that_the_program_has_imported_can_be_opened(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = project()
    monkeypatch.syspath_prepend(file.parent)
    helpers = importlib.import_module("helpers")
    run = load(file)
    folder = create(run, tmp_path / "run")
    assert load(folder.run_file).config_hash() == run.config_hash()
    assert sys.modules["helpers"] is not helpers
    loading.activate([])
    assert sys.modules["helpers"] is helpers, "the program's module is back"
    (file.parent / "helpers.py").write_text(HELPERS + "EDITED = True\n")
    message = rf"plugins/helpers\.py:1: this program has imported another module 'helpers' from {file.parent}, whose"
    with pytest.raises(PluginError, match=message):
        load(folder.run_file)
    del sys.modules["helpers"]


def test_changed_copy_is_refused(project: Project, tmp_path: Path) -> None:
    folder = create(load(project()), tmp_path / "run")
    helpers = folder.root / "plugins" / "helpers.py"
    helpers.write_text(f"{helpers.read_text()}\n")
    with pytest.raises(
        RunFileError, match=r"run\.yaml:\d+: plugins\.1: my_parts has changed: this run needs the ver"
    ):
        load(folder.run_file)


def test_hash_depends_on_the_code_of_all_files(project: Project) -> None:
    ours = load(project()).config_hash()
    theirs = load(project(helpers=f"{HELPERS}\n")).config_hash()
    assert config_hash.settings_of(ours) == config_hash.settings_of(theirs)
    text = config_hash.mismatch(3, theirs, 0, ours)
    assert re.fullmatch(
        r"plug-ins differ: peer 3 has my_parts \w{12}, peer 0 has my_parts \w{12}; give all peers the same files",
        text,
    )
    assert "peer 3 has my_method (none), peer 0 has my_method 1" in config_hash.mismatch(
        3, "a", 0, config_hash.join("a", {"my_method": "1" * 64})
    )
    other = config_hash.mismatch(3, "b" * 64, 0, ours)
    assert other.startswith("run file differs: its hash is bbbbbbbbbbbb… at peer 3, ")
    assert len(config_hash.join("a" * 64, {f"plugin{number}": "1" * 64 for number in range(99)})) < 1200


GRAY = """
import numpy as np
from p2pfl import plugins
from p2pfl.data import DatasetArrays, Loader

@plugins.dataset("gray")
class Gray(Loader):
    def read(self, root):
        images, labels = np.full((60, 1, 8, 8), 7, np.uint8), np.arange(60) % 10
        return DatasetArrays(images, labels, images, labels, 10, mirror=True)
"""


def test_dataset_of_a_plugin_is_read_again_when_its_code_changes(
    project: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("P2PFL_CACHE", str(tmp_path / "cache"))
    text = RUN.replace("digits, partition: in-order", "gray").replace("my_parts.py]", "my_parts.py, my_data.py]")
    shades = []
    for shade in ("7", "9"):
        dataset, _ = load_data(load(project(text, my_data=GRAY.replace("7", shade))))
        shades.append(int(dataset.train.images.max()))
    assert shades == [7, 9]


def test_dataset_made_of_one_of_a_plugin_is_read_again_too(
    project: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("P2PFL_CACHE", str(tmp_path / "cache"))
    text = RUN.replace("digits, partition: in-order", "{name: styled, of: gray}")
    text = text.replace("my_parts.py]", "my_parts.py, my_data.py]")
    means = []
    for shade in ("7", "90"):
        dataset, _ = load_data(load(project(text, my_data=GRAY.replace("7", shade))))
        means.append(float(dataset.train.images.mean()))
    assert means[0] != means[1]


@pytest.mark.parametrize("kind", ["backbone", "sized backbone", "head", "group"])
def test_a_name_belongs_to_the_plugin_that_has_registered_it_first(project: Project, kind: str) -> None:
    text = {
        "backbone": "@plugins.backbone('mine')\ndef build(channels, size):\n    return nn.Flatten(), 64",
        "sized backbone": "@plugins.backbone('mine', features=4)\ndef build(channels, size, features):\n    return 0",
        "head": "@plugins.head('mine')\ndef build(features, classes):\n    return nn.Linear(features, classes)",
        "group": "plugins.group('mine', ['tiny-cnn'], 8)",
    }[kind]
    text = f"from torch import nn\nfrom p2pfl import plugins\n\n{text}\n"
    run = RUN.replace("my_parts.py]", "my_parts.py, one.py, two.py]")
    owner = "one" if kind == "group" else "one.build"
    with pytest.raises(PluginError, match=f"two.py.*the name 'mine' is taken: it is registered by {owner}; choose"):
        load(project(run, one=text, two=text))


# ---- installed packages ----------------------------------------------------------------------------------------


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package in a folder of packages, with an entry point."""
    site = tmp_path / "site"
    info = site / "lab_methods-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lab-methods\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[p2pfl.plugins]\nheads = lab_methods.heads\n")
    (info / "RECORD").write_text("lab_methods/__init__.py,,\nlab_methods/heads.py,,\n")
    (site / "lab_methods").mkdir()
    (site / "lab_methods" / "__init__.py").touch()
    (site / "lab_methods" / "heads.py").write_text(METHOD)
    monkeypatch.syspath_prepend(site)
    monkeypatch.setattr(loading, "_announced", None)
    return site


@pytest.mark.exhaustive
def test_packages_announce_themselves_and_are_recorded_if_used(
    project: Project, installed: Path, tmp_path: Path
) -> None:
    run = load(project(RUN.replace("my_method.py, ", "")))
    assert [(plugin.name, plugin.version) for plugin in run.plugins] == [
        ("my_parts", None),
        ("lab_methods.heads", "1.2"),
    ]
    again = load(create(run, tmp_path / "run").run_file)
    assert again.config_hash() == run.config_hash()
    unused = load(project(RUN.replace("my_method.py, ", "").replace("head-mean, batch: 16, own_weight: 2", "local")))
    assert [plugin.name for plugin in unused.plugins] == ["my_parts"]
    assert "head-mean" in ALGORITHMS
    (installed / "lab_methods" / "heads.py").write_text(f"{METHOD}\n")
    with pytest.raises(RunFileError, match=r"plugins\.1: lab_methods\.heads has changed: .* \(1\.2\), found "):
        load(tmp_path / "run" / "run.yaml")


@pytest.mark.exhaustive
def test_listed_module_of_an_installed_package_is_removed_with_its_run(
    project: Project, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda group: ())
    for _ in range(2):
        run = load(project(RUN.replace("my_method.py", "lab_methods.heads")))
        assert run.plugins[0].version == "1.2"
        assert not run.plugins[0].sources
        assert run.algorithm.__module__ == "lab_methods.heads"
        loading.activate([])
        assert "head-mean" not in ALGORITHMS


# ---- time-varying graphs

TURNS = '''\
from p2pfl import plugins
from p2pfl.graphs import TimeVaryingGraph


@plugins.graph("turns")
class Turns(TimeVaryingGraph):
    """Edge 0-1, then 1-2, …"""

    def edges_at(self, t, peers, seed, base):
        return [(t % (peers - 1), t % (peers - 1) + 1)]

    def period(self, peers):
        return peers - 1
'''
TURNS_RUN = """\
name: mine
peers: 4
rounds: 6
plugins: [turns.py]
graph: turns
data: {dataset: digits}
algorithm: local
"""


def test_graph_of_a_plugin_may_change(tmp_path: Path) -> None:
    (tmp_path / "turns.py").write_text(TURNS)
    (tmp_path / "run.yaml").write_text(TURNS_RUN)
    run = load(tmp_path / "run.yaml")
    assert run.schedule is not None
    assert [run.schedule(t).edges for t in range(5)] == [[(0, 1)], [(1, 2)], [(2, 3)], [(0, 1)], [(1, 2)]]
    assert run.topology.edges == [(0, 1), (1, 2), (2, 3)]


@pytest.mark.parametrize(
    ("old", "new", "blamed", "message"),
    [
        (
            "t, peers, seed, base",
            "t, peers",
            "def edges_at",
            r"edges_at\(self, t, peers\) should take \(self, t, peers",
        ),
        ("edges_at", "edgse_at", "@plugins", r"Turns must define edges_at\(self, t, peers, seed, base\)"),
        ("self, peers):", "self):", "def period", r"period\(self\) should take \(self, peers\)"),
        ("return [(t", "return [(1 // (t - 2) * 0 + t", "return", "ZeroDivisionError"),
    ],
)
def test_mistake_in_a_graph_that_changes_names_its_line(
    old: str, new: str, blamed: str, message: str, tmp_path: Path
) -> None:
    text = TURNS.replace(old, new, 1)
    (tmp_path / "turns.py").write_text(text)
    (tmp_path / "run.yaml").write_text(TURNS_RUN)
    line = text[: text.index(blamed)].count("\n") + 1
    with pytest.raises(PluginError, match=rf"turns\.py:{line}: .*{message}"):
        load(tmp_path / "run.yaml")


@pytest.mark.exhaustive
def test_graphs_in_a_list_record_the_package_that_they_come_from(installed: Path, tmp_path: Path) -> None:
    (installed / "lab_methods" / "heads.py").write_text(TURNS)
    (tmp_path / "run.yaml").write_text(
        TURNS_RUN.replace("plugins: [turns.py]\n", "").replace("turns", "{name: list, graphs: [ring, turns]}")
    )
    run = load(tmp_path / "run.yaml")
    assert [plugin.name for plugin in run.plugins] == ["lab_methods.heads"]
    assert run.schedule is not None
    assert [len(run.schedule(t).edges) for t in range(4)] == [4, 1, 4, 1]
