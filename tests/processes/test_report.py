"""`p2pfl report` of simulated runs: what their models have learned, and the page in a browser."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from launcher.report.collect import collect
from launcher.report.command import write
from launcher.report.figures import confusion_table
from p2pfl.api import load, open_run
from p2pfl.run_folder.folder import RunFolder

FILE = {
    "name": "seen",
    "rounds": 2,
    "peers": 4,
    "data": {
        "dataset": "digits",
        "partition": {"name": "clusters", "clusters": 2, "per_class": 6, "test_per_class": 5},
    },
    "models": "tiny4",
    "algorithm": {"name": "mapl", "warmup": 1, "projector_hidden": 16},
    "device": "cpu",
}
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    root = tmp_path_factory.mktemp("runs") / "seen"
    return RunFolder(load(FILE).simulate(root).folder)


def test_partition_confusion_and_projection_agree_with_the_run(folder: RunFolder) -> None:
    run = collect(folder)
    learned = run.learned
    assert learned.absent == {}
    assert learned.partition is not None
    assert [peer["classes"] for peer in learned.partition["peers"][:1]] == [{str(k): 6 for k in range(5)}]
    for result in open_run(folder.root).results():
        rows = learned.confusion[result.peer]
        assert sum(count for _, _, count in rows) == result.samples
        assert sum(count for true, said, count in rows if true == said) == result.correct
    kinds = learned.points["kind"]
    assert (kinds.count("embedding"), kinds.count("prototype")) == (4 * 25, 4 * 5)
    pooled = confusion_table(run)
    of_all = [fraction for peer, fraction in zip(pooled["peer"], pooled["fraction"], strict=True) if peer == -1]
    assert sum(of_all) == pytest.approx(10, abs=0.01)  # ten rows of fractions


def test_a_report_changes_nothing_in_the_run(folder: RunFolder) -> None:
    def contents() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in folder.root.rglob("*") if path.is_file()}

    before = contents()
    collect(folder)
    assert contents() == before


def test_damaged_checkpoint_costs_the_models_and_not_the_page(folder: RunFolder, tmp_path: Path) -> None:
    copy = RunFolder(tmp_path / "copy")
    shutil.copytree(folder.root, copy.root, ignore=shutil.ignore_patterns("slots"))
    for files in copy.peers():
        files.checkpoint.write_bytes(b"damaged")
        files.checkpoint.with_name("checkpoint-previous.pt").write_bytes(b"damaged too")
    learned = collect(copy).learned
    assert learned.partition is not None
    assert "checkpoint" in learned.absent["confusion"]


def test_seconds_of_sending_are_recorded(folder: RunFolder) -> None:
    seconds = [record["seconds"] for record in open_run(folder.root).records()]
    assert all(0 <= each["sending"] < each["total"] for each in seconds)  # rounded: those of a fast round are 0
    assert sum(each["sending"] for each in seconds) > 0


@pytest.mark.exhaustive
@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_browser_draws_every_figure_without_console_errors_or_network(folder: RunFolder, tmp_path: Path) -> None:
    assert BROWSER is not None
    page = tmp_path / "report.html"
    (page_written,) = write([(folder, None)], page)
    assert page_written.stat().st_size < 5_000_000
    # A request would be refused by the page's policy, with an error on the console.
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        f"--user-data-dir={tmp_path}/u",
    ]
    command = [BROWSER, *options, "--virtual-time-budget=20000", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert not re.findall(r".*CONSOLE.*", done.stderr)
    figures = re.findall(r'<figure [^>]*data-chart="\w+".*?</figure>', done.stdout, flags=re.DOTALL)
    assert len(figures) == 12  # accuracy, four losses, weights, drawing, traffic, time, partition, confusion, points
    for figure in figures:
        assert re.search(r"<(svg|canvas)\b", figure), figure[:80]


def test_the_key_report_does_not_change_what_peers_compare() -> None:
    assert load(FILE)._run.config_hash() == load(FILE, report=True)._run.config_hash()
    assert yaml.safe_load(load(FILE, report=True)._run.to_yaml())["report"] is True
