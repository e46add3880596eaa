"""Documentation: links, run files, examples, tables and error messages."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from p2pfl.errors import RunFileError
from p2pfl.graphs import GRAPHS, Graph
from p2pfl.models import groups
from p2pfl.options import Section, notes
from p2pfl.run_file.load import load
from p2pfl.run_file.time import Availability, Devices, Network, Time
from tests import generated_docs

PROJECT = Path(__file__).parents[3]
README = (PROJECT / "README.md").read_text(encoding="utf-8")
GRAPHS_PAGE = (PROJECT / "docs" / "graphs.md").read_text(encoding="utf-8")
MODELS_PAGE = (PROJECT / "docs" / "models.md").read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    """Code blocks of a page in ``language``."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)


def rows(page: str) -> list[list[str]]:
    """Cells of all table rows of a page."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]


# ---- links -------------------------------------------------------------------------------------------------

PAGES = [*sorted(PROJECT.glob("*.md")), *sorted((PROJECT / "docs").rglob("*.md"))]


def anchors(page: Path) -> set[str]:
    """Anchors of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_between_pages_resolve(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]*)\)", page.read_text(encoding="utf-8"))
    for link in links:
        if "://" not in link:
            file, _, anchor = link.partition("#")
            target = page.parent / file if file else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_are_whole(page: Path) -> None:
    """A blank line ends a table: what follows is shown as text, unless it is another one with its head."""
    lines = page.read_text(encoding="utf-8").splitlines()
    for before, line, after in zip(["", *lines], lines, [*lines[1:], ""], strict=False):
        begins = line.startswith("|") and not before.startswith("|")
        assert not begins or re.fullmatch(r"\|[-:| ]+\|", after), line


# ---- README ------------------------------------------------------------------------------------------------


def test_run_file_of_the_readme_loads_and_its_typo_gives_the_shown_error(tmp_path: Path) -> None:
    (text,) = blocks(README, "yaml")
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    assert load(file).name == "mine"
    with_typo = text.replace("name: mapl,", "name: mapel,")
    assert with_typo != text
    file.write_text(with_typo)
    with pytest.raises(RunFileError) as caught:
        load(file)
    (shown,) = re.findall(r"^    (mine\.yaml:.*)$", README, flags=re.MULTILINE)
    start, end = shown.split("…")
    message = str(caught.value).replace(f"{tmp_path}/", "")
    assert message.startswith(start)
    assert message.endswith(end)


def test_tables_of_names_are_up_to_date() -> None:
    for path, content in generated_docs.pages().items():
        assert path.read_text(encoding="utf-8") == content, "run `make docs`"


# ---- graphs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_page_lists_every_parameter_with_its_default(name: str) -> None:
    documented = {cells[1].strip("`"): cells for cells in rows(GRAPHS_PAGE) if cells[0] == f"`{name}`"}
    parameters = [note for note in notes(GRAPHS[name]) if note.name not in Graph.known()]
    assert set(documented) == ({note.name for note in parameters} or {""})
    for note in parameters:
        _, _, kind, default, meaning = documented[note.name]
        assert default == ("required" if note.default == "(required)" else f"`{json.dumps(note.default)}`")
        assert kind
        assert meaning


def test_graphs_page_lists_the_common_parameters() -> None:
    assert {cells[1].strip("`") for cells in rows(GRAPHS_PAGE) if cells[0] == "every one"} == set(Graph.known())


EXAMPLES = [line for line in blocks(GRAPHS_PAGE, "yaml")[1].splitlines() if line]


@pytest.mark.parametrize("line", EXAMPLES)
def test_examples_of_graphs_load(line: str, tmp_path: Path) -> None:
    (tmp_path / "edges.txt").write_text("\n".join(f"{peer}, {peer + 1}  # a line" for peer in range(19)))
    file = tmp_path / "mine.yaml"
    (text,) = blocks(README, "yaml")
    file.write_text(re.sub(r"^graph: .*$", line, text, flags=re.MULTILINE))
    (tmp_path / "moves.csv").write_text("\n".join(f"{peer},{peer},{peer + 1}" for peer in range(19)))
    assert load(file, ["algorithm=dpsgd", "models=tiny-cnn"]).topology.peers == 20


def test_every_graph_has_an_example() -> None:
    graphs = [yaml.safe_load(line)["graph"] for line in EXAMPLES]
    assert {graph if isinstance(graph, str) else graph["name"] for graph in graphs} == set(GRAPHS)


# ---- the simulated clock -----------------------------------------------------------------------------------


def test_page_of_seconds_lists_every_key_and_its_example_loads(tmp_path: Path) -> None:
    page = (PROJECT / "docs" / "seconds.md").read_text(encoding="utf-8")
    sections: dict[str, type[Section]] = {"devices": Devices, "network": Network, "availability": Availability}
    keys = {f"{name}.{key}" for name, section in sections.items() for key in section.model_fields}
    listed = {cells[0].strip("`") for cells in rows(page) if cells[0].startswith("`")}
    assert listed == keys | set(Time.model_fields) - set(sections)
    (text,) = blocks(README, "yaml")
    (example,) = blocks(page, "yaml")
    (tmp_path / "mine.yaml").write_text(text + example)
    assert load(tmp_path / "mine.yaml").file.time is not None


# ---- models ------------------------------------------------------------------------------------------------


def test_models_page_lists_every_group() -> None:
    assert set(groups()) <= {cells[0].strip("`") for cells in rows(MODELS_PAGE)}
