"""``python -m tests.generated_docs`` writes the tables of names in README and docs, from what is registered.

Generated are docs/algorithms/README.md, the table in docs/attacks/README.md, and in the table of keys in README.md
the lists of names.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from p2pfl.adversaries import ADVERSARIES
from p2pfl.algorithms import ALGORITHMS
from p2pfl.options import Options
from p2pfl.plugins import TABLES

PROJECT = Path(__file__).parents[1]

KINDS = {
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


def attacks(text: str) -> str:
    """Return docs/attacks/README.md with a row for each attack in its table."""
    rows = []
    for name, attack in ADVERSARIES.items():
        keys = ", ".join(f"`{key}`" for key in attack.known())
        rows.append(f"| [{name}]({name}.md) | {summary(attack)} | {keys} |\n")
    head = "| name | what it does | keys |\n|---|---|---|\n"
    text, found = re.subn(rf"(?<={re.escape(head)})(?:\|.*\n)*", "".join(rows), text)
    assert found == 1, "docs/attacks/README.md has no table of attacks"
    return text


def summary(options: type[Options]) -> str:
    """Return the first paragraph of a docstring, in one line, for a cell of a table."""
    first, *_ = inspect.cleandoc(options.__doc__ or "").split("\n\n")
    return " ".join(first.split()).replace("|", "\\|")


def readme(text: str) -> str:
    """Return the README with the names of each table in the row of its key; what follows them in brackets stays."""
    for key, kind in KINDS.items():
        row = rf"^(\| \[?`{re.escape(key)}`[^|]*\| )[\w+-]+(?:, [\w+-]+)*"
        text, found = re.subn(row, rf"\g<1>{', '.join(TABLES[kind])}", text, flags=re.MULTILINE)
        assert found == 1, f"README.md has no row for {key}"
    return text


def pages() -> dict[Path, str]:
    """Return what the generated pages should contain."""
    page, attack_page = PROJECT / "README.md", PROJECT / "docs" / "attacks" / "README.md"
    return {
        page: readme(page.read_text(encoding="utf-8")),
        PROJECT / "docs" / "algorithms" / "README.md": algorithms(),
        attack_page: attacks(attack_page.read_text(encoding="utf-8")),
    }


if __name__ == "__main__":
    for path, content in pages().items():
        path.write_text(content, encoding="utf-8")
