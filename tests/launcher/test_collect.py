"""`p2pfl collect`: what peers elsewhere have written becomes one run folder. ssh and docker are stand-ins."""

from __future__ import annotations

import fcntl
import io
import json
import os
import shutil
import socket
import stat
import sys
import tarfile
import textwrap
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from launcher.collect import collect
from launcher.errors import CollectError
from launcher.logs import has_ended
from launcher.processes import living
from launcher.runs import find_runs
from launcher.sources import Container, Folder, Remote, parse, wanted
from p2pfl.runfolder import Result, RunFolder, Status

ID = "0" * 16
Host = Callable[..., RunFolder]


@pytest.fixture
def host(tmp_path, make_folder) -> Host:
    """The run folder of some peers of a run of four, as these leave it on their own host."""

    def make(name: str, *peers: int, phase: str = "finished", rounds: int = 3, **about: object) -> RunFolder:
        folder = make_folder(f"hosts/{name}", peers=4)
        for place in list(folder.peers()):
            if place.peer not in peers:
                shutil.rmtree(place.root)
                continue
            place.log.write_text(f"2026-11-21T02:41:0{place.peer}.000 INFO    {name}\n")
            place.metrics.write_text('{"t": 0}\n')
            place.checkpoint.write_bytes(b"large")
            if phase != "finished":
                place.clear_result()
            else:
                place.write_result(Result(place.peer, "finished", rounds, f"{place.peer:064x}", "tiny-cnn", 0))
            place.write_status(Status(place.peer, os.getpid(), phase, rounds, rounds))
        (folder.addresses / "00").write_text("tcp://10.0.0.1:40123")
        folder.write_about({**folder.about, "digest": "d" * 64, "host": name, **about})
        return folder

    return make


