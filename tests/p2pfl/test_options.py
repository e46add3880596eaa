"""Options and tables: the parameters behind a name, their notes, and what is said about what is unknown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import FrozenInstanceError, dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pytest
from pydantic import Field, NonNegativeFloat, PositiveInt

from p2pfl.options import Note, OptionErrors, Options, Table, notes, unknown, unknown_key


@dataclass(frozen=True)
class Wheel(Options):
    """A group of options as the project writes them."""

    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {"racing": {"width": 2.5, "spokes": 12}}

    preset: Literal["everyday", "racing"] = "everyday"
    """Which defaults."""
    spokes: PositiveInt = 36
    """How many
    spokes."""
    width: NonNegativeFloat = 4.0
    """In centimetres."""
    sizes: tuple[int, ...] = field(default_factory=lambda: (26, 28))
    """Those that there are."""


@dataclass(frozen=True)
class Spare(Wheel):
    maker: str = ""
    """Who made it."""


@dataclass(frozen=True)
class Part(Options):
    number: PositiveInt
    """There is no default."""


def problems(given: Mapping[str, Any], options: type[Options] = Wheel) -> list[tuple[Any, str]]:
    with pytest.raises(OptionErrors) as info:
        options.parse(given)
    return info.value.problems


def test_defaults_fill_in_what_is_not_given() -> None:
    assert Wheel.parse({}) == Wheel()
    assert Wheel.parse({"spokes": 20}) == Wheel(spokes=20)


def test_lists_become_tuples_and_whole_floats_integers() -> None:
    wheel = Wheel.parse({"sizes": [20, 24], "spokes": 20.0})
    assert wheel.sizes == (20, 24)
    assert type(wheel.spokes) is int


def test_a_preset_changes_defaults_and_what_is_given_wins_over_it() -> None:
    assert Wheel.parse({"preset": "racing"}) == Wheel("racing", 12, 2.5)
    assert Wheel.parse({"preset": "racing", "spokes": 36}) == Wheel("racing", 36, 2.5)
    assert Wheel.parse({"preset": "everyday"}) == Wheel()


def test_every_problem_is_listed_with_its_path() -> None:
    assert problems({"spokes": 0, "width": "wide", "sizes": [1, "x"], "color": "red", "preset": "racin"}) == [
        (("preset",), "unknown 'racin'; known: everyday, racing; did you mean 'racing'?"),
        (("spokes",), "should be greater than 0 (found 0)"),
        (("width",), "should be a number (found 'wide')"),
        (("sizes", 1), "should be a whole number (found 'x')"),
        (("color",), "unknown key 'color'; known: preset, spokes, width, sizes"),
    ]


def test_a_missing_parameter_is_a_problem() -> None:
    assert problems({}, Part) == [(("number",), "missing; it has no default")]


def test_the_error_reads_as_one_line() -> None:
    with pytest.raises(OptionErrors, match=r"^sizes\.1: should be a whole number \(found 'x'\)$"):
        Wheel.parse({"sizes": [1, "x"]})


def test_a_long_value_is_shortened_in_the_message() -> None:
    ((_, text),) = problems({"width": "w" * 1000})
    assert text == f"should be a number (found '{'w' * 58}…)"


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_numbers_are_finite(value: float) -> None:
    assert problems({"width": value}) == [(("width",), f"should be a finite number (found {value})")]


def test_options_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Wheel().spokes = 3  # type: ignore[misc]


def test_options_become_plain_values_and_come_back() -> None:
    wheel = Wheel("racing", 20, 0.5, (1, 2))
    plain = wheel.to_dict()
    assert plain == {"preset": "racing", "spokes": 20, "width": 0.5, "sizes": [1, 2]}
    assert list(plain) == list(Wheel.known()) == ["preset", "spokes", "width", "sizes"]
    assert Wheel.parse(plain) == wheel


def test_notes_tell_name_type_default_and_docstring_in_order() -> None:
    assert notes(Wheel) == [
        Note("preset", "everyday | racing", "everyday", "Which defaults."),
        Note("spokes", "int > 0", 36, "How many spokes."),
        Note("width", "float >= 0", 4.0, "In centimetres."),
        Note("sizes", "list of int", (26, 28), "Those that there are."),
    ]
    assert notes(Part) == [Note("number", "int > 0", "(required)", "There is no default.")]


@dataclass(frozen=True)
class Rim(Options):
    share: Annotated[float, Field(ge=0, lt=1)] = 0.5
    most: Annotated[int, Field(le=9)] | None = None
    pair: tuple[bool, Annotated[float, Field(gt=0, le=1)]] = (True, 1.0)
    place: Path | str = "here"


def test_notes_tell_types_as_one_writes_them_into_a_run_file() -> None:
    assert {note.name: note.type for note in notes(Rim)} == {
        "share": "0 <= float < 1",
        "most": "int <= 9 | null",
        "pair": "[bool, 0 < float <= 1]",
        "place": "path | text",
    }


def test_notes_of_inherited_parameters_are_kept() -> None:
    assert [note.text for note in notes(Spare)] == [*[note.text for note in notes(Wheel)], "Who made it."]


# ---- tables ------------------------------------------------------------------------------------------------

TABLE: Table[int] = Table("number", {"one": 1, "two": 2, "three": 3})


def test_a_table_is_a_mapping_in_the_order_given() -> None:
    assert dict(TABLE) == {"one": 1, "two": 2, "three": 3}
    assert list(TABLE) == ["one", "two", "three"]
    assert len(TABLE) == 3
    assert TABLE.find("two") == 2
    assert "four" not in TABLE


def test_a_table_does_not_follow_the_mapping_that_it_was_made_of() -> None:
    entries = {"one": 1}
    table = Table("number", entries)
    entries["two"] = 2
    assert list(table) == ["one"]


def test_an_unknown_name_lists_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(OptionErrors) as info:
        TABLE.find("tow")
    assert info.value.problems == [(("name",), "unknown 'tow'; known: one, two, three; did you mean 'two'?")]


@pytest.mark.parametrize(
    ("found", "known", "text"),
    [
        ("x", [], "unknown 'x'; known: (none)"),
        (3, ["a"], "unknown 3; known: a"),
        ("mapel", ["local", "mapl"], "unknown 'mapel'; known: local, mapl; did you mean 'mapl'?"),
    ],
)
def test_what_is_unknown_is_told_with_what_is_known(found: object, known: list[str], text: str) -> None:
    assert unknown(found, known) == text
    assert unknown_key(found, known) == text.replace("unknown", "unknown key", 1)
