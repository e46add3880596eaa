"""Execute plug-ins, which register names by ``p2pfl.plugins``, and find the lines of their errors.

The tables of names are global, and the plug-ins of one run at a time are active: ``activate`` registers their names
and removes the names of the run before. Packages with an entry point in the group ``p2pfl.plugins`` are always
active.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from importlib.abc import MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec
from multiprocessing import active_children, spawn  # noqa: TID251  # unpickles nothing here
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any, TextIO

from p2pfl.errors import P2pflError, PluginError, Unexpected
from p2pfl.learning.tried_functions import try_functions
from p2pfl.leftover_processes import end_servers, left_running
from p2pfl.options import OptionErrors
from p2pfl.plugins import TABLES
from p2pfl.plugins.sources import (
    INSTALLED,
    NOWHERE,
    Plugin,
    find,
    imported_elsewhere,
    is_installed,
    is_library,
    other_module,
    sha256_of,
    source_of,
)
from p2pfl.registry import Table
from p2pfl.run_folder.folder import PLUGINS

GROUP = "p2pfl.plugins"
"""The entry-point group of installed plug-ins."""

Registration = tuple[Table[Any], str, Any, str]
"""A registered name: its table, the name, the value and what defines it."""


# ---- execute them --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _ModuleSource:
    path: str
    content: bytes
    package: bool


class _Loader(SourceLoader):
    """Executes a source from memory, without a cache of bytecode."""

    plugin = True

    def __init__(self, source: _ModuleSource) -> None:
        self._source = source

    def get_filename(self, fullname: str) -> str:
        return self._source.path

    def get_data(self, path: str | bytes) -> bytes:
        return self._source.content


class _Finder(MetaPathFinder):
    """Finds the modules of the active plug-ins."""

    def __init__(self) -> None:
        self.sources: dict[str, _ModuleSource] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        source = self.sources.get(fullname)
        if source is None:
            return None
        folders = [str(Path(source.path).parent)] if source.package else None
        return importlib.util.spec_from_file_location(
            fullname, source.path, loader=_Loader(source), submodule_search_locations=folders
        )


_FINDER = _Finder()
_preparation_data = spawn.get_preparation_data


def _prepare_spawned(name: str) -> dict[str, Any]:
    """Let processes that plug-ins start by the methods spawn and forkserver import the plug-ins' modules."""
    data: dict[str, Any] = _preparation_data(name)
    paths = [(Path(source.path), source.package) for name, source in _FINDER.sources.items() if "." not in name]
    folders = [path.parents[1] if package and path.name == "__init__.py" else path.parent for path, package in paths]
    return {**data, "sys_path": [*data["sys_path"], *dict.fromkeys(map(os.path.abspath, folders))]}


spawn.get_preparation_data = _prepare_spawned
_FILES: dict[str, str] = {}
"""All files of plug-ins that were loaded in this process, and how errors name them."""


@dataclass(frozen=True)
class _Unit:
    """Loaded plug-ins of a run: their modules, and what they have registered."""

    modules: dict[str, ModuleType]
    sources: dict[str, _ModuleSource]
    entries: list[Registration]


_UNITS: dict[object, _Unit] = {}
_REFUSED: list[ModuleType | None] = []
"""Kept: a pool in a module that is collected before Python ends it prints a traceback."""
_INSTALLED_ENTRIES: dict[str, list[Registration]] = {}
"""What installed modules have registered, which are imported once."""
_DISPLACED: dict[str, ModuleType] = {}
_active: object = None


def activate(plugins: Sequence[Plugin], silent: Iterable[str] = ()) -> None:
    """Register the names of these plug-ins, and remove the names of the previously active ones.

    Args:
        silent: names of plug-ins that need not register anything.

    Raises:
        PluginError: one raises an exception, or registers nothing.
    """
    global _active
    key = tuple((plugin.name, plugin.sha256, str(plugin.root.absolute())) for plugin in plugins)
    if key == _active:
        return
    _deactivate()
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    if key in _UNITS:
        unit = _UNITS[key]
        _FINDER.sources = unit.sources
        _displace(unit.sources)
        sys.modules.update(unit.modules)
        for table, name, value, defined in unit.entries:
            table.register(name, value, defined)
    else:
        _UNITS[key] = _load(plugins, frozenset(silent))
    _active = key


def _deactivate() -> None:
    global _active
    if _active is None:
        return
    unit = _UNITS[_active]
    _remove(unit.entries, unit.sources)
    _active = None