@pytest.fixture
def into(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "all"


@pytest.fixture
def programs(tmp_path, monkeypatch) -> Callable[[str, str], Path]:
    """Puts small programs before all others on the PATH. Each writes its arguments into a file called NAME.said."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def make(name: str, body: str) -> Path:
        said = folder / f"{name}.said"
        path = folder / name
        path.write_text(f"#!/bin/bash\nprintf '%s\\n' \"$*\" >> {said}\n{textwrap.dedent(body)}")
        path.chmod(0o755)
        return said

    return make


def of(folder: RunFolder) -> dict[int, str]:
    """What each peer's log says, which is the name of the host that it came from."""
    logs = {place.peer: place.log for place in folder.peers()}
    return {peer: log.read_text().split()[-1] for peer, log in logs.items() if log.exists()}


def gather(into: Path, *sources: object, **options: bool) -> tuple[RunFolder, list[str]]:
    said: list[str] = []
    collected = collect(into, [str(source) for source in sources], said.append, **options)
    assert not collected.unread
    return collected.folder, said


# ---- folders ---------------------------------------------------------------------------------------------------


def test_the_folders_of_two_hosts_become_one_run(host, into, invoke):
    one, other = host("one", 0, 1), host("other", 2, 3)
    outcome = invoke("collect", into, one.root, other.root)
    assert outcome.exit_code == 0
    assert outcome.stdout.splitlines()[:2] == [f"{one.root}: peers 0-1", f"{other.root}: peers 2-3"]
    assert outcome.stdout.splitlines()[-1] == f"run: {into}"
    assert outcome.stderr == ""
    folder = RunFolder.open(into)
    assert of(folder) == {0: "one", 1: "one", 2: "other", 3: "other"}
    assert folder.run_file.read_bytes() == one.run_file.read_bytes()
    assert sorted(path.name for path in into.iterdir()) == ["peers", "run.json", "run.yaml", "summary.json"]
    assert sorted(path.name for path in folder.peer(0).root.iterdir()) == [
        "metrics.jsonl", "origin.json", "peer.log", "result.json", "status.json"
    ]  # fmt: skip
    about = folder.about
    assert about["collected"]["sources"] == [str(one.root), str(other.root)]
    assert not {"host", "launcher_pid"} & about.keys()
    origin = folder.peer(3).origin()
    assert (origin.source, origin.about["host"]) == (str(other.root), "other")
    assert json.loads(folder.summary.read_text())["finished"]


def test_what_looks_at_runs_looks_at_a_collection(host, into, invoke):
    whole = host("whole", 0, 1, 2, 3)
    gather(into, host("one", 0, 1).root, host("other", 2, 3).root)
    assert invoke("digest", into, whole.root).exit_code == 0
    assert len(invoke("logs", into).stdout.splitlines()) == 4
    assert invoke("compare", into, whole.root).exit_code == 0
    outcome = invoke("list", into.parent)
    assert "finished (collected " in outcome.stdout
    assert json.loads(invoke("list", into.parent, "--json").stdout)[0]["state"] == "finished"


def test_a_folder_of_run_folders_is_as_good_as_all_of_them(tmp_path, host, into):
    for peer in range(4):
        volume = tmp_path / "volumes" / f"run-{peer}"
        volume.mkdir(parents=True)
        host(f"peer-{peer}", peer).root.rename(volume / "_data")
    (tmp_path / "volumes" / "lost+found").mkdir(mode=0)
    (tmp_path / "volumes" / "something else").mkdir()
    folder, said = gather(into, tmp_path / "volumes")
    assert of(folder) == {peer: f"peer-{peer}" for peer in range(4)}
    assert said[3] == f"{tmp_path}/volumes/run-3/_data: peer 3"
    # The collection may lie among them.
    again, said = gather(tmp_path / "volumes" / "all", tmp_path / "volumes")
    again, said = gather(tmp_path / "volumes" / "all", tmp_path / "volumes")
    assert len(said) == 4
    assert of(again) == of(folder)


def test_checkpoints_come_on_demand(host, into):
    one = host("one", 0)
    assert not gather(into, one.root)[0].peer(0).checkpoint.exists()
    assert gather(into, one.root, checkpoints=True)[0].peer(0).checkpoint.read_bytes() == b"large"


def test_nothing_but_regular_files_of_known_names_is_taken(tmp_path, host, into):
    one = host("one", 0, 1)
    secret = tmp_path / "secret"
    secret.write_text("private")
    (one.peer(0).root / "output.log").symlink_to(secret)
    (one.peer(0).root / "03.key").write_text("private")
    os.mkfifo(one.peer(0).root / "chaos.jsonl")
    (one.root / "peers" / "..evil").mkdir()
    (one.root / "peers" / "07").mkdir()  # no peer of this run
    (one.root / "peers" / "07" / "peer.log").write_text("private")
    with socket.socket(socket.AF_UNIX) as door:
        (one.peer(1).root / "output.log").unlink(missing_ok=True)
        door.bind(os.path.relpath(one.peer(1).root / "output.log"))
        folder, _ = gather(into, one.root)
    names = {path.name for path in folder.root.rglob("*") if path.is_file()}
    assert names == {
        *("run.yaml", "run.json", "summary.json", "origin.json"),
        *("peer.log", "metrics.jsonl", "status.json", "result.json"),
    }
    assert sorted(place.peer for place in folder.peers()) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("run.yaml", True),
        ("./run.json", True),
        ("a/b/run.json", True),
        ("a/b/c/run.json", False),
        ("peers/03/peer.log", True),
        ("a/b/peers/03/result.json", True),
        ("a/b/c/peers/03/result.json", False),
        ("peers/03/checkpoint.pt", False),
        ("peers/03/.status.json.7.tmp", False),
        ("peers/3x/peer.log", False),
        ("peers/03/deep/peer.log", False),
        ("../run.yaml", False),
        ("peers/../peer.log", False),
        ("/run.yaml", False),
        ("addresses/03", False),
        ("keys/03.key", False),
        ("", False),
    ],
)
def test_what_is_wanted(name, taken):
    assert wanted(name, checkpoints=False) is taken


def test_checkpoints_are_wanted_on_demand():
    assert wanted("peers/03/checkpoint-previous.pt", checkpoints=True)
    assert not wanted("peers/03/checkpoint-damaged.pt", checkpoints=True)


# ---- bringing up to date ---------------------------------------------------------------------------------------


