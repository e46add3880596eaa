"""Named things with parameters: what ``{name: ring, ...}`` in a run file is parsed into.

An :class:`Options` subclass is a frozen dataclass whose fields are the parameters; the string under a field is
its note. Errors list the known names.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    TypeAdapter,
    ValidationError,
)

OptionsT = TypeVar("OptionsT", bound="Options")

Loc = tuple[str | int, ...]


# ---- groups of parameters ------------------------------------------------------------------------------------


class Section(BaseModel):
    """A mapping of the run file with a fixed set of keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


def _key(field_name: str) -> str:
    """Return the key of a field in a run file."""
    return field_name.removesuffix("_")


@dataclass(frozen=True)
class Options:
    """Base of every group of parameters that a run file can set.

    ``PRESETS`` maps the values of a field called ``preset`` to the defaults that each preset changes; keys
    given explicitly in the run file take precedence over the preset. A field such as ``class_``, whose name is a
    keyword of Python, is the key ``class``.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, alias_generator=_key
    )
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    @classmethod
    def known(cls) -> tuple[str, ...]:
        return tuple(_key(field.name) for field in dataclasses.fields(cls))

    @classmethod
    def parse(cls: type[OptionsT], given: Mapping[str, Any], base: Path | None = None) -> OptionsT:
        """Build the options from a mapping.

        Args:
            base: the folder of the run file, where relative paths start; by default the working directory.

        Raises:
            OptionErrors: with every problem found.
        """
        preset = given.get("preset")
        values = {**(cls.PRESETS.get(preset, {}) if isinstance(preset, str) else {}), **given}
        try:
            return _adapter(cls).validate_python(values, context={"base": base})
        except ValidationError as error:
            raise OptionErrors(explain(error, lambda path: cls.known())) from None

    def to_dict(self, *, portable: bool = False) -> dict[str, Any]:
        """Return the parameters as plain YAML-able values, in the order of declaration.

        Args:
            portable: of paths only the last part, which is the same on all hosts.
        """
        plain: dict[str, Any] = _adapter(type(self)).dump_python(
            self, mode="json", by_alias=True, context={"portable": portable}
        )
        return plain


_ADAPTERS: dict[type[Any], TypeAdapter[Any]] = {}
_BUILDING = threading.Lock()
"""Docstrings are read by parsing source, which Python 3.11 cannot do in two threads at once."""


def _adapter(options: type[OptionsT]) -> TypeAdapter[OptionsT]:
    """Return the class's pydantic schema, which takes milliseconds to build: once per class."""
    with _BUILDING:
        if options not in _ADAPTERS:
            _ADAPTERS[options] = TypeAdapter(options)
        return _ADAPTERS[options]


class OptionProblem(NamedTuple):
    """One problem in a group of options.

    Attributes:
        path: of the key, below the group.
        message: what was found and what is allowed.
        missing: whether a required key was not given.
        suggestion: of an unknown key: the known one that was probably meant.
    """

    path: Loc
    message: str
    missing: bool = False
    suggestion: str | None = None


class OptionErrors(ValueError):
    """Every problem found in one group of options."""

    def __init__(self, problems: Iterable[OptionProblem | tuple[Loc, str]]) -> None:
        self.problems = [OptionProblem(*problem) for problem in problems]
        lines = (f"{'.'.join(map(str, problem.path))}: {problem.message}" for problem in self.problems)
        super().__init__("; ".join(lines))


@dataclass(frozen=True)
class Note:
    """The documentation of one parameter."""

    name: str
    type: str
    default: Any
    text: str


def notes(options: type[Options]) -> list[Note]:
    """Name, type, default and note of each parameter, in the order of declaration."""
    texts: dict[str, str] = {}
    whole = _adapter(options).json_schema()
    types = {name: _type_text(schema, whole.get("$defs", {})) for name, schema in whole.get("properties", {}).items()}
    for ancestor in reversed(options.__mro__):  # a schema has only the docstrings of the class's own fields
        if issubclass(ancestor, Options):
            for name, schema in _adapter(ancestor).json_schema().get("properties", {}).items():
                if "description" in schema:
                    texts[name] = " ".join(schema["description"].split())
    result = []
    for field in dataclasses.fields(options):
        if field.default is not dataclasses.MISSING:
            default: Any = field.default
        elif field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        else:
            default = "(required)"
        key = _key(field.name)
        result.append(Note(key, types[key], default, texts.get(key, "")))
    return result


def unknown(found: object, known: Iterable[str], what: str = "") -> str:
    """``unknown 'mapel'; known: local, dpsgd, mapl; did you mean 'mapl'?``"""
    names = list(known)
    text = f"unknown {what} {found!r}" if what else f"unknown {found!r}"
    text += f"; known: {', '.join(names) or '(none)'}"
    return text + did_you_mean(found, names)


def did_you_mean(found: object, known: Iterable[str]) -> str:
    """Return ``; did you mean 'mapl'?``, or nothing if no known name is close."""
    suggestion = closest(found, known)
    return f"; did you mean {suggestion!r}?" if suggestion else ""


ALSO_CALLED: Mapping[str, str] = {
    "batch_size": "batch",
    "clients": "peers",
    "epochs": "local_epochs",
    "gpu": "cuda",
    "k": "degree",
    "learning_rate": "lr",
    "min_partition_size": "least",
    "model": "models",
    "nodes": "peers",
    "num_clients": "peers",
    "num_nodes": "peers",
    "topology": "graph",
}
"""{word of other programs and papers: key of a run file}"""


def closest(found: object, known: Iterable[str]) -> str | None:
    """Return the known name that ``found`` probably means, by a misspelling or another word."""
    names = list(known)
    synonym = ALSO_CALLED.get(str(found))
    return synonym if synonym in names else next(iter(difflib.get_close_matches(str(found), names, n=1)), None)


