"""The Python API: load, simulate, launch, and the records of a run."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import p2pfl
from p2pfl import api
from p2pfl.errors import Diverged, MissingExtra, RunFailed, RunFileError, RunFolderError
from p2pfl.run_folder.folder import RunFolder
from p2pfl.session.build import load_data
from p2pfl.testing import check_parity, first_difference
from tests.conftest import tree
from tests.plugin_fixtures import METHOD, RUN, Project

PYTHON = sys.executable
pytestmark = pytest.mark.usefixtures("fast_children")

SMALL: dict[str, Any] = tree(
    algorithm={"name": "dpsgd", "batch": 16}, peers=3, rounds=3, chaos={}, transport={"deadline": 200, "give_up": 60}
)


# ---- what is exported ------------------------------------------------------------------------------------------


def test_public_list_is_complete_and_importing_it_does_not_import_torch() -> None:
    assert sorted({*api.__all__, "PeerId"}) == p2pfl.__all__
    assert all(getattr(p2pfl, name) is getattr(api, name) for name in api.__all__)
    assert set(p2pfl.__all__) <= set(dir(p2pfl))
    public = {
        name
        for name, value in vars(api).items()
        if getattr(value, "__module__", "") == "p2pfl.api" and hasattr(value, "__qualname__") and name[0] != "_"
    }
    assert public == set(api.__all__)
    code = "import sys, p2pfl; assert 'torch' not in sys.modules; p2pfl.load; assert 'torch' in sys.modules"
    subprocess.run([PYTHON, "-c", code], check=True)
    with pytest.raises(AttributeError, match="module 'p2pfl' has no attribute 'lod'"):
        _ = p2pfl.lod


# ---- load ------------------------------------------------------------------------------------------------------


def test_overrides_take_precedence_and_are_named_in_errors(tmp_path: Path) -> None:
    given = {**SMALL, "algorithm": "dpsgd"}
    run = p2pfl.load(given, seed=9, algorithm__batch=8, graph={"name": "ring"})
    assert (run.settings["seed"], run.settings["algorithm"]["batch"], run.settings["graph"]["name"]) == (9, 8, "ring")
    assert given["algorithm"] == "dpsgd"
    assert repr(run) == "<PlannedRun tiny: dpsgd, 3 peers, 3 rounds>"
    assert run.topology.peers == 3
    assert run.topology_at(7) is run.topology
    time_varying = p2pfl.load(given, graph={"name": "matchings", "allow_disconnected": True}, rounds=2)
    assert [len(time_varying.topology_at(t).edges) for t in range(2)] == [1, 1]
    file = tmp_path / "small.yaml"
    file.write_text("name: small\nrounds: 2\npeers: 3\ndata: {dataset: digits}\nalgorithm: local\n")
    assert p2pfl.load(file, rounds=5).settings["rounds"] == 5
    with pytest.raises(RunFileError, match=r"algorithm\.bacth=8: algorithm\.bacth: unknown key 'bacth'; .*'batch'"):
        p2pfl.load(str(file), algorithm__bacth=8)


# ---- simulate --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> api.RecordedRun:
    return p2pfl.load(SMALL).simulate(tmp_path_factory.mktemp("api") / "run")


def test_metrics_are_a_row_per_peer_and_round(simulated: api.RecordedRun) -> None:
    frame = simulated.metrics()
    assert len(frame) == 9
    assert list(frame.columns[:3]) == ["peer", "t", "loss.ce"]
    assert {"accuracy", "test_loss", "seconds.training", "sent.messages", "received.bytes", "missing"} <= {
        *frame.columns
    }
    records = list(simulated.records())
    assert list(frame["accuracy"]) == [record["personal"]["accuracy"] for record in records]
    for result in simulated.results():
        counts = [entry for kinds in result.sent.values() for entry in kinds.values()]
        sent = sum(entry[1] + entry[2] for entry in counts)
        assert int(frame[frame["peer"] == result.peer]["sent.bytes"].sum()) == sent


def test_files_of_a_diverged_run_are_valid_json(tmp_path: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    settings = tree(algorithm={"name": "local", "lr": 1e30}, peers=2, rounds=1, metrics=["macro-f1"])
    run = p2pfl.load(settings).simulate(tmp_path / "run")
    for file in (*run.folder.glob("peers/*/*.json"), *run.folder.glob("*.json")):
        json.loads(file.read_text(), parse_constant=refuse)
    assert [(result.loss, result.metrics) for result in run.results()] == [(None, {"macro-f1": None})] * 2


def test_a_run_that_rolls_back_all_training_fails_and_no_peer_is_restarted(tmp_path: Path) -> None:
    planned = p2pfl.load(tree(algorithm={"name": "fedsim", "lr": 1e30}, peers=2, rounds=2))
    rolled_back = "peer {}: all 2 trainings were rolled back, because values had diverged: in round 0, model."
    with pytest.raises(Diverged) as info:
        planned.simulate(tmp_path / "simulated")
    assert str(info.value).startswith(rolled_back.format(0))
    assert rolled_back.format(1) in str(info.value)
    assert [result.phase for result in p2pfl.open_run(tmp_path / "simulated").results()] == ["failed"] * 2
    with planned.launch(tmp_path / "launched") as run, pytest.raises(RunFailed) as failed:
        run.wait()
    assert str(failed.value) == str(info.value)
    assert [(status.phase, status.starts) for status in run.status()] == [("failed", 1)] * 2


def test_metrics_need_pandas(simulated: api.RecordedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtra, match=r"pip install 'p2pfl-mesh\[pandas\]'"):
        simulated.metrics()


def test_graph_holds_the_mixing_weights_of_a_round(simulated: api.RecordedRun) -> None:
    graph = simulated.graph()
    assert graph.shape == (3, 3)
    assert np.allclose(graph.sum(axis=1), 1)
    assert np.array_equal(graph, simulated.graph(2))
    with pytest.raises(RunFolderError, match="no mixing weights of round 7; the last complete round is 2"):
        simulated.graph(7)


def test_graph_of_a_peer_that_was_started_by_hand_has_its_row_only(
    tmp_path: Path, simulated: api.RecordedRun
) -> None:
    shutil.copytree(simulated.folder, tmp_path / "run")
    for peer in (0, 2):
        shutil.rmtree(tmp_path / "run" / "peers" / f"{peer:02d}")
    graph = p2pfl.open_run(tmp_path / "run").graph()
    assert np.array_equal(graph[1], simulated.graph()[1])
    assert np.isnan(graph[[0, 2]]).all()


def test_graph_of_a_method_without_weights_is_an_error(tmp_path: Path) -> None:
    run = p2pfl.load(SMALL, algorithm={"name": "local", "batch": 16}, rounds=1).simulate(tmp_path / "run")
    with pytest.raises(RunFolderError, match="no mixing weights: no round is completed, or the method has none"):
        run.graph()


def test_partition_divides_the_dataset_of_a_run(simulated: api.RecordedRun) -> None:
    planned = simulated.plan()
    for dataset, subsets in ((planned.dataset(), planned.partition()), (simulated.dataset(), simulated.partition())):
        assert dataset.name == "digits"
        assert max(int(index) for subset in subsets for index in subset.train) < len(dataset.train)
    assert planned.missing_files() == []


def test_files_that_a_dataset_lacks_are_named_below_the_folder_of_datasets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("P2PFL_DATA", str(tmp_path))
    data = {"dataset": "mnist", "partition": "iid"}
    missing = p2pfl.load({**SMALL, "data": data}).missing_files()
    assert len(missing) == 4
    assert all(name.startswith("MNIST/raw/") for name in missing)
    elsewhere = p2pfl.load({**SMALL, "data": {**data, "root": str(tmp_path / "other")}})
    assert elsewhere.missing_files() == missing


def test_model_is_that_of_the_last_checkpoint(simulated: api.RecordedRun) -> None:
    model = simulated.model(1)
    assert not model.training
    run = simulated._checked()
    dataset, subsets = load_data(run)
    images, labels = dataset.test.take(subsets[1].test)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (dataset.mean, dataset.std))
    correct = (model((images / 255 - mean) / std).argmax(1) == labels).sum()
    assert correct == simulated.results()[1].correct
    assert [list(subset.test) for subset in simulated.partition()] == [list(subset.test) for subset in subsets]
    with pytest.raises(RunFolderError, match="no peer 3; the 3 peers are 0 to 2"):
        simulated.model(3)


def test_simulates_inside_a_running_event_loop_with_the_same_bits(simulated: api.RecordedRun, tmp_path: Path) -> None:
    rounds: list[tuple[int, int, str]] = []

    async def cell() -> api.RecordedRun:
        return p2pfl.load(SMALL).simulate(
            tmp_path / "run", lambda peer, t: rounds.append((peer, t, threading.current_thread().name))
        )

    again = asyncio.run(cell())
    assert first_difference(simulated, again) is None
    assert {name for *_, name in rounds} == {"p2pfl simulate"}
    assert len(rounds) == 9
    assert again.plan().settings == p2pfl.load(SMALL).settings


def test_error_of_a_simulation_in_a_running_event_loop_reaches_the_caller(tmp_path: Path) -> None:
    def fail(peer: int, t: int) -> None:
        raise ZeroDivisionError

    async def cell() -> None:
        p2pfl.load(SMALL).simulate(tmp_path / "run", fail)

    with pytest.raises(ZeroDivisionError):
        asyncio.run(cell())


def test_open_run_finds_a_run_by_its_folder(simulated: api.RecordedRun, tmp_path: Path) -> None:
    again = p2pfl.open_run(str(simulated.folder))
    assert [result.digest for result in again.results()] == [result.digest for result in simulated.results()]
    assert {status.phase for status in again.status()} == {"finished"}
    with pytest.raises(RunFolderError, match="not a run folder"):
        p2pfl.open_run(tmp_path)


# ---- launch ----------------------------------------------------------------------------------------------------


def test_launch_yields_live_records_and_ends_with_the_bits_of_simulate(
    simulated: api.RecordedRun, tmp_path: Path
) -> None:
    launched = p2pfl.load(SMALL).launch(tmp_path / "run")
    with launched:
        seen = [(record["peer"], record["t"]) for record in launched.records(follow=True)]
        run = launched.wait()
    assert sorted(seen) == [(peer, t) for peer in range(3) for t in range(3)]
    assert first_difference(simulated, run) is None
    assert not launched.running()
    assert not (run.folder / "warm.log").exists()


def test_launch_does_not_take_another_run_for_its_own(simulated: api.RecordedRun, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match="not empty; choose a new or empty folder"):
        p2pfl.load(SMALL).launch(tmp_path)
    with pytest.raises(
        RunFolderError, match=r"not empty; resume the run in it with `p2pfl resume .*`, or choose a new"
    ):
        p2pfl.load(SMALL).launch(simulated.folder)


def test_leaving_the_block_stops_a_run(tmp_path: Path) -> None:
    with p2pfl.load(SMALL, rounds=5000, checkpoint_every=1).launch(tmp_path / "run") as launched:
        next(launched.records(follow=True))
        assert launched.running()
        assert launched.status()
        with pytest.raises(TimeoutError, match="still running after 0 s"):
            launched.wait(timeout=0)
    assert {status.phase for status in p2pfl.open_run(tmp_path / "run").status()} == {"stopped"}
    assert launched.wait().results()[0].phase == "stopped"


@pytest.mark.parametrize("raisable", [True, False])
def test_simulate_opens_the_files_of_many_peers_or_names_the_limit(tmp_path: Path, raisable: bool) -> None:
    code = (
        "import resource, p2pfl\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (100, {'hard' if raisable else 100}))\n"
        f"p2pfl.load({SMALL!r}, peers=40, rounds=1).simulate({str(tmp_path / 'run')!r})\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if raisable:
        assert ended.returncode == 0, ended.stderr
    else:
        reason = "may not open enough files for 40 peers|raise the limit of open files"
        assert re.search(rf"errors\.(RunFolderError|WriteError): .*({reason}).*`ulimit -n`", ended.stderr), (
            ended.stderr
        )


def test_simulate_opens_the_pipes_of_many_processes(tmp_path: Path) -> None:
    Path(tmp_path, "run.yaml").write_text(yaml.safe_dump({**SMALL, "peers": 16, "rounds": 1}))
    code = (
        "import resource, sys\n"
        "from launcher.cli import main\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        f"sys.argv = ['p2pfl', 'simulate', '{tmp_path}/run.yaml', '--jobs', '16', '--run-dir', '{tmp_path}/run']\n"
        "main()\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_failed_launch_says_why(project: Project, tmp_path: Path) -> None:
    text = METHOD.replace("weights = {**dict.fromkeys(heads, 1.0)", "weights = {**heads[7]")
    # A peer that fails once less than its neighbor, and so is started once more, waits for it until the deadline.
    run = p2pfl.load(project(my_method=text), transport={"deadline": 10})
    launched = run.launch(tmp_path / "run")
    with pytest.raises(RunFailed, match=r"peer 0: my_method\.py:\d+: round 0: KeyError: 7; peer 1"):
        launched.wait()


def test_launch_that_starts_no_peer_has_failed(
    tmp_path: Path, prepare: Any, make_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = prepare(tmp_path / "prepared", make_run())
    launcher = tmp_path / "launcher"
    launcher.write_text(f"#!/bin/sh\ncp -r {folder.root} {tmp_path / 'run'}\nexit 1\n")
    launcher.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(launcher))
    launched = p2pfl.load(SMALL).launch(tmp_path / "run")
    with pytest.raises(RunFailed, match="the launcher ended without a message"):
        launched.wait()


def test_failed_launch_of_a_dict_names_its_key_and_no_temporary_file(tmp_path: Path) -> None:
    transport = {"hosts": {"0-2": "192.0.2.1"}, "port": 5700}  # an address of documentation, not of this host
    with pytest.raises(RunFailed, match=r"^run: transport\.hosts: peer 0 has the address .*, which is not on this"):
        p2pfl.load({**SMALL, "transport": transport}).launch(tmp_path / "run")


def test_script_needs_no_main_guard(project: Project) -> None:
    file = project()
    script = """
        import p2pfl
        run = p2pfl.load("mine.yaml", rounds=1).launch("launched").wait()
        print(len(run.results()), run.graph.__name__)
    """
    (file.parent / "train.py").write_text(textwrap.dedent(script))
    done = subprocess.run([sys.executable, "train.py"], cwd=file.parent, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("4 graph\n", 0), done.stderr


def test_launch_refuses_names_that_only_this_program_has_registered(tmp_path: Path) -> None:
    lines = """
        import p2pfl
        from p2pfl import plugins

        @plugins.metric("mine")
        def mine(scores, labels):
            return 0.5

        run = p2pfl.load("run.yaml", metrics=["mine"])
        print([result.metrics["mine"] for result in run.simulate("simulated").results()])
        run.launch("launched")
    """
    (tmp_path / "run.yaml").write_text(json.dumps(SMALL))
    (tmp_path / "train.py").write_text(textwrap.dedent(lines))
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == "[0.5, 0.5, 0.5]\n", done.stderr
    assert "p2pfl.errors.RunFailed: metric 'mine': this program has registered it" in done.stderr
    assert not (tmp_path / "launched").exists()


# ---- parity ----------------------------------------------------------------------------------------------------


def test_run_with_plugins_is_bit_identical_after_crashes(project: Project) -> None:
    check_parity(project(), crash=True)


def test_method_that_waits_in_another_task_needs_no_second_compute_slot(project: Project) -> None:
    text = METHOD.replace("await net.exchange(Head(local))", "await asyncio.create_task(net.exchange(Head(local)))")
    text = text.replace("from collections.abc", "import asyncio\nfrom collections.abc", 1)
    check_parity(project(f"{RUN}slots: 1\ntransport: {{deadline: 20}}\n", my_method=text))


def test_warnings_about_a_plug_in_are_in_the_peers_log(project: Project, tmp_path: Path) -> None:
    text = METHOD.replace("await net.exchange(Head(local))", "net.broadcast(Head(local)) and {}")
    line = text[: text.index("net.broadcast")].count("\n") + 1
    p2pfl.load(project(my_method=text)).launch(tmp_path / "run").wait()
    expected = rf" WARNING my_method\.py:{line}: RuntimeWarning: coroutine 'Net\.broadcast' was never awaited\n"
    for peer in range(4):
        assert re.search(expected, RunFolder(tmp_path / "run").peer(peer).log.read_text())


def test_parity_is_of_runs_on_the_cpu() -> None:
    with pytest.raises(ValueError, match="load the run with device='cpu'"):
        check_parity(p2pfl.load(SMALL, device="cuda"))


def test_parity_names_the_first_difference(project: Project) -> None:
    """The losses seen so far are not part of the state: a peer that crashed has forgotten them."""
    text = METHOD.replace(
        "        local = parameters_of",
        "        self.count = getattr(self, 'count', 0) + 1\n        local = parameters_of",
    ).replace("self.hyper.own_weight}", "self.hyper.own_weight * self.count}")
    with pytest.raises(AssertionError, match=r"peer \d, round \d: .* simulated|peer \d, at the end: .* simulated"):
        check_parity(project(RUN.replace("rounds: 3", "rounds: 4"), my_method=text), crash=True)


def test_parity_finds_a_read_of_uninitialized_memory(project: Project) -> None:
    lines = """
        for value in parameters_of(self.model.linear_head).values():
            value.mul_(1.0 + empty(10_000).isnan().float().mean())
        self.train_or_roll_back("""
    text = METHOD.replace("from torch import Tensor", "from torch import Tensor, empty")
    text = text.replace("\n        self.train_or_roll_back(", lines, 1)
    with pytest.raises(AssertionError, match=r"peer \d, round 0: .* simulated"):
        check_parity(project(my_method=text))
