"""``python -m tests.generated_docs`` writes the tables of names in README and docs, from what is registered.

Generated are docs/algorithms/README.md, the tables in docs/rules/README.md, docs/rules/auto.md and
docs/attacks/README.md, and in the table of keys in README.md the lists of names.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

from benchmarks.hostile.robustness_map import MEAN, NO_ATTACK, Cell, score
from benchmarks.hostile.runs import Results
from p2pfl.adversaries import ADVERSARIES
from p2pfl.aggregation import AGGREGATIONS, Auto
from p2pfl.algorithms import ALGORITHMS
from p2pfl.options import Options, notes
from p2pfl.plugins import TABLES
from p2pfl.run_file.checks import gathers

PROJECT = Path(__file__).parents[1]

KINDS = {
    "adversaries": "adversary",
    "aggregation": "aggregation",
    "algorithm": "algorithm",
    "algorithm.loss": "loss",
    "data.augment": "augmentation",
    "data.dataset": "dataset",
    "data.partition": "partition",
    "graph": "graph",
    "metrics": "metric",
}
"""The kind of thing that a key of the README's table names."""

HEAD = """\
# Algorithms

`python -m tests.generated_docs` writes this page. Each method's page has equations, differences from the paper, and
the commands that reproduce its numbers; `p2pfl algorithms NAME` lists its hyper-parameters.

| name | what it does | paper |
|---|---|---|
"""


def algorithms() -> str:
    """Return docs/algorithms/README.md: a row for each algorithm."""
    rows = []
    for name, method in ALGORITHMS.items():
        paper = "—" if method.url == "—" else f"{method.authors}: [{method.title}]({method.url}), {method.venue}"
        rows.append(f"| [{name}]({name}.md) | {method.summary} | {paper} |\n")
    return HEAD + "".join(rows)


BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->"
EXAMPLES: dict[str, dict[str, Any]] = {"centered-clipping": {"radius": 1.0}, "clip": {"radius": 1.0}}
"""Values of required parameters, which do not matter here."""


def rules() -> str:
    """Return the table in docs/rules/README.md: a row for each rule that combines."""
    table = "| rule | what it does | parameters | bears | weights |\n|---|---|---|---:|---|\n"
    for name, rule in AGGREGATIONS.items():
        if name not in ("list", "auto"):
            bears = rule.parse(EXAMPLES.get(name, {})).tolerates(10)
            used = "yes" if rule.weighted else "no"
            table += f"| [{name}]({name}.md) | {summary(rule)} | {parameters(rule)} | {bears} | {used} |\n"
    return table


def recommended() -> str:
    """Return the table in docs/rules/auto.md: a row for each algorithm, with accuracies where the map has them."""
    results = Results(PROJECT / "benchmarks" / "results" / "hostile-map.jsonl")

    def accuracy(method: str, rule: str, attack: str, fraction: int) -> str:
        found = score(results, Cell(method, rule, attack, fraction))
        return f"{100 * found.mean:.0f} ({100 * found.worst:.0f})" if found is not None else ""

    table = "| algorithm | auto | no attackers: mean | auto | 20 % flip signs: mean | auto |\n"
    table += "|---|---|---:|---:|---:|---:|\n"
    for name, method in ALGORITHMS.items():
        rule = Auto.recommended(learns_weights=method.learns_weights) if gathers(method) else None
        shown = "refused" if rule is None else f"[{rule}]({rule}.md)"
        cells = [
            accuracy(name, each, attack, fraction) if rule is not None else ""
            for attack, fraction in ((NO_ATTACK, 0), ("sign-flip", 20))
            for each in (MEAN, rule or MEAN)
        ]
        table += f"| [{name}](../algorithms/{name}.md) | {shown} | {' | '.join(cells)} |\n"
    return table


def attacks() -> str:
    """Return the table in docs/attacks/README.md: a row for each attack."""
    table = "| attack | what it does | parameters |\n|---|---|---|\n"
    for name, attack in ADVERSARIES.items():
        table += f"| [{name}]({name}.md) | {summary(attack)} | {parameters(attack)} |\n"
    return table


def summary(options: type[Options]) -> str:
    """Return the first paragraph of a docstring, in one line."""
    return " ".join(inspect.cleandoc(options.__doc__ or "").partition("\n\n")[0].split())


def parameters(options: type[Options]) -> str:
    """Return the parameters with their defaults, as in a run file."""
    required = "(required)"
    found = [f"`{n.name}`" if n.default == required else f"`{n.name}: {n.default}`" for n in notes(options)]
    return ", ".join(found) or "—"


def with_table(text: str, table: str) -> str:
    """Return a page with another table between its marks."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}"


def readme(text: str) -> str:
    """Return the README with the names of each table in the row of its key; what follows them in brackets stays."""
    for key, kind in KINDS.items():
        row = rf"^(\| \[?`{re.escape(key)}`[^|]*\| )[\w+-]+(?:, [\w+-]+)*"
        text, found = re.subn(row, rf"\g<1>{', '.join(TABLES[kind])}", text, flags=re.MULTILINE)
        assert found == 1, f"README.md has no row for {key}"
    return text


def pages() -> dict[Path, str]:
    """Return what the generated pages should contain."""
    docs = PROJECT / "docs"
    page, rules_page, auto_page, attacks_page = (
        PROJECT / "README.md",
        docs / "rules" / "README.md",
        docs / "rules" / "auto.md",
        docs / "attacks" / "README.md",
    )
    return {
        page: readme(page.read_text(encoding="utf-8")),
        rules_page: with_table(rules_page.read_text(encoding="utf-8"), rules()),
        auto_page: with_table(auto_page.read_text(encoding="utf-8"), recommended()),
        attacks_page: with_table(attacks_page.read_text(encoding="utf-8"), attacks()),
        docs / "algorithms" / "README.md": algorithms(),
    }


if __name__ == "__main__":
    for path, content in pages().items():
        path.write_text(content, encoding="utf-8")