_EXPECTED = {
    **dict.fromkeys(("int_type", "int_parsing", "int_parsing_size", "int_from_float"), "an integer"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("tuple_type", "list_type"), "a list"),
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "a mapping"),
    "string_type": "a string; put it in quotes",
    "path_type": "a path",
}
"""What was expected, by pydantic's error type, where pydantic's message names Python types."""


_BRANCH = re.compile(
    r"int|float|str|bool|none|constrained-(int|float|str)|(tuple|list|dict|literal|nullable|union|lax-or-strict|"
    r"function-(before|after|wrap|plain))\[.*\]"
)
"""How pydantic names one of several types of a key, in the path of an error."""


def explain(
    error: ValidationError,
    known_keys: Callable[[Loc], Iterable[str]],
    unit_of: Callable[[Loc], str] = lambda path: "",
) -> list[OptionProblem]:
    """Translate a pydantic error: what was found and what is expected, once per key.

    Args:
        known_keys: the keys allowed beside the key at a path.
        unit_of: of the key at a path: ``seconds``; empty if it has none.
    """
    problems = []
    choices: dict[Loc, dict[str, list[Any]]] = {}
    """The errors of a key that may have several types, by type."""
    for item in error.errors(include_url=False):
        path = item["loc"]
        branch = next((depth for depth, part in enumerate(path) if _BRANCH.fullmatch(str(part))), None)
        if branch is not None and branch > 0 and isinstance(path[branch], str):
            below = {**item, "loc": path[:branch] + path[branch + 1 :]}
            choices.setdefault(path[:branch], {}).setdefault(str(path[branch]), []).append(below)
        elif item["type"] != "too_short" or len(item["input"]) < item["ctx"]["min_length"]:  # else an item is wrong
            problems.append(_explained(item, known_keys, unit_of))
    for path, types in choices.items():
        # Of a list with a wrong item, only the item is reported, not that the list is not a number.
        inside = next((found for found in types.values() if len(found[0]["loc"]) > len(path)), None)
        if inside is not None:
            problems.extend(_explained(item, known_keys, unit_of) for item in inside)
            continue
        given = next(iter(types.values()))[0]["input"]
        texts = dict.fromkeys(_expected(item, unit_of(path)) for found in types.values() for item in found)
        first, *others = (text.removesuffix("; put it in quotes") for text in texts)
        text = ", or ".join([first, *(other.removeprefix("should be ") for other in others)])
        problems.append(OptionProblem(path, f"{text} (found {_short(given)})"))
    return problems


def _explained(item: Any, known_keys: Callable[[Loc], Iterable[str]], unit_of: Callable[[Loc], str]) -> OptionProblem:
    path, kind, found = item["loc"], item["type"], item["input"]
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        known = list(known_keys(path))
        return OptionProblem(path, unknown(path[-1], known, "key"), suggestion=closest(path[-1], known))
    if kind in ("missing", "missing_argument"):
        return OptionProblem(path, "missing; it has no default", missing=True)
    if kind == "invalid_key":
        return OptionProblem(path, "a key should be a string; put it in quotes")
    if kind == "literal_error":
        return OptionProblem(path, unknown(found, re.findall("'([^']*)'", item["ctx"]["expected"])))
    return OptionProblem(path, f"{_expected(item, unit_of(path))} (found {_short(found)})")


def _expected(item: Any, unit: str) -> str:
    """Return what a value should be."""
    kind, context = item["type"], item.get("ctx", {})
    if unit and _EXPECTED.get(kind) in ("an integer", "a number"):
        return f"should be a number of {unit}"
    if kind in _EXPECTED:
        return f"should be {_EXPECTED[kind]}"
    if kind in ("too_long", "too_short"):
        bound, count = ("most", context["max_length"]) if kind == "too_long" else ("least", context["min_length"])
        return f"should have at {bound} {count} {'item' if count == 1 else 'items'}"
    return str(item["msg"]).removeprefix("Value error, ").removeprefix("Input ")


def _short(value: object, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _type_text(schema: Mapping[str, Any], known: Mapping[str, Any]) -> str:
    """Return the values that a JSON schema allows, as shown to users: ``int > 0 | null``, ``l1 | l2``."""
    if "$ref" in schema:
        return _type_text(known[schema["$ref"].rpartition("/")[2]], known)
    if isinstance(schema.get("type"), list):
        return " | ".join(_type_text({**schema, "type": kind}, known) for kind in schema["type"])
    if "anyOf" in schema:
        return " | ".join(_type_text(item, known) for item in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return " | ".join(map(str, schema.get("enum", [schema.get("const")])))
    if "prefixItems" in schema:
        return f"[{', '.join(_type_text(item, known) for item in schema['prefixItems'])}]"
    if schema.get("type") in ("integer", "number"):
        return _range("int" if schema["type"] == "integer" else "float", schema)
    if schema.get("type") == "array":
        return f"list of {_type_text(schema.get('items', {}), known)}"
    plain = {"boolean": "bool", "string": "text", "object": "mapping", "null": "null"}
    return str(schema.get("format") or plain.get(schema.get("type", ""), "anything"))


def _range(number: str, schema: Mapping[str, Any]) -> str:
    above = [
        f"{schema[key]:g} {sign} " for key, sign in (("minimum", "<="), ("exclusiveMinimum", "<")) if key in schema
    ]
    below = [
        f" {sign} {schema[key]:g}" for key, sign in (("maximum", "<="), ("exclusiveMaximum", "<")) if key in schema
    ]
    if above and not below:  # "int > 0" rather than "0 < int"
        bound, sign = above[0].split()
        return f"{number} {sign.replace('<', '>')} {bound}"
    return "".join([*above, number, *below])
