"""Run a mesh in containers, with faults and without, and compare it with `p2pfl simulate`.

    scripts/check-compose                       # build the image, then run all trials
    scripts/check-compose --image p2pfl cut     # run one trial with an existing image

    calm     no fault; once with each installed version of compose
    died     a peer's process is killed; the engine restarts its container
    killed   a container is killed, and restarted when its neighbors have noticed
    cut      a container is disconnected from the network, and reconnected at another address when its neighbors have
             noticed

The mesh is that of docker-compose.yml. Each trial starts from scratch and leaves only the image. The fault happens in
the middle of the run.

Exit codes: 0 all trials passed, 1 one failed, 3 no container engine found.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import click

from launcher.backends.container_files import RUN as IN_CONTAINER
from launcher.facts.summary import settings
from p2pfl import PeerId
from p2pfl.run_folder.folder import PeerFolder, Result, RunFolder
from p2pfl.session import metrics

CLONE = Path(__file__).parent.parent
COMPOSE_FILE = CLONE / "docker-compose.yml"
RUN_FILE = CLONE / "topologies" / "mesh8.yaml"

VICTIM: PeerId = 3
ROUNDS_BEFORE = 5
"""Rounds that the victim has done when the fault happens. So early all peers exchange with all, so all notice."""
EVENT_LIMIT = 120.0
"""Maximum seconds for what usually takes up to 30 s: failing heartbeats, a successful health check."""
RUN_LIMIT = 900.0
"""Maximum seconds for a run, and for its start-up."""
POLL_INTERVAL = 0.1


class Failed(click.ClickException):
    """A trial has failed."""


class NoEngine(click.ClickException):
    """No container engine was found."""

    exit_code = 3


# ---- commands ------------------------------------------------------------------------------------------------


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the repository, in a new session: Ctrl-C must reach only this process, which cleans up."""
    return subprocess.run(
        command, cwd=CLONE, stdin=subprocess.DEVNULL, capture_output=True, text=True, start_new_session=True
    )


def output(*command: str) -> str:
    """Return what a command prints; raise Failed if it fails."""
    done = run(*command)
    if done.returncode:
        raise Failed(f"{shlex.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}".rstrip())
    return done.stdout.strip()


def p2pfl(*arguments: object) -> str:
    return output(sys.executable, "-m", "launcher.cli", *map(str, arguments))


