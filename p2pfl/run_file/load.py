"""Load a run file: YAML, overrides, validation, and resolution of every named thing.

All problems are reported at once, each as ``file:line: key: what was found; what is known``.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args

from pydantic import ValidationError

from p2pfl.adversaries import ADVERSARIES
from p2pfl.aggregation import AGGREGATIONS, Auto
from p2pfl.algorithms import ALGORITHMS
from p2pfl.codecs import CODECS
from p2pfl.data import AUGMENTATIONS, DATASETS, PARTITIONS
from p2pfl.errors import P2pflError, PluginError, Problem, RunFileError
from p2pfl.graphs import GRAPHS, TimeVaryingGraph
from p2pfl.learning.gradients import GRADIENTS
from p2pfl.models.import_path import parse
from p2pfl.options import Loc, OptionErrors, OptionProblem, Options, explain
from p2pfl.plugins import TABLES, loading, sources
from p2pfl.plugins.loading import blaming, naming_lines
from p2pfl.plugins.sources import Plugin
from p2pfl.registry import Table
from p2pfl.run_file.checks import (
    check_attacks,
    check_degrees,
    check_graph,
    check_loss,
    check_rules,
    check_sides,
    check_synchrony,
    cross_checks,
    gathers,
)
from p2pfl.run_file.run import Run
from p2pfl.run_file.schema import ALL, Models, Named, PluginEntry, RunFile, from_name
from p2pfl.run_file.yaml_source import Source

OptionsT = TypeVar("OptionsT", bound=Options)


def load(
    path: Path,
    sets: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Run:
    """Read and check a run file.

    Args:
        overrides: {dotted key: value}; they take precedence over ``sets``.
        sets: overrides of the form ``dotted.key=YAML value``; they take precedence over the environment.
        environment: variables, of which ``TRANSPORT_VARIABLES`` take precedence over the file.

    Raises:
        RunFileError: with all problems found.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise RunFileError([Problem(str(path), "", f"cannot be read: {reason}")]) from None
    source = Source(str(path))
    tree = source.read(text)
    if not isinstance(tree, dict):
        found = "empty" if tree is None else "not a mapping"
        required = ", ".join(name for name, field in RunFile.model_fields.items() if field.is_required())
        raise RunFileError([Problem(str(path), "", f"{found}; a run file needs at least {required}")])
    source.apply_environment(tree, environment or {})
    for assignment in sets:
        source.apply_set(tree, assignment)
    source.apply_values(tree, overrides or {})
    return _check(tree, source, path.parent)


def from_dict(tree: Mapping[str, Any], where: str = "run", overrides: Mapping[str, Any] | None = None) -> Run:
    """Check a run given as plain values. ``where`` names it in error messages. Raises RunFileError."""
    source, copied = Source(where), copy.deepcopy(dict(tree))
    source.apply_values(copied, overrides or {})
    return _check(copied, source, Path())


def load_plugins(names: Sequence[str], models: Sequence[str] = ()) -> None:
    """Register the names of these plug-ins and of installed ones, as a run file does. Raises RunFileError.

    Args:
        models: names of models, some of which may be import paths.
    """
    _load_plugins({"plugins": list(names)}, Source("command line"), Path(), models)