def test_a_collection_is_brought_up_to_date(host, into, invoke):
    sources = [host("one", 0, 1, phase="training", rounds=1).root, host("other", 2, phase="waiting", rounds=2).root]
    outcome = invoke("collect", into, *sources)
    assert outcome.exit_code == 0
    assert outcome.stderr.splitlines() == [
        f"peers 0-2: under way: had not ended when collected; see {into}/peers/00/peer.log",
        "peer 3: not collected: nothing was found of it",
    ]
    (line,) = find_runs(into.parent)
    assert (line.state, line.alive, line.rounds_done) == ("under way", 0, 0)
    for folder in sources:
        shutil.rmtree(folder)
    host("one", 0, 1)
    host("other", 2, 3)
    outcome = invoke("collect", into)
    assert outcome.exit_code == 0
    assert outcome.stderr == ""
    (line,) = find_runs(into.parent)
    assert (line.state, line.rounds_done) == ("finished", 3)
    assert of(RunFolder.open(into)) == {0: "one", 1: "one", 2: "other", 3: "other"}


def test_a_result_that_a_restarted_peer_has_taken_back_goes(host, into):
    one = host("one", 0)
    gather(into, one.root)
    one.peer(0).clear_result()
    one.peer(0).write_status(Status(0, 1, "training", 2, 2))
    folder, said = gather(into, one.root)
    assert folder.peer(0).result() is None
    assert said == [f"{one.root}: peer 0"]


def test_of_two_folders_of_a_peer_the_one_that_got_further_is_taken(host, into):
    slow, fast = host("slow", 0, 1, rounds=1), host("fast", 1, 2)
    line = f"peer 1: from {fast.root} (rounds done: 3), not from {slow.root} (rounds done: 1)"
    for order in ((slow, fast), (fast, slow)):
        folder, said = gather(into, *(one.root for one in order))
        assert of(folder) == {0: "slow", 1: "fast", 2: "fast"}
        assert said[-1] == line


def test_what_was_collected_before_counts_too(host, into):
    fast, slow, level = host("fast", 0), host("slow", 0, rounds=1), host("level", 0)
    gather(into, fast.root)
    folder, said = gather(into, slow.root)
    assert of(folder) == {0: "fast"}
    assert said[-1] == f"peer 0: from {fast.root} (rounds done: 3), not from {slow.root} (rounds done: 1)"
    # Of equals the one that is given.
    assert of(gather(into, level.root)[0]) == {0: "level"}
    # From the same place the newer one, whatever it says: it may be computing rounds again after a crash.
    level.peer(0).clear_result()
    level.peer(0).write_status(Status(0, 1, "training", 1, 1))
    assert gather(into, level.root)[0].peer(0).status().rounds_done == 1


def test_the_first_start_is_when_the_run_was_started(host, into):
    early = host("early", 0, started="2026-11-21T10:00:00+02:00")  # which is before 9:30 in Greenwich
    folder, _ = gather(into, host("late", 1).root, early.root)
    assert folder.about["started"] == "2026-11-21T10:00:00+02:00"


# ---- what goes wrong -------------------------------------------------------------------------------------------


def test_a_source_that_cannot_be_read_is_named_and_the_others_are_collected(tmp_path, host, into, invoke):
    one = host("one", 0, 1, 2, 3)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "run.json").write_text("{")
    (tmp_path / "damaged" / "run.yaml").write_text("peers: 4\n")
    outcome = invoke("collect", into, tmp_path / "nowhere", one.root, tmp_path / "damaged", tmp_path / "bin")
    assert outcome.exit_code == 1
    assert outcome.stderr.splitlines() == [
        f"{tmp_path}/nowhere: cannot be read: no such folder",
        f"{tmp_path}/bin: cannot be read: no such folder",
        f"{tmp_path}/damaged: cannot be read: run.json: damaged: not a JSON object",
    ]
    assert of(RunFolder.open(into)) == dict.fromkeys(range(4), "one")