def _remove(entries: Iterable[Registration], modules: Iterable[str]) -> None:
    for table, name, *_ in entries:
        table.unregister(name)
    for name in modules:
        sys.modules.pop(name, None)
    sys.modules.update(_DISPLACED)
    _DISPLACED.clear()
    _FINDER.sources = {}


def _displace(names: Iterable[str]) -> None:
    """Set modules of these names that the main program has imported aside until the plug-ins are removed."""
    for name in names:
        known = sys.modules.pop(name, None)
        if known is not None and not getattr(getattr(known, "__loader__", None), "plugin", False):
            _DISPLACED[name] = known


def _root(source: _ModuleSource) -> Path:
    """Return the folder that holds a top-level module or package."""
    path = Path(source.path)
    return path.parent.parent if source.package and path.name == "__init__.py" else path.parent


def _load(plugins: Sequence[Plugin], silent: frozenset[str]) -> _Unit:
    sources = {name: source for plugin in plugins for name, source in _modules(plugin)}
    for name, source in sources.items():
        if "." not in name and is_library(root := _root(source), name):
            folder = imported_elsewhere(root, name)
            if folder is not None and not is_installed(folder):
                raise PluginError(source.path, 1, other_module(name, folder))
            raise PluginError(source.path, 1, f"{name!r} is also the name of a library; rename the file")
    _displace(sources)
    _FINDER.sources = sources
    for plugin in plugins:
        _FILES.update({source.path: _shown(source.path, plugin.root) for _, source in _modules(plugin)})
    before = _registered()
    try:
        for plugin in plugins:
            mark, imported = _registered(), plugin.name in sys.modules  # by another plug-in, or by the user
            _import(plugin)
            if not (imported or plugin.name in silent or _since(mark)):
                raise PluginError(_file_of(plugin), 1, NOTHING)
    except BaseException:
        _remove(_since(before), sources)
        raise
    entries = _since(before)
    code = sha256_of({plugin.name: plugin.sha256.encode() for plugin in plugins})
    for table, _, value, _ in entries:
        if table is TABLES["dataset"]:
            value.code = code
    return _Unit({name: sys.modules[name] for name in sources if name in sys.modules}, sources, entries)


NOTHING = 'registers nothing; put a decorator such as @plugins.algorithm("my-name") before its class or function'


def _import(plugin: Plugin) -> None:
    if plugin.name in _INSTALLED_ENTRIES:  # Python executes it once; a name may be registered already
        for table, name, value, defined in _INSTALLED_ENTRIES[plugin.name]:
            table.register(name, value, defined)
        return
    before, processes = _registered(), set(active_children())
    try:
        importlib.import_module(plugin.name)
        try_functions()
        end_servers()
        if left := set(active_children()) - processes:
            raise PluginError(_shown(_file_of(plugin), plugin.root), 1, f"importing it {left_running(left)}")
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also SystemExit: a script may end itself
        _REFUSED.append(sys.modules.get(plugin.name))
        raise located(error) or PluginError(_shown(_file_of(plugin), plugin.root), 1, _text(error)) from error
    if not plugin.sources:
        _INSTALLED_ENTRIES[plugin.name] = _since(before)


def _file_of(plugin: Plugin) -> str:
    path = source_of(plugin.root, plugin.name) if plugin.sources else None
    return plugin.name if path is None else str(path)


def _modules(plugin: Plugin) -> Iterator[tuple[str, _ModuleSource]]:
    for path, content in plugin.sources.items():
        *folders, file = Path(path).with_suffix("").parts
        for depth in range(1, len(folders) + 1):  # a folder may lack an __init__.py
            yield_path = Path(*folders[:depth])
            if str(yield_path / "__init__.py") not in plugin.sources:
                yield ".".join(folders[:depth]), _ModuleSource(str(plugin.root / yield_path), b"", package=True)
        name = ".".join(folders if file == "__init__" else (*folders, file))
        yield name, _ModuleSource(str(plugin.root / path), content, package=file == "__init__")


def _registered() -> dict[str, dict[str, Any]]:
    return {kind: table.registered for kind, table in TABLES.items()}


def _since(before: Mapping[str, Mapping[str, Any]]) -> list[Registration]:
    """Return what was registered since ``before``."""
    return [
        (TABLES[kind], name, value, TABLES[kind].defined[name])
        for kind, entries in _registered().items()
        for name, value in entries.items()
        if before[kind].get(name) is not value
    ]


