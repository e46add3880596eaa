"""Completeness of tables, notes and documented names."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import get_type_hints

import pytest

from p2pfl import errors
from p2pfl.adversaries import ADVERSARIES, Adversary
from p2pfl.aggregation import AGGREGATIONS
from p2pfl.algorithms import ALGORITHMS
from p2pfl.algorithms.base import Algorithm
from p2pfl.algorithms.registration import check_algorithm
from p2pfl.codecs import CODECS
from p2pfl.data import AUGMENTATIONS, DATASETS, PARTITIONS, Augmentation, Loader, Partition
from p2pfl.errors import P2pflError
from p2pfl.graphs import GRAPHS, Graph
from p2pfl.learning.gradients import GRADIENTS
from p2pfl.messaging import control
from p2pfl.options import Options, notes
from p2pfl.registry import Table, check_class, check_options
from p2pfl.run_file import schema, time

REPOSITORY = Path(__file__).resolve().parents[3]


# ---- algorithms --------------------------------------------------------------------------------------------


def test_every_class_with_a_summary_is_registered() -> None:
    modules = [module for name, module in sys.modules.items() if name.startswith("p2pfl.algorithms.")]
    classes = {value for module in modules for value in vars(module).values() if inspect.isclass(value)}
    summarized = {cls for cls in classes if issubclass(cls, Algorithm) and "summary" in vars(cls)}
    assert set(ALGORITHMS.values()) == summarized


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_algorithm_cites_its_source(name: str) -> None:
    algorithm = ALGORITHMS[name]
    assert algorithm.name == name
    for attribute in ("title", "authors", "venue", "url"):
        text = getattr(algorithm, attribute)
        assert isinstance(text, str)
        assert text.strip()
    assert algorithm.url == "—" or algorithm.url.startswith("https://")
    assert algorithm.__doc__


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_algorithm_file_starts_with_paper_and_differences(name: str) -> None:
    algorithm = ALGORITHMS[name]
    docstring = inspect.getmodule(algorithm).__doc__
    assert docstring
    if algorithm.url != "—":
        assert algorithm.url in docstring
        assert "Differs from the paper" in docstring
        assert " ".join(algorithm.title.split()) in " ".join(docstring.replace('"', "").split())


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_algorithm_has_a_page(name: str) -> None:
    assert (REPOSITORY / "docs" / "algorithms" / f"{name}.md").is_file()


# ---- rules of aggregation, and attacks ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("folder", "name", "options"),
    [
        *(("rules", name, rule) for name, rule in AGGREGATIONS.items() if name != "list"),
        *(("attacks", name, attack) for name, attack in ADVERSARIES.items()),
    ],
)
def test_rule_or_attack_has_a_page_that_lists_its_parameters_with_their_defaults(
    folder: str, name: str, options: type[Options]
) -> None:
    page = (REPOSITORY / "docs" / folder / f"{name}.md").read_text(encoding="utf-8")
    assert page.startswith(f"# {name}\n")
    for note in notes(options):
        shown = f"{note.name}" if note.default == "(required)" else f"{note.name}: {_as_yaml(note.default)}"
        assert f"`{shown}`" in page


def _as_yaml(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {None: "null", True: "true", False: "false"}[value]
    return format(value, "g") if isinstance(value, float) else str(value)


# ---- what the decorators check of plug-ins -----------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_built_in_algorithms_pass_the_checks_of_plugins(name: str) -> None:
    check_algorithm(ALGORITHMS[name])


@pytest.mark.parametrize(
    ("table", "base"),
    [
        (GRAPHS, Graph),
        (DATASETS, Loader),
        (PARTITIONS, Partition),
        (AUGMENTATIONS, Augmentation),
        (ADVERSARIES, Adversary),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_built_in_options_pass_the_checks_of_plugins(table: Table[type[Options]], base: type[Options]) -> None:
    for options in table.values():
        check_class(options, base)
        check_options(options)


@pytest.mark.parametrize(
    "package",
    ["adversaries", "aggregation", "algorithms", "codecs", "data.loaders", "data.partitions", "graphs", "models"],
)
def test_a_file_in_the_package_of_a_table_is_found(package: str) -> None:
    importlib.import_module(f"p2pfl.{package}")
    files = (REPOSITORY / "p2pfl" / Path(*package.split("."))).glob("[!_]*.py")
    assert {f"p2pfl.{package}.{file.stem}" for file in files} <= sys.modules.keys()


# ---- notes of parameters -----------------------------------------------------------------------------------

TABLES: dict[str, Mapping[str, type[Options]]] = {
    "algorithm": {name: algorithm.Hyper for name, algorithm in ALGORITHMS.items()},
    "graph": GRAPHS,
    "dataset": DATASETS,
    "partition": PARTITIONS,
    "augmentation": AUGMENTATIONS,
    "aggregation": AGGREGATIONS,
    "gradient": GRADIENTS,
    "codec": CODECS,
    "adversary": ADVERSARIES,
}
OPTIONS = [(f"{table}.{name}", options) for table, entries in TABLES.items() for name, options in entries.items()]


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [pytest.param(options, id=name) for name, options in OPTIONS])
def test_every_parameter_has_a_note_and_a_type(options: type[Options]) -> None:
    parameters = notes(options)
    assert tuple(note.name for note in parameters) == options.known()
    assert [note.name for note in parameters if not note.text] == []
    assert [note.name for note in parameters if not note.type] == []


@pytest.mark.parametrize("table", sorted(set(TABLES) - {"algorithm"}))
def test_entries_of_a_table_are_distinct_and_have_docstrings(table: str) -> None:
    entries = TABLES[table]
    assert len(set(entries.values())) == len(entries)
    for options in entries.values():
        docstring = (options.__doc__ or "").strip()
        assert docstring
        assert not docstring.startswith(f"{options.__name__}(")  # the default docstring of dataclasses


TIME = {"Time": time, "Devices": time, "Lognormal": time, "Network": time, "Availability": time, "Churn": time}
"""The sections of ``time``, and their module."""


@pytest.mark.parametrize("section", ["RunFile", "Data", "Models", "Transport", "Gpu", *TIME])
def test_every_key_of_the_run_file_has_a_note(section: str) -> None:
    model = getattr(TIME.get(section, schema), section)
    self_explanatory = {"rounds", "peers", "data", "models", "algorithm", "transport", "device", "gpu"}
    without_note = {name for name, field in model.model_fields.items() if not field.description}
    assert without_note <= (self_explanatory if section == "RunFile" else set())


# ---- errors ------------------------------------------------------------------------------------------------


def drawn_tree() -> dict[str, str]:
    """{class: base class} as drawn in the docstring of p2pfl.errors."""
    bases: dict[str, str] = {}
    path: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        stripped = line.lstrip(" │├└─")
        name = stripped.split(" ")[0]
        if not hasattr(errors, name) or not name[:1].isupper():
            continue
        depth = len(line) - len(stripped)
        path = [(column, base) for column, base in path if column < depth]
        if path:
            bases[name] = path[-1][1]
        path.append((depth, name))
    return bases


def test_drawn_tree_of_errors_matches_the_classes() -> None:
    defined = {
        name: value.__bases__[0].__name__
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, P2pflError) and value is not P2pflError
    }
    assert drawn_tree() == defined
    assert all(len(getattr(errors, name).__bases__) == 1 for name in defined)


def test_every_error_has_a_docstring() -> None:
    for name in (*drawn_tree(), "P2pflError"):
        assert getattr(errors, name).__doc__


# ---- messages ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", control.TYPES, ids=lambda kind: kind.__name__)
def test_every_field_of_a_message_is_in_its_row_of_the_page_on_the_wire(kind: type[control.Control]) -> None:
    page = (REPOSITORY / "docs" / "wire.md").read_text()
    (row,) = [line for line in page.splitlines() if line.startswith("| ") and f"| `{kind.__name__}` |" in line]
    names = re.findall(r"`(\w+)`", row.split("|")[3])
    assert [name for name in names if name in get_type_hints(kind)] == list(get_type_hints(kind))
