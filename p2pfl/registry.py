"""Tables of what a run file can name, and decorators that add to them, for built-ins and plug-ins alike.

A package puts both beside the base class of a kind of thing:

    GRAPHS: Table[type[Graph]] = Table("graph")
    graph = options_decorator(GRAPHS, Graph)

and ``p2pfl/plugins/__init__.py`` shows them to users. What plug-ins register is checked: a mistake raises PluginError
with file and line. For built-ins tests do that, so that importing them takes no longer.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Generic, TypeVar, get_type_hints

from pydantic import TypeAdapter

from p2pfl.errors import PluginError
from p2pfl.options import OptionErrors, Options, notes, unknown

T = TypeVar("T")
C = TypeVar("C", bound=type[Any])


class Table(Mapping[str, T], Generic[T]):
    """The names that a run file may use for one kind of thing, and their values.

    Args:
        kind: of thing, e.g. ``graph``: the name of the decorator that adds to the table.
        entries: names and values to begin with.
        family: maps a name outside ``entries`` to its value, or None if it is unknown: for names with numbers in
            them. Iterating over the table does not list these.
    """

    def __init__(
        self,
        kind: str,
        entries: Mapping[str, T] | None = None,
        family: Callable[[str], T | None] = lambda name: None,
    ) -> None:
        self.kind = kind
        self._entries = dict(entries or {})
        self.defined: dict[str, str] = {}
        """What defines each entry of a plug-in: ``my_method.Mine``."""
        self._family = family

    def __getitem__(self, name: str) -> T:
        if name in self._entries:
            return self._entries[name]
        if (value := self._family(name)) is None:
            raise KeyError(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def registered(self) -> dict[str, T]:
        """The entries that plug-ins have added."""
        return {name: self._entries[name] for name in self.defined}

    def register(self, name: str, value: T, defined: str, *, builtin: bool = False) -> None:
        """Add an entry. One with the same name and definition is replaced: a cell of a notebook may run again.

        Args:
            defined: what defines it: ``my_method.Mine``.
            builtin: no plug-in registers it.

        Raises:
            OptionErrors: the name is taken.
        """
        if name in self and self.defined.get(name) != defined:
            owner = f"registered by {self.defined[name]}" if name in self.defined else "built in"
            raise OptionErrors([((), f"the name {name!r} is taken: it is {owner}; choose another")])
        self._entries[name] = value
        if not builtin:
            self.defined[name] = defined

    def unregister(self, name: str) -> None:
        """Remove an entry of a plug-in."""
        if self.defined.pop(name, None) is not None:
            del self._entries[name]

    def sort(self) -> None:
        """Order the entries by name."""
        self._entries = dict(sorted(self._entries.items()))

    def find(self, name: str) -> T:
        """Look up ``name``. Raises OptionErrors with the known names and the closest one."""
        try:
            return self[name]
        except KeyError:
            raise OptionErrors([(("name",), unknown(name, self._entries))]) from None


def parse_section(table: Table[Any], what: str, section: Any, base: Path | None = None) -> tuple[str, Any]:
    """Parse a named thing among the parameters of another one: a name, or a mapping with a name and parameters.

    Args:
        what: it is, for errors.
        base: the folder of the run file, where relative paths start.

    Returns:
        The name, and the options.

    Raises:
        ValueError: it is something else; OptionErrors if the name or a parameter is wrong.
    """
    given = {"name": section} if isinstance(section, str) else section
    if not isinstance(given, Mapping) or not isinstance(name := given.get("name"), str):
        raise ValueError(f"should be {what}: a name, or a mapping with a name and its parameters")
    return name, table.find(name).parse({key: value for key, value in given.items() if key != "name"}, base)


def discover(package: str, *tables: Table[Any]) -> None:
    """Import all modules of a package, which add to these tables, and sort them by name."""
    for module in pkgutil.iter_modules(sys.modules[package].__path__):
        importlib.import_module(f"{package}.{module.name}")
    for table in tables:
        table.sort()


# ---- decorators ----------------------------------------------------------------------------------------------


def options_decorator(
    table: Table[Any], base: type[Options], prepare: Callable[[Any], None] = lambda cls: None
) -> Callable[[str], Callable[[C], C]]:
    """Return a decorator ``@graph("my-graph")`` for subclasses of ``base``, whose fields a run file sets.

    Args:
        prepare: is called with a plug-in's class.
    """

    def decorator(name: str) -> Callable[[C], C]:
        check_name(name, table.kind)

        def register_class(cls: C) -> C:
            if by_plugin():
                check_class(cls, base)
                check_options(cls)
                prepare(cls)
            register(table, name, cls, cls)
            return cls

        return register_class

    return decorator


def register(table: Table[Any], name: str, value: Any, definition: Any = None) -> None:
    """Register what a class or function defines, or the module that calls the decorator."""
    if hasattr(definition, "__qualname__"):
        defined = f"{definition.__module__}.{definition.__qualname__}"
    else:
        defined = str(_user_frame().f_globals.get("__name__"))
    try:
        table.register(name, value, defined, builtin=not by_plugin())
    except OptionErrors as errors:
        raise mistake(errors.problems[0].message) from None


# ---- checks --------------------------------------------------------------------------------------------------


def check_name(name: object, kind: str) -> None:
    if not isinstance(name, str):
        raise mistake(f'write the name: @plugins.{kind}("my-{kind}")')
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9+_-]*", name):
        raise mistake(f"{name!r} is not a name: it should consist of letters, digits, '-', '_' and '+'")


def check_class(cls: Any, base: type[Any]) -> None:
    """Check that a class derives from ``base``, and that its methods can be called like the methods of ``base``.

    It must define the abstract ones. A base that lists others as ``required`` takes the place of ``base``.
    """
    if not (inspect.isclass(cls) and issubclass(cls, base)):
        shown = getattr(cls, "__name__", cls)
        raise mistake(f"{shown} must be a class derived from {base.__module__}.{base.__name__}")
    owner: type[Any] = next((ancestor for ancestor in cls.__mro__ if "required" in vars(ancestor)), base)
    for method, parameters in _called(owner).items():
        if callable(defined := getattr(cls, method, None)) and defined is not getattr(owner, method):
            check_call(defined, parameters)
    required: tuple[str, ...] = getattr(owner, "required", ())
    inherited = [method for method in required if getattr(cls, method) is getattr(owner, method)]
    if missing := inherited or sorted(getattr(cls, "__abstractmethods__", ())):
        text = ", ".join(f"{method}({_called(cls)[method]})" for method in missing)
        raise mistake(f"{cls.__name__} must define {text}")


def _called(cls: type[Any]) -> dict[str, str]:
    """Return the parameters of the public methods of a class, and of its constructor unless that is generated."""
    found = {}
    for name, method in inspect.getmembers(cls, inspect.isfunction):
        if not name.startswith("_") or (name == "__init__" and not dataclasses.is_dataclass(cls)):
            parameters = inspect.signature(method).parameters.values()
            found[name] = ", ".join(p.name for p in parameters if p.default is p.empty and p.kind < p.VAR_POSITIONAL)
    return found


def check_options(cls: type[Options]) -> None:
    """Check that the fields of a class can be read from a run file, and that their defaults are allowed."""
    annotations = inspect.get_annotations(cls).items()
    own = [name for name, kind in annotations if "ClassVar[" not in str(kind) and not name.startswith("__")]
    fields = {field.name for field in dataclasses.fields(cls)}
    if "__dataclass_fields__" not in vars(cls) and not fields.issuperset(own):
        raise mistake(f"{cls.__name__} has fields, so it needs the decorator @dataclass(frozen=True)")
    try:
        notes(cls)  # also builds the schema, while the names in its annotations are those of this module
    except Exception as error:
        raise mistake(_wrong_type(cls, own, error)) from error
    defaults = {field.name: field.default for field in dataclasses.fields(cls) if field.name in own}
    given = {name: value for name, value in defaults.items() if value is not dataclasses.MISSING}
    try:
        cls.parse({name.removesuffix("_"): value for name, value in given.items()})
    except OptionErrors as errors:
        # A problem without a path concerns several fields, of which the user may have to set some.
        if wrong := [problem for problem in errors.problems if problem.path and not problem.missing]:
            key = ".".join(map(str, wrong[0].path))
            raise mistake(f"{cls.__name__}.{key}: the default {wrong[0].message}") from None


def _wrong_type(cls: type[Options], own: Sequence[str], error: Exception) -> str:
    """Return which field has an unknown type, or a type that a run file cannot hold."""
    try:
        types = get_type_hints(cls, include_extras=True)
    except NameError as unknown:
        return f"{cls.__name__}: the type of a field is unknown: {unknown}"
    for name in own:
        try:
            TypeAdapter(types[name])
        except Exception:
            found = getattr(types[name], "__name__", types[name])
            return (
                f"{cls.__name__}.{name}: {found} is not a type for a run file; use bool, int, float, str, Literal, "
                "tuple, dict or combinations of them"
            )
    return f"{cls.__name__}: its fields are not understood: {' '.join(str(error).split())[:200]}"


def check_call(function: Any, parameters: str, otherwise: str = "") -> None:
    """Check that ``function`` can be called with these positional parameters."""
    if not callable(function):
        raise mistake(f"{function!r} cannot be called; it should be a function of ({parameters})")
    try:
        signature = inspect.signature(function)
        signature.bind(*parameters.split(", "))
    except TypeError:
        kind = getattr(function, "__name__", function)
        text = f"{kind}{signature} should take ({parameters})"
        raise mistake(f"{text}, {otherwise}" if otherwise else text, function) from None


# ---- where mistakes are --------------------------------------------------------------------------------------


def location(function: Any) -> tuple[str, int]:
    """Return file and line of a definition; for a class, of its constructor."""
    code = getattr(function, "__code__", None) or getattr(getattr(function, "__init__", None), "__code__", None)
    return (code.co_filename, code.co_firstlineno) if code is not None else _user()


def mistake(message: str, definition: Any = None) -> PluginError:
    """Return an error at the line of ``definition``, or else of the decorator."""
    code = getattr(definition, "__code__", None)
    file, line = (code.co_filename, code.co_firstlineno) if code is not None else _user()
    return PluginError(file, line, message)


def _user() -> tuple[str, int]:
    """Return file and line of the code that uses a decorator."""
    frame = _user_frame()
    return frame.f_code.co_filename, frame.f_lineno


def by_plugin() -> bool:
    """Return whether a plug-in or the user's program uses the decorator, not a module of this package."""
    return not _is_builtin(_user_frame())


def _user_frame() -> FrameType:
    """Return the frame that uses a decorator, in a plug-in or in a built-in module."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_name != "<module>" and _is_builtin(frame):
        frame = frame.f_back
    return frame


def _is_builtin(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] == __package__
