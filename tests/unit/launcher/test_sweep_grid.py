"""What `p2pfl sweep` varies: values, files, names, and the errors in them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from launcher.errors import SweepError
from launcher.facts.sweep_folder import NAME, SweepFolder
from launcher.sweep import plan
from launcher.sweep.grid import Axis, parse_axes, parse_axis, points, run_name, seeds_of, split_values
from launcher.sweep.plan import SweepRequest, prepare
from launcher.sweep.space import corners, more_trials, parse, read_space
from p2pfl.errors import RunFileError, RunFolderError
from tests.launcher_fixtures import Invoke


def values(axis: Axis) -> list[object]:
    return [value.value for value in axis.values]


def labels(axis: Axis) -> list[str]:
    return [value.label for value in axis.values]


# ---- values ------------------------------------------------------------------------------------------------


def test_splits_at_commas_outside_brackets_and_quotes() -> None:
    assert list(split_values("[1,2],{a: 1, b: 2},'x,y',3")) == ["[1,2]", "{a: 1, b: 2}", "'x,y'", "3"]


def test_values_are_yaml() -> None:
    axis = parse_axis("algorithm.lr=1e-2,0.1,null,sgd,[1, 2]")
    assert axis.key == "algorithm.lr"
    assert values(axis) == [0.01, 0.1, None, "sgd", [1, 2]]
    assert labels(axis) == ["1e-2", "0.1", "null", "sgd", "[1, 2]"]


def test_a_file_is_the_section_of_that_name_or_all_of_it(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("name: other\nalgorithm: {name: mapl, warmup: 3}\n")
    (tmp_path / "b.yml").write_text("name: local\nlr: 0.5\n")
    axis = parse_axis(f"algorithm={tmp_path}/a.yaml,{tmp_path}/b.yml")
    assert values(axis) == [{"name": "mapl", "warmup": 3}, {"name": "local", "lr": 0.5}]
    assert labels(axis) == ["a", "b"]


def test_files_of_one_name_are_labelled_by_their_paths(tmp_path: Path) -> None:
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.yaml").write_text("name: local\n")
    text = f"{tmp_path}/x/a.yaml,{tmp_path}/y/a.yaml"
    assert labels(parse_axis(f"algorithm={text}")) == text.split(",")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("algorithm.lr", "--grid algorithm.lr: expected key=value,value"),
        ("algorithm..lr=1", "expected key=value,value"),
        ("algorithm.lr=0.1,,0.2", "--grid algorithm.lr=0.1,,0.2: algorithm.lr: a value is empty"),
        ("seed=1,1", "'1' is given twice"),
        ("graph={name: ring", "'{name: ring' is invalid YAML"),
        ("algorithm=no.yaml", "algorithm: no.yaml: cannot be read: No such file"),
    ],
)
def test_errors_name_the_option_and_the_key(text: str, message: str) -> None:
    with pytest.raises(RunFileError) as caught:
        parse_axis(text)
    assert message in str(caught.value)


def test_an_invalid_file_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("name: mapl\nlr: [1\n")
    with pytest.raises(RunFileError, match=rf"algorithm: {file}:3 is invalid YAML"):
        parse_axis(f"algorithm={file}")


def test_an_empty_file_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("")
    with pytest.raises(RunFileError, match="empty; expected the value of algorithm"):
        parse_axis(f"algorithm={file}")


def test_a_key_is_varied_by_one_option() -> None:
    with pytest.raises(RunFileError, match=r"--grid rounds=2: rounds: also varied by --grid rounds=1"):
        parse_axes(["rounds=1", "rounds=2"])


# ---- points ------------------------------------------------------------------------------------------------


def test_every_combination_with_every_seed_in_the_order_given() -> None:
    found = points(parse_axes(["algorithm.lr=0.1,0.2", "algorithm=local,mapl"]), [4, 5])
    assert [point.name for point in found] == [
        f"lr={lr}-{name}-seed={seed}" for lr in ("0.1", "0.2") for name in ("local", "mapl") for seed in (4, 5)
    ]
    assert found[0].labels == {"algorithm.lr": "0.1", "algorithm": "local"}
    assert all(NAME.fullmatch(point.name) for point in found)


def test_shorter_keys_are_applied_first() -> None:
    (point,) = points(parse_axes(["algorithm.lr=0.1", "algorithm=local"]), [0])
    assert list(point.values) == ["algorithm", "algorithm.lr"]


def test_names_are_safe_and_different() -> None:
    assert run_name({"data.partition.x": "../a b"}, 0, ()) == "x=.._a_b-seed=0"
    assert run_name({"rounds": "3", "data.partition.name": "iid"}, 1, ()) == "rounds=3-iid-seed=1"
    assert run_name({"graph": "a/b"}, 0, ["a_b-seed=0"]) == "a_b-seed=0-2"
    long = run_name({"graph": "g" * 500}, 7, ())
    assert len(long) == 120
    assert long.endswith("-seed=7")
    assert NAME.fullmatch(run_name({"graph": "..."}, 0, ())) is not None


def test_seeds_count_from_that_of_the_file_or_are_those_of_the_grid() -> None:
    assert seeds_of([], 3, None) == ([], [3])
    assert seeds_of([], 3, 2) == ([], [3, 4])
    axis, other = parse_axes(["seed=7,1", "rounds=1"])
    assert seeds_of([axis, other], 3, None) == ([other], [7, 1])
    with pytest.raises(RunFileError, match="give either --seeds or --grid seed="):
        seeds_of([axis], 3, 2)


@pytest.mark.parametrize("text", ["seed=x", "seed=-1", "seed=true", "seed=1.5"])
def test_a_seed_is_an_integer(text: str) -> None:
    with pytest.raises(RunFileError, match=f"seed: should be an integer of at least 0 .found {text[5:]}."):
        seeds_of(parse_axes([text]), 0, None)


# ---- plans -------------------------------------------------------------------------------------------------


def ask(file: Path, *grid: str, **more: object) -> SweepRequest:
    return SweepRequest(file, parse_axes(grid), out=file.parent / "sweep", simulate=True, **more)  # type: ignore[arg-type]


def test_writes_the_resolved_run_file_of_every_run(file: Path) -> None:
    folder = prepare(ask(file, "algorithm.lr=0.01,0.1", "algorithm=local,mapl", seeds=2))
    assert len(folder.sweep.points) == 8
    plain = yaml.safe_load(folder.plan("lr=0.1-mapl-seed=1").read_text())
    assert (plain["algorithm"]["name"], plain["algorithm"]["lr"], plain["seed"]) == ("mapl", 0.1, 1)
    assert yaml.safe_load(folder.plan("lr=0.01-mapl-seed=0").read_text())["algorithm"]["lr"] == 0.01
    assert folder.sweep.grid == {"algorithm.lr": ["0.01", "0.1"], "algorithm": ["local", "mapl"]}


def test_a_value_of_a_file_is_not_changed_by_a_longer_key(file: Path, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("name: local\nlr: 0.5\n")
    folder = prepare(ask(file, f"algorithm={tmp_path}/a.yaml", "algorithm.batch=8,16"))
    batches = [yaml.safe_load(folder.plan(p.name).read_text())["algorithm"]["batch"] for p in folder.sweep.points]
    assert batches == [8, 16]


def test_unknown_keys_name_the_option_and_what_was_meant(file: Path) -> None:
    with pytest.raises(RunFileError) as caught:
        prepare(ask(file, "algorithm.lrr=0.1,0.2", seeds=3))
    text = str(caught.value)
    assert text.startswith("--grid algorithm.lrr=0.1,0.2: algorithm.lrr: unknown key 'lrr'; known: ")
    assert text.endswith("did you mean 'lr'?")
    assert "\n" not in text  # once, not for each seed
    assert not (file.parent / "sweep").exists()


def test_wrong_values_of_several_keys_are_reported_together(file: Path) -> None:
    with pytest.raises(RunFileError) as caught:
        prepare(ask(file, "algorithm=local,mapel", "rounds=2,two"))
    text = str(caught.value)
    assert "--grid algorithm=local,mapel: algorithm.name: unknown 'mapel'" in text
    assert "did you mean 'mapl'?" in text
    assert "--grid rounds=2,two: rounds: should be an integer (found 'two')" in text


def test_the_same_request_finds_the_same_folder(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    request = SweepRequest(file, parse_axes(["rounds=1,2"]))
    first = prepare(request)
    assert first.root.parent == file.parent / "sweeps"
    assert first.root.name.startswith("toy-")
    before = first.file.stat().st_ino
    assert prepare(request) == first
    assert first.file.stat().st_ino == before
    assert prepare(SweepRequest(file, parse_axes(["rounds=1,3"]))) != first
    file.write_text(file.read_text().replace("ring", "complete"))
    assert prepare(request) != first


def test_another_sweep_in_the_folder_is_an_error_that_names_the_difference(file: Path) -> None:
    prepare(ask(file, "rounds=1,2"))
    with pytest.raises(
        SweepError, match=r"holds another sweep, which differs in --grid \({'rounds': \['1', '2'\]} there"
    ):
        prepare(ask(file, "rounds=1,3"))
    file.write_text(file.read_text().replace("ring", "complete"))
    with pytest.raises(SweepError, match="made from another version of the run file"):
        prepare(ask(file, "rounds=1,2"))


def test_an_interrupted_creation_is_repeated_but_a_foreign_folder_is_not_used(file: Path) -> None:
    root = file.parent / "sweep"
    (root / "plans" / "half").mkdir(parents=True)
    assert prepare(ask(file, "rounds=1,2")).root == root
    (file.parent / "mine").mkdir()
    (file.parent / "mine" / "notes.txt").touch()
    with pytest.raises(RunFolderError, match=r"mine: not empty \(it has notes.txt\)"):
        prepare(SweepRequest(file, parse_axes(["rounds=1,2"]), out=file.parent / "mine"))


def test_a_sweep_file_cannot_name_folders_outside(file: Path) -> None:
    folder = prepare(ask(file, "rounds=1,2"))
    plain = yaml.safe_load(folder.file.read_text())
    plain["runs"][0]["name"] = "../../x"
    folder.file.write_text(yaml.safe_dump(plain))
    with pytest.raises(RunFolderError, match=r"sweep.yaml: damaged: '../../x' is not the name of a run"):
        _ = SweepFolder.open(folder.root).sweep


@pytest.mark.parametrize(
    "text", ["", "[]", "digest: x", "{digest: x, file: y, simulate: true, set: [], grid: 3, runs: []}"]
)
def test_a_damaged_sweep_file_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "sweep.yaml").write_text(text)
    with pytest.raises(RunFolderError, match=r"sweep.yaml: damaged: "):
        _ = SweepFolder.open(tmp_path).sweep


def test_a_sweep_on_a_simulated_clock_is_another_one(file: Path) -> None:
    folder = prepare(ask(file, "rounds=1,2", clock=True))
    assert folder.sweep.clock
    with pytest.raises(SweepError, match=r"which differs in --clock \(True there\)"):
        prepare(ask(file, "rounds=1,2"))


def test_without_an_order_of_messages_no_run_is_planned(file: Path) -> None:
    grid = "models=tiny-cnn", "algorithm=dpsgd", "synchrony=rounds,none"
    with pytest.raises(RunFileError, match=r"synchrony: nothing orders messages here: .* with --clock"):
        prepare(ask(file, *grid))
    assert not (file.parent / "sweep").exists()
    assert len(prepare(ask(file, *grid, clock=True)).sweep.points) == 2


def test_runs_without_training_are_planned_on_a_simulated_clock_only(file: Path) -> None:
    with pytest.raises(RunFileError, match=r"time\.train.*: false leaves training out"):
        prepare(ask(file, "time={train: false}"))
    assert prepare(ask(file, "time={train: false}", clock=True)).sweep.clock


# ---- the command line --------------------------------------------------------------------------------------


def test_usage_errors_exit_with_2(file: Path, tmp_path: Path, invoke: Invoke) -> None:
    for arguments, message in [
        ((file,), "nothing to vary: give --grid, --seeds or --optuna"),
        ((file, "--seeds", 2, "--trials", 3), "--trials is for --optuna"),
        ((file, "--seeds", 2, "--optuna", "x.yaml"), "leave out --grid and --seeds"),
        ((tmp_path, "--seeds", 2, "--set", "rounds=3"), "is a sweep, which --seeds, --set cannot change"),
        ((file, "--grid", "seed=1,1"), "'1' is given twice"),
        ((file, "--seeds", 2, "--clock", "--backend", "local"), "--clock starts no peers: leave out --backend"),
        ((file, "--seeds", 2, "--sbatch", "--seconds-to", 0.5), "--seconds-to is not for --sbatch"),
        ((tmp_path, "--clock"), "is a sweep, which --clock cannot change"),
        ((file, "--seeds", 999999999999), "999999999999 is not in the range 1<=x<=10000"),
    ]:
        outcome = invoke("sweep", *arguments)
        assert outcome.exit_code == 2
        assert message in " ".join(outcome.stderr.split())


def test_a_folder_without_sweep_exits_with_1(tmp_path: Path, invoke: Invoke) -> None:
    outcome = invoke("sweep", tmp_path)
    assert outcome.exit_code == 1
    assert f"{tmp_path}: not the folder of a sweep (no sweep.yaml in it)" in outcome.stderr


def test_runs_at_the_same_time_need_different_ports(file: Path, invoke: Invoke) -> None:
    file.write_text(file.read_text() + "transport: {port: 5000}\n")
    folder = prepare(SweepRequest(file, parse_axes(["rounds=1,2"]), out=file.parent / "sweep"))
    outcome = invoke("sweep", folder.root, "--jobs", 2)
    assert outcome.exit_code == 1
    assert "transport.port is 5000: runs at the same time would need the same ports" in outcome.stderr


def test_another_sweep_process_is_refused(file: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def held(file: int, operation: int) -> None:
        raise BlockingIOError

    folder = prepare(ask(file, "rounds=1,2"))
    monkeypatch.setattr("fcntl.lockf", held)
    outcome = invoke("sweep", folder.root)
    assert outcome.exit_code == 1
    assert "another `p2pfl sweep` works on this folder" in outcome.stderr


# ---- search spaces -----------------------------------------------------------------------------------------


def space_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "space.yaml"
    path.write_text(text)
    return path


def test_reads_a_search_space(tmp_path: Path) -> None:
    ranges = "  algorithm.lr: {low: 1e-4, high: 0.1, log: true}\n  algorithm.batch: {low: 8, high: 32}\n"
    text = f"trials: 4\nspace:\n{ranges}  algorithm.optimizer: [sgd, adam, adam]\n"
    found = read_space(space_file(tmp_path, text), None)
    space = parse(json.loads(json.dumps({**found, "seed": 3})))
    assert space.settings.trials == 4
    assert corners(space) == [
        {"algorithm.lr": 1e-4, "algorithm.batch": 8, "algorithm.optimizer": "sgd"},
        {"algorithm.lr": 0.1, "algorithm.batch": 32, "algorithm.optimizer": "adam"},
        {"algorithm.lr": 0.1, "algorithm.batch": 32, "algorithm.optimizer": "adam"},
    ]
    assert read_space(tmp_path / "space.yaml", 9)["trials"] == 9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trials: 3", "space.yaml: space: missing"),
        ("space: {}", "space.yaml:1: space: "),
        ("space: {a: [1]}\ntrails: 3", "space.yaml:2: trails: unknown key 'trails'; known: "),
        ("space:\n  a: {low: 3, high: 1}", "space.yaml:2: space.a: low should be below high, got 3 and 1"),
        ("space:\n  a: {low: 0, high: 1, log: true}", "low should be above 0 if log is true"),
        ("space:\n  a: {low: 1, high: 2, step: 0.1}", "step should be an integer"),
        ("space:\n  a: {low: 1, hihg: 2}", "space.a.hihg: unknown key 'hihg'; known: low, high, log, step"),
        ("space:\n  a: 3", "space.yaml:2: space.a: should be a list of values, or {low: …, high: …} (found 3)"),
        ("- a", "not a mapping; expected at least space"),
        ("space: [", "space.yaml:1: invalid YAML"),
    ],
)
def test_errors_in_a_search_space_name_the_line_and_the_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(RunFileError) as caught:
        read_space(space_file(tmp_path, text), None)
    assert message in str(caught.value)


def test_a_missing_space_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunFileError, match="cannot be read: No such file"):
        read_space(tmp_path / "no.yaml", None)


def test_values_of_a_search_are_checked_before_it_starts(file: Path, tmp_path: Path) -> None:
    search = read_space(space_file(tmp_path, "space:\n  algorithm.lrr: [1, 2]\n  rounds: {low: -1, high: 2}\n"), None)
    with pytest.raises(RunFileError) as caught:
        prepare(SweepRequest(file, search=search, out=tmp_path / "sweep"))
    assert "search space: algorithm.lrr: unknown key 'lrr'" in str(caught.value)
    assert "search space: rounds: " in str(caught.value)


def test_more_trials_continue_the_same_search(file: Path, tmp_path: Path) -> None:
    space = space_file(tmp_path, "space: {algorithm.lr: [0.1, 0.2]}\n")
    first = prepare(SweepRequest(file, search=read_space(space, 3), out=tmp_path / "sweep"))
    again = prepare(SweepRequest(file, search=read_space(space, 5), out=tmp_path / "sweep"))
    assert again == first
    search = again.sweep.search
    assert search is not None
    assert search["trials"] == 5


def test_trials_of_a_search_that_is_at_work_are_not_changed(file: Path, tmp_path: Path) -> None:
    """It adds its trials to the file that would be written."""
    space = space_file(tmp_path, "space: {algorithm.lr: [0.1, 0.2]}\n")
    folder = prepare(SweepRequest(file, search=read_space(space, 3), out=tmp_path / "sweep"))
    code = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); input()"
    command = [sys.executable, "-c", code, str(folder.root / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(SweepError, match="another `p2pfl sweep` works on this folder"):
            prepare(SweepRequest(file, search=read_space(space, 5), out=tmp_path / "sweep"))
        with pytest.raises(SweepError, match="another `p2pfl sweep` works on this folder"):
            more_trials(folder, 5)
        assert other.stdin is not None
        other.stdin.write(b"\n")
    more_trials(folder, 5)
    assert (folder.sweep.search or {})["trials"] == 5


def test_trials_of_a_changed_run_file_are_refused(file: Path, tmp_path: Path) -> None:
    space = space_file(tmp_path, "space: {algorithm.lr: [0.1, 0.2]}\n")
    folder = prepare(SweepRequest(file, search=read_space(space, 3), out=tmp_path / "sweep"))
    file.write_text(file.read_text() + "# changed\n")
    with pytest.raises(SweepError, match="has changed since the sweep"):
        plan.plan_trial(folder, points([], [0])[0])