def test_nothing_at_all_leaves_nothing(tmp_path, host, into, invoke):
    outcome = invoke("collect", into, tmp_path / "nowhere", tmp_path)
    assert outcome.exit_code == 1
    assert outcome.stderr == (
        f"error: no run folder was found; nothing is collected\n{tmp_path}/nowhere: no such folder\n"
        f"{tmp_path}: no run folder here, and none in the folders here, 2 deep\n"
    )
    assert not into.exists()
    assert "say where the peers' folders are" in invoke("collect", into).stderr
    assert not into.exists()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"id": "f" * 16}, f"({ID}) and OTHER ({'f' * 16}) are different runs"),
        ({"digest": "e" * 64}, f"({'d' * 64}) and OTHER ({'e' * 64}) are of different run files"),
    ],
)
def test_folders_of_different_runs_are_not_mixed(host, into, invoke, change, reason):
    one, other = host("one", 0), host("other", 1, **change)
    outcome = invoke("collect", into, one.root, other.root)
    assert outcome.exit_code == 1
    assert outcome.stderr == (f"error: {one.root} {reason.replace('OTHER', str(other.root))}; nothing is collected\n")
    assert not into.exists()
    folder, _ = gather(into, one.root)
    before = sorted(into.rglob("*"))
    with pytest.raises(CollectError, match=f"{into} .* and {other.root} .* are different|are of different"):
        gather(into, other.root)
    assert sorted(into.rglob("*")) == before
    assert of(folder) == {0: "one"}