def _check(tree: dict[str, Any], source: Source, base: Path) -> Run:
    problems: list[OptionProblem] = []
    file = None
    try:
        file = RunFile.model_validate(tree, context={"base": base})
    except ValidationError as error:
        problems.extend(explain(error, _known_keys, _unit))
    plain = tree if file is None else file.model_dump()
    try:
        plugins = _load_plugins(plain, source, base, _model_texts(plain) if file is None else file.models.texts)
    except PluginError:
        if file is None:  # a mistake in the file, such as in `models`, may be why a plug-in seems to be wrong
            raise source.error(problems) from None
        raise

    listed = ", ".join(plugin.name for plugin in plugins)
    forgotten = (
        f"; no plug-in ({listed}) registers it" if listed else "; if a plug-in registers it, list it in `plugins`"
    )

    def resolve(loc: Loc, table: Table[type[OptionsT]]) -> OptionsT | None:
        """Parse the options at ``loc``, even if the file has other problems, so that all are reported."""
        value: Any = plain
        for part in loc:
            value = value.get(part) if isinstance(value, dict) else None
        try:
            named = Named.model_validate(Named.from_value(value))
        except ValueError:  # already reported
            problems[:] = (_naming(problem, loc, value, table) for problem in problems)
            return None
        return parse_options(loc, table, named)

    def parse_options(loc: Loc, table: Table[type[OptionsT]], named: Named) -> OptionsT | None:
        try:
            return table.find(named.name).parse(named.given, base)
        except OptionErrors as errors:
            for problem in errors.problems:
                hint = forgotten if problem.path == ("name",) and "did you mean" not in problem.message else ""
                problems.append(problem._replace(path=loc + problem.path, message=problem.message + hint))
            return None

    hypers = Table("algorithm", {name: method.Hyper for name, method in ALGORITHMS.items()})
    hyper = resolve(("algorithm",), hypers)
    graph = resolve(("graph",), GRAPHS)
    dataset = resolve(("data", "dataset"), DATASETS)
    partition = resolve(("data", "partition"), PARTITIONS)
    augmentation = resolve(("data", "augment"), AUGMENTATIONS)
    rule = resolve(("aggregation",), AGGREGATIONS)
    gradient = resolve(("gradient",), GRADIENTS)
    if file is None:
        raise source.error(problems)
    short = set(file.codec) == {ALL} and "name" in (Named.from_value(tree["codec"]))
    codecs = {
        kind: parse_options(("codec",) if short else ("codec", kind), CODECS, named)
        for kind, named in file.codec.items()
    }
    attacks = [
        parse_options(("adversaries", number), ADVERSARIES, entry) for number, entry in enumerate(file.adversaries)
    ]

    method = ALGORITHMS[file.algorithm.name] if hyper is not None else None
    recommended = False
    if isinstance(rule, Auto) and method is not None and gathers(method):
        recommended, name = True, Auto.recommended(learns_weights=method.learns_weights)
        rule, file = AGGREGATIONS[name](), file.model_copy(update={"aggregation": Named(name=name)})
    problems.extend(cross_checks(file, method))
    problems.extend(check_attacks(file, method, rule, attacks))
    if hyper is not None and method is not None:
        problems.extend(check_loss(file.algorithm.name, method, hyper))
        problems.extend(check_rules(file, method, hyper, rule, gradient))
        problems.extend(check_synchrony(file, method, hyper, rule, attacks))
        if graph is not None:
            problems.extend(check_graph(file, method, graph, rule))
    for key, path in (partition.files() if partition is not None else {}).items():
        if not os.path.isfile(path):  # unlike Path.is_file, also if its folder is closed to this user
            problems.append(OptionProblem(("data", "partition", key), f"no file {str(path)!r}"))
    topology = schedule = None
    if graph is not None:
        try:
            with naming_lines():
                topology, schedule = graph.plan(file.peers, file.seed, base, file.rounds)
        except PluginError:
            raise
        except P2pflError as error:
            edges = type(graph).edges_at if isinstance(graph, TimeVaryingGraph) else type(graph).edges_of
            problems.append(OptionProblem(("graph",), blaming(edges, error)))
    if method is not None and topology is not None:
        problems.extend(check_sides(file, method, topology))
    if rule is not None and topology is not None:
        problems.extend(check_degrees(file, rule, topology, schedule, recommended=recommended))
    if problems:
        raise source.error(problems)
    required = (dataset, partition, augmentation, rule, gradient)
    assert all(part is not None for part in (hyper, graph, topology, *required))
    parts = (hyper, graph, topology, schedule, *required, codecs, tuple(attacks))
    plugins += loading.used_of_announced(_names(file))
    return Run(file, *parts, tuple(plugins), source.locate, base, recommended)  # type: ignore[arg-type]


def _naming(problem: OptionProblem, loc: Loc, given: object, table: Table[Any]) -> OptionProblem:
    """Add the known names to the problem that a mapping has no ``name``, and the key that was written instead."""
    if not problem.missing or problem.path != (*loc, "name"):
        return problem
    text = f"missing; known: {', '.join(table)}"
    for key, value in given.items() if isinstance(given, Mapping) else ():
        if isinstance(value, str) and value in table:
            text += f"; did you mean 'name: {value}' by '{key}: {value}'?"
    return problem._replace(message=text)


