"""Which launcher follows a run on hosts, asked from other hosts; and what Slurm's jobs, restarts and files are."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
import yaml

from launcher.backends import hosts, several_hosts
from launcher.backends import refresh as refreshing
from launcher.backends import stop as stopping
from launcher.backends.follow import RestartPolicy
from launcher.backends.group import Plan
from launcher.backends.hosts import Host, HostStream
from launcher.backends.launch import resume
from launcher.backends.refresh import refresh
from launcher.backends.several_hosts import SeveralHosts
from launcher.backends.slurm import backend as slurm
from launcher.backends.stop import Stop, stop_on_hosts
from launcher.errors import HostsGone, LaunchError
from launcher.facts import host_state, registration
from launcher.facts.host_state import HostState, ask
from launcher.facts.processes import HOST_LOST, is_alive, outcome
from launcher.facts.registration import REQUESTS, Requests, register
from launcher.facts.runs import find_runs
from p2pfl.errors import WriteError
from p2pfl.run_folder import files
from p2pfl.run_folder.folder import RunFolder, Status
from tests.launcher_fixtures import Invoke, MakeFolder

ELSEWHERE = "another-host"


def stop_peers(folder: RunFolder) -> None:
    stop_on_hosts(folder, kill=False, timeout=1.0)


class Group:
    """A HostGroup of which one peer runs."""

    running: ClassVar = {0: 4711}

    def host_of(self, peer: int) -> str:
        return "beta"

    def events(self, timeout: float) -> list[Any]:
        return []

    def notices(self) -> list[str]:
        return []


def following(folder: RunFolder, requests: Requests) -> SeveralHosts:
    """Return hosts that are connected and have opened the run."""
    found = SeveralHosts("fixed", Fixed())
    found._group, found._folder, found._requests = Group(), folder, requests  # type: ignore[assignment]
    return found


def running_elsewhere(make_folder: MakeFolder) -> RunFolder:
    folder = make_folder(peers=1, results={0: None})
    folder.peer(0).write_status(Status(0, 4711, "training", 1, 1))
    HostState(4711, {0: "beta"}, ELSEWHERE).write(folder.root)
    return folder


@pytest.mark.exhaustive
def test_a_launcher_on_another_host_counts_as_alive_until_it_leaves_a_request_unanswered(
    make_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = running_elsewhere(make_folder)
    state = HostState.read(folder.root)
    assert state is not None
    assert state.process(folder.root) is None  # whatever process has this id here
    assert is_alive(folder, 0)
    assert outcome(folder.peer(0)) == "running on host beta"
    monkeypatch.setattr(host_state, "ask", lambda root, request: ask(root, request, timeout=0.2))
    assert not state.answers(folder.root)


@pytest.mark.exhaustive
def test_the_launcher_is_told_to_stop_or_kill_by_a_command_on_another_host(
    make_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(peers=1, results={0: None})
    signals: list[int] = []
    monkeypatch.setattr("os.kill", lambda pid, number: signals.append(number))
    monkeypatch.setattr(several_hosts, "REQUEST_INTERVAL", 0.0)
    monkeypatch.setattr("socket.gethostname", lambda: ELSEWHERE)  # so that no process is looked for
    remote = following(folder, Requests(folder.root))
    remote.events(0.0)
    answered: list[bool] = []
    for request, expected in (("answer", []), ("kill", [signal.SIGTERM, signal.SIGINT])):
        asking = threading.Thread(target=lambda request=request: answered.append(ask(folder.root, request)))
        asking.start()
        while asking.is_alive():
            remote.events(0.0)
        assert signals == expected
    assert answered == [True, True]
    remote._write_state(0)
    assert not ask(folder.root, "stop"), "nobody follows the run any more"


def test_a_full_disk_here_is_noted_once_and_the_state_is_written_later(
    make_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(peers=1, results={0: None})
    remote = following(folder, Requests(folder.root))

    def full(path: Path, value: object) -> None:
        raise WriteError(path, OSError(errno.ENOSPC, "No space left on device"))

    with monkeypatch.context() as patched:
        patched.setattr(host_state, "write_json", full)
        for _ in range(2):
            remote.events(0.0)
        remote._write_state(0)
    (line,) = remote.notices()
    assert "hosts.json: cannot be written: No space left on device" in line
    assert HostState.read(folder.root) is None
    remote.events(0.0)
    state = HostState.read(folder.root)
    assert state is not None
    assert state.running == {0: "beta"}
    assert remote.notices() == []


def test_a_launcher_answers_what_it_was_asked_while_it_was_starting(
    make_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch, until: Any
) -> None:
    """A start may take minutes: hosts are connected to, and load the data."""
    folder = make_folder(peers=1)
    monkeypatch.setattr(host_state, "set_title", lambda title: None)
    answered: list[bool] = []
    with host_state.starting(folder.root) as requests:
        state = HostState.read(folder.root)
        assert state is not None
        assert state.answered == -1
        replace(state, host=ELSEWHERE).write(folder.root)
        asking = threading.Thread(target=lambda: answered.append(ask(folder.root, "answer", timeout=0.0)))
        asking.start()
        until(lambda: (folder.root / REQUESTS).read_text() == "answer\n")
    following(folder, requests).events(0.0)
    asking.join()
    assert answered == [True]


def test_an_incomplete_request_waits_for_the_rest_of_its_line(tmp_path: Path) -> None:
    requests, path = Requests(tmp_path), tmp_path / REQUESTS
    path.write_bytes(b"sto")
    assert requests.new() == []
    path.write_bytes(b"stop\nki")
    assert (requests.new(), requests.answered) == (["stop"], 5)
    assert requests.new() == []


@pytest.mark.parametrize("fresh", [True, False])
def test_no_request_is_missed_once_the_launcher_can_be_found(
    fresh: bool, make_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(peers=1)
    registration.request(folder.root, "kill")  # of an earlier launcher
    monkeypatch.setattr(registration, "set_title", lambda title: registration.request(folder.root, "stop"))
    assert register(folder, fresh=fresh).new() == ["stop"]


def test_stop_is_refused_by_no_launcher_that_is_dead_and_resume_by_one_that_lives(
    make_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = running_elsewhere(make_folder)
    monkeypatch.setattr(host_state, "ask", lambda root, request: True)
    with pytest.raises(LaunchError, match=r"followed by another launcher \(process 4711 on host another-host\)"):
        SeveralHosts.of(folder, "never")
    monkeypatch.setattr(stopping, "ask", lambda root, request: False)

    def gone(folder: RunFolder) -> None:
        raise HostsGone("Slurm job 7 is TIMEOUT")

    monkeypatch.setattr(stopping, "look", gone)
    assert stop_on_hosts(folder, kill=True, timeout=1.0) == []
    assert outcome(folder.peer(0)) == "died"


def test_stop_says_that_a_launcher_on_another_host_may_still_be_starting(
    make_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(peers=2, results={0: None, 1: None})
    HostState(4711, {}, ELSEWHERE, -1).write(folder.root)
    monkeypatch.setattr(host_state, "START_TIMEOUT", 0.0)
    with pytest.raises(LaunchError, match=r"\(process 4711 on host another-host\) does not answer; if"):
        stop_peers(folder)

    def answer(root: Path, what: str) -> bool:
        HostState().write(root)
        return True

    monkeypatch.setattr(stopping, "ask", answer)
    assert stop_on_hosts(folder, kill=False, timeout=1.0) == [Stop(0, "never started"), Stop(1, "never started")]


@pytest.mark.parametrize("look", [refresh, stop_peers])
def test_a_look_does_not_hide_a_launcher_that_has_begun_meanwhile(
    look: Any, make_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(peers=1)
    HostState(2**22 + 1, {0: "beta"}).write(folder.root)
    begun = HostState(4711, {0: "gamma"}, ELSEWHERE, 5)

    def gone(folder: RunFolder) -> None:
        begun.write(folder.root)
        raise HostsGone("Slurm job 7 is TIMEOUT")

    for module in (refreshing, stopping):
        monkeypatch.setattr(module, "look", gone)
    look(folder)
    assert HostState.read(folder.root) == begun


def test_list_does_not_call_a_run_finished_whose_launcher_has_died(make_folder: MakeFolder, invoke: Invoke) -> None:
    folder = make_folder(peers=1, results={0: None})
    folder.peer(0).write_status(Status(0, 4711, "training", 1, 1))
    HostState(2**22 + 1, {0: "beta"}).write(folder.root)
    (line,) = find_runs(folder.root.parent)
    assert (line.state, line.alive) == ("unknown", 0)
    assert "unknown: p2pfl status asks its hosts" in invoke("list", folder.root.parent).output


def test_no_policy_asks_a_lost_host_again_and_again(make_folder: MakeFolder) -> None:
    folder = make_folder(peers=1, results={0: None})
    assert not RestartPolicy(folder, "always").restarts(0, HOST_LOST, "host beta is lost")
    assert RestartPolicy(folder, "always").restarts(0, 1, "an error")


# ---- what run.json has of the hosts ------------------------------------------------------------------------------


class Fixed:
    """A backend whose hosts are on nodes that the test chooses."""

    def __init__(self, *found: Host) -> None:
        self.found = list(found)

    def hosts(self) -> list[Host]:
        return self.found

    def start(self, host: Host, command: Sequence[str]) -> HostStream:
        raise LaunchError("unreachable")

    def saved(self) -> dict[str, Any]:
        return {"ssh": {}}

    def close(self) -> None:
        pass


def test_only_the_owner_can_read_the_values_of_variables(
    make_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(peers=2)
    before = [Host("alpha", peers=(0,)), Host("beta", peers=(1,), environment={"TOKEN": "secret"})]
    hosts.save(folder, "fixed", Fixed(), before)
    assert "secret" not in (folder.root / "run.json").read_text()
    assert folder.info["hosts"]["hosts"][1]["environment"] == ["TOKEN"]
    path = folder.root / hosts.ENVIRONMENT
    assert path.stat().st_mode & 0o777 == 0o600
    assert hosts.hosts_from(folder) == before
    with monkeypatch.context() as patch:
        patch.setattr(files, "write_all", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
        with pytest.raises(WriteError, match="No space left on device"):
            hosts.save(folder, "fixed", Fixed(), [before[0], replace(before[1], environment={"TOKEN": "another"})])
    assert hosts.hosts_from(folder) == before  # a write that fails loses nothing
    path.unlink()
    with pytest.raises(LaunchError, match="no value of TOKEN of host beta"):
        hosts.hosts_from(folder)


def test_a_resume_that_fails_does_not_change_where_the_run_is(
    make_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(peers=2)
    hosts.save(folder, "fixed", Fixed(), [Host("alpha", peers=(0, 1))])
    before = folder.info
    order: list[str] = []

    def restore(saved: object) -> Fixed:
        order.append("restore")
        return Fixed(Host("gamma"))

    def check(function: object) -> None:
        order.append("check the run file")
        raise LaunchError("stop here")

    monkeypatch.setattr(hosts, "restore", restore)
    monkeypatch.setattr(several_hosts, "in_child", check)
    with pytest.raises(LaunchError, match="stop here"):
        resume(folder, (), None)  # type: ignore[arg-type]
    assert order == ["restore", "check the run file"], "no host is started for a run file with mistakes"
    monkeypatch.setattr(several_hosts, "in_child", lambda function: (plan(), [0, 1], [0, 1]))
    monkeypatch.setattr(several_hosts, "this_version", dict)
    with pytest.raises(LaunchError, match="host gamma: unreachable"):
        resume(folder, (), None)  # type: ignore[arg-type]
    assert folder.info == before


def plan() -> Plan:
    return Plan(
        peers=2, rounds=3, neighbors=((1,), (0,)), bind="127.0.0.1", port=None, has_addresses=False, keys=None,
        insecure=True, copied=False, slots=None, threads=1, mps=False, peers_per_gpu=None,
    )  # fmt: skip


# ---- Slurm -------------------------------------------------------------------------------------------------------

JOB = "JobId={} JobState={} NumCPUs=8 NodeList=n[1-2] TRES=cpu=8\n"


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The states of Slurm's jobs, by number."""
    states: dict[str, str] = {}

    def scontrol(*arguments: str) -> str:
        if arguments[:2] == ("show", "hostnames"):
            return "n1\nn2\n"
        if arguments[1] == "node":
            return f"NodeName={arguments[2]} NodeAddr=10.0.0.{arguments[2][1]}\n"
        if arguments[2] not in states:
            raise LaunchError("scontrol show job: slurm_load_jobs error: Invalid job id specified")
        return "".join(JOB.format(*job) for job in states.items())  # as for the last task of an array

    monkeypatch.setattr(slurm, "_scontrol", scontrol)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return states


