"""Several rules in a row, ``aggregation: [clip, nearest, median]``: each transforms, and the last one combines."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from p2pfl.aggregation.auto import Auto
from p2pfl.aggregation.rule import AGGREGATIONS, Contributions, Rule, Screening, aggregation
from p2pfl.registry import parse_section
from p2pfl.tensors import Tensors


def _parsed(section: str | dict[str, Any]) -> tuple[str, Rule]:
    return parse_section(AGGREGATIONS, "a rule", section)


def _checked(section: str | dict[str, Any]) -> dict[str, Any]:
    name, rule = _parsed(section)
    return {"name": name, **rule.to_dict()}


Section = Annotated[str | dict[str, Any], AfterValidator(_checked)]


@aggregation("list")
@dataclass(frozen=True)
class RuleList(Rule):
    """Several rules, one after the other: each transforms what the next one is given, and the last one combines."""

    rules: Annotated[tuple[Section, ...], Field(min_length=1)]
    """Names, or mappings with a name and parameters. A list in place of a name means this rule."""

    @model_validator(mode="after")
    def _only_the_last_one_combines(self) -> RuleList:
        for name, member in self.members[:-1]:
            if type(member).combine is not Rule.combine:
                raise ValueError(f"{name!r} replaces the mean, so it must be the last rule")
        return self

    @model_validator(mode="after")
    def _only_the_first_one_screens(self) -> RuleList:
        for name, member in self.members[1:]:
            if member.screening is not None:
                raise ValueError(f"{name!r} screens models before they are sent, so it must be the first rule")
        return self

    @model_validator(mode="after")
    def _weights_are_used(self) -> RuleList:
        weighing = None
        for name, member in self.members:
            if weighing is not None and not member.weighted:
                raise ValueError(f"{name!r} ignores the weights that {weighing!r} before it sets; list it first")
            weighing = name if member.only_weighs else weighing
        return self

    @model_validator(mode="after")
    def _all_are_known(self) -> RuleList:
        if any(isinstance(member, Auto) for _, member in self.members):
            raise ValueError("'auto' stands alone; name the rules of a list")
        return self

    @cached_property
    def members(self) -> list[tuple[str, Rule]]:
        """The rules and their names."""
        return list(map(_parsed, self.rules))

    @property
    def weighted(self) -> bool:  # type: ignore[override]
        return all(member.weighted for _, member in self.members)

    @property
    def needs_loss(self) -> bool:  # type: ignore[override]
        return any(member.needs_loss for _, member in self.members)

    @property
    def needs_last(self) -> bool:  # type: ignore[override]
        return any(member.needs_last for _, member in self.members)

    @property
    def needs_ages(self) -> bool:  # type: ignore[override]
        return any(member.needs_ages for _, member in self.members)

    @property
    def screening(self) -> Screening | None:
        return self.members[0][1].screening

    @property
    def _deciding(self) -> list[Rule]:
        """The rules that decide how many attackers the list withstands: the last one, which combines. If it only
        transforms, the mean follows: then any rule that clips or selects decides, the most tolerant one."""
        _, last = self.members[-1]
        return [last] if type(last).combine is not Rule.combine else [member for _, member in self.members]

    def tolerates(self, n: int) -> int:
        return max(member.tolerates(n) for member in self._deciding)

    def withstands(self, n: int) -> int:
        return max(member.withstands(n) for member in self._deciding)

    def assumed(self, n: int) -> dict[str, int]:
        return {f"{name}.{key}": value for name, rule in self.members for key, value in rule.assumed(n).items()}

    def refusal(self, n: int) -> str | None:
        found = ((name, member.refusal(n)) for name, member in self.members)
        return next((f"{name!r} {text}" for name, text in found if text is not None), None)

    def transform(self, given: Contributions) -> Contributions:
        state = given.state
        for n, (_, member) in enumerate(self.members):
            given = member.transform(replace(given, state=state.setdefault(f"rule {n}", {})))
        return given

    def combine(self, given: Contributions, out: Tensors | None = None, step: Tensors | None = None) -> Tensors:
        _, last = self.members[-1]
        return last.combine(given, out, step)