def _model_texts(plain: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the models in a file that has problems elsewhere; none if they are in its section of models."""
    try:
        return Models.model_validate(Models.from_value(plain.get("models", {}))).texts
    except ValueError:
        return ()


def _load_plugins(plain: Mapping[str, Any], source: Source, base: Path, models: Sequence[str]) -> list[Plugin]:
    """Register the names of the run's plug-ins, and find the modules of its ``models``. Raises RunFileError."""
    problems: list[OptionProblem] = []
    found: dict[str, Plugin] = {}

    def look_for(loc: Loc, entry: PluginEntry) -> None:
        try:
            plugin = sources.find(entry.name, base)
        except OptionErrors as errors:
            problems.extend(problem._replace(path=loc) for problem in errors.problems)
            return
        other = found.setdefault(plugin.name, plugin)
        if other != plugin:
            problems.append(OptionProblem(loc, f"another plug-in is called {plugin.name!r} too; rename one"))
        elif entry.sha256 not in (None, plugin.sha256):
            text = f"{entry.name} has changed: this run needs the version {str(entry.sha256)[:12]}…"
            text += f" ({entry.version})" if entry.version else ""
            problems.append(
                OptionProblem(loc, f"{text}, found {plugin.sha256[:12]}…; restore it, or start a new run")
            )

    given = plain.get("plugins")
    for number, value in enumerate(given if isinstance(given, list | tuple) else ()):
        try:
            look_for(("plugins", number), PluginEntry.model_validate(from_name(value)))
        except ValidationError:  # already reported
            continue
    silent = []
    for number, path in enumerate(parse(model) for model in models):
        if path is not None and path.module.partition(".")[0] not in sources.DEPENDENCIES:
            loc = ("models", "members", number) if len(models) > 1 else ("models", "module")
            look_for(loc, PluginEntry(name=path.module))
            silent.append(path.module)
    if problems:
        raise source.error(problems)
    loading.announced()
    loading.activate(list(found.values()), silent)
    return list(found.values())


def registered_by_main(file: RunFile) -> list[tuple[str, str]]:
    """Return the kinds and names in a run file that the main program, or a notebook, has registered itself."""
    used = [(kind, name, TABLES[kind].registered.get(name)) for kind, name in _names(file)]
    return [(kind, name) for kind, name, value in used if getattr(value, "__module__", "") == "__main__"]


def _names(file: RunFile) -> list[tuple[str, str]]:
    """The kind and the name of everything that a run file names."""
    data = file.data
    return [
        ("algorithm", file.algorithm.name),
        ("loss", file.algorithm.given.get("loss", "")),
        *(("metric", name) for name in file.metrics),
        *(("aggregation", name) for name in _names_within(file.aggregation, "rules")),
        ("gradient", file.gradient.name),
        *(("codec", codec.name) for codec in file.codec.values()),
        *(("adversary", name) for attack in file.adversaries for name in _names_within(attack, "attacks")),
        *(("graph", name) for name in _names_within(file.graph, "graphs")),
        ("dataset", data.dataset.name),
        ("partition", data.partition.name),
        ("augmentation", data.augment.name),
        *(("model", text) for text in file.models.texts),
        *(("backbone", member.partition("+")[0]) for member in file.models.group.members),
        *(("head", member.partition("+")[2]) for member in file.models.group.members),
    ]


def _names_within(section: Named, key: str) -> Iterator[str]:
    """The names in the section of a graph, a rule or an attack: one of several has them at ``key``."""
    yield section.name
    members = section.given.get(key)
    for member in members if isinstance(members, list | tuple) else ():
        yield from _names_within(Named.model_validate(Named.from_value(member)), key)


def _section(path: Loc) -> Any:
    """The section in which the key at ``path`` is."""
    section: Any = RunFile
    for part in path[:-1]:
        if isinstance(part, str):
            section = section.model_fields[part].annotation
            if isinstance(section, UnionType):  # optional
                section, _ = get_args(section)
        else:  # an item of a list
            section, *_ = get_args(section)
    return section


def _known_keys(path: Loc) -> tuple[str, ...]:
    """The keys of the section in which the key at ``path`` is."""
    return tuple(_section(path).model_fields)


def _unit(path: Loc) -> str:
    """The unit of the key at ``path``, with which its note begins; empty if it has none."""
    try:
        note = _section(path).model_fields[path[-1]].description
    except (AttributeError, LookupError, ValueError):  # below a list or a mapping without fixed keys
        return ""
    found = re.match(r"(?:maximum )?(bytes per second|bytes|seconds)\b", note or "", re.IGNORECASE)
    return found[1].lower() if found else ""