def test_only_a_collection_is_written_into(tmp_path, host, into):
    one = host("one", 0)
    with pytest.raises(CollectError, match="the peers of this run write here themselves"):
        gather(one.root, one.root)
    into.mkdir(parents=True)
    (into / "notes").touch()
    with pytest.raises(CollectError, match="not empty and no collection"):
        gather(into, one.root)
    assert [path.name for path in into.iterdir()] == ["notes"]
    (into / "notes").unlink()
    lock = os.open(into, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(CollectError, match="another `p2pfl collect` is at work here"):
        gather(into, one.root)
    os.close(lock)
    gather(into, one.root)


CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir"}


def killed_at(change: int, do: Callable[[], object]) -> bool:
    """Whether ``do``, in a process of its own, made so many changes to folders; it was killed before the last one."""
    child = os.fork()
    if child == 0:
        left = change

        def before(event: str, arguments: object) -> None:
            nonlocal left
            if event in CHANGES:
                left -= 1
                if left < 0:
                    os._exit(9)

        sys.addaudithook(before)
        do()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def test_a_collection_that_is_broken_off_loses_nothing_and_can_be_gone_on_with(host, into):
    old, new, other = host("old", 0, 1, rounds=1), host("new", 0, 1), host("other", 2)
    gather(into, old.root)
    for change in count():
        shutil.copytree(into, copy := into.with_name(f"copy{change}"))
        if not killed_at(change, lambda copy=copy: gather(copy, new.root)):
            break
        found = of(RunFolder.open(copy))
        assert len(found) >= 1  # that of one peer may be on its way
        assert found.items() <= {(peer, name) for peer in (0, 1) for name in ("old", "new")}
        folder, _ = gather(copy, other.root)
        assert {peer: name in ("old", "new") for peer, name in of(folder).items() if peer < 2} == {0: True, 1: True}
        assert of(folder)[2] == "other"
        assert sorted(path.name for path in copy.iterdir()) == ["peers", "run.json", "run.yaml", "summary.json"]
        assert sorted(path.name for path in (copy / "peers").iterdir()) == ["00", "01", "02", "03"]
    assert change > 20
    assert of(RunFolder.open(copy)) == {0: "new", 1: "new"}


def test_a_first_collection_that_is_broken_off_can_be_gone_on_with(host, into):
    one = host("one", 0, 1)
    for change in count():
        copy = into.with_name(f"copy{change}")
        if not killed_at(change, lambda copy=copy: gather(copy, one.root)):
            break
        assert of(gather(copy, one.root)[0]) == {0: "one", 1: "one"}
    assert change > 10


# ---- peers that are not of this host ---------------------------------------------------------------------------


@pytest.fixture
def collection(host, into) -> RunFolder:
    """Its peer 0 says that it is training, in a process whose number is here this one's."""
    return gather(into, host("one", 0, phase="training", rounds=1).root, host("other", 1, 2).root)[0]


def test_nobody_lives_in_a_collection(collection, make_process):
    process = make_process(collection, 0)  # a process that has the title of a peer of this very folder
    assert living(collection, 0) is None
    process.kill()


@pytest.mark.parametrize(
    "arguments", [["stop", "RUN"], ["stop", "RUN", "--kill"], ["resume", "RUN"], ["join", "RUN", "--peer", 0]]
)
def test_nobody_is_started_or_stopped_from_a_collection(collection, invoke, arguments):
    before = {path: path.read_bytes() for path in collection.root.rglob("*") if path.is_file()}
    outcome = invoke(*(collection.root if argument == "RUN" else argument for argument in arguments))
    assert outcome.exit_code == 1
    assert outcome.stderr == (
        f"error: {collection.root}: a collection: its peers live, or lived, elsewhere, "
        "and are started and stopped there\n"
    )
    assert {path: path.read_bytes() for path in collection.root.rglob("*") if path.is_file()} == before


def test_following_ends_with_what_was_collected(collection, invoke):
    outcome = invoke("logs", collection.root, "-f", "-n", 1)
    assert len(outcome.stdout.splitlines()) == 1
    assert outcome.stderr == (
        f"that is all that was collected; for what has been said since: p2pfl collect {collection.root}\n"
    )
    assert all(has_ended(collection, place) for place in collection.peers())


def test_the_worst_is_what_a_list_says(host, into):
    gather(into, host("one", 0, 1).root)
    assert [line.state for line in find_runs(into.parent)] == ["incomplete"]
    gather(into, host("other", 2, phase="waiting").root)
    assert [line.state for line in find_runs(into.parent)] == ["under way"]
    gather(into, host("third", 3, phase="failed").root)
    assert [line.state for line in find_runs(into.parent)] == ["failed"]


# ---- other hosts -----------------------------------------------------------------------------------------------

SSH = """
    # The last two arguments are the host and what its shell is given. Its home is the folder above bin.
    cd "$(dirname "$0")/.." && eval "${@: -1}"
"""


def test_another_host_is_asked_for_what_is_wanted_and_nothing_else(tmp_path, host, into, programs):
    host("far away", 0, 1)
    said = programs("ssh", SSH)
    folder, lines = gather(into, "ann@alpha:hosts/far away", "[fd00::2]:~/hosts/far away")
    assert of(folder) == {0: "away", 1: "away"}
    assert lines[:2] == ["ann@alpha:hosts/far away: peers 0-1", "[fd00::2]:~/hosts/far away: peers 0-1"]
    first, second = said.read_text().splitlines()
    assert "-o ConnectTimeout=20 " in first
    assert " -- ann@alpha tar -C 'hosts/far away' " in first
    assert "'--exclude=checkpoint*'" in first
    assert " -- fd00::2 tar -C 'hosts/far away' " in second
    assert gather(into, "alpha:hosts", checkpoints=True)[0].peer(0).checkpoint.exists()
    assert "checkpoint" not in said.read_text().splitlines()[-1]


def test_a_host_may_have_several_run_folders(host, into, programs):
    host("one", 0), host("two", 1, 2)
    programs("ssh", SSH)
    folder, lines = gather(into, "alpha:hosts")
    assert lines == ["alpha:hosts/one: peer 0", "alpha:hosts/two: peers 1-2"]
    assert folder.peer(2).origin().source == "alpha:hosts/two"
    assert of(gather(into)[0]) == of(folder)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("echo 'ssh: connect to host alpha: Connection refused' >&2; exit 255", "ssh: connect to host alpha: Conn"),
        (
            "tar -C $(dirname $0)/../hosts/one -cf - . | head -c 5000; exit 255",
            "no whole tar archive: unexpected",
        ),
        ("tar -C $(dirname $0)/../hosts/one -cf - .; exit 255", "ssh: exit code 255"),
        ("echo hello", "no whole tar archive: "),
        ("tar -C $(dirname $0) -cf - .", "no run folder there"),
        ("exit 0", "no whole tar archive: empty file"),
    ],
)
def test_a_host_that_cannot_be_read_changes_nothing(host, into, programs, invoke, body, reason):
    one, two = host("one", 0), host("two", 1)
    programs("ssh", body)
    outcome = invoke("collect", into, two.root, "alpha:x")
    assert outcome.exit_code == 1
    assert outcome.stderr.splitlines()[-1].startswith(f"alpha:x: cannot be read: {reason}")
    assert of(RunFolder.open(into)) == {1: "two"}
    assert one.peer(0).log.exists()


