"""``python -m tests.generated_docs`` writes the tables of names in README and docs, from what is registered.

Generated are docs/algorithms/README.md, the table in docs/rules/README.md, and in the table of keys in README.md the
lists of names.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from p2pfl.aggregation import AGGREGATIONS
from p2pfl.algorithms import ALGORITHMS
from p2pfl.options import notes
from p2pfl.plugins import TABLES

PROJECT = Path(__file__).parents[1]

KINDS = {
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


RULES = "| rule | what it does | parameters | bears | weights |\n|---|---|---|---:|---|\n"
BEGIN, END = "<!-- rules: begin -->\n", "<!-- rules: end -->"
EXAMPLES: dict[str, dict[str, Any]] = {"centered-clipping": {"radius": 1.0}, "clip": {"radius": 1.0}}
"""Values of required parameters, which do not matter here."""


def rules(text: str) -> str:
    """Return docs/rules/README.md with a row for each rule in its table."""
    rows = []
    for name, rule in AGGREGATIONS.items():
        if name == "list":
            continue
        summary = (rule.__doc__ or "").strip().partition("\n\n")[0].replace("\n    ", " ")
        parameters = [
            f"`{note.name}`" if note.default == "(required)" else f"`{note.name}: {note.default}`"
            for note in notes(rule)
        ]
        bears = rule.parse(EXAMPLES.get(name, {})).tolerates(10)
        used = "yes" if rule.weighted else "no"
        rows.append(f"| [{name}]({name}.md) | {summary} | {', '.join(parameters) or '—'} | {bears} | {used} |\n")
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + "\n" + RULES + "".join(rows) + "\n" + END + rest.partition(END)[2]


def readme(text: str) -> str:
    """Return the README with the names of each table in the row of its key; what follows them in brackets stays."""
    for key, kind in KINDS.items():
        row = rf"^(\| \[?`{re.escape(key)}`[^|]*\| )[\w+-]+(?:, [\w+-]+)*"
        text, found = re.subn(row, rf"\g<1>{', '.join(TABLES[kind])}", text, flags=re.MULTILINE)
        assert found == 1, f"README.md has no row for {key}"
    return text


def pages() -> dict[Path, str]:
    """Return what the generated pages should contain."""
    page, table = PROJECT / "README.md", PROJECT / "docs" / "rules" / "README.md"
    return {
        page: readme(page.read_text(encoding="utf-8")),
        table: rules(table.read_text(encoding="utf-8")),
        PROJECT / "docs" / "algorithms" / "README.md": algorithms(),
    }


if __name__ == "__main__":
    for path, content in pages().items():
        path.write_text(content, encoding="utf-8")
