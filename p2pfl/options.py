"""Named things with parameters: what stands behind ``{name: ring, ...}`` in a run file.

An :class:`Options` subclass is a frozen dataclass whose fields are the parameters; the string under a field is
its note. A :class:`Table` maps the names that a run file may use to the things they name. Both know how to say
what is known when something else was asked for.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

T = TypeVar("T")
OptionsT = TypeVar("OptionsT", bound="Options")

Loc = tuple[str | int, ...]


class Section(BaseModel):
    """A mapping of the run file with a fixed set of keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


@dataclass(frozen=True)
class Options:
    """Base of every group of parameters that a run file can set.

    ``PRESETS`` maps the values of a field called ``preset`` to the defaults which that preset changes; keys
    that the run file gives explicitly win over the preset.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    @classmethod
    def known(cls) -> tuple[str, ...]:
        return tuple(field.name for field in dataclasses.fields(cls))

    @classmethod
    def parse(cls: type[OptionsT], given: Mapping[str, Any]) -> OptionsT:
        """Build the options from a mapping. Raises OptionErrors, which lists every problem found."""
        preset = given.get("preset")
        values = {**(cls.PRESETS.get(preset, {}) if isinstance(preset, str) else {}), **given}
        try:
            return TypeAdapter(cls).validate_python(values)
        except ValidationError as error:
            raise OptionErrors(explain(error, cls)) from None

    def to_dict(self) -> dict[str, Any]:
        """The parameters as plain YAML-able values, in the order of declaration."""
        plain: dict[str, Any] = TypeAdapter(type(self)).dump_python(self, mode="json")
        return plain


class OptionErrors(ValueError):
    """Every problem found in one group of options, as (path below the group, message)."""

    def __init__(self, problems: Iterable[tuple[Loc, str]]) -> None:
        self.problems = list(problems)
        super().__init__("; ".join(f"{'.'.join(map(str, loc))}: {text}" for loc, text in self.problems))


@dataclass(frozen=True)
class Note:
    """One line of documentation about one parameter."""

    name: str
    type: str
    default: Any
    text: str


def notes(options: type[Options]) -> list[Note]:
    """Name, type, default and note of each parameter, in the order of declaration."""
    texts: dict[str, str] = {}
    whole = TypeAdapter(options).json_schema()
    types = {name: _in_words(one, whole.get("$defs", {})) for name, one in whole.get("properties", {}).items()}
    for ancestor in reversed(options.__mro__):  # each finds the docstrings of its own fields only
        if issubclass(ancestor, Options):
            for name, described in TypeAdapter(ancestor).json_schema().get("properties", {}).items():
                if "description" in described:
                    texts[name] = " ".join(described["description"].split())
    result = []
    for field in dataclasses.fields(options):
        if field.default is not dataclasses.MISSING:
            default: Any = field.default
        elif field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        else:
            default = "(required)"
        result.append(Note(field.name, types[field.name], default, texts.get(field.name, "")))
    return result


class Table(Mapping[str, T], Generic[T]):
    """Names that a run file may use, and what they name. ``what`` is the word for an entry in messages."""

    def __init__(self, what: str, entries: Mapping[str, T]) -> None:
        self.what = what
        self._entries = dict(entries)

    def __getitem__(self, name: str) -> T:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, name: str) -> T:
        """The entry called ``name``. Raises OptionErrors that lists the known names and the nearest one."""
        try:
            return self._entries[name]
        except KeyError:
            raise OptionErrors([(("name",), unknown(name, self._entries))]) from None


def unknown(found: object, known: Iterable[str]) -> str:
    """``unknown 'mapel'; known: local, dpsgd, mapl; did you mean 'mapl'?``"""
    names = list(known)
    text = f"unknown {found!r}; known: {', '.join(names) or '(none)'}"
    close = difflib.get_close_matches(str(found), names, n=1)
    return f"{text}; did you mean {close[0]!r}?" if close else text


MISSING = "missing; it has no default"

_SHOULD_BE = {
    **dict.fromkeys(("int_type", "int_parsing", "int_parsing_size", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("tuple_type", "list_type"), "a list"),
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "a mapping of keys to values"),
    "string_type": "text; quotes make text of it",
    "path_type": "a path",
}
"""What pydantic expected, by the type of its error, where its own words speak of Python."""


def explain(error: ValidationError, options: type[Options] | Iterable[str]) -> list[tuple[Loc, str]]:
    """A pydantic error in our own words: (path, what was found and what is expected) per problem."""
    known = options.known() if isinstance(options, type) else tuple(options)
    problems = []
    for item in error.errors(include_url=False):
        loc, kind, found, context = item["loc"], item["type"], item["input"], item.get("ctx", {})
        if kind in ("extra_forbidden", "unexpected_keyword_argument"):
            text = unknown_key(loc[-1], known) if len(loc) == 1 else "unknown key"
        elif kind == "invalid_key":
            text = "a key should be text; quotes make text of it"
        elif kind in ("missing", "missing_argument"):
            text = MISSING
        elif kind == "literal_error":
            text = unknown(found, re.findall("'([^']*)'", context["expected"]))
        else:
            if kind in _SHOULD_BE:
                text = f"should be {_SHOULD_BE[kind]}"
            elif kind == "too_long":
                text = f"should have at most {context['max_length']} items"
            else:
                text = item["msg"].removeprefix("Value error, ").removeprefix("Input ")
            text += f" (found {_short(found)})"
        problems.append((loc, text))
    return problems


def unknown_key(key: object, known: Iterable[str]) -> str:
    return unknown(key, known).replace("unknown ", "unknown key ", 1)


def _short(value: object, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _in_words(schema: Mapping[str, Any], known: Mapping[str, Any]) -> str:
    """What a JSON schema takes, as one would write it into a run file: ``int > 0 | null``, ``l1 | l2``."""
    if "$ref" in schema:
        return _in_words(known[schema["$ref"].rpartition("/")[2]], known)
    if isinstance(schema.get("type"), list):
        return " | ".join(_in_words({**schema, "type": one}, known) for one in schema["type"])
    if "anyOf" in schema:
        return " | ".join(_in_words(one, known) for one in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return " | ".join(map(str, schema.get("enum", [schema.get("const")])))
    if "prefixItems" in schema:
        return f"[{', '.join(_in_words(one, known) for one in schema['prefixItems'])}]"
    if schema.get("type") in ("integer", "number"):
        return _range("int" if schema["type"] == "integer" else "float", schema)
    if schema.get("type") == "array":
        return f"list of {_in_words(schema.get('items', {}), known)}"
    plain = {"boolean": "bool", "string": "text", "object": "mapping", "null": "null"}
    return str(schema.get("format") or plain.get(schema.get("type", ""), "anything"))


def _range(number: str, schema: Mapping[str, Any]) -> str:
    above = [
        f"{schema[key]:g} {sign} " for key, sign in (("minimum", "<="), ("exclusiveMinimum", "<")) if key in schema
    ]
    below = [
        f" {sign} {schema[key]:g}" for key, sign in (("maximum", "<="), ("exclusiveMaximum", "<")) if key in schema
    ]
    if above and not below:  # the number first
        bound, sign = above[0].split()
        return f"{number} {sign.replace('<', '>')} {bound}"
    return "".join([*above, number, *below])
