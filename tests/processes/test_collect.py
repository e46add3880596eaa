"""`p2pfl collect` killed at any point, and from other hosts and containers, with fake ssh and docker."""

from __future__ import annotations

import io
import json
import os
import shutil
import stat
import sys
import tarfile
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from launcher.facts.processes import find_process
from p2pfl.run_folder.folder import RunFolder
from tests.launcher_fixtures import Host, Invoke, gather, hosts_by_peer

# ---- interruptions

CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir"}


def killed_at(change: int, do: Callable[[], object]) -> bool:
    """Run ``do`` in a child process that is killed before that change to a folder. Return whether it got there."""
    child = os.fork()
    if child == 0:
        remaining = change

        def before(event: str, arguments: object) -> None:
            nonlocal remaining
            if event in CHANGES:
                remaining -= 1
                if remaining < 0:
                    os._exit(9)

        try:
            sys.addaudithook(before)
            do()
            os._exit(0)
        finally:
            os._exit(1)  # or pytest would run twice
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9)
    return code == 9


def test_an_update_killed_at_any_point_loses_nothing(host: Host, into: Path) -> None:
    old, new, other = host("old", 0, 1, rounds=1), host("new", 0, 1), host("other", 2)
    gather(into, old.root)
    for change in count():
        shutil.copytree(into, copy := into.with_name(f"copy{change}"))
        if not killed_at(change, partial(gather, copy, new.root)):
            break
        found = hosts_by_peer(RunFolder.open(copy))
        assert len(found) >= 1  # the other may be about to be replaced
        assert found.items() <= {(peer, name) for peer in (0, 1) for name in ("old", "new")}
        folder, _ = gather(copy, other.root)
        assert {peer: name in ("old", "new") for peer, name in hosts_by_peer(folder).items() if peer < 2} == {
            0: True,
            1: True,
        }
        assert hosts_by_peer(folder)[2] == "other"
        assert sorted(path.name for path in copy.iterdir()) == ["peers", "run.json", "run.yaml", "summary.json"]
        assert sorted(path.name for path in (copy / "peers").iterdir()) == ["00", "01", "02", "03"]
    assert change > 20
    assert hosts_by_peer(RunFolder.open(copy)) == {0: "new", 1: "new"}


def test_a_first_collection_killed_at_any_point_can_be_repeated(host: Host, into: Path) -> None:
    one = host("one", 0, 1)
    for change in count():
        copy = into.with_name(f"copy{change}")
        if not killed_at(change, partial(gather, copy, one.root)):
            break
        assert hosts_by_peer(gather(copy, one.root)[0]) == {0: "one", 1: "one"}
    assert change > 10


def test_a_collected_process_id_matches_no_local_process(host: Host, into: Path, make_process: Any) -> None:
    collection, _ = gather(into, host("one", 0, phase="training", rounds=1).root)
    process = make_process(collection, 0)  # with the title of a peer of this very folder
    assert find_process(collection, 0) is None
    process.kill()


# ---- other hosts

SSH = """
    # The last two arguments are the host and a command for its shell. Its home is the parent folder of bin.
    cd "$(dirname "$0")/.." && eval "${@: -1}"
"""


def test_fetches_only_the_wanted_files_over_ssh(tmp_path: Path, host: Host, into: Path, programs: Any) -> None:
    host("far away", 0, 1)
    calls = programs("ssh", SSH)
    folder, lines = gather(into, "ann@alpha:hosts/far away", "[fd00::2]:~/hosts/far away")
    assert hosts_by_peer(folder) == {0: "away", 1: "away"}
    assert lines[:2] == ["ann@alpha:hosts/far away: peers 0-1", "[fd00::2]:~/hosts/far away: peers 0-1"]
    first, second = calls.read_text().splitlines()
    assert "-o ConnectTimeout=20 " in first
    assert " -- ann@alpha tar -C 'hosts/far away' " in first
    assert "'--exclude=checkpoint*'" in first
    assert "--exclude=journal" in first
    assert " -- fd00::2 tar -C 'hosts/far away' " in second
    assert gather(into, "alpha:hosts", checkpoints=True)[0].peer(0).checkpoint.exists()
    assert "checkpoint" not in calls.read_text().splitlines()[-1]


def test_fetches_several_run_folders_of_a_host(host: Host, into: Path, programs: Any) -> None:
    host("one", 0), host("two", 1, 2)
    programs("ssh", SSH)
    folder, lines = gather(into, "alpha:hosts")
    assert lines == ["alpha:hosts/one: peer 0", "alpha:hosts/two: peers 1-2"]
    origin = folder.peer(2).origin()
    assert origin is not None
    assert origin.source == "alpha:hosts/two"
    assert hosts_by_peer(gather(into)[0]) == hosts_by_peer(folder)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("echo 'ssh: connect to host alpha: Connection refused' >&2; exit 255", "ssh: connect to host alpha: Conn"),
        (
            "tar -C $(dirname $0)/../hosts/one -cf - . | head -c 5000; exit 255",
            "incomplete or invalid tar archive: unexpected",
        ),
        ("tar -C $(dirname $0)/../hosts/one -cf - .; exit 255", "ssh: exit code 255"),
        ("echo hello", "incomplete or invalid tar archive: "),
        ("tar -C $(dirname $0) -cf - .", "contains no run folder"),
        ("exit 0", "incomplete or invalid tar archive: empty file"),
    ],
)
def test_ignores_files_of_a_host_whose_transfer_failed(
    host: Host, into: Path, programs: Any, invoke: Invoke, body: str, reason: str
) -> None:
    one, two = host("one", 0), host("two", 1)
    programs("ssh", body)
    outcome = invoke("collect", into, two.root, "alpha:x")
    assert outcome.exit_code == 1
    assert outcome.stderr.splitlines()[-1].startswith(f"alpha:x: cannot be read: {reason}")
    assert hosts_by_peer(RunFolder.open(into)) == {1: "two"}
    assert one.peer(0).log.exists()


