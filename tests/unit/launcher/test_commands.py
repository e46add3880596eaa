"""What the commands print, and how they fail."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher import cli
from launcher.commands import commands
from launcher.facts.summary import summarize
from launcher.views.partition import classes
from p2pfl.models import groups
from p2pfl.run_folder.folder import Status
from tests.launcher_fixtures import Invoke, MakeFolder

BAD = "name: toy\nrounds: 0\npeers: 2\nalgorithm: {name: mapel}\ndata: {dataset: digits}\n"


def test_every_command_has_help(invoke: Invoke) -> None:
    for name in commands.commands:
        if name != "peer":  # another program with its own help
            assert "Usage:" in invoke(name, "--help").output


def test_help_does_not_truncate_descriptions(invoke: Invoke) -> None:
    lines = invoke("--help").stdout.splitlines()
    assert not any(line.endswith("...") for line in lines[1:])
    assert "  peer        Run a single peer: --run RUN --me N [--file FILE]." in lines


def test_rejects_the_conflicting_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    information = tmp_path / "p2pfl-0.4.2.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: p2pfl\nVersion: 0.4.2\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    message = str(caught.value.code)
    assert "p2pfl 0.4.2, an unrelated distribution" in message
    assert "-m pip uninstall p2pfl p2pfl-mesh" in message


def test_an_invalid_run_file_exits_with_2(tmp_path: Path, invoke: Invoke) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(BAD)
    outcome = invoke("graph", file)
    assert outcome.exit_code == 2
    assert outcome.stdout == ""
    assert outcome.stderr.startswith(f"error: {file}:2: rounds: ")


def test_a_folder_without_run_exits_with_1(tmp_path: Path, invoke: Invoke) -> None:
    for command in ("logs", "digest", "stop"):
        outcome = invoke(command, tmp_path)
        assert outcome.exit_code == 1
        assert "not a run folder (no run.yaml in it)" in outcome.stderr


def test_a_folder_with_a_run_file_is_no_run(tmp_path: Path, file: Path, invoke: Invoke) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "run.yaml").write_bytes(file.read_bytes())
    for command in ("resume", "show", "status"):
        outcome = invoke(command, project)
        assert outcome.exit_code == 1
        launch = f"`p2pfl launch {project}/run.yaml`"
        assert outcome.stderr == f"error: {project}: not a run folder, but it has a run file; start it: {launch}\n"
    assert invoke("list", tmp_path).stdout == f"no runs in {tmp_path}\n"


def test_a_sweep_is_no_run_but_its_runs_are_listed(tmp_path: Path, make_folder: MakeFolder, invoke: Invoke) -> None:
    (tmp_path / "sweep.yaml").touch()
    assert "no runs in" in invoke("list", tmp_path).stdout
    run = make_folder().root
    (tmp_path / "runs").mkdir()
    run.rename(tmp_path / "runs" / "a")
    outcome = invoke("show", tmp_path)
    assert outcome.exit_code == 1
    assert f"{tmp_path}: a sweep, not a run; name one of its runs: `p2pfl list {tmp_path}`" in outcome.stderr
    assert f"{tmp_path}/runs/a " in invoke("list", tmp_path).stdout


def test_invalid_usage_exits_with_2(make_folder: MakeFolder, invoke: Invoke) -> None:
    root = make_folder().root
    assert invoke("launch", "x.yaml", "--rounds", "0").exit_code == 2
    assert invoke("logs", root, "--grep", "(").exit_code == 2
    outcome = invoke("algorithms", "mapel")
    assert outcome.exit_code == 2
    assert "did you mean 'mapl'?" in outcome.stderr


@pytest.mark.exhaustive
def test_describes_algorithms(invoke: Invoke) -> None:
    assert {algorithm["name"] for algorithm in json.loads(invoke("algorithms", "--json").stdout)} >= {
        "local",
        "dpsgd",
        "mapl",
    }
    text = invoke("algorithms").stdout
    assert "dpsgd: " in text
    assert "http" in text
    mapl = json.loads(invoke("algorithms", "mapl", "--json").stdout)
    (warmup,) = [note for note in mapl["hyper"] if note["name"] == "warmup"]
    assert warmup["default"] == 100
    assert warmup["text"]
    assert "warmup" in invoke("algorithms", "mapl").stdout


@pytest.mark.exhaustive
def test_algorithms_have_distinct_summaries(invoke: Invoke) -> None:
    found = json.loads(invoke("algorithms", "--json").stdout)
    summaries = [algorithm["summary"] for algorithm in found]
    assert len(set(summaries)) == len(summaries)
    lines = invoke("algorithms").stdout.splitlines()
    assert {f"    {summary}" for summary in summaries} <= set(lines)
    assert all(len(summary) <= 116 for summary in summaries)
    assert not any("—" in line for line in lines)


@pytest.mark.exhaustive
def test_describes_a_group_and_a_model(invoke: Invoke) -> None:
    found = json.loads(invoke("models", "tiny4", "--channels", "1", "--size", "8", "--json").stdout)
    assert found["name"] == "tiny4"
    first = found["members"][0]
    assert first["name"] == "tiny-cnn"
    assert first["features"] == 64
    assert first["head_bytes"] == 4 * (64 * 10 + 10)
    assert first["prototype_bytes"] == 4 * 64 * 10
    assert first["flops"] > 2 * 9 * 32 * 64
    wider = json.loads(invoke("models", "tiny-cnn", "--features", "32", "--classes", "3", "--json").stdout)
    assert [(model["name"], model["head_bytes"]) for model in wider["members"]] == [("tiny-cnn", 4 * 33 * 3)]
    text = invoke("models", "tiny4").stdout
    assert text.splitlines()[0].startswith("group  model          parameters  d   FLOPs")
    assert len(text.splitlines()) == 5


def test_lists_all_groups_and_ungrouped_models(monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    asked: list[str] = []

    def describe_models(names: list[str], *images: Any) -> list[Any]:
        asked.extend(names)
        return []

    monkeypatch.setattr("launcher.views.describe.describe_models", describe_models)
    invoke("models")
    assert sorted(asked) == sorted([*groups(), "l2c-cnn", "l2c-conv4"])


@pytest.mark.exhaustive
def test_reports_models_that_do_not_support_the_images(invoke: Invoke) -> None:
    outcome = invoke("models", "htfe2", "--size", "8")
    assert outcome.exit_code == 0
    assert "–" in outcome.stdout
    assert "unsupported: images of 8x8 are too small for 2 unpadded 5x5 convolutions" in outcome.stderr
    outcome = invoke("models", "htfe5")
    assert outcome.exit_code == 2
    assert "did you mean 'htfe" in outcome.stderr


@pytest.fixture
def ring(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("P2PFL_CACHE", str(tmp_path / "cache"))
    file.write_text(file.read_text().replace("peers: 3", "peers: 6"))
    return file


def test_describes_a_graph(ring: Path, invoke: Invoke) -> None:
    found = json.loads(invoke("graph", ring, "--json").stdout)
    assert found.pop("spectral_gap") == pytest.approx(1 / 3)
    assert found == {
        "peers": 6, "edges": 6, "degree": {"min": 2, "mean": 2.0, "max": 2}, "components": 1, "diameter": 3
    }  # fmt: skip
    assert "diameter      3\n" in invoke("graph", ring).stdout
    outcome = invoke("graph", ring, "--set", "graph={name: edges, edges: [[0, 1]], allow_disconnected: true}")
    assert "diameter      infinite (5 components)\n" in outcome.stdout


@pytest.mark.exhaustive
@pytest.mark.parametrize("graph", ["ring", "complete"])
def test_draws_a_graph(tmp_path: Path, ring: Path, invoke: Invoke, graph: str) -> None:
    pytest.importorskip("vl_convert")
    # The file name needs no extension.
    outcome = invoke("graph", ring, "--set", f"graph={graph}", "--png", tmp_path / graph)
    assert outcome.exit_code == 0
    assert outcome.stderr == f"wrote {tmp_path / graph}\n"
    assert (tmp_path / graph).read_bytes().startswith(b"\x89PNG")


TIME_VARYING = ("--set", "graph=one-peer-exponential", "--set", "peers=8", "--set", "rounds=31")


def test_describes_a_graph_that_changes_over_time(ring: Path, invoke: Invoke) -> None:
    found = json.loads(invoke("graph", ring, *TIME_VARYING, "--json").stdout)
    assert (found["edges"], found["degree"]["max"]) == (20, 5)  # i ± 1, i ± 2, i + 4
    changes = found["over_time"]
    assert (changes["rounds"], changes["period"], changes["window"]) == (31, 3, 3)
    assert changes["sent"] == {"min": 1, "mean": 1.0, "max": 1}
    assert changes["edges"] == {"min": 4, "mean": pytest.approx(208 / 31), "max": 8}
    assert changes["starts"] == list(range(0, 30, 3))
    assert changes["window_gap"] == pytest.approx([1.0] * 10)
    assert len(changes["gap"]) == 31
    assert max(changes["gap"]) < 0.1
    text = invoke("graph", ring, *TIME_VARYING).stdout
    assert "rounds        31, repeated after 3\n" in text
    assert "connections   20, 5 to 5 of a peer\n" in text
    assert "sent          1 to 1 messages of a peer in a round, mean 1.00\n" in text
    assert "27–29" in text


def test_window_of_a_graph_that_changes(ring: Path, invoke: Invoke) -> None:
    found = json.loads(invoke("graph", ring, *TIME_VARYING, "--window", 1, "--json").stdout)["over_time"]
    assert found["window_gap"] == found["gap"]
    assert "…" in invoke("graph", ring, *TIME_VARYING, "--window", 1).stdout  # 31 windows
    assert (
        json.loads(invoke("graph", ring, *TIME_VARYING, "--window", 99, "--json").stdout)["over_time"]["window"] == 31
    )
    outcome = invoke("graph", ring, "--window", 3)
    assert outcome.exit_code == 2
    assert "the graph 'ring' does not change" in outcome.stderr


@pytest.mark.exhaustive
def test_draws_the_spectral_gap_of_a_graph_that_changes(tmp_path: Path, ring: Path, invoke: Invoke) -> None:
    pytest.importorskip("vl_convert")
    assert invoke("graph", ring, *TIME_VARYING, "--png", tmp_path / "gap").exit_code == 0
    assert (tmp_path / "gap").read_bytes().startswith(b"\x89PNG")


def test_drawing_a_graph_without_its_library_names_the_extra(
    tmp_path: Path, ring: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    outcome = invoke("graph", ring, "--png", tmp_path / "g.png")
    assert outcome.exit_code == 1
    assert "pip install 'p2pfl-mesh[report]'" in outcome.stderr


CLUSTERS = "data.partition={name: clusters, per_class: 10, test_per_class: 5}"


def test_shows_data_of_each_peer(ring: Path, invoke: Invoke) -> None:
    outcome = invoke("data", "show", ring, "--set", CLUSTERS)
    assert outcome.exit_code == 0
    head, *rest = outcome.stdout.splitlines()
    assert head == "digits: 1442 training and 355 test images of 1x8x8, 10 classes; partition clusters"
    rows = [line.split() for line in rest[1:-1]]
    assert rows == [["0-2", "0", "50", "0", "25", "0-4:", "10"], ["3-5", "1", "50", "0", "25", "5-9:", "10"]]
    assert rest[-1] == "300 training samples in all peers, 300 distinct; 50 to 50 per peer, 50.0 on average"


def test_shows_data_of_a_run_folder(make_folder: MakeFolder, ring: Path, invoke: Invoke) -> None:
    folder = make_folder()
    folder.run_file.write_text(ring.read_text())
    assert invoke("data", "show", folder.root).stdout == invoke("data", "show", ring).stdout
    assert invoke("data", "show", folder.root.parent).exit_code == 1


def test_shows_data_as_json(ring: Path, invoke: Invoke) -> None:
    found = json.loads(invoke("data", "show", ring, "--set", CLUSTERS, "--json").stdout)
    assert found["dataset"]["classes"] == 10
    assert found["partition"]["per_class"] == 10
    assert found["peers"][5] == {
        "peer": 5,
        "group": 1,
        "train": 50,
        "validation": 0,
        "test": 25,
        "classes": {str(label): 10 for label in range(5, 10)},
        "test_classes": {str(label): 5 for label in range(5, 10)},
    }
    merged = json.loads(invoke("data", "show", ring, "--set", "data.partition=dirichlet", "--json").stdout)
    sizes = sum(sum(peer["classes"].values()) + sum(peer["test_classes"].values()) for peer in merged["peers"])
    assert sizes == 1797
    assert merged["total"]["train"] == merged["total"]["distinct"]


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ({}, "none"),
        ({"0": 3}, "0: 3"),
        ({"10": 3, "2": 3, "3": 3, "4": 4}, "2-3: 3, 4: 4, 10: 3"),
        ({str(2 * n): 1 for n in range(14)}, ", ".join(f"{2 * n}: 1" for n in range(12)) + ", and 2 more classes"),
    ],
)
def test_folds_classes_with_equal_counts(counts: dict[str, int], text: str) -> None:
    assert classes(counts) == text


@pytest.mark.exhaustive
@pytest.mark.parametrize("peers", [1, 100])
def test_draws_data(tmp_path: Path, ring: Path, invoke: Invoke, peers: int) -> None:
    pytest.importorskip("vl_convert")
    sets = ["--set", f"peers={peers}", "--set", "graph=complete"]
    outcome = invoke("data", "show", ring, *sets, "--png", tmp_path / "d.png")
    assert outcome.exit_code == 0
    assert outcome.stderr == f"wrote {tmp_path / 'd.png'}\n"
    assert (tmp_path / "d.png").read_bytes().startswith(b"\x89PNG")


def test_drawing_data_without_its_library_names_the_extra(
    tmp_path: Path, ring: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    outcome = invoke("data", "show", ring, "--png", tmp_path / "d.png")
    assert outcome.exit_code == 1
    assert "pip install 'p2pfl-mesh[report]'" in outcome.stderr


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        (
            "data.partition={name: clusters, clusters: 3}",
            "10 classes with an overlap of 0 cannot",
        ),
        ("data.dataset={name: npz, path: /no/where.npz}", "npz: missing where.npz; looked in /no"),
    ],
)
def test_reports_unavailable_data_as_run_file_error(
    ring: Path, invoke: Invoke, assignment: str, message: str
) -> None:
    outcome = invoke("data", "show", ring, "--set", assignment)
    assert outcome.exit_code == 2
    [line] = outcome.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_compares_digests(make_folder: MakeFolder, invoke: Invoke) -> None:
    one, same = make_folder("one"), make_folder("same")
    other = make_folder("other", results={1: {"digest": "f" * 64}})
    partial = make_folder("partial", results={0: None})
    assert json.loads(invoke("digest", one.root, "--json").stdout)[1] == {
        "peer": 1, "rounds_done": 3, "digest": f"{1:064x}"
    }  # fmt: skip
    assert f"{1:064x}" in invoke("digest", one.root).stdout
    assert invoke("digest", one.root, same.root).exit_code == 0
    for second, differ, unfinished in (
        (other, [1], [None, None]),
        (partial, [], [None, {"peers": [0], "slowest": 0, "fastest": 0, "rounds": 3}]),
    ):
        outcome = invoke("digest", one.root, second.root, "--json")
        assert outcome.exit_code == 1
        plain = json.loads(outcome.stdout)
        assert (plain["same"], plain["differ"], plain["unfinished"]) == (False, differ, unfinished)
    assert invoke("digest", partial.root, partial.root).exit_code == 1  # unfinished peers cannot be compared
    assert invoke("digest", one.root, other.root).stdout == "different: peers 1\n"


def test_digest_distinguishes_unfinished_from_different_peers(make_folder: MakeFolder, invoke: Invoke) -> None:
    one = make_folder("one", peers=4)
    partial = make_folder("partial", peers=4, results={0: None, 1: None, 3: {"phase": "stopped", "rounds_done": 2}})
    partial.peer(1).write_status(Status(1, 1, "training", rounds_done=1))
    outcome = invoke("digest", one.root, partial.root)
    assert outcome.exit_code == 1
    assert outcome.stdout.splitlines() == [
        f"{partial.root}: peers 0-1 3 have not finished (0 to 2 of 3 rounds done)",
        "identical: peers 2",
    ]
    assert invoke("digest", partial.root).stderr == "peers 0-1 3 have not finished (0 to 2 of 3 rounds done)\n"
    # Peers that were stopped after the same rounds can be compared.
    stopped = {peer: {"phase": "stopped", "rounds_done": 2} for peer in range(4)}
    first, second = (make_folder(name, peers=4, results=stopped) for name in ("first", "second"))
    assert invoke("digest", first.root, second.root).exit_code == 0


def test_digest_compares_runs_with_different_peers(make_folder: MakeFolder, invoke: Invoke) -> None:
    four, six = make_folder("four", peers=4), make_folder("six", peers=6)
    outcome = invoke("digest", four.root, six.root)
    assert outcome.exit_code == 1
    assert outcome.stdout == f"different: {four.root} has 4 peers, {six.root} has 6\n"
    alone = make_folder("alone", peers=4)
    for peer in (0, 1, 3):  # they run on other hosts
        shutil.rmtree(alone.peer(peer).root)
    outcome = invoke("digest", four.root, alone.root)
    assert outcome.exit_code == 1
    assert outcome.stdout == f"{alone.root}: no files of peers 0-1 3\nidentical: peers 2\n"


def test_a_stopped_simulation_suggests_to_resume_it(
    make_folder: MakeFolder, file: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(results={0: {"phase": "stopped"}, 1: {"phase": "stopped"}})
    stopped = folder, summarize(folder)
    monkeypatch.setattr("launcher.backends.simulation.simulate", lambda *arguments, clock: stopped)
    outcome = invoke("simulate", file)
    assert outcome.exit_code == 1
    assert outcome.stderr == f"peers 0-1: stopped\nresume from the checkpoints with: p2pfl resume {folder.root}\n"


@pytest.mark.parametrize("command", ["status", "show", "stop", "compare", "logs", "launch", "graph", "sweep"])
def test_a_path_that_cannot_be_read_is_an_error_in_one_line(tmp_path: Path, invoke: Invoke, command: str) -> None:
    path = tmp_path / ("x" * 256)
    outcome = invoke(command, path)
    assert outcome.exit_code in (1, 2)
    (line,) = outcome.stderr.splitlines()
    assert line.startswith(f"error: {path}")
    assert line.endswith(": cannot be read: File name too long")


@pytest.mark.parametrize("number", ["inf", "nan"])
@pytest.mark.parametrize("option", ["compare --at-bytes", "compare --at-seconds"])
def test_numbers_of_options_are_finite(tmp_path: Path, invoke: Invoke, option: str, number: str) -> None:
    outcome = invoke(*option.split(), number, tmp_path)
    assert outcome.exit_code == 2
    assert f"{number} is not a finite number" in outcome.stderr


def test_a_report_does_not_overwrite_other_files(make_folder: MakeFolder, invoke: Invoke) -> None:
    folder = make_folder()
    before = folder.run_file.read_text()
    outcome = invoke("report", folder.root, "--without-models", "--output", folder.run_file)
    assert outcome.exit_code == 2
    assert f"'{folder.run_file}' exists and its name does not end in" in " ".join(outcome.stderr.split())
    assert folder.run_file.read_text() == before


def test_resume_writes_the_summary_of_a_run_whose_launcher_was_killed_at_the_end(
    make_folder: MakeFolder, invoke: Invoke
) -> None:
    folder = make_folder(peers=2, results={0: {}, 1: {}})
    folder.summary.write_text('{"finished": false, "seconds": 1000.0}')  # of the launcher before, which was stopped
    outcome = invoke("resume", folder.root, "--json")
    assert outcome.exit_code == 0, outcome.output
    assert json.loads(outcome.stdout)["finished"]
    assert json.loads(folder.summary.read_text()) == json.loads(outcome.stdout)
    again = invoke("resume", folder.root)
    assert again.exit_code == 1
    assert "nothing to resume: every peer is finished" in again.output


def test_resume_says_that_a_run_keeps_its_settings(tmp_path: Path, invoke: Invoke) -> None:
    for change in ("--set=rounds=9", "--rounds=9"):
        outcome = invoke("resume", tmp_path, change)
        assert outcome.exit_code == 2
        assert "p2pfl launch RUN/run.yaml --set rounds=20" in outcome.stderr


def test_join_of_a_finished_run_does_not_touch_its_summary(make_folder: MakeFolder, invoke: Invoke) -> None:
    folder = make_folder(peers=2, results={0: {}, 1: {}})
    assert "has no peer 5; it has 0-1" in invoke("join", folder.root, "--peer", 5).output
    assert not folder.summary.exists()