# ---- installed packages that announce themselves -------------------------------------------------------------


_announced: dict[str, list[Registration]] | None = None


def announced() -> dict[str, list[Registration]]:
    """Import the packages of the entry-point group, once. Return what each has registered. Raises PluginError."""
    global _announced
    if _announced is None:
        found: dict[str, list[Registration]] = {}
        for point in sorted(metadata.entry_points(group=GROUP), key=lambda point: point.name):
            before = _registered()
            _import(find(point.module, NOWHERE))
            found[point.module] = _since(before)
        _announced = found
    return _announced


def used_of_announced(names: Iterable[tuple[str, str]]) -> list[Plugin]:
    """Return the installed plug-ins that have registered one of these (kind, name)."""
    wanted = {(id(TABLES[kind]), name) for kind, name in names}
    return [
        find(module, NOWHERE)
        for module, entries in announced().items()
        if any((id(table), name) in wanted for table, name, *_ in entries)
    ]


# ---- errors in their code ------------------------------------------------------------------------------------


def _shown(file: str, root: Path) -> str:
    """Return how errors name a file: a copy in a run folder by its path there, since the user edits the original."""
    copied = root.name == PLUGINS and (root.parent / "run.json").is_file()
    return os.path.relpath(file, root) if copied else file


def located(error: BaseException) -> PluginError | None:
    """Return the error with the plug-in's line at which it was raised; None if no plug-in is to blame."""
    if isinstance(error, PluginError):
        file, _, line = error.problems[0].where.rpartition(":")
        return PluginError(_FILES[file], int(line), error.problems[0].message) if file in _FILES else error
    if isinstance(error, SyntaxError) and error.filename and _is_plugin(error.filename):
        return PluginError(_FILES.get(error.filename, error.filename), error.lineno or 1, f"SyntaxError: {error.msg}")
    found: tuple[FrameType, int] | None = None
    traceback = error.__traceback__
    while traceback is not None:
        if _is_plugin(traceback.tb_frame.f_code.co_filename):
            found = traceback.tb_frame, traceback.tb_lineno
        traceback = traceback.tb_next
    if found is None:
        return None
    file = found[0].f_code.co_filename
    return PluginError(_FILES.get(file, file), found[1], _text(error))


def definition(method: object) -> tuple[str, int] | None:
    """Return file and line of a plug-in's method; None if it is not defined by a plug-in."""
    code = method.__code__ if isinstance(method, FunctionType) else None
    if code is None or not _is_plugin(code.co_filename):
        return None
    return _FILES.get(code.co_filename, code.co_filename), code.co_firstlineno


def blaming(method: object, text: object) -> str:
    """Return an error's text with file and line of the method that caused it, if a plug-in defines that."""
    place = definition(method)
    return str(text) if place is None else f"{text}; see {place[0]}:{place[1]}"


def _text(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, Unexpected):
        return f"{text}; layouts should list what is sent"
    if isinstance(error, P2pflError | OptionErrors):
        return text
    hint = ""
    if isinstance(error, ModuleNotFoundError):
        hint = "; install it, or put it beside the plug-in"
    return f"{type(error).__name__}: {text}{hint}" if text else type(error).__name__


@contextmanager
def logging_warnings(log: logging.Logger) -> Iterator[None]:
    """Log warnings about plug-ins, e.g. that a coroutine is not awaited."""
    show = warnings.showwarning

    def showwarning(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if _is_plugin(filename):
            log.warning("%s:%d: %s: %s", _FILES.get(filename, filename), lineno, category.__name__, message)
        else:
            show(message, category, filename, lineno, file, line)

    warnings.showwarning = showwarning
    try:
        yield
    finally:
        warnings.showwarning = show


def _is_plugin(file: str) -> bool:
    return file in _FILES or any(file == place or file.startswith(f"{place}/") for place in INSTALLED)


@contextmanager
def naming_lines() -> Iterator[None]:
    """Turn an unexpected exception that a plug-in raises inside into a PluginError with its file and line."""
    try:
        yield
    except PluginError as error:
        raise located(error) or error from error.__cause__
    except Unexpected as error:  # a simulated neighbor refuses the message
        raise located(error) or error from error
    except (P2pflError, OptionErrors):
        raise
    except (Exception, SystemExit) as error:
        if (found := located(error)) is not None:
            raise found from error
        raise