def test_tolerates_files_that_grow_while_tar_reads_them(host: Host, into: Path, programs: Any) -> None:
    host("one", 0)
    programs("ssh", SSH + '\necho "tar: ./peers/00/peer.log: file changed as we read it" >&2; exit 1')
    assert hosts_by_peer(gather(into, "alpha:hosts/one")[0]) == {0: "one"}


def test_ignores_unexpected_members_of_a_malicious_archive(
    tmp_path: Path, host: Host, into: Path, programs: Any
) -> None:
    one = host("one", 0)
    archive = tmp_path / "evil.tar"
    with tarfile.open(archive, "w") as tar:

        def add(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", content: bytes = b"evil") -> None:
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.mode = kind, link, 0o6777
            member.size = len(content) if kind == tarfile.REGTYPE else 0
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
    assert hosts_by_peer(folder) == {0: "good"}
    assert stat.S_IMODE(folder.peer(0).log.stat().st_mode) & 0o7022 == 0
    assert not [path for path in tmp_path.rglob("*evil*") if path != archive]
    assert not any(path.is_symlink() for path in into.rglob("*"))
    assert not (folder.peer(0).root / "output.log").exists()


def test_reports_that_ssh_is_not_installed(
    into: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, invoke: Invoke
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    outcome = invoke("collect", into, "alpha:x")
    assert outcome.exit_code == 1
    assert "alpha:x: ssh: No such file or directory" in outcome.stderr


# ---- containers

DOCKER = """
    # Containers are folders beside bin; fs is their file system.
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
def engine(tmp_path: Path, host: Host, programs: Any) -> Callable[..., Path]:
    """Start fake Docker containers, each with an environment and the run folder of its peers."""
    containers = tmp_path / "containers"
    containers.mkdir()
    (containers / "ids").touch()
    calls: Path = programs("docker", DOCKER.replace("COMPOSE", COMPOSE.strip()))

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
        return calls

    return start


def test_collects_from_containers(engine: Any, into: Path) -> None:
    engine("mesh-0", 0)
    engine("mesh-1", 1, at="/elsewhere")
    folder, lines = gather(into, "container:mesh-0", "container:mesh-1:/elsewhere")
    assert hosts_by_peer(folder) == {0: "mesh-0", 1: "mesh-1"}
    assert lines[:2] == ["container:mesh-0: peer 0", "container:mesh-1:/elsewhere: peer 1"]
    assert not folder.peer(0).checkpoint.exists()


def test_reports_a_container_without_a_run_folder(engine: Any, into: Path, invoke: Invoke) -> None:
    engine("mesh-0", 0)
    engine("mesh-1")
    outcome = invoke("collect", into, "container:mesh-0", "container:mesh-1")
    assert outcome.exit_code == 1
    assert outcome.stderr.splitlines()[-1] == (
        "container:mesh-1: cannot be read: Could not find the file /run/p2pfl/. in container mesh-1"
    )


@pytest.mark.parametrize("plugin", [True, False])
def test_collects_from_all_peers_of_a_compose_project(
    tmp_path: Path,
    engine: Any,
    into: Path,
    invoke: Invoke,
    programs: Any,
    monkeypatch: pytest.MonkeyPatch,
    plugin: bool,
) -> None:
    calls = engine("mesh_peer-0_1", 0, service="peer-0")
    engine("mesh_peer-1_1", 1, service="peer-1", P2PFL_ME="1", P2PFL_RUN="/srv/run", at="/srv/run")
    engine("mesh_gpu-2_1", 2, service="gpu-2")
    engine("odd", 3, P2PFL_ME="3")
    engine("mesh_keys_1", service="keys")
    if plugin:
        (tmp_path / "containers" / "plugin").touch()
    else:
        calls = programs("docker-compose", COMPOSE)
    file = tmp_path / "docker-compose.yml"
    file.touch()
    outcome = invoke("collect", into, "--compose", file)
    assert outcome.exit_code == 0
    folder = RunFolder.open(into)
    assert hosts_by_peer(folder) == {0: "mesh_peer-0_1", 1: "mesh_peer-1_1", 2: "mesh_gpu-2_1", 3: "odd"}
    assert f"{'compose ' if plugin else ''}-f {file} ps -a -q" in calls.read_text().splitlines()
    assert invoke("collect", into).exit_code == 0  # of the same project
    monkeypatch.chdir(tmp_path)
    assert invoke("collect", into, "--compose").exit_code == 0
    assert f"{'compose ' if plugin else ''}ps -a -q" in calls.read_text().splitlines()
    assert folder.info["collected"]["sources"] == [f"compose:{tmp_path}"]


def test_reports_a_compose_project_without_containers(
    tmp_path: Path, engine: Any, into: Path, invoke: Invoke, programs: Any
) -> None:
    programs("docker-compose", COMPOSE)
    outcome = invoke("collect", into, "--compose", tmp_path)
    assert outcome.exit_code == 1
    assert f"compose:{tmp_path}: no containers: this project has not been started" in outcome.stderr


def test_reports_an_error_of_compose(tmp_path: Path, into: Path, invoke: Invoke, programs: Any) -> None:
    programs("docker", "exit 1")
    programs("docker-compose", "echo 'no configuration file provided: not found' >&2; exit 14")
    outcome = invoke("collect", into, "--compose", tmp_path)
    assert outcome.exit_code == 1
    assert f"compose:{tmp_path}: no configuration file provided: not found" in outcome.stderr
