"""Placing peers on hosts, hosts files, files received from hosts, and Slurm's texts."""

from __future__ import annotations

import base64
import dataclasses
import fcntl
import gc
import json
import os
import resource
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from launcher.backends import stop as stopping
from launcher.backends.group import Plan
from launcher.backends.host_files import files_of
from launcher.backends.hosts import Host, HostStream, place, ready, stream_of
from launcher.backends.mirror import Mirror
from launcher.backends.slurm.backend import cpus_per_node, has_gpu
from launcher.backends.slurm.scripts import batch_script
from launcher.backends.ssh.hosts_file import read_hosts
from launcher.errors import LaunchError
from launcher.facts.host_state import HostState
from launcher.facts.processes import HOST_LOST, outcome
from p2pfl.run_folder.folder import RunFolder, Status
from tests.launcher_fixtures import Invoke, MakeFolder


def placed(peers: int, *hosts: Host, **cores: int) -> dict[str, tuple[int, ...]]:
    return {host.name: host.peers for host in place(peers, hosts, cores)}


def test_places_consecutive_peers_by_cores_slots_and_weight() -> None:
    assert placed(6, Host("a"), Host("b"), a=4, b=2) == {"a": (0, 1, 2, 3), "b": (4, 5)}
    assert placed(6, Host("a"), Host("b", slots=8), a=4, b=2) == {"a": (0, 1), "b": (2, 3, 4, 5)}
    assert placed(4, Host("a", weight=0), Host("b", weight=0.5)) == {"b": (0, 1, 2, 3)}


def test_every_peer_is_placed_once_for_any_number_of_hosts() -> None:
    for peers in range(1, 24):
        for count in range(1, 9):
            found = placed(peers, *(Host(f"h{i}", weight=1 + i % 3) for i in range(count)))
            assert sorted(peer for mine in found.values() for peer in mine) == list(range(peers))


def test_peers_that_a_host_names_stay_there() -> None:
    found = placed(5, Host("a"), Host("b", peers=(0, 3)))
    assert found == {"a": (1, 2, 4), "b": (0, 3)}


def test_weights_do_not_matter_if_hosts_name_all_peers() -> None:
    assert placed(2, Host("a", peers=(0, 1)), Host("b", weight=0)) == {"a": (0, 1)}


@pytest.mark.parametrize(
    ("hosts", "error"),
    [
        ([Host("a", peers=(9,))], "host a: no peer 9; the 4 peers are 0 to 3"),
        ([Host("a", peers=(1,)), Host("b", peers=(1,))], "hosts a and b both name peer 1; name it once"),
        ([Host("a", weight=0)], "the weights of all hosts are 0"),
    ],
)
def test_names_what_cannot_be_placed(hosts: list[Host], error: str) -> None:
    with pytest.raises(LaunchError, match=error):
        place(4, hosts, {})


