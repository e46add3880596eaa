"""`p2pfl compare`."""

from __future__ import annotations

import json

import pytest
import yaml

from launcher.views.summary import summarize
from p2pfl.session.run_folder import RunFolder
from tests.launcher_fixtures import Invoke, MakeFolder


def peers(accuracy: float, **more: object) -> dict[int, dict[str, object]]:
    sent = {"1": {"Shared": [3, 3000, 90]}}
    return {
        peer: {"accuracy": accuracy - 0.1 * peer, "best": 0.9, "sent": sent, "seconds": {"total": 4.0 + peer}, **more}
        for peer in range(2)
    }


def change(folder: RunFolder, **keys: object) -> None:
    plain = yaml.safe_load(folder.run_file.read_text())
    folder.run_file.write_text(yaml.safe_dump({**plain, **keys}))


def test_prints_one_run_per_row(make_folder: MakeFolder, invoke: Invoke) -> None:
    one, two = (
        make_folder("one", results=peers(0.8)),
        make_folder("two", results=peers(0.6, extra_metrics={"peak": 0.7})),
    )
    change(two, algorithm={"name": "dfml"})
    outcome = invoke("compare", one.root, two.root)
    assert outcome.exit_code == 0
    head, *rows = outcome.stdout.splitlines()
    columns = ["run", "algorithm", "peers", "acc %", "worst 10 %", "best %", "messages", "sent", "time"]
    assert head.split() == " ".join(columns).split()
    assert " ".join(rows[0].split()) == "one local 2 75.0 ± 5.0 70.0 90.0 ± 0.0 6 6.2 kB 0:05"
    assert " ".join(rows[1].split()) == "two dfml 2 55.0 ± 5.0 50.0 90.0 ± 0.0 6 6.2 kB 0:05"
    assert [row.split() for row in rows[2:]] == [[], ["%", "two"], ["peak", "70.0", "±", "0.0"]]
    assert outcome.stderr == ""


def test_warns_about_other_differences(make_folder: MakeFolder, invoke: Invoke) -> None:
    one, two = make_folder("one", results=peers(0.8)), make_folder("two", results=peers(0.6))
    change(two, seed=7, data={"dataset": {"name": "mnist"}})
    outcome = invoke("compare", one.root, two.root)
    assert outcome.exit_code == 0
    assert "warning: runs differ in seed: 0; 7" in outcome.stderr
    assert "data.dataset.name: " in outcome.stderr
    plain = json.loads(invoke("compare", "--json", one.root, two.root).stdout)
    assert plain["different"] == {"seed": [0, 7], "data.dataset.name": ["digits", "mnist"]}
    assert [line["accuracy"]["mean"] for line in plain["runs"]] == pytest.approx([0.75, 0.55])


def test_keeps_the_time_measured_by_the_launcher(make_folder: MakeFolder, invoke: Invoke) -> None:
    folder = make_folder(results=peers(0.8))
    summarize(folder, seconds=77.0)
    for _ in range(2):
        assert invoke("compare", folder.root).stdout.splitlines()[1].endswith("1:17")


def test_an_unfinished_run_exits_with_1(make_folder: MakeFolder, invoke: Invoke) -> None:
    folder = make_folder(results={**peers(0.8), 1: {"phase": "failed", "error": "ValueError: nan"}})
    outcome = invoke("compare", folder.root)
    assert outcome.exit_code == 1
    assert "1 of 2" in outcome.stdout