def test_files_that_grow_while_tar_reads_them_are_no_failure(host, into, programs):
    host("one", 0)
    programs("ssh", SSH + '\necho "tar: ./peers/00/peer.log: file changed as we read it" >&2; exit 1')
    assert of(gather(into, "alpha:hosts/one")[0]) == {0: "one"}


def test_an_archive_of_somebody_evil(tmp_path, host, into, programs):
    one = host("one", 0)
    archive = tmp_path / "evil.tar"
    with tarfile.open(archive, "w") as tar:

        def add(name: str, sort: bytes = tarfile.REGTYPE, link: str = "", content: bytes = b"evil") -> None:
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.mode = sort, link, 0o6777
            member.size = len(content) if sort == tarfile.REGTYPE else 0
            tar.addfile(member, io.BytesIO(content))

        for name in ("../../evil", "/evil", "peers/00/../../evil", "peers/00/.bashrc", "evil", "x/../run.yaml"):
            add(name)
        add("peers/01", tarfile.SYMTYPE, str(tmp_path))
        add("peers/00/output.log", tarfile.SYMTYPE, "/etc/passwd")
        add("peers/00/result.json", tarfile.LNKTYPE, "../../../../../../etc/passwd")
        add("peers/00/chaos.jsonl", tarfile.CHRTYPE)
        tar.add(one.root, ".")
        add("peers/00/peer.log", content=b"good")
    programs("ssh", f"cat {archive}")
    folder, _ = gather(into, "alpha:x")
    assert of(folder) == {0: "good"}
    assert stat.S_IMODE(folder.peer(0).log.stat().st_mode) & 0o7022 == 0
    assert not [path for path in tmp_path.rglob("*evil*") if path != archive]
    assert not any(path.is_symlink() for path in into.rglob("*"))
    assert not (folder.peer(0).root / "output.log").exists()


def test_ssh_that_is_not_installed(into, tmp_path, monkeypatch, invoke):
    monkeypatch.setenv("PATH", str(tmp_path))
    outcome = invoke("collect", into, "alpha:x")
    assert outcome.exit_code == 1
    assert "alpha:x: ssh: No such file or directory" in outcome.stderr


def test_what_a_source_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse("runs") == Folder(tmp_path / "runs")
    assert parse("alpha:x") == Remote("alpha", "x", "alpha:x")
    assert parse("bob@[fd00::2]:/srv/x y") == Remote("bob@fd00::2", "/srv/x y", "bob@[fd00::2]:/srv/x y")
    assert parse("./alpha:x") == Folder(tmp_path / "alpha:x")
    (tmp_path / "alpha:x").mkdir()
    assert parse("alpha:x") == Folder(tmp_path / "alpha:x")
    assert parse("container:mesh-3") == Container("mesh-3", "/run/p2pfl")
    assert parse("container:mesh-3:/data") == Container("mesh-3", "/data")
    for one in ("container:mesh-3", "container:mesh-3:/data", "bob@[fd00::2]:/srv/x y", f"compose:{tmp_path}"):
        assert str(parse(one)) == one
    for wrong in ("container:", "container:-v:/x", "alpha:", "-oProxyCommand=reboot:x"):
        with pytest.raises(CollectError, match=f"{wrong}: should be "):
            parse(wrong)


# ---- containers ------------------------------------------------------------------------------------------------

DOCKER = """
    # Containers are folders beside bin; what is in them lies in fs.
    here=$(dirname "$0")/../containers
    if [ "$1" = cp ]; then
        name=${2%%:*} path=${2#*:}
        [ "$3" = - ] || exit 64
        [ -d "$here/$name/fs$path" ] || { echo "Could not find the file $path in container $name" >&2; exit 1; }
        tar -C "$here/$name/fs$path" -cf - .
    elif [ "$1" = inspect ]; then
        shift
        printf '['; comma=
        for name; do printf '%s' "$comma"; cat "$here/$name/config.json"; comma=,; done
        printf ']'
    elif [ "$1 $2" = "compose version" ]; then
        [ -e "$here/plugin" ]
    elif [ "$1" = compose ]; then
        shift; COMPOSE
    else
        exit 64
    fi
"""
COMPOSE = """
    [ "${*: -3}" = "ps -a -q" ] && [ "$COMPOSE_PROFILES" = gpu ] || exit 64
    cat "$(dirname "$0")/../containers/ids"
"""