def test_stop_and_status_use_the_job_of_the_run_also_inside_of_another(
    jobs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Sequence[str]] = []
    monkeypatch.setattr(slurm, "stream_of", started.append)
    jobs |= {"7": "RUNNING", "9": "RUNNING"}
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    slurm.Slurm.restore({"job": "7"}).start(Host("n1"), ["python"])
    assert "--jobid=7" in started[0]


def test_resume_moves_to_the_allocation_it_is_in_once_the_old_one_has_ended(
    jobs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs |= {"7": "RUNNING", "9": "RUNNING"}
    inside = slurm.Slurm.restore({"job": "7"})
    assert [host.cores for host in inside.hosts()] == [4, 4]  # from a shell outside of the job
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", "6,2")
    for alive in ("SUSPENDED", "RUNNING"):  # a suspended job goes on later
        jobs["7"] = alive
        with pytest.raises(LaunchError, match="may run in Slurm job 7, which has not ended, and this is job 9"):
            inside.hosts()
    for state in ("TIMEOUT", None):
        jobs.pop("7")
        jobs |= {} if state is None else {"7": state}
        backend = slurm.Slurm.restore({"job": "7"})
        assert [(host.name, host.cores) for host in backend.hosts()] == [("n1", 6), ("n2", 2)]
        assert backend.saved() == {"job": "9"}


def test_a_job_that_has_ended_says_how_to_go_on(jobs: dict[str, str]) -> None:
    jobs["7"] = "TIMEOUT"
    with pytest.raises(LaunchError, match=r"Slurm job 7 is TIMEOUT: resume the run in another allocation, `salloc"):
        slurm.Slurm.restore({"job": "7"}).hosts()
    with pytest.raises(HostsGone, match="Slurm job 8 has ended"):
        slurm.Slurm.restore({"job": "8"}).start(Host("n1"), ["python"])


def test_a_requeued_job_keeps_the_options_of_the_launch(invoke: Invoke, file: Path) -> None:
    options = ["--restart", "always", "--metrics-port", "9100", "--json"]
    output = invoke("launch", file, "--backend", "slurm", "--sbatch", *options).output
    resumed = next(line for line in output.splitlines() if "launcher.cli resume " in line)
    assert resumed.endswith('resume "$run" --restart=always --json --metrics-port=127.0.0.1:9100 &')


def test_the_array_has_a_task_for_each_unfinished_run(tmp_path: Path) -> None:
    script = slurm.Slurm.array_script(tmp_path / "a b%", [0, 2, 3, 4], 2)
    assert "#SBATCH --job-name='a b%'\n" in script
    assert "#SBATCH --array=0,2-4%2\n" in script
    assert f"--output='{tmp_path}/a b%%/logs/slurm-%A_%a.out'\n" in script
    assert f"sweep '{tmp_path}/a b%' --task \"$SLURM_ARRAY_TASK_ID\" &\n" in script
    assert "scontrol requeue incomplete" in script


def test_only_runs_with_fixed_values_can_be_an_array(invoke: Invoke, file: Path, tmp_path: Path) -> None:
    arguments = ["sweep", file, "--seeds", 2, "--simulate", "--out", tmp_path / "s"]
    assert "leave out --backend" in invoke(*arguments, "--backend", "slurm").output
    assert "#SBATCH --array=0-1\n" in invoke(*arguments, "--sbatch").output
    assert "no run number 2: the 2 runs are 0 to 1" in invoke("sweep", tmp_path / "s", "--task", 2).output
    plain = yaml.safe_load((tmp_path / "s" / "sweep.yaml").read_text())
    (tmp_path / "s" / "sweep.yaml").write_text(yaml.safe_dump({**plain, "search": {"space": {}}}))
    assert "a search cannot be a job array" in invoke("sweep", tmp_path / "s", "--task", 0).output
