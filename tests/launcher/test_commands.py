"""The command line as a whole: what it imports, how it fails, what it prints."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from launcher import cli
from launcher.commands import commands
from launcher.summary import summarize
from p2pfl.models import GROUPS
from p2pfl.runfolder import Status

BAD = "name: toy\nrounds: 0\npeers: 2\nalgorithm: {name: mapel}\ndata: {dataset: digits}\n"


@pytest.mark.parametrize(
    "arguments", [["--help"], ["list", "."], ["digest", "RUN"], ["logs", "RUN"], ["stop", "RUN"]]
)
def test_what_does_not_compute_does_not_wait_for_torch(make_folder, arguments):
    root = str(make_folder().root)
    code = (
        "import sys\nfrom launcher.commands import commands\n"
        "try: commands(sys.argv[1:])\n"
        "finally: assert not {'torch', 'zmq', 'pydantic', 'matplotlib'} & sys.modules.keys()"
    )
    given = [root if argument == "RUN" else argument for argument in arguments]
    done = subprocess.run([sys.executable, "-c", code, *given], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.returncode == 0


def test_every_command_has_help(invoke):
    for name in commands.commands:
        if name != "peer":  # a door to another program, which has its own
            assert "Usage:" in invoke(name, "--help").output


def test_the_list_of_commands_says_what_each_does_without_cutting_it_off(invoke):
    listed = invoke("--help").stdout
    assert "  data        Show how a dataset is divided among the peers.\n" in listed
    assert "  keys        Make keys, by which peers know each other.\n" in listed
    assert "  peer        Be one peer: --run RUN --me N [--file FILE].\n" in listed


def test_peer_is_the_door_to_the_peers_package():
    done = subprocess.run([sys.executable, "-m", "launcher.cli", "peer", "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: p2pfl peer [OPTIONS]\n")
    assert "--me" in done.stdout


def test_the_namesake_is_refused(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: {"p2pfl": "0.4.2"}[name])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    message = str(caught.value.code)
    assert "p2pfl 0.4.2, another project's distribution" in message
    assert "-m pip uninstall p2pfl p2pfl-mesh" in message


def test_a_wrong_run_file_exits_with_2_and_no_traceback(tmp_path, invoke):
    file = tmp_path / "bad.yaml"
    file.write_text(BAD)
    outcome = invoke("graph", file)
    assert outcome.exit_code == 2
    assert outcome.stdout == ""
    assert outcome.stderr.startswith(f"error: {file}:2: rounds: ")


def test_a_folder_that_is_no_run_exits_with_1(tmp_path, invoke):
    for command in ("logs", "digest", "stop"):
        outcome = invoke(command, tmp_path)
        assert outcome.exit_code == 1
        assert "no run folder (no run.yaml in it)" in outcome.stderr


def test_wrong_usage_exits_with_2(make_folder, invoke):
    root = make_folder().root
    assert invoke("launch", "x.yaml", "--rounds", "0").exit_code == 2
    assert invoke("logs", root, "--grep", "(").exit_code == 2
    outcome = invoke("algorithms", "mapel")
    assert outcome.exit_code == 2
    assert "did you mean 'mapl'?" in outcome.stderr


def test_algorithms(invoke):
    assert {one["name"] for one in json.loads(invoke("algorithms", "--json").stdout)} >= {"local", "dpsgd", "mapl"}
    text = invoke("algorithms").stdout
    assert "dpsgd: " in text
    assert "http" in text
    mapl = json.loads(invoke("algorithms", "mapl", "--json").stdout)
    (warmup,) = [note for note in mapl["hyper"] if note["name"] == "warmup"]
    assert warmup["default"] == 100
    assert warmup["text"]
    assert "warmup" in invoke("algorithms", "mapl").stdout


def test_algorithms_of_one_paper_are_told_apart_and_none_has_dashes_for_a_paper(invoke):
    found = json.loads(invoke("algorithms", "--json").stdout)
    gists = [one["gist"] for one in found]
    assert len(set(gists)) == len(gists)
    lines = invoke("algorithms").stdout.splitlines()
    assert {f"    {gist}" for gist in gists} <= set(lines)
    assert all(len(gist) <= 116 for gist in gists)
    assert not any("—" in line for line in lines)


def test_models_of_one_group_and_of_one_member(invoke):
    found = json.loads(invoke("models", "tiny4", "--channels", "1", "--size", "8", "--json").stdout)
    assert found["name"] == "tiny4"
    first = found["members"][0]
    assert first["name"] == "tiny-cnn"
    assert first["features"] == 64
    assert first["head_bytes"] == 4 * (64 * 10 + 10)
    assert first["prototype_bytes"] == 4 * 64 * 10
    assert first["flops"] > 2 * 9 * 32 * 64
    wider = json.loads(invoke("models", "tiny-cnn", "--features", "32", "--classes", "3", "--json").stdout)
    assert [(one["name"], one["head_bytes"]) for one in wider["members"]] == [("tiny-cnn", 4 * 33 * 3)]
    text = invoke("models", "tiny4").stdout
    assert text.splitlines()[0].startswith("group  model          parameters  d   FLOPs")
    assert len(text.splitlines()) == 5


def test_models_lists_every_group_and_what_belongs_to_none(monkeypatch, invoke):
    asked = []
    monkeypatch.setattr("launcher.describe.describe_models", lambda names, *images: asked.extend(names) or [])
    invoke("models")
    assert asked[:2] == ["tiny4", "mapl4"]
    assert asked[-2:] == ["l2c-cnn", "l2c-conv4"]
    assert len(asked) == len(set(asked)) == len(GROUPS) + 2


def test_models_that_take_no_such_images_say_so(invoke):
    outcome = invoke("models", "htfe2", "--size", "8")
    assert outcome.exit_code == 0
    assert "–" in outcome.stdout
    assert "no figures where 2 convolutions of 5x5 without padding leave nothing of images of 8x8" in outcome.stderr
    outcome = invoke("models", "htfe5")
    assert outcome.exit_code == 2
    assert "did you mean 'htfe" in outcome.stderr


@pytest.fixture
def ring(file, tmp_path, monkeypatch):
    monkeypatch.setenv("P2PFL_CACHE", str(tmp_path / "cache"))
    file.write_text(file.read_text().replace("peers: 3", "peers: 6"))
    return file


def test_graph(ring, invoke):
    found = json.loads(invoke("graph", ring, "--json").stdout)
    assert found.pop("spectral_gap") == pytest.approx(1 / 3)
    assert found == {
        "peers": 6, "edges": 6, "degree": {"min": 2, "mean": 2.0, "max": 2}, "components": 1, "diameter": 3
    }  # fmt: skip
    assert "diameter      3\n" in invoke("graph", ring).stdout
    outcome = invoke("graph", ring, "--set", "graph={name: edges, edges: [[0, 1]], allow_disconnected: true}")
    assert "diameter      none: 5 components\n" in outcome.stdout


@pytest.mark.parametrize("graph", ["ring", "complete"])
def test_graph_draws_a_png(tmp_path, ring, invoke, graph):
    pytest.importorskip("matplotlib")
    # Also under a name that does not say so.
    outcome = invoke("graph", ring, "--set", f"graph={graph}", "--png", tmp_path / graph)
    assert outcome.exit_code == 0
    assert outcome.stderr == f"drawn: {tmp_path / graph}\n"
    assert (tmp_path / graph).read_bytes().startswith(b"\x89PNG")


def test_graph_names_the_extra_that_draws(tmp_path, ring, invoke, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    outcome = invoke("graph", ring, "--png", tmp_path / "g.png")
    assert outcome.exit_code == 1
    assert "pip install 'p2pfl-mesh[report]'" in outcome.stderr


CLUSTERS = "data.partition={name: clusters, per_class: 10, test_per_class: 5}"


def test_data_show(ring, invoke):
    outcome = invoke("data", "show", ring, "--set", CLUSTERS)
    assert outcome.exit_code == 0
    head, *rest = outcome.stdout.splitlines()
    assert head == "digits: 1442 training and 355 test images 1x8x8, 10 classes; partition clusters"
    rows = [line.split() for line in rest[1:-1]]
    assert rows == [["0-2", "0", "50", "0", "25", "0-4:", "10"], ["3-5", "1", "50", "0", "25", "5-9:", "10"]]
    assert rest[-1] == "300 training samples in all, 300 of them different; a peer has 50 to 50, 50.0 on average"


def test_data_show_json(ring, invoke):
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
def test_classes_are_listed_in_short(counts, text):
    from launcher.shares import classes

    assert classes(counts) == text


@pytest.mark.parametrize("peers", [1, 100])
def test_data_show_draws_a_png(tmp_path, ring, invoke, peers):
    pytest.importorskip("matplotlib")
    sets = ["--set", f"peers={peers}", "--set", "graph=complete"]
    outcome = invoke("data", "show", ring, *sets, "--png", tmp_path / "d.png")
    assert outcome.exit_code == 0
    assert outcome.stderr == f"drawn: {tmp_path / 'd.png'}\n"
    assert (tmp_path / "d.png").read_bytes().startswith(b"\x89PNG")


def test_data_show_names_the_extra_that_draws(tmp_path, ring, invoke, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    outcome = invoke("data", "show", ring, "--png", tmp_path / "d.png")
    assert outcome.exit_code == 1
    assert "pip install 'p2pfl-mesh[report]'" in outcome.stderr


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        (
            "data.partition={name: clusters, clusters: 3}",
            "10 classes with an overlap of 0 cannot be cut into 3 equal",
        ),
        ("data.dataset={name: npz, path: /no/where.npz}", "npz: missing where.npz; looked in /no"),
    ],
)
def test_data_that_cannot_be_had_is_an_error_of_the_run_file(ring, invoke, assignment, message):
    outcome = invoke("data", "show", ring, "--set", assignment)
    assert outcome.exit_code == 2
    [line] = outcome.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_digest(make_folder, invoke):
    one, same = make_folder("one"), make_folder("same")
    other = make_folder("other", results={1: {"digest": "f" * 64}})
    partial = make_folder("partial", results={0: None})
    assert json.loads(invoke("digest", one.root, "--json").stdout)[1] == {
        "peer": 1, "rounds_done": 3, "digest": f"{1:064x}"
    }  # fmt: skip
    assert f"{1:064x}" in invoke("digest", one.root).stdout
    assert invoke("digest", one.root, same.root).exit_code == 0
    for there, differ, unfinished in (
        (other, [1], [None, None]),
        (partial, [], [None, {"peers": [0], "slowest": 0, "fastest": 0, "rounds": 3}]),
    ):
        outcome = invoke("digest", one.root, there.root, "--json")
        assert outcome.exit_code == 1
        plain = json.loads(outcome.stdout)
        assert (plain["same"], plain["differ"], plain["unfinished"]) == (False, differ, unfinished)
    assert invoke("digest", partial.root, partial.root).exit_code == 1  # nothing says that they are the same
    assert invoke("digest", one.root, other.root).stdout == "different: peers 1\n"


def test_digest_tells_peers_that_have_not_finished_from_those_that_differ(make_folder, invoke):
    one = make_folder("one", peers=4)
    under_way = make_folder(
        "under way", peers=4, results={0: None, 1: None, 3: {"phase": "stopped", "rounds_done": 2}}
    )
    under_way.peer(1).write_status(Status(1, 1, "training", rounds_done=1))
    outcome = invoke("digest", one.root, under_way.root)
    assert outcome.exit_code == 1
    assert outcome.stdout.splitlines() == [
        f"{under_way.root}: peers 0-1 3 have not finished (0 to 2 of 3 rounds done)",
        "the same: peers 2",
    ]
    assert invoke("digest", under_way.root).stderr == "peers 0-1 3 have not finished (0 to 2 of 3 rounds done)\n"
    # Stopped after the same rounds, they can be compared.
    stopped = {peer: {"phase": "stopped", "rounds_done": 2} for peer in range(4)}
    early, also_early = make_folder("early", peers=4, results=stopped), make_folder("too", peers=4, results=stopped)
    assert invoke("digest", early.root, also_early.root).exit_code == 0


def test_digest_of_runs_that_have_not_the_same_peers(make_folder, invoke):
    four, six = make_folder("four", peers=4), make_folder("six", peers=6)
    outcome = invoke("digest", four.root, six.root)
    assert outcome.exit_code == 1
    assert outcome.stdout == f"different: {four.root} is a run of 4 peers, {six.root} of 6\n"
    alone = make_folder("alone", peers=4)
    for peer in (0, 1, 3):  # started on other hosts
        shutil.rmtree(alone.peer(peer).root)
    outcome = invoke("digest", four.root, alone.root)
    assert outcome.exit_code == 1
    assert outcome.stdout == f"{alone.root}: nothing of peers 0-1 3 is there\nthe same: peers 2\n"


def test_a_stopped_simulation_promises_nothing(make_folder, invoke, monkeypatch):
    folder = make_folder(results={0: {"phase": "stopped"}, 1: {"phase": "stopped"}})
    monkeypatch.setattr("launcher.simulation.simulate", lambda order, console: (folder, summarize(folder)))
    outcome = invoke("simulate", "toy.yaml")
    assert outcome.exit_code == 1
    assert outcome.stderr == "peers 0-1: stopped\n"


def test_the_module_runs_as_a_program(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "launcher.cli", "list", tmp_path / "no"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr == f"error: {tmp_path / 'no'}: cannot be read: No such file or directory\n"
