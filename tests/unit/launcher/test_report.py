"""`p2pfl report`: the page, figures for papers, and the commands that make them."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from launcher.commands import run as run_commands
from launcher.prepare import LaunchRequest
from launcher.report import command, figures, page, papers, sections
from launcher.report.charts import Figures
from launcher.report.collect import collect
from p2pfl.errors import RunFileError, WriteError
from p2pfl.run_folder.folder import RunFolder
from tests.launcher_fixtures import Invoke, MakeFolder
from tests.records import write_records
from tests.reports import HOSTILE, Page, change, read, record

# ---- what is read ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("peers", [None, 3, [None], {"0": "died"}])
def test_a_damaged_summary_of_the_launcher_is_ignored(folder: RunFolder, peers: object) -> None:
    expected = read(folder).summary
    folder.summary.write_text(json.dumps({"peers": peers}))
    assert read(folder).summary == expected


# ---- the page -----------------------------------------------------------------------------------------------


def written(folder: RunFolder, tmp_path: Path) -> Page:
    file = tmp_path / "report.html"
    command.write_run(read(folder), file)
    return Page(file.read_text(encoding="utf-8"))


@pytest.mark.usefixtures("short_library")
def test_page_is_nested_properly_and_every_reference_resolves_inside_it(folder: RunFolder, tmp_path: Path) -> None:
    found = written(folder, tmp_path)
    ids = Counter(found.of("id"))
    assert max(ids.values()) == 1
    assert not found.of("src")
    for link in found.of("href"):
        assert link == "data:," or (link[0] == "#" and link[1:] in ids)
    for target in (*found.of("for"), *found.of("aria-labelledby")):
        assert target in ids
    assert dict(found.attributes[0][1]) == {"lang": "en"}


@pytest.mark.usefixtures("short_library")
def test_policy_allows_the_two_scripts_of_the_page_and_no_request(folder: RunFolder, tmp_path: Path) -> None:
    found = written(folder, tmp_path)
    (policy,) = (content for content in found.of("content") if "default-src" in content)
    scripts = [text for attributes, text in found.scripts if attributes.get("type") is None]
    assert len(scripts) == 2
    for script in scripts:
        assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "http" not in policy
    assert "'unsafe-eval'" not in policy


@pytest.mark.usefixtures("short_library")
def test_text_of_peers_is_escaped_wherever_it_is_shown(make_folder: MakeFolder, tmp_path: Path) -> None:
    one = {"model": HOSTILE, "accuracy": 0.5, "statistics": HOSTILE}
    made = make_folder(results={0: one, 1: {"phase": "failed", "error": HOSTILE}})
    write_records(made, [record(0, 0, loss={HOSTILE: 1.0}, sent={"1": {HOSTILE: [1, 2, 3]}}), record(1, 0)])
    made.peer(0).log.write_text(f"2026-11-21T02:41:00.000 WARNING {HOSTILE}\n")
    made.write_info({**made.info, "versions": {HOSTILE: HOSTILE}, "started": HOSTILE, "command": HOSTILE})
    made.run_file.write_text(f"{made.run_file.read_text()}\n# {HOSTILE.replace(chr(27), '')}\n")
    change(made, algorithm={"name": HOSTILE.replace("\x1b", "")})
    found = written(made, tmp_path)
    assert len(found.scripts) == 3
    assert "img" not in {tag for tag, _ in found.attributes}
    assert not [key for _, attributes in found.attributes for key in attributes if key.startswith("on")]
    assert found.text.count("<img src=x onerror=alert(2)>") >= 7
    assert "Batch-normalization statistics: " in found.text
    assert "\x1b" not in found.text
    data = json.loads(next(text for attributes, text in found.scripts if attributes.get("id") == "data"))
    assert data["charts"]["loss0"]


def test_ages_are_drawn_by_kind_if_rounds_do_not_wait(make_folder: MakeFolder) -> None:
    made = make_folder()
    write_records(made, [record(peer, t) for peer in range(2) for t in range(3)])
    assert "ages" not in figures.of_run(read(made)).charts
    aged = {"Head": {"1": 1}, "Body": {"1": -1}}
    write_records(made, [record(peer, t, ages=aged) for peer in range(2) for t in range(3)])
    chart = figures.of_run(read(made)).charts["ages"]
    assert list(chart.variants) == ["Body", "Head"]
    assert 'data-chart="ages"' in sections.body(read(made), figures.of_run(read(made)))


def test_axes_and_times_say_that_seconds_are_simulated(make_folder: MakeFolder) -> None:
    made = make_folder()
    write_records(made, [record(peer, t) for peer in range(2) for t in range(3)])
    texts = []
    for info in (made.info, {**made.info, "simulated": True, "clock": "simulated"}):
        made.write_info(info)
        run = read(made)
        texts.append(json.dumps(figures.of_run(run).to_dict()) + sections.body(run, figures.of_run(run)))
    for words in ("simulated seconds since the start", '"title": "simulated seconds"', "traffic and simulated time"):
        assert words in texts[1]
        assert words not in texts[0]


@pytest.mark.usefixtures("short_library")
def test_data_of_the_page_holds_a_table_for_each_chart(folder: RunFolder, tmp_path: Path) -> None:
    found = written(folder, tmp_path)
    data = json.loads(next(text for attributes, text in found.scripts if attributes.get("id") == "data"))
    assert set(data["charts"]) == {"accuracy", "loss0", "loss1", "weights", "drawing", "traffic", "time"}
    drawn = {name for chart in data["charts"].values() for name in chart["tables"]}
    assert drawn - set(data["tables"]) == {"cells", "edges"}  # the script computes them from the frames
    assert [frame["t"] for frame in data["frames"]["list"]] == [0, 1, 2]
    assert set(found.of("data-chart")) == set(data["charts"])


@pytest.mark.usefixtures("short_library")
def test_a_run_without_records_gives_a_page_that_says_what_is_missing(
    make_folder: MakeFolder, tmp_path: Path
) -> None:
    found = written(make_folder(results={0: None, 1: None}), tmp_path)
    assert found.of("data-chart") == []
    for words in (
        "Accuracy: not shown, no peer has evaluated its model yet.",
        "Mixing weights: not shown, the method has no mixing weights, or no round is completed.",
        "Data partition: not shown, left out by --without-models.",
        "Time by phase: not shown, no round is completed.",
    ):
        assert words in found.text


@pytest.mark.usefixtures("short_library")
def test_a_method_without_mixing_weights_is_drawn_by_its_traffic(folder: RunFolder, tmp_path: Path) -> None:
    write_records(folder, [record(peer, t, weights=None) for peer in range(2) for t in range(3)])
    run = read(folder)
    shown = figures.of_run(run)
    assert "weights" not in shown.charts
    assert shown.frames is None
    assert shown.tables["edges"]["value"] == [660]
    assert "Mixing weights: not shown" in written(folder, tmp_path).text


@pytest.mark.usefixtures("short_library")
def test_code_of_a_collection_is_not_executed(folder: RunFolder, tmp_path: Path) -> None:
    folder.write_info({**folder.info, "collected": {"sources": [], "at": "2026-11-21T09:30:00+00:00"}})
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    change(folder, plugins=[str(tmp_path / "evil.py")])
    run = collect(folder)
    assert set(run.learned.absent) == {"partition", "confusion", "points"}
    assert all(reason.startswith("a collection") for reason in run.learned.absent.values())
    assert not (tmp_path / "executed").exists()


# ---- commands -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("short_library")
def test_report_goes_into_the_run_folder_by_default(folder: RunFolder, invoke: Invoke) -> None:
    outcome = invoke("report", folder.root, "--without-models")
    assert outcome.exit_code == 0
    assert outcome.stdout == f"{folder.root / 'report.html'}\n"
    assert outcome.stderr == f"open it: python -m webbrowser {(folder.root / 'report.html').as_uri()}\n"
    assert Page((folder.root / "report.html").read_text()).text.count("toy") >= 2


def test_missing_extra_is_named_before_any_work(
    folder: RunFolder, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    page.library.cache_clear()
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    outcome = invoke("report", folder.root)
    assert outcome.exit_code == 1
    assert "p2pfl report needs vl-convert-python, which is not installed: pip install 'p2pfl-mesh[report]'" in (
        outcome.stderr
    )
    assert not (folder.root / "report.html").exists()


@pytest.mark.exhaustive
@pytest.mark.usefixtures("short_library")
def test_figures_for_papers_are_png_and_pdf(folder: RunFolder, tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    files = papers.write(figures.of_run(read(folder)), tmp_path / "png", tmp_path / "pdf")
    names = [
        *(f"accuracy-{x}" for x in ("rounds", "bytes", "seconds")),
        "loss0",
        "loss1",
        "weights",
        "traffic",
        "time",
    ]
    assert [file.name for file in files] == [f"{name}.{suffix}" for suffix in ("png", "pdf") for name in names]
    begins = {".png": b"\x89PNG", ".pdf": b"%PDF"}
    assert all(file.read_bytes().startswith(begins[file.suffix]) for file in files)


def test_a_folder_of_figures_that_cannot_be_made_is_named_itself(tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    (tmp_path / "png").touch()
    with pytest.raises(WriteError, match=f"^{re.escape(str(tmp_path / 'png'))}: cannot be written: "):
        papers.write(Figures(), tmp_path / "png", None)


@pytest.mark.usefixtures("short_library")
def test_a_run_ends_with_the_line_that_makes_its_report(folder: RunFolder) -> None:
    assert run_commands._report_line(folder) == f"report: p2pfl report {folder.root}"
    assert not (folder.root / "report.html").exists()


@pytest.mark.usefixtures("short_library")
def test_a_run_that_asks_for_its_report_ends_with_the_line_that_opens_it(folder: RunFolder) -> None:
    change(folder, report=True)
    line = run_commands._report_line(folder)
    assert line == f"report: python -m webbrowser {(folder.root / 'report.html').as_uri()}"
    assert (folder.root / "report.html").exists()


@pytest.mark.usefixtures("short_library")
def test_a_report_that_cannot_be_written_is_no_failure_of_the_run(folder: RunFolder) -> None:
    change(folder, report=True)
    (folder.root / "report.html").mkdir()
    assert run_commands._report_line(folder).startswith("no report: ")


def test_a_run_file_that_asks_for_a_report_needs_the_extra_before_peers_start(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text(f"{file.read_text()}report: true\n")
    LaunchRequest(file).load()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RunFileError, match=r"toy.yaml:\d+: report: writing a report needs vl-convert-python"):
        LaunchRequest(file).load()


def test_opener_quotes_paths() -> None:
    from launcher.commands.report import opener

    assert opener(Path("/tmp/a b.html")) == "python -m webbrowser file:///tmp/a%20b.html"