@pytest.fixture
def engine(tmp_path, host, programs) -> Callable[..., Path]:
    """A stand-in for Docker, with containers by name: each has the environment given, and its peers' run folder."""
    containers = tmp_path / "containers"
    containers.mkdir()
    (containers / "ids").touch()
    said = programs("docker", DOCKER.replace("COMPOSE", COMPOSE.strip()))

    def start(name: str, *peers: int, service: str = "", at: str = "/run/p2pfl", **environment: str) -> Path:
        inside = containers / name / f"fs{at}"
        inside.parent.mkdir(parents=True)
        if peers:
            host(name, *peers).root.rename(inside)
        (containers / name / "config.json").write_text(
            json.dumps(
                {
                    "Name": f"/{name}",
                    "Config": {
                        "Env": [f"{key}={value}" for key, value in environment.items()],
                        "Labels": {"com.docker.compose.service": service} if service else None,
                    },
                }
            )
        )
        with (containers / "ids").open("a") as ids:
            ids.write(f"{name}\n")
        return said

    return start


def test_a_container_is_a_source(engine, into):
    engine("mesh-0", 0)
    engine("mesh-1", 1, at="/elsewhere")
    folder, lines = gather(into, "container:mesh-0", "container:mesh-1:/elsewhere")
    assert of(folder) == {0: "mesh-0", 1: "mesh-1"}
    assert lines[:2] == ["container:mesh-0: peer 0", "container:mesh-1:/elsewhere: peer 1"]
    assert not folder.peer(0).checkpoint.exists()


def test_a_container_without_a_run_folder_is_named(engine, into, invoke):
    engine("mesh-0", 0)
    engine("mesh-1")
    outcome = invoke("collect", into, "container:mesh-0", "container:mesh-1")
    assert outcome.exit_code == 1
    assert outcome.stderr.splitlines()[-1] == (
        "container:mesh-1: cannot be read: Could not find the file /run/p2pfl/. in container mesh-1"
    )


@pytest.mark.parametrize("plugin", [True, False])
def test_a_compose_project_is_all_of_its_peers(tmp_path, engine, into, invoke, programs, monkeypatch, plugin):
    said = engine("mesh_peer-0_1", 0, service="peer-0")
    engine("mesh_peer-1_1", 1, service="peer-1", P2PFL_ME="1", P2PFL_RUN="/srv/run", at="/srv/run")
    engine("mesh_gpu-2_1", 2, service="gpu-2")
    engine("odd", 3, P2PFL_ME="3")
    engine("mesh_keys_1", service="keys")
    if plugin:
        (tmp_path / "containers" / "plugin").touch()
    else:
        said = programs("docker-compose", COMPOSE)
    file = tmp_path / "docker-compose.yml"
    file.touch()
    outcome = invoke("collect", into, "--compose", file)
    assert outcome.exit_code == 0
    folder = RunFolder.open(into)
    assert of(folder) == {0: "mesh_peer-0_1", 1: "mesh_peer-1_1", 2: "mesh_gpu-2_1", 3: "odd"}
    assert f"{'compose ' if plugin else ''}-f {file} ps -a -q" in said.read_text().splitlines()
    assert invoke("collect", into).exit_code == 0  # of the same project
    monkeypatch.chdir(tmp_path)
    assert invoke("collect", into, "--compose").exit_code == 0
    assert f"{'compose ' if plugin else ''}ps -a -q" in said.read_text().splitlines()
    assert folder.about["collected"]["sources"] == [f"compose:{tmp_path}"]


def test_a_project_of_which_nothing_was_started(tmp_path, engine, into, invoke, programs):
    programs("docker-compose", COMPOSE)
    outcome = invoke("collect", into, "--compose", tmp_path)
    assert outcome.exit_code == 1
    assert f"compose:{tmp_path}: no containers: nothing of this project was started" in outcome.stderr


def test_a_project_that_compose_does_not_know(tmp_path, into, invoke, programs):
    programs("docker", "exit 1")
    programs("docker-compose", "echo 'no configuration file provided: not found' >&2; exit 14")
    outcome = invoke("collect", into, "--compose", tmp_path)
    assert outcome.exit_code == 1
    assert f"compose:{tmp_path}: no configuration file provided: not found" in outcome.stderr