def test_reads_names_and_mappings_from_a_hosts_file(tmp_path: Path) -> None:
    path = tmp_path / "hosts.yaml"
    path.write_text(
        "- alpha\n"
        "- {name: me@beta, address: 10.0.0.2, slots: 4, gpus: [0, 2], peers: [0, 2-4], ssh: [-p, 2222],"
        " environment: {A: 1}}\n"
    )
    (alpha, beta), options = read_hosts(path)
    assert (alpha.name, alpha.peers, alpha.environment) == ("alpha", (), {})
    assert (beta.address, beta.slots, beta.peers) == ("10.0.0.2", 4, (0, 2, 3, 4))
    assert beta.environment == {"A": "1", "CUDA_VISIBLE_DEVICES": "0,2"}
    assert beta.command[:3] == ["env", "A=1", "CUDA_VISIBLE_DEVICES=0,2"]
    assert options == {"alpha": [], "me@beta": ["-p", "2222"]}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("alpha", "should be a list of hosts"),
        ("[]", "should be a list of hosts"),
        ("- [", "not YAML"),
        ("- alpha\n- alpha", ":2: host alpha is listed twice"),
        ("- {name: a, port: 3}", ":1: unknown key 'port'; expected one of name, address, python"),
        ("- a\n- {name: b, slots: 0}", ":2: slots: 0 should be a positive whole number"),
        ("- {name: b, peers: 1-}", "peers: '1-' should be peers, e.g. 3, 0-6"),
        ("- {name: -oProxyCommand=x}", "should be a name, user@host or address"),
        ("- {address: b}", "should be the name of a host, or a mapping with `name`"),
        ("- {name: b, environment: {'A=B': 1}}", "environment: {'A=B': 1} should be a mapping"),
    ],
)
def test_names_file_line_and_key_of_a_wrong_hosts_file(text: str, error: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts.yaml"
    path.write_text(text)
    with pytest.raises(LaunchError) as caught:
        read_hosts(path)
    assert error in str(caught.value)
    assert str(path) in str(caught.value)


def file_event(path: str, data: bytes | None, at: int = 0, **more: Any) -> dict[str, Any]:
    encoded = None if data is None else base64.b64encode(data).decode()
    return {"event": "file", "path": path, "at": at, "data": encoded, "clock": time.monotonic(), **more}


def test_files_of_a_host_grow_and_are_replaced(make_folder: MakeFolder) -> None:
    folder = make_folder(peers=2, results={0: None, 1: None})
    mirror, files = Mirror(folder, [1]), folder.peer(1)
    mirror.write(file_event("peers/01/peer.log", b"one\n"))
    mirror.write(file_event("peers/01/peer.log", b"two\n", at=4))
    assert mirror.sizes() == {"peers/01/peer.log": 8}
    mirror.write(file_event("peers/01/peer.log", b"", rotate=True))
    assert (files.log.read_text(), files.log.with_name("peer.log.1").read_text()) == ("", "one\ntwo\n")
    mirror.write(file_event("peers/01/result.json", b"{}"))
    mirror.write(file_event("peers/01/result.json", None))
    assert not (files.root / "result.json").exists()


def test_times_of_a_status_are_those_of_this_hosts_clock(make_folder: MakeFolder) -> None:
    folder = make_folder(peers=1, results={0: None})
    status = json.dumps(vars(Status(0, 7, "training", since=100.0))).encode()
    Mirror(folder, [0]).write({**file_event("peers/00/status.json", status), "clock": 130.0})
    found = folder.peer(0).status()
    assert found is not None
    assert 29 < time.monotonic() - found.since < 60


@pytest.mark.parametrize(
    "path", ["peers/00/peer.log", "peers/01/checkpoint.pt", "../x", "/etc/passwd", "peers/01/../../x", "run.yaml"]
)
def test_a_host_can_write_only_small_files_of_its_peers(path: str, make_folder: MakeFolder) -> None:
    folder = make_folder(peers=2)
    with pytest.raises(LaunchError, match="a file that belongs to none of its peers"):
        Mirror(folder, [1]).write(file_event(path, b"x"))


def test_sending_to_a_host_that_does_not_read_never_blocks() -> None:
    (read, write), (events, _other) = os.pipe(), os.pipe()
    stream = HostStream(write, events, lambda: "")
    stream.send(b"x" * (1 << 20))
    assert stream.unsent
    received = bytearray()
    while len(received) < 1 << 20:
        received += os.read(read, 1 << 16)
        stream.flush()
    assert not stream.unsent
    stream.close()
    os.close(read)
    os.close(_other)


@pytest.mark.exhaustive
def test_a_closed_stream_leaves_no_descriptor_open() -> None:
    gc.collect()  # others' descriptors are not closed meanwhile
    before = len(os.listdir("/proc/self/fd"))
    stream = stream_of(["sh", "-c", "echo no such host >&2"])
    assert stream.read() == b""
    assert stream.outcome() == "no such host"
    stream.close()
    assert len(os.listdir("/proc/self/fd")) == before


class SlowLauncher:
    """A launcher that has begun to follow its peers when it is told to stop, and takes long to stop them."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.signals: list[int] = []

    def send_signal(self, number: int) -> None:
        self.signals.append(number)
        HostState(1, {0: "alpha"}, answered=0).write(self.folder.root)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kill", [False, True])
def test_stop_of_a_starting_launcher_kills_peers_only_if_asked_to(
    kill: bool, make_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(peers=1, results={0: None})
    launcher, asked = SlowLauncher(folder), list[str]()

    def ask(root: Path, request: str) -> bool:
        asked.append(request)
        HostState(0).write(root)
        return True

    monkeypatch.setattr(HostState, "process", lambda self, root: launcher if self.launcher else None)
    monkeypatch.setattr(stopping, "ask", ask)
    HostState(1, answered=-1).write(folder.root)
    stopped = stopping.stop_on_hosts(folder, kill=kill, timeout=0.2)
    assert launcher.signals == [signal.SIGINT]
    assert asked == ["kill"] * kill
    assert [each.peer for each in stopped] == [0]
    assert (stopped[0].ended is None) == (not kill)


@pytest.mark.parametrize(("phase", "expected"), [("stopped", "stopped"), ("training", "failed: host beta is lost")])
def test_a_lost_hosts_peer_has_stopped_only_if_its_status_says_so(
    phase: Any, expected: str, make_folder: MakeFolder
) -> None:
    """A result without it is of an earlier launch."""
    files = make_folder(peers=1, results={0: {"phase": "stopped"}}).peer(0)
    files.write_status(Status(0, 1, phase))
    assert outcome(files, HOST_LOST, "host beta is lost") == expected


def test_hosts_get_only_what_a_run_needs(make_folder: MakeFolder, make_run: Any) -> None:
    folder = make_folder(peers=2, results={0: None})
    for name in ("plugins/mine/method.py", "files/a.npz", "tracking/wandb/x", "tensorboard/y", "warm.log", "z.html"):
        (folder.root / name).parent.mkdir(parents=True, exist_ok=True)
        (folder.root / name).write_bytes(name.encode())
    plan = dataclasses.replace(Plan.of(make_run()), insecure=True)
    host = Host("beta", peers=(0, 1))
    common = files_of(folder, plan, [host], {"beta": "192.0.2.1"}).common
    assert set(common) == {"run.yaml", "run.json", "plugins/mine/method.py", "files/a.npz"}
    assert common["files/a.npz"] == (b"files/a.npz", 0o644)


def test_a_peer_on_another_host_counts_as_running_only_while_that_is_known(make_folder: MakeFolder) -> None:
    folder = make_folder(peers=1, results={0: None})
    folder.peer(0).write_status(Status(0, 1, "training"))
    HostState(0, {0: "beta"}).write(folder.root)
    assert outcome(folder.peer(0)) == "running on host beta"
    HostState(2**22 + 1, {0: "beta"}).write(folder.root)
    assert outcome(folder.peer(0)) == "unknown: was running on host beta when the launcher ended"
    HostState(0, {}).write(folder.root)
    assert outcome(folder.peer(0)) == "died"
    assert HostState(os.getpid(), {0: "beta"}).process(folder.root) is None  # not a launcher


def test_understands_the_cpus_that_slurm_grants() -> None:
    assert cpus_per_node("4(x2),8", 3, "16") == [4, 4, 8]
    assert cpus_per_node("", 2, "8") == [4, 4]  # outside of the job
    assert cpus_per_node("4(x2)", 3, "2") == [1, 1, 1]


def test_only_granted_gpus_count() -> None:
    assert has_gpu({"TRES": "cpu=4,node=1,gres/gpu=1"})
    assert has_gpu({"TresPerNode": "gres:shard:2"})
    assert not has_gpu({"TRES": "cpu=4,mem=2G", "Comment": "gres/gpu"})


def test_the_batch_script_is_valid_bash_that_resumes_and_requeues(tmp_path: Path) -> None:
    import subprocess

    script = batch_script("mesh", tmp_path / "a b", ["my mesh.yaml", "--backend", "slurm"])
    checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
    assert checked.returncode == 0, checked.stderr
    # Without -P, modules in the folder where the job was submitted would be imported.
    for text in (
        " -P -m launcher.cli",
        "--signal=B:TERM@60",
        "--requeue",
        "scontrol requeue",
        'resume "$run"',
        "'my mesh.yaml'",
        "'/",
    ):
        assert text in script
    assert len({line for line in script.splitlines() if line.startswith("#SBATCH")}) == 8


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--hosts", "x.yaml"], "--hosts is for runs on other hosts: add --backend"),
        (["--backend", "slurm", "--hosts", "x.yaml"], "--hosts is not for --backend slurm"),
        (["--backend", "ssh", "--sbatch"], "backend ssh prints no batch scripts"),
        (["--backend", "pbs"], "unknown backend 'pbs'; installed: local, ray, slurm, ssh"),
        (["--host-dir", "x"], "--host-dir is for runs on other hosts"),
        (["--sbatch"], "--sbatch is for runs on other hosts: add --backend"),
        (["--backend", "slurm", "--sbatch", "--run-dir", "x"], "--sbatch chooses the run folder from the job's id"),
        (["--backend", "ssh"], "--backend ssh needs --hosts FILE"),
        (["--backend", "slurm"], "not inside a Slurm allocation"),
    ],
)
def test_options_that_do_not_fit_are_errors(
    arguments: list[str], error: str, invoke: Invoke, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    try:
        output = invoke("launch", file, *arguments).output
    except LaunchError as raised:
        output = str(raised)
    assert error in output
    assert not RunFolder(file.parent / "runs").root.exists()


def test_waits_for_descriptors_above_the_limit_of_select() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 1500 > before[1] != resource.RLIM_INFINITY:
        pytest.skip(f"the limit on open files is {before[1]}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(1500, before[0]), before[1]))
    one, other = socket.socketpair()
    high = fcntl.fcntl(one, fcntl.F_DUPFD, 1100)
    try:
        assert ready([high], [high], 0.0) == (set(), {high})
        other.send(b"x")
        assert ready([high]) == ({high}, set())
        os.read(high, 1)
        assert ready([high], timeout=0.0) == (set(), set())
        other.close()
        assert ready([high]) == ({high}, set())
    finally:
        os.close(high)
        one.close()
        other.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
