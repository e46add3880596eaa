"""Plain values from YAML, ``--set`` flags and environment variables, with the position that each key came from."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import yaml

from p2pfl.errors import Problem, RunFileError
from p2pfl.options import Loc, OptionProblem

TRANSPORT_VARIABLES = {
    "P2PFL_HOST": "host",
    "P2PFL_PORT": "port",
    "P2PFL_ADDRESS": "address",
    "P2PFL_KEYS": "keys",
}
"""Environment variables that describe this host, and the keys of ``transport`` that they override.
P2PFL_ADDRESS_7 also overrides the address of peer 7. Paths in them start from the working directory."""


class RunFileLoader(yaml.SafeLoader):
    """Reads plain scalars as YAML 1.2 does, where PyYAML implements YAML 1.1.

    1e-4 is a number and not a string, and 016 is sixteen; ``off``, ``no``, 1:30 and 2026-01-31 are strings. (pydantic
    still accepts ``no`` for false where a key is a boolean.)
    """

    def construct_integer(self, node: yaml.ScalarNode) -> int:
        digits = node.value.replace("_", "").lower()
        return int(digits, 0 if digits.lstrip("+-")[:2] in ("0b", "0o", "0x") else 10)


_REPLACED = ("bool", "float", "int", "timestamp")
RunFileLoader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in entries if tag.rpartition(":")[2] not in _REPLACED]
    for first, entries in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
RunFileLoader.add_constructor("tag:yaml.org,2002:int", RunFileLoader.construct_integer)
_INTEGERS = (
    "tag:yaml.org,2002:int",
    re.compile(r"^[-+]?(0b[01_]+|0o[0-7_]+|0x[0-9a-fA-F_]+|\d[\d_]*)$", re.ASCII),
    list("-+0123456789"),
)
RunFileLoader.add_implicit_resolver(*_INTEGERS)
_FLOATS = (
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*([eE][-+]?\d+)|\d[\d_]*\.[\d_]*|\.\d[\d_]*([eE][-+]?\d+)?|\.inf|\.nan)$"),
    list("-+0123456789."),
)
RunFileLoader.add_implicit_resolver(*_FLOATS)
RunFileLoader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)


class _Dumper(yaml.SafeDumper):
    """Also quotes strings that only ``RunFileLoader`` reads as something else, such as "1e5" and "089"."""


_Dumper.add_implicit_resolver(*_INTEGERS)
_Dumper.add_implicit_resolver(*_FLOATS)


def to_text(plain: Mapping[str, Any]) -> str:
    """Return plain values as a run file that reads back as the same values."""
    return yaml.dump(plain, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=100)


class _Position(NamedTuple):
    """Where a key was set: ``file:line``, a ``--set`` flag or an environment variable."""

    text: str
    line: float = math.inf


class Source:
    """Reads one run file and its overrides, and locates problems in them.

    Args:
        name: of the file, for error messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._positions: dict[tuple[str, ...], _Position] = {}

    def read(self, text: str) -> Any:
        """Parse the file's text. Raises RunFileError."""
        try:
            loader = RunFileLoader(text)
            node = loader.get_single_node()
            self._record_positions(node, ())
            return loader.construct_document(node) if node is not None else None
        except yaml.MarkedYAMLError as error:
            line, problem = error.problem_mark.line if error.problem_mark else 0, error.problem
            before = error.context_mark.line if error.context_mark else line - 1
            if problem in ("could not find expected ':'", "mapping values are not allowed here") and before >= 0:
                suspect = text.splitlines()[before].strip()  # a missing space is noticed in the next line
                if re.match(r"[\w.-]+:[^\s/]", suspect):
                    line, problem = before, f"a space is missing after the colon of {suspect!r}"
            raise _error(self._at(line + 1), (), f"invalid YAML: {problem}") from None
        except (yaml.YAMLError, ValueError) as error:
            raise _error(_Position(self.name), (), f"invalid YAML: {' '.join(str(error).split())}") from None
        except RecursionError:
            raise _error(_Position(self.name), (), "nested too deeply") from None

    def _record_positions(self, node: yaml.Node | None, path: tuple[str, ...]) -> None:
        if isinstance(node, yaml.MappingNode):
            lines: dict[str, int] = {}
            for key, value in node.value:
                line, name = key.start_mark.line + 1, str(key.value)
                if name in lines:
                    raise _error(self._at(line), (*path, name), f"duplicate key, first given in line {lines[name]}")
                self._check_decimal(node.value[len(lines) - 1] if lines else None, key, value, path)
                lines[name] = line
                self._positions[(*path, name)] = self._at(line)
                self._record_positions(value, (*path, name))
        elif isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self._positions[(*path, str(index))] = self._at(item.start_mark.line + 1)
                self._record_positions(item, (*path, str(index)))

    def _check_decimal(
        self, before: tuple[yaml.Node, yaml.Node] | None, key: yaml.Node, value: yaml.Node, path: tuple[str, ...]
    ) -> None:
        """Refuse ``{lr: 0,05}``, which is a mapping with the keys ``lr`` and 5."""
        if before is None or value.value != "" or before[1].end_mark.index + 1 != key.start_mark.index:
            return
        number = f"{before[1].value},{key.value}"
        if re.fullmatch(r"[-+]?\d+,\d+", number):
            text = f"{number!r} is not a number; use a decimal point: {number.replace(',', '.')}"
            raise _error(self._at(key.start_mark.line + 1), (*path, str(before[0].value)), text)

    def _at(self, line: int) -> _Position:
        return _Position(f"{self.name}:{line}", line)

    def apply_environment(self, tree: dict[str, Any], environment: Mapping[str, str]) -> None:
        for name, text in sorted(environment.items()):
            peer = name.removeprefix("P2PFL_ADDRESS_")
            if name in TRANSPORT_VARIABLES:
                value = os.path.abspath(os.path.expanduser(text)) if name == "P2PFL_KEYS" else text
                self._put(tree, ("transport", TRANSPORT_VARIABLES[name]), value, _Position(name))
            elif peer != name:
                self._put(tree, ("transport", "hosts", peer), text, _Position(name))

    def apply_set(self, tree: dict[str, Any], assignment: str) -> None:
        """Apply one ``--set dotted.key=YAML value``. Raises RunFileError."""
        position = _Position(f"--set {assignment}")
        dotted, equals, text = assignment.partition("=")
        path = tuple(dotted.split("."))
        if not equals or not all(path):
            raise _error(position, (), "expected key=value or section.key=value")
        try:
            value = yaml.load(text, Loader=RunFileLoader)  # noqa: S506, TID251  # derived from SafeLoader
        except (yaml.YAMLError, ValueError, RecursionError):
            raise _error(position, path, f"the value is invalid YAML: {text!r}") from None
        self._put(tree, path, value, position)

    def apply_values(self, tree: dict[str, Any], values: Mapping[str, Any]) -> None:
        """Apply {dotted key: value}. Raises RunFileError."""
        for dotted, value in values.items():
            self._put(tree, tuple(dotted.split(".")), value, _Position(f"{dotted}={value!r}"))

    def _put(self, tree: dict[str, Any], path: tuple[str, ...], value: Any, position: _Position) -> None:
        section: dict[str, Any] = tree
        for depth, part in enumerate(path[:-1], start=1):
            child = section.get(part)
            if child is None:
                child = section[part] = {}
            elif isinstance(child, str):
                # `algorithm: mapl` with --set algorithm.lr=... means {name: mapl, lr: ...}
                child = section[part] = {"name": child}
                if moved := self._positions.pop(path[:depth], None):
                    self._positions[*path[:depth], "name"] = moved
            if not isinstance(child, dict):
                raise _error(position, path, f"{part!r} is not a section")
            section = child
        section[path[-1]] = value
        for key in [key for key in self._positions if key[: len(path)] == path]:
            del self._positions[key]
        self._positions[path] = position

    def locate(self, loc: Loc, message: str) -> Problem:
        """A problem with the position of its key, else of the last key below it, else of the nearest section."""
        path = tuple(map(str, loc))
        return Problem(self._position(path).text, ".".join(path), message)

    def _position(self, path: tuple[str, ...]) -> _Position:
        below = [key for key in self._positions if key[: len(path)] == path]
        above = [path[:length] for length in range(len(path) - 1, 0, -1) if path[:length] in self._positions]
        if path in self._positions:
            return self._positions[path]
        nearest = below[-1:] or above
        return self._positions[nearest[0]] if nearest else _Position(self.name)

    def error(self, problems: Iterable[OptionProblem]) -> RunFileError:
        """Return all problems by line; problems without a line come last.

        A required key that is missing only because it was misspelled is not reported twice.
        """
        problems = list(problems)
        meant = {(*found.path[:-1], found.suggestion) for found in problems if found.suggestion is not None}
        shown = [found for found in problems if not (found.missing and found.path in meant)]
        shown.sort(key=lambda found: self._position(tuple(map(str, found.path))).line)
        return RunFileError([self.locate(found.path, found.message + self._kept(found)) for found in shown])

    def _kept(self, found: OptionProblem) -> str:
        """A hint if the file's key is unknown only because an override has changed the name of its section."""
        *section, _ = map(str, found.path or ("",))
        key = self._positions.get((*section, "name"))
        if not found.message.startswith("unknown key ") or key is None or math.isfinite(key.line):
            return ""
        if math.isinf(self._position(tuple(map(str, found.path))).line):
            return ""
        option, dotted = "--set " if key.text.startswith("--set ") else "", ".".join(section)
        name = key.text.partition("=")[2]
        whole = f"{option}{dotted}={name}, or {option}'{dotted}={{name: {name}, …}}',"
        return f"; {key.text} keeps the other keys of the file's `{dotted}`: {whole} replaces them"


def _error(position: _Position, path: tuple[str, ...], message: str) -> RunFileError:
    return RunFileError([Problem(position.text, ".".join(path), message)])
