"""Options and tables: parsing, notes and error messages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pytest
from pydantic import Field, NonNegativeFloat, PositiveInt

from p2pfl.algorithms import ALGORITHMS
from p2pfl.data import AUGMENTATIONS, DATASETS, PARTITIONS
from p2pfl.graphs import GRAPHS
from p2pfl.options import Note, OptionErrors, Options, notes, unknown
from p2pfl.registry import Table


@dataclass(frozen=True)
class Wheel(Options):
    """A typical group of options."""

    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {"racing": {"width": 2.5, "spokes": 12}}

    preset: Literal["everyday", "racing"] = "everyday"
    """Selects defaults."""
    spokes: PositiveInt = 36
    """Number of
    spokes."""
    width: NonNegativeFloat = 4.0
    """In centimeters."""
    sizes: tuple[int, ...] = field(default_factory=lambda: (26, 28))
    """Available sizes."""


@dataclass(frozen=True)
class Spare(Wheel):
    maker: str = ""
    """Manufacturer."""


@dataclass(frozen=True)
class Part(Options):
    number: PositiveInt
    """Has no default."""


def problems(given: Mapping[str, Any], options: type[Options] = Wheel) -> list[tuple[Any, str]]:
    with pytest.raises(OptionErrors) as info:
        options.parse(given)
    return [(problem.path, problem.message) for problem in info.value.problems]


def test_missing_keys_get_defaults() -> None:
    assert Wheel.parse({}) == Wheel()
    assert Wheel.parse({"spokes": 20}) == Wheel(spokes=20)


def test_converts_lists_to_tuples_and_integral_floats_to_int() -> None:
    wheel = Wheel.parse({"sizes": [20, 24], "spokes": 20.0})
    assert wheel.sizes == (20, 24)
    assert type(wheel.spokes) is int


def test_explicit_values_override_a_preset() -> None:
    assert Wheel.parse({"preset": "racing"}) == Wheel("racing", 12, 2.5)
    assert Wheel.parse({"preset": "racing", "spokes": 36}) == Wheel("racing", 36, 2.5)
    assert Wheel.parse({"preset": "everyday"}) == Wheel()


def test_lists_every_problem_with_its_path() -> None:
    assert problems({"spokes": 0, "width": "wide", "sizes": [1, "x"], "color": "red", "preset": "racin"}) == [
        (("preset",), "unknown 'racin'; known: everyday, racing; did you mean 'racing'?"),
        (("spokes",), "should be greater than 0 (found 0)"),
        (("width",), "should be a number (found 'wide')"),
        (("sizes", 1), "should be an integer (found 'x')"),
        (("color",), "unknown key 'color'; known: preset, spokes, width, sizes"),
    ]


def test_missing_required_parameter_is_a_problem() -> None:
    assert problems({}, Part) == [(("number",), "missing; it has no default")]


def test_error_text_is_one_line() -> None:
    with pytest.raises(OptionErrors, match=r"^sizes\.1: should be an integer \(found 'x'\)$"):
        Wheel.parse({"sizes": [1, "x"]})


def test_shortens_long_values_in_messages() -> None:
    ((_, text),) = problems({"width": "w" * 1000})
    assert text == f"should be a number (found '{'w' * 58}…)"


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_rejects_infinity_and_nan(value: float) -> None:
    assert problems({"width": value}) == [(("width",), f"should be a finite number (found {value})")]


def test_options_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Wheel().spokes = 3  # type: ignore[misc]


def test_options_round_trip_through_plain_values() -> None:
    wheel = Wheel("racing", 20, 0.5, (1, 2))
    plain = wheel.to_dict()
    assert plain == {"preset": "racing", "spokes": 20, "width": 0.5, "sizes": [1, 2]}
    assert list(plain) == list(Wheel.known()) == ["preset", "spokes", "width", "sizes"]
    assert Wheel.parse(plain) == wheel


def test_notes_have_name_type_default_and_docstring() -> None:
    assert notes(Wheel) == [
        Note("preset", "everyday | racing", "everyday", "Selects defaults."),
        Note("spokes", "int > 0", 36, "Number of spokes."),
        Note("width", "float >= 0", 4.0, "In centimeters."),
        Note("sizes", "list of int", (26, 28), "Available sizes."),
    ]
    assert notes(Part) == [Note("number", "int > 0", "(required)", "Has no default.")]


@dataclass(frozen=True)
class Rim(Options):
    fraction: Annotated[float, Field(ge=0, lt=1)] = 0.5
    most: Annotated[int, Field(le=9)] | None = None
    pair: tuple[bool, Annotated[float, Field(gt=0, le=1)]] = (True, 1.0)
    path: Path | str = "."


def test_notes_show_types_as_in_a_run_file() -> None:
    assert {note.name: note.type for note in notes(Rim)} == {
        "fraction": "0 <= float < 1",
        "most": "int <= 9 | null",
        "pair": "[bool, 0 < float <= 1]",
        "path": "path | text",
    }


def test_notes_include_inherited_parameters() -> None:
    assert [note.text for note in notes(Spare)] == [*[note.text for note in notes(Wheel)], "Manufacturer."]


# ---- tables ------------------------------------------------------------------------------------------------

TABLE: Table[int] = Table("number", {"one": 1, "two": 2, "three": 3})


def test_table_is_an_ordered_mapping() -> None:
    assert dict(TABLE) == {"one": 1, "two": 2, "three": 3}
    assert list(TABLE) == ["one", "two", "three"]
    assert len(TABLE) == 3
    assert TABLE.find("two") == 2
    assert "four" not in TABLE


def test_table_copies_its_entries() -> None:
    entries = {"one": 1}
    table = Table("number", entries)
    entries["two"] = 2
    assert list(table) == ["one"]


def test_find_reports_known_names_and_the_closest() -> None:
    with pytest.raises(OptionErrors) as info:
        TABLE.find("tow")
    assert info.value.problems == [
        (("name",), "unknown 'tow'; known: one, two, three; did you mean 'two'?", False, None)
    ]


def test_table_with_a_family_of_names_finds_members_that_it_does_not_list() -> None:
    table = Table("number", {"one": 1}, family=lambda name: int(name) if name.isdigit() else None)
    assert table.find("12") == table["12"] == 12
    assert "12" in table
    assert list(table) == ["one"]
    assert "twelve" not in table
    with pytest.raises(OptionErrors, match="unknown 'twelve'; known: one"):
        table.find("twelve")


@pytest.mark.parametrize(
    ("found", "known", "text"),
    [
        ("x", [], "unknown 'x'; known: (none)"),
        (3, ["a"], "unknown 3; known: a"),
        ("mapel", ["local", "mapl"], "unknown 'mapel'; known: local, mapl; did you mean 'mapl'?"),
    ],
)
def test_unknown_lists_known_names(found: object, known: list[str], text: str) -> None:
    assert unknown(found, known) == text
    assert unknown(found, known, "key") == text.replace("unknown", "unknown key", 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("value", [5, -1, "zz", [1], [[1]], {}, {"a": 1}, None], ids=repr)
def test_no_message_names_a_type_of_pydantic_and_no_key_has_two(value: object) -> None:
    hypers = [method.Hyper for method in ALGORITHMS.values()]
    messages = []
    for options in (*hypers, *AUGMENTATIONS.values(), *DATASETS.values(), *GRAPHS.values(), *PARTITIONS.values()):
        for key in options.known():
            found = problems({key: value, "unknown key": 0}, options)
            assert len(dict(found)) == len(found)
            messages += [f"{options.__name__}.{path}: {text}" for path, text in found if path != ("unknown key",)]
    assert messages
    assert not [text for text in messages if re.search(r"constrained|Tuple|tuple|function-|\bint\b|\bstr\b", text)]