def inspect(*containers: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(output("docker", "inspect", *containers))
    return found


def wait_until(condition: Callable[[], object], what: str, seconds: float = EVENT_LIMIT) -> float:
    """Wait until ``condition()`` is true and return the seconds it took; raise Failed after ``seconds``."""
    began = monotonic()
    while not condition():
        if monotonic() - began > seconds:
            raise Failed(f"not within {seconds:g} s: {what}")
        sleep(POLL_INTERVAL)
    return monotonic() - began


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore further signals during the cleanup."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def copy_from(container: str, into: Path) -> None:
    """Copy the run folder of a container, running or not."""
    output("docker", "cp", f"{container}:{IN_CONTAINER}/.", str(into))


# ---- the mesh ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mesh:
    """The peers of one trial. ``containers``: the container id of each peer."""

    name: str
    image: str
    containers: Sequence[str]
    rounds: int
    scratch: Path

    @property
    def others(self) -> list[PeerId]:
        return [peer for peer in range(len(self.containers)) if peer != VICTIM]

    def folder(self, peer: PeerId) -> PeerFolder:
        """Fetch the files of a peer, whether or not its container is running."""
        into = Path(tempfile.mkdtemp(dir=self.scratch))
        copy_from(self.containers[peer], into)
        return RunFolder(into).peer(peer)

    def rounds_done(self, peer: PeerId) -> int:
        files = self.folder(peer)
        return len(metrics.read(files.metrics)) if files.metrics.exists() else 0

    def has_lost_the_victim(self, peer: PeerId) -> bool:
        return f"connection lost peer={VICTIM}\n" in self.folder(peer).log.read_text(encoding="utf-8")

    def health(self, peer: PeerId) -> str:
        """Return a peer's answer to `python -m peers --health`."""
        return output("docker", "exec", self.containers[peer], "python", "-P", "-m", "peers", "--health")

    def are_healthy(self, peers: Sequence[PeerId]) -> bool:
        """Whether the engine's health checks succeed; it runs them every 15 seconds."""
        found = inspect(*(self.containers[peer] for peer in peers))
        return all(state["State"]["Health"]["Status"] == "healthy" for state in found)

    def have_finished(self) -> bool:
        """Whether all containers have exited with code 0; raise Failed if one has another code."""
        states = [found["State"] for found in inspect(*self.containers)]
        for peer, state in enumerate(states):
            if state["Status"] == "exited" and state["ExitCode"]:
                raise Failed(f"peer {peer} ended with exit code {state['ExitCode']}")
        return all(state["Status"] == "exited" for state in states)

    def restarts(self) -> list[int]:
        """Return how often the engine restarted each container."""
        return [found["RestartCount"] for found in inspect(*self.containers)]

    def victim_network(self) -> tuple[str, str]:
        """Return the victim's network, and its address there."""
        (found,) = inspect(self.containers[VICTIM])
        ((network, endpoint),) = found["NetworkSettings"]["Networks"].items()
        return network, endpoint["IPAddress"]


@contextmanager
def started(compose: Sequence[str], name: str, image: str, expected: RunFolder, scratch: Path) -> Iterator[Mesh]:
    """Start the mesh with ``compose up`` under its own project name, and remove it afterwards."""
    project = (*compose, "--project-name", name, "--file", str(COMPOSE_FILE))
    run_settings = settings(expected)
    labels = [f"label=com.docker.compose.project={name}", "label=com.docker.compose.service=peer-{}"]
    find = (
        "docker",
        "ps",
        "--all",
        "--quiet",
        "--no-trunc",
        *(part for label in labels for part in ("--filter", label)),
    )
    try:
        output(*project, "up", "--detach", "--no-build")
        containers = [output(*(part.format(peer) for part in find)) for peer in range(run_settings["peers"])]
        yield Mesh(name, image, containers, run_settings["rounds"], scratch)
    except Failed:
        click.echo(run(*project, "logs", "--tail=10").stdout, err=True)
        raise
    finally:
        with uninterrupted():
            output(*project, "down", "--volumes", "--timeout", "0")


@contextmanager
def container(name: str, *arguments: str) -> Iterator[None]:
    """Start another container with the arguments of `docker run`, and remove it afterwards."""
    try:
        output("docker", "run", "--name", name, *arguments)
        yield
    finally:
        with uninterrupted():
            run("docker", "rm", "--force", "--volumes", name)


# ---- faults, each described in the sentence it returns -------------------------------------------------------


def died(mesh: Mesh) -> str:
    status = mesh.folder(VICTIM).status()
    assert status is not None
    output("docker", "exec", mesh.containers[VICTIM], "sh", "-c", f"kill -KILL {status.pid}")
    noticed = _wait_until_noticed(mesh)
    wait_until(lambda: mesh.restarts()[VICTIM] == 1, "the engine restarts the container")
    return f"its process was killed {noticed}; the engine restarted the container"


def killed(mesh: Mesh) -> str:
    output("docker", "kill", mesh.containers[VICTIM])
    noticed = _wait_until_noticed(mesh)
    _check_others(mesh)
    output("docker", "start", mesh.containers[VICTIM])
    return f"its container was killed {noticed}, and restarted"


def cut(mesh: Mesh) -> str:
    victim = mesh.containers[VICTIM]
    network, before = mesh.victim_network()
    output("docker", "network", "disconnect", network, victim)
    noticed = _wait_until_noticed(mesh)
    _check_others(mesh)
    wait_until(lambda: _connected(mesh, VICTIM, 0), f"peer {VICTIM} has lost all connections")
    # Take the free address: some engines would assign it again.
    name, command = f"{mesh.name}-another", ("--entrypoint", "sleep", mesh.image, "infinity")
    with container(name, "--detach", "--init", "--network", network, *command):
        output("docker", "network", "connect", "--alias", f"peer-{VICTIM}", network, victim)
    after = mesh.victim_network()[1]
    if before == after:
        raise Failed(f"the engine gave peer {VICTIM} its old address {after} again")
    return f"it was disconnected {noticed}, and reconnected as {after} instead of {before}"


FAULTS: dict[str, Callable[[Mesh], str]] = {"died": died, "killed": killed, "cut": cut}


def _wait_until_noticed(mesh: Mesh) -> str:
    """Wait until all neighbors have noticed the fault; check that the run was in its middle."""
    event = f"all neighbors have lost the connection to peer {VICTIM}"
    seconds = wait_until(lambda: all(map(mesh.has_lost_the_victim, mesh.others)), event)
    done = mesh.rounds_done(VICTIM)
    if not 0 < done < mesh.rounds:
        raise Failed(f"the fault happened after {done} of {mesh.rounds} rounds, not in the middle of the run")
    return f"after {done} of {mesh.rounds} rounds, noticed by {len(mesh.others)} neighbors {seconds:.1f} s later"


def _check_others(mesh: Mesh) -> None:
    """Check that the other peers wait, connected to each other, and that the engine finds them healthy."""
    wait_until(lambda: mesh.are_healthy(mesh.others), "the engine finds the other peers healthy")
    for peer in mesh.others:
        if not _connected(mesh, peer, len(mesh.others) - 1):
            raise Failed(f"a peer is not connected to all but one: {mesh.health(peer)}")


def _connected(mesh: Mesh, peer: PeerId, count: int) -> bool:
    return mesh.health(peer).endswith(f" {count} of {len(mesh.others)} neighbors connected")


# ---- trials --------------------------------------------------------------------------------------------------


def simulated(image: str, name: str, scratch: Path) -> RunFolder:
    """Simulate the run in one container."""
    file = f"/etc/p2pfl/{RUN_FILE.name}"
    command = ("--entrypoint", "p2pfl", image, "simulate", file, "--run-dir", f"{IN_CONTAINER}/simulated")
    with container(name, "--network", "none", "--volume", f"{RUN_FILE}:{file}:ro", *command):
        copy_from(name, scratch / "container")
    return RunFolder.open(scratch / "container" / "simulated")


def trial(
    compose: Sequence[str], fault: str | None, name: str, image: str, expected: RunFolder, scratch: Path
) -> str:
    """Run the mesh with a fault and describe the outcome; raise Failed if it differs from ``expected``."""
    began = monotonic()
    with started(compose, name, image, expected, scratch) as mesh:
        outcome = "no fault"
        if fault is not None:
            wait_until(
                lambda: mesh.rounds_done(VICTIM) >= ROUNDS_BEFORE,
                f"peer {VICTIM} has done {ROUNDS_BEFORE} rounds",
                RUN_LIMIT,
            )
            outcome = f"peer {VICTIM}: {FAULTS[fault](mesh)}"
        wait_until(mesh.have_finished, "all peers have finished", RUN_LIMIT)
        seconds = monotonic() - began
        restarts = [int(fault == "died" and peer == VICTIM) for peer in range(len(mesh.containers))]
        if mesh.restarts() != restarts:
            raise Failed(f"the engine restarted containers {mesh.restarts()} times; expected {restarts}")
        into, copies = (Path(tempfile.mkdtemp(dir=scratch)) for _ in range(2))
        for peer, container_id in enumerate(mesh.containers):
            copy_from(container_id, copies / str(peer))
        p2pfl("collect", into, copies)
    p2pfl("digest", into, expected.root)
    for files in expected.peers():
        result, right = _result(RunFolder(into).peer(files.peer)), _result(files)
        if result.missing or result.skipped_rounds:
            raise Failed(
                f"peer {files.peer}: {result.missing} messages missing, {result.skipped_rounds} rounds skipped"
            )
        if (result.sent, result.received) != (right.sent, right.received):
            raise Failed(f"peer {files.peer}: byte counts differ from the simulation")
    return f"{outcome}; same bits, same byte counts, no message missing; {seconds:.0f} s"


def _result(files: PeerFolder) -> Result:
    result = files.result()
    if result is None:
        raise Failed(f"peer {files.peer} wrote no result")
    return result


def engine() -> str:
    """Return the version of the container engine; raise NoEngine if there is none."""
    try:
        done = run("docker", "version", "--format", "{{.Server.Version}}")
    except OSError as error:
        raise NoEngine(f"no engine: docker: {error.strerror}") from None
    if done.returncode:
        raise NoEngine(f"no engine: {(done.stderr or done.stdout).strip()}")
    return done.stdout.strip()


def composes() -> dict[str, tuple[str, ...]]:
    """Return {version: command} of the installed versions of compose; raise NoEngine if there is none."""
    found: dict[str, tuple[str, ...]] = {}
    for command in (("docker", "compose"), ("docker-compose",)):
        try:
            done = run(*command, "version", "--short")
        except OSError:
            continue
        if not done.returncode:
            found[done.stdout.strip()] = command
    if not found:
        raise NoEngine("no compose: neither `docker compose` nor `docker-compose` found")
    return found


@click.command(help=__doc__)
@click.argument("trials", nargs=-1, type=click.Choice(["calm", *FAULTS]))
@click.option("--image", envvar="P2PFL_IMAGE", help="Image to use; default: build it, as `docker compose up` does.")
def main(trials: Sequence[str], image: str | None) -> None:
    version, programs = engine(), composes()
    (newest, compose), *_ = programs.items()
    name = f"p2pfl-check-{os.getpid()}"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # Read by compose; no profile: without GPUs.
    os.environ |= {"COMPOSE_PROJECT_NAME": name, "COMPOSE_PROFILES": ""}
    built = ""
    if image is None:
        began = monotonic()
        output(*compose, "--file", str(COMPOSE_FILE), "build", "keys")
        image, built = "p2pfl", f", built in {monotonic() - began:.0f} s"
    os.environ["P2PFL_IMAGE"] = image
    size = int(output("docker", "image", "inspect", "--format", "{{.Size}}", image))
    click.echo(f"engine {version}; image {image}: {size / 1e9:.2f} GB{built}")
    with tempfile.TemporaryDirectory() as root:
        scratch = Path(root)
        began = monotonic()
        expected = simulated(image, name, scratch)
        run_settings = settings(expected)
        click.echo(
            f"simulate: {run_settings['peers']} peers, {run_settings['rounds']} rounds; {monotonic() - began:.0f} s"
        )
        for trial_name in trials or ("calm", *FAULTS):
            for number, command in programs.items() if trial_name == "calm" else [(newest, compose)]:
                fault = None if trial_name == "calm" else trial_name
                outcome = trial(command, fault, name, image, expected, scratch)
                click.echo(f"{trial_name}, {' '.join(command)} {number}: {outcome}")


if __name__ == "__main__":
    main()
